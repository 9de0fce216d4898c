"""Plans for windows of one point with channels first (see points.py): when, which tile, launches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...problem import Problem
from .geometry import Geometry
from .gpu import runs_anywhere
from .kernel import Kernel, Prepared, Query
from .launch import Launch, Step, aligned_strides, power_of_two
from .numbers_on_device import scratch, sixteen_bits
from .points import point_gather_kernel, point_weight_kernel
from .split_k import add_step
from .tiles import most_splits, stages_for

# What the cost model counts with: shares of the tensor cores' and of the memory's speed, the latter by how many
# elements at once an image's lines allow to load (measured on an H200).
PRODUCTS = 0.35  # of the tensor cores' peak
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


def supports(problem: Problem, geo: Geometry) -> str | None:
    """Matrix products of 16-bit images as they lie, large enough for tensor cores."""
    if not sixteen_bits(problem) or problem.out_dtype == "float64":
        return "16-bit operands only"
    if not problem.layout.startswith("NC"):
        return "channels first only"
    if geo.groups > 1 or geo.taps > 1 or geo.phases > 1 or geo.x != geo.y:
        return "1x1 windows at stride 1 without padding or groups only"
    return "at least 16 channels on both sides" if min(geo.group_in, geo.group_out) < 16 else None


def accepts(query: Query) -> str | None:
    """Positions of images are neighbours in memory."""
    seen = query.operands if query.problem.wrt == "weight" else (query.operands[0], query.result)
    return None if matrices(*seen) else "the positions of an image are not neighbours in memory"


def matrices(*tensors: Any) -> bool:
    """Whether the positions of each tensor are neighbours in memory, without gaps."""
    for tensor in tensors:
        step = 1
        for extent, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:])):
            if extent > 1 and stride != step:
                return False
            step *= extent
    return True


def seconds_of(query: Query, bytes_again: int = 0) -> float:
    """Estimated: the products, or the bytes of operands and result."""
    geo, gpu = query.geo, query.gpu
    flops = 2.0 * geo.group_in * geo.group_out * geo.pixels
    share = SHARES[aligned_strides((math.prod(geo.y),))[0]]
    return gpu.launch_s + max(flops / (PRODUCTS * gpu.tensor_flops),
                              (query.problem.min_bytes + bytes_again) / (share * gpu.memory_bytes_per_s))


def width_of(channels: int, most: int) -> int:
    """The power of two that covers channels with the least to spare, the largest of those."""
    return min((size for size in (16, 32, 64, 128, 256) if size <= most and size < 2 * max(16, channels)),
               key=lambda size: (-(-channels // size) * size, -size))


def gather_tile(query: Query) -> PointTile:
    problem, geo, gpu = query.problem, query.geo, query.gpu
    red, col = (geo.group_out, geo.group_in) if problem.wrt == "input" else (geo.group_in, geo.group_out)
    dense = red * col >= DENSE * (red + col)
    rows = max(64, width_of(col, 256)) if dense else 64
    columns = min(128 if red > 64 else 64, max(16, power_of_two(math.prod(geo.y))))
    while rows > 64 and -(-col // rows) * geo.batch * -(-math.prod(geo.y) // columns) < gpu.multiprocessors:
        rows //= 2
    depth = min(64, max(16, power_of_two(red)))
    together = 1 if rows == 256 else 3  # programs of a multiprocessor
    stages = min(stages_for(together * (rows + columns) * depth * 2, gpu), -(-red // depth))
    return PointTile(rows, columns, depth, 1, 8 if rows == 256 else 4, stages, seconds_of(query))


def weight_tile(query: Query) -> PointTile:
    geo, gpu = query.geo, query.gpu
    rows, columns = max(64, width_of(geo.group_out, 128)), width_of(geo.group_in, 128)
    depth = 64
    tiles = -(-geo.group_out // rows) * -(-geo.group_in // columns)
    steps = geo.batch * -(-math.prod(geo.y) // depth)
    splits = max(1, min(2 * gpu.multiprocessors // tiles, steps // 8, most_splits(geo, query.max_workspace)))
    stages = min(stages_for(2 * (rows + columns) * depth * 2, gpu), -(-steps // splits))
    again = 8 * splits * geo.group_out * geo.group_in if splits > 1 else 0
    return PointTile(rows, columns, depth, splits, 8 if rows * columns >= 128 * 128 else 4, stages,
                     seconds_of(query, again) + (gpu.launch_s if splits > 1 else 0))


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
                       "BN": tile.rows, "BP": tile.columns, "CB": tile.depth}, tile.warps, tile.stages)

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
                       "CG": geo.group_in, "BK": tile.rows, "BC": tile.columns, "BP": tile.depth},
                      tile.warps, tile.stages)

    return Step(point_weight_kernel, launch)


def build(query: Query, tile: PointTile) -> Prepared:
    problem, geo = query.problem, query.geo
    name = f"points_{query.short}_{tile.rows}x{tile.columns}x{tile.depth}"
    if problem.wrt != "weight":
        step = point_gather(problem, geo, tile)
        return Prepared(name, str(tile), 0, lambda operands, results, workspace: step(*operands, *results))
    step, add = point_weight(geo, tile), add_step(geo, tile.splits)
    shape = (tile.splits, geo.group_out, *geo.kernel, geo.group_in)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        if tile.splits == 1:
            step(*operands, *results)
            return
        partial = scratch(problem, workspace, shape, results[0])
        step(*operands, partial.permute(0, 1, 5, 2, 3, 4))
        add(partial, *results)

    return Prepared(f"{name}_split{tile.splits}", str(tile), 4 * math.prod(shape) if tile.splits > 1 else 0, run)


KERNEL = Kernel("points", frozenset({"output", "input", "weight"}), supports, accepts,
                lambda query: [weight_tile(query) if query.problem.wrt == "weight" else gather_tile(query)], build,
                requires=runs_anywhere)
