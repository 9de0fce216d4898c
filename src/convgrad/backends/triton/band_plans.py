"""Plans for depthwise gradients on the tensor cores: when they fit, how tensors become strips, what is launched."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import DTYPES, Plan, Problem
from . import strips
from .band_input import band_input_kernel
from .band_line import band_line_kernel
from .band_line_input import band_line_input_kernel
from .band_tall import band_tall_kernel
from .band_tiles import Band, back_of, is_tall, line_steps, options, runs_of, walk_of
from .bands import band_weight_kernel
from .depthwise_plans import channels_last
from .fallback import run_first_compiled
from .geometry import Geometry, strides_of, turned
from .launch import INTERPRETED, Launch, Step
from .numbers_on_device import on_tensors, rounding
from .slide_plans import Sums
from .strips import choose_strip
from .tuning import Choice, fields_of, left_out


def fits(problem: Problem, geo: Geometry) -> bool:
    """Whether bands compute what is asked for: 16-bit operands in channels last, no stride and no dilation."""
    return (not INTERPRETED and not left_out("band_") and channels_last(problem)
            and problem.dtype in ("bfloat16", "float16") and rounding(problem) == ""
            and problem.wrt in ("input", "weight", "weight+bias") and geo.groups % 8 == 0
            and max(geo.stride) == max(geo.dilation) == 1
            and (problem.wrt != "input" or (DTYPES[problem.out_dtype][1] == 2
                                            and (geo.kernel[1] <= 8 if geo.kernel[0] > 1 else geo.x[0] == geo.y[0]))))


def takes(*tensors: Any) -> bool:
    """Whether the copy engine can read and write the tensors: channels next to each other, rows at 16 bytes."""
    return all(t.data_ptr() % 16 == 0 and t.stride(1) == 1 and all(
        step % 8 == 0 and step > 0 for axis, (step, extent) in enumerate(zip(t.stride(), t.shape))
        if axis != 1 and extent > 1) for t in tensors)


def box_of(tensor: Any, band: Band, split: bool) -> Any:
    """The tensor as (strips, rows, columns, strips, channels), a row of 8 columns x 16 strips a box."""
    n, _, s0, s1, s2 = strides_of(tensor)
    batch, channels, *extents = tensor.shape
    e0, e1, e2 = (1,) * (3 - len(extents)) + tuple(extents)
    channels_a_box = band.V * band.warps
    if split:
        shape, strides = [batch // band.BB, e1, e2, band.BB], [n * band.BB, s1, s2, n]
    else:
        shape, strides = [batch, e1, e2, e0], [n, s1, s2, s0]
    return TensorDescriptor(tensor, [*shape, channels], [*(step or channels for step in strides), 1],
                            [16 // band.BB, 1, 8, band.BB, channels_a_box],
                            gl.NVMMASharedLayout(min(128, 2 * channels_a_box), 16, rank=5))


def line_input_plan(problem: Problem, geo: Geometry, band: Band) -> Plan:
    """The input gradient of a line of taps."""
    channel_tiles = -(-geo.groups // (band.V * band.warps))
    split = band.BB > 1
    steps = line_steps("input", geo)
    all_steps = -(-geo.batch // 16) * steps
    run_length = -(-all_steps // min(all_steps, band.splits))

    def leading(dy: Any, weight: Any, dx: Any) -> tuple[Any, ...]:
        return box_of(dy, band, split), dy, weight, dx

    def launch(dy: Any, weight: Any, dx: Any) -> Launch:
        yn, _, _, _, y2 = strides_of(dy)
        rn, _, _, _, r2 = strides_of(dx)
        wc, _, _, _, w2 = strides_of(weight)
        constants = {"WC": wc, "W2": w2, "C": geo.groups, "K2": geo.kernel[2], "P2": geo.pad[2], "SPLIT": split,
                     "BB": band.BB, "STAGES": band.STAGES, "UNROLL": back_of(geo) // 2 + 1, "V": band.V,
                     "WARPS": band.warps}
        scalars = (geo.batch, geo.y[2], geo.x[2], steps, all_steps, run_length, channel_tiles, yn, y2, rn, r2)
        grid = (channel_tiles * -(-all_steps // run_length),)
        return Launch(grid, scalars, constants, band.warps, 1, leading)

    step = Step(band_line_input_kernel, launch)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        step(*operands, results[0])

    return Plan(problem, "triton", f"band_line_input_{DTYPES[problem.dtype][0]}_{band.V}", on_tensors(problem, run), 0,
                (f"tile: {band}",))


def line_plan(problem: Problem, geo: Geometry, band: Band) -> Plan:
    """The weight gradient of a line of taps, alone or with the bias gradient."""
    bias = "bias" in problem.results
    channel_tiles = -(-geo.groups // (band.V * band.warps))
    split = band.BB > 1
    tiles = -(-geo.batch // 16)
    steps = line_steps("weight", geo)
    run_length = -(-tiles * steps // min(tiles * steps, band.splits))
    splits = -(-tiles * steps // run_length)

    def leading(dy: Any, x: Any, partial: Any) -> tuple[Any, ...]:
        return box_of(x, band, split), box_of(dy, band, split), dy, x, partial

    def launch(dy: Any, x: Any, partial: Any) -> Launch:
        yn, _, _, _, y2 = strides_of(dy)
        xn, _, _, _, x2 = strides_of(x)
        constants = {"C": geo.groups, "K2": geo.kernel[2], "P2": geo.pad[2], "BIAS": bias, "SPLIT": split,
                     "BB": band.BB, "STAGES": band.STAGES, "UNROLL": back_of(geo) // 2 + 1, "V": band.V,
                     "WARPS": band.warps}
        scalars = (geo.batch, geo.y[2], geo.x[2], steps, tiles * steps, run_length, channel_tiles, yn, y2, xn, x2)
        return Launch((channel_tiles * splits,), scalars, constants, band.warps, 1, leading)

    return summed(problem, geo, Step(band_line_kernel, launch), splits,
                  f"band_line_{DTYPES[problem.dtype][0]}_{band.V}", band)


def summed(problem: Problem, geo: Geometry, step: Step, splits: int, name: str, band: Band) -> Plan:
    """A plan that runs a kernel for the sums of all runs, then adds them."""
    sums = Sums(problem, geo, strides_of, splits)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        partial = sums.partial(workspace, results[0])
        step(*operands, partial)
        sums.add(partial, results)

    return Plan(problem, "triton", f"{name}_split{splits}", on_tensors(problem, run), sums.bytes, (f"tile: {band}",))


def weight_plan(problem: Problem, geo: Geometry, band: Band) -> Plan:
    """The weight gradient, alone or with the bias gradient."""
    bias = "bias" in problem.results
    walk = walk_of("weight", geo, band, bias)
    channel_tiles = -(-geo.groups // (band.V * band.warps))
    groups = -(-geo.kernel[1] // band.LINES)
    runs = runs_of("weight", walk, band, channel_tiles * geo.kernel[0] * groups)

    def leading(dy: Any, x: Any, partial: Any) -> tuple[Any, ...]:
        return box_of(x, band, walk.split), box_of(dy, band, walk.split), dy, x, partial

    def launch(dy: Any, x: Any, partial: Any) -> Launch:
        yn, _, *y = strides_of(dy)
        xn, _, *xs = strides_of(x)
        constants = {name: value for name, value in geo.constants().items() if name[0] in "KP"} | {
            "C": geo.groups, "BIAS": bias, "LINES": band.LINES, "J": band.J, "SPLIT": walk.split, "BB": band.BB,
            "STAGES": band.STAGES, "UNROLL": band.LINES,
            "V": band.V, "WARPS": band.warps}
        scalars = (geo.batch, *geo.y, *geo.x, walk.column_tiles, walk.b_tiles, walk.steps,
                   walk.tiles * walk.steps, runs.run, channel_tiles, yn, *y, xn, *xs)
        grid = (channel_tiles * geo.kernel[0] * groups * runs.count,)
        return Launch(grid, scalars, constants, band.warps, 1, leading)

    return summed(problem, geo, Step(band_weight_kernel, launch), runs.count,
                  f"band_weight_{DTYPES[problem.dtype][0]}_{band.J}x{band.V}", band)


def input_plan(problem: Problem, geo: Geometry, band: Band) -> Plan:
    """The input gradient."""
    walk = walk_of("input", geo, band, False)
    channel_tiles = -(-geo.groups // (band.V * band.warps))
    runs = runs_of("input", walk, band, channel_tiles)

    def leading(dy: Any, weight: Any, dx: Any) -> tuple[Any, ...]:
        return box_of(dy, band, walk.split), dy, weight, dx

    def launch(dy: Any, weight: Any, dx: Any) -> Launch:
        yn, _, *y = strides_of(dy)
        rn, _, *r = strides_of(dx)
        wc, _, w0, w1, w2 = strides_of(weight)
        constants = {name: value for name, value in geo.constants().items() if name[0] in "KP"} | {
            "WC": wc, "W0": w0, "W1": w1, "W2": w2, "C": geo.groups, "J": band.J, "SPLIT": walk.split, "BB": band.BB,
            "STAGES": band.STAGES, "AHEAD": band.AHEAD, "UNROLL": geo.kernel[1], "V": band.V, "WARPS": band.warps}
        scalars = (geo.batch, geo.x[0], *geo.y, *geo.x[1:], walk.column_tiles, walk.b_tiles, walk.steps,
                   walk.tiles * walk.steps, runs.run, runs.long, runs.short, channel_tiles, yn, *y, rn, *r)
        return Launch((channel_tiles * runs.count,), scalars, constants, band.warps, 1, leading)

    def launch_tall(dy: Any, weight: Any, dx: Any) -> Launch:
        made = launch(dy, weight, dx)
        blocks = -(-geo.x[1] // band.LINES)
        constants = {name: value for name, value in made.constants.items()
                     if name not in ("AHEAD", "UNROLL", "W0", "K0", "P0")} | {"ROWS": band.LINES}
        scalars = (*made.scalars[:2], *made.scalars[3:9], blocks, channel_tiles, *made.scalars[15:])
        return replace(made, grid=(channel_tiles * blocks * walk.tiles,), scalars=scalars, constants=constants)

    tall = is_tall(geo, band)
    step = Step(band_tall_kernel, launch_tall) if tall else Step(band_input_kernel, launch)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        step(*operands, results[0])

    return Plan(problem, "triton", f"band_{'tall' if tall else 'input'}_{DTYPES[problem.dtype][0]}_{band.J}x{band.V}",
                on_tensors(problem, run), 0, (f"tile: {band}",))


def for_problem(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Plan | None:
    """The plan by bands; None where they do not fit or are not chosen."""
    if not fits(problem, geo) or (choice is not None and choice["kernel"] != "band"):
        return None
    kind = "input" if problem.wrt == "input" else "weight"
    bias = "bias" in problem.results
    band = Band(**fields_of(choice)) if choice is not None else faster_than_strips(kind, geo, max_workspace, bias)
    if band is None:
        return None
    if kind == "input":
        return (input_plan if band.J else line_input_plan)(problem, geo, band)
    return (weight_plan if band.J else line_plan)(problem, geo, band)


def faster_than_strips(kind: str, geo: Geometry, max_workspace: int | None, bias: bool) -> Band | None:
    """The best band where the models expect it to be faster than the best strip."""
    band = min(options(kind, geo, max_workspace, bias), key=lambda band: band.seconds, default=None)
    strip = None if band is None else choose_strip(kind, geo, max_workspace, bias)
    if band is None or strip is None:
        return band
    return band if band.seconds < 1e-3 * strips.estimate(kind, turned(geo) if strip.turn else geo, strip) else None


def faster_apart(problem: Problem, geo: Geometry, max_workspace: int | None) -> bool:
    """Whether input and weight gradient, each by bands, are expected to take less time than one pass of strips."""
    parts = [problem.with_(wrt="input"), problem.with_(wrt="weight")]
    if not all(fits(part, geo) for part in parts):
        return False
    bias = "bias" in problem.results
    found = [faster_than_strips("input", geo, max_workspace, False),
             faster_than_strips("weight", geo, max_workspace, bias)]
    strip = choose_strip("both", geo, max_workspace, bias)
    return strip is None or sum(band.seconds if band is not None else math.inf for band in found) < \
        1e-3 * strips.estimate("both", turned(geo) if strip.turn else geo, strip)


def or_other(banded: Plan, other: Plan) -> Plan:
    """The plan by bands where the tensors lie as it needs, otherwise the other one."""
    problem = banded.problem

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        wide = [t for name, t in zip((*problem.operands, *problem.results), (*operands, *results))
                if name not in ("weight", "bias")]
        suited = (plan for plan in (banded, other) if plan is other or takes(*wide))
        run_first_compiled(problem, ((plan.kernel, partial(plan.run, operands, results, workspace)) for plan in suited),
                  (*operands, *results))

    return banded._replace(run=run, workspace_bytes=max(banded.workspace_bytes, other.workspace_bytes),
                           notes=(*banded.notes, f"where rows are not multiples of 16 bytes: {other.kernel}"))


def worth_measuring(problem: Problem, geo: Geometry, count: int = 5) -> list[Band]:
    """The best bands of different shapes."""
    if not fits(problem, geo):
        return []
    found: list[Band] = []
    shapes: set[tuple[int, ...]] = set()
    kind = "input" if problem.wrt == "input" else "weight"
    for band in sorted(options(kind, geo, None, "bias" in problem.results), key=lambda band: band.seconds):
        if (band.J, band.V, band.LINES) not in shapes:
            shapes.add((band.J, band.V, band.LINES))
            found.append(band)
    return found[:count]
