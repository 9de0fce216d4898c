"""Plans for the weight gradient by spans of rows: when it fits, which tile, runs of lines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...problem import Problem
from .box_plans import tensors_fit, whole_channels
from .geometry import Geometry, strides_of
from .gpu import Gpu
from .kernel import Kernel, Prepared, Query
from .launch import Launch, Step, power_of_two
from .line_plans import FARTHEST, HALF_REGISTERS, LONGEST, box_descriptor
from .split_k import with_sums
from .tiles import Box, workspace_limit
from .weight_spans import span_weight_kernel
from .wide_plans import Widening, collect_step, turned_round

PLACES = 64  # of a line
MOST_CHANNELS = 16  # of the operand with windows
MOST_REGISTERS = 160  # a thread, for sums
# What the cost model counts with, fitted to layers measured on an H200
PRODUCTS = 0.8  # of the tensor cores' speed
CACHE_SHARE = 0.44  # of the L2 cache's
LINE_SECONDS = 0.05e-6  # of waiting at each line, beside the products
PROGRAM_SECONDS = 12e-6  # to fill the slots, and to store all sums
LAUNCHES = 2  # sums are collected by a second kernel
SECTOR_BYTES = 32


@dataclass(frozen=True)
class SpanTile:
    """`fold` positions x output channels, BN elements of a row, NT0 x K1 taps of two axes; swapped: dy has windows.

    Positions are counted from -shift, and `cell` of them are copied alike: x from multiples of 16 bytes.
    `box`: images and positions of the first axis of a line; `segments`: of the second axis, each a unit of a run.
    """

    swapped: bool
    cell: int
    fold: int
    shift: int
    box: tuple[int, int]
    BN: int
    NT0: int
    segments: int
    y_slots: int
    x_slots: int
    together: int
    splits: int
    seconds: float

    def __str__(self) -> str:
        return (f"spans of {'dy' if self.swapped else 'x'}, {self.fold} of {self.cell} positions x {self.BN} elements, "
                f"lines of "
                f"{self.box[0]}x{self.box[1]} places, {self.NT0} taps of the first axis, {self.segments} segments, "
                f"{self.y_slots}+{self.x_slots} slots, {self.splits} runs, {self.seconds * 1e6:.0f} us expected")


def reach(seen: Geometry, cell: int, fold: int, shift: int) -> int:
    """Elements of a row from where copies for `fold` positions begin to the end of their windows, at most."""
    step, pad = seen.stride[2] * seen.group_in, seen.pad[2] * seen.group_in
    return max(((first - shift) * step - pad) % 8 for first in range(0, cell, fold)) + (
        (fold - 1) * seen.stride[2] + seen.kernel[2]) * seen.group_in


def sectors_cut(seen: Geometry, cell: int, fold: int, shift: int) -> float:
    """How many of the copies of x begin within a sector of memory, of which they take all."""
    step, pad = seen.stride[2] * seen.group_in, seen.pad[2] * seen.group_in
    if cell * step % 16:
        return 0.5
    firsts = range(0, cell, fold)
    return sum(((first - shift) * step - pad) % 16 >= 8 for first in firsts) / len(firsts)


def cells_of(seen: Geometry) -> Iterator[tuple[int, int, int]]:
    """Positions of a cell, those of a tile, and by how much they are shifted: copies are short and cut no sectors."""
    for fold in (1, 2, 4, 8, 16):
        if fold * seen.group_out in (64, 128):
            cell = math.lcm(fold, 8 // math.gcd(8, seen.stride[2] * seen.group_in))
            yield cell, fold, min(range(cell), key=lambda shift: (
                power_of_two(reach(seen, cell, fold, shift)), sectors_cut(seen, cell, fold, shift), shift))


def supports(problem: Problem, geo: Geometry) -> str | None:
    """Few channels on one side, windows of two axes and more."""
    if not whole_channels(problem) or not problem.layout.endswith("WC"):
        return "16-bit operands with channels last only"
    if geo.groups > 1 or min(geo.group_in, geo.group_out) > MOST_CHANNELS:
        return f"at most {MOST_CHANNELS} channels on one side, no groups"
    if set(geo.dilation) != {1} or geo.kernel[1] == 1 or geo.stride[1] > geo.kernel[1]:
        return "windows of two axes and more without dilation, no further apart than they are long"
    return None


def accepts(query: Query) -> str | None:
    """Whole rows of both operands are neighbours in memory."""
    return None if span_views(*query.operands) is not None else "rows of positions and channels have gaps"


def places(seen: Geometry) -> tuple[int, int]:
    """Images and positions of the first axis that make a line; images last, because their pixels lie farthest apart."""
    first = min(power_of_two(seen.y[0]), PLACES)
    if seen.stride[0] > FARTHEST or first * seen.stride[0] > LONGEST:
        first = 1
    return PLACES // first, first


def all_spans(geo: Geometry, max_workspace: int | None, gpu: Gpu) -> Iterator[SpanTile]:
    for swapped in (False, True):
        if swapped and geo.phases > 1:
            continue
        seen = turned_round(geo) if swapped else geo
        if min(seen.pad) < 0 or seen.group_in > MOST_CHANNELS or seen.x[2] * seen.group_in % 8 or seen.group_out % 8:
            continue
        for cell, fold, shift in cells_of(seen):
            yield from tiles_of(seen, swapped, (cell, fold, shift), workspace_limit(geo, max_workspace), gpu)


def slots_for(seen: Geometry, lines: int, both: bool) -> int:
    """Slots of x for so many lines of dy, of one unit or of `both` that follow each other."""
    first, more = seen.kernel[1], seen.stride[1]
    return 2 * first + (lines - 2) * more if both else first + (lines - 1) * more


def tiles_of(seen: Geometry, swapped: bool, cells_of_row: tuple[int, int, int], limit: int,
             gpu: Gpu) -> Iterator[SpanTile]:
    cell, fold, shift = cells_of_row
    rows = fold * seen.group_out
    warps = rows // 16
    box = places(seen)
    boxes = -(-seen.batch // box[0]) * -(-seen.y[0] // box[1])
    cells, columns = -(-(seen.y[2] + shift) // cell), reach(seen, cell, fold, shift)
    k0, k1, _ = seen.kernel
    for bn, taps in ((bn, taps) for bn in (16, 32, 64) for taps in {1, k0}):
        column_tiles = -(-columns // bn)
        registers = taps * k1 * bn // 2
        if registers > MOST_REGISTERS or (bn > 16 and bn >= 2 * columns) or column_tiles > 2:
            continue
        y_bytes, x_bytes = PLACES * rows * 2, taps * PLACES * bn * 2
        for together in (1, 2):
            if together == 2 and warps == 8:
                continue
            room = gpu.program_bytes // together
            y_slots, x_slots = next(((count, slots_for(seen, count, both)) for both in (True, False)
                                     for count in ((6, 5, 4) if both else (6, 5, 4, 3))
                                     if count * y_bytes + slots_for(seen, count, both) * x_bytes <= room), (0, 0))
            if y_slots == 0:
                continue
            tiles = -(-k0 // taps) * column_tiles * (cell // fold)
            line_flops = 2 * PLACES * rows * bn * taps * k1
            cut = sectors_cut(seen, cell, fold, shift) * SECTOR_BYTES
            copied = y_bytes + taps * seen.stride[1] * PLACES * (2 * bn + cut)
            share = together * gpu.multiprocessors
            line = LINE_SECONDS + share * max(line_flops / (PRODUCTS * gpu.tensor_flops),
                                              copied / (CACHE_SHARE * gpu.l2_bytes_per_s))
            moved = 2 * seen.batch * (seen.group_out * math.prod(seen.y) + seen.group_in * math.prod(seen.x))
            size = 4 * seen.taps * seen.group_in * seen.group_out * column_tiles * (cell // fold)
            for segments in (1, 2, 4, 8):
                if segments > 1 and seen.y[1] < 8 * segments:
                    continue
                length = -(-seen.y[1] // segments)
                units = cells * boxes * -(-seen.y[1] // length)
                for splits in sorted({-(-units // count) for count in range(1, 65)}):
                    if splits > max(1, limit // size):
                        continue
                    waves = -(-tiles * splits // share)
                    extra = (k1 - seen.stride[1]) / seen.stride[1] * 0.3  # rows copied again for each unit
                    seconds = waves * (-(-units // splits) * (length + extra) * line + PROGRAM_SECONDS)
                    seconds = max(seconds, moved / gpu.memory_bytes_per_s) + LAUNCHES * gpu.launch_s \
                        + 2 * splits * size / gpu.memory_bytes_per_s
                    yield SpanTile(swapped, cell, fold, shift, box, bn, taps, segments, y_slots, x_slots, together,
                                  splits, seconds)


@dataclass(frozen=True)
class SpanPlan:
    """The weight gradient of a problem by spans: `take` says whether the tensors lie as it needs."""

    geo: Geometry
    tile: SpanTile
    step: Step
    collect: Step

    @property
    def seen(self) -> Geometry:
        return turned_round(self.geo) if self.tile.swapped else self.geo

    @property
    def parts(self) -> int:
        tile = self.tile
        return tile.splits * (tile.cell // tile.fold) * column_tiles_of(self.seen, tile)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the partial sums."""
        return (self.parts, self.seen.group_out, *self.seen.kernel, self.seen.group_in)

    @property
    def bias_shape(self) -> tuple[int, int]:
        """Of the partial sums of the bias gradient; no rows where there can be none."""
        return 0 if self.tile.swapped else self.tile.splits * self.tile.cell, self.geo.group_out

    def write(self, dy: Any, x: Any, partial: Any, result: Any, *bias: Any) -> None:
        views = span_views(*((x, dy) if self.tile.swapped else (dy, x)))
        assert views is not None
        self.step(*views, partial, *bias[:1])
        self.collect(partial, result, *bias)


