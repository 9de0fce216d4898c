"""Scaled tensors: each has one float32 scale, and the numbers it stands for are those stored times its scale.

So a result is a sum of products of stored numbers times one factor: the operands' scales over its own. A backend that
cannot multiply where it stores makes the sums first and multiplies them afterwards (`scaled_plan`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from .problem import DTYPES, OPERANDS, SCALED_RESULTS, Plan, Problem, Unsupported, axis_order

ALIGNMENT = 64  # bytes, of sums in a workspace
Three = tuple[Any, Any, Any]


def scales_of(problem: Problem, wrt: str, scales: tuple[Any, ...]) -> Three:
    """The scales that make one result's factor: of its one or two operands (a bias gradient has one), and its own."""
    by_name = dict(zip(problem.scales, scales))
    first, *second = (by_name[f"{name}_scale"] for name in OPERANDS[wrt])
    return first, second[0] if second else 1.0, by_name[f"{SCALED_RESULTS[wrt]}_scale"]


def factor(first: float, second: float, own: float) -> float:
    """What a result's sums are multiplied by, in float64; the product of two float32 numbers is exact there."""
    return first * second / own


class Sums(Protocol):
    """What a backend does with sums that wait for their factor."""

    most_bytes: int  # of sums at one time, where they need memory beside the result

    def memory(self, workspace: Any, size: int, like: Any) -> tuple[Any, Any]:
        """`size` aligned bytes of the workspace and what follows them; new memory and None where there is none."""

    def view(self, memory: Any, shape: tuple[int, ...], order: tuple[int, ...], format_name: str) -> Any:
        """Bytes as an array of `shape` whose axes are then put into `order`."""

    def store(self, wrt: str, sums: Any, result: Any, scales: Three) -> None:
        """Multiply sums by their factor, in float64, and round them once into the result, which may be the sums."""


PlanSums = Callable[[Problem, int | None], Plan]  # of a problem, within a workspace


def scaled_plan(problem: Problem, plan_sums: PlanSums, sums: Sums, max_workspace_bytes: int | None) -> Plan:
    """The plan of a scaled problem from plans of its sums.

    Sums in the format of the result are made in its place. Others go to the workspace, of an output or an input
    gradient for some images at a time.
    """
    wide = "float64" if problem.dtype == "float64" else "float32"
    plain = problem.with_(scaled=False, out_dtype=wide)
    count = len(problem.operands)
    if problem.out_dtype == wide:
        made = plan_sums(plain, max_workspace_bytes)

        def run_in_place(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any = None) -> None:
            made.run(operands[:count], results, workspace)
            for wrt, result in zip(problem.results, results):
                sums.store(wrt, result, result, scales_of(problem, wrt, operands[count:]))

        return named(problem, made, run_in_place, made.workspace_bytes, "in place")
    if "input" in problem.results and len(problem.results) > 1:
        raise Unsupported(f"wrt={problem.wrt!r} scaled to {problem.out_dtype} is computed one result after the other")
    batch, by_images = problem.conv.batch, problem.wrt in ("output", "input")
    parts = parts_of(plain, plan_sums, sums.most_bytes, max_workspace_bytes)
    images = max(parts)
    held = sums_bytes(parts[images].problem)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any = None) -> None:
        memory, rest = sums.memory(workspace, held, results[0])
        for begin in range(0, max(1, batch), max(1, images)):
            end = min(begin + images, batch)
            part = parts[end - begin]
            made, at = [], 0
            for wrt in problem.results:
                shape, order = in_memory(part.problem, wrt)
                size = math.prod(shape) * DTYPES[wide][1]
                made.append(sums.view(memory[at:at + size], shape, order, wide))
                at += -(-size // ALIGNMENT) * ALIGNMENT
            part.run(tuple(operand if name == "weight" else operand[begin:end]
                           for name, operand in zip(problem.operands, operands)), tuple(made), rest)
            for wrt, array, result in zip(problem.results, made, results):
                sums.store(wrt, array, result[begin:end] if by_images else result,
                           scales_of(problem, wrt, operands[count:]))

    needed = held + ALIGNMENT - 1 + max(part.workspace_bytes for part in parts.values())
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
    sizes = (math.prod(problem.conv.shape_of(wrt)) * DTYPES[problem.out_dtype][1] for wrt in problem.results)
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def in_memory(problem: Problem, wrt: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A result's extents in the order of the problem's layout, and where each canonical axis is among them."""
    shape = problem.conv.shape_of(wrt)
    if wrt == "bias":
        return shape, (0,)
    weights = wrt == "weight"
    order = axis_order(problem.weight_layout if weights else problem.layout, problem.conv.axes, weights)
    return tuple(shape[order.index(place)] for place in range(len(shape))), order


def named(problem: Problem, sums: Plan, run: Any, workspace_bytes: int, where: str) -> Plan:
    note = (f"scales: {DTYPES[sums.problem.out_dtype][0]} sums {where}, times their factor, rounded once to "
            f"{DTYPES[problem.out_dtype][0]}")
    return Plan(problem, sums.backend, f"{sums.kernel} + scale", run, workspace_bytes, (*sums.notes, note))
