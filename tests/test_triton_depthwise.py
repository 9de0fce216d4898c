"""Depthwise gradients by sliding strips: the Gluon kernels against their plain twins, and the choice of strips.

On a GPU the kernels themselves run. Without one their source, with Gluon's layouts taken out, is read as plain Triton
and run in the interpreter: the same indices, masks and sums.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from convgrad import Problem, Unsupported  # noqa: E402
from convgrad.backends.triton import slide_plans, strips  # noqa: E402
from convgrad.backends.triton.geometry import geometry, turned  # noqa: E402
from convgrad.backends.triton.gpu import H200, Planning  # noqa: E402
from convgrad.backends.triton.launch import INTERPRETED  # noqa: E402
from convgrad.backends.triton.plans import make_plan  # noqa: E402
from convgrad.backends.triton.registry import query_of  # noqa: E402
from convgrad.backends.triton.strips import Strip  # noqa: E402

SOURCES = Path(slide_plans.__file__).parent
DEVICE = "cpu" if INTERPRETED else "cuda"
WARPS = 1 if INTERPRETED else 4

# What slide_taps.py does in shared memory, without it; the interpreter has none.
PLAIN_TAPS = """
import triton
import triton.language as tl


@triton.jit
def held_taps(weight, c_tile, w_c, w_0, w_1, C: tl.constexpr, W2: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
              K2: tl.constexpr, BC: tl.constexpr, WARPS: tl.constexpr, LAYOUT: tl.constexpr):
    c = (c_tile + tl.arange(0, BC))[None, :]
    bad = 0
    taps = ()
    for k in tl.static_range(K0 * K1 * K2):
        value = tl.load(weight + c * w_c + (k // (K1 * K2)) * w_0 + ((k // K2) % K1) * w_1 + (k % K2) * W2, mask=c < C,
                        other=0.0).to(tl.float32)
        bad += tl.max(tl.max((value * 0.0 != 0.0).to(tl.int32), 1), 0)
        taps = taps + (value,)
    return taps, bad


@triton.jit
def store_sums(out, sums, c_tile, taps, C: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr, BC: tl.constexpr,
               WARPS: tl.constexpr):
    c = c_tile + tl.arange(0, BC)
    for e in tl.static_range(COUNT):
        tl.store(out + e * C + c, tl.sum(sums[e], 0), mask=(c < C) & (e < taps))


def row_table(*args):
    raise NotImplementedError


put_row = get_row = row_table
"""


def as_plain_triton(source: str) -> str:
    """Gluon source as plain Triton: the same without layouts."""
    source = source.replace("from triton.experimental import gluon\n", "import triton\n")
    source = source.replace("from triton.experimental.gluon import language as gl", "import triton.language as tl")
    source = source.replace("@gluon.jit", "@triton.jit").replace("from .slide", "from plain_slide")
    source = re.sub(r", layout=gl\.SliceLayout\(\d, LAYOUT\)", "", source)
    source = re.sub(r"(gl\.full\(\[[^\]]*\], [^,]+, gl\.\w+), LAYOUT\)", r"\1)", source)
    source = re.sub(r"return gl\.BlockedLayout\(.*\)", "return 0", source)
    return re.sub(r"\bgl\.", "tl.", source)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels in a form that runs here."""
    if not INTERPRETED:
        yield
        return
    folder = tmp_path_factory.mktemp("plain")
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    for name in ("slide_taps", "slide", "slide_weight"):
        path = folder / f"plain_{name}.py"
        source = PLAIN_TAPS if name == "slide_taps" else as_plain_triton((SOURCES / f"{name}.py").read_text())
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        for kernel in ("slide_input_kernel", "tall_input_kernel", "slide_weight_kernel", "slide_both_kernel"):
            if hasattr(module, kernel):
                patch.setattr(slide_plans, kernel, getattr(module, kernel))
    yield
    patch.undo()


def tensor(shape: tuple[int, ...], generator: Any, special: bool = False) -> Any:
    """Small whole numbers, channels last in memory; with `special`, an infinity and a NaN in two corners."""
    order = (0, *range(2, len(shape)), 1)
    stored = torch.randint(-3, 4, [shape[axis] for axis in order], generator=generator).bfloat16()
    if special:
        stored[(0,) * len(shape)] = float("inf")
        stored[(-1,) * len(shape)] = float("nan")
    return stored.permute([order.index(axis) for axis in range(len(shape))]).to(DEVICE)


def check(problem: Problem, plan: Any, special: bool) -> None:
    """A plan gives the same numbers as the plain kernels: every sum of these operands is exact."""
    generator = torch.Generator().manual_seed(3)
    operands = {name: tensor(problem.shape_of_operand(name), generator, special) for name in problem.operands}
    results = [torch.full_like(tensor(problem.conv.shape_of(wrt), generator), float("nan")) if wrt != "bias"
               else torch.full(problem.conv.shape_of(wrt), float("nan"), dtype=torch.bfloat16, device=DEVICE)
               for wrt in problem.results]
    plan.run(tuple(operands.values()), tuple(results), None)
    for wrt, result in zip(problem.results, results):
        if wrt == "bias":
            wanted = operands["grad_output"].float().sum(dim=[0, *range(2, operands["grad_output"].ndim)]).bfloat16()
        else:
            part = problem.with_(wrt=wrt)
            wanted = torch.full_like(result, float("nan"))
            plain = make_plan(part, None, {"kernel": "plain"})
            plain.run(tuple(operands[name] for name in part.operands), (wanted,), None)
        assert torch.equal(torch.isnan(result), torch.isnan(wanted)), wrt
        assert torch.equal(torch.nan_to_num(result), torch.nan_to_num(wanted)), wrt


SMALL = [
    ("n2 c6 k6 i8x9 w3x3 p1x1 g6 NHWC OHWI", Strip(3, 2, 8, segments=2, UNROLL=3)),
    ("n2 c6 k6 i7x9 w3x3 p1x1 g6 NHWC OHWI", Strip(3, 2, 8, UNROLL=2, AHEAD=2)),
    ("n2 c6 k6 i8x9 w3x3 s2x2 p1x1 g6 NHWC OHWI", Strip(4, 2, 8, segments=2)),
    ("n2 c5 k5 i9x7 w4x5 s3x1 p2:0x2 g5 NHWC OHWI", Strip(4, 1, 8, UNROLL=2)),
    ("n1 c5 k5 i7x6 w2x2 s3x3 g5 NHWC OHWI", Strip(6, 1, 8)),
    ("n1 c5 k5 i5x4 w3x3 p0:3x3:0 g5 NHWC OHWI", Strip(4, 1, 8)),
    ("n2 c6 k6 i9x7 w3x3 d2x2 p2x2 g6 NHWC OHWI", Strip(3, 2, 8)),
    ("n2 c6 k6 i24 w4 p3:0 g6 NLC OLI", Strip(1, 2, 8, segments=2, UNROLL=3, turn=True)),
    ("n1 c6 k6 i16 w3 d5 p5 g6 NLC OLI", Strip(1, 2, 8, UNROLL=3, AHEAD=2, turn=True)),
    ("n1 c6 k6 i3x6x5 w3x3x3 s1x2x1 p1x1x1 g6 NDHWC ODHWI", Strip(4, 2, 8, HELD=False)),
    ("n1 c6 k6 i3x6x5 w3x3x3 s1x2x1 p1x1x1 g6 NDHWC ODHWI", Strip(4, 2, 8, DEEP=True)),
    ("n2 c6 k6 i4x5x6 w2x3x3 p1:0x1x1 g6 NDHWC ODHWI", Strip(3, 2, 8, segments=2, DEEP=True)),
    ("n2 c6 k6 i8x5 w7x3 p3x1 g6 NHWC OHWI", Strip(3, 2, 8, LINES=2)),
    # one pass for all gradients once took the first plane for the whole image
    ("n2 c6 k6 i3x5x6 w1x3x3 p0x1x1 g6 NDHWC ODHWI", Strip(3, 2, 8, segments=2)),
    ("n1 c6 k6 i4x5x6 w1x1x3 p0x0x3:0 d1x1x2 g6 NDHWC ODHWI", Strip(2, 1, 8, UNROLL=2, turn=True)),
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("results", ["input_grad", "weight_grad+bias_grad", "input_grad+weight_grad+bias_grad"])
@pytest.mark.parametrize(("text", "strip"), SMALL)
def test_strips_agree_with_the_plain_kernels(text: str, strip: Strip, results: str, shared: int, special: bool) -> None:
    if INTERPRETED and (shared == 2 or (shared == 1) != special):
        pytest.skip("the interpreter has no shared memory, and little time")
    problem = Problem.parse(f"{results} bf16 {text} cuda")
    geo = geometry(problem.conv)
    kind = slide_plans.kind_of(problem)
    strip = replace(strip, warps=WARPS, splits=3, SHARED=shared)
    if kind == "both" and not strips.planes_apart(geo):
        pytest.skip("one pass has two axes of taps")
    if special and INTERPRETED and "p0:3x3:0" not in text and "d5" not in text and "s3x3" not in text:
        pytest.skip("masked sums take long in the interpreter")
    if "bias" in problem.results and not strips.bias_rides(kind, geo, strip):
        problem = problem.with_(wrt=problem.wrt.removesuffix("+bias"))
    make = {"input": slide_plans.input_plan, "weight": slide_plans.weight_plan, "both": slide_plans.both_plan}[kind]
    check(problem, make(query_of(problem, gpu=H200), strip), special)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", ["n1 c6 k6 i6x5 w5x4 p3:1x2:1 g6 NHWC OHWI",
                                  "n1 c6 k6 i2x3x5 w1x5x4 p0x3:1x2:1 g6 NDHWC ODHWI"])
