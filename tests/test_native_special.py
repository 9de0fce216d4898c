"""The native families for depthwise, grouped and few-channel convolutions, each forced in turn where it can serve."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest

import convgrad
from convgrad import Problem, Unsupported, plan
from convgrad.plan import clear_plan_cache
from convgrad.problem import COMPUTE_MODES
from convgrad.verify import real_operands

if "native" not in oracle.available_backends():
    pytest.skip("the native module is not built", allow_module_level=True)

from convgrad import _native

# Geometries of the classes these kernels are for: sizes beside vector widths, all ranks, strides, dilations, pads.
DEPTHWISE = [
    "n2 c16 k16 i9x11 w3x3 p1x1 g16", "n2 c37 k37 i9x11 w3x3 s2x2 p1x1 g37",
    "n1 c48 k96 i9x7 w5x4 s2x1 p2:1x0:3 d1x2 g48",
    "n3 c37 k37 i50 w4 p3:0 g37", "n1 c20 k20 i6x7x8 w3x2x3 s1x2x2 p1x1x1 g20", "n1 c32 k32 i20x20 w31x31 p15x15 g32",
    "n1 c18 k18 i10x10 w3x3 s4x4 p5x5 g18", "n2 c17 k17 i3x3 w2x2 s4x4 g17", "n1 c16 k16 i300 w3 p128 d128 g16",
    "n5 c3 k3 i12x10 w3x3 p1x1 g3", "n1 c33 k33 i5x6x9 w5x5x5 p2x2x2 g33", "n2 c64 k192 i8x8 w3x3 p1x1 g64",
    "n2 c40 k40 i11x12 w5x5 s3x2 p2x2 d2x3 g40", "n1 c70 k70 i9x13 w7x9 p3x4 g70", "n1 c64 k64 i40 w5 s2 p2 g64",
]
GROUPED = [
    "n2 c64 k64 i8x8 w3x3 p1x1 g16", "n2 c6 k12 i8x9 w3x3 s2x2 p1x1 g3", "n2 c96 k96 i8x9 w3x3 s3x3 p1x1 d2x2 g32",
    "n2 c40 k80 i30 w7 s3 p3 d2 g8", "n1 c128 k64 i8x9 w3x3 p1x1 g8", "n2 c96 k48 i4x5x6 w3x3x3 s2x1x2 p1x1x1 g12",
    "n1 c72 k36 i12x5 w1x1 g12", "n2 c160 k160 i5x5 w3x3 p1x1 g10",
    "n2 c64 k64 i9x17 w3x5 p1x2 g8", "n1 c64 k96 i30 w7 s3 p3 d2 g2", "n2 c64 k128 i9x8 w3x3 s2x2 p1x1 g4",
]
FEW = [
    "n2 c3 k20 i9x11 w3x3 p1x1", "n2 c1 k33 i9x11 w3x3 s2x2 p1x1", "n1 c4 k16 i6x7x8 w3x2x3 s1x2x2 p1x1x1",
    "n3 c3 k40 i50 w10 s5", "n2 c3 k48 i16x16 w4x4 s4x4", "n10 c3 k40 i2x4x4 w2x4x4 s2x4x4",
    "n2 c32 k4 i5x8x8 w3x3x3 p1x1x1",
    "n2 c64 k1 i9x8 w3x3 s2x2 p1x1", "n1 c40 k3 i12x13 w5x4 s2x1 p2:1x0:3 d1x2", "n2 c36 k72 i40 w9 p4 g3",
    "n2 c3 k20 i3x3 w2x2 s4x4", "n60 c2 k20 i3 w3", "n5 c20 k2 i3x3 w3x3 p1:0x2:1", "n1 c16 k16 i7x7 w3x3 p4x4",
    "n3 c130 k5 i7x7 w3x3 p1x1", "n60 c5 k130 i2x2 w2x2", "n2 c3 k70 i13x12 w7x7 s2x2 p3x3",
    "n1 c3 k8 i3x9x13 w2x3x7 s1x2x2 p1x1x3", "n2 c2 k5 i11x10 w3x4 s2x3 p1x2", "n2 c17 k6 i40 w5 p2",
]
# One group with few enough channels to be computed where it lies, with channels last; margins wider than the taps.
ALONE = [
    "n2 c16 k4 i9x17 w3x3 p1x1", "n1 c32 k6 i4x5x18 w3x3x3 p1x1x1", "n2 c48 k16 i40 w5 s2 p2",
    "n1 c64 k64 i7x15 w3x4 p1:2x3:0", "n1 c32 k48 i12x9 w1x1", "n1 c16 k16 i5x33 w3x3 p4x5",
    "n3 c16 k10 i6x5 w3x7 p1x3",
    "n1 c16 k32 i3x40x5 w2x3x2 s1x3x1 p1x0x1 d1x2x1",
]
# Several groups of one row of one image: every task packs the weights that it uses.
USED_ONCE = ["n1 c96 k96 i40 w30 p15 g3", "n1 c64 k128 i21 w3 p1 g4", "n1 c64 k32 i33 w26 s2 p9 g2 OLI"]
# Groups that fill vectors, with channels last: their weight gradients are summed from copies of the pixels. Several
# boxes of rows and of columns, pairs of pixels beside the end of a row, a group that ends within a vector.
GATHERED = [
    "n3 c64 k64 i14x14 w3x3 p1x1 g4", "n2 c32 k40 i7x9 w3x3 s2x2 p1x1 g2", "n1 c64 k24 i3x5x33 w2x3x2 s1x1x3 p1x0x1 g2",
    "n2 c48 k36 i11x70 w2x4 p0x3 d1x3 g3", "n1 c32 k32 i700 w5 s2 p2 g2", "n2 c96 k72 i40x30 w1x1 g3",
    "n1 c32 k8 i6x5 w3x3 p4x4 g2",
]
PATCHES = [
    "n2 c3 k48 i16x16 w4x4 s4x4", "n10 c3 k40 i2x4x4 w2x4x4 s2x4x4", "n3 c5 k9 i4x3 w4x3",
    "n2 c1 k7 i4x6x8 w2x3x4 s2x3x4", "n4 c6 k5 i9 w3 s3", "n2 c4 k6 i9x8 w3x2 s2x2 p1x0",
]
CASES = ([("grouped", text) for text in DEPTHWISE + GROUPED] + [("few", text) for text in FEW + GROUPED[:3]]
         + [("fold", text) for text in PATCHES])
RESULTS = ("conv", "input_grad", "weight_grad", "weight_grad+bias_grad")
FORMATS = ("f64", "f32", "bf16", "f16", "f16>f32", "e4m3", "e4m3>e4m3", "e5m2>bf16", "hif8", "hif8>hif8", "bf16>f64")
KERNELS = {"grouped": ("depthwise", "grouped"), "few": ("few",), "fold": ("patch_",)}
LAST = {1: "NLC", 2: "NHWC", 3: "NDHWC"}


def asked(result: str, dtype: str, text: str, last: bool = False) -> Problem:
    problem = Problem.parse(f"{result} {dtype} {text}")
    return problem.with_(layout=LAST[problem.conv.axes]) if last else problem


@pytest.fixture(autouse=True)
def _no_plan_survives() -> Iterator[None]:
    clear_plan_cache()
    yield
    clear_plan_cache()


def force(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGRAD_FAMILY", family)
    clear_plan_cache()


@pytest.mark.parametrize(("family", "text"), CASES)
def test_integers_bit_by_bit(family: str, text: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force(family, monkeypatch)
    for place, dtype in enumerate(FORMATS):
        for turn, result in enumerate(RESULTS):
            problem = asked(result, dtype, text, last=(place + turn) % 2 == 1)
            assert plan(problem, backend="native").kernel.startswith(KERNELS[family])
            oracle.check_exact(problem, "native", seed=seed, thin=place % 2 == 0,
                               style=oracle.STYLES[(place + turn) % 4])


@pytest.mark.parametrize(("family", "text"), CASES)
def test_real_numbers_within_the_bound(family: str, text: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force(family, monkeypatch)
    for place, dtype in enumerate(("f32", "bf16", "f16", "f64")):
        for turn, result in enumerate(RESULTS):
            oracle.check_bound(asked(result, dtype, text, last=turn % 2 == 0), "native", seed=seed,
                               style=oracle.STYLES[(place + turn) % 4])


@pytest.mark.parametrize(("family", "text"), CASES)
def test_padding_meets_no_inf(family: str, text: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inf and NaN in weights and gradients reach the sums that contain them, and no sum through padded positions."""
    force(family, monkeypatch)
    for turn, result in enumerate(RESULTS):
        for dtype in ("f32", "f16", "bf16"):
            oracle.check_nonfinite(asked(result, dtype, text, last=turn % 2 == 1), "native", seed=seed, spots=3)


