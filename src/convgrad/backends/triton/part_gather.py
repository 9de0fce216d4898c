"""Input gradients and outputs of float32 on bfloat16 tensor cores: boxes of parts (see parts.py and part_plans.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...problem import SPATIAL_LETTERS, Problem
from .box_plans import BoxTile, choose_box_gather, descriptor, gather_fits, is_patch, weight_descriptor
from .boxes import box_gather_kernel
from .geometry import Geometry, needs_wide, strides_of, three
from .launch import Launch, Step, aligned_strides
from .line_plans import LAUNCH_SECONDS, MEMORY_BYTES
from .numbers_on_device import scratch
from .part_plans import (
    PART_BYTES,
    POINTER_FLOPS,
    flops_of,
    outer_axis,
    parts_fit,
    parts_of,
    products_needed,
    seen,
    split_step,
    with_axis,
)
from .tiles import workspace_limit

BOX_FLOPS = 400e12  # of boxes.py, a second


@dataclass(frozen=True)
class PartGather:
    """The input gradient or the output of float32 operands in chunks of images, or of rows of an image."""

    problem: Problem
    geo: Geometry
    tile: BoxTile
    products: int
    images: int
    padded: int
    rows: int  # of the result on its outer axis, in a chunk; all of them where whole images fit

    @property
    def is_input(self) -> bool:
        return self.problem.wrt == "input"

    @property
    def extents(self) -> tuple[int, int, int]:
        return self.geo.x if self.is_input else self.geo.y

    @property
    def axis(self) -> int:
        return outer_axis(self.extents)

    @property
    def whole(self) -> bool:
        return self.rows == self.extents[self.axis]

    @property
    def chunks(self) -> int:
        return -(-self.geo.batch // self.images) * -(-self.extents[self.axis] // self.rows)

    def first_source(self, row: int) -> int:
        """The first row of the source that a chunk of results from `row` on may read; it may lie outside."""
        geo, axis = self.geo, self.axis
        if self.is_input:
            return (row + geo.pad[axis] - (geo.kernel[axis] - 1) * geo.dilation[axis]) // geo.stride[axis]
        return row * geo.stride[axis] - geo.pad[axis]

    @property
    def chunk_geometry(self) -> Geometry:
        """What the boxes of a chunk see: source rows that lie outside are zeros among the others, not padding."""
        geo, axis = self.geo, self.axis
        if self.whole:
            return geo
        stride, reach = geo.stride[axis], (geo.kernel[axis] - 1) * geo.dilation[axis]
        if not self.is_input:
            return replace(geo, y=with_axis(geo.y, axis, self.rows), pad=with_axis(geo.pad, axis, 0),
                           x=with_axis(geo.x, axis, (self.rows - 1) * stride + reach + 1))
        pad = geo.pad[axis] - stride * self.first_source(0)  # the same in every chunk: rows is a multiple of the stride
        return replace(geo, x=with_axis(geo.x, axis, self.rows), pad=with_axis(geo.pad, axis, pad),
                       y=with_axis(geo.y, axis, (self.rows - 1 + pad) // stride + 1),
                       phase_positions=with_axis(geo.phase_positions, axis, -(-self.rows // stride)))

    @property
    def block(self) -> tuple[int, int, int]:
        return self.chunk_geometry.y if self.is_input else self.chunk_geometry.x

    def part_elements(self) -> tuple[int, int]:
        """Elements of the parts of the source and of the weight."""
        geo, parts = self.geo, parts_of(self.products)
        channels = geo.groups * (geo.group_out if self.is_input else geo.group_in)
        return (parts * self.padded * channels * math.prod(self.block),
                parts * geo.groups * geo.group_out * geo.group_in * geo.taps)

    @property
    def workspace_bytes(self) -> int:
        return PART_BYTES * sum(self.part_elements()) + 64

    @property
    def seconds(self) -> float:
        """Estimated: the products of parts, and parts written and read beside the operand."""
        moved = self.chunks * PART_BYTES * self.part_elements()[0]
        operand = moved * 4 / (PART_BYTES * parts_of(self.products))
        return (self.chunks * 2 * LAUNCH_SECONDS + (operand + moved) / MEMORY_BYTES
                + self.products * flops_of(self.geo) / BOX_FLOPS)

    def places(self) -> Iterator[tuple[int, int]]:
        """First image and first row of the result of each chunk."""
        for image in range(0, self.geo.batch, self.images):
            for row in range(0, self.extents[self.axis], self.rows):
                yield image, row

    def runner(self) -> Callable[[Any, Any, Any, Any], None]:
        """run(source, weight, result, workspace)."""
        parts, outputs = parts_of(self.products), self.geo.groups * self.geo.group_out
        split_weight = split_step(parts, outputs, self.geo.kernel)
        splits, boxes = {}, {}
        for _, row in self.places():
            first = 0 if self.whole else self.first_source(row)
            splits[row] = split_step(parts, self.padded, self.block, self.axis, first)
            boxes[row] = self.boxes(first)
        s_size, w_size = self.part_elements()
        s_floats, w_floats = -(-s_size // 8) * 4, -(-w_size // 8) * 4

        def run(source: Any, weight: Any, result: Any, workspace: Any) -> None:
            memory = scratch(self.problem, workspace, (s_floats + w_floats,), result)
            s_parts = memory[:s_floats].view(torch.bfloat16)[:s_size]
            w_parts = memory[s_floats:].view(torch.bfloat16)[:w_size]
            split_weight(weight, w_parts)
            cut = 2 + self.axis - (5 - result.dim())  # the outer axis among those of the tensors
            for image, row in self.places():
                some = source[image:image + self.images]
                target = result[image:image + self.images].narrow(cut, row, min(self.rows, result.shape[cut] - row))
                splits[row](some, s_parts)
                boxes[row](some, weight, target, seen(s_parts, self.block, source.shape[1]),
                           seen(w_parts, self.geo.kernel, weight.shape[1]))

        return run

    def boxes(self, first: int) -> Step:
        """step(source, weight, result, parts of source, parts of weight); the parts begin at row `first`."""
        geo, tile, is_input = replace(self.chunk_geometry, batch=self.padded), self.tile, self.is_input
        red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
        positions = geo.phase_positions if is_input else geo.y
        counts = tuple(-(-extent // size) for extent, size in zip((geo.batch, *positions), tile.box))
        tiles = math.prod(counts) * -(-col // tile.BN) * geo.groups * (geo.phases if is_input else 1)
        weight_block = (tile.CB, tile.BN) if is_input else (tile.BN, tile.CB)
        lift = with_axis((0, 0, 0), self.axis, first)

        def leading(source: Any, weight: Any, result: Any, s_parts: Any, w_parts: Any) -> tuple[Any, ...]:
            return (descriptor(s_parts, (*tile.box, tile.CB), 1 if is_input else geo.stride[2]),
                    weight_descriptor(w_parts, weight_block), source, weight, result)

        def launch(source: Any, weight: Any, result: Any, s_parts: Any, w_parts: Any) -> Launch:
            rn, rc, *r = strides_of(result)
            ralign, (rn, *r) = aligned_strides((rn, *r))
            pn, b0, b1, b2 = tile.box
            constants = {"RALIGN": ralign, **geo.constants(), **geo.phase_constants("GV"), "RED": red, "COL": col,
                         "CHANNELS": red * geo.groups, "INPUT": is_input, "PATCH": False,
                         "WIDE": needs_wide(source, weight, result), "PRODUCTS": self.products,
                         "ROWS": geo.groups * geo.group_out, "PN": pn, "B0": b0, "B1": b1, "B2": b2, "BN": tile.BN,
                         "CB": tile.CB}
            scalars = (source.shape[0], *three(tuple(source.shape[2:]), 1), *three(tuple(result.shape[2:]), 1),
                       geo.batch, *lift, *counts, *strides_of(source), *strides_of(weight), rn, rc, *r)
            return Launch((tiles,), scalars, constants, tile.warps, tile.stages, leading)

        return Step(box_gather_kernel, launch)


def for_gather(problem: Problem, geo: Geometry, max_workspace: int | None) -> PartGather | None:
    """The plan whose chunks fit the workspace; None where boxes of parts do not fit the problem."""
    letters = SPATIAL_LETTERS[problem.conv.axes]
    twin = problem.with_(dtype="bfloat16", out_dtype="bfloat16", compute="", layout=f"N{letters}C",
                         weight_layout=f"O{letters}I")
    is_input = problem.wrt == "input"
    if not parts_fit(problem, geo) or is_patch(twin, geo) or not gather_fits(twin, geo) or \
            (not is_input and geo.x[2] % geo.stride[2]):
        return None
    limit, extents = workspace_limit(geo, max_workspace), geo.x if is_input else geo.y
    axis = outer_axis(extents)
    extent, step = extents[axis], geo.stride[axis] if is_input else 1
    plan = PartGather(problem, geo, choose_box_gather(geo, is_input, False), products_needed(problem), 1, 1, extent)
    source, weight = plan.part_elements()
    room = limit - 64 - PART_BYTES * weight
    images, rows = min(geo.batch, room // (PART_BYTES * source)), extent
    if images <= 0:
        if axis == 2 and geo.stride[2] > 1 and not is_input:
            return None  # the last axis is folded by its stride
        images, rows = 1, extent * room // (PART_BYTES * source)
    while images >= 1 and rows >= step:
        images = -(-geo.batch // -(-geo.batch // images))
        if rows < extent:
            rows = -(-extent // -(-extent // rows))
            rows = min(extent, -(-rows // step) * step)
        plan = replace(plan, images=images, rows=rows)
        tile = choose_box_gather(replace(plan.chunk_geometry, batch=images), is_input, False)
        plan = replace(plan, tile=tile, padded=-(-images // tile.box[0]) * tile.box[0])
        if plan.workspace_bytes <= limit:
            return plan if plan.seconds < flops_of(geo) / POINTER_FLOPS else None
        if images > 1:
            images = min(images - 1, images * 3 // 4)
        else:
            rows = min(rows - step, rows * 3 // 4)
    return None
