"""Plans for weight gradients by FP8 products: how rows of pixels lie (see `pixel_rows.py`), tiles, launches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton.experimental.gluon.language as gl

from ...problem import Problem
from .descriptors import BoxDescriptor
from .direct import KNOWN_TRITON
from .geometry import Geometry, channels_last, strides_of
from .launch import INTERPRETED, Launch, Step, power_of_two
from .line_schedule import lines_of_tiles
from .numbers_on_device import TORCH_DTYPES
from .pixel_rows import add_slots_kernel, masked_rows_kernel, pixel_rows_kernel
from .replay import constant_tensor
from .row_schedule import Schedule, even_shares
from .row_weight import row_weight_kernel
from .tiles import MULTIPROCESSORS, SHARED_BYTES, workspace_limit

STEP = 128  # pixels of a step: as many FP8 products as a sum may have before it is added in float32
UNIT = 16  # bytes: copies begin at multiples of them, so that taps must be as far apart
ALIGNMENT = 128  # bytes, of which rows are multiples: copies that begin elsewhere are slower
COPY_TILE = (32, 32, 4)  # words of four channels, words of four pixels, and warps of a program that copies
SHAPES = ((128, 256), (128, 128), (128, 64), (64, 256), (64, 128), (64, 64))  # output and input channels of a tile
FEWEST = 64  # channels
FEWEST_LINES = 3  # of a part of an image
AGAIN = 64  # channels of both kinds that a program sums again
# What the cost model counts with, in seconds, operations and bytes a second, fitted to layers measured on an H200.
PRODUCTS = 1440e12 / MULTIPROCESSORS
CACHE_RATE = 63e9  # of a multiprocessor
UNALIGNED = 1.05  # of the time, where copies of some taps do not begin at multiples of ALIGNMENT
SEGMENT_SECONDS = 2.2e-10  # to fill the pipeline and to store, for each sum of a tile
COPY_RATE = 3.9e12  # of bytes read and written
COPY_SECONDS = 5e-6  # of the kernel that copies, beside its bytes
CHECK_SECONDS = 3e-6  # of the kernel that looks for flags
ADD_SECONDS = 2e-6  # of the kernel that adds slots, beside their bytes
ADD_RATE = 3.1e12


@dataclass(frozen=True)
class Rows:
    """How both operands lie as rows of pixels; `plane`: all lines of a plane in one row, else each in its own.

    Few images become more by `cuts`: parts of their lines count as images, whose x has the lines that all taps read.
    """

    given: Geometry
    images: int  # side by side
    plane: bool
    cuts: int = 1

    @cached_property
    def geo(self) -> Geometry:
        """The problem as products see it."""
        given, lines = self.given, -(-self.given.y[1] // self.cuts)
        if self.cuts == 1:
            return given
        x_lines = (lines - 1) * given.stride[1] + (given.kernel[1] - 1) * given.dilation[1] + 1
        return replace(given, batch=given.batch * self.cuts, y=(given.y[0], lines, given.y[2]),
                       x=(given.x[0], x_lines, given.x[2]), pad=(given.pad[0], 0, given.pad[2]))

    @property
    def by_tap(self) -> bool:
        """Whether x has rows for each tap of the last axis, shifted and with zeros; else for each phase of a stride."""
        return self.plane or self.geo.kernel[2] <= self.geo.stride[2] or self.images % UNIT > 0

    @property
    def fits(self) -> bool:
        """Whether copies of all taps begin where they can."""
        return not self.plane or max(self.geo.kernel[1] - 1, self.geo.pad[1]) == 0 or \
            self.geo.y[2] * self.images % UNIT == 0

    @property
    def copies(self) -> int:
        return self.geo.kernel[2] if self.by_tap else self.geo.stride[2]

    @property
    def columns(self) -> int:
        """Of x in a row, of one line."""
        return self.geo.y[2] if self.by_tap else -(-self.geo.x[2] // self.geo.stride[2])

    @property
    def lengths(self) -> tuple[int, int]:
        """Pixels in a row of dy and of x."""
        return (self.geo.y[2] * self.images * (self.geo.y[1] if self.plane else 1),
                self.columns * self.images * (self.geo.x[1] if self.plane else 1))

    @property
    def pitches(self) -> tuple[int, int]:
        y, x = self.lengths
        return -(-y // ALIGNMENT) * ALIGNMENT, -(-x // ALIGNMENT) * ALIGNMENT

    @property
    def counts(self) -> tuple[int, int]:
        """Rows of a channel, of dy and of x."""
        blocks = -(-self.geo.batch // self.images)
        (y0, y1, _), (x0, x1, _) = self.geo.y, self.geo.x
        return blocks * y0 * (1 if self.plane else y1), blocks * x0 * (1 if self.plane else x1) * self.copies

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of both copies."""
        channels = (self.geo.group_out, self.geo.group_in)
        y, x = (channel * count * pitch for channel, count, pitch in zip(channels, self.counts, self.pitches))
        return -(-y // ALIGNMENT) * ALIGNMENT, -(-x // ALIGNMENT) * ALIGNMENT

    @cached_property
    def steps(self) -> list[int]:
        """Steps of each tap: rows and pixels of which it reads nothing are left out."""
        geo = self.geo
        inside = [[pixels_inside(geo, axis, tap) for tap in range(geo.kernel[axis])] for axis in range(3)]
        if self.by_tap:
            inside[2] = [geo.y[2]] * geo.kernel[2]
        blocks = -(-geo.batch // self.images)
        if self.plane:
            return [blocks * n0 * -(-n1 * geo.y[2] * self.images // STEP)
                    for n0 in inside[0] for n1 in inside[1] for _ in inside[2]]
        return [blocks * n0 * n1 * -(-n2 * self.images // STEP)
                for n0 in inside[0] for n1 in inside[1] for n2 in inside[2]]


def pixels_inside(geo: Geometry, axis: int, tap: int) -> int:
    """How many pixels of an axis read x at a tap."""
    stride, reach = geo.stride[axis], tap * geo.dilation[axis] - geo.pad[axis]
    low = -(-max(0, -reach) // stride)
    return max(0, min((geo.x[axis] - 1 - reach) // stride + 1, geo.y[axis]) - low)


@dataclass(frozen=True)
class RowTile:
    """BK x CB channels of one tap a program."""

    images: int
    plane: bool
    BK: int
    CB: int
    programs: int  # that share the steps of all tiles evenly
    seconds: float
    cuts: int = 1

    @property
    def together(self) -> int:
        """Programs that share a multiprocessor."""
        return together_of(self.BK, self.CB)

    def __str__(self) -> str:
        return (f"8-bit rows of pixels, {self.images} images side by side{', planes' if self.plane else ''}"
                f"{f', {self.cuts} parts of an image count as images' if self.cuts > 1 else ''}, "
                f"{self.BK} x {self.CB} channels, {self.programs} programs, {self.seconds * 1e6:.0f} us expected")


def fits(problem: Problem, geo: Geometry) -> bool:
    """Whether FP8 products can do a problem: allowed to, dense, channels last and enough of them."""
    return ((INTERPRETED or KNOWN_TRITON) and problem.compute == "fp8" and geo.groups == 1
            and problem.layout.endswith("C") and problem.out_dtype in ("float32", "bfloat16", "float16")
            and geo.group_in % UNIT == geo.group_out % UNIT == 0 and min(geo.group_in, geo.group_out) >= FEWEST
            and min(geo.pad) >= 0)


def ways_to_lie(geo: Geometry) -> Iterator[Rows]:
    """Images side by side: powers of two, or all."""
    for plane in (False, True) if geo.stride[1] == 1 and geo.x[1] > 1 else (False,):
        for images in sorted({*(2**bits for bits in range(geo.batch.bit_length())), geo.batch}):
            rows = Rows(geo, images, plane)
            if rows.fits:
                yield rows
            if rows.lengths[0] >= 64 * STEP:
                break
    cuts = 2
    while geo.batch < UNIT and geo.y[1] >= FEWEST_LINES * cuts:
        if geo.batch * cuts % UNIT == 0:
            yield Rows(geo, UNIT, False, cuts)
        cuts *= 2


def all_tiles(geo: Geometry, limit: int) -> Iterator[RowTile]:
    """Every tile within so many bytes."""
    for rows in ways_to_lie(geo):
        moved = geo.group_out * geo.pixels + geo.batch * geo.group_in * math.prod(geo.x) + sum(rows.sizes)
        before = COPY_SECONDS + CHECK_SECONDS + moved / COPY_RATE
        slower = 1.0 if rows.images % ALIGNMENT == 0 or (rows.by_tap and not rows.plane) else UNALIGNED
        if sum(rows.sizes) > limit:
            continue
        for bk, cb in SHAPES:
            if bk >= 2 * max(64, geo.group_out) or cb >= 2 * max(64, geo.group_in):
                continue
            together = together_of(bk, cb)
            tiles = -(-geo.group_out // bk) * -(-geo.group_in // cb) * geo.taps
            step = together * slower * max(2 * STEP * bk * cb / PRODUCTS, STEP * (bk + cb) / CACHE_RATE)
            most = MULTIPROCESSORS * together
            for programs in {most, min(tiles, most) * max(1, most // tiles)}:
                tile = RowTile(rows.images, rows.plane, bk, cb, programs, 0.0, rows.cuts)
                schedule = schedule_of(geo, tile)
                stored = 4 * bk * cb * schedule.slots
                if sum(rows.sizes) + stored + flag_bytes(schedule, bk) > limit:
                    continue
                summing = max(sum(step * (segment.end - segment.begin) + together * bk * cb * SEGMENT_SECONDS
                                  for segment in program) for program in schedule.programs)
                adding = ADD_SECONDS + stored / ADD_RATE if stored else 0
                yield replace(tile, seconds=before + summing + adding)


def together_of(bk: int, cb: int) -> int:
    return 1 if bk > 64 else 2


def flag_bytes(schedule: Schedule, bk: int) -> int:
    """A flag for each segment and group of warps."""
    return -(-len(schedule.programs) * schedule.segments * (bk // 64) * 4 // ALIGNMENT) * ALIGNMENT


def choose(geo: Geometry, limit: int) -> RowTile | None:
    return min(all_tiles(geo, limit), key=lambda tile: tile.seconds, default=None)


def worth_measuring(problem: Problem, geo: Geometry, count: int = 4) -> list[RowTile]:
    """The best tiles of different kinds."""
    best: dict[tuple[int, int, bool, bool, bool], RowTile] = {}
    if fits(problem, geo):
        for tile in sorted(all_tiles(geo, workspace_limit(geo, None)), key=lambda tile: tile.seconds):
            by_tap = Rows(geo, tile.images, tile.plane, tile.cuts).by_tap
            best.setdefault((tile.BK, tile.CB, tile.plane, by_tap, tile.cuts > 1), tile)
    return list(best.values())[:count]


@lru_cache(maxsize=256)
def schedule_of(geo: Geometry, tile: RowTile) -> Schedule:
    """Which steps of which tiles each program sums."""
    steps = Rows(geo, tile.images, tile.plane, tile.cuts).steps
    channel_tiles = -(-geo.group_out // tile.BK) * -(-geo.group_in // tile.CB)
    return even_shares(lines_of_tiles(steps, channel_tiles, 1), tile.programs)


def words(tensor: Any) -> Any:
    """A tensor with channels last as (n, three axes, words of four channels)."""
    stored = tensor.permute(0, *range(2, tensor.dim()), 1).view(torch.int32)
    return stored.reshape(stored.shape[0], *(1,) * (5 - stored.dim()), *stored.shape[1:])


def take(dy: Any, x: Any) -> bool:
    """Whether operands can be copied: neighbouring channels, 16 bytes at a time."""
    return channels_last(dy) and channels_last(x)


@dataclass(frozen=True)
class RowPlan:
    """The weight gradient of a problem from rows of pixels."""

    problem: Problem
    rows: Rows
    tile: RowTile

    @cached_property
    def schedule(self) -> Schedule:
        return schedule_of(self.rows.given, self.tile)

    @property
    def sizes(self) -> list[int]:
        """Bytes of the rows of dy and x, the flags and the slots."""
        return [*self.rows.sizes, flag_bytes(self.schedule, self.tile.BK),
                4 * self.tile.BK * self.tile.CB * self.schedule.slots]

    def write(self, dy: Any, x: Any, result: Any, memory: Any) -> None:
        """Write the gradient; `memory`: as many bytes as `sizes` says."""
        dy_rows, x_rows, flags, slots = memory[:sum(self.sizes)].split(self.sizes)
        flags, slots = flags.view(torch.int32), slots.view(torch.float32)
        copy_step, sum_step, masked_step, add_step = self.launches
        copy_step(words(dy), dy_rows.view(torch.int32), words(x), x_rows.view(torch.int32))
        dtype = TORCH_DTYPES[self.problem.dtype]
        if not len(slots):
            slots = flags  # not read
        if INTERPRETED:
            flags.fill_(1)
        else:
            sum_step(dy_rows.view(dtype), x_rows.view(dtype), result, slots, flags)
        masked_step(dy_rows.view(dtype), x_rows.view(dtype), result, slots, flags)
        if self.schedule.shared:
            add_step(slots, result)

    @cached_property
    def launches(self) -> tuple[Step, Step, Step, Step]:
        """That copy, sum, sum again what is flagged, and add what several programs summed."""
        rows, geo, given, tile = self.rows, self.rows.geo, self.rows.given, self.tile
        first_line = 0 if rows.cuts == 1 else -given.pad[1]
        (y_length, x_length), (y_pitch, x_pitch) = rows.lengths, rows.pitches
        (y_count, x_count), channels = rows.counts, (geo.group_out, geo.group_in)
        segments = self.schedule.segments
        programs = len(self.schedule.programs)
        tables: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
        common = {"IMAGES": rows.images, "PLANE": rows.plane, "COPIES": rows.copies}
        sums = {**geo.constants(), "KG": geo.group_out, "CG": geo.group_in, **common, "BY_TAP": rows.by_tap,
                "SEGMENTS": segments, "BK": tile.BK, "CB": tile.CB, "BP": STEP}

        def table_with(like: Any) -> Any:
            return constant_tensor(tables[0], like, lambda device: torch.tensor(
                self.schedule.table(), dtype=torch.int32, device=device))

        def shared_with(like: Any) -> Any:
            return constant_tensor(tables[1], like, lambda device: torch.tensor(
                self.schedule.shared, dtype=torch.int32, device=device))

        def copy(dy: Any, dy_rows: Any, x: Any, x_rows: Any) -> Launch:
            bc, bp, warps = COPY_TILE
            bp = min(bp, power_of_two(max(y_pitch, x_pitch) // 4))
            y_words, x_words = (channel // 4 for channel in channels)
            y_programs = y_count * -(-y_words // bc) * -(-y_pitch // (4 * bp))
            x_programs = x_count * -(-x_words // bc) * -(-x_pitch // (4 * bp))
            first, between = (-geo.pad[2], geo.dilation[2]) if rows.by_tap else (0, 1)
            scalars = (y_programs, given.batch, *geo.y, *geo.x, given.y[1], given.x[1], y_words, y_length, y_pitch // 4,
                       y_count * y_pitch // 4, x_words, x_length, x_pitch // 4, x_count * x_pitch // 4,
                       *(step for tensor in (dy, x) for step in tensor.stride()[:4]))
            return Launch((y_programs + x_programs,), scalars,
                          {**common, "CUTS": rows.cuts, "Y_STEP": geo.y[1], "X_STEP": geo.y[1] * geo.stride[1],
                           "FIRST_LINE": first_line, "Y_COLUMNS": geo.y[2], "X_COLUMNS": rows.columns,
                           "STEP": geo.stride[2], "FIRST": first, "BETWEEN": between, "BC": bc, "BP": bp}, warps, 1)

        def leading(dy_rows: Any, x_rows: Any, result: Any, slots: Any, flags: Any) -> tuple[Any, ...]:
            return (row_box(dy_rows, geo.group_out, y_count, y_length, y_pitch, tile.BK),
                    row_box(x_rows, geo.group_in, x_count, x_length, x_pitch, tile.CB), result, slots, flags,
                    table_with(flags))

        def sum_steps(dy_rows: Any, x_rows: Any, result: Any, slots: Any, flags: Any) -> Launch:
            ring = min(6, SHARED_BYTES // (tile.together * STEP * (tile.BK + tile.CB)))
            return Launch((programs,), (*geo.y, *geo.x, *strides_of(result)), {**sums, "SLOTS": ring}, 4, 1, leading,
                          128 if tile.together == 2 else None)

        def sum_again(dy_rows: Any, x_rows: Any, result: Any, slots: Any, flags: Any) -> Launch:
            scalars = (*geo.y, *geo.x, y_length, y_pitch, y_count * y_pitch, x_length, x_pitch, x_count * x_pitch,
                       *strides_of(result), *geo.kernel, *geo.stride, *geo.dilation, *geo.pad, geo.group_out,
                       geo.group_in, rows.images, int(rows.plane), rows.cuts, given.y[1], given.x[1], first_line,
                       int(rows.by_tap), rows.copies, segments, tile.BK, tile.CB)
            return Launch((programs,), scalars,
                          {"BP": STEP, "FEW": AGAIN, "FLAGS": 256, "SETTLE": not INTERPRETED}, 8, 1,
                          lambda *tensors: (*tensors, table_with(flags)))

        def add(slots: Any, result: Any) -> Launch:
            few = 1024 // tile.CB
            return Launch((len(self.schedule.shared), tile.BK // few),
                          (*strides_of(result), *geo.kernel[1:], geo.group_out, geo.group_in),
                          {"BK": tile.BK, "CB": tile.CB, "FEW": few, "AT_ONCE": 8}, 4, 1,
                          lambda *tensors: (*tensors, shared_with(slots)))

        return (Step(pixel_rows_kernel, copy), Step(row_weight_kernel, sum_steps), Step(masked_rows_kernel, sum_again),
                Step(add_slots_kernel, add))


def row_box(tensor: Any, channels: int, count: int, length: int, pitch: int, box: int) -> BoxDescriptor:
    """Of rows as (channel, row, pixel): a step of some channels."""
    return BoxDescriptor(tensor, [channels, count, length], [count * pitch, pitch, 1], [box, 1, STEP],
                         gl.NVMMASharedLayout(STEP, 8, rank=3))


@lru_cache(maxsize=1024)
def for_problem(problem: Problem, geo: Geometry, max_workspace: int | None, measured: RowTile | None = None,
                ) -> RowPlan | None:
    """The plan of a measured tile, or of the cost model; None where rows do not fit."""
    if not fits(problem, geo):
        return None
    limit = workspace_limit(geo, max_workspace)
    for tile in (measured, choose(geo, limit)):
        plan = None if tile is None else RowPlan(problem, Rows(geo, tile.images, tile.plane, tile.cuts), tile)
        if plan is not None and plan.rows.fits and sum(plan.sizes) <= limit:
            return plan
    return None
