"""Strips that the copy engine feeds: their walk over tiles in NumPy, the kernel itself on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton_here import channels_last, needs_gpu, torch

from convgrad.backends.triton import slide_box_plans
from convgrad.backends.triton.candidates import entry_for
from convgrad.backends.triton.geometry import Geometry, geometry
from convgrad.backends.triton.plans import make_plan
from convgrad.backends.triton.slide_box_plans import BoxStrip
from convgrad.plan import plan
from convgrad.problem import Problem

PROBLEMS = (
    "n6 c1 k1 i9x12 w3x3 p1x1 NHWC OHWI", "n5 c1 k1 i7x7 w5x5 p2x2 NHWC OHWI",
    "n4 c1 k1 i12x13 w3x3 s2x2 p1x1 NHWC OHWI", "n3 c1 k1 i9x9 w4x3 s3x2 p0:2x2:0 NHWC OHWI",
    "n9 c1 k1 i50 w31 p30:0 NLC OLI", "n4 c1 k1 i5x9x10 w3x3x3 p1x1x1 NDHWC ODHWI",
    "n4 c1 k1 i6x8x9 w2x3x3 s1x2x2 p0:2x1x1 NDHWC ODHWI", "n4 c1 k1 i10x9 w3x3 p3:4x5:3 NHWC OHWI",
    "n8 c1 k1 i12x10 w3x3 NHWC OHWI", "n3 c1 k1 i4x6 w7x5 p5x2 NHWC OHWI",
)


def box(tensor: np.ndarray, corner: tuple[int, ...], size: tuple[int, ...]) -> np.ndarray:
    """What the copy engine brings of a tensor: zeros outside of it."""
    out = np.zeros(size)
    inside = [(max(0, -first), min(extent, whole - first)) for first, extent, whole in zip(corner, size, tensor.shape)]
    if all(low < high for low, high in inside):
        out[tuple(slice(*bounds) for bounds in inside)] = tensor[
            tuple(slice(first + low, first + high) for first, (low, high) in zip(corner, inside))]
    return out


def weight_by_boxes(dy: np.ndarray, x: np.ndarray, geo: Geometry, strip: BoxStrip) -> tuple[np.ndarray, float]:
    """dw and db of one channel as slide_boxes.py sums them: stage by stage, run by run."""
    (k0, k1, k2), (_, t1, t2), (p0, p1, p2) = geo.kernel, geo.stride, geo.pad
    ys, xs = (tensor.transpose(1, 2, 3, 0) for tensor in (dy.reshape(-1, *geo.y), x.reshape(-1, *geo.x)))
    walk = slide_box_plans.walk_of(geo, strip, True)
    reach, width, strips = -(-k1 // t1), (strip.U - 1) * t2 + k2, -(-geo.y[2] // strip.U)
    dw, db = np.zeros(geo.kernel), 0.0
    for begin in range(0, walk.all_stages, walk.run):
        end = min(begin + walk.run, walk.all_stages)
        start = begin - min(begin % walk.stages, (reach - 2 + strip.ROWS) // strip.ROWS)
        ring = [np.zeros((strip.U, strip.S))] * (reach - 1)
        for at in range(start, end):
            tile, stage = divmod(at, walk.stages)
            column, plane = tile % strips * strip.U, tile // strips % geo.y[0]
            image = tile // strips // geo.y[0] * strip.S
            row = geo.x[1] if at < begin else stage * strip.ROWS * t1 - p1
            grads = box(ys, (plane, stage * strip.ROWS, column, image), (1, strip.ROWS, strip.U, strip.S))[0]
            inputs = box(xs, (plane - p0, row, column * t2 - p2, image), (k0, strip.ROWS * t1, width, strip.S))
            for r in range(strip.ROWS):
                ring.append(grads[r])
                db += grads[r].sum() if at >= begin else 0.0
                for a0 in range(k0):
                    for line in range(k1):
                        window = inputs[a0, r * t1 + line % t1]
                        old = ring[reach - 1 - line // t1]
                        for k in range(k2):
                            dw[a0, line, k] += (window[k:k + (strip.U - 1) * t2 + 1:t2] * old).sum()
                ring = ring[1:]
    return dw, db


def operands(problem: Problem) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(1)
    return tuple(rng.standard_normal(problem.shape_of_operand(name)).astype(np.float32) for name in problem.operands)


@pytest.mark.parametrize("text", PROBLEMS)
def test_sums(text: str) -> None:
    problem = Problem.parse(f"weight_grad f32 {text}")
    geo = geometry(problem.conv)
    dy, x = operands(problem)
    expected: Any = np.empty(problem.conv.weight_shape, np.float32)
    plan(problem, backend="reference").run((dy, x), (expected,), None)
    for columns, rows, warps, runs in ((3, 1, 1, 1), (4, 3, 2, 5), (7, 2, 1, 7)):
        strip = BoxStrip(columns, 2, 32, rows, 1, 2, runs, warps)
        dw, db = weight_by_boxes(dy, x, geo, strip)
        np.testing.assert_allclose(dw.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(db, dy.astype(np.float64).sum(), rtol=1e-4, atol=1e-4)


ON_DEVICE = (
    ("n9 c40 k40 i9x12 w3x3 p1x1 g40 NHWC OHWI", BoxStrip(6, 2, 32, 3, 1, 2, 5)),
    ("n16 c72 k72 i14x14 w3x3 p1x1 g72 NHWC OHWI", BoxStrip(7, 2, 64, 1, 3, 4, 3, 2)),
    ("n7 c64 k64 i7x7 w5x5 p2x2 g64 NHWC OHWI", BoxStrip(7, 2, 64, 3, 1, 2, 2)),
    ("n10 c32 k32 i13x16 w3x3 s2x2 p1x1 g32 NHWC OHWI", BoxStrip(4, 2, 32, 2, 1, 3, 4)),
    ("n3 c96 k96 i50 w31 p30:0 g96 NLC OLI", BoxStrip(25, 2, 64, 1, 1, 2, 2)),
    ("n5 c32 k32 i5x9x10 w3x3x3 p1x1x1 g32 NDHWC ODHWI", BoxStrip(5, 1, 32, 1, 3, 3, 6)),
)


@needs_gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("wrt", ["weight_grad", "weight_grad+bias_grad"])
@pytest.mark.parametrize("text, strip", ON_DEVICE)
def test_kernel_on_the_gpu(text: str, strip: BoxStrip, wrt: str, special: bool) -> None:
    """Sums of small integers are exact; with Inf and NaN in the operands the same elements are not finite."""
    problem = Problem.parse(f"{wrt} bf16 {text} cuda")
    rng = np.random.default_rng(3)
    arrays = [rng.integers(-2, 3, problem.shape_of_operand(name)).astype(np.float32) for name in problem.operands]
    if special:
        for array in arrays:
            array.reshape(-1)[[0, *rng.integers(0, array.size, 2)]] = np.inf, np.inf, np.nan
    expected = []
    for result in problem.results:
        part = Problem.parse(f"{result}_grad f32 {text}")
        expected.append(np.empty(problem.conv.shape_of(result), np.float32))
        plan(part, backend="reference").run(tuple(arrays[:len(part.operands)]), (expected[-1],), None)
    found = make_plan(problem, None, entry_for("slide_box", strip))
    assert found.kernel.startswith("slide_box")
    tensors = tuple(channels_last(array).cuda() for array in arrays)
    results = tuple((channels_last(wanted) if wanted.ndim > 1 else torch.from_numpy(wanted).bfloat16()).cuda()
                    for wanted in expected)
    for _ in range(3):  # the first call goes through Triton, later ones are replayed
        for result in results:
            result.fill_(7)
        found.run(tensors, results, None)
        for wanted, result in zip(expected, results):
            np.testing.assert_array_equal(result.float().cpu().numpy(), torch.from_numpy(wanted).bfloat16().float())
