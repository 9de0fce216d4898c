"""Plans: which kernels answer a Problem, with what tiles, and how tensors become kernel arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import triton.language as tl

from ...problem import DTYPES, Plan, Problem, Unsupported
from . import band_plans, copied_plans, decoded_plans, depthwise_plans, slide_box_plans, slide_plans, stacked_plans
from .bias_parts import bias_add_step
from .fallback import run_first_compiled
from .flat import flattened, with_flat
from .gather import gather_kernel
from .geometry import Geometry, geometry, needs_wide, strides_of
from .launch import INTERPRETED, Launch, Step, aligned_strides, power_of_two
from .numbers_on_device import STORED_8BIT, arithmetic, on_tensors, operand_bytes, scratch, table_for
from .part_plans import FEW_PRODUCTS, products_needed
from .prepared import prepared_plan
from .tiles import (
    MULTIPROCESSORS,
    WORKSPACE_FLOOR,
    GatherTile,
    WeightTile,
    choose_gather,
    choose_weight,
    most_splits,
    workspace_limit,
)
from .tuning import SEPARATE, Choice, fields_of, left_out, tuned
from .ways import Way, add_step, gather_ways, weight_ways
from .weight import bias_kernel, weight_kernel


def make_plan(problem: Problem, max_workspace: int | None, choice: Choice | None = None) -> Plan:
    """Return the plan for a problem that this backend can run; `choice` overrules the tuning cache and the model."""
    flat = flattened(problem)
    if flat is None or 0 in problem.conv.output_shape:
        plan = plan_as_given(problem, max_workspace, choice)
    else:
        plan = with_flat(plan_as_given(problem, max_workspace, None), plan_as_given(flat, max_workspace, choice))
    return prepared_plan(plan)


def plan_as_given(problem: Problem, max_workspace: int | None, choice: Choice | None) -> Plan:
    """The plan for the problem's own shapes."""
    geo = geometry(problem.conv)
    wrt = problem.wrt
    source = "given"
    if choice is None:
        choice, source = tuned(problem)
    if no_products(problem):
        if len(problem.results) > 1:
            raise Unsupported("several results of a problem without elements: one kernel each is used")
        return Plan(problem, "triton", "fill_zero", on_tensors(problem, fill_zero), 0)
    if geo.groups > 1 and geo.group_in == geo.group_out == 1 and wrt != "bias":
        return noted(depthwise_plan(problem, geo, max_workspace, choice), source)
    if wrt == "weight+bias":
        return weight_and_bias_plan(problem, geo, max_workspace, choice, source)
    if len(problem.results) > 1:
        raise Unsupported("several results of a dense or grouped convolution: one kernel each is used")
    if wrt == "bias":
        return first_that_takes(problem, [bias_way(problem, geo, max_workspace)])
    if wrt == "weight":
        return noted(weight_plan(problem, geo, max_workspace, choice), source)
    return noted(gather_plan(problem, geo, max_workspace, choice), source)


def no_products(problem: Problem) -> bool:
    """Whether a result is empty, or every sum of one is: no outputs, no channels, or nothing but padding."""
    conv = problem.conv
    return (any(0 in conv.shape_of(result) for result in problem.results) or 0 in conv.output_shape
            or (problem.wrt != "bias" and 0 in (conv.group_in, *conv.in_size)))


def noted(plan: Plan, source: str) -> Plan:
    """The plan with a note that says where its tile comes from."""
    return plan._replace(notes=(*plan.notes, f"tile chosen by: {source}"))


