"""Plans for depthwise gradients on the tensor cores: when they fit, how tensors become strips, what is launched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import DTYPES, Problem
from .band_input import band_input_kernel
from .band_line import band_line_kernel
from .band_line_input import band_line_input_kernel
from .band_tall import band_tall_kernel
from .band_tiles import Band, back_of, is_tall, line_steps, options, runs_of, walk_of
from .bands import band_weight_kernel
from .box_plans import accepts
from .geometry import Geometry, strides_of
from .kernel import Kernel, Prepared, Query
from .launch import Launch, Step
from .numbers_on_device import sixteen_bits
from .slide_plans import Sums


def supports(problem: Problem, geo: Geometry) -> str | None:
    """16-bit operands with channels last, no stride and no dilation."""
    if not sixteen_bits(problem) or not problem.layout.endswith("C") or geo.groups % 8:
        return "16-bit operands with channels last and multiples of 8 channels only"
    if max(geo.stride) > 1 or max(geo.dilation) > 1:
        return "stride and dilation 1 only"
    if problem.wrt == "input" and DTYPES[problem.out_dtype][1] != 2:
        return "16-bit input gradients only"
    if problem.wrt == "input" and (geo.kernel[1] > 8 if geo.kernel[0] > 1 else geo.x[0] != geo.y[0]):
        return "input gradients with taps on three axes have at most 8 lines of them"
    return None


def kind_of(problem: Problem) -> str:
    return "input" if problem.wrt == "input" else "weight"


def tiles(query: Query) -> Iterator[Band]:
    problem = query.problem
    return options(kind_of(problem), query.geo, query.max_workspace, "bias" in problem.results, query.gpu)


def build(query: Query, band: Band) -> Prepared:
    if query.problem.wrt == "input":
        return (input_plan if band.J else line_input_plan)(query, band)
    return (weight_plan if band.J else line_plan)(query, band)


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


def line_input_plan(query: Query, band: Band) -> Prepared:
    """The input gradient of a line of taps."""
    geo = query.geo
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

    return Prepared(f"band_line_input_{query.short}_{band.V}", str(band), 0, run)


def line_plan(query: Query, band: Band) -> Prepared:
    """The weight gradient of a line of taps, alone or with the bias gradient."""
    problem, geo = query.problem, query.geo
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

    return summed(query, Step(band_line_kernel, launch), splits,
                  f"band_line_{query.short}_{band.V}", band)


def summed(query: Query, step: Step, splits: int, name: str, band: Band) -> Prepared:
    """A plan that runs a kernel for the sums of all runs, then adds them."""
    sums = Sums(query.problem, query.geo, strides_of, splits)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        partial = sums.partial(workspace, results[0])
        step(*operands, partial)
        sums.add(partial, results)

    return Prepared(f"{name}_split{splits}", str(band), sums.bytes, run)


def weight_plan(query: Query, band: Band) -> Prepared:
    """The weight gradient, alone or with the bias gradient."""
    problem, geo = query.problem, query.geo
    bias = "bias" in problem.results
    walk = walk_of("weight", geo, band, bias)
    channel_tiles = -(-geo.groups // (band.V * band.warps))
    groups = -(-geo.kernel[1] // band.LINES)
    runs = runs_of("weight", walk, band, channel_tiles * geo.kernel[0] * groups, query.gpu)

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

    return summed(query, Step(band_weight_kernel, launch), runs.count,
                  f"band_weight_{query.short}_{band.J}x{band.V}", band)


def input_plan(query: Query, band: Band) -> Prepared:
    """The input gradient."""
    geo = query.geo
    walk = walk_of("input", geo, band, False)
    channel_tiles = -(-geo.groups // (band.V * band.warps))
    runs = runs_of("input", walk, band, channel_tiles, query.gpu)

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

    return Prepared(f"band_{'tall' if tall else 'input'}_{query.short}_{band.J}x{band.V}", str(band), 0, run)


KERNEL = Kernel("band", frozenset({"input", "weight", "weight+bias"}), supports, accepts, tiles, build, Band,
                kind=lambda query, band: (band.J, band.V, band.LINES), measured=5, depthwise=True)
