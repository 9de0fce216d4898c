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
from .box_plans import accepts
from .geometry import Geometry, strides_of
from .gpu import Gpu
from .kernel import Kernel, Prepared, Query
from .launch import Launch, Step
from .numbers_on_device import sixteen_bits
from .split_k import added

TOGETHER = 2  # programs of a multiprocessor
SHARED_BYTES = 111 * 1024  # of a program
COLUMN_BYTES = 2048  # 16 images x 64 channels
MOST_TAPS = 9  # whose sums or weights a thread holds
REGISTERS = 128  # a thread at the start, so that two programs fit a multiprocessor
CLOCK_SHARE = 0.92  # what waiting leaves of the clock
PRODUCT_CYCLES = 7.0
CACHE_SHARE = 0.36  # of the L2 cache's speed
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


def supports(problem: Problem, geo: Geometry) -> str | None:
    """Groups that divide 16 channels, no stride, no dilation, few taps."""
    if not sixteen_bits(problem) or not problem.layout.endswith("C"):
        return "16-bit operands with channels last only"
    if problem.wrt == "input" and DTYPES[problem.out_dtype][1] != 2:
        return "16-bit input gradients only"
    if geo.groups == 1 or geo.group_in != geo.group_out or geo.group_in not in (2, 4, 8, 16) \
            or geo.groups * geo.group_in % 64:
        return "groups of 2, 4, 8 or 16 channels on both sides only, a multiple of 64 in all"
    if max(geo.stride) > 1 or max(geo.dilation) > 1:
        return "stride and dilation 1 only"
    if geo.kernel[0] > 1 or geo.x[0] > 1 or not 1 < geo.taps <= MOST_TAPS:
        return f"windows of one or two axes with 2 to {MOST_TAPS} taps only"
    return None


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


def estimate(problem: Problem, geo: Geometry, tile: BlockTile, gpu: Gpu) -> float:
    """Seconds: products, copies from the cache and from memory."""
    channels = geo.groups * geo.group_in
    steps, run = run_steps(problem, geo, tile)
    run += geo.kernel[1] - 1
    programs = channels // 64 * -(-steps // run)
    waves = -(-programs // (TOGETHER * gpu.multiprocessors))
    columns = tile.WT + geo.kernel[2] - 1
    cycles = TOGETHER * 2 * geo.taps * tile.WT * PRODUCT_CYCLES  # of the four warps, one a scheduler
    products = cycles / (CLOCK_SHARE * gpu.clock_hz)
    issue = waves * run * (products + STEP_SECONDS)
    cache = programs * run * (columns + tile.WT) * COLUMN_BYTES / (CACHE_SHARE * gpu.l2_bytes_per_s)
    memory = 2 * geo.batch * channels * (math.prod(geo.x) + math.prod(geo.y)) / gpu.memory_bytes_per_s
    return math.hypot(issue, max(cache, memory)) + gpu.launch_s * (2 if problem.wrt == "weight" else 1)


def tiles(query: Query) -> Iterator[BlockTile]:
    problem, geo, gpu = query.problem, query.geo, query.gpu
    size = 4 * geo.groups * geo.group_in * geo.group_in * geo.taps
    sets = geo.groups * geo.group_in // 64
    for columns in range(2, 9):
        beside = 2 * columns
        slots = min(geo.kernel[1] + 2, (SHARED_BYTES // COLUMN_BYTES - beside) // (columns + geo.kernel[2] - 1))
        if slots < geo.kernel[1] + 1:
            continue
        steps, rows = run_steps(problem, geo, BlockTile(columns, slots, 1))[0], steps_of(problem, geo)
        for runs in {max(1, min(waves * TOGETHER * gpu.multiprocessors // sets, steps // (2 * geo.kernel[1])))
                     for waves in (1, 2)} | {steps // rows}:
            tile = BlockTile(columns, slots, runs)
            if problem.wrt == "weight" and runs * size > query.limit:
                continue
            yield replace(tile, seconds=estimate(problem, geo, tile, gpu))


def box_of(tensor: Any) -> Any:
    """The tensor as (rows, columns, images, channels), a column of 16 images x 64 channels a box."""
    n, _, _, s1, s2 = strides_of(tensor)
    batch, channels, *extents = tensor.shape
    e1, e2 = ((1,) * (3 - len(extents)) + tuple(extents))[1:]
    return TensorDescriptor(tensor, [e1, e2, batch, channels], [s1 or channels, s2 or channels, n or channels, 1],
                            [1, 1, 16, 64], gl.NVMMASharedLayout(128, 16, rank=4))


def build(query: Query, tile: BlockTile) -> Prepared:
    """The launches of a tile; of a weight gradient the partial sums of every run, and of the bias gradient if asked."""
    problem, geo = query.problem, query.geo
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

    name = f"blocks_{query.short}_{tile.WT}"
    if is_input:
        step = Step(block_input_kernel, launch)
        return Prepared(name, str(tile), 0, lambda operands, results, workspace: step(*operands, *results))
    return added(query, f"{name}_split{splits}", str(tile), splits, (splits, channels),
                 Step(block_weight_kernel, launch))


KERNEL = Kernel("blocks", frozenset({"input", "weight"}), supports, accepts, tiles, build, BlockTile,
                kind=lambda query, tile: tile.WT, measured=3)
