"""Weight gradients of float32 on bfloat16 tensor cores: operands split into parts (parts.py), then lines of them.

Parts need memory as large as the operands, so the batch is split and multiplied in chunks that fit the workspace: some
images, or where not even one fits, some rows of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...problem import Problem
from .geometry import Geometry, Three, outer_axis
from .gpu import Gpu
from .kernel import Kernel, Prepared, Query
from .launch import Step
from .line_plans import MOST_TAPS, choose_lines, line_weight
from .line_tiles import LineTile
from .numbers_on_device import rounding, scratch
from .part_copies import PART_BYTES, parts_of, products_needed, split_step, with_axis
from .pointer_plans import seconds as pointer_seconds
from .split_k import add_step

MOST_CHUNKS = 1024  # of a problem, so that planning takes milliseconds


def supports(problem: Problem, geo: Geometry) -> str | None:
    """Float32 products asked for, and channels for tensor cores."""
    if problem.dtype != "float32" or problem.out_dtype != "float32" or rounding(problem) != "":
        return "float32 only"
    least = 16 if geo.groups == 1 else 32
    if geo.group_in % 8 or geo.group_out % 8 or min(geo.group_in, geo.group_out) < least:
        return f"at least {least} channels on both sides, multiples of 8"
    return f"at most {MOST_TAPS} taps" if geo.taps > MOST_TAPS else None


def seen(parts: Any, block: tuple[int, int, int], channels: int) -> Any:
    """Parts as a canonical view on three axes: their images one part after the other."""
    return parts.view(-1, *block, channels).movedim(-1, 1)


@dataclass(frozen=True)
class PartPlan:
    """The weight gradient of float32 operands in chunks of images, or of rows of an image."""

    problem: Problem
    geo: Geometry
    gpu: Gpu
    tile: LineTile
    products: int
    images: int  # of a chunk
    padded: int  # to whole boxes
    rows: int    # of dy on the outer axis, in a chunk; all of them where whole images fit
    steps: Three = (1, 1, 1)  # from one pixel of x that is read to the next, where `geo` counts but these

    @property
    def axis(self) -> int:
        return outer_axis(self.geo.y)

    @property
    def whole(self) -> bool:
        return self.rows == self.geo.y[self.axis]

    @property
    def chunks(self) -> int:
        return -(-self.geo.batch // self.images) * -(-self.geo.y[self.axis] // self.rows)

    @property
    def chunk_geometry(self) -> Geometry:
        """What the lines of a chunk see: rows of x that lie outside are zeros among the others, not padding."""
        geo, axis = self.geo, self.axis
        if self.whole:
            return geo
        reach = (self.rows - 1) * geo.stride[axis] + (geo.kernel[axis] - 1) * geo.dilation[axis] + 1
        return replace(geo, y=with_axis(geo.y, axis, self.rows), x=with_axis(geo.x, axis, reach),
                       pad=with_axis(geo.pad, axis, 0))

    def part_elements(self) -> tuple[int, int]:
        """Elements of the parts of dy and of x."""
        geo, stored = self.chunk_geometry, self.padded * parts_of(self.products)
        return (stored * geo.groups * geo.group_out * math.prod(geo.y),
                stored * geo.groups * geo.group_in * math.prod(geo.x))

    def sum_elements(self) -> int:
        """Elements of the partial sums; a single part is the gradient itself."""
        geo = self.geo
        return 0 if self.tile.splits == 1 else self.tile.splits * geo.groups * geo.group_out * geo.taps * geo.group_in

    @property
    def workspace_bytes(self) -> int:
        return PART_BYTES * sum(self.part_elements()) + 4 * self.sum_elements() + 64

    @property
    def seconds(self) -> float:
        """Estimated: each chunk is split and multiplied; parts are written and read, operands read."""
        moved = self.chunks * PART_BYTES * sum(self.part_elements())
        operands = moved * 4 / (PART_BYTES * parts_of(self.products))
        return self.chunks * (2 * self.gpu.launch_s + self.tile.seconds) + (
            operands + moved) / self.gpu.memory_bytes_per_s

    def places(self) -> Iterator[tuple[int, int]]:
        """First image and first row of dy of each chunk."""
        for image in range(0, self.geo.batch, self.images):
            for row in range(0, self.geo.y[self.axis], self.rows):
                yield image, row

    def runner(self, add_parts: Step) -> Callable[[Any, Any, Any, Any], None]:
        """run(dy, x, dw, workspace); `add_parts(partial, dw)` adds the partial sums."""
        geo, outer, count = self.chunk_geometry, self.axis, parts_of(self.products)
        multiply = [line_weight(replace(geo, batch=self.padded * self.products), self.tile, self.products, add)
                    for add in (False, True)]
        y_size, x_size = self.part_elements()
        y_floats, x_floats = -(-y_size // 8) * 4, -(-x_size // 8) * 4  # each starts at a multiple of 16 bytes
        shape = (self.tile.splits, geo.groups * geo.group_out, *geo.kernel, geo.group_in)

        def run(dy: Any, x: Any, dw: Any, workspace: Any) -> None:
            for axis, (extent, step) in enumerate(zip(self.geo.x[5 - x.dim():], self.steps[5 - x.dim():]), 2):
                if step > 1:
                    x = x.movedim(axis, 0)[:(extent - 1) * step + 1:step].movedim(0, axis)
            memory = scratch(self.problem, workspace, (y_floats + x_floats + self.sum_elements(),), dw)
            y_parts = memory[:y_floats].view(torch.bfloat16)[:y_size]
            x_parts = memory[y_floats:y_floats + x_floats].view(torch.bfloat16)[:x_size]
            partial = memory[y_floats + x_floats:].view(shape) if self.tile.splits > 1 else dw
            target = partial.permute(0, 1, 5, 2, 3, 4) if self.tile.splits > 1 else dw
            for number, (image, row) in enumerate(self.places()):
                first = 0 if self.whole else row * geo.stride[outer] - self.geo.pad[outer]
                split_step(count, self.padded, geo.y, outer, row)(dy[image:image + self.images], y_parts)
                split_step(count, self.padded, geo.x, outer, first)(x[image:image + self.images], x_parts)
                multiply[number > 0](seen(y_parts, geo.y, dy.shape[1]), seen(x_parts, geo.x, x.shape[1]), target)
            if self.tile.splits > 1:
                add_parts(partial, dw)

        return run


def tiles(query: Query) -> Iterator[PartPlan]:
    """The plans whose chunks fit the workspace, where the pointer kernel is expected to be slower."""
    problem, geo, steps = query.problem, query.geo, (1, 1, 1)
    if geo.taps == 1 and not any(geo.pad) and all(
            (y - 1) * stride < x for x, y, stride in zip(geo.x, geo.y, geo.stride)):  # most of x may not be read
        geo, steps = replace(geo, x=geo.y, stride=(1, 1, 1)), geo.stride
    for share in (0.25, 0.5):
        plan = in_chunks(query, geo, products_needed(problem), share)
        if plan is not None and plan.seconds < pointer_seconds(query):
            yield replace(plan, steps=steps)


def build(query: Query, plan: PartPlan) -> Prepared:
    tile, sums = plan.tile, plan.runner(add_step(plan.geo, plan.tile.splits))
    note = (f"{plan.chunks} chunks of {plan.images} images x {plan.rows} rows, {plan.products} products of 16-bit "
            f"parts; {tile}")
    return Prepared(f"parts{plan.products}_f32_{tile.BK}x{tile.NT}x{tile.CB}_split{tile.splits}", note,
                    plan.workspace_bytes,
                    lambda operands, results, workspace: sums(operands[0], operands[1], results[0], workspace))


def in_chunks(query: Query, geo: Geometry, products: int, for_sums: float) -> PartPlan | None:
    """The largest chunks beside partial sums that may take a given share of the workspace."""
    problem, limit, gpu = query.problem, query.limit, query.gpu
    image_bytes = PART_BYTES * parts_of(products) * geo.groups * (
        geo.group_out * math.prod(geo.y) + geo.group_in * math.prod(geo.x))
    room = limit - int(limit * for_sums)
    extent = geo.y[outer_axis(geo.y)]
    images, rows = min(geo.batch, room // image_bytes), extent
    if images == 0:
        images, rows = 1, extent * room // image_bytes
    while images * rows >= 1:
        images = -(-geo.batch // -(-geo.batch // images))  # chunks of about the same size
        rows = -(-extent // -(-extent // rows))
        plan = PartPlan(problem, geo, gpu, NO_TILE, products, images, images, rows)
        if plan.chunks > MOST_CHUNKS:
            return None
        used = PART_BYTES * sum(plan.part_elements())
        tile = choose_lines(replace(plan.chunk_geometry, batch=images * products), max(0, limit - used), gpu)
        if tile is None:
            return None
        plan = replace(plan, tile=tile, padded=-(-images // tile.box[0]) * tile.box[0])
        if plan.workspace_bytes <= limit:
            return plan
        if images > 1:
            images = min(images - 1, images * 3 // 4)
        else:
            rows = min(rows - 1, rows * 3 // 4)
    return None


NO_TILE = LineTile((1, 1, 1, 1), 64, 16, 1, 2, False, 1, 1, 4, 1, 1, 0.0)
KERNEL = Kernel("parts", frozenset({"weight"}), supports, lambda query: None, tiles, build)
