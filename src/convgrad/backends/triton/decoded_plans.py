"""Weight gradients of FP8 numbers whose copies do not fit the workspace at once: piece after piece."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...problem import Problem
from .copied_plans import (
    ALIGNMENT,
    Copied,
    Piece,
    cut_axis,
    pieces_of,
    sizes_to_try,
    slabs_for,
    up,
)
from .geometry import Geometry, channels_last, geometry
from .line_plans import LAUNCH_SECONDS
from .numbers_on_device import rounding
from .part_plans import flops_of
from .tiles import workspace_limit
from .ways import Operands, Way, by_decoded_lines

FOR_COPIES = 0.6  # of the workspace; the rest is for sums
POINTER_FLOPS = 160e12  # a second, of weight.py on FP8 with channels last: 67 to 190 were seen on an H200


def in_pieces(problem: Problem, geo: Geometry, max_workspace: int | None) -> Way | None:
    """The way that copies and sums some images or rows after the others; None where there is none."""
    conv = problem.conv
    if problem.wrt != "weight" or rounding(problem) != "exact_f16" or 0 in (*conv.input_shape, *conv.output_shape):
        return None
    plan = largest_pieces(problem, geo, workspace_limit(geo, max_workspace))
    return way_of(plan) if plan is not None and worth_it(plan, geo) else None


def largest_pieces(problem: Problem, geo: Geometry, limit: int) -> Copied | None:
    """The fewest pieces of images or rows whose 16-bit copies fit."""
    conv = problem.conv
    image = 2 * (math.prod(conv.input_shape[1:]) + math.prod(conv.output_shape[1:]))
    axis = cut_axis(conv, geo.y) - (3 - conv.axes)
    for images, rows in sizes_to_try(problem, geo, image, int(FOR_COPIES * limit)):
        pieces = pieces_of(conv, False, axis, images, rows)
        if len(pieces) < 2:
            continue
        plan = of_pieces(problem, pieces, limit,
                         lambda part, room: by_decoded_lines(part, geometry(part.conv), room, None))
        if plan is not None and plan.workspace_bytes <= limit:
            return plan
    return None


def worth_it(plan: Copied, geo: Geometry) -> bool:
    """Whether copies and all are expected to be faster than the kernel that reads by pointers."""
    return plan.seconds < LAUNCH_SECONDS + flops_of(geo) / POINTER_FLOPS


def of_pieces(problem: Problem, pieces: list[Piece], limit: int, way_to: Callable[[Problem, int], Way | None],
              as_they_lie: bool = False) -> Copied | None:
    """The plan of given pieces, where `way_to(piece, bytes)` finds a way to all of them.

    The sums of several wait in slabs, and what these leave of the limit is for the ways.
    """
    slab = 4 * math.prod(problem.conv.weight_shape)
    slabs = slabs_for(pieces, slab, limit) if len(pieces) > 1 else 0
    left = limit - up(slabs * slab) - 3 * ALIGNMENT
    ways: dict[Any, list[Way]] = {}
    for piece in pieces:
        if piece.conv not in ways:
            way = way_to(problem.with_(conv=piece.conv, out_dtype="float32"), left)
            if way is None:
                return None
            ways[piece.conv] = [way]
    return Copied(problem, pieces, ways, (0, 0, 0), slabs, False, as_they_lie=as_they_lie) if pieces else None


def way_of(plan: Copied) -> Way:
    first = plan.pieces[0]
    inner = plan.ways[first.conv][0]

    def takes(operands: Operands, result: Any) -> bool:  # pieces are decoded where they lie
        return channels_last(first.y_of(operands[0])) and channels_last(first.x_of(operands[1]))

    rows = first.conv.out_size[first.axis]
    return Way(f"pieces_{inner.name}", f"{len(plan.pieces)} pieces of {first.conv.batch} images x {rows} rows, "
               f"{inner.note}", plan.seconds, plan.workspace_bytes, takes, plan.run)
