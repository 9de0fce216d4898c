"""Plans for windows of one point with channels first (see points.py): when, which tile, launches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...problem import Problem
from .geometry import Geometry
from .launch import Launch, Step, aligned_strides, power_of_two
from .line_plans import LAUNCH_SECONDS, MEMORY_BYTES
from .numbers_on_device import rounding
from .points import point_gather_kernel, point_weight_kernel
from .tiles import MULTIPROCESSORS, most_splits, stages_for

# What the cost model counts with: products a second, and the part of the memory's speed that is reached, by how many
# elements at once an image's lines allow to load (measured on an H200).
PRODUCTS = 350e12
SHARES = {1: 0.1, 2: 0.3, 4: 0.6, 8: 0.9, 16: 0.9}
DENSE = 128  # products of an element from which on the tensor cores are what limits


@dataclass(frozen=True)
class PointTile:
    """Rows x columns of a product and how deep a step is; runs of steps for the weight gradient."""

    rows: int
    columns: int
    depth: int
    splits: int
    warps: int
    stages: int
    seconds: float

    def __str__(self) -> str:
        return (f"{self.rows}x{self.columns} tile of matrix products, {self.depth} deep a step, {self.splits} runs, "
                f"{self.warps} warps, {self.stages} stages, {self.seconds * 1e6:.0f} us expected")


def points_fit(problem: Problem, geo: Geometry) -> bool:
    """Whether a problem is a matrix product of 16-bit images as they lie, and large enough for tensor cores."""
    return (problem.dtype in ("bfloat16", "float16") and rounding(problem) == "" and problem.layout.startswith("NC")
            and problem.out_dtype != "float64" and geo.groups == 1 and geo.taps == 1 and geo.phases == 1
            and geo.x == geo.y and min(geo.group_in, geo.group_out) >= 16)


def matrices(*tensors: Any) -> bool:
    """Whether the positions of each tensor are neighbours in memory, without gaps."""
    for tensor in tensors:
        step = 1
        for extent, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:])):
            if extent > 1 and stride != step:
                return False
            step *= extent
    return True


def seconds_of(problem: Problem, geo: Geometry, bytes_again: int = 0) -> float:
    """Estimated: the products, or the bytes of operands and result."""
    flops = 2.0 * geo.group_in * geo.group_out * geo.pixels
    share = SHARES[aligned_strides((math.prod(geo.y),))[0]]
    return LAUNCH_SECONDS + max(flops / PRODUCTS, (problem.min_bytes + bytes_again) / (share * MEMORY_BYTES))


def width_of(channels: int, most: int) -> int:
    """The power of two that covers channels with the least to spare, the largest of those."""
    return min((size for size in (16, 32, 64, 128, 256) if size <= most and size < 2 * max(16, channels)),
               key=lambda size: (-(-channels // size) * size, -size))


def gather_tile(problem: Problem, geo: Geometry) -> PointTile:
    red, col = (geo.group_out, geo.group_in) if problem.wrt == "input" else (geo.group_in, geo.group_out)
    dense = red * col >= DENSE * (red + col)
    rows = max(64, width_of(col, 256)) if dense else 64
    columns = min(128 if red > 64 else 64, max(16, power_of_two(math.prod(geo.y))))
    while rows > 64 and -(-col // rows) * geo.batch * -(-math.prod(geo.y) // columns) < MULTIPROCESSORS:
        rows //= 2
    depth = min(64, max(16, power_of_two(red)))
    together = 1 if rows == 256 else 3  # programs of a multiprocessor
    stages = min(stages_for(together * (rows + columns) * depth * 2), -(-red // depth))
    return PointTile(rows, columns, depth, 1, 8 if rows == 256 else 4, stages, seconds_of(problem, geo))


def weight_tile(problem: Problem, geo: Geometry, max_workspace: int | None) -> PointTile:
    rows, columns = max(64, width_of(geo.group_out, 128)), width_of(geo.group_in, 128)
    depth = 64
    tiles = -(-geo.group_out // rows) * -(-geo.group_in // columns)
    steps = geo.batch * -(-math.prod(geo.y) // depth)
    splits = max(1, min(2 * MULTIPROCESSORS // tiles, steps // 8, most_splits(geo, max_workspace)))
    stages = min(stages_for(2 * (rows + columns) * depth * 2), -(-steps // splits))
    again = 8 * splits * geo.group_out * geo.group_in if splits > 1 else 0
    return PointTile(rows, columns, depth, splits, 8 if rows * columns >= 128 * 128 else 4, stages,
                     seconds_of(problem, geo, again) + (LAUNCH_SECONDS if splits > 1 else 0))


def strides_for(tensor: Any) -> tuple[int, tuple[int, int]]:
    """The alignment and the strides of images and channels."""
    align, (image, channel) = aligned_strides((tensor.stride(0) if tensor.shape[0] > 1 else 0,
                                               tensor.stride(1) if tensor.shape[1] > 1 else 0))
    return align, (image, channel)


def point_gather(problem: Problem, geo: Geometry, tile: PointTile) -> Step:
    """step(source, weight, result)."""
    is_input = problem.wrt == "input"
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    positions = math.prod(geo.y)

    def launch(source: Any, weight: Any, result: Any) -> Launch:
        s_align, source_steps = strides_for(source)
        r_align, result_steps = strides_for(result)
        run_align, (run,) = aligned_strides((positions,))
        steps = (weight.stride(0), weight.stride(1)) if is_input else (weight.stride(1), weight.stride(0))
        programs = -(-col // tile.rows) * geo.batch * -(-positions // tile.columns)
        return Launch((programs,), (run, *source_steps, *steps, *result_steps),
                      {"S_ALIGN": s_align, "R_ALIGN": r_align, "RUN_ALIGN": run_align, "RED": red, "COL": col,
                       "BN": tile.rows, "BP": tile.columns,
                       "CB": tile.depth}, tile.warps, tile.stages)

    return Step(point_gather_kernel, launch)


def point_weight(geo: Geometry, tile: PointTile) -> Step:
    """step(dy, x, result): partial sums of all runs (run, O, I, three axes), or with one run the gradient itself."""
    positions = math.prod(geo.y)
    run_tiles = -(-positions // tile.depth)
    steps = geo.batch * run_tiles

    def launch(dy: Any, x: Any, result: Any) -> Launch:
        y_align, y_steps = strides_for(dy)
        x_align, x_steps = strides_for(x)
        run_align, (run,) = aligned_strides((positions,))
        r_split, r_o, r_i = result.stride()[:3] if tile.splits > 1 else (0, *result.stride()[:2])
        programs = -(-geo.group_out // tile.rows) * -(-geo.group_in // tile.columns) * tile.splits
        return Launch((programs,), (run, run_tiles, steps, -(-steps // tile.splits), *y_steps, *x_steps, r_split, r_o,
                                    r_i),
                      {"Y_ALIGN": y_align, "X_ALIGN": x_align, "RUN_ALIGN": run_align, "KG": geo.group_out,
                       "CG": geo.group_in, "BK": tile.rows,
                       "BC": tile.columns, "BP": tile.depth}, tile.warps, tile.stages)

    return Step(point_weight_kernel, launch)