@pytest.mark.parametrize(("family", "text"), [CASES[0], CASES[5], CASES[13], CASES[21], CASES[24], CASES[30]])
def test_compute_modes(family: str, text: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force(family, monkeypatch)
    for mode in COMPUTE_MODES[1:]:
        for result in RESULTS:
            dtype = "e4m3>f32" if mode == "fp8" else "f32"
            oracle.check_bound(asked(result, dtype, text).with_(compute=mode), "native", seed=seed)


@pytest.mark.parametrize(("family", "text"), CASES)
def test_same_bits_for_any_threads(family: str, text: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force(family, monkeypatch)
    for result in RESULTS:
        problem = asked(result, "f32", text)
        operands = real_operands(problem, seed)
        bits = {tuple(array.tobytes() for array in
                      oracle.run_guarded(problem, "native", operands, num_threads=threads) or ())
                for threads in (1, 2, 3, 7)}
        assert len(bits) == 1, str(problem)


@pytest.mark.parametrize(("family", "text"), CASES[::3])
def test_less_workspace(family: str, text: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit is kept; below the stated minimum the refusal says it, and the result is right all the way down."""
    force(family, monkeypatch)
    for result in RESULTS:
        problem = asked(result, "f32", text)
        limit = plan(problem, backend="native", num_threads=2).workspace_bytes
        while limit > 0:
            limit = limit * 2 // 3
            try:
                plan(problem, backend="native", num_threads=2, max_workspace_bytes=limit)
            except Unsupported as error:
                assert "needs at least" in str(error)
                break
            oracle.check_exact(problem, "native", seed=seed, num_threads=2, max_workspace_bytes=limit)


@pytest.mark.parametrize("text", ALONE + USED_ONCE)
def test_groups_in_place(text: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force("grouped", monkeypatch)
    served = 0
    for dtype in ("f32", "bf16"):
        for turn, result in enumerate(("conv", "input_grad")):
            problem = asked(result, dtype, text, last=True)
            served += plan(problem, backend="native").kernel.startswith("grouped_direct")
            oracle.check_exact(problem, "native", seed=seed, style=oracle.STYLES[turn])
            oracle.check_bound(problem, "native", seed=seed)
            oracle.check_nonfinite(problem, "native", seed=seed, spots=3)
            operands = real_operands(problem, seed)
            assert len({(oracle.run_guarded(problem, "native", operands, num_threads=threads) or [b""])[0].tobytes()
                        for threads in (1, 3)}) == 1
    assert served or not _native.isa().startswith("avx512")


@pytest.mark.parametrize("text", GATHERED)
def test_groups_that_fill_vectors(text: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force("grouped", monkeypatch)
    for dtype in ("f32", "bf16", "bf16>f32"):
        problem = asked("weight_grad", dtype, text, last=True)
        kernel = plan(problem, backend="native").kernel
        assert "direct" in kernel or dtype != "f32" or not _native.isa().startswith("avx512")
        for style in oracle.STYLES:
            oracle.check_exact(problem, "native", seed=seed, style=style)
        oracle.check_bound(problem, "native", seed=seed)
        oracle.check_nonfinite(problem, "native", seed=seed, spots=3)
        operands = real_operands(problem, seed)
        assert len({(oracle.run_guarded(problem, "native", operands, num_threads=threads) or [b""])[0].tobytes()
                    for threads in (1, 2, 3, 7)}) == 1


def test_bf16_pixels_in_pairs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few-channel weight gradients by pairs: of eight channels and more, with stand-ins for pixels on both sides."""
    force("few", monkeypatch)
    paired = 0
    for text in (*FEW, "n2 c5 k16 i7x6 w3x3 p1x1", "n1 c2 k3 i5x9 w2x5 s1x3 p0x4",
                 "n1 c20 k18 i4x11 w3x3 s2x2 d2x3 p2x3"):
        for last in (False, True):
            for result in RESULTS[2:]:
                problem = asked(result, "bf16", text, last)
                paired += "_bf16_" in plan(problem, backend="native").kernel
                oracle.check_exact(problem, "native", seed=seed)
                oracle.check_nonfinite(problem, "native", seed=seed, spots=2)
    assert paired > len(FEW) or _native.isa() != "avx512_bf16" or "AMD" not in Path("/proc/cpuinfo").read_text()


def test_bf16_taps_in_pairs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few source channels: two taps in one product, with a stand-in beside an odd one that must meet no Inf or NaN."""
    force("few", monkeypatch)
    paired = 0
    for text in (*FEW, "n2 c1 k64 i5x9x8 w3x3x3 s2x2x2 p1x1x1", "n1 c2 k18 i4x31 w3x5 d1x3 p1x6",
                 "n2 c20 k1 i7x13 w3x5 s2x2 p1x2", "n1 c33 k2 i23 w7 s3 p3 d2"):
        for turn, result in enumerate(RESULTS[:2]):
            for dtype in ("bf16", "bf16>f32"):
                problem = asked(result, dtype, text, last=turn == 0)
                paired += "broadcast_bf16" in plan(problem, backend="native").kernel
                oracle.check_exact(problem, "native", seed=seed)
                oracle.check_bound(problem, "native", seed=seed)
                oracle.check_nonfinite(problem, "native", seed=seed, spots=2)
    assert paired > len(FEW) // 2 or _native.isa() != "avx512_bf16" or "AMD" not in Path("/proc/cpuinfo").read_text()


def test_layouts_agree_bit_by_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a depthwise f32 sum of up to 512 taps does not depend on where the operands lie; longer ones are cut
    into blocks, by every kernel in its own way."""
    force("grouped", monkeypatch)
    for text in (DEPTHWISE[0], DEPTHWISE[2], DEPTHWISE[3], DEPTHWISE[8], DEPTHWISE[12], DEPTHWISE[13]):
        for result in ("conv", "input_grad"):
            first = asked(result, "f32", text)
            operands = real_operands(first, seed)
            results = [oracle.run_guarded(problem, "native", operands) for problem in
                       (first, asked(result, "f32", text, last=True))]
            assert results[0] is not None and results[1] is not None
            assert np.array_equal(results[0][0], results[1][0])


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("width", [7, 8, 9, 11, 14, 17, 29])
def test_weight_gradients_of_whole_rows(dtype: str, width: int, seed: int) -> None:
    """Rows that keep their width: the taps that land at their ends are known to the compiler, others are asked for."""
    for taps in (3, 5, 7):
        for text in (f"n2 c32 k32 i{width}x{width} w{taps}x{taps} p{taps // 2}x{taps // 2} g32",
                     f"n1 c40 k40 i3x{width} w{taps}x{taps} p{taps // 2}x{taps // 2 - (width == 11)} g40"):
            problem = asked("weight_grad+bias_grad", dtype, text, last=True)
            assert plan(problem, backend="native").kernel.startswith("depthwise_direct_weight")
            oracle.check_exact(problem, "native", seed=seed)
            oracle.check_bound(problem, "native", seed=seed)
            oracle.check_nonfinite(problem, "native", seed=seed, spots=3)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "bf16>f32"])
@pytest.mark.parametrize("taps", [9, 16, 17, 31, 32])
def test_lines_of_many_taps(dtype: str, taps: int, seed: int) -> None:
    """Sums are shifted; taps that are missing to whole vectors of them must not meet an Inf beyond the window."""
    for result in ("conv", "input_grad"):
        for text in (f"i50 w{taps} p{taps - 1}:0", f"i{taps + 3} w{taps}", f"i97 w{taps} p{taps // 2}",
                     f"i40 w{taps} p{taps + 4}"):
            problem = asked(result, dtype, f"n2 c21 k21 {text} g21")
            assert plan(problem, backend="native").kernel.startswith("depthwise_line")
            oracle.check_exact(problem, "native", seed=seed)
            oracle.check_bound(problem, "native", seed=seed)
            oracle.check_nonfinite(problem, "native", seed=seed, spots=3)
    lines = np.ones((1, 32, 80), np.float32)
    lines[..., 40] = np.inf
    for array in (lines, lines.astype(ml_dtypes.bfloat16)):
        got = convgrad.conv(array, np.ones((32, 1, taps), array.dtype), groups=32, backend="native").astype(np.float32)
        assert np.isinf(got).sum() == 32 * taps and not np.isnan(got).any()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("text", ["c40 k40 i200x200 w3x3 s2x2 p1x1 g40", "c64 k64 i160x160 w3x3 p1x1 g64"])
def test_results_written_around_the_caches(dtype: str, text: str, seed: int) -> None:
    """Wherever a large result begins, and whatever its pixels take of a line: the bits of its images one by one."""
    one = asked("input_grad", dtype, f"n1 {text}", last=True)
    images = 3 if dtype == "f32" else 6  # 16 MB of them are a large result
    whole = one.with_(conv=replace(one.conv, batch=images))
    grad, weight = real_operands(whole, seed).values()
    grad = np.ascontiguousarray(grad.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    shape = (images, *one.conv.in_size, one.conv.in_channels)
    expected = np.empty(shape, grad.dtype)
    for image in range(images):
        plan(one, backend="native").run((grad[image:image + 1], weight),
                                        (expected[image:image + 1].transpose(0, 3, 1, 2),), None)
    for shift in (0, grad.itemsize, 16, 64 - grad.itemsize):
        memory = np.full(expected.nbytes + 192, 0xA5, np.uint8)
        start = -memory.ctypes.data % 64 + shift
        out: np.ndarray[Any, Any] = np.ndarray(shape, grad.dtype, memory, start)
        plan(whole, backend="native", num_threads=2).run((grad, weight), (out.transpose(0, 3, 1, 2),), None)
        assert out.tobytes() == expected.tobytes(), shift
        assert (memory[:start] == 0xA5).all() and (memory[start + out.nbytes:] == 0xA5).all()


@pytest.mark.parametrize("level", ["generic", "avx2", "avx512"])
def test_every_instruction_set(level: str) -> None:
    """The level is chosen when the module is loaded, so each has a process of its own."""
    code = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import os, oracle, test_native_special as special
from convgrad import _native
if _native.isa() != {level!r}:
    sys.exit(77)
from convgrad.plan import clear_plan_cache
for place, (family, text) in enumerate(special.CASES):
    os.environ["CONVGRAD_FAMILY"] = family
    clear_plan_cache()
    for turn, result in enumerate(special.RESULTS):
        dtype = special.FORMATS[(place + turn) % len(special.FORMATS)]
        oracle.check_exact(special.asked(result, dtype, text, (place + turn) % 2 == 1), "native")
        oracle.check_bound(special.asked(result, "f32", text, turn % 2 == 1), "native")
        oracle.check_nonfinite(special.asked(result, "bf16", text), "native")
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "CONVGRAD_ISA": level}, check=False,
                          capture_output=True, text=True, timeout=600)
    if done.returncode == 77:
        pytest.skip(f"this machine does not run {level}")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(not _native.isa_available("avx512"), reason="this CPU cannot run avx512")
def test_two_wide_fmas_make_dense_products_the_cheaper_ones() -> None:
    text = "weight_grad f32 n4 c64 k64 i8x8x8 w3x3x3 p1x1x1"
    script = f"import convgrad; print(convgrad.plan({text!r}, backend='native').kernel)"
    found = subprocess.run([sys.executable, "-c", script], env=os.environ | {"CONVGRAD_ISA": "avx512"}, check=True,
                           capture_output=True, text=True)
    assert found.stdout.startswith("gemm_f32")