def test_many_taps_agree_with_the_plain_kernels(text: str, special: bool) -> None:
    problem = Problem.parse(f"input_grad bf16 {text} cuda")
    strip = Strip(3, 2, 8, UNROLL=2, warps=WARPS)
    check(problem, slide_plans.tall_plan(query_of(problem, gpu=H200), strip), special)


def test_a_warp_has_lanes_for_the_channels_of_many_taps() -> None:
    for text in ("n64 c128 k128 i56x56 w31x31 p15x15 g128", "n2 c33 k33 i39x38 w31x31 p15x15 g33"):
        found = list(slide_plans.many_taps(query_of(Problem.parse(f"input_grad f32 {text} NHWC OHWI"), gpu=H200)))
        assert found and all(strip.BC // strip.V <= 32 for strip in found)


LAYERS = ["n256 c32 k32 i112x112 w3x3 p1x1 g32 NHWC OHWI", "n256 c96 k96 i112x112 w3x3 s2x2 p1x1 g96 NHWC OHWI",
          "n256 c96 k96 i56x56 w7x7 p3x3 g96 NHWC OHWI", "n64 c128 k128 i56x56 w31x31 p15x15 g128 NHWC OHWI",
          "n16 c512 k512 i3999 w3 p128 d128 g512 NLC OLI", "n2 c32 k32 i64x64x64 w5x5x5 p2x2x2 g32 NDHWC ODHWI",
          "n1 c8 k8 i5x5 w3x3 g8 NHWC OHWI"]


@pytest.mark.parametrize("text", LAYERS)
def test_chosen_strips_fit(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers, workspace and body of what the model picks stay within their limits."""
    monkeypatch.setattr(Planning, "gpu", H200)
    for results in ("input_grad", "weight_grad", "weight_grad+bias_grad", "input_grad+weight_grad+bias_grad"):
        problem = Problem.parse(f"{results} bf16 {text} cuda")
        geo = geometry(problem.conv)
        kind = slide_plans.kind_of(problem)
        axes = turned(geo) if strips.slides_along_last(geo) else geo
        for limit in (None, 10**5):
            for strip in (strip for shared in (0, 1, 2) for strip in
                          strips.all_strips(kind, geo, limit, "bias" in problem.results, H200, shared)):
                assert strips.work(kind, axes, strip).registers <= strips.MOST_REGISTERS
                assert strip.BC // strip.V <= 32 and strip.S >= 1
                assert strips.shared_bytes(kind, axes, strip) <= 227 * 1024
        try:
            plan = make_plan(problem, None)
        except Unsupported:
            assert len(problem.results) > 1
            continue
        assert plan.kernel.startswith(("slide_", "tall_", "band_"))
        assert plan.workspace_bytes <= max(2**26, 8 * np.prod(problem.conv.weight_shape) + 8 * problem.conv.groups)
