"""Plans for the weight gradient line by line: when it fits, which tile, and how its copies see the tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import triton.experimental.gluon.language as gl

from ...problem import Problem
from .bias_parts import bias_add_step
from .box_plans import descriptor, tensors_fit, whole_channels
from .descriptors import BoxDescriptor
from .geometry import Geometry, Three, strides_of
from .gpu import Gpu
from .kernel import Kernel, Prepared, Query
from .launch import Launch, Step, power_of_two
from .line_schedule import (
    Segment,
    as_table,
    boxes_of_axis,
    count_lines,
    dealt_out,
    lines_of,
    lines_of_taps,
    lines_of_tiles,
    most_parts,
    shares,
    split_counts,
)
from .line_tiles import FITTED_TILES, LineTile
from .line_views import folded, folded_axes, folded_view, images_fit, images_last, images_last_view, padded_bytes
from .padding import padded
from .replay import constant_tensor
from .split_k import add_step, with_sums
from .tiles import Box, best_box, most_splits
from .weight_lines import line_weight_kernel

MOST_TAPS = 4096  # so that planning takes milliseconds
MOST_SEGMENTS = 62  # of a program that adds to a result: it knows which ones it has to sum again
FARTHEST, LONGEST = 8, 256  # elements: from one that a copy takes to the next, and over all of them on an axis
# Boxes of many images whose pixels lie far from each other: slower by this much where the cache does not hold both
# operands (one layer was measured).
SCATTERED, HELD_BYTES = 1.3, 40e6
FEWER_LINES = 0.97  # of those of compact boxes, to make other boxes worth a thought
# Programs that share all lines evenly are at different lines at a time: only where the cache holds both operands.
CACHED_BYTES = 45e6
MOST_SHARED_TILES = 4096  # more fill the chip without sharing
SHARING = 1.13  # of the time of equal shares, as measured
# What the cost model counts with, fitted to layers measured on an H200: shares of the tensor cores' speed by the
# columns of a tile, of the L2 cache's by the channels of a pixel that are copied together, and seconds.
PRODUCTS = {16: 0.339, 32: 0.566, 64: 0.799, 128: 0.940, 256: 0.971}
CACHE_SHARES = {16: 0.32, 32: 0.48, 64: 0.608, 128: 1.0, 256: 1.0}
COPY_SECONDS = 0.15e-6  # to start the copies of a line
DISTURBANCE = 0.08  # of the products by the copies beside them
LINE_SECONDS = 0.02e-6  # of waiting at each line, beside the products
HALF_REGISTERS = 128  # a thread, so that two programs of 8 warps fit a multiprocessor


def supports(problem: Problem, geo: Geometry) -> str | None:
    """What the copies and tensor cores can do: 16-bit channels last, and enough of them."""
    if not whole_channels(problem):
        return "16-bit operands with channels last only"
    if geo.taps > MOST_TAPS:
        return f"at most {MOST_TAPS} taps"
    fold = folded_axes(problem, geo)
    geo = folded(geo, fold)
    fewest = min(geo.group_in, geo.group_out)
    if geo.group_in % 8 or geo.group_out % 8:
        fits = fewest >= 32 and geo.groups == 1 and fold == 0
        return None if fits else "channels that are no multiples of 8 are copied: 32 and more, no groups"
    # of the grouped layers that were timed, those with under 32 channels were not faster than `weight.py`
    least = 16 if geo.groups == 1 else 32
    return f"at least {least} channels on both sides" if fewest < least else None


@dataclass(frozen=True)
class LinePlan:
    """The weight gradient of a problem line by line: `take` says whether the tensors lie as it needs."""

    geo: Geometry
    fold: int
    tile: LineTile
    step: Step
    copies: tuple[int, int]  # bytes, of dy and x

    @property
    def bias_shape(self) -> tuple[int, int]:
        """Of the partial sums of the bias gradient; no rows where there can be none."""
        seen = images_last(self.geo) if self.tile.shared else folded(self.geo, self.fold)
        return bias_rows(seen, self.tile), self.geo.groups * self.geo.group_out

    def copied(self, dy: Any, x: Any, memory: Any) -> tuple[Any, Any]:
        """The operands as the copy engine can read them; `memory`: float32, of as many bytes as all copies."""
        end = self.copies[0] // 4
        return (padded(dy, memory[:end], dy.dtype) if self.copies[0] else dy,
                padded(x, memory[end:end + self.copies[1] // 4], x.dtype) if self.copies[1] else x)

    def write(self, dy: Any, x: Any, result: Any, *bias: Any) -> None:
        """Write partial sums to a result (run, O, I, three axes), or the gradient itself to one without runs.

        Folded axes need the former: a gradient may lie in any layout.
        """
        if self.tile.shared:
            result = result.transpose(-1, -2) if result.dim() == 6 else result.unsqueeze(-1)
            self.step(images_last_view(dy), images_last_view(x), result, *bias)
            return
        if self.fold:
            runs, outputs, inputs, *taps = result.shape
            keep = 3 - self.fold
            shape = (runs, outputs, inputs * math.prod(taps[keep:]), *taps[:keep], *(1,) * self.fold)
            result = result.as_strided(shape, result.stride())
        self.step(dy, folded_view(x, self.geo, self.fold), result, *bias)


def accepts(query: Query) -> str | None:
    """Both operands as the copy engine reads them, or copied first."""
    dy, x = query.operands
    fold = folded_axes(query.problem, query.geo)
    seen = folded_view(x, query.geo, fold)
    if seen is None:
        return "the taps of windows side by side are not neighbours in memory"
    dy_copy, x_copy = padded_bytes(folded(query.geo, fold))
    fits = (dy_copy > 0 or tensors_fit(dy)) and (x_copy > 0 or tensors_fit(seen))
    return None if fits else "channels are not neighbours in memory, or rows not at multiples of 16 bytes"


def tiles(query: Query) -> Iterator[LineTile]:
    """Every tile within the workspace that copies leave; folded axes need partial sums."""
    geo, gpu = query.geo, query.gpu
    fold = folded_axes(query.problem, geo)
    seen, max_workspace = folded(geo, fold), query.max_workspace
    copies = padded_bytes(seen)
    copying = 0.0
    if sum(copies):
        max_workspace = query.limit - sum(copies)
        copying = sum(gpu.launch_s + 2 * size / gpu.memory_bytes_per_s for size in copies if size)
    if max_workspace is None or max_workspace >= 0:
        for tile in all_lines(seen, max_workspace, gpu):
            tile = replace(tile, seconds=tile.seconds + copying) if copying else tile
            if not fold or (settled(seen, tile).splits if tile.programs else tile.splits) > 1:
                yield tile
    if query.operands[0].dim() == 3 and all(map(tensors_fit, map(images_last_view, query.operands))):
        yield from shared_lines(geo, query.max_workspace, gpu)


def build(query: Query, tile: LineTile) -> Prepared:
    """The launches of a tile: copies, sums, and the addition of partial ones."""
    plan = line_plan(query.problem, query.geo, tile)
    geo, tile, splits = query.geo, plan.tile, plan.tile.splits
    add, add_bias = add_step(geo, splits), bias_add_step(plan.bias_shape[1], plan.bias_shape[0])
    shape = (splits, geo.groups * geo.group_out, *geo.kernel, geo.group_in)
    copied = sum(plan.copies) // 4
    needed = copied + (math.prod(shape) if splits > 1 else 0)

    def write(dy: Any, x: Any, memory: Any, result: Any, *bias: Any) -> None:
        dy, x = plan.copied(dy, x, memory)
        if splits == 1:
            plan.write(dy, x, result, *bias[:1])
            if bias:
                add_bias(*bias)
            return
        partial = memory[copied:].view(shape)
        plan.write(dy, x, partial.permute(0, 1, 5, 2, 3, 4), *bias[:1])
        add(partial, result, *bias)

    return with_sums(query, f"lines_{query.short}_{tile.BK}x{tile.NT}x{tile.CB}_split{splits}", str(tile), (needed,),
                     plan.bias_shape, write)


def line_plan(problem: Problem, geo: Geometry, tile: LineTile) -> LinePlan:
    """The plan of a tile."""
    if tile.shared:
        return LinePlan(geo, 0, tile, line_weight(images_last(geo), tile), (0, 0))
    fold = folded_axes(problem, geo)
    seen = folded(geo, fold)
    tile = settled(seen, tile)
    tile = turned(seen, tile) if problem.weight_layout.endswith("O") else tile
    return LinePlan(geo, fold, tile, line_weight(seen, tile), padded_bytes(seen))


def tile_shapes(geo: Geometry) -> Iterator[tuple[int, int, int, int, bool, int]]:
    """(BK, CB, axis of the taps, taps a program, chained, pixels of a line) of every tile that is worth a thought."""
    axes = [axis for axis in range(3) if geo.kernel[axis] > 1] or [2]
    for (bk, cb, pixels), (apart, chained) in FITTED_TILES.items():
        if bk >= 2 * max(64, geo.group_out) or cb >= 2 * max(16, geo.group_in):
            continue
        for axis in axes:
            for taps in {1, *apart, *chained} & set(range(1, geo.kernel[axis] + 1)):
                if taps > 1 and -(-geo.kernel[axis] // taps) == -(-geo.kernel[axis] // (taps - 1)):
                    continue  # fewer taps need no more programs
                overlap = taps > geo.stride[axis] and (geo.stride[axis] == 1 or geo.dilation[axis] == 1)
                if taps in chained and overlap:
                    yield bk, cb, axis, taps, True, pixels
                if taps in apart:
                    yield bk, cb, axis, taps, False, pixels


@lru_cache(maxsize=4096)
def line_boxes(geo: Geometry, axis: int, taps: int, chain: bool, pixels: int) -> tuple[Box, ...]:
    """Boxes of pixels for lines: compact ones, and others where that leaves out more lines that only read padding.

    A box is one wide on the axis of a chain, and where the copies do not reach over more elements of x.
    """
    most = tuple(1 if (chain and axis == a) or geo.stride[a] > FARTHEST else LONGEST // geo.stride[a] for a in range(3))
    extents = tuple(1 if most[a] == 1 else geo.y[a] for a in range(3))
    compact = best_box((geo.batch, *extents), pixels, most=most)
    sizes = [1] + [2**bits for bits in range(1, pixels.bit_length())]
    boxes = [(pixels // (b0 * b1 * b2), b0, b1, b2) for b0, b1, b2 in product(
        *([size for size in sizes if size < 2 * extent and size <= limit] for extent, limit in zip(extents, most)))
        if pixels % (b0 * b1 * b2) == 0]
    boxes = [compact, *(box for box in boxes if box[0] < 2 * geo.batch)]

    walk = lines_of(geo, compact, axis, chain)
    sums: dict[tuple[int, int], int] = {}  # by axis and extent of a box: of all first taps

    def lines(box: Box) -> int:
        for place in zip(range(3), box[1:]):
            if place not in sums:
                sums[place] = sum(boxes_of_axis(geo, box, place[0], axis, taps, chain and walk.length * walk.spread))
        return -(-geo.batch // box[0]) * math.prod(sums[place] for place in zip(range(3), box[1:]))

    fewest = min(boxes, key=lambda box: (lines(box), -box[3], -box[2], -box[1]))
    return (compact, fewest) if lines(fewest) < FEWER_LINES * lines(compact) else (compact,)


def skips(geo: Geometry, tile: LineTile) -> bool:
    """Whether the box of a tile is not the compact one."""
    return tile.box != line_boxes(geo, tile.axis, tile.NT, tile.chain, math.prod(tile.box))[0]


def choose_lines(geo: Geometry, max_workspace: int | None, gpu: Gpu) -> LineTile | None:
    """The tile and the number of runs with the lowest estimated time."""
    best = min(all_lines(geo, max_workspace, gpu), key=lambda tile: tile.seconds, default=None)
    return None if best is None else settled(geo, best)


def settled(geo: Geometry, tile: LineTile) -> LineTile:
    """The tile with the number of parts that its schedule has."""
    return replace(tile, splits=most_parts(schedule_of(geo, tile))) if tile.programs else tile


def turned(geo: Geometry, tile: LineTile) -> LineTile:
    """The tile with input channels as rows, which stores neighbouring output channels together, where that pays."""
    if tile.turned or tile.splits > 1 or tile.NT > 1 or -(-geo.group_out // tile.CB) * -(-geo.group_in // tile.BK) > \
            -(-geo.group_out // tile.BK) * -(-geo.group_in // tile.CB):
        return tile
    return replace(tile, BK=tile.CB, CB=tile.BK, turned=True)


def kind_of(query: Query, tile: LineTile) -> tuple[int, ...]:
    """Chains, several taps without chains, single taps, of different sizes."""
    seen = folded(query.geo, folded_axes(query.problem, query.geo))
    return (tile.NT > 1, tile.chain, tile.BK * tile.CB, tile.programs > 0, tile.shared,
            not tile.shared and skips(seen, tile))


def all_lines(geo: Geometry, max_workspace: int | None, gpu: Gpu) -> Iterator[LineTile]:
    weight_bytes = 4 * geo.groups * geo.group_out * geo.group_in * geo.taps
    operand_bytes = 2 * geo.groups * geo.batch * (geo.group_out * math.prod(geo.y) + geo.group_in * math.prod(geo.x))
    most = most_splits(geo, max_workspace)
    shapes = ((shape, box) for shape in tile_shapes(geo) for box in line_boxes(geo, *shape[2:]))
    for (bk, cb, axis, taps, chain, pixels), box in shapes:
        lines = lines_of(geo, box, axis, chain)
        count, sum_of_lines, most_lines = count_lines(geo, box, axis, taps, chain, lines.length * lines.spread)
        channel_tiles = -(-geo.group_out // bk) * -(-geo.group_in // cb)
        tiles = count * channel_tiles * geo.groups
        total = sum_of_lines * channel_tiles * geo.groups
        warps = 8 if bk >= 128 else 4
        y_bytes, x_bytes = pixels * bk * 2, pixels * cb * 2
        together = 2 if bk == 64 and cb * taps <= 192 else 1
        room = gpu.program_bytes // together
        # NOTE: at the end of a chain two lines hold NT slots of x each: with fewer than 2*NT the copies never go on
        y_slots = next((count for count in (6, 5, 4, 3)
                        if (room - count * y_bytes) // x_bytes >= 2 * taps + count - 2), 0)
        x_slots = min(4 * taps + 3, (room - y_slots * y_bytes) // x_bytes)
        if taps == 1:
            y_slots = x_slots = min(6, room // (y_bytes + x_bytes))
        if y_slots == 0:
            continue
        fresh = taps if not chain else geo.stride[axis] + (taps - geo.stride[axis]) / lines.length
        line_flops = 2 * pixels * bk * cb * taps
        # seconds for a line of each of the programs that share a multiprocessor
        share = together * gpu.multiprocessors
        products = share * line_flops / (PRODUCTS[cb] * gpu.tensor_flops) * (1.25 if bk == 64 and together == 1 else 1)
        copies = share * (y_bytes / CACHE_SHARES[bk] + x_bytes * fresh / CACHE_SHARES[cb]) / gpu.l2_bytes_per_s
        line_seconds = max(products + LINE_SECONDS, copies, COPY_SECONDS * fresh) + DISTURBANCE * copies
        slots = gpu.multiprocessors * together
        least = max(operand_bytes, weight_bytes) / gpu.memory_bytes_per_s
        scattered = SCATTERED if box[0] > 1 and geo.batch > 1 and operand_bytes > HELD_BYTES and \
            box != line_boxes(geo, axis, taps, chain, pixels)[0] else 1.0

        # parts of a tile, programs that share all lines, lines that a multiprocessor sums in turn
        ways: list[tuple[int, int, float]] = []
        for splits in split_counts(tiles, most_lines, slots, most):
            # a wave of programs takes as long as their longest run; many waves even out
            waves = -(-tiles * splits // slots)
            run = -(-most_lines // splits) if waves == 1 else -(-total // (tiles * splits))
            ways.append((splits, 0, waves * (run + 4)))
        if total >= 8 * slots and operand_bytes <= CACHED_BYTES and 1 < tiles <= MOST_SHARED_TILES:
            run, segments = shares(tiles, total, slots)
            parts = (most_lines - 2) // run + 2  # at most; see `settled`
            ways += [(parts, slots, SHARING * (run + 4 * segments))] if parts <= most else []
        for parts, programs, turn in ways:
            summing = turn * line_seconds * scattered
            seconds = gpu.launch_s + max(summing, least)
            if parts > 1:
                seconds += gpu.launch_s + 2 * parts * weight_bytes / gpu.memory_bytes_per_s
            yield LineTile(box, bk, cb, taps, axis, chain, y_slots, x_slots, warps, together, parts, seconds, programs)


def shared_lines(geo: Geometry, max_workspace: int | None, gpu: Gpu) -> Iterator[LineTile]:
    """Tiles of a problem with one axis whose taps share copies of x, the images side by side (see line_views.py)."""
    if not images_fit(geo):
        return
    seen, most = images_last(geo), most_splits(geo, max_workspace)
    operand_bytes = 2 * geo.groups * geo.batch * (geo.group_out * geo.y[2] + geo.group_in * geo.x[2])
    weight_bytes = 4 * geo.groups * geo.group_out * geo.group_in * geo.taps
    bk = cb = 64
    for pixels, taps, together in ((64, 3, 2), (64, 4, 2), (128, 3, 2)):
        b2 = min(power_of_two(geo.batch), 16)
        box = (1, 1, pixels // b2, b2)
        copied = pixels + (taps - 1) * geo.dilation[2] * b2
        y_bytes, x_bytes = pixels * bk * 2, copied * cb * 2
        slots = min(6, gpu.program_bytes // together // (y_bytes + x_bytes))
        if taps > geo.taps or copied // b2 > LONGEST or slots < 3:
            continue
        lines = lines_of(seen, box, 1, False)
        by_taps = lines_of_taps(seen, box, 1, taps, False, 1)
        tiles = len(by_taps) * -(-geo.group_out // bk) * -(-geo.group_in // cb) * geo.groups
        share = together * gpu.multiprocessors
        products = share * 2 * pixels * bk * cb * taps / (PRODUCTS[cb] * gpu.tensor_flops)
        copies = share * (y_bytes + x_bytes) / (CACHE_SHARES[cb] * gpu.l2_bytes_per_s)
        line_seconds = max(products + LINE_SECONDS, copies) + DISTURBANCE * copies
        for splits in split_counts(tiles, math.prod(lines.boxes), share, most):
            waves = -(-tiles * splits // share)
            run = -(-math.prod(lines.boxes) // splits)
            seconds = gpu.launch_s + max(waves * (run + 4) * line_seconds, operand_bytes / gpu.memory_bytes_per_s)
            seconds += gpu.launch_s + 2 * splits * weight_bytes / gpu.memory_bytes_per_s if splits > 1 else 0
            yield LineTile(box, bk, cb, taps, 1, False, slots, slots, 4, together, splits, seconds, shared=True)


def box_descriptor(tensor: Any, box: Box, channels: int, stride: Three = (1, 1, 1)) -> BoxDescriptor:
    plain = descriptor(tensor, (*box, channels))
    steps = (1, *(step if size > 1 else 1 for step, size in zip(stride, box[1:])), 1)
    return BoxDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape,
                         gl.NVMMASharedLayout(min(128, 2 * channels), 16, rank=5),
                         box=(*box, min(64, channels)), steps=steps)  # more channels are copied 64 at a time


def tiles_with_taps(geo: Geometry, tile: LineTile) -> int:
    """Tiles of the same taps: all channels of all groups."""
    return -(-geo.group_out // tile.BK) * -(-geo.group_in // tile.CB) * geo.groups


def schedule_of(geo: Geometry, tile: LineTile) -> list[list[Segment]]:
    """Which lines of which tiles each of the programs sums that share all lines."""
    lines = lines_of(geo, tile.box, tile.axis, tile.chain)
    by_taps = lines_of_taps(geo, tile.box, tile.axis, tile.NT, tile.chain, lines.length * lines.spread)
    return dealt_out(lines_of_tiles(by_taps, tiles_with_taps(geo, tile) // geo.groups, geo.groups), tile.programs)


def bias_rows(geo: Geometry, tile: LineTile) -> int:
    """Rows of partial sums of dy that a launch writes beside the weight gradient; 0 where it cannot.

    The tiles with the same output channels share the lines among them, so all must have all lines.
    """
    lines = lines_of(geo, tile.box, tile.axis, tile.chain)
    by_taps = lines_of_taps(geo, tile.box, tile.axis, tile.NT, tile.chain, lines.length * lines.spread)
    every = lines.length * lines.spread * math.prod(lines.boxes)
    if tile.programs or tile.turned or set(by_taps) != {every}:
        return 0
    return tile.splits * len(by_taps) * -(-geo.group_in // tile.CB)


def line_weight(geo: Geometry, tile: LineTile, products: int = 1, add: bool = False) -> Step:
    """The launch that writes the partial sums of all runs, or with one run the weight gradient itself.

    Where it is given memory for `bias_rows` rows of channels, it writes sums of dy there as well.

    Operands of several parts (see part_plans.py): geo.batch counts the images of all `products` of parts. `add`: to
    what is in the result already.
    """
    lines = lines_of(geo, tile.box, tile.axis, tile.chain)
    schedule = schedule_of(geo, tile) if tile.programs else []
    if add and max(map(len, schedule), default=0) > MOST_SEGMENTS:
        tile, schedule = replace(tile, programs=0), []
    numbers, segments = as_table(schedule) if schedule else ([], 1)
    fill = any(segment.fill for program in schedule for segment in program)
    tap_tiles = math.prod(-(-geo.kernel[a] // (tile.NT if a == tile.axis else 1)) for a in range(3))
    programs = len(schedule) or tile.splits * tap_tiles * tiles_with_taps(geo, tile)
    tables: dict[Any, Any] = {}
    pn, b0, b1, b2 = tile.box
    apart = tile.NT > 1 and not tile.shared
    y_slots, x_slots = (tile.y_slots, tile.x_slots) if apart else (min(tile.y_slots, tile.x_slots),) * 2

    def x_descriptor(x: Any) -> BoxDescriptor:
        if not tile.shared:
            return box_descriptor(x, tile.box, tile.CB, geo.stride)
        plain = box_descriptor(x, (1, 1, 1, 8), tile.CB)
        return replace(plain, box=(1, 1, b1 + (tile.NT - 1) * geo.dilation[1], b2, tile.CB))

    def leading(dy: Any, x: Any, result: Any, bias: Any = None) -> tuple[Any, ...]:
        table = constant_tensor(tables, dy, lambda device: torch.tensor(
            numbers, dtype=torch.int32, device=device)) if tile.programs else None
        return box_descriptor(dy, tile.box, tile.BK), x_descriptor(x), dy, x, result, bias, table

    def launch(dy: Any, x: Any, result: Any, bias: Any = None) -> Launch:
        yn, _, *y = strides_of(dy)
        xn, _, *xs = strides_of(x)
        r_split, ro, ri, *r = tuple(result.stride()) if result.dim() == 6 else (0, *strides_of(result))
        constants = {**geo.constants(), "KG": geo.group_out, "CG": geo.group_in, "BIAS": bias is not None,
                     "PRODUCTS": products, "ADD": add, "FILL": fill, "TURNED": tile.turned, "SEGMENTS": segments,
                     "PARTS": 0 if tile.programs else tile.splits, "AXIS": tile.axis, "NT": tile.NT,
                     "CHAIN": tile.chain, "SHARED": tile.shared, "PN": pn, "B0": b0, "B1": b1, "B2": b2,
                     "BK": tile.BK, "CB": tile.CB, "YS": y_slots, "XS": x_slots, "WARPS": tile.warps}
        batch = geo.batch // products
        scalars = (batch, *geo.y, *geo.x, lines.length, lines.spread, *lines.boxes[1:], -(-batch // pn), yn, *y,
                   xn, *xs, r_split, ro, ri, *r, geo.groups * geo.group_out)
        return Launch((programs,), scalars, constants, tile.warps, 1, leading,
                      HALF_REGISTERS if tile.together == 2 else None)

    return Step(line_weight_kernel, launch)


KERNEL = Kernel("lines", frozenset({"weight"}), supports, accepts, tiles, build, LineTile, kind=kind_of, measured=7)
