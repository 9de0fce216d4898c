"""The walk of the banded depthwise kernels over their tiles, in NumPy; the kernels themselves need a GPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

from convgrad.backends.triton import band_plans
from convgrad.backends.triton.geometry import geometry
from convgrad.plan import plan
from convgrad.problem import Problem

PROBLEMS = (
    "n16 c1 k1 i9x12 w3x3 p1x1 NHWC OHWI", "n20 c1 k1 i11x19 w5x5 p2x2 NHWC OHWI", "n6 c1 k1 i8x8 w7x7 p3x3 NHWC OHWI",
    "n16 c1 k1 i70 w31 p15 NLC OLI", "n18 c1 k1 i50 w31 p30:0 NLC OLI", "n5 c1 k1 i10x33 w9x9 p4x4 NHWC OHWI",
    "n4 c1 k1 i9x13 w5x3 p0:2x2:0 NHWC OHWI", "n3 c1 k1 i6x9x10 w3x3x3 p1x1x1 NDHWC ODHWI",
    "n4 c1 k1 i20x21 w15x11 p7x5 NHWC OHWI", "n8 c1 k1 i12x10 w3x3 NHWC OHWI", "n4 c1 k1 i10x9 w3x3 p3:4x5:3 NHWC OHWI",
    "n4 c1 k1 i5x12x9 w1x3x3 p0x1x1 NDHWC ODHWI",
)


def box(strips: np.ndarray, a: int, row: int, column: int, b: int, size: tuple[int, int], columns: int) -> np.ndarray:
    """What the copy engine brings of (strips a, rows, columns, strips b): zeros outside; 16 strips x columns."""
    out = np.zeros((size[0], size[1], columns))
    for i in range(size[0]):
        for j in range(size[1]):
            for c in range(columns):
                place = (a + i, row, column + c, b + j)
                if all(0 <= p < e for p, e in zip(place, strips.shape)):
                    out[i, j, c] = strips[place]
    return out.reshape(16, columns)


def as_strips(tensor: np.ndarray, bb: int, split: bool) -> np.ndarray:
    """(n, planes, rows, columns) as (a, rows, columns, b)."""
    n = tensor.shape[0]
    if split:
        return tensor[:, 0].reshape(n // bb, bb, *tensor.shape[2:]).transpose(0, 2, 3, 1)
    return tensor.transpose(0, 2, 3, 1)


def place(tile: int, walk: band_plans.Walk, band: band_plans.Band) -> tuple[int, int, int]:
    column, rest = tile % walk.column_tiles * 8 * band.J, tile // walk.column_tiles
    return rest // walk.b_tiles * (16 // band.BB), rest % walk.b_tiles * band.BB, column


def bands(kind: str, geo: object) -> list[band_plans.Band]:
    found = sorted(band_plans.options(kind, geo, None, False), key=lambda band: band.seconds)  # type: ignore[arg-type]
    return found[:1] + found[len(found) // 2:len(found) // 2 + 1] + found[-1:]


@pytest.mark.parametrize("text", PROBLEMS)
def test_weight_sums(text: str) -> None:
    problem = Problem.parse(f"weight_grad f32 {text}")
    geo = geometry(problem.conv)
    rng = np.random.default_rng(1)
    dy, x = (rng.standard_normal(problem.shape_of_operand(name)).astype(np.float32) for name in problem.operands)
    expected = np.empty(problem.conv.weight_shape, np.float32)
    plan(problem, backend="reference").run((dy, x), (expected,), None)
    for band in bands("weight", geo):
        for runs in (1, 5):
            dw = weight_by_bands(dy, x, geo, band_plans.replace(band, splits=runs))
            np.testing.assert_allclose(dw.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)


def weight_by_bands(dy: np.ndarray, x: np.ndarray, geo: object, band: band_plans.Band) -> np.ndarray:
    k0, k1, k2 = geo.kernel  # type: ignore[attr-defined]
    p0, p1, p2 = geo.pad  # type: ignore[attr-defined]
    walk = band_plans.walk_of("weight", geo, band, False)  # type: ignore[arg-type]
    wide, run = band_plans.products_wide(geo), band_plans.run_steps(walk, band, False)  # type: ignore[arg-type]
    ys = as_strips(dy.reshape(dy.shape[0], *geo.y), band.BB, walk.split)  # type: ignore[attr-defined]
    xs = as_strips(x.reshape(x.shape[0], *geo.x), band.BB, walk.split)  # type: ignore[attr-defined]
    size = (16 // band.BB, band.BB)
    dw = np.zeros((k0, k1, k2))
    all_steps = walk.tiles * walk.steps
    for begin in range(0, all_steps, run):
        end = min(begin + run, all_steps)
        for plane in range(k0):
            for first in range(0, k1, band.LINES):
                start = begin - min(begin % walk.steps, band.LINES - 1)
                ring = [np.zeros((16, 8 * band.J))] * (band.LINES - 1)
                acc = np.zeros((band.LINES, wide, 16, 8))
                for at in range(start, end):
                    a, b, column = place(at // walk.steps, walk, band)
                    o = at % walk.steps
                    i = o - (p1 - first) if at >= begin else -1
                    ring.append(box(ys, a, o, column, b, size, 8 * band.J))
                    window = box(xs, a, i, column - p2, b + plane - p0, size, 8 * (band.J - 1 + 2 * wide))
                    for age in range(band.LINES):
                        for t in range(wide):
                            for j in range(band.J):
                                left = window[:, 8 * (j + 2 * t):8 * (j + 2 * t) + 16]
                                acc[age, t] += left.T @ ring[band.LINES - 1 - age][:, 8 * j:8 * j + 8]
                    ring = ring[1:]
                for age in range(min(band.LINES, k1 - first)):
                    for tap in range(k2):
                        t, d = divmod(tap, 16)
                        dw[plane, first + age, tap] += sum(
                            acc[age, t + (d + j) // 16, (d + j) % 16, j] for j in range(8))
    return dw


@pytest.mark.parametrize("text", [text for text in PROBLEMS if "w3x3x3" not in text and "w15" not in text
                                  and "w9" not in text])
def test_input_rows(text: str) -> None:
    problem = Problem.parse(f"input_grad f32 {text}")
    geo = geometry(problem.conv)
    rng = np.random.default_rng(2)
    dy, w = (rng.standard_normal(problem.shape_of_operand(name)).astype(np.float32) for name in problem.operands)
    expected = np.empty(problem.conv.input_shape, np.float32)
    plan(problem, backend="reference").run((dy, w), (expected,), None)
    for band in bands("input", geo):
        for runs in (1, 5):
            dx = input_by_bands(dy, w, geo, band_plans.replace(band, splits=runs))
            np.testing.assert_allclose(dx.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)


def input_by_bands(dy: np.ndarray, w: np.ndarray, geo: object, band: band_plans.Band) -> np.ndarray:
    _, k1, k2 = geo.kernel  # type: ignore[attr-defined]
    _, p1, p2 = geo.pad  # type: ignore[attr-defined]
    walk = band_plans.walk_of("input", geo, band, False)  # type: ignore[arg-type]
    wide, run = band_plans.products_wide(geo), band_plans.run_steps(walk, band, False)  # type: ignore[arg-type]
    ys = as_strips(dy.reshape(dy.shape[0], *geo.y), band.BB, walk.split)  # type: ignore[attr-defined]
    dx = np.full((dy.shape[0], *geo.x), np.nan)  # type: ignore[attr-defined]
    strips = as_strips(dx, band.BB, walk.split)
    taps = w.reshape(k1, k2)
    matrices = np.zeros((k1, wide, 16, 8))
    for t in range(wide):
        for source in range(16):
            for target in range(8):
                tap = target - source + k2 - 1 - 16 * t
                if 0 <= tap < k2:
                    matrices[:, t, source, target] = taps[:, tap]
    size = (16 // band.BB, band.BB)
    all_steps = walk.tiles * walk.steps
    for begin in range(0, all_steps, run):
        end = min(begin + run, all_steps)
        start = begin - min(begin % walk.steps, k1 - 1)
        acc = [np.zeros((16, 8 * band.J)) for _ in range(k1)]
        for at in range(start, end):
            a, b, column = place(at // walk.steps, walk, band)
            step = at % walk.steps
            window = box(ys, a, step, column + p2 - k2 + 1, b, size, 8 * (band.J - 1 + 2 * wide))
            for j in range(band.J):
                for t in range(wide):
                    left = window[:, 8 * (j + 2 * t):8 * (j + 2 * t) + 16]
                    for line in range(k1):
                        acc[line][:, 8 * j:8 * j + 8] += left @ matrices[line, t]
            done = acc[0].reshape(*size, 8 * band.J)
            acc = [*acc[1:], np.zeros((16, 8 * band.J))]
            for i, j, c in np.ndindex(*done.shape):
                where = (a + i, step - p1, column + c, b + j)
                if at >= begin and all(0 <= p < e for p, e in zip(where, strips.shape)):
                    assert np.isnan(strips[where]), "written twice"
                    strips[where] = done[i, j, c]
    assert not np.isnan(strips).any(), "not written"
    return strips.transpose(0, 3, 1, 2).reshape(dx.shape) if walk.split else strips.transpose(0, 3, 1, 2)
