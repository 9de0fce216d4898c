"""Weight gradients of float32 by the ways of 16-bit numbers: products of parts as three or four times as many images.

A weight gradient is a sum over images, so (middle x middle,) middle x high, high x middle and high x high parts (see
parts.py) are the images of one bfloat16 problem. Its operands are copies in the workspace, of some images or rows after
the others. For problems that `part_plans.py` does not take: few channels, small groups.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...problem import SPATIAL_LETTERS, Problem
from .copied_plans import ALIGNMENT, Copied, cut_axis, pieces_of, sizes_to_try, up
from .decoded_plans import FOR_COPIES, of_pieces
from .geometry import Geometry, geometry
from .launch import INTERPRETED
from .numbers_on_device import rounding, scratch
from .part_copies import PART_BYTES, split_step
from .part_plans import parts_of, pointer_seconds, products_needed
from .tiles import workspace_limit
from .ways import Operands, Way, weight_ways


def in_pieces(problem: Problem, geo: Geometry, max_workspace: int | None) -> Way | None:
    """The way that splits and sums some images or rows after the others; None where there is none."""
    conv = problem.conv
    if (INTERPRETED or problem.wrt != "weight" or problem.dtype != "float32" or problem.out_dtype != "float32"
            or rounding(problem) != "" or parts_of(products_needed(problem)) != 2 or 0 in conv.input_shape):
        return None
    limit = workspace_limit(geo, max_workspace)
    elements = math.prod(conv.input_shape[1:]) + math.prod(conv.output_shape[1:])
    products = products_needed(problem)
    image = PART_BYTES * products * elements
    axis = cut_axis(conv, geo.y) - (3 - conv.axes)
    for images, rows in sizes_to_try(problem, geo, image, int(FOR_COPIES * limit)):
        plan = of_pieces(problem, pieces_of(conv, False, axis, images, rows), limit,
                         lambda part, room: by_stacked(part, products, room), as_they_lie=True)
        if plan is not None and plan.workspace_bytes <= limit:
            return way_of(plan) if plan.seconds < pointer_seconds(geo) else None
    return None


def by_stacked(problem: Problem, products: int, room: int) -> Way | None:
    """The way to one piece in `room` bytes."""
    conv, letters = problem.conv, SPATIAL_LETTERS[problem.conv.axes]
    many = replace(conv, batch=products * conv.batch)
    twin = problem.with_(conv=many, dtype="bfloat16", compute="", out_dtype="float32", layout=f"N{letters}C",
                         weight_layout=f"O{letters}I")
    shapes = [(many.batch, *extents, channels) for channels, *extents in (conv.output_shape[1:], conv.input_shape[1:])]
    sizes = [up(2 * math.prod(shape)) for shape in shapes]
    order = (0, conv.axes + 1, *range(1, conv.axes + 1))
    as_they_lie = tuple(torch.empty(shape, dtype=torch.bfloat16, device="meta").permute(order) for shape in shapes)
    result = torch.empty(conv.weight_shape, device="meta")
    left = room - sum(sizes)
    way = next((way for way in weight_ways(twin, geometry(many), left, None) if way.takes(as_they_lie, result)),
               None) if left > 0 else None
    if way is None or sum(sizes) + way.workspace_bytes > room:
        return None
    geo = geometry(conv)
    steps = [split_step(products, conv.batch, block, stack=name)
             for block, name in ((geo.y, "first"), (geo.x, "second"))]
    words = (sum(sizes) + up(way.workspace_bytes)) // 4

    def run(operands: Operands, result: Any, workspace: Any) -> None:
        memory = scratch(problem, workspace, (words,), result).view(torch.uint8)
        *copies, rest = memory.split([*sizes, memory.numel() - sum(sizes)])
        stacks = tuple(copy[:2 * math.prod(shape)].view(torch.bfloat16).view(shape).permute(order)
                       for copy, shape in zip(copies, shapes))
        for step, operand, stack in zip(steps, operands, stacks):
            step(operand, stack)
        way.run(stacks, result, rest)

    return Way(f"stacked_{way.name}", f"float32 as {products} times as many 16-bit images, then {way.note}",
               way.seconds, 4 * words + ALIGNMENT, lambda operands, result: True, run)


def way_of(plan: Copied) -> Way:
    first = plan.pieces[0]
    inner = plan.ways[first.conv][0]
    rows = first.conv.out_size[first.axis]
    return Way(inner.name, f"{len(plan.pieces)} pieces of {first.conv.batch} images x {rows} rows, {inner.note}; "
               f"{plan.seconds * 1e6:.0f} us expected with the copies", plan.seconds, plan.workspace_bytes,
               lambda operands, result: True, plan.run)
