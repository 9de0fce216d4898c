"""Depthwise bands and blocks of small groups: their walk over tiles in NumPy, the kernels themselves on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from triton_here import channels_last, integers_and_results, needs_gpu, torch

from convgrad.backends.triton import band_plans, band_tiles, block_plans
from convgrad.backends.triton.candidates import candidates
from convgrad.backends.triton.geometry import geometry
from convgrad.backends.triton.gpu import H200
from convgrad.backends.triton.plans import make_plan
from convgrad.backends.triton.registry import query_of
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


def place(tile: int, walk: band_tiles.Walk, band: band_tiles.Band) -> tuple[int, int, int]:
    column, rest = tile % walk.column_tiles * 8 * band.J, tile // walk.column_tiles
    return rest // walk.b_tiles * (16 // band.BB), rest % walk.b_tiles * band.BB, column


def bands(kind: str, geo: object) -> list[band_tiles.Band]:
    found = [band for band in band_tiles.options(kind, geo, None, False, H200) if band.J]  # type: ignore[arg-type]
    found.sort(key=lambda band: band.seconds)
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
            dw = weight_by_bands(dy, x, geo, replace(band, splits=runs))
            np.testing.assert_allclose(dw.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)


def weight_by_bands(dy: np.ndarray, x: np.ndarray, geo: object, band: band_tiles.Band) -> np.ndarray:
    k0, k1, k2 = geo.kernel  # type: ignore[attr-defined]
    p0, p1, p2 = geo.pad  # type: ignore[attr-defined]
    walk = band_tiles.walk_of("weight", geo, band, False)  # type: ignore[arg-type]
    wide = band_tiles.products_wide(geo)  # type: ignore[arg-type]
    ys = as_strips(dy.reshape(dy.shape[0], *geo.y), band.BB, walk.split)  # type: ignore[attr-defined]
    xs = as_strips(x.reshape(x.shape[0], *geo.x), band.BB, walk.split)  # type: ignore[attr-defined]
    size = (16 // band.BB, band.BB)
    dw = np.zeros((k0, k1, k2))
    for begin, end in band_tiles.runs_of("weight", walk, band, 1, H200).bounds(walk.tiles * walk.steps):
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


LINES = ("n16 c1 k1 i70 w31 p15 NLC OLI", "n18 c1 k1 i50 w31 p30:0 NLC OLI", "n3 c1 k1 i40 w5 p2 NLC OLI",
         "n32 c1 k1 i33 w4 p3:0 NLC OLI", "n5 c1 k1 i64 w3 NLC OLI", "n2 c1 k1 i9 w17 p20:9 NLC OLI")


@pytest.mark.parametrize("text", ["n32 c1 k1 i26x20 w3x3 p1x1 NHWC OHWI", "n16 c1 k1 i30x25 w5x5 p2x2 NHWC OHWI"])
def test_short_runs_share_the_last_tiles(text: str) -> None:
    """Where programs come in more sets than fill a wave, the last tiles are divided."""
    problem = Problem.parse(f"input_grad f32 {text}")
    geo = geometry(problem.conv)
    rng = np.random.default_rng(1)
    dy, w = (rng.standard_normal(problem.shape_of_operand(name)).astype(np.float32) for name in problem.operands)
    expected = np.empty(problem.conv.input_shape, np.float32)
    plan(problem, backend="reference").run((dy, w), (expected,), None)
    band = band_tiles.Band(J=1, V=2, LINES=geo.kernel[1], STAGES=2, BB=4, splits=1000)
    walk = band_tiles.walk_of("input", geo, band, False)
    for sets in range(1, 60):
        runs = band_tiles.runs_of("input", walk, band, sets, H200)
        bounds = runs.bounds(walk.tiles * walk.steps)
        assert [end for _, end in bounds] == [*(begin for begin, _ in bounds[1:]), walk.tiles * walk.steps]
    found = {sets: band_tiles.runs_of("input", walk, band, sets, H200) for sets in range(1, 60)}
    sets = next(sets for sets, runs in found.items() if runs.long < runs.count)
    np.testing.assert_allclose(input_by_bands(dy, w, geo, band, sets).reshape(expected.shape), expected, rtol=1e-4,
                               atol=1e-4)


@pytest.mark.parametrize("text", LINES)
@pytest.mark.parametrize("runs", [1, 2, 5])
def test_sums_along_a_line(text: str, runs: int) -> None:
    """The walk of band_line.py: 16 columns of x a step, and the groups of dy that reach them."""
    problem = Problem.parse(f"weight_grad f32 {text}")
    geo = geometry(problem.conv)
    rng = np.random.default_rng(1)
    dy, x = (rng.standard_normal(problem.shape_of_operand(name)).astype(np.float32) for name in problem.operands)
    expected = np.empty(problem.conv.weight_shape, np.float32)
    plan(problem, backend="reference").run((dy, x), (expected,), None)
    taps, pad, back, steps = geo.kernel[2], geo.pad[2], band_tiles.back_of(geo), band_tiles.line_steps("weight", geo)
    tiles = -(-geo.batch // 16)
    run = -(-tiles * steps // runs)
    dw, bias = np.zeros(taps), 0.0
    for begin in range(0, tiles * steps, run):
        start = begin - min(begin % steps, (back + 1) // 2)
        ring = [np.zeros((16, 8))] * back
        acc = np.zeros((back + 2, 16, 8))
        for at in range(start, min(begin + run, tiles * steps)):
            n, step = at // steps * 16, at % steps
            ring += [columns(dy, n, 16 * step + 8 * g, 8) for g in range(2)]
            bias += sum(group.sum() for group in ring[-2:]) if at >= begin else 0.0
            left = columns(x, n, 16 * step - pad if at >= begin else x.shape[2], 16)
            for r in range(back + 2):
                acc[r] += left.T @ ring[r]
            ring = ring[2:]
        for r, i, j in np.ndindex(*acc.shape):
            if 0 <= i - j + 8 * (back - r) < taps:
                dw[i - j + 8 * (back - r)] += acc[r, i, j]
    np.testing.assert_allclose(dw, expected.reshape(-1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(bias, dy.sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("text", LINES)
@pytest.mark.parametrize("runs", [1, 2, 5])
def test_columns_along_a_line(text: str, runs: int) -> None:
    """The walk of band_line_input.py: 16 columns of dy a step, two finished groups of dx."""
    problem = Problem.parse(f"input_grad f32 {text}")
    geo = geometry(problem.conv)
    rng = np.random.default_rng(2)
    dy, w = (rng.standard_normal(problem.shape_of_operand(name)).astype(np.float32) for name in problem.operands)
    expected = np.empty(problem.conv.input_shape, np.float32)
    plan(problem, backend="reference").run((dy, w), (expected,), None)
    taps, pad, back, steps = geo.kernel[2], geo.pad[2], band_tiles.back_of(geo), band_tiles.line_steps("input", geo)
    matrices = np.zeros((back + 2, 16, 8))
    for r, i, j in np.ndindex(*matrices.shape):
        if 0 <= j - i + taps - 1 - 8 * (back - r) < taps:
            matrices[r, i, j] = w.reshape(-1)[j - i + taps - 1 - 8 * (back - r)]
    dx = np.full(expected.shape, np.nan)
    total = -(-geo.batch // 16) * steps
    run = -(-total // runs)
    for begin in range(0, total, run):
        acc = np.zeros((back + 2, 16, 8))
        for at in range(begin - min(begin % steps, (back + 1) // 2), min(begin + run, total)):
            n, step = at // steps * 16, at % steps
            left = columns(dy, n, 16 * step + pad - taps + 1, 16)
            acc += left @ matrices
            for g, i, j in product(range(2), range(16), range(8)):
                column = 16 * step + 8 * (g - back) + j
                if at >= begin and n + i < geo.batch and 0 <= column < geo.x[2]:
                    assert np.isnan(dx[n + i, 0, column]), "written twice"
                    dx[n + i, 0, column] = acc[g, i, j]
            acc = np.concatenate([acc[2:], np.zeros((2, 16, 8))])
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-4)


def columns(tensor: np.ndarray, n: int, first: int, count: int) -> np.ndarray:
    """16 images x columns, zeros outside."""
    out = np.zeros((16, count))
    for i, c in np.ndindex(16, count):
        if n + i < tensor.shape[0] and 0 <= first + c < tensor.shape[2]:
            out[i, c] = tensor[n + i, 0, first + c]
    return out


@pytest.mark.parametrize("text", [*PROBLEMS, "n3 c1 k1 i7x6x9 w4x3x2 p0:2x1x1 NDHWC ODHWI"])
def test_input_rows(text: str) -> None:
    problem = Problem.parse(f"input_grad f32 {text}")
    geo = geometry(problem.conv)
    rng = np.random.default_rng(2)
    dy, w = (rng.standard_normal(problem.shape_of_operand(name)).astype(np.float32) for name in problem.operands)
    expected = np.empty(problem.conv.input_shape, np.float32)
    plan(problem, backend="reference").run((dy, w), (expected,), None)
    for band in bands("input", geo):
        for runs in (1, 5):
            dx = input_by_bands(dy, w, geo, replace(band, splits=runs))
            np.testing.assert_allclose(dx.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)


def test_padding_of_an_axis_without_taps_is_left_to_others() -> None:
    """Bands that hold one plane of taps read the planes of dy at the places of those of dx."""
    problem = Problem.parse("input_grad bf16 n4 c32 k32 i5x12x9 w1x3x3 p1x1x1 g32 NDHWC ODHWI cuda")
    assert band_plans.supports(problem, geometry(problem.conv)) is not None


def input_by_bands(dy: np.ndarray, w: np.ndarray, geo: object, band: band_tiles.Band, sets: int = 1) -> np.ndarray:
    k0, k1, k2 = geo.kernel  # type: ignore[attr-defined]
    p0, p1, p2 = geo.pad  # type: ignore[attr-defined]
    walk = band_tiles.walk_of("input", geo, band, False)  # type: ignore[arg-type]
    wide = band_tiles.products_wide(geo)  # type: ignore[arg-type]
    ys = as_strips(dy.reshape(dy.shape[0], *geo.y), band.BB, walk.split)  # type: ignore[attr-defined]
    dx = np.full((dy.shape[0], *geo.x), np.nan)  # type: ignore[attr-defined]
    strips = as_strips(dx, band.BB, walk.split)
    taps = w.reshape(k0 * k1, k2)
    matrices = np.zeros((k0 * k1, wide, 16, 8))
    for t in range(wide):
        for source in range(16):
            for target in range(8):
                tap = target - source + k2 - 1 - 16 * t
                if 0 <= tap < k2:
                    matrices[:, t, source, target] = taps[:, tap]
    size = (16 // band.BB, band.BB)
    if band_tiles.is_tall(geo, band):  # type: ignore[arg-type]
        rows_of_blocks(ys, strips, matrices, geo, walk, band)
        return strips.transpose(0, 3, 1, 2).reshape(dx.shape) if walk.split else strips.transpose(0, 3, 1, 2)
    for begin, end in band_tiles.runs_of("input", walk, band, sets, H200).bounds(walk.tiles * walk.steps):
        start = begin - min(begin % walk.steps, k1 - 1)
        acc = [np.zeros((16, 8 * band.J)) for _ in range(k1)]
        for at in range(start, end):
            a, b, column = place(at // walk.steps, walk, band)
            step = at % walk.steps
            for plane in range(k0):
                window = box(ys, a, step, column + p2 - k2 + 1, b + p0 - plane, size, 8 * (band.J - 1 + 2 * wide))
                for j, t, line in product(range(band.J), range(wide), range(k1)):
                    left = window[:, 8 * (j + 2 * t):8 * (j + 2 * t) + 16]
                    acc[line][:, 8 * j:8 * j + 8] += left @ matrices[plane * k1 + line, t]
            done = acc[0].reshape(*size, 8 * band.J)
            acc = [*acc[1:], np.zeros((16, 8 * band.J))]
            for i, j, c in np.ndindex(*done.shape):
                where = (a + i, step - p1, column + c, b + j)
                if at >= begin and all(0 <= p < e for p, e in zip(where, strips.shape)):
                    assert np.isnan(strips[where]), "written twice"
                    strips[where] = done[i, j, c]
    assert not np.isnan(strips).any(), "not written"
    return strips.transpose(0, 3, 1, 2).reshape(dx.shape) if walk.split else strips.transpose(0, 3, 1, 2)


def rows_of_blocks(ys: np.ndarray, strips: np.ndarray, matrices: np.ndarray, geo: object, walk: band_tiles.Walk,
                   band: band_tiles.Band) -> None:
    """The walk of band_tall.py: blocks of rows, the matrices of a line more with every row of dy."""
    _, k1, k2 = geo.kernel  # type: ignore[attr-defined]
    _, p1, p2 = geo.pad  # type: ignore[attr-defined]
    rows, wide, size = band.LINES, matrices.shape[1], (16 // band.BB, band.BB)
    q1, x1 = geo.y[1], geo.x[1]  # type: ignore[attr-defined]
    none = np.zeros_like(matrices[0])
    for tile, first in product(range(walk.tiles), range(0, x1, rows)):
        a, b, column = place(tile, walk, band)
        low = min(max(first + p1 - k1 + 1, 0), q1)
        high = max(min(first + p1 + rows, q1), low)
        k = first + p1 - low
        held = [matrices[k + 1 + r] if 0 <= k + 1 + r < k1 else none for r in range(rows - 1)]
        acc = np.zeros((rows, 16, 8 * band.J))
        for o in range(low, low + -(-(high - low) // rows) * rows):
            held = [matrices[k] if 0 <= k < k1 else none, *held[:rows - 1]]
            window = box(ys, a if o < high else ys.shape[0], o, column + p2 - k2 + 1, b, size,
                         8 * (band.J - 1 + 2 * wide))
            for r, j, t in product(range(rows), range(band.J), range(wide)):
                acc[r, :, 8 * j:8 * j + 8] += window[:, 8 * (j + 2 * t):8 * (j + 2 * t) + 16] @ held[r][t]
            k -= 1
        done = acc.reshape(rows, *size, 8 * band.J)
        for r, i, j, c in np.ndindex(*done.shape):
            where = (a + i, first + r, column + c, b + j)
            if all(0 <= p < e for p, e in zip(where, strips.shape)):
                assert np.isnan(strips[where]), "written twice"
                strips[where] = done[r, i, j, c]



GROUPED = ("n20 c64 k64 i9x12 w3x3 p1x1 g16 NHWC OHWI", "n16 c64 k64 i7x15 w3x3 p0:2x2:0 g4 NHWC OHWI",
           "n33 c64 k64 i10x9 w2x4 p1x1 g8 NHWC OHWI", "n5 c64 k64 i40 w5 p2 g32 NLC OLI")


@pytest.mark.parametrize("wrt", ["input", "weight"])
@pytest.mark.parametrize("text", GROUPED)
def test_walk_of_blocks(text: str, wrt: str) -> None:
    """Every product of a row of dy with a row of x is met exactly once, whatever the runs."""
    problem = Problem.parse(f"{wrt}_grad f32 {text}")
    geo = geometry(problem.conv)
    (_, k1, k2), (_, p1, p2) = geo.kernel, geo.pad
    for tile in list(block_plans.tiles(query_of(problem, gpu=H200)))[::5]:
        tile = block_plans.replace(tile, splits=5)
        steps, tiles = block_plans.steps_of(problem, geo), block_plans.column_tiles(problem, geo, tile)
        all_steps, run = block_plans.run_steps(problem, geo, tile)
        met = np.zeros((geo.batch, *geo.y[1:], *geo.x[1:]), np.int8)
        for begin in range(0, all_steps, run):
            end = min(begin + run, all_steps)
            first = min(begin + max(k1 - 1 - begin % steps, 0), end) if wrt == "weight" else begin
            for at in range(first, end):
                tile_at, step = divmod(at, steps)
                images = slice(tile_at // tiles * 16, tile_at // tiles * 16 + 16)
                column = tile_at % tiles * tile.WT
                for a in range(k1):
                    for b in range(k2):
                        for w in range(column, column + tile.WT):
                            if wrt == "input":  # rows of dy: this step's and the k1 - 1 before, in this tile or zeros
                                o1, o2, i1, i2 = step - a, w + p2 - b, step - p1, w
                            else:
                                o1, o2, i1, i2 = step - (k1 - 1), w, step - (k1 - 1) + a - p1, w + b - p2
                            if 0 <= o1 < geo.y[1] and 0 <= o2 < geo.y[2] and 0 <= i1 < geo.x[1] and 0 <= i2 < geo.x[2]:
                                met[images, o1, o2, i1, i2] += 1
                if wrt == "input" and 0 <= step - p1 < geo.x[1]:  # what a tile's first rows find in the slots is zeros
                    before = [steps + step - a for a in range(k1) if step - a < 0]
                    assert all(row >= geo.y[1] for row in before) or at < k1
        for o1, o2, i1, i2 in np.ndindex(*met.shape[1:]):
            wanted = 0 <= i1 - o1 + p1 < k1 and 0 <= i2 - o2 + p2 < k2
            assert (met[:, o1, o2, i1, i2] == wanted).all()


BANDS_ON_DEVICE = (
    "n16 c32 k32 i9x12 w3x3 p1x1 g32 NHWC OHWI", "n20 c40 k40 i11x19 w5x5 p2x2 g40 NHWC OHWI",
    "n16 c64 k64 i8x8 w7x7 p3x3 g64 NHWC OHWI", "n18 c96 k96 i50 w31 p30:0 g96 NLC OLI",
    "n5 c16 k16 i20x33 w9x9 p4x4 g16 NHWC OHWI", "n16 c32 k32 i9x13 w5x3 p0:2x2:0 g32 NHWC OHWI",
    "n3 c32 k32 i6x9x10 w3x3x3 p1x1x1 g32 NDHWC ODHWI", "n4 c32 k32 i5x12x9 w1x3x3 p0x1x1 g32 NDHWC ODHWI",
    "n16 c32 k32 i20x21 w15x11 p7x5 g32 NHWC OHWI", "n20 c64 k64 i90 w5 p2 g64 NLC OLI",
    "n64 c200 k200 i30x44 w5x5 p2x2 g200 NHWC OHWI",
)
BLOCKS_ON_DEVICE = (
    "n20 c64 k64 i9x12 w3x3 p1x1 g16 NHWC OHWI", "n16 c128 k128 i7x15 w3x3 p0:2x2:0 g8 NHWC OHWI",
    "n33 c64 k64 i10x9 w3x3 p1x1 g8 NHWC OHWI", "n5 c64 k64 i40 w5 p2 g32 NLC OLI",
)


@needs_gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("wrt, text", [
    *product(("input_grad", "weight_grad", "weight_grad+bias_grad"), BANDS_ON_DEVICE),
    *product(("input_grad", "weight_grad"), BLOCKS_ON_DEVICE)])
def test_kernels_on_the_gpu(wrt: str, text: str, special: bool) -> None:
    """Sums of small integers are exact; with Inf and NaN in the operands the same elements are not finite."""
    problem = Problem.parse(f"{wrt} bf16 {text} cuda")
    choices = [choice for choice in candidates(problem) if choice["kernel"] in ("band", "blocks")][:4]
    operands, expected = integers_and_results(problem, special)
    for choice in choices:
        results = tuple(on_device(np.full(wanted.shape, 7, np.float32)) for wanted in expected)
        make_plan(problem, None, choice | {"splits": 3}).run(tuple(map(on_device, operands)), results, None)
        for wanted, found in zip(expected, results):
            np.testing.assert_array_equal(found.float().cpu().numpy(), torch.from_numpy(wanted).bfloat16().float())


def on_device(array: np.ndarray) -> Any:
    return (channels_last(array) if array.ndim > 1 else torch.from_numpy(array).bfloat16()).cuda()
