"""Weight gradients by whole groups: the walk over lines in NumPy, the kernels themselves on a GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from triton_here import channels_last, integers_and_results, needs_gpu, needs_triton, torch

from convgrad import Problem, plan
from convgrad.backends.triton import group_plans
from convgrad.backends.triton.candidates import entry_for
from convgrad.backends.triton.geometry import Geometry, geometry
from convgrad.backends.triton.gpu import H200
from convgrad.backends.triton.kernel import worth_measuring
from convgrad.backends.triton.plans import make_plan
from convgrad.backends.triton.registry import query_of
from convgrad.backends.triton.whole_groups import first_tap, products_of

pytestmark = needs_triton
PROBLEMS = (
    "n20 c32 k64 i70 w9 s4 p4 g2 NLC OLI", "n17 c32 k32 i53 w11 s4 p20:0 g2 NLC OLI",
    "n5 c64 k32 i40 w3 s2 p1 g2 NLC OLI", "n4 c128 k128 i33 w3 p1 g2 NLC OLI",
    "n18 c128 k128 i7x8 w3x3 s2x2 p1x1 g2 NHWC OHWI", "n16 c32 k32 i5x9 w3x3 p1x1 g2 NHWC OHWI",
    "n3 c64 k128 i9x11 w2x5 s1x3 p0:1x2:0 g2 NHWC OHWI", "n33 c32 k64 i6x7 w1x2 s3x1 g2 NHWC OHWI",
    "n20 c32 k48 i70 w9 s3 p4 g2 NLC OLI", "n8 c96 k96 i37 w40 p20 g2 NLC OLI",
    "n7 c192 k48 i6x9 w3x2 p1x0 g2 NHWC OHWI",
)


def summed(geo: Geometry, tile: group_plans.GroupTile, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dw (group, output channel, input channel, taps) as the kernel sums it; x and dy (n, rows, columns, channels)."""
    rows, units = group_plans.rows_and_units(geo, tile)
    columns, steps, all_steps, run = group_plans.shape_of_walk(geo, tile)
    along, (_, k1s, k2s), (_, t1, t2), (_, p1, p2) = group_plans.along(geo, tile), geo.kernel, geo.stride, geo.pad
    count, cw, kg, gap = group_plans.tiles_of_line(geo, tile), group_plans.width(geo), geo.group_out, tile.gap
    blocks, advance = geo.group_in // cw, 1 if along else min(t1, rows)
    assert rows <= tile.XS
    beside, before = 8, 160  # rows and columns of zeros
    x = np.pad(x, ((0, 16), (beside, beside), (before, before), (0, 0)))
    dy = np.pad(dy, ((0, 16), (0, beside), (0, before), (0, 0)))
    dw = np.full((geo.groups, kg, geo.group_in, k1s, k2s), np.nan)
    for tap in range(0, k2s, tile.taps):
        sums = np.zeros((blocks * k1s * count, geo.groups, 64, kg))
        for begin in range(0, all_steps, run):
            slots: list[Any] = []  # the rows or pieces of x in shared memory: (group, block, unit, image, channel)
            for at in range(begin, min(begin + run, all_steps)):
                number, line = divmod(at, steps)
                a, column = number // columns * tile.images, number % columns * tile.S
                images = slice(a, a + tile.images)
                slots = [] if line == 0 else slots[advance:]
                for r in range(len(slots), rows):
                    i1, i2 = (0, (line + r) * units) if along else (line * t1 + r - p1, column * t2)
                    first = before + i2 + tap - p2
                    piece = x[images, beside + i1, first:first + units].reshape(tile.images, units, geo.groups, -1, cw)
                    slots.append(piece.transpose(2, 3, 1, 0, 4))
                o1, o2 = (0, line * tile.S) if along else (line, column)
                pixels = dy[images, o1, o2:o2 + tile.S].reshape(tile.images, tile.S, geo.groups, kg)
                pixels = pixels.transpose(2, 1, 0, 3).reshape(geo.groups, -1, 16, kg)
                for j in range(blocks * k1s):
                    for unit, part, q in products_of(j, 0, len(sums), tile.S, t2, count, cw, gap):
                        some = slots[unit // units if along else j % k1s][:, j // k1s, unit % units:]
                        taken = some[:, :64 // cw * gap].reshape(geo.groups, 64 // cw, 16, cw)
                        sums[part] += taken.transpose(0, 1, 3, 2).reshape(geo.groups, 64, 16) @ pixels[:, q]
        for part, (c, row) in product(range(len(sums)), product(range(cw), range(64 // cw))):
            tap_2 = tap + first_tap(part % count, cw, gap) + row * gap
            if tap_2 < k2s:
                place = (part // (count * k1s) * cw + c, part // count % k1s, tap_2)
                dw[(slice(None), slice(None), *place)] = sums[part][:, row * cw + c]
    return dw


@pytest.mark.parametrize("text", PROBLEMS)
def test_walk_over_lines(text: str) -> None:
    """Every product is met exactly once, whatever the lines and runs."""
    problem = Problem.parse(f"weight_grad f32 {text}")
    geo = geometry(problem.conv)
    assert group_plans.supports(Problem.parse(f"weight_grad bf16 {text}"), geo) is None
    rng = np.random.default_rng(1)
    dy, x = (rng.integers(-3, 4, problem.shape_of_operand(name)).astype(np.float32) for name in problem.operands)
    expected = np.empty(problem.conv.shape_of("weight"), np.float32)
    plan(problem, backend="reference").run((dy, x), (expected,), None)
    seen = [np.moveaxis(array if array.ndim == 4 else array[:, :, None], 1, -1) for array in (dy, x)]
    tiles = list(group_plans.tiles(query_of(problem, gpu=H200)))
    assert tiles
    for tile, splits in zip(tiles[:2], (1, 5)):
        found = summed(geo, group_plans.replace(tile, splits=splits), *seen)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def test_tiles_fit_the_machine() -> None:
    for text in (*PROBLEMS, "n32 c256 k512 i2048 w41 s4 p20 g16 NLC OLI",
                 "n100 c2048 k2048 i14x14 w3x3 s2x2 p1x1 g32 NHWC OHWI", "n8 c768 k768 i780 w128 p64 g16 NLC OLI"):
        problem = Problem.parse(f"weight_grad bf16 {text} cuda")
        geo = geometry(problem.conv)
        query = query_of(problem, gpu=H200)
        for tile in group_plans.tiles(query):
            rows, units = group_plans.rows_and_units(geo, tile)
            assert rows <= tile.XS and units <= 256
            x_bytes, dy_bytes = group_plans.bytes_of_line(geo, tile)
            assert tile.XS * x_bytes + tile.DS * dy_bytes <= 220 * 1024
            way = group_plans.build(query, tile)
            assert way.name.startswith("groups_bf16") and way.workspace_bytes <= 64 << 20
            alone = tile.splits == 1 or tile.taps < geo.kernel[2]
            assert (way.bias_bytes == 0) == alone and (way.workspace_bytes == 0) == (tile.splits == 1)


@pytest.mark.parametrize("text", [
    "n20 c40 k80 i9x9 w3x3 p1x1 g5 NHWC OHWI", "n20 c32 k64 i70 w9 s4 d2 p4 g2 NLC OLI",
    "n20 c64 k64 i9x9 w3x3 p1x1 NHWC OHWI", "n20 c32 k64 i9x9 w3x3 p1x1 g2 NCHW OIHW",
    "n20 c32 k256 i9x9 w3x3 p1x1 g2 NHWC OHWI",
])
def test_others_are_left_to_other_ways(text: str) -> None:
    problem = Problem.parse(f"weight_grad bf16 {text} cuda")
    assert group_plans.supports(problem, geometry(problem.conv)) is not None


@needs_gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("wrt", "text"), [
    *(("weight_grad", text) for text in PROBLEMS), *(("weight_grad+bias_grad", text) for text in PROBLEMS[::4])])
def test_kernels_on_the_gpu(wrt: str, text: str, special: bool) -> None:
    """Sums of small integers are exact; with Inf and NaN in the operands the same elements are not finite."""
    problem = Problem.parse(f"{wrt} bf16 {text} cuda")
    geo = geometry(problem.conv)
    operands, expected = integers_and_results(problem, special)
    tiles = worth_measuring(group_plans.KERNEL, query_of(problem.with_(wrt="weight")))[:2]
    tile = tiles[PROBLEMS.index(text) % len(tiles)]  # kernels are compiled for each
    choice = entry_for("groups", group_plans.replace(tile, splits=1 if tile.taps < geo.kernel[2] else 3))
    results = tuple(on_device(np.full(wanted.shape, 7, np.float32)) for wanted in expected)
    make_plan(problem, None, choice).run(tuple(map(on_device, operands)), results, None)
    for wanted, found in zip(expected, results):
        np.testing.assert_array_equal(found.float().cpu().numpy(), torch.from_numpy(wanted).bfloat16().float())


def on_device(array: np.ndarray) -> Any:
    return (channels_last(array) if array.ndim > 1 else torch.from_numpy(array).bfloat16()).cuda()
