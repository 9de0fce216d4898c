"""Few channels and small groups as wider dense problems: the spread weights, the walk over cells, collected sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import check_bound, check_exact, check_nonfinite
from triton_here import box_at, channels_last, integers_and_result, needs_gpu, needs_interpreter, needs_triton, torch

from convgrad import Problem
from convgrad.plan import plan

INPUT_GEOMETRIES = (
    "n3 c32 k32 i5x6 w3x3 p1x1 g8 NHWC OHWI",
    "n2 c16 k32 i7x9 w3x3 s2x2 p1x1 g4 NHWC OHWI",
    "n2 c3 k16 i14x16 w7x7 s2x2 p3x3 NHWC OHWI",
    "n2 c1 k8 i4x5x8 w3x3x3 p1x1x1 NDHWC ODHWI",
    "n1 c3 k8 i4x6x8 w3x4x5 s2x1x2 p1x1x2 NDHWC ODHWI",
    "n2 c4 k4 i6x8 w3x3 p1x1 NHWC OHWI",
    "n3 c24 k48 i40 w11 s4 p5 g3 NLC OLI",
    "n2 c2 k16 i9x12 w3x3 d2x2 p2x2 NHWC OHWI",
    "n2 c3 k32 i8x8 w4x4 s4x4 NHWC OHWI",
    "n2 c9 k10 i4x3 w2x2 p1x1 NHWC OHWI",
)
WEIGHT_GEOMETRIES = (
    "n3 c32 k32 i5x6 w3x3 p1x1 g8 NHWC OHWI",
    "n2 c32 k64 i7x9 w3x3 s2x2 p1x1 g4 NHWC OHWI",
    "n2 c3 k16 i14x16 w7x7 s2x2 p3x3 NHWC OHWI",
    "n2 c4 k16 i4x5x8 w3x3x3 p1x1x1 NDHWC ODHWI",
    "n1 c16 k4 i4x5x8 w3x3x3 p1x0x1 NDHWC ODHWI",
    "n2 c8 k4 i6x8 w3x3 p1x1 NHWC OHWI",
    "n2 c3 k8 i4x6x16 w3x4x5 s2x1x2 p1x1x2 NDHWC ODHWI",
    "n2 c4 k16 i9x16 w3x3 d2x2 p2x2 NHWC OHWI",
)


def walk(cells: Any, dy: Any, weight: Any, spread: Any, shape: tuple[int, ...]) -> Any:
    """The sums of cell_gather.py in NumPy, from the launch that the plan describes: (N, C, three axes)."""
    geo, tile = cells.geo, cells.tile
    result = torch.empty(shape)
    result = result.permute(0, *range(2, result.dim()), 1).contiguous().permute(0, result.dim() - 1,
                                                                               *range(1, result.dim() - 1))
    launch = cells.gather.describe(dy, spread, weight, result)
    names = cells.gather.kernel.arg_names[5:5 + len(launch.scalars)]
    v = {**dict(zip(names, launch.scalars)), **launch.constants}
    dy_box, weight_box, *_ = launch.leading(dy, spread, weight, result)
    source, spread_rows = (box.base.as_strided(box.shape, box.strides).float().numpy() for box in (dy_box, weight_box))
    u, low, stride = ([v[f"{letter}{a}"] for a in range(3)] for letter in "ULT")
    columns = geo.phases * tile.fold * geo.group_in * tile.GP
    steps = u[0] * u[2] * v["CHUNKS"]
    out = np.full((geo.batch, geo.groups * geo.group_in, *geo.x), np.nan)
    for pid in range(launch.grid[0]):
        column_tile, rest = pid % v["COLUMN_TILES"], pid // v["COLUMN_TILES"]
        super_group, first = rest // v["SHARE"], rest % v["SHARE"]
        weights = (super_group * v["COLUMN_TILES"] + column_tile) * steps * u[1] * tile.BN
        for number in range(first, v["tiles"], v["SHARE"]):
            rest, box_2 = divmod(number, v["boxes_2"])
            rest, box_1 = divmod(rest, v["boxes_1"])
            box_n, j0 = divmod(rest, v["boxes_0"])
            for line in range(tile.LB):
                sums = np.zeros((tile.PN, tile.B2, tile.BN))
                for step in range(steps):
                    chunk, cell = step % v["CHUNKS"], (step // v["CHUNKS"]) % u[2] + low[2]
                    at, part = divmod(cell, v["PER_ROW"])
                    for s1 in range(u[1]):
                        start = (box_n * tile.PN, j0 + step // (v["CHUNKS"] * u[2]) + low[0],
                                 box_1 * tile.LB + line + s1 + low[1], box_2 * tile.B2 + at,
                                 super_group * geo.group_out * tile.GP + part * v["CELL"] + chunk * tile.CB)
                        a = box_at(source, start, (tile.PN, 1, 1, tile.B2, tile.CB))[:, 0, 0]
                        b = spread_rows[weights + (step * u[1] + s1) * tile.BN:][:tile.BN]
                        sums += a @ b.T
                for (n, w, column), value in np.ndenumerate(sums):
                    phase, c = divmod(column_tile * tile.BN + column, geo.group_in * tile.GP)
                    phase, phase_2 = divmod(phase, stride[2] * tile.fold)
                    i = (j0 * stride[0] + phase // stride[1], (box_1 * tile.LB + line) * stride[1] + phase % stride[1],
                         (box_2 * tile.B2 + w) * stride[2] * tile.fold + phase_2)
                    image = box_n * tile.PN + n
                    if (column_tile * tile.BN + column < columns and image < geo.batch
                            and all(place < extent for place, extent in zip(i, geo.x))):
                        here = (image, super_group * geo.group_in * tile.GP + c, *i)
                        assert np.isnan(out[here])
                        out[here] = value
    return out


@needs_interpreter
@pytest.mark.parametrize("text", INPUT_GEOMETRIES)
def test_cells_cover_every_product_once(text: str) -> None:
    from convgrad.backends.triton import cell_plans
    from convgrad.backends.triton.geometry import geometry
    from convgrad.backends.triton.gpu import H200

    problem, operands, expected = integers_and_result(f"input_grad bf16 {text}")
    geo = geometry(problem.conv)
    assert cell_plans.supports(problem, geo) is None
    dy, weight = map(channels_last, operands)
    by_shape = {(t.fold, t.GP, t.CB, t.BN): t for t in cell_plans.all_cells(geo, None, H200)}
    assert by_shape
    for tile in list(by_shape.values())[::max(1, len(by_shape) // 2)]:
        cells = cell_plans.cell_plan(geo, tile, H200)
        spread = torch.full((cells.spread_size,), float("nan"), dtype=torch.bfloat16)
        cells.spread(weight, spread)
        assert np.array_equal(walk(cells, dy, weight, spread, expected.shape).reshape(expected.shape), expected), tile


def partial_launch(wide: Any, tile: Any, numbers: Any) -> Any:
    """Describes the plain kernel's launch that writes the partial sums of a wider problem."""
    from convgrad.backends.triton.pointer_plans import weight_launch

    return lambda dy, x, out, table: weight_launch(wide, tile, numbers, dy, x, out)


