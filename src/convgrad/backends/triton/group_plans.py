"""Plans by whole groups: weight gradients of groups of channels, which lines and taps, how tensors are seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import triton.experimental.gluon.language as gl

from ...problem import Problem
from .box_plans import accepts
from .descriptors import BoxDescriptor
from .geometry import Geometry, strides_of
from .gpu import Gpu
from .kernel import Kernel, Prepared, Query
from .launch import Launch, Step, power_of_two
from .numbers_on_device import sixteen_bits
from .split_k import added
from .whole_groups import group_weight_kernel

LONGEST = 16  # positions of dy in a line
MOST_PRODUCTS = 128  # of a line and four warps: all are written out
MOST_SUMS = 192  # that a thread holds
MOST_HELD = 208  # beside positions of x
REGISTERS, AT_START = 232, 168  # of a thread of the second four multiplying warps, and of every one at the start
# What the cost model counts with, as measured on an H200.
CLOCK_SHARE = 0.92  # what waiting leaves of the clock
ROW_CYCLES = 3.0  # to copy the channels of one position and image, at most 128 bytes
PART_SHARE = 0.4  # of the L2 cache's speed: partial sums, written and read again
LINE_SECONDS = 0.03e-6
DISTURBANCE = 0.1  # of what takes longer by the rest


@dataclass(frozen=True)
class GroupTile:
    """Lines of S positions and taps of the last axis a program, XS rows or pieces of x and DS lines of dy kept."""

    S: int
    taps: int
    images: int  # 16, or 8 at two positions, that a product sums over
    XS: int
    DS: int
    splits: int
    held: bool  # positions of x are multiplied from registers
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return (f"whole groups, lines of {self.S} positions x {self.images} images, {self.taps} taps a program, "
                f"{self.XS}+{self.DS} slots, {self.splits} runs, {self.seconds * 1e6:.0f} us expected")

    @property
    def gap(self) -> int:
        """Positions that a product sums over."""
        return 16 // self.images


def width(geo: Geometry) -> int:
    """Neighbouring channels of x that are copied together."""
    return math.gcd(geo.group_in, 64)


def columns_of(geo: Geometry) -> int:
    """Columns of a product: output channels of a group, and some of the next."""
    return max(16, power_of_two(geo.group_out))


def along(geo: Geometry, tile: GroupTile) -> bool:
    """Whether lines follow each other on the only axis, so that x is copied once."""
    return (geo.x[1] == geo.y[1] == geo.kernel[1] == 1 and geo.pad[1] == 0 and tile.gap == 1
            and geo.stride[2] * width(geo) % 64 == 0)


def tiles_of_line(geo: Geometry, tile: GroupTile) -> int:
    """Tiles of 64 rows that hold a program's taps of one line of the kernel, for the channels copied together."""
    return -(-tile.taps * width(geo) // (64 * tile.gap)) * tile.gap


def tiles_of(geo: Geometry, tile: GroupTile) -> int:
    return geo.group_in // width(geo) * geo.kernel[1] * tiles_of_line(geo, tile)


def supports(problem: Problem, geo: Geometry) -> str | None:
    """Groups of at least 16 channels with up to 64 outputs, no dilation."""
    if not sixteen_bits(problem) or not problem.layout.endswith("C"):
        return "16-bit operands with channels last only"
    if geo.groups == 1 or geo.group_in % 16 or geo.group_out % 8 or not 16 <= geo.group_out <= 64:
        return "groups of 16, 32, … input and 16 to 64 output channels only"
    if max(geo.dilation) > 1 or geo.taps == 1 or geo.kernel[0] > 1 or geo.x[0] > 1 or geo.pad[0]:
        return "windows of one or two axes with several taps and no dilation only"
    return None


def rows_and_units(geo: Geometry, tile: GroupTile) -> tuple[int, int]:
    """Rows (or pieces) of x that a line of dy needs, and positions of each."""
    window = geo.stride[2] * (tile.S - tile.gap) + tiles_of_line(geo, tile) * 64 // width(geo) + tile.gap - 1
    if not along(geo, tile):
        return geo.kernel[1], window
    units = geo.stride[2] * tile.S
    return -(-window // units), units


def shape_of_walk(geo: Geometry, tile: GroupTile) -> tuple[int, int, int, int]:
    """Tiles of columns, lines of a tile, lines of all tiles, and of a run."""
    columns = -(-geo.y[2] // tile.S)
    columns, steps = (1, columns) if along(geo, tile) else (columns, geo.y[1])
    all_steps = -(-geo.batch // tile.images) * columns * steps
    return columns, steps, all_steps, -(-all_steps // tile.splits)


def bytes_of_line(geo: Geometry, tile: GroupTile) -> tuple[int, int]:
    """Of a row or piece of x, and of a line of dy, in shared memory."""
    return (2 * rows_and_units(geo, tile)[1] * tile.images * geo.group_in,
            2 * tile.S * tile.images * columns_of(geo))


def estimate(geo: Geometry, tile: GroupTile, gpu: Gpu) -> float:
    """Seconds: products, copies, partial sums."""
    _, _, all_steps, run = shape_of_walk(geo, tile)
    programs = geo.groups * -(-geo.kernel[2] // tile.taps) * -(-all_steps // run)
    waves, columns = -(-programs // gpu.multiprocessors), columns_of(geo)
    clock = CLOCK_SHARE * gpu.clock_hz
    cycles = columns / 2 + 2 if tile.held else 1.25 * max(columns / 2, 16 + columns / 4)
    products = tiles_of(geo, tile) * tile.S // tile.gap * cycles / clock
    fresh = 1 if along(geo, tile) else min(geo.stride[1], geo.kernel[1])
    rows = tile.images * (tile.S + fresh * rows_and_units(geo, tile)[1] * geo.group_in // width(geo))
    line = max(products + LINE_SECONDS, rows * ROW_CYCLES / clock)
    memory = 2 * geo.batch * geo.groups * (geo.group_out * math.prod(geo.y) + geo.group_in * math.prod(geo.x))
    less, more = sorted((waves * run * line, memory / gpu.memory_bytes_per_s))
    seconds = gpu.launch_s + more + DISTURBANCE * less
    parts = 8 * tile.splits * geo.groups * geo.group_out * geo.group_in * geo.taps
    return seconds + (gpu.launch_s + parts / (PART_SHARE * gpu.l2_bytes_per_s) if tile.splits > 1 else 0)


def taps_of(geo: Geometry, images: int) -> int:
    """Taps of the last axis whose sums a program holds; 0 where not even the fewest fit."""
    for programs in range(1, geo.kernel[2] + 1):
        tile = GroupTile(16, -(-geo.kernel[2] // programs), images, 0, 0, 1, False)
        if -(-tiles_of(geo, tile) // 2) * columns_of(geo) // 2 <= MOST_SUMS:
            whole = tiles_of_line(geo, tile) * 64 // width(geo)
            return tile.taps if programs == 1 else whole
    return 0


def tiles(query: Query) -> Iterator[GroupTile]:
    """Tiles whose lines fit into shared memory, with runs that fill the multiprocessors."""
    geo, gpu, limit, room = query.geo, query.gpu, query.limit, query.gpu.program_bytes
    size = 4 * geo.groups * geo.group_out * geo.group_in * geo.taps
    images = 8 if geo.stride[2] == 1 and -geo.batch % 16 >= 8 else 16
    taps = taps_of(geo, images)
    for length in sorted({-(-geo.y[2] // count) for count in range(1, 9)} | {8, LONGEST}):
        whole = GroupTile(length, taps, images, 0, 0, 1, False)
        half = -(-tiles_of(geo, whole) // 2)
        if taps == 0 or length > LONGEST or length % whole.gap or length // whole.gap * half > MOST_PRODUCTS:
            continue
        rows, units = rows_and_units(geo, whole)
        x_bytes, dy_bytes = bytes_of_line(geo, whole)
        advance = 1 if along(geo, whole) else min(geo.stride[1], rows)
        lines = next((count for count in (4, 3) if (rows + advance) * x_bytes + count * dy_bytes <= room), 2)
        slots = min(rows + 3 * advance, (room - lines * dy_bytes) // x_bytes)
        if slots < rows or units > 256:
            continue
        all_steps = shape_of_walk(geo, whole)[2]
        programs = geo.groups * -(-geo.kernel[2] // taps)
        held = half * columns_of(geo) // 2 + 4 * min(units, length // whole.gap + half) <= MOST_HELD
        for runs in {1, *(min(waves * gpu.multiprocessors // programs, all_steps) for waves in (1, 2))}:
            if runs >= 1 and (runs == 1 or runs * size <= limit):
                for way in (held, False) if held else (False,):
                    tile = replace(whole, XS=slots, DS=lines, splits=runs, held=way)
                    yield replace(tile, seconds=estimate(geo, tile, gpu))


def box_of(tensor: Any, tile: GroupTile, positions: int, channels: int) -> BoxDescriptor:
    """The tensor as (rows, columns, images, channels): a box is some positions of some images and one group."""
    n, _, _, s1, s2 = strides_of(tensor)
    batch, spare, *extents = tensor.shape
    e1, e2 = ((1,) * (3 - len(extents)) + tuple(extents))[1:]
    return BoxDescriptor(tensor, [e1, e2, batch, spare], [s1 or spare, s2 or spare, n or spare, 1],
                         [1, 1, tile.images, channels], gl.NVMMASharedLayout(2 * channels, 16, rank=4),
                         box=(1, positions, tile.images, channels))


def build(query: Query, tile: GroupTile) -> Prepared:
    """The launch that writes the gradient, or the partial sums of every run, and of the bias gradient if asked."""
    geo = query.geo
    rows, units = rows_and_units(geo, tile)
    columns, steps, all_steps, run = shape_of_walk(geo, tile)
    splits = -(-all_steps // run)
    tap_tiles, wide = -(-geo.kernel[2] // tile.taps), columns_of(geo)
    constants = {"HELD": tile.held, "ALONG": along(geo, tile), "K1": geo.kernel[1], "K2": geo.kernel[2],
                 "T1": geo.stride[1], "T2": geo.stride[2], "P1": geo.pad[1], "P2": geo.pad[2], "ROWS": rows,
                 "UNITS": units, "BLOCKS": geo.group_in // width(geo), "COUNT": tiles_of_line(geo, tile),
                 "TAPS": tile.taps, "S": tile.S, "GAP": tile.gap, "CW": width(geo), "KG": geo.group_out, "KN": wide,
                 "XS": tile.XS, "DS": tile.DS, "REGISTERS": REGISTERS}

    def leading(dy: Any, x: Any, result: Any, bias: Any = None) -> tuple[Any, ...]:
        return box_of(x, tile, units, width(geo)), box_of(dy, tile, tile.S, wide), dy, x, result, bias

    def launch(dy: Any, x: Any, result: Any, bias: Any = None) -> Launch:
        yn, _, _, y1, y2 = strides_of(dy)
        xn, _, _, x1, x2 = strides_of(x)
        if splits > 1:
            r_split, ro, _, r1, r2, ri = result.stride()
        else:
            r_split, (ro, ri, _, r1, r2) = 0, strides_of(result)
        scalars = (geo.batch, *geo.y[1:], *geo.x[1:], columns, steps, all_steps, run, geo.groups, yn, y1, y2, xn, x1,
                   x2, r_split, ro, ri, r1, r2)
        return Launch((geo.groups * tap_tiles * splits,), scalars, {**constants, "BIAS": bias is not None}, 4, 1,
                      leading, AT_START)

    together = splits > 1 and tap_tiles == 1
    return added(query, f"groups_{query.short}_{tile.S}_split{splits}", str(tile), splits,
                 (splits if together else 0, geo.groups * geo.group_out), Step(group_weight_kernel, launch))


KERNEL = Kernel("groups", frozenset({"weight"}), supports, accepts, tiles, build, GroupTile, measured=4)