def column_tiles_of(seen: Geometry, tile: SpanTile) -> int:
    return -(-reach(seen, tile.cell, tile.fold, tile.shift) // tile.BN)


def span_views(*operands: Any) -> tuple[Any, Any] | None:
    """Both operands with whole rows as channels; None where these have gaps."""
    views = []
    for tensor in operands:
        channels, last = tensor.shape[1], tensor.shape[-1]
        if (channels > 1 and tensor.stride(1) != 1) or (last > 1 and tensor.stride(-1) != channels):
            return None
        views.append(tensor.as_strided((*tensor.shape[:1], channels * last, *tensor.shape[2:-1], 1),
                                       (*tensor.stride()[:1], 1, *tensor.stride()[2:-1], channels * last)))
    return (views[0], views[1]) if tensors_fit(*views) else None


def build(query: Query, tile: SpanTile) -> Prepared:
    plan = span_plan(query.geo, tile)
    return with_sums(query, f"spans_{query.short}_{tile.fold}x{tile.BN}_split{tile.splits}", str(tile), plan.shape,
                     plan.bias_shape, plan.write)


def span_plan(geo: Geometry, tile: SpanTile) -> SpanPlan:
    seen = turned_round(geo) if tile.swapped else geo
    column_tiles = column_tiles_of(seen, tile)
    parts = tile.cell // tile.fold
    tiles = -(-seen.kernel[0] // tile.NT0) * column_tiles * parts
    boxes_n, boxes_0 = -(-seen.batch // tile.box[0]), -(-seen.y[0] // tile.box[1])
    cells, length = -(-(seen.y[2] + tile.shift) // tile.cell), -(-seen.y[1] // tile.segments)
    units = cells * boxes_0 * boxes_n * -(-seen.y[1] // length)
    rows = tile.fold * seen.group_out
    drain = tile.x_slots < slots_for(seen, tile.y_slots, True) or seen.y[1] % length > 0 or length < tile.y_slots
    line: Box = (*tile.box, 1, 1)

    def leading(dy: Any, x: Any, partial: Any, bias: Any = None) -> tuple[Any, ...]:
        return (box_descriptor(dy, line, rows), box_descriptor(x, line, tile.BN, seen.stride), dy, x, partial, bias)

    def launch(dy: Any, x: Any, partial: Any, bias: Any = None) -> Launch:
        yn, _, *y = strides_of(dy)
        xn, _, *xs = strides_of(x)
        constants = {**{name: value for name, value in seen.constants().items() if name[0] != "D"},
                     "KG": seen.group_out, "CG": seen.group_in, "POSITIONS": tile.cell, "FOLD": tile.fold,
                     "SHIFT": tile.shift, "NT0": tile.NT0,
                     "COLUMN_TILES": column_tiles, "PN": tile.box[0], "B0": tile.box[1], "BN": tile.BN,
                     "YS": tile.y_slots, "XS": tile.x_slots, "DRAIN": drain, "WARPS": rows // 16,
                     "BIAS": bias is not None}
        scalars = (seen.batch, *seen.y[:2], seen.y[2] * seen.group_out, *seen.x[:2], seen.x[2] * seen.group_in, cells,
                   boxes_0, boxes_n, length, units, tile.splits, yn, *y[:2], xn, *xs[:2],
                   seen.taps * seen.group_in * seen.group_out)
        return Launch((tiles * tile.splits,), scalars, constants, rows // 16, 1, leading,
                      HALF_REGISTERS if tile.together == 2 else None)

    collect = collect_step(geo, Widening(1, 1, tile.swapped), seen, tile.splits * parts * column_tiles, folded=False)
    return SpanPlan(geo, tile, Step(span_weight_kernel, launch), collect)


KERNEL = Kernel("spans", frozenset({"weight"}), supports, accepts,
                lambda query: all_spans(query.geo, query.max_workspace, query.gpu), build, SpanTile,
                kind=lambda query, tile: (tile.swapped, tile.cell, tile.fold, tile.BN, tile.NT0, tile.together))