@needs_interpreter
@pytest.mark.parametrize("text", WEIGHT_GEOMETRIES)
def test_collected_sums_of_the_wider_gradient(text: str) -> None:
    """The wider gradient by the plain kernel, then the sums that belong to each weight."""
    from convgrad.backends.triton import wide_plans
    from convgrad.backends.triton.geometry import geometry
    from convgrad.backends.triton.gpu import H200
    from convgrad.backends.triton.launch import Step
    from convgrad.backends.triton.numbers_on_device import arithmetic
    from convgrad.backends.triton.tiles import choose_weight
    from convgrad.backends.triton.weight import weight_kernel

    problem, operands, expected = integers_and_result(f"weight_grad bf16 {text}")
    geo = geometry(problem.conv)
    dy, x = map(channels_last, operands)
    found = list(wide_plans.ways(problem, geo))
    assert found
    for way in found[::max(1, len(found) // 2)]:
        wide = wide_plans.wider(geo, way)
        tile = choose_weight(wide, 2, None, False, H200)
        splits = max(2, tile.SPLITS)
        tile = wide_plans.replace(tile, SPLITS=splits)
        plain = Step(weight_kernel, partial_launch(wide, tile, arithmetic(problem)))
        seen = wide_plans.views(geo, way, dy, x)
        assert seen is not None
        partial = torch.full((splits, wide.groups * wide.group_out, *wide.kernel, wide.group_in), float("nan"))
        result = torch.empty(expected.shape)
        plain(*seen, partial.permute(0, 1, 5, 2, 3, 4), partial)
        wide_plans.collect_step(geo, way, wide, splits)(partial, result)
        assert np.array_equal(result.double().numpy(), expected), way


@needs_triton
@pytest.mark.parametrize("wrt", ["input", "weight"])
def test_windows_that_cover_whole_images(wrt: str) -> None:
    text = f"{wrt}_grad bf16 n5 c3 k16 i2x4x5 w2x4x5 s2x4x5 NDHWC ODHWI"
    check_exact(text, "triton")
    assert plan(Problem.parse(f"{text} cuda"), backend="triton").notes[0].startswith("windows cover whole images")


@needs_gpu
@pytest.mark.parametrize("wrt, text", [*(("input", text) for text in INPUT_GEOMETRIES),
                                       *(("weight", text) for text in WEIGHT_GEOMETRIES)])
def test_on_the_gpu(wrt: str, text: str) -> None:
    check_exact(f"{wrt}_grad bf16 {text}", "triton")
    check_bound(f"{wrt}_grad f16 {text}", "triton")
    check_nonfinite(f"{wrt}_grad bf16 {text}", "triton")