def depthwise_plan(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Plan:
    """One channel per group: kernels of their own, in one pass where that is faster."""
    if choice == SEPARATE:
        raise Unsupported("several results at once: tuning found one kernel each to be faster")
    if DTYPES[problem.out_dtype][1] == 1:  # the plain kernels encode 8-bit results
        measured = choice is not None and choice["kernel"] == "depthwise"
        return plain_depthwise_plan(problem, geo, max_workspace, choice if measured else None)
    if choice is None and "input" in problem.results and len(problem.results) > 1 \
            and band_plans.faster_apart(problem, geo, max_workspace):
        raise Unsupported("several results at once: one pass each on the tensor cores is faster by the model")
    banded = slide_box_plans.for_problem(problem, geo, max_workspace, choice) or \
        band_plans.for_problem(problem, geo, max_workspace, choice)
    if banded is not None:
        return band_plans.or_other(banded, without_bands(problem, geo, max_workspace))
    return strips_or_plain(problem, geo, max_workspace, choice)


def without_bands(problem: Problem, geo: Geometry, max_workspace: int | None) -> Plan:
    """What serves tensors that bands do not take: strips may refuse results together that bands and others do not."""
    try:
        return strips_or_plain(problem, geo, max_workspace, None)
    except Unsupported:
        return plain_depthwise_plan(problem, geo, max_workspace, None)


def strips_or_plain(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Plan:
    """Depthwise gradients without tensor cores."""
    if choice is not None and choice["kernel"] in ("band", "slide_box"):  # measured for tensors that bands do not take
        choice = None
    slid = slide_plans.for_problem(problem, geo, max_workspace, choice)
    if slid is None:  # a measured strip says nothing about the plain kernels
        measured = choice is not None and choice["kernel"] == "depthwise"
        return plain_depthwise_plan(problem, geo, max_workspace, choice if measured else None)
    parts = [problem] if len(problem.results) == 1 or problem.wrt == "weight+bias" else \
        [problem.with_(wrt="input"), problem.with_(wrt="+".join(problem.results[1:]))]
    return slide_plans.or_plain(slid, [plain_depthwise_plan(part, geo, max_workspace, None) for part in parts])


def plain_depthwise_plan(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Plan:
    """The plain Triton kernels, for any layout and number format."""
    if problem.wrt in ("weight", "weight+bias"):
        return depthwise_plans.weight_plan(problem, geo, max_workspace, choice)
    if len(problem.results) == 1:
        return depthwise_plans.gather_plan(problem, geo, choice)
    if not depthwise_plans.fused_fits(geo):
        raise Unsupported(f"several results at once with {geo.taps} taps and {geo.phases} phases: the sums of at most "
                          f"{depthwise_plans.FUSED_TAPS} taps at stride 1 fit beside the input gradient")
    if "bias" in problem.results and (depthwise_plans.bias_taps(geo) is None or "weight" not in problem.results):
        raise Unsupported("input and bias gradient at once: no tap visits every output exactly once")
    return depthwise_plans.fused_plan(problem, geo, max_workspace, choice)


def fill_zero(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
    for result in results:
        result.zero_()


def gather_plan(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Plan:
    """The output, or the input gradient."""
    return planned(problem, geo, max_workspace, choice, gather_choices)


def gather_choices(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> list[Way]:
    """The ways to the output or the input gradient of tensors as they lie, the best first; the last takes all."""
    is_input = problem.wrt == "input"
    tile = choose_gather(geo, is_input, operand_bytes(problem))
    if choice is not None and choice["kernel"] == "gather":
        tile = GatherTile(**fields_of(choice))
    step = Step(gather_kernel, lambda source, weight, result, table: gather_launch(
        geo, tile, is_input, arithmetic(problem), source, weight, result))
    by_pointers = Way(f"gather_{DTYPES[problem.dtype][0]}_{tile.BM}x{tile.BN}x{tile.TS * tile.CB}", str(tile), math.inf,
                      0, lambda operands, result: True,
                      lambda operands, result, workspace: step(*operands, result, table_for(problem, result)))
    return [*gather_ways(problem, geo, max_workspace, choice), by_pointers]


Choices = Callable[[Problem, Geometry, int | None, Choice | None], list[Way]]


def planned(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None,
            choices: Choices) -> Plan:
    """The plan of the ways that `choices` finds, or that it finds for copies of the tensors with channels last."""
    return first_that_takes(problem, with_copies(problem, geo, max_workspace, choice, choices))


def with_copies(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None,
                choices: Choices) -> list[Way]:
    """The ways that `choices` finds, and those on copies; the last takes all tensors."""
    *ways, by_pointers = choices(problem, geo, max_workspace, choice)
    if not ways and choice is None and problem.layout.endswith("C"):
        decoded = decoded_plans.in_pieces(problem, geo, max_workspace)
        ways = [] if decoded is None else [decoded]
    if not ways and choice is None:
        stacked = stacked_plans.in_pieces(problem, geo, max_workspace)
        ways = [] if stacked is None or left_out(stacked.name) else [stacked]

    def for_piece(piece: Problem, room: int) -> list[Way]:
        return choices(piece, geometry(piece.conv), room, tuned(piece)[0])

    by_parts = any(way.name.startswith("parts") for way in ways)  # they take tensors as they lie
    if not by_parts and (choice is None or choice["kernel"] == "copied"):
        copied = None if problem.layout.endswith("C") else \
            copied_plans.offered(problem, geo, max_workspace, for_piece, choice is not None)
        if isinstance(copied, Way) and (not ways or copied.seconds < ways[0].seconds):
            ways = [copied]
        elif ways and max_workspace is None:
            ways.append(copied_plans.where_they_lie_otherwise(problem, geo, for_piece))
        elif isinstance(copied, str):
            by_pointers = replace(by_pointers, note=f"{by_pointers.note}; {copied}")
    return [*ways, by_pointers]


def first_that_takes(problem: Problem, ways: list[Way]) -> Plan:
    """The plan that runs the first way which takes the tensors; the last takes all."""
    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        suited = ((way.name, partial(way.run, operands, results[0], workspace)) for way in ways
                  if way.takes(operands, results[0]))
        run_first_compiled(problem, suited, (*operands, *results))

    notes = [f"tile: {ways[0].note}", *(f"where tensors do not lie as that needs: {way.note}" for way in ways[1:])]
    return Plan(problem, "triton", ways[0].name, on_tensors(problem, run), max(way.workspace_bytes for way in ways),
                ("; ".join(notes),))


def weight_and_bias_plan(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None,
                         source: str) -> Plan:
    """Weight and bias gradient in one pass, where the fastest way to the weight gradient can do that."""
    alone = problem.with_(wrt="weight")
    if choice is None:
        choice, source = tuned(alone)
    ways = with_copies(alone, geo, max_workspace, choice, weight_choices)
    bias = bias_way(problem.with_(wrt="bias"), geo, max_workspace)
    size = max(way.workspace_bytes + way.bias_bytes for way in ways)
    if not ways[0].bias_bytes or size > workspace_limit(geo, max_workspace):
        raise Unsupported("weight and bias gradient at once: one kernel each is used")

    def run_by(way: Way, operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        weight_result, bias_result = results
        if way.bias_bytes:
            way.run(operands, weight_result, workspace, bias_result)
        else:
            way.run(operands, weight_result, workspace)
            bias.run(operands[:1], bias_result, workspace)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        suited = ((way.name, partial(run_by, way, operands, results, workspace)) for way in ways
                  if way.takes(operands, results[0]))
        run_first_compiled(problem, suited, (*operands, *results))

    plan = first_that_takes(alone, ways)
    return noted(plan._replace(problem=problem, kernel=f"{plan.kernel}_bias", run=on_tensors(problem, run),
                               workspace_bytes=max(size, bias.workspace_bytes)), source)


def gather_launch(geo: Geometry, tile: GatherTile, is_input: bool, numbers: dict[str, Any], source: Any, weight: Any,
                  result: Any) -> Launch:
    sn, sc, *s = strides_of(source)
    wo, wi, *w = strides_of(weight)
    rn, rc, *r = strides_of(result)
    salign, (sn, *s) = aligned_strides((sn, *s))
    walign, (wo, *w) = aligned_strides((wo, *w))
    ralign, (rn, *r) = aligned_strides((rn, *r))
    from_extents, to_extents = (geo.y, geo.x) if is_input else (geo.x, geo.y)
    positions = geo.phase_positions if is_input else geo.y
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    row_tiles = -(-geo.batch * math.prod(positions) // tile.BM)
    columns = col * tile.GP * (geo.phases if tile.PACK else 1)
    programs = -(-columns // tile.BN) * row_tiles * (geo.groups // tile.GP)
    if is_input and not tile.PACK:
        programs *= geo.phases
    slots = geo.span if tile.PACK else geo.kernel
    constants = {
        "SALIGN": salign, "WALIGN": walign, "RALIGN": ralign, **geo.constants(), **geo.phase_constants(),
        "U0": slots[0], "U1": slots[1], "U2": slots[2], "RED": red, "COL": col, "INPUT": is_input,
        "WIDE": needs_wide(source, weight, result), **numbers, **tile.constants()}
    scalars = (geo.batch, *from_extents, *to_extents, *positions, row_tiles, sn, sc, *s, wo, wi, *w, rn, rc, *r)
    return Launch((programs,), scalars, constants, tile.warps, tile.stages)


def weight_plan(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Plan:
    """The weight gradient."""
    return planned(problem, geo, max_workspace, choice, weight_choices)


def weight_choices(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> list[Way]:
    """The ways to the weight gradient of tensors as they lie, the best first; the last takes all."""
    numbers = arithmetic(problem)
    if numbers["PRECISION"] == "tf32x3" and products_needed(problem) == FEW_PRODUCTS:
        numbers["PRECISION"] = "bf16x3"
    tile = choose_weight(geo, operand_bytes(problem), max_workspace, problem.layout.endswith(LINE_ENDS))
    if choice is not None and choice["kernel"] == "weight":
        tile = WeightTile(**fields_of(choice))
        tile = replace(tile, SPLITS=min(tile.SPLITS, most_splits(geo, max_workspace)))
    plain = replace(choose_weight(geo, operand_bytes(problem), max_workspace, False), SPLITS=tile.SPLITS)
    step = Step(weight_kernel, lambda dy, x, result, table: weight_launch(
        geo, tile if not tile.SEG or in_lines(x) else plain, numbers, dy, x, result))
    splits = tile.SPLITS
    add = add_step(geo, splits)
    shape = (splits, geo.groups * geo.group_out, *geo.kernel, geo.group_in)
    partial_bytes = (8 if problem.dtype == "float64" else 4) * math.prod(shape) if splits > 1 else 0

    def run(operands: tuple[Any, ...], dw: Any, workspace: Any) -> None:
        if splits == 1:
            step(*operands, dw, table_for(problem, dw))
            return
        partial = scratch(problem, workspace, shape, dw)
        step(*operands, partial.permute(0, 1, 5, 2, 3, 4), table_for(problem, dw))
        add(partial, dw)

    by_pointers = Way(
        f"weight_{DTYPES[problem.dtype][0]}_{tile.BK}x{tile.TS * tile.CB}x{tile.BP}_split{tile.SPLITS}", str(tile),
        math.inf, partial_bytes, lambda operands, result: True, run)
    return [*weight_ways(problem, geo, max_workspace, choice), by_pointers]


BY_PIXEL = not INTERPRETED  # how weight_kernel sums tiles with a NaN again
LINE_ENDS = ("LC", "WC")  # layouts whose last spatial axis and channels make one line


def in_lines(x: Any) -> bool:
    """Whether channels and the last spatial axis of x follow each other without a gap."""
    channels = x.shape[1]
    return (channels == 1 or x.stride(1) == 1) and (x.shape[-1] == 1 or x.stride(-1) == channels)


def weight_launch(geo: Geometry, tile: WeightTile, numbers: dict[str, Any], dy: Any, x: Any, result: Any) -> Launch:
    yn, yc, *y = strides_of(dy)
    xn, xc, *xs = strides_of(x)
    yalign, (yn, *y) = aligned_strides((yn, *y))
    if tile.SEG:  # the last axis is part of a line, whose start need not be aligned
        xalign, (xn, *outer) = aligned_strides((xn, *xs[:2]))
        xs = [*outer, xs[2]]
    else:
        xalign, (xn, *xs) = aligned_strides((xn, *xs))
    if tile.SPLITS > 1:
        r_split, ro, ri, *r = result.stride()
    else:
        r_split, (ro, ri, *r) = 0, strides_of(result)
    boxes = tuple(-(-extent // size) for extent, size in zip((geo.batch, *geo.y), tile.box))
    run = -(-math.prod(boxes) // tile.SPLITS)
    stages = min(tile.stages, run)  # more would only take shared memory
    channels = geo.group_in * tile.GP
    if tile.FLAT:
        columns = -(-geo.taps * channels // (tile.TS * tile.CB))
    elif tile.SEG:
        columns = -(-geo.kernel[0] * geo.kernel[1] * -(-geo.kernel[2] * channels // tile.CB) // tile.TS)
    else:
        columns = -(-geo.taps // tile.TS) * -(-channels // tile.CB)
    programs = columns * -(-geo.group_out * tile.GP // tile.BK) * tile.SPLITS * (geo.groups // tile.GP)
    constants = {"YALIGN": yalign, "XALIGN": xalign, **geo.constants(), "KG": geo.group_out, "CG": geo.group_in,
                 "WIDE": needs_wide(dy, x, result), **numbers, **tile.constants(), "BY_PIXEL": BY_PIXEL}
    scalars = (geo.batch, *geo.y, *geo.x, *boxes[1:], math.prod(boxes), run, yn, yc, *y, xn, xc, *xs, r_split, ro, ri,
               *r)
    return Launch((programs,), scalars, constants, tile.warps, stages)


def bias_way(problem: Problem, geo: Geometry, max_workspace: int | None) -> Way:
    """The bias gradient by its own kernel."""
    channels = geo.groups * geo.group_out
    bk = min(128, power_of_two(channels)) if problem.layout.endswith("C") else 1  # neighbours in memory side by side
    bp = max(1, 4096 // bk)
    limit = WORKSPACE_FLOOR if max_workspace is None else max_workspace
    tiles = -(-channels // bk)
    splits = max(1, min(-(-8 * MULTIPROCESSORS // tiles), geo.pixels // (4 * bp), limit // (8 * channels)))
    double = problem.dtype == "float64"
    numbers = {"ROUND": STORED_8BIT.get(problem.dtype, ""), "ACC": tl.float64 if double else tl.float32}
    run_length = -(-geo.pixels // splits)
    run_length = -(-run_length // bp) * bp

    def launch(dy: Any, result: Any, table: Any) -> Launch:
        yn, yc, *y = strides_of(dy)
        extents, runs = geo.y, copied_plans.runs_of(dy)
        if len(runs) == 1:  # fewer divisions
            extents, y = (1, 1, runs[0][0]), [0, 0, runs[0][1]]
        align, (yn, *y) = aligned_strides((yn, *y))
        r_split, r_k = result.stride() if splits > 1 else (0, result.stride(0))
        constants = {"YALIGN": align, "WIDE": needs_wide(dy), **numbers, "BP": bp, "BK": bk}
        scalars = (geo.pixels, run_length, *extents, yn, yc, *y, r_split, r_k, channels)
        return Launch((tiles, splits), scalars, constants, 8, 2)

    step = Step(bias_kernel, launch)
    add = bias_add_step(channels, splits)
    size = (8 if double else 4) * splits * channels if splits > 1 else 0

    def run(operands: tuple[Any, ...], db: Any, workspace: Any) -> None:
        if splits == 1:
            step(operands[0], db, table_for(problem, db))
            return
        partial = scratch(problem, workspace, (splits, channels), db)
        step(operands[0], partial, table_for(problem, db))
        add(partial, db)

    return Way(f"bias_{DTYPES[problem.dtype][0]}_{bp}x{bk}_split{splits}", f"{bp} x {bk}, {splits} runs of pixels",
               math.inf, size, lambda operands, result: True, run)
