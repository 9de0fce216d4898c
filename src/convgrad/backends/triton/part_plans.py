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
from .geometry import Geometry, Three
from .launch import INTERPRETED, Step
from .line_plans import LAUNCH_SECONDS, MEMORY_BYTES, MOST_TAPS, LineTile, choose_lines, line_weight
from .numbers_on_device import rounding, scratch
from .part_copies import PART_BYTES, split_step, with_axis
from .tiles import workspace_limit

# Products of parts, highest first: high*high, high*middle, middle*high, middle*middle, then high*low and low*high.
# A middle part is at most 2^-8 of a number, a low one 2^-17: so three products leave out up to 2^-16 (middle*middle)
# and 2 * 2^-17, four the latter, in units of 2^-24 of a product's magnitude. All six leave out nothing that counts.
LEFT_OUT = {3: 512, 4: 256}
FEW_PRODUCTS = 3
OTHER_ERRORS = 40  # units left for the sums themselves
POINTER_FLOPS = 25e12  # of weight.py with float32, a second (measured on an H200)
FEW_CHANNELS = 3  # how much slower it is with few channels or groups


def parts_fit(problem: Problem, geo: Geometry) -> bool:
    """Whether a float32 problem can be summed on parts: float32 products asked for, and channels for tensor cores."""
    return (not INTERPRETED and problem.dtype == "float32" and problem.out_dtype == "float32"
            and rounding(problem) == "" and geo.group_in % 8 == 0 and geo.group_out % 8 == 0
            and min(geo.group_in, geo.group_out) >= (16 if geo.groups == 1 else 32) and geo.taps <= MOST_TAPS)


def products_needed(problem: Problem) -> int:
    """How many products of parts keep the error bound of a problem, whatever its numbers."""
    # NOTE: of f(L) only the part that grows: the rest is for the roundings of the sums.
    allowed = 8 + 2 * math.sqrt(problem.conv.reduction_length(problem.wrt)) - OTHER_ERRORS
    return next((products for products, left_out in LEFT_OUT.items() if left_out <= allowed), 6)


def parts_of(products: int) -> int:
    return 3 if products == 6 else 2


def flops_of(geo: Geometry) -> float:
    return 2.0 * geo.groups * geo.group_out * geo.group_in * geo.taps * geo.pixels


MOST_CHUNKS = 1024  # of a problem, so that planning takes milliseconds


def pointer_seconds(geo: Geometry) -> float:
    """Expected of the kernel that reads by pointers."""
    narrow = geo.groups > 1 or min(geo.group_in, geo.group_out) < 16
    return flops_of(geo) / POINTER_FLOPS * (FEW_CHANNELS if narrow else 1)


def outer_axis(extents: tuple[int, int, int]) -> int:
    """The axis that is cut into rows: the first of many rows, for chunks share the rows at their border."""
    return max(range(3), key=lambda axis: (min(extents[axis], 64), -axis))


def seen(parts: Any, block: tuple[int, int, int], channels: int) -> Any:
    """Parts as a canonical view on three axes: their images one part after the other."""
    return parts.view(-1, *block, channels).movedim(-1, 1)


@dataclass(frozen=True)
class PartPlan:
    """The weight gradient of float32 operands in chunks of images, or of rows of an image."""

    problem: Problem
    geo: Geometry
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
        return self.chunks * (2 * LAUNCH_SECONDS + self.tile.seconds) + (operands + moved) / MEMORY_BYTES

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


def for_weight(problem: Problem, geo: Geometry, max_workspace: int | None) -> PartPlan | None:
    """The plan whose chunks fit the workspace; None where parts do not fit the problem or no row fits."""
    if not parts_fit(problem, geo):
        return None
    limit, products, steps = workspace_limit(geo, max_workspace), products_needed(problem), (1, 1, 1)
    if geo.taps == 1 and not any(geo.pad) and all(
            (y - 1) * stride < x for x, y, stride in zip(geo.x, geo.y, geo.stride)):  # most of x may not be read
        geo, steps = replace(geo, x=geo.y, stride=(1, 1, 1)), geo.stride
    found = [plan for share in (0.25, 0.5) if (plan := in_chunks(problem, geo, products, limit, share)) is not None]
    best = min((replace(plan, steps=steps) for plan in found), key=lambda plan: plan.seconds, default=None)
    return best if best is not None and best.seconds < pointer_seconds(geo) else None


def in_chunks(problem: Problem, geo: Geometry, products: int, limit: int, for_sums: float) -> PartPlan | None:
    """The largest chunks beside partial sums that may take a given share of the workspace."""
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
        plan = PartPlan(problem, geo, NO_TILE, products, images, images, rows)
        if plan.chunks > MOST_CHUNKS:
            return None
        used = PART_BYTES * sum(plan.part_elements())
        tile = choose_lines(replace(plan.chunk_geometry, batch=images * products), max(0, limit - used))
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
