"""Plans for the sliding depthwise kernels: when they fit, and which strip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from ...problem import Problem
from .depthwise_plans import tap_major
from .geometry import Geometry, strides_of, turned
from .kernel import Kernel, Prepared, Query
from .launch import Launch, Step, aligned_strides
from .numbers_on_device import rounding, scratch
from .part_sums import reduce_taps_kernel
from .slide import slide_input_kernel, tall_input_kernel
from .slide_weight import slide_both_kernel, slide_weight_kernel
from .strips import SHARED, Strip, all_strips, planes_apart, seconds_of
from .tiles import reduce_tile

TALL_SHARE = 0.035  # of the tensor cores' speed that one multiplication after the other reaches


class Sums:
    """The partial sums of dw and db, one array (tap, channel) a run, and the kernel that adds the runs in order."""

    def __init__(self, problem: Problem, geo: Geometry, steps_in: Callable[[Any], tuple[int, ...]],
                 splits: int) -> None:
        self.problem, self.bias = problem, "bias" in problem.results
        size = (geo.taps + self.bias) * geo.groups
        self.shape = (splits * size,)

        def launch(partial: Any, dw: Any, db: Any) -> Launch:
            wc, _, *w = steps_in(dw)
            slabs, elements = reduce_tile(size, splits)
            scalars = (size, splits, geo.groups, *geo.kernel, wc, *w, db.stride(0))
            return Launch((-(-size // elements),), scalars, {"BIAS": self.bias, "BS": slabs, "BE": elements}, 4, 1)

        self.step = Step(reduce_taps_kernel, launch)

    @property
    def bytes(self) -> int:
        return 4 * self.shape[0]

    def partial(self, workspace: Any, like: Any) -> Any:
        return scratch(self.problem, workspace, self.shape, like)

    def add(self, partial: Any, results: tuple[Any, ...]) -> None:
        self.step(partial, results[0], results[-1])


def oriented(geo: Geometry, strip: Strip) -> tuple[Geometry, Callable[[Any], tuple[int, ...]]]:
    """The geometry with the sliding axis in the middle, and the strides of tensors in the same order."""
    if not strip.turn:
        return geo, strides_of

    def steps(tensor: Any) -> tuple[int, ...]:
        n, c, s0, s1, s2 = strides_of(tensor)
        return n, c, s0, s2, s1

    return turned(geo), steps


def input_plan(query: Query, strip: Strip) -> Prepared:
    """The input gradient."""
    problem = query.problem
    geo, steps_in = oriented(query.geo, strip)
    pad, stride, dilation, taps = geo.pad[1], geo.stride[1], geo.dilation[1], geo.kernel[1]
    first = pad // stride if dilation == 1 else pad
    rows = -(-geo.x[1] // dilation) if dilation > 1 else geo.x[1] + pad - stride * first
    steps_all = -(-rows // stride)
    steps = -(-steps_all // strip.segments)
    segments = -(-steps_all // steps)
    flush = segments == 1 and dilation == 1
    start = first if flush else -(-taps // stride) - 1
    turns = -(-(geo.y[1] if flush else start + steps) // strip.UNROLL)
    if flush:  # what the last rows of dy do not reach is stored by a flush of the ring, or by further turns
        turns = max(turns, -(-(start + steps_all - (max(taps, stride) - stride) // stride) // strip.UNROLL))
    strips = -(-geo.x[2] // strip.U)
    channel_tiles = -(-geo.groups // strip.BC)
    tiles = -(-geo.batch * geo.x[0] * segments * dilation * strips // strip.S)

    def launch(dy: Any, weight: Any, dx: Any) -> Launch:
        yn, _, y0, y1, y2 = steps_in(dy)
        rn, _, r0, r1, r2 = steps_in(dx)
        if strip.HELD:
            wc, _, w0, w1, w2 = steps_in(weight)
        else:  # by taps, so that the channels of a warp are one load
            wc, w0, w1, w2 = 1, geo.groups * geo.kernel[1] * geo.kernel[2], geo.groups * geo.kernel[2], geo.groups
        yalign, (yn, y0, y1) = aligned_strides((yn, y0, y1))
        ralign, (rn, r0, r1) = aligned_strides((rn, r0, r1))
        constants = {**geo.constants(), "YALIGN": yalign, "RALIGN": ralign, "C": geo.groups, "Q2": geo.y[2],
                     "X2": geo.x[2], "Y2": y2, "R2": r2, "W2": w2, "HELD": strip.HELD, "SHARED": strip.SHARED,
                     "FLUSH": flush, "U": strip.U, "V": strip.V, "UNROLL": strip.UNROLL, "AHEAD": strip.AHEAD,
                     "S": strip.S, "BC": strip.BC, "WARPS": strip.warps}
        del constants["T0"]
        scalars = (geo.batch, geo.y[0], geo.y[1], geo.x[0], geo.x[1], strips, segments, steps, start, turns,
                   channel_tiles, yn, y0, y1, rn, r0, r1, wc, w0, w1)
        return Launch((tiles * channel_tiles,), scalars, constants, strip.warps, 1)

    step = Step(slide_input_kernel, launch)
    lay_out = tap_major(problem, geo, steps_in)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        dy, taps = operands
        if not strip.HELD:
            taps = scratch(problem, workspace, (geo.taps * geo.groups,), dy)
            lay_out(operands[1], taps, dy)
        step(dy, taps, results[0])

    return Prepared(f"slide_input_{query.short}_{strip.U}x{strip.V}", str(strip),
                    0 if strip.HELD else 4 * geo.taps * geo.groups, run)


def weight_plan(query: Query, strip: Strip) -> Prepared:
    """The weight gradient, alone or with the bias gradient."""
    problem = query.problem
    geo, steps_in = oriented(query.geo, strip)
    bias = "bias" in problem.results
    pad, stride, dilation, taps = geo.pad[1], geo.stride[1], geo.dilation[1], geo.kernel[1]
    lines = min(strip.LINES, taps) if strip.LINES else taps
    groups = -(-taps // lines)
    reach = -(-lines // stride)
    steps_all = 1
    for low in range(pad, pad - taps * dilation, -lines * dilation):  # the padding of each group's first line
        first = max(low, 0) // stride if dilation == 1 else 0
        last = -(-geo.y[1] // dilation) + reach - 1
        if dilation == 1:
            last = min(last, -(-(geo.x[1] + low) // stride))
        steps_all = max(steps_all, last - first, geo.y[1] - first if bias else 0)
        if low < 0:  # further lines meet no more rows
            break
    steps = -(-steps_all // strip.segments)
    segments = -(-steps_all // steps)
    turns = -(-steps // strip.UNROLL)
    strips = -(-geo.y[2] // strip.U)
    channel_tiles = -(-geo.groups // strip.BC)
    tiles = -(-geo.batch * geo.y[0] * segments * dilation * strips // strip.S)
    run_length = -(-tiles // min(tiles, strip.splits))
    splits = -(-tiles // run_length)

    def launch(dy: Any, x: Any, partial: Any) -> Launch:
        yn, _, y0, y1, y2 = steps_in(dy)
        xn, _, x0, x1, x2 = steps_in(x)
        yalign, (yn, y0, y1) = aligned_strides((yn, y0, y1))
        xalign, (xn, x0, x1) = aligned_strides((xn, x0, x1))
        constants = {**geo.constants(), "YALIGN": yalign, "XALIGN": xalign, "C": geo.groups, "Q2": geo.y[2],
                     "X2": geo.x[2], "Y2": y2, "XS2": x2, "BIAS": bias, "DEEP": geo.kernel[0] if strip.DEEP else 1,
                     "LINES": lines, "SHARED": strip.SHARED, "U": strip.U, "V": strip.V, "UNROLL": strip.UNROLL,
                     "AHEAD": strip.AHEAD, "S": strip.S, "BC": strip.BC, "WARPS": strip.warps}
        del constants["T0"]
        scalars = (geo.batch, geo.y[0], geo.y[1], geo.x[0], geo.x[1], strips, segments, steps, turns, tiles,
                   run_length, channel_tiles, yn, y0, y1, xn, x0, x1)
        planes = 1 if strip.DEEP else geo.kernel[0]
        return Launch((channel_tiles * planes * groups * splits,), scalars, constants, strip.warps, 1)

    step = Step(slide_weight_kernel, launch)
    sums = Sums(problem, geo, steps_in, splits)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        partial = sums.partial(workspace, results[0])
        step(*operands, partial)
        sums.add(partial, results)

    return Prepared(f"slide_weight_{query.short}_{strip.U}x{strip.V}_split{splits}", str(strip), sums.bytes, run)


def both_plan(query: Query, strip: Strip) -> Prepared:
    """Input and weight gradient, and the bias gradient if asked for, in one pass."""
    problem = query.problem
    geo, steps_in = oriented(query.geo, strip)
    bias = "bias" in problem.results
    pad, stride, dilation = geo.pad[1], geo.stride[1], geo.dilation[1]
    first = pad // stride if dilation == 1 else pad
    rows = -(-geo.x[1] // dilation) if dilation > 1 else geo.x[1] + pad - stride * first
    steps_all = -(-rows // stride)
    if dilation == 1:
        steps_all = max(steps_all, geo.y[1] - first)
    steps = -(-steps_all // strip.segments)
    segments = -(-steps_all // steps)
    turns = -(-steps // strip.UNROLL)
    strips = max(-(-geo.x[2] // strip.U), -(-geo.y[2] // (strip.U // geo.stride[2])))
    channel_tiles = -(-geo.groups // strip.BC)
    tiles = -(-geo.batch * geo.x[0] * segments * dilation * strips // strip.S)
    run_length = -(-tiles // min(tiles, strip.splits))
    splits = -(-tiles // run_length)

    def launch(dy: Any, x: Any, weight: Any, dx: Any, partial: Any) -> Launch:
        yn, _, y0, y1, y2 = steps_in(dy)
        xn, _, x0, x1, x2 = steps_in(x)
        rn, _, r0, r1, r2 = steps_in(dx)
        wc, _, _, w1, w2 = steps_in(weight)
        yalign, (yn, y0, y1) = aligned_strides((yn, y0, y1))
        xalign, (xn, x0, x1) = aligned_strides((xn, x0, x1))
        ralign, (rn, r0, r1) = aligned_strides((rn, r0, r1))
        constants = {name: value for name, value in geo.constants().items() if not name.endswith("0")} | {
            "YALIGN": yalign, "XALIGN": xalign, "RALIGN": ralign, "C": geo.groups, "Q2": geo.y[2], "X2": geo.x[2],
            "Y2": y2, "XS2": x2, "R2": r2, "W2": w2, "BIAS": bias, "SHARED": strip.SHARED, "U": strip.U, "V": strip.V,
            "UNROLL": strip.UNROLL, "AHEAD": strip.AHEAD, "S": strip.S, "BC": strip.BC, "WARPS": strip.warps}
        scalars = (geo.batch, geo.x[0], geo.y[1], geo.x[1], strips, segments, steps, turns, tiles, run_length,
                   channel_tiles, yn, y0, y1, xn, x0, x1, rn, r0, r1, wc, w1)
        return Launch((channel_tiles * splits,), scalars, constants, strip.warps, 1)

    step = Step(slide_both_kernel, launch)
    sums = Sums(problem, geo, steps_in, splits)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        partial = sums.partial(workspace, results[0])
        step(*operands, results[0], partial)
        sums.add(partial, results[1:])

    return Prepared(f"slide_both_{query.short}_{strip.U}x{strip.V}_split{splits}", str(strip), sums.bytes, run)


def tall_plan(query: Query, strip: Strip) -> Prepared:
    """The input gradient at stride 1 for kernels with many taps."""
    problem = query.problem
    geo, steps_in = oriented(query.geo, strip)
    rows = strip.UNROLL
    strips, blocks = -(-geo.x[2] // strip.U), -(-geo.x[1] // rows)
    channel_tiles = -(-geo.groups // strip.BC)
    tiles = -(-geo.batch * geo.x[0] * blocks * strips // strip.S)

    def launch(dy: Any, taps: Any, dx: Any, weight: Any) -> Launch:
        yn, _, y0, y1, y2 = steps_in(dy)
        rn, _, r0, r1, r2 = steps_in(dx)
        wc, _, _, w1, w2 = steps_in(weight)
        yalign, (yn, y0, y1) = aligned_strides((yn, y0, y1))
        ralign, (rn, r0, r1) = aligned_strides((rn, r0, r1))
        constants = {"YALIGN": yalign, "RALIGN": ralign, "C": geo.groups, "Q2": geo.y[2], "X2": geo.x[2], "Y2": y2,
                     "R2": r2, "W2": w2, "K1": geo.kernel[1], "K2": geo.kernel[2], "P1": geo.pad[1], "P2": geo.pad[2],
                     "R": rows, "U": strip.U, "V": strip.V, "S": strip.S, "BC": strip.BC, "WARPS": strip.warps}
        scalars = (geo.batch, geo.x[0], geo.y[1], geo.x[1], strips, blocks, channel_tiles, yn, y0, y1, rn, r0, r1, wc,
                   w1)
        return Launch((tiles * channel_tiles,), scalars, constants, strip.warps, 1)

    lay_out = tap_major(problem, geo, steps_in)
    step = Step(tall_input_kernel, launch)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        dy, weight = operands
        taps = scratch(problem, workspace, (geo.taps * geo.groups,), dy)
        lay_out(weight, taps, dy)
        step(dy, taps, results[0], weight)

    return Prepared(f"tall_input_{query.short}_{rows}x{strip.U}x{strip.V}", str(strip), 4 * geo.taps * geo.groups, run)


def supports(problem: Problem, geo: Geometry) -> str | None:
    """Float32 sums of operands as they are stored."""
    if problem.dtype not in ("bfloat16", "float16", "float32") or rounding(problem) != "" or \
            not problem.layout.endswith("C"):
        return "16-bit and float32 operands with channels last only"
    return "at most 2^20 positions on an axis" if max(geo.x + geo.y) >= 2**20 else None


def accepts(query: Query) -> str | None:
    """Channels are neighbours in memory, and a row of columns is short enough for 32-bit offsets."""
    problem = query.problem
    named = zip((*problem.operands, *problem.results), (*query.operands, *query.results))
    fit = all((t.shape[1] == 1 or t.stride(1) == 1) and abs(t.stride(-1)) * t.shape[-1] < 2**31
              for name, t in named if name not in ("weight", "bias"))
    return None if fit else "channels are not neighbours in memory"


def kind_of(problem: Problem) -> str:
    """Which kernel answers: "input", "weight" or "both"."""
    return "input" if problem.wrt == "input" else "weight" if problem.wrt in ("weight", "weight+bias") else "both"


def tiles(query: Query, shared: int = SHARED) -> Iterator[Strip]:
    problem = query.problem
    return all_strips(kind_of(problem), query.geo, query.max_workspace, "bias" in problem.results, query.gpu, shared)


def seconds(query: Query, strip: Strip) -> float:
    return seconds_of(kind_of(query.problem), query.geo, strip, query.gpu)


def build(query: Query, strip: Strip) -> Prepared:
    return {"input": input_plan, "weight": weight_plan, "both": both_plan}[kind_of(query.problem)](query, strip)


def many_taps(query: Query) -> Iterator[Strip]:
    """Tiles of `tall_input_kernel`, where the taps do not fit the registers of other strips."""
    geo = query.geo
    if not planes_apart(geo) or geo.phases > 1 or max(geo.dilation) > 1 or geo.kernel[1] < 2 or any(tiles(query)):
        return
    columns = min(range(4, 9), key=lambda u: (-(-geo.x[2] // u) * u * (1 + geo.kernel[2] / (8.0 * u)), -u))
    yield from (Strip(width, 1, 32, UNROLL=4) for width in dict.fromkeys((columns, 4, 8, 14)))


def tall_seconds(query: Query, strip: Strip) -> float:
    return query.gpu.launch_s + query.geo.flops / (TALL_SHARE * query.gpu.tensor_flops)


def kind_of_strip(query: Query, strip: Strip) -> tuple[int, ...]:
    return strip.U, strip.V, strip.BC, strip.UNROLL > 1, strip.segments > 1, strip.SHARED


KERNEL = Kernel("slide", frozenset({"input", "weight", "weight+bias", "input+weight", "input+weight+bias"}), supports,
                accepts, tiles, build, Strip, seconds, kind=kind_of_strip, measured=12,
                candidates=lambda query: chain(tiles(query), tiles(query, 2)), depthwise=True)
TALL = Kernel("tall", frozenset({"input"}), supports, accepts, many_taps, tall_plan, Strip, tall_seconds,
              depthwise=True)
