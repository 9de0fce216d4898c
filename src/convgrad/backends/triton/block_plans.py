"""Plans by blocks of 16 channels: gradients of small groups at stride 1, which tile, how tensors are seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import DTYPES, Problem
from .blocks import block_input_kernel, block_weight_kernel
from .geometry import Geometry, strides_of
from .launch import INTERPRETED, Launch, Step
from .numbers_on_device import rounding
from .tiles import MULTIPROCESSORS, WORKSPACE_FLOOR
from .tuning import Choice, fields_of

TOGETHER = 2  # programs of a multiprocessor
SHARED_BYTES = 111 * 1024  # of a program
COLUMN_BYTES = 2048  # 16 images x 64 channels
MOST_TAPS = 9  # whose sums or weights a thread holds
REGISTERS = 128  # a thread at the start, so that two programs fit a multiprocessor
CLOCK = 1.7e9
PRODUCT_CYCLES = 7.0
CACHE_BYTES = 4.5e12
MEMORY_BYTES = 3.6e12
LAUNCH_SECONDS = 5e-6
STEP_SECONDS = 0.25e-6


@dataclass(frozen=True)
class BlockTile:
    """WT columns x 16 images x 64 channels a tile, SLOTS rows in shared memory, runs of steps."""

    WT: int
    SLOTS: int
    splits: int
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return (f"blocks of 16 channels, {self.WT} columns x 16 images a tile, {self.SLOTS} rows kept, "
                f"{self.splits} runs, {self.seconds * 1e6:.0f} us expected")


def fits(problem: Problem, geo: Geometry) -> bool:
    """Whether blocks can serve this problem: groups that divide 16 channels, no stride, no dilation, few taps."""
    return (not INTERPRETED and problem.wrt in ("input", "weight") and problem.dtype in ("bfloat16", "float16")
            and rounding(problem) == "" and problem.layout.endswith("C") and geo.groups > 1
            and geo.group_in == geo.group_out and geo.group_in in (2, 4, 8, 16)
            and geo.groups * geo.group_in % 64 == 0 and max(geo.stride) == max(geo.dilation) == 1
            and geo.kernel[0] == geo.x[0] == 1 and 1 < geo.taps <= MOST_TAPS
            and (problem.wrt == "weight" or DTYPES[problem.out_dtype][1] == 2))


def steps_of(problem: Problem, geo: Geometry) -> int:
    """Rows that a tile takes: all results, and rows of zeros so that a tile's last rows do not meet the next one's."""
    if problem.wrt == "weight":
        return geo.y[1] + geo.kernel[1] - 1
    return max(geo.x[1] + geo.pad[1], geo.y[1] + geo.kernel[1] - 1 - geo.pad[1])


def column_tiles(problem: Problem, geo: Geometry, tile: BlockTile) -> int:
    return -(-(geo.y[2] if problem.wrt == "weight" else geo.x[2]) // tile.WT)


def run_steps(problem: Problem, geo: Geometry, tile: BlockTile) -> tuple[int, int]:
    """Steps of all tiles, and of a run: of whole tiles where there are runs enough (see band_tiles.runs_of)."""
    tiles, rows = -(-geo.batch // 16) * column_tiles(problem, geo, tile), steps_of(problem, geo)
    if tile.splits == tiles:
        return tiles * rows, rows
    return tiles * rows, -(-tiles * rows // tile.splits)


def estimate(problem: Problem, geo: Geometry, tile: BlockTile) -> float:
    """Seconds: products, copies from the cache and from memory."""
    channels = geo.groups * geo.group_in
    steps, run = run_steps(problem, geo, tile)
    run += geo.kernel[1] - 1
    programs = channels // 64 * -(-steps // run)
    waves = -(-programs // (TOGETHER * MULTIPROCESSORS))
    columns = tile.WT + geo.kernel[2] - 1
    products = TOGETHER * 2 * geo.taps * tile.WT * PRODUCT_CYCLES / CLOCK  # of the four warps, one a scheduler
    issue = waves * run * (products + STEP_SECONDS)
    cache = programs * run * (columns + tile.WT) * COLUMN_BYTES / CACHE_BYTES
    memory = 2 * geo.batch * channels * (math.prod(geo.x) + math.prod(geo.y)) / MEMORY_BYTES
    return math.hypot(issue, max(cache, memory)) + LAUNCH_SECONDS * (2 if problem.wrt == "weight" else 1)


def options(problem: Problem, geo: Geometry, max_workspace: int | None) -> Iterator[BlockTile]:
    size = 4 * geo.groups * geo.group_in * geo.group_in * geo.taps
    limit = max(WORKSPACE_FLOOR, 2 * size)
    limit = limit if max_workspace is None else min(max_workspace, limit)
    sets = geo.groups * geo.group_in // 64
    for columns in range(2, 9):
        beside = 2 * columns
        slots = min(geo.kernel[1] + 2, (SHARED_BYTES // COLUMN_BYTES - beside) // (columns + geo.kernel[2] - 1))
        if slots < geo.kernel[1] + 1:
            continue
        steps, rows = run_steps(problem, geo, BlockTile(columns, slots, 1))[0], steps_of(problem, geo)
        for runs in {max(1, min(waves * TOGETHER * MULTIPROCESSORS // sets, steps // (2 * geo.kernel[1])))
                     for waves in (1, 2)} | {steps // rows}:
            tile = BlockTile(columns, slots, runs)
            if problem.wrt == "weight" and runs * size > limit:
                continue
            yield replace(tile, seconds=estimate(problem, geo, tile))


def worth_measuring(problem: Problem, geo: Geometry, count: int = 3) -> list[BlockTile]:
    """The best tiles of different widths."""
    if not fits(problem, geo):
        return []
    best: dict[int, BlockTile] = {}
    for tile in sorted(options(problem, geo, None), key=lambda tile: tile.seconds):
        best.setdefault(tile.WT, tile)
    return list(best.values())[:count]


def takes(*tensors: Any) -> bool:
    """Whether the copy engine can read and write the tensors: channels next to each other, the rest at 16 bytes."""
    return all(t.data_ptr() % 16 == 0 and t.stride(1) == 1 and all(
        step % 8 == 0 and step > 0 for axis, (step, extent) in enumerate(zip(t.stride(), t.shape))
        if axis != 1 and extent > 1) for t in tensors)


def box_of(tensor: Any) -> Any:
    """The tensor as (rows, columns, images, channels), a column of 16 images x 64 channels a box."""
    n, _, _, s1, s2 = strides_of(tensor)
    batch, channels, *extents = tensor.shape
    e1, e2 = ((1,) * (3 - len(extents)) + tuple(extents))[1:]
    return TensorDescriptor(tensor, [e1, e2, batch, channels], [s1 or channels, s2 or channels, n or channels, 1],
                            [1, 1, 16, 64], gl.NVMMASharedLayout(128, 16, rank=4))


@dataclass(frozen=True)
class BlockPlan:
    """A gradient by blocks: `write(dy, other, result)`; of a weight gradient the partial sums of every run.

    With further memory for as many rows of channels it writes partial sums of the bias gradient, too.
    """

    tile: BlockTile
    splits: int
    write: Step
    channels: int

    @property
    def bias_shape(self) -> tuple[int, int]:
        """Of the partial sums of the bias gradient."""
        return self.splits, self.channels


def for_problem(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> BlockPlan | None:
    """The plan of the measured choice, or of the cost model; None where blocks do not fit or are not chosen."""
    if (choice is not None and choice["kernel"] != "blocks") or not fits(problem, geo):
        return None
    tile = BlockTile(**fields_of(choice)) if choice is not None else \
        min(options(problem, geo, max_workspace), key=lambda tile: tile.seconds, default=None)
    if tile is None:
        return None
    channels, is_input = geo.groups * geo.group_in, problem.wrt == "input"
    steps = steps_of(problem, geo)
    all_steps, run = run_steps(problem, geo, tile)
    splits = -(-all_steps // run)
    constants = {"K1": geo.kernel[1], "K2": geo.kernel[2], "P1": geo.pad[1], "P2": geo.pad[2], "CG": geo.group_in,
                 "WT": tile.WT, "SLOTS": tile.SLOTS} | ({} if is_input else {"DY_SLOTS": 2})
    common = (geo.batch, *geo.y[1:], *geo.x[1:], column_tiles(problem, geo, tile), steps, all_steps, run,
              channels // 64)

    def leading(dy: Any, other: Any, result: Any, bias: Any = None) -> tuple[Any, ...]:
        return (box_of(dy), dy, other, result) if is_input else \
            (box_of(other), box_of(dy), dy, other, result, bias)

    def launch(dy: Any, other: Any, result: Any, bias: Any = None) -> Launch:
        yn, _, _, y1, y2 = strides_of(dy)
        if is_input:
            rn, _, _, r1, r2 = strides_of(result)
            wo, wi, _, w1, w2 = strides_of(other)
            scalars: tuple[Any, ...] = (*common, yn, y1, y2, rn, r1, r2, wo, wi, w1, w2)
        else:
            xn, _, _, x1, x2 = strides_of(other)
            scalars = (*common, channels, yn, y1, y2, xn, x1, x2)
        more = {} if is_input else {"BIAS": bias is not None}
        return Launch((channels // 64 * splits,), scalars, {**constants, **more}, 4, 1, leading, REGISTERS)

    return BlockPlan(tile, splits, Step(block_input_kernel if is_input else block_weight_kernel, launch), channels)
