"""Scaled tensors: each has one float32 scale, and the numbers it stands for are those stored times its scale.

So a result is a sum of products of stored numbers times one factor: the operands' scales over its own. A backend that
cannot multiply where it stores makes the sums first and multiplies them afterwards (`scaled_plan`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from .checks import check_counts, check_room
from .problem import DTYPES, OPERANDS, SCALED_RESULTS, Plan, Problem, Unsupported, axis_order

ALIGNMENT = 64  # bytes, of sums in a workspace
Three = tuple[Any, Any, Any]


def scales_of(problem: Problem, wrt: str) -> Callable[[tuple[Any, ...]], Three]:
    """Finds in a problem's inputs those scales that make one result's factor: of its operands (1 for the second of a
    bias gradient, which has one), and its own."""
    inputs = (*problem.operands, *problem.scales)
    first, *second = (inputs.index(f"{name}_scale") for name in OPERANDS[wrt])
    own = inputs.index(f"{SCALED_RESULTS[wrt]}_scale")
    if not second:
        return lambda given: (given[first], 1.0, given[own])
    return lambda given: (given[first], given[second[0]], given[own])


def factor(first: float, second: float, own: float) -> float:
    """What a result's sums are multiplied by: computed in float64, where the product of two scales is exact, and
    rounded to float32, so that its products with float32 sums are exact in float64."""
    return as_float32(first * second / own)


def as_float32(number: Any) -> float:
    """The nearest float32."""
    try:
        value: float = struct.unpack("f", struct.pack("f", float(number)))[0]
    except OverflowError:
        value = math.inf
    return value


class Sums(Protocol):
    """What a backend does with sums that wait for their factor."""

    most_bytes: int  # of sums at one time, where they need memory beside the result

    def memory(self, workspace: Any, size: int, like: Any) -> tuple[Any, Any]:
        """`size` aligned bytes of the workspace and what follows them; new memory and None where there is none."""

    def view(self, memory: Any, shape: tuple[int, ...], order: tuple[int, ...], format_name: str) -> Any:
        """Bytes as an array of `shape` whose axes are then put into `order`."""

    def store(self, sums: Any, result: Any, scales: Three) -> None:
        """Multiply sums by their factor and round the products once into the result, which may be the sums."""


PlanSums = Callable[[Problem, int | None], Plan]  # of a problem, within a workspace


def scaled_plan(problem: Problem, plan_sums: PlanSums, sums: Sums, max_workspace_bytes: int | None) -> Plan:
    """The plan of a scaled problem from plans of its sums.

    Sums in the format of the result are made in its place. Others go to the workspace, of an output or an input
    gradient for some images at a time.
    """
    wide = "float64" if problem.dtype == "float64" else "float32"
    plain = problem.with_(scaled=False, out_dtype=wide)
    count = len(problem.operands)
    factors = [scales_of(problem, wrt) for wrt in problem.results]
    if problem.out_dtype == wide:
        made = plan_sums(plain, max_workspace_bytes)

        def run_in_place(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any = None) -> None:
            check_counts(problem, operands, results)
            made.run(operands[:count], results, workspace)
            for result, scales in zip(results, factors):
                sums.store(result, result, scales(operands))

        return named(problem, made, run_in_place, made.workspace_bytes, "in place")
    if "input" in problem.results and len(problem.results) > 1:
        raise Unsupported(f"wrt={problem.wrt!r} scaled to {problem.out_dtype} is computed one result after the other")
    batch, by_images = problem.conv.batch, problem.wrt in ("output", "input")
    parts = parts_of(plain, plan_sums, sums.most_bytes, max_workspace_bytes)
    images = max(parts)
    held = sums_bytes(parts[images].problem)
    placed = {number: places(part.problem) for number, part in parts.items()}

    needed = held + ALIGNMENT - 1 + max(part.workspace_bytes for part in parts.values())

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any = None) -> None:
        check_counts(problem, operands, results)
        check_room(workspace, needed)
        memory, rest = sums.memory(workspace, held, results[0])
        for begin in range(0, max(1, batch), max(1, images)):
            end = min(begin + images, batch)
            made = tuple([sums.view(memory[first:last], shape, order, wide)
                          for first, last, shape, order in placed[end - begin]])
            part = operands[:count] if images == batch else \
                tuple([operand if name == "weight" else operand[begin:end]
                       for name, operand in zip(problem.operands, operands)])
            parts[end - begin].run(part, made, rest)
            for array, result, scales in zip(made, results, factors):
                sums.store(array, result[begin:end] if by_images else result, scales(operands))

    return named(problem, parts[images], run, needed, f"of {images} images at a time in {held:,} bytes")


def parts_of(plain: Problem, plan_sums: PlanSums, most_bytes: int, max_workspace_bytes: int | None) -> dict[int, Plan]:
    """Plans of the sums by their number of images: all, or as many as fit and the rest."""
    batch = plain.conv.batch
    limit = most_bytes if max_workspace_bytes is None else min(most_bytes, max_workspace_bytes // 2)
    by_images = plain.wrt in ("output", "input")
    most = max(1, min(batch, limit // max(1, sums_bytes(of_images(plain, 1))))) if by_images else batch
    most = -(-batch // -(-batch // most)) if batch else batch  # pieces of about one size
    refusal = Unsupported("")
    for images in (most, 1) if by_images and most > 1 else (most,):
        held = sums_bytes(of_images(plain, min(images, batch)))
        left = None if max_workspace_bytes is None else max_workspace_bytes - held - ALIGNMENT + 1
        try:
            if left is not None and left < 0:
                raise Unsupported(f"sums that are scaled and then rounded need a workspace of {held + ALIGNMENT - 1} "
                                  f"bytes, but max_workspace_bytes={max_workspace_bytes}")
            counts = {min(images, batch), batch % max(1, images) or min(images, batch)}
            return {count: plan_sums(of_images(plain, count), left) for count in counts}
        except Unsupported as error:
            refusal = error
    raise refusal


def of_images(problem: Problem, images: int) -> Problem:
    return problem.with_(conv=replace(problem.conv, batch=images))


def sums_bytes(problem: Problem) -> int:
    """Bytes of all results, each aligned."""
    return -(-places(problem)[-1][1] // ALIGNMENT) * ALIGNMENT


def places(problem: Problem) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Where sums lie in their memory, for every result: first byte and the one after the last, extents in the order of
    the problem's layout, and where each canonical axis is among them."""
    found, begin = [], 0
    for wrt in problem.results:
        shape = problem.conv.shape_of(wrt)
        weights = wrt == "weight"
        order = (0,) if wrt == "bias" else \
            axis_order(problem.weight_layout if weights else problem.layout, problem.conv.axes, weights)
        end = begin + math.prod(shape) * DTYPES[problem.out_dtype][1]
        found.append((begin, end, tuple(shape[order.index(place)] for place in range(len(shape))), order))
        begin = -(-end // ALIGNMENT) * ALIGNMENT
    return found


def named(problem: Problem, sums: Plan, run: Any, workspace_bytes: int, where: str) -> Plan:
    note = (f"scales: {DTYPES[sums.problem.out_dtype][0]} sums {where}, times their factor, rounded once to "
            f"{DTYPES[problem.out_dtype][0]}")
    return Plan(problem, sums.backend, f"{sums.kernel} + scale", run, workspace_bytes, (*sums.notes, note))
