"""The native dense family where it takes short cuts: sources read in place, sums in the result, tiles stored early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
import pytest
from ml_dtypes import bfloat16

from convgrad import Problem, input_grad, plan, weight_grad
from convgrad.plan import clear_plan_cache
from convgrad.verify import real_operands

pytestmark = pytest.mark.skipif("native" not in oracle.available_backends(), reason="the native module is not built")

# Channels last. Result channels of whole panels (32, or a half of 16) take sums in place, others do not; rows of pixels
# that meet the border on both sides, at one side, through no tap at all, and longer than one strip.
IN_PLACE = [
    "n2 c32 k48 i9x17 w3x3 p1x1", "n1 c16 k32 i5x30 w3x5 p2x4 d2x2", "n2 c48 k16 i40 w11 p25 d5",
    "n1 c64 k32 i4x6x15 w3x3x3 p1x1x1", "n2 c32 k32 i9x13 w3x3 s2x2 p1x1", "n1 c32 k32 i5x5 w3x3 p4x4",
    "n1 c32 k24 i12x11 w3x3", "n2 c20 k40 i7x9 w2x2 s2x2", "n3 c64 k32 i8x8 w1x1", "n1 c32 k32 i3x29 w1x9 p0:0x8:0",
    "n1 c32 k1024 i4x6 w3x3 p1x1",
]
# The result channels are neighbours in the weight: tiles of its gradient are stored when they are complete.
TIME_FIRST = ["n4 c40 k64 i20 w3 p1 TBC LIO", "n2 c70 k33 i50 w1 TBC LIO", "n3 c20 k40 i9 w4 p5:3 TBC LIO"]
# One tap at every pixel: the pixels of all images are one line, if they are evenly spaced.
ONE_TAP = ["n3 c64 k32 i8x8 w1x1", "n2 c70 k33 i50 w1 TBC LIO", "n2 c40 k1024 i9 w1 TBC LIO",
           "n2 c20 k24 i3x4x5 w1x1x1"]
# Images between the pixels of a line: they are the columns of a plane.
TIME_OUTSIDE = ["n4 c40 k64 i20 w3 p1 TBC LIO", "n3 c20 k40 i9 w4 p5:3 TBC LIO", "n5 c33 k18 i17 w3 s2 p1 d2 TBC LIO"]
# Channels first, with padding: bf16 pixels are turned round between the zeros; every second pixel of a line is taken.
FIRST = ["n1 c33 k40 i9x17 w3x3 p1x2", "n2 c40 k36 i11x35 w3x3 s2x2 p1x1", "n1 c20 k50 i3x6x13 w2x2x2 s2x2x2"]
# Windows inside of the tensor: runs of columns, of channels, of both; rows of an odd number of pixels; several chunks,
# with planes read in place and chunks that end inside of one; windows that overlap or leave pixels out.
WINDOWS = [
    "n3 c3 k60 i32x80 w8x16 s8x16", "n2 c3 k84 i4x32x32 w2x8x8 s2x8x8", "n5 c9 k60 i32x80 w4x8 s4x8",
    "n1 c3 k60 i128x168 w8x8 s8x8", "n2 c40 k70 i9x11 w2x2 s2x2 NHWC OHWI", "n2 c32 k60 i9x9 w2x3 d2x2 NHWC OHWI",
    "n3 c300 k130 i27x27 w1x1 s2x2 NHWC OIHW", "n2 c60 k130 i17x27 w2x2 s2x2 NHWC HWIO",
]
LAST = {1: ("NLC", "OLI"), 2: ("NHWC", "OHWI"), 3: ("NDHWC", "ODHWI")}


def asked(result: str, dtype: str, text: str) -> Problem:
    problem = Problem.parse(f"{result} {dtype} {text}")
    if text.endswith("LIO"):
        return problem
    layout, weight_layout = LAST[problem.conv.axes]
    return problem.with_(layout=layout, weight_layout=weight_layout)


@pytest.fixture(autouse=True)
def _dense_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CONVGRAD_FAMILY", "dense")
    clear_plan_cache()
    yield
    clear_plan_cache()


@pytest.mark.parametrize("text", IN_PLACE + TIME_FIRST)
def test_integers_bit_by_bit(text: str, seed: int) -> None:
    for place, dtype in enumerate(("f32", "bf16", "f64", "f16>f32", "bf16>f32", "f32>bf16")):
        for turn, result in enumerate(("conv", "input_grad", "weight_grad")):
            problem = asked(result, dtype, text)
            assert plan(problem, backend="native").kernel.startswith("gemm_")
            oracle.check_exact(problem, "native", seed=seed, style=oracle.STYLES[(place + turn) % 4])


@pytest.mark.parametrize("text", FIRST)
def test_channels_first(text: str, seed: int) -> None:
    for place, dtype in enumerate(("f32", "bf16", "f16", "f32>bf16")):
        for turn, result in enumerate(("conv", "input_grad", "weight_grad")):
            problem = Problem.parse(f"{result} {dtype} {text}")
            oracle.check_exact(problem, "native", seed=seed, style=oracle.STYLES[(place + turn) % 4])
            oracle.check_nonfinite(problem, "native", seed=seed, spots=3)


@pytest.mark.parametrize(("text", "how"), [(text, "pixels are one line") for text in ONE_TAP]
                         + [(text, "images are columns") for text in TIME_OUTSIDE])
def test_images_become_pixels(text: str, how: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGRAD_FAMILY", "fold")
    for dtype in ("f32", "bf16", "f16>f32"):
        for result in ("conv", "input_grad", "weight_grad", "weight_grad+bias_grad"):
            problem = asked(result, dtype, text)
            chosen = plan(problem, backend="native")
            assert any(how in note for note in chosen.notes), chosen.notes
            for style in oracle.STYLES:  # arrays with gaps take the other way
                oracle.check_exact(problem, "native", seed=seed, style=style)
            oracle.check_nonfinite(problem, "native", seed=seed, spots=2)


@pytest.mark.parametrize("text", WINDOWS)
def test_weight_gradients_of_whole_windows(text: str, seed: int) -> None:
    for dtype in ("f32", "bf16", "f64", "f16>f32", "f32>bf16"):
        for result in ("weight_grad", "weight_grad+bias_grad"):
            problem = Problem.parse(f"{result} {dtype} {text}")
            chosen = plan(problem, backend="native")
            assert "amx" in chosen.kernel or any("whole windows" in note for note in chosen.notes), chosen.notes
            for style in oracle.STYLES:
                oracle.check_exact(problem, "native", seed=seed, style=style)
        oracle.check_bound(problem, "native", seed=seed)
        oracle.check_nonfinite(problem, "native", seed=seed, spots=2)
    problem = Problem.parse(f"weight_grad f32 {text}")
    operands = real_operands(problem, seed)
    bits = {array.tobytes() for threads in (1, 2, 7)
            for array in oracle.run_guarded(problem, "native", operands, num_threads=threads) or ()}
    assert len(bits) == 1


def test_large_results_written_around_the_caches(seed: int) -> None:
    random = np.random.default_rng(seed)

    def integers(*shape: int) -> np.ndarray[Any, Any]:
        return random.integers(-4, 5, shape).astype(np.float32)

    dy, x = integers(3, 1, 4096), integers(3, 1, 1030)
    dw = weight_grad(dy.astype(bfloat16), x.astype(bfloat16), (1,), layout="TBC", weight_layout="LIO", backend="native")
    assert np.array_equal(dw[0].astype(np.float32), (x[:, 0].T @ dy[:, 0]).astype(bfloat16).astype(np.float32))
    dy, w = integers(1, 260, 260, 16), integers(16, 1, 1, 64)
    dx = input_grad(dy.astype(bfloat16), w.astype(bfloat16), (260, 260), layout="NHWC", weight_layout="OHWI",
                    backend="native")
    assert np.array_equal(dx[0].astype(np.float32), (dy[0] @ w[:, 0, 0]).astype(bfloat16).astype(np.float32))
    for result in (dw, dx):
        assert result.nbytes > 8 << 20 and result.ctypes.data % 64 == 0


@pytest.mark.parametrize("text", IN_PLACE + TIME_FIRST)
def test_padding_meets_no_inf(text: str, seed: int) -> None:
    for result in ("conv", "input_grad", "weight_grad"):
        for dtype in ("f32", "bf16", "f16"):
            oracle.check_nonfinite(asked(result, dtype, text), "native", seed=seed, spots=3)


@pytest.mark.parametrize("text", IN_PLACE + TIME_FIRST)
def test_same_bits_for_any_threads(text: str, seed: int) -> None:
    for result in ("conv", "input_grad", "weight_grad"):
        problem = asked(result, "f32", text)
        operands = real_operands(problem, seed)
        oracle.check_bound(problem, "native", seed=seed)
        bits = {tuple(array.tobytes() for array in
                      oracle.run_guarded(problem, "native", operands, num_threads=threads) or ())
                for threads in (1, 2, 7)}
        assert len(bits) == 1, str(problem)
