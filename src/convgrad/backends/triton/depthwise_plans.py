"""Plans for depthwise problems: each result alone, or the input and weight (and bias) gradient in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...problem import Problem
from .depthwise import depthwise_gather_kernel, depthwise_weight_kernel, tap_major_kernel
from .fused import fused_kernel
from .geometry import Geometry, needs_wide, turned
from .geometry import strides_of as strides_in_order
from .gpu import WORKSPACE_FLOOR, runs_anywhere
from .kernel import Kernel, Prepared, Query
from .launch import Launch, Step, aligned_strides, power_of_two
from .numbers_on_device import STORED_8BIT, arithmetic, scratch, table_for
from .part_sums import reduce_kernel
from .tiles import reduce_tile

THREADS = 128
FUSED_TAPS = 9  # most taps whose sums a thread can hold beside the input gradient
WAVES = 6  # programs per multiprocessor of the weight gradient: more runs cost more to add up
SUMS_PER_THREAD = 100  # of the weight gradient
MEMORY_SHARE, PRODUCTS = 0.4, 0.02  # of the memory's and of the tensor cores' speed that are reached


def turns(geo: Geometry) -> bool:
    """Whether neighbours are taken along the axis before the last: then rows of a tile are neighbours in memory."""
    return geo.kernel[1] > 1


@dataclass(frozen=True)
class DepthwiseTile:
    """BR rows of UW neighbours x BC channels; LINES lines of taps per program of the weight gradient."""

    UW: int
    BR: int
    BC: int
    LINES: int = 1
    splits: int = 1
    warps: int = 4

    def __str__(self) -> str:
        return (f"{self.BR} rows of {self.UW} neighbours x {self.BC} channels, {self.LINES} lines of taps a program, "
                f"{self.splits} runs, {self.warps} warps")


def channel_width(channels: int, contiguous: bool) -> int:
    """Channels of a tile: the width that wastes least, wide first; 1 where channels are not neighbours in memory."""
    if not contiguous:
        return 1
    return min((64, 32, 16), key=lambda width: -(-channels // width) * width * (1.0 if width > 16 else 1.1))


def neighbours(extent: int, step: int, move: int, slots: int, most: int) -> int:
    """Neighbours of a row: as many as share most columns; 1 where dilation keeps their columns apart."""
    if slots == 1 or move > 4:
        return 1 if move > 4 else min(2, power_of_two(extent))
    best = most
    while best > 1 and (extent < best or -(-extent // best) * best > 1.15 * extent):
        best //= 2
    return max(1, best)


def tile_for(geo: Geometry, positions: int, step: int, contiguous: bool, most: int, elements: int) -> DepthwiseTile:
    """A tile in which every thread has `elements` channels of one row (fewer where channels are not neighbours)."""
    channels = geo.groups
    bc = channel_width(channels, contiguous)
    while elements > 2 and channels % elements:  # a vector of channels must start aligned
        elements //= 2
    uw = neighbours(positions, step, geo.dilation[2] // geo.common[2], geo.kernel[2], most)
    return DepthwiseTile(uw, max(1, THREADS * (elements if contiguous else 2) // bc), bc)


def channels_last(problem: Problem) -> bool:
    return problem.layout.endswith("C")


def in_turn(geo: Geometry) -> tuple[Geometry, Callable[[Any], tuple[int, ...]]]:
    """The geometry with the axes as the kernels take them, and the strides of tensors in the same order."""
    if not turns(geo):
        return geo, strides_in_order

    def strides_of(tensor: Any) -> tuple[int, ...]:
        n, c, s0, s1, s2 = strides_in_order(tensor)
        return n, c, s0, s2, s1

    return turned(geo), strides_of


def tap_major(problem: Problem, geo: Geometry, strides_of: Callable[[Any], tuple[int, ...]]) -> Step:
    """The step that lays the weight out by taps."""
    numbers = arithmetic(problem)

    def launch(weight: Any, taps: Any, table: Any) -> Launch:
        wc, _, *w = strides_of(weight)
        return Launch((-(-geo.groups // 128), geo.taps), (geo.groups, wc, *w, *geo.kernel[1:]),
                      {"ROUND": numbers["ROUND"], "BC": 128}, 4, 1)

    return Step(tap_major_kernel, launch)


def sum_bytes(problem: Problem) -> int:
    return 8 if problem.dtype == "float64" else 4


def gather_tile(query: Query) -> DepthwiseTile:
    """The model's tile for the output or the input gradient."""
    geo, _ = in_turn(query.geo)
    is_input = query.problem.wrt == "input"
    positions = geo.phase_positions if is_input else geo.y
    return tile_for(geo, positions[2], 1 if is_input else geo.stride[2], channels_last(query.problem),
                    8 if geo.kernel[2] > 6 else 4, 8 if geo.kernel[2] in (1, 2, 3, 7) else 4)


