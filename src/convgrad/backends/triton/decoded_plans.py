"""Weight gradients of FP8 numbers: 16-bit copies of both operands first, then any kernel for those.

Copies that do not fit the workspace at once are made piece after piece: some images, or some rows of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ...problem import Problem
from .copied_plans import Copied, Inner, cut_axis, of_pieces, sizes_to_try, without_copies
from .geometry import Geometry, channels_last
from .kernel import Kernel, Operands, Prepared, Query, choose
from .numbers_on_device import rounding, scratch
from .padding import padded
from .pieces import pieces_of
from .pointer_plans import seconds as pointer_seconds

FOR_COPIES = 0.6  # of the workspace; the rest is for sums
COPY_SECONDS = 6e-6  # of two kernels that copy, beside their bytes
COPY_SHARE = 0.7  # of the memory's speed


def supports(problem: Problem, geo: Geometry) -> str | None:
    if rounding(problem) != "exact_f16":
        return "FP8 operands only"
    if geo.group_in % 8 or geo.group_out % 8:
        return "multiples of 8 channels only"
    return "channels last only" if not problem.layout.endswith("C") else None


def accepts(query: Query) -> str | None:
    lies = all(map(channels_last, query.operands))
    return None if lies else "channels are not neighbours in memory, or rows not at multiples of 16 bytes"


def tiles(query: Query) -> Iterator[Inner]:
    """All at once, or in pieces where that is expected to be faster than the pointer kernel."""
    whole = decoded(query, query.problem, query.limit)
    if whole is not None:
        yield whole
        return
    pieces = largest_pieces(query)
    if pieces is not None and pieces.seconds < pointer_seconds(query):
        first = pieces.pieces[0]
        inner, rows = pieces.inner[first.conv].prepared, first.conv.out_size[first.axis]
        yield Inner(Prepared(f"pieces_{inner.name}", f"{len(pieces.pieces)} pieces of {first.conv.batch} images x "
                             f"{rows} rows, {inner.note}", pieces.workspace_bytes, pieces.run), pieces.seconds)


def largest_pieces(query: Query) -> Copied | None:
    """The fewest pieces of images or rows whose 16-bit copies fit."""
    problem, conv, limit = query.problem, query.problem.conv, query.limit
    image = 2 * (math.prod(conv.input_shape[1:]) + math.prod(conv.output_shape[1:]))
    axis = cut_axis(conv, query.geo.y) - (3 - conv.axes)
    for images, rows in sizes_to_try(problem, query.geo, image, int(FOR_COPIES * limit)):
        pieces = pieces_of(conv, False, axis, images, rows)
        if len(pieces) < 2:
            continue
        plan = of_pieces(problem, query.gpu, pieces, limit, lambda part, room: decoded(query, part, room))
        if plan is not None and plan.workspace_bytes <= limit:
            return plan
    return None


def decoded(query: Query, problem: Problem, room: int) -> Inner | None:
    """What decodes and sums a problem, or a piece of it, within `room` bytes."""
    shapes = [problem.shape_of_operand(name) for name in problem.operands]
    sizes = [2 * math.prod(shape) for shape in shapes]
    left = room - sum(sizes)
    if left < 0:
        return None
    choice = choose(without_copies(query, problem.with_(dtype="float16", compute="f32"), left))
    if choice is None:
        return None
    inner = choice.prepared
    words = (sum(sizes) + inner.workspace_bytes) // 4

    def run(operands: Operands, results: tuple[Any, ...], workspace: Any) -> None:
        memory = scratch(problem, workspace, (words,), results[0]).view(torch.uint8)
        *copies, rest = memory.split([*sizes, memory.numel() - sum(sizes)])
        inner.run(tuple(padded(operand, copy, torch.float16) for operand, copy in zip(operands, copies)), results, rest)

    prepared = Prepared(f"decoded_{inner.name}", f"16-bit copies of both operands, then {inner.note}", 4 * words, run)
    copying = COPY_SECONDS + 1.5 * sum(sizes) / (COPY_SHARE * query.gpu.memory_bytes_per_s)
    return Inner(prepared, choice.seconds + copying)


KERNEL = Kernel("decoded", frozenset({"weight"}), supports, accepts, tiles, lambda query, found: found.prepared,
                copies=True)
