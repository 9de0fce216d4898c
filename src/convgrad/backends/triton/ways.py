"""The special ways to compute a result: each suits some problems, and tensors that lie as it needs them.

A way is offered by its own file of plans and kernels; `plans.py` takes the one that the cost models expect to be the
fastest (or the tuning cache names) and reads by pointers where no way takes the tensors. CONVGRAD_GPU_WITHOUT leaves
ways out by the first words of their names ("cells,lines"), to compare or to avoid them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from ...problem import DTYPES, Problem
from . import (
    block_plans,
    box_line_plans,
    box_plans,
    cell_plans,
    group_plans,
    joined_plans,
    line_plans,
    part_plans,
    point_plans,
    span_plans,
    wide_plans,
)
from .bias_parts import bias_add_step, with_bias
from .geometry import Geometry, strides_of
from .launch import Launch, Step
from .numbers_on_device import rounding, scratch
from .part_sums import add_parts_kernel
from .tiles import MULTIPROCESSORS, packs_phases, reduce_tile, workspace_limit
from .tuning import Choice, left_out, tuned

Operands = tuple[Any, ...]
DECODE_SECONDS = 6e-6  # of two kernels that copy, beside their bytes
DECODE_RATE = 2.5e12
NARROW_BOXES = 1.6  # of the expected time, as measured where boxes of single taps are narrow
FEW_PARTS = 8  # that one program of the adding kernel loads at once


@dataclass(frozen=True)
class Way:
    """`takes(operands, result)` says whether the tensors lie as needed; `run(operands, result, workspace)` computes.

    Box lines take the three scales of a scaled problem after the operands (see scaled_plans.py).
    A weight gradient with `bias_bytes` (of workspace, more) sums the bias gradient in the same pass, where `run` gets
    that result as well.
    """

    name: str
    note: str
    seconds: float  # expected
    workspace_bytes: int
    takes: Callable[[Operands, Any], bool]
    run: Callable[..., None]
    _: KW_ONLY
    bias_bytes: int = 0
    writes_columns: bool = False  # results with channels first, about as fast as others


Offer = Callable[[Problem, Geometry, int | None, Choice | None], Way | None]


def gather_ways(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> list[Way]:
    """Ways to the output or the input gradient, the fastest first; only the chosen one where there is a choice."""
    offers = (gather_by_points, input_by_blocks, by_cells, by_joined_groups, by_box_lines)
    return fastest_first(offers, problem, geo, max_workspace, choice)


def weight_ways(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> list[Way]:
    """Ways to the weight gradient, the fastest first; only the chosen one where there is a choice."""
    offers = (weight_by_parts, weight_by_points, weight_by_blocks, by_whole_groups, by_spans, by_wider,
              by_lines, by_decoded_lines)
    return fastest_first(offers, problem, geo, max_workspace, choice)


def fastest_first(offers: tuple[Offer, ...], problem: Problem, geo: Geometry, max_workspace: int | None,
                  choice: Choice | None) -> list[Way]:
    if DTYPES[problem.out_dtype][1] == 1:  # others leave 8-bit results to the kernels that read by pointers
        offers = (by_box_lines,) if by_box_lines in offers and problem.out_dtype != "hifloat8" else ()
    found = [way for offer in offers if (way := offer(problem, geo, max_workspace, choice)) is not None]
    allowed = (way for way in found if max_workspace is None or way.workspace_bytes <= max_workspace)
    return sorted((way for way in allowed if not left_out(way.name)), key=lambda way: way.seconds)


def short(problem: Problem) -> str:
    return DTYPES[problem.dtype][0]


def input_by_blocks(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Way | None:
    """Small groups at stride 1: blocks of 16 channels, every column copied once."""
    plan = block_plans.for_problem(problem, geo, max_workspace, choice) if problem.wrt == "input" else None
    if plan is None:
        return None
    return Way(f"blocks_{short(problem)}_{plan.tile.WT}", str(plan.tile), plan.tile.seconds, 0,
               lambda operands, result: block_plans.takes(operands[0], result),
               lambda operands, result, workspace: plan.write(*operands, result))


def weight_by_blocks(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Way | None:
    """The weight gradient by the same blocks."""
    plan = block_plans.for_problem(problem, geo, max_workspace, choice)
    return None if plan is None else added(
        problem, geo, plan, f"blocks_{short(problem)}_{plan.tile.WT}_split{plan.splits}", block_plans.takes)


def by_whole_groups(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Way | None:
    """Groups of 16 to 64 channels: all taps of a group by one program."""
    plan = group_plans.for_problem(problem, geo, max_workspace, choice)
    return None if plan is None else added(
        problem, geo, plan, f"groups_{short(problem)}_{plan.tile.S}_split{plan.splits}", block_plans.takes)


def added(problem: Problem, geo: Geometry, plan: Any, name: str, takes: Callable[..., bool]) -> Way:
    """The way of a plan that writes `plan.splits` partial weight gradients, which are added, or the one itself."""
    shape: tuple[int, ...] = (plan.splits, geo.groups * geo.group_out, *geo.kernel, geo.group_in)
    shape = shape if plan.splits > 1 or plan.bias_shape[0] else (0,)
    add = add_step(geo, plan.splits)

    def write(dy: Any, x: Any, partial: Any, result: Any, *bias: Any) -> None:
        if partial is None:
            plan.write(dy, x, result)
            return
        plan.write(dy, x, partial, *bias[:1])
        add(partial, result, *bias)

    return Way(name, str(plan.tile), plan.tile.seconds, 4 * math.prod(shape),
               lambda operands, result: takes(*operands), collecting(problem, shape, plan.bias_shape, write),
               bias_bytes=4 * math.prod(plan.bias_shape))


def by_cells(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Way | None:
    """Small groups and few channels: neighbouring positions folded into channels, weights spread to match."""
    plan = cell_plans.for_problem(problem, geo, max_workspace, choice)
    if plan is None:
        return None
    tile, words = plan.tile, -(-plan.spread_size // 2)

    def run(operands: Operands, result: Any, workspace: Any) -> None:
        plan.write(operands[0], operands[1], result, scratch(problem, workspace, (words,), result))

    return Way(f"cells_{short(problem)}_{tile.PN * tile.B2}x{tile.BN}x{tile.CB}", str(tile), tile.seconds, 4 * words,
               lambda operands, result: plan.take(operands[0], result), run)


def by_box_lines(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None,
                 to_columns: bool = False) -> Way | None:
    """Dense problems on boxes of positions, copied by one warp and multiplied by the others.

    `to_columns`: to a result with channels first.
    """
    if choice is None and not worth_boxes(problem, geo):
        return None
    plan = box_line_plans.for_problem(problem, geo, choice, max_workspace, to_columns)
    if plan is None:
        return None
    tile = plan.tile

    def run(operands: Operands, result: Any, workspace: Any) -> None:
        memory = scratch(problem, workspace, (plan.memory,), result) if plan.memory else None
        plan.run(operands[0], operands[1], result, memory, *operands[2:])

    narrow = geo.groups > 1 and geo.taps == 1 and tile.CB < 32
    return Way(f"box_lines_{short(problem)}_{tile.BM}x{tile.BN}x{tile.CB}", str(tile),
               tile.seconds * (NARROW_BOXES if narrow else 1.0),
               4 * plan.memory, lambda operands, result: plan.take(operands[0], operands[1], result),
               run, writes_columns=box_line_plans.writes_columns(problem, geo))


def by_joined_groups(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Way | None:
    """Few narrow groups with windows of one point, as one dense problem on boxes."""
    plan = joined_plans.for_problem(problem, geo, max_workspace, choice)
    if plan is None:
        return None
    tile = plan.tile

    def run(operands: Operands, result: Any, workspace: Any) -> None:
        plan.write(operands[0], operands[1], result, scratch(problem, workspace, (plan.words,), result))

    return Way(f"joined_{short(problem)}_{tile.BM}x{tile.BN}x{tile.CB}", f"{geo.groups} groups joined, {tile}",
               tile.seconds + joined_plans.JOIN_SECONDS, 4 * plan.words,
               lambda operands, result: plan.take(operands[0], result), run)


def worth_boxes(problem: Problem, geo: Geometry) -> bool:
    """Whether columns fill a tile without the phases of several positions packed into one."""
    return box_plans.is_patch(problem, geo) or problem.wrt != "input" or not packs_phases(geo)


def weight_by_parts(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Way | None:
    """Float32 as sums of 16-bit numbers."""
    plan = part_plans.for_weight(problem, geo, max_workspace) if choice is None else None
    if plan is None:
        return None
    tile, sums = plan.tile, plan.runner(add_step(geo, plan.tile.splits))
    return Way(f"parts{plan.products}_f32_{tile.BK}x{tile.NT}x{tile.CB}_split{tile.splits}",
               chunks_of(plan), plan.seconds, plan.workspace_bytes, lambda operands, result: True,
               lambda operands, result, workspace: sums(operands[0], operands[1], result, workspace))


def gather_by_points(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Way | None:
    """Windows of one point with channels first: a matrix product for each image."""
    if choice is not None or not point_plans.points_fit(problem, geo):
        return None
    tile = point_plans.gather_tile(problem, geo)
    step = point_plans.point_gather(problem, geo, tile)
    return Way(f"points_{short(problem)}_{tile.rows}x{tile.columns}x{tile.depth}", str(tile), tile.seconds, 0,
               lambda operands, result: point_plans.matrices(operands[0], result),
               lambda operands, result, workspace: step(*operands, result))


def weight_by_points(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Way | None:
    """Windows of one point with channels first: one long matrix product."""
    if choice is not None or not point_plans.points_fit(problem, geo):
        return None
    tile = point_plans.weight_tile(problem, geo, max_workspace)
    step, add = point_plans.point_weight(geo, tile), add_step(geo, tile.splits)
    shape = (tile.splits, geo.group_out, *geo.kernel, geo.group_in)

    def run(operands: Operands, result: Any, workspace: Any) -> None:
        if tile.splits == 1:
            step(*operands, result)
            return
        partial = scratch(problem, workspace, shape, result)
        step(*operands, partial.permute(0, 1, 5, 2, 3, 4))
        add(partial, result)

    return Way(f"points_{short(problem)}_{tile.rows}x{tile.columns}x{tile.depth}_split{tile.splits}", str(tile),
               tile.seconds, 4 * math.prod(shape) if tile.splits > 1 else 0,
               lambda operands, result: point_plans.matrices(*operands), run)


def chunks_of(plan: part_plans.PartPlan) -> str:
    return (f"{plan.chunks} chunks of {plan.images} images x {plan.rows} rows, {plan.products} products of 16-bit "
            f"parts; {plan.tile}")


def by_lines(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Way | None:
    """Dense weight gradients line by line."""
    plan = line_plans.for_problem(problem, geo, max_workspace, choice)
    if plan is None:
        return None
    tile, splits = plan.tile, plan.tile.splits
    add, add_bias = add_step(geo, splits), bias_add_step(plan.bias_shape[1], plan.bias_shape[0])
    shape = (splits, geo.groups * geo.group_out, *geo.kernel, geo.group_in)
    copied = sum(plan.copies) // 4
    needed = copied + (math.prod(shape) if splits > 1 else 0)

    def write(dy: Any, x: Any, memory: Any, result: Any, *bias: Any) -> None:
        dy, x = plan.copied(dy, x, memory)
        if splits == 1:
            plan.write(dy, x, result, *bias[:1])
            if bias:
                add_bias(*bias)
            return
        partial = memory[copied:].view(shape)
        plan.write(dy, x, partial.permute(0, 1, 5, 2, 3, 4), *bias[:1])
        add(partial, result, *bias)

    return Way(f"lines_{short(problem)}_{tile.BK}x{tile.NT}x{tile.CB}_split{splits}", str(tile), tile.seconds,
               4 * needed, lambda operands, result: plan.take(operands[0], operands[1]),
               collecting(problem, (needed,), plan.bias_shape, write), bias_bytes=4 * math.prod(plan.bias_shape))


def by_decoded_lines(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Way | None:
    """Weight gradients of FP8 numbers: 16-bit copies of both operands first, then line by line."""
    sizes = [2 * math.prod(problem.shape_of_operand(name)) for name in problem.operands]
    left = workspace_limit(geo, max_workspace) - sum(sizes)
    if rounding(problem) != "exact_f16" or choice is not None or left < 0 or geo.group_in % 8 or geo.group_out % 8:
        return None
    decoded_problem = problem.with_(dtype="float16", compute="f32")
    lines = by_lines(decoded_problem, geo, left, tuned(decoded_problem)[0])
    if lines is None or lines.workspace_bytes > left:
        return None
    words = (sum(sizes) + lines.workspace_bytes) // 4

    def run(operands: Operands, result: Any, workspace: Any) -> None:
        memory = scratch(problem, workspace, (words,), result).view(torch.uint8)
        copies = memory.split([*sizes, memory.numel() - sum(sizes)])
        decoded = tuple(box_line_plans.padded(operand, copy, torch.float16) for operand, copy in zip(operands, copies))
        lines.run(decoded, result, copies[-1])

    return Way(f"decoded_{lines.name}", f"16-bit copies of both operands, then {lines.note}",
               lines.seconds + DECODE_SECONDS + 1.5 * sum(sizes) / DECODE_RATE, 4 * words,
               lambda operands, result: True, run)


def by_wider(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Way | None:
    """Small groups and few channels as a part of a wider weight gradient."""
    plan = wide_plans.for_problem(problem, geo, max_workspace, choice)
    return None if plan is None else collected(
        problem, plan, f"wide_{short(problem)}_{plan.way.fold}x{plan.way.GP}_split{plan.splits}", plan.note,
        plan.seconds)


def by_spans(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Way | None:
    """Few channels on one side: spans of rows, which the copy engine brings."""
    plan = span_plans.for_problem(problem, geo, max_workspace, choice)
    if plan is None:
        return None
    tile = plan.tile
    return collected(problem, plan, f"spans_{short(problem)}_{tile.fold}x{tile.BN}_split{tile.splits}", str(tile),
                     tile.seconds)


def collected(problem: Problem, plan: Any, name: str, note: str, seconds: float) -> Way:
    """The way of a plan that sums into memory of `plan.shape` and collects the result from it."""
    return Way(name, note, seconds, 4 * math.prod(plan.shape),
               lambda operands, result: plan.take(operands[0], operands[1]),
               collecting(problem, plan.shape, plan.bias_shape, plan.write), bias_bytes=4 * math.prod(plan.bias_shape))


def collecting(problem: Problem, shape: tuple[int, ...], bias_shape: tuple[int, int],
               write: Callable[..., None]) -> Callable[..., None]:
    """A way's runner by write(dy, x, memory of `shape`, result), and of a bias gradient its parts and the result."""
    words = math.prod(shape)

    def run(operands: Operands, result: Any, workspace: Any, bias: Any = None) -> None:
        more = 0 if bias is None else math.prod(bias_shape)
        memory = scratch(problem, workspace, (words + more,), result) if words + more else None
        sums = None if memory is None else memory[:words].view(shape)
        if bias is None:
            write(*operands, sums, result)
        elif memory is not None:
            write(*operands, sums, result, memory[words:].view(bias_shape), bias)

    return run


def add_step(geo: Geometry, splits: int) -> Step:
    """The kernel that adds `splits` partial weight gradients in order, and a bias gradient's parts where given."""
    size = geo.groups * geo.group_out * geo.group_in * geo.taps
    slabs, be = reduce_tile(size, splits)
    few = splits if splits <= FEW_PARTS else 0
    be = 1024 if few and size >= 2 * 1024 * MULTIPROCESSORS else be
    taps = {f"A{axis}": geo.kernel[axis] for axis in range(3)}

    def launch(partial: Any, result: Any, *bias: Any) -> Launch:
        ro, ri, *r = strides_of(result)
        return with_bias(Launch((-(-size // be),), (size, splits, ro, ri, *r),
                                {"INNER": geo.group_in, **taps, "WIDE": size >= 2**31 - 2**12, "FEW": few,
                                 "BS": slabs, "BE": be}, 4, 1), *bias)

    return Step(add_parts_kernel, launch)
