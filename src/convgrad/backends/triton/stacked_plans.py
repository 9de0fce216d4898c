"""Weight gradients of float32 by kernels for 16-bit numbers: products of parts as three or four times as many images.

A weight gradient is a sum over images, so (middle x middle,) middle x high, high x middle and high x high parts (see
parts.py) are the images of one bfloat16 problem. Its operands are copies in the workspace, of some images or rows after
the others. For problems that `part_plans.py` does not take: few channels, small groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ...problem import SPATIAL_LETTERS, Problem
from . import part_plans
from .copied_plans import ALIGNMENT, Inner, cut_axis, like, of_pieces, sizes_to_try, up, without_copies
from .decoded_plans import FOR_COPIES
from .geometry import Geometry, geometry
from .kernel import Kernel, Operands, Prepared, Query, choose
from .numbers_on_device import rounding, scratch
from .part_copies import PART_BYTES, parts_of, products_needed, split_step
from .pieces import pieces_of
from .pointer_plans import seconds as pointer_seconds


def supports(problem: Problem, geo: Geometry) -> str | None:
    if problem.dtype != "float32" or problem.out_dtype != "float32" or rounding(problem) != "":
        return "float32 only"
    if part_plans.supports(problem, geo) is None:
        return "many channels, which the kernel on parts takes"
    return None if parts_of(products_needed(problem)) == 2 else "the sum is too short for two parts"


def tiles(query: Query) -> Iterator[Inner]:
    """In as few pieces as fit, where that is expected to be faster than the pointer kernel."""
    problem, conv, limit = query.problem, query.problem.conv, query.limit
    elements = math.prod(conv.input_shape[1:]) + math.prod(conv.output_shape[1:])
    image = PART_BYTES * products_needed(problem) * elements
    axis = cut_axis(conv, query.geo.y) - (3 - conv.axes)
    for images, rows in sizes_to_try(problem, query.geo, image, int(FOR_COPIES * limit)):
        plan = of_pieces(problem, query.gpu, pieces_of(conv, False, axis, images, rows), limit,
                         lambda part, room: stacked(query, part, room))
        if plan is not None and plan.workspace_bytes <= limit:
            if plan.seconds < pointer_seconds(query):
                first = plan.pieces[0]
                inner, rows = plan.inner[first.conv].prepared, first.conv.out_size[first.axis]
                note = (f"{len(plan.pieces)} pieces of {first.conv.batch} images x {rows} rows, {inner.note}; "
                        f"{plan.seconds * 1e6:.0f} us expected with the copies")
                yield Inner(Prepared(inner.name, note, plan.workspace_bytes, plan.run), plan.seconds)
            return


def stacked(query: Query, problem: Problem, room: int) -> Inner | None:
    """What splits and sums one piece in `room` bytes."""
    conv, letters, products = problem.conv, SPATIAL_LETTERS[problem.conv.axes], products_needed(query.problem)
    many = replace(conv, batch=products * conv.batch)
    twin = problem.with_(conv=many, dtype="bfloat16", compute="", out_dtype="float32", layout=f"N{letters}C",
                         weight_layout=f"O{letters}I")
    shapes = [twin.shape_of_operand(name) for name in twin.operands]
    sizes = [up(2 * math.prod(shape)) for shape in shapes]
    left = room - sum(sizes)
    choice = choose(replace(without_copies(query, twin, left), tuned=False)) if left > 0 else None
    if choice is None:
        return None
    geo, inner = geometry(conv), choice.prepared
    steps = [split_step(products, conv.batch, block, stack=name)
             for block, name in ((geo.y, "first"), (geo.x, "second"))]
    words = (sum(sizes) + up(inner.workspace_bytes)) // 4

    def run(operands: Operands, results: tuple[Any, ...], workspace: Any) -> None:
        memory = scratch(problem, workspace, (words,), results[0]).view(torch.uint8)
        *copies, rest = memory.split([*sizes, memory.numel() - sum(sizes)])
        stacks = tuple(like(torch.empty(shape, dtype=torch.bfloat16, device="meta"), copy)
                       for copy, shape in zip(copies, shapes))
        for step, operand, stack in zip(steps, operands, stacks):
            step(operand, stack)
        inner.run(stacks, results, rest)

    note = f"float32 as {products} times as many 16-bit images, then {inner.note}"
    return Inner(Prepared(f"stacked_{inner.name}", note, 4 * words + ALIGNMENT, run), choice.seconds)


KERNEL = Kernel("stacked", frozenset({"weight"}), supports, lambda query: None, tiles,
                lambda query, found: found.prepared, copies=True)