def gather_plan(query: Query, tile: DepthwiseTile) -> Prepared:
    """The output or the input gradient alone."""
    problem = query.problem
    geo, strides_of = in_turn(query.geo)
    is_input = problem.wrt == "input"
    positions = geo.phase_positions if is_input else geo.y
    blocks = (positions[0], positions[1], -(-positions[2] // tile.UW))
    row_tiles = -(-geo.batch * math.prod(blocks) // tile.BR)
    programs = row_tiles * -(-geo.groups // tile.BC) * (geo.stride[0] * geo.stride[1] if is_input else 1)
    numbers = arithmetic(problem)

    def launch(source: Any, taps: Any, result: Any, table: Any) -> Launch:
        sn, sc, *s = strides_of(source)
        rn, rc, *r = strides_of(result)
        salign, (sn, *s) = aligned_strides((sn, *s))
        ralign, (rn, *r) = aligned_strides((rn, *r))
        from_extents, to_extents = (geo.y, geo.x) if is_input else (geo.x, geo.y)
        constants = {"SALIGN": salign, "RALIGN": ralign, **geo.constants(), **geo.phase_constants("GV"),
                     "INPUT": is_input, "WIDE": needs_wide(source, result), "ROUND": numbers["ROUND"],
                     "ACC": numbers["ACC"], "UW": tile.UW, "BR": tile.BR, "BC": tile.BC}
        scalars = (geo.batch, *from_extents, *to_extents, *blocks, geo.groups, row_tiles, sn, sc, *s, rn, rc, *r)
        return Launch((programs,), scalars, constants, tile.warps, 1)

    lay_out = tap_major(problem, geo, strides_of)
    step = Step(depthwise_gather_kernel, launch)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        source, weight = operands
        table = table_for(problem, source)
        taps = scratch(problem, workspace, (geo.taps * geo.groups,), source)
        lay_out(weight, taps, table)
        step(source, taps, results[0], table)

    return Prepared(f"depthwise_gather_{query.short}_{tile.BR}x{tile.UW}x{tile.BC}", str(tile),
                    sum_bytes(problem) * geo.taps * geo.groups, run)


def run_length(query: Query, row_tiles: int, programs: int, partial_bytes: int) -> tuple[int, int]:
    """Into how many runs the row tiles are split, and tiles per run."""
    limit = max(WORKSPACE_FLOOR, 2 * partial_bytes)
    limit = limit if query.max_workspace is None else min(query.max_workspace, limit)
    splits = max(1, min(-(-WAVES * query.gpu.multiprocessors // programs), row_tiles, limit // max(1, partial_bytes)))
    run = -(-row_tiles // splits)
    return -(-row_tiles // run), run


def weight_tile(query: Query) -> DepthwiseTile:
    """The model's tile for the weight gradient."""
    geo, _ = in_turn(query.geo)
    tile = tile_for(geo, geo.y[2], geo.stride[2], channels_last(query.problem), 8 if geo.kernel[2] > 6 else 4,
                    2 if geo.kernel[2] in (5, 6) else 4)
    lines = geo.kernel[0] * geo.kernel[1]
    elements = max(1, tile.BR * tile.BC // THREADS)
    fitting = max(1, min(lines, SUMS_PER_THREAD // (elements * geo.kernel[2])))
    return replace(tile, LINES=-(-lines // -(-lines // fitting)))  # evenly


def weight_plan(query: Query, tile: DepthwiseTile) -> Prepared:
    """The weight gradient, alone or with the bias gradient."""
    problem = query.problem
    geo, strides_of = in_turn(query.geo)
    bias = "bias" in problem.results
    lines, per_program = geo.kernel[0] * geo.kernel[1], tile.LINES
    blocks = (geo.y[0], geo.y[1], -(-geo.y[2] // tile.UW))
    row_tiles = -(-geo.batch * math.prod(blocks) // tile.BR)
    programs = -(-geo.groups // tile.BC) * -(-lines // per_program)
    element = 8 if problem.dtype == "float64" else 4
    size = element * geo.groups * (geo.taps + bias)
    splits, run = run_length(query, row_tiles, programs, size)
    tile = DepthwiseTile(tile.UW, tile.BR, tile.BC, per_program, splits, tile.warps)
    numbers = arithmetic(problem)

    def launch(dy: Any, x: Any, partial: Any, bias_partial: Any, table: Any) -> Launch:
        yn, yc, *y = strides_of(dy)
        xn, xc, *xs = strides_of(x)
        yalign, (yn, *y) = aligned_strides((yn, *y))
        xalign, (xn, *xs) = aligned_strides((xn, *xs))
        constants = {"YALIGN": yalign, "XALIGN": xalign, **geo.constants(), "BIAS": bias,
                     "WIDE": needs_wide(dy, x), "ROUND": numbers["ROUND"],
                     "BIAS_ROUND": STORED_8BIT.get(problem.dtype, ""), "ACC": numbers["ACC"], "LINES": tile.LINES,
                     "UW": tile.UW, "BR": tile.BR, "BC": tile.BC}
        scalars = (geo.batch, *geo.y, blocks[2], *geo.x, geo.groups, row_tiles, run, yn, yc, *y, xn, xc, *xs,
                   geo.taps * geo.groups, geo.groups, 1)
        return Launch((programs * splits,), scalars, constants, tile.warps, 1)

    step = Step(depthwise_weight_kernel, launch)
    finish = Finish(geo, strides_of, splits, bias)

    def run_plan(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        partial, bias_partial, _ = finish.partials(problem, workspace, results[0])
        step(*operands, partial, bias_partial, table_for(problem, results[0]))
        finish(partial, bias_partial, results)

    return Prepared(f"depthwise_weight_{query.short}_{tile.BR}x{tile.UW}x{tile.BC}_split{splits}", str(tile),
                    size * splits, run_plan)


class Finish:
    """The second kernel of a depthwise weight gradient: adds the runs in order, for dw and for db."""

    def __init__(self, geo: Geometry, strides_of: Callable[[Any], tuple[int, ...]], splits: int, bias: bool,
                 beside: int = 0) -> None:
        self.shape = (splits, geo.taps, geo.groups)
        self.bias = bias
        self.beside = beside  # further elements wanted of the same workspace
        channels = geo.groups

        def weight_launch(partial: Any, dw: Any) -> Launch:
            wc, _, *w = strides_of(dw)
            size = geo.taps * channels
            slabs, be = reduce_tile(size, splits)
            return Launch((-(-size // be),), (size, splits, channels, *geo.kernel, 0, wc, *w),
                          {"BS": slabs, "BE": be}, 4, 1)

        def bias_launch(partial: Any, db: Any) -> Launch:
            slabs, be = reduce_tile(channels, splits)
            return Launch((-(-channels // be),), (channels, splits, channels, 1, 1, 1, 0, db.stride(0), 0, 0, 0),
                          {"BS": slabs, "BE": be}, 4, 1)

        self.weight_step = Step(reduce_kernel, weight_launch)
        self.bias_step = Step(reduce_kernel, bias_launch)

    def partials(self, problem: Problem, workspace: Any, like: Any) -> tuple[Any, Any, Any]:
        """The workspace cut in three: sums of dw, sums of db, the rest."""
        splits, taps, channels = self.shape
        cut, end = splits * taps * channels, splits * (taps + self.bias) * channels
        whole = scratch(problem, workspace, (end + self.beside,), like)
        return whole[:cut], whole[cut:end] if self.bias else whole, whole[end:]

    def __call__(self, partial: Any, bias_partial: Any, results: tuple[Any, ...]) -> None:
        self.weight_step(partial, results[0])
        if self.bias:
            self.bias_step(bias_partial, results[1])


def fused_fits(geo: Geometry) -> bool:
    """Whether the sums of all taps fit beside the input gradient of a tile (with a stride they do not, measured)."""
    return geo.taps <= FUSED_TAPS and geo.phases == 1


def bias_taps(geo: Geometry) -> tuple[int, ...] | None:
    """Per axis the tap that links output o with input o*stride for every o, or None."""
    taps = []
    for pad, dilation, kernel, inputs, outputs, stride in zip(
            geo.pad, geo.dilation, geo.kernel, geo.phase_positions, geo.y, geo.stride):
        # input i = o*stride + phase with phase < stride, so tap*dilation - pad must lie in [0, stride)
        tap = next((k for k in range(kernel) if 0 <= k * dilation - pad < stride), None)
        if tap is None or inputs < outputs or (outputs - 1) * stride + tap * dilation - pad < 0:
            return None
        taps.append(tap)
    return tuple(taps)


def fused_tile(query: Query) -> DepthwiseTile:
    """The model's tile for all gradients in one pass."""
    geo, _ = in_turn(query.geo)
    return tile_for(geo, geo.phase_positions[2], 1, channels_last(query.problem), 4, 4)


def fused_plan(query: Query, tile: DepthwiseTile) -> Prepared:
    """Input and weight gradient, and bias gradient where one tap visits every output, in one pass."""
    problem = query.problem
    geo, strides_of = in_turn(query.geo)
    center = bias_taps(geo)
    bias = "bias" in problem.results
    blocks = (geo.phase_positions[0], geo.phase_positions[1], -(-geo.phase_positions[2] // tile.UW))
    row_tiles = -(-geo.batch * math.prod(blocks) // tile.BR)
    programs = -(-geo.groups // tile.BC)
    element = 8 if problem.dtype == "float64" else 4
    size = element * geo.groups * (geo.taps + bias)
    splits, run = run_length(query, row_tiles, programs, size)
    tile = DepthwiseTile(tile.UW, tile.BR, tile.BC, geo.kernel[0] * geo.kernel[1], splits, tile.warps)
    numbers = arithmetic(problem)

    def launch(dy: Any, x: Any, taps: Any, dx: Any, partial: Any, bias_partial: Any, table: Any) -> Launch:
        yn, yc, *y = strides_of(dy)
        xn, xc, *xs = strides_of(x)
        rn, rc, *r = strides_of(dx)
        yalign, (yn, *y) = aligned_strides((yn, *y))
        xalign, (xn, *xs) = aligned_strides((xn, *xs))
        ralign, (rn, *r) = aligned_strides((rn, *r))
        b0, b1, b2 = center or (0, 0, 0)
        constants = {"YALIGN": yalign, "XALIGN": xalign, "RALIGN": ralign, **geo.constants(),
                     **geo.phase_constants("GV"), "BIAS": bias, "B0": b0, "B1": b1, "B2": b2,
                     "WIDE": needs_wide(dy, x, dx), "ROUND": numbers["ROUND"],
                     "BIAS_ROUND": STORED_8BIT.get(problem.dtype, ""), "ACC": numbers["ACC"], "UW": tile.UW,
                     "BR": tile.BR, "BC": tile.BC}
        scalars = (geo.batch, *geo.y, *geo.x, *blocks, geo.groups, row_tiles, run, yn, yc, *y, xn, xc, *xs,
                   rn, rc, *r, geo.taps * geo.groups, geo.groups, 1)
        return Launch((programs * splits,), scalars, constants, tile.warps, 1)

    step = Step(fused_kernel, launch)
    lay_out = tap_major(problem, geo, strides_of)
    finish = Finish(geo, strides_of, splits, bias, beside=geo.taps * geo.groups)

    def run_plan(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        dy, x, weight = operands
        table = table_for(problem, dy)
        partial, bias_partial, taps = finish.partials(problem, workspace, results[0])
        lay_out(weight, taps, table)
        step(dy, x, taps, results[0], partial, bias_partial, table)
        finish(partial, bias_partial, results[1:])

    return Prepared(f"depthwise_fused_{query.short}_{tile.BR}x{tile.UW}x{tile.BC}_split{splits}", str(tile),
                    size * splits + element * geo.taps * geo.groups, run_plan)


def supports(problem: Problem, geo: Geometry) -> str | None:
    """Any layout and number format; several results at once where the sums fit."""
    if "input" not in problem.results or len(problem.results) == 1:
        return None
    if not fused_fits(geo):
        return (f"several results at once with {geo.taps} taps and {geo.phases} phases: the sums of at most "
                f"{FUSED_TAPS} taps at stride 1 fit beside the input gradient")
    if "bias" in problem.results and bias_taps(geo) is None:
        return "input and bias gradient at once: no tap visits every output exactly once"
    return None


def form_of(problem: Problem) -> int:
    """0: one result by gathering, 1: the weight gradient, 2: all in one pass."""
    return 1 if problem.wrt in ("weight", "weight+bias") else 0 if len(problem.results) == 1 else 2


def tiles(query: Query) -> Iterator[DepthwiseTile]:
    yield (gather_tile, weight_tile, fused_tile)[form_of(query.problem)](query)


def build(query: Query, tile: DepthwiseTile) -> Prepared:
    return (gather_plan, weight_plan, fused_plan)[form_of(query.problem)](query, tile)


def seconds(query: Query, tile: DepthwiseTile) -> float:
    """The bytes, or the products one after the other."""
    gpu = query.gpu
    return gpu.launch_s + max(query.problem.min_bytes / (MEMORY_SHARE * gpu.memory_bytes_per_s),
                              query.geo.flops / (PRODUCTS * gpu.tensor_flops))


def candidates(query: Query) -> Iterator[DepthwiseTile]:
    """Tiles of different shapes for tuning, the model's first."""
    yield from tiles(query)
    geo, _ = in_turn(query.geo)
    last, form = geo.kernel[2], form_of(query.problem)
    contiguous = channels_last(query.problem)
    width = channel_width(geo.groups, contiguous)
    lines = geo.kernel[0] * geo.kernel[1]
    apart = geo.dilation[2] // geo.common[2] > 4 or last == 1
    shapes = ((1, 4), (2, 4), (1, 8), (2, 8), (2, 2)) if apart else \
        ((4, 4), (8, 4), (4, 8), (8, 8), (8, 2), (4, 2), (2, 8))
    for beside, elements in shapes:
        rows = max(1, THREADS * (elements if contiguous else 2) // width)
        tile = DepthwiseTile(beside, rows, width)
        if form == 0 and 4 <= beside * elements <= 64 and last * elements <= 128:
            yield tile
        elif form == 1 and last * elements <= 128 and beside * elements <= 32:
            fitting = max(1, min(lines, 112 // (elements * last)))
            yield replace(tile, LINES=-(-lines // -(-lines // fitting)))
        elif form == 2 and geo.taps * elements <= 76 and beside * elements <= 16:
            yield tile


RESULTS = frozenset({"output", "input", "weight", "weight+bias", "input+weight", "input+weight+bias"})
KERNEL = Kernel("depthwise", RESULTS, supports, lambda query: None, tiles, build, DepthwiseTile, seconds,
                runs_anywhere, candidates=candidates, depthwise=True, eight_bits=True, fallback=True)
