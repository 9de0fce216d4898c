"""Plans for float32 on bfloat16 tensor cores: operands split into parts (parts.py), then the 16-bit kernels.

Parts need memory as large as the operands, so a batch is split and multiplied in chunks that fit the workspace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...numbers import sum_error_factor
from ...problem import SPATIAL_LETTERS, Problem
from .box_plans import BoxTile, choose_box_gather, descriptor, gather_fits, is_patch, weight_descriptor
from .boxes import box_gather_kernel
from .geometry import Geometry, needs_wide, strides_of
from .launch import INTERPRETED, Launch, Step, aligned_strides, power_of_two
from .line_plans import LAUNCH_SECONDS, MEMORY_BYTES, LineTile, choose_lines, line_weight
from .numbers_on_device import rounding, scratch
from .parts import split_kernel
from .tiles import WORKSPACE_FLOOR

PART_BYTES = 2
# Products of parts, highest first: high*high, high*middle, middle*high (and middle*middle, high*low, low*high). The
# first three leave out at most 2^-17 + 2^-18 of each product: 192 units of 2^-24, where the bound allows more.
FEW_PRODUCTS, ALL_PRODUCTS = 3, 6
LEFT_OUT = 192
OTHER_ERRORS = 40  # units left for the sums themselves
BOX_FLOPS = 400e12  # of boxes.py, a second
POINTER_FLOPS = 25e12  # of weight.py with float32, a second (measured on an H200)


def parts_fit(problem: Problem, geo: Geometry) -> bool:
    """Whether a float32 problem can be summed on parts: float32 products asked for, and channels for tensor cores."""
    return (not INTERPRETED and problem.dtype == "float32" and problem.out_dtype == "float32"
            and rounding(problem) == "" and geo.group_in % 8 == 0 and geo.group_out % 8 == 0
            and min(geo.group_in, geo.group_out) >= (16 if geo.groups == 1 else 32))


def products_needed(problem: Problem) -> int:
    """How many products of parts keep the error bound of a problem."""
    allowed = sum_error_factor(problem.conv.reduction_length(problem.wrt))
    return FEW_PRODUCTS if allowed >= LEFT_OUT + OTHER_ERRORS else ALL_PRODUCTS


def geo_flops(geo: Geometry) -> float:
    return 2.0 * geo.groups * geo.group_out * geo.group_in * geo.taps * geo.pixels


def parts_of(products: int) -> int:
    return 2 if products == FEW_PRODUCTS else 3


def split_step(part_count: int, padded: int) -> Step:
    """Split float32 images into parts: step(source, parts), parts as (image, three axes, channel) of all parts."""
    def launch(source: Any, parts: Any) -> Launch:
        channels = source.shape[1]
        extents = (1,) * (5 - source.dim()) + tuple(source.shape[2:])
        sn, sc, *s = strides_of(source)
        bc = min(64, power_of_two(channels))
        bp = 4096 // bc
        pixels = padded * math.prod(extents)
        return Launch((-(-pixels // bp), -(-channels // bc)),
                      (source.shape[0], padded, channels, *extents, sn, sc, *s, channels),
                      {"PARTS": part_count, "WIDE": needs_wide(source), "BP": bp, "BC": bc}, 4, 1)

    return Step(split_kernel, launch)


@dataclass(frozen=True)
class PartPlan:
    """The weight gradient of float32 operands in chunks of images."""

    problem: Problem
    geo: Geometry
    tile: LineTile
    products: int
    images: int  # of a chunk
    padded: int  # to whole boxes

    @property
    def chunks(self) -> int:
        return -(-self.geo.batch // self.images)

    @property
    def seconds(self) -> float:
        """Estimated: each chunk is split and multiplied; parts are written and read, operands read."""
        moved = self.geo.batch / self.padded * PART_BYTES * sum(self.part_elements())
        operands = moved * 4 / (PART_BYTES * parts_of(self.products))
        return self.chunks * (2 * LAUNCH_SECONDS + self.tile.seconds) + (operands + moved) / MEMORY_BYTES

    def part_elements(self) -> tuple[int, int]:
        """Elements of the parts of dy and of x."""
        geo, stored = self.geo, self.padded * parts_of(self.products)
        return (stored * geo.groups * geo.group_out * math.prod(geo.y),
                stored * geo.groups * geo.group_in * math.prod(geo.x))

    def sum_elements(self) -> int:
        """Elements of the partial sums; a single part is the gradient itself."""
        geo = self.geo
        return 0 if self.tile.splits == 1 else self.tile.splits * geo.groups * geo.group_out * geo.taps * geo.group_in

    @property
    def workspace_bytes(self) -> int:
        return PART_BYTES * sum(self.part_elements()) + 4 * self.sum_elements() + 64

    def runner(self, add_parts: Step) -> Callable[[Any, Any, Any, Any], None]:
        """run(dy, x, dw, workspace); `add_parts(partial, dw)` adds the partial sums."""
        geo = replace(self.geo, batch=self.padded * self.products)
        split = split_step(parts_of(self.products), self.padded)
        steps = [line_weight(geo, self.tile, self.products, add) for add in (False, True)]
        y_size, x_size = self.part_elements()
        y_floats, x_floats = -(-y_size // 8) * 4, -(-x_size // 8) * 4  # each starts at a multiple of 16 bytes
        shape = (self.tile.splits, geo.groups * geo.group_out, *geo.kernel, geo.group_in)

        def run(dy: Any, x: Any, dw: Any, workspace: Any) -> None:
            whole = scratch(self.problem, workspace, (y_floats + x_floats + self.sum_elements(),), dw)
            y_parts = whole[:y_floats].view(torch.bfloat16)[:y_size]
            x_parts = whole[y_floats:y_floats + x_floats].view(torch.bfloat16)[:x_size]
            partial = whole[y_floats + x_floats:].view(shape) if self.tile.splits > 1 else dw
            target = partial.permute(0, 1, 5, 2, 3, 4) if self.tile.splits > 1 else dw
            for chunk in range(self.chunks):
                first = chunk * self.images
                some_dy, some_x = dy[first:first + self.images], x[first:first + self.images]
                split(some_dy, y_parts)
                split(some_x, x_parts)
                steps[chunk > 0](seen(y_parts, some_dy), seen(x_parts, some_x), target)
            if self.tile.splits > 1:
                add_parts(partial, dw)

        return run


def seen(parts: Any, like: Any) -> Any:
    """Parts as a canonical view: their images one part after the other."""
    channels, *extents = like.shape[1:]
    return parts.view(-1, *extents, channels).movedim(-1, 1)


@dataclass(frozen=True)
class PartGather:
    """The input gradient or the output of float32 operands in chunks of images."""

    problem: Problem
    geo: Geometry
    tile: BoxTile
    products: int
    images: int
    padded: int

    @property
    def chunks(self) -> int:
        return -(-self.geo.batch // self.images)

    def part_elements(self) -> tuple[int, int]:
        """Elements of the parts of the source and of the weight."""
        geo, parts = self.geo, parts_of(self.products)
        one = geo.group_out * math.prod(geo.y) if self.problem.wrt == "input" else geo.group_in * math.prod(geo.x)
        return parts * self.padded * geo.groups * one, parts * geo.groups * geo.group_out * geo.group_in * geo.taps

    @property
    def workspace_bytes(self) -> int:
        return PART_BYTES * sum(self.part_elements()) + 64

    @property
    def seconds(self) -> float:
        """Estimated: the products of parts, and parts written and read beside the operand."""
        moved = self.geo.batch / self.padded * PART_BYTES * self.part_elements()[0]
        operand = moved * 4 / (PART_BYTES * parts_of(self.products))
        return (self.chunks * 2 * LAUNCH_SECONDS + (operand + moved) / MEMORY_BYTES
                + self.products * geo_flops(self.geo) / BOX_FLOPS)

    def runner(self) -> Callable[[Any, Any, Any, Any], None]:
        """run(source, weight, result, workspace)."""
        parts = parts_of(self.products)
        rows = self.geo.groups * self.geo.group_out
        split, split_weight = split_step(parts, self.padded), split_step(parts, rows)
        step = box_parts(self.problem, replace(self.geo, batch=self.padded), self.tile, self.products)
        s_size, w_size = self.part_elements()
        s_floats, w_floats = -(-s_size // 8) * 4, -(-w_size // 8) * 4

        def run(source: Any, weight: Any, result: Any, workspace: Any) -> None:
            whole = scratch(self.problem, workspace, (s_floats + w_floats,), result)
            s_parts = whole[:s_floats].view(torch.bfloat16)[:s_size]
            w_parts = whole[s_floats:].view(torch.bfloat16)[:w_size]
            split_weight(weight, w_parts)
            for first in range(0, self.geo.batch, self.images):
                some = source[first:first + self.images]
                split(some, s_parts)
                step(some, weight, result[first:first + self.images], seen(s_parts, some), seen(w_parts, weight))

        return run


def box_parts(problem: Problem, geo: Geometry, tile: BoxTile, products: int) -> Step:
    """The launch over boxes of parts: step(source, weight, result, parts of source, parts of weight)."""
    is_input = problem.wrt == "input"
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    positions = geo.phase_positions if is_input else geo.y
    boxes = tuple(-(-extent // size) for extent, size in zip((geo.batch, *positions), tile.box))
    tiles = math.prod(boxes) * -(-col // tile.BN) * geo.groups * (geo.phases if is_input else 1)
    weight_block = (tile.CB, tile.BN) if is_input else (tile.BN, tile.CB)

    def leading(source: Any, weight: Any, result: Any, s_parts: Any, w_parts: Any) -> tuple[Any, ...]:
        return (descriptor(s_parts, (*tile.box, tile.CB), 1 if is_input else geo.stride[2]),
                weight_descriptor(w_parts, weight_block), source, weight, result)

    def launch(source: Any, weight: Any, result: Any, s_parts: Any, w_parts: Any) -> Launch:
        from_extents, to_extents = (geo.y, geo.x) if is_input else (geo.x, geo.y)
        rn, rc, *r = strides_of(result)
        ralign, (rn, *r) = aligned_strides((rn, *r))
        pn, b0, b1, b2 = tile.box
        constants = {"RALIGN": ralign, **geo.constants(), **geo.phase_constants("GV"), "RED": red, "COL": col,
                     "CHANNELS": red * geo.groups, "INPUT": is_input, "PATCH": False,
                     "WIDE": needs_wide(source, weight, result), "PRODUCTS": products,
                     "ROWS": geo.groups * geo.group_out, "PN": pn, "B0": b0, "B1": b1, "B2": b2, "BN": tile.BN,
                     "CB": tile.CB}
        scalars = (source.shape[0], *from_extents, *to_extents, geo.batch, *boxes, *strides_of(source),
                   *strides_of(weight), rn, rc, *r)
        return Launch((tiles,), scalars, constants, tile.warps, tile.stages, leading)

    return Step(box_gather_kernel, launch)


def for_gather(problem: Problem, geo: Geometry, max_workspace: int | None) -> PartGather | None:
    """The plan whose chunks fit the workspace; None where boxes of parts do not fit the problem."""
    letters = SPATIAL_LETTERS[problem.conv.axes]
    twin = problem.with_(dtype="bfloat16", out_dtype="bfloat16", compute="", layout=f"N{letters}C",
                         weight_layout=f"O{letters}I")
    if not parts_fit(problem, geo) or is_patch(twin, geo) or not gather_fits(twin, geo):
        return None
    is_input = problem.wrt == "input"
    if not is_input and geo.x[2] % geo.stride[2]:
        return None
    limit = max(WORKSPACE_FLOOR, 8 * geo.groups * geo.group_out * geo.group_in * geo.taps)
    if max_workspace is not None:
        limit = min(limit, max_workspace)
    products = products_needed(problem)
    one = PartGather(problem, geo, choose_box_gather(geo, is_input, False), products, 1, 1)
    source, weight = one.part_elements()
    images = min(geo.batch, (limit - 64 - PART_BYTES * weight) // (PART_BYTES * source))
    while images >= 1:
        images = -(-geo.batch // -(-geo.batch // images))
        tile = choose_box_gather(replace(geo, batch=images), is_input, False)
        found = replace(one, tile=tile, images=images, padded=-(-images // tile.box[0]) * tile.box[0])
        if found.workspace_bytes <= limit:
            return found if found.seconds < geo_flops(geo) / POINTER_FLOPS else None
        images = min(images - 1, images * 3 // 4)
    return None


def for_weight(problem: Problem, geo: Geometry, max_workspace: int | None) -> PartPlan | None:
    """The plan whose chunks fit the workspace; None where parts do not fit the problem or no image fits."""
    if not parts_fit(problem, geo):
        return None
    weight_bytes = 4 * geo.groups * geo.group_out * geo.group_in * geo.taps
    limit = max(WORKSPACE_FLOOR, 2 * weight_bytes)
    if max_workspace is not None:
        limit = min(limit, max_workspace)
    products = products_needed(problem)
    found = [plan for share in (0.25, 0.5) if (plan := in_chunks(problem, geo, products, limit, share)) is not None]
    best = min(found, key=lambda plan: plan.seconds, default=None)
    return best if best is not None and best.seconds < geo_flops(geo) / POINTER_FLOPS else None


def in_chunks(problem: Problem, geo: Geometry, products: int, limit: int, for_sums: float) -> PartPlan | None:
    """The largest chunks beside partial sums that may take a given share of the workspace."""
    image_bytes = PART_BYTES * parts_of(products) * geo.groups * (
        geo.group_out * math.prod(geo.y) + geo.group_in * math.prod(geo.x))
    for_parts = limit - int(limit * for_sums)
    images = min(geo.batch, for_parts // image_bytes)
    while images >= 1:
        images = -(-geo.batch // -(-geo.batch // images))  # chunks of about the same size
        used = images * image_bytes
        tile = choose_lines(replace(geo, batch=images * products), max(0, limit - used))
        if tile is None:
            return None
        padded = -(-images // tile.box[0]) * tile.box[0]
        found = PartPlan(problem, geo, tile, products, images, padded)
        if found.workspace_bytes <= limit:
            return found
        images = min(images - 1, images * 3 // 4)
    return None
