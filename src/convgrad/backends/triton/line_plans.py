"""Plans for the weight gradient line by line: when it fits, which tile, and how its copies see the tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import Problem
from .box_plans import Box, best_box, channels_fit, descriptor, phase_taps
from .geometry import Geometry, strides_of
from .launch import INTERPRETED, Launch, Step
from .tiles import MULTIPROCESSORS, SHARED_BYTES, WORKSPACE_FLOOR
from .weight_lines import line_weight_kernel

PIXELS = 64  # of a line
MOST_PHASES = 8  # views of x that one launch takes
# What the cost model counts with, in bytes and operations per second of an H200. The product rate is that of tiles
# 128 wide or more; narrower ones read the first operand from shared memory too often.
PRODUCTS = 780e12
NARROW = {16: 0.2, 32: 0.45, 64: 0.75, 128: 1.0, 256: 1.0}
CACHE_BYTES = 5.5e12
MEMORY_BYTES = 4.0e12
LAUNCH_SECONDS = 2e-6
LINE_SECONDS = 0.06e-6  # of waiting at each line, beside the products


@dataclass(frozen=True)
class LineTile:
    """BK x CB channels and NT taps of `axis` a program; `box` is a line of pixels; `chain`: lines share their x."""

    box: Box
    BK: int
    CB: int
    NT: int
    axis: int
    chain: bool
    y_slots: int
    x_slots: int
    warps: int
    splits: int
    seconds: float

    def __str__(self) -> str:
        return (f"lines of {'x'.join(map(str, self.box))} pixels, {self.BK} x {self.CB} channels x {self.NT} taps of axis "
                f"{self.axis}{' in chains' if self.chain else ''}, {self.y_slots}+{self.x_slots} slots, {self.splits} runs, "
                f"{self.seconds * 1e6:.0f} us expected")


def lines_fit(problem: Problem, geo: Geometry) -> bool:
    """Whether the copies and tensor cores can do this problem: aligned 16-bit channels, and enough of them."""
    if INTERPRETED or not channels_fit(problem, geo) or min(geo.group_in, geo.group_out) < 16:
        return False
    return phase_views(geo) <= MOST_PHASES


def phase_views(geo: Geometry) -> int:
    return math.prod(len(phase_taps(geo, axis)) for axis in range(3))


def candidates(geo: Geometry) -> Iterator[tuple[int, int, int, int, bool]]:
    """(BK, CB, taps a program, axis of the taps, chained) of every tile that is worth a thought."""
    axes = [axis for axis in range(3) if geo.kernel[axis] > 1 and geo.stride[axis] == 1] or [2]
    for bk, cb in product((64, 128, 256), (16, 32, 64, 128, 256)):
        if bk >= 2 * max(64, geo.group_out) or cb >= 2 * max(16, geo.group_in):
            continue
        for axis in axes:
            for taps in range(1, min(geo.kernel[axis], 8) + 1):
                registers = bk * cb * taps // 256
                if registers > 192 or (taps > 1 and -(-geo.kernel[axis] // taps) == -(-geo.kernel[axis] // (taps - 1))):
                    continue
                for chain in (False, True) if taps > 1 else (False,):
                    yield bk, cb, taps, axis, chain


def chain_of(geo: Geometry, axis: int, chain: bool) -> tuple[int, int]:
    """Length of a chain, and how many interleaved ones an axis with dilation has."""
    if not chain:
        return 1, 1
    return -(-geo.y[axis] // geo.dilation[axis]), geo.dilation[axis]


def line_box(geo: Geometry, axis: int, chain: bool) -> Box:
    extents = [geo.batch, *geo.y]
    if chain:
        extents[1 + axis] = 1
    return best_box(tuple(extents), PIXELS)  # type: ignore[arg-type]


def line_counts(geo: Geometry, box: Box, axis: int, chain: bool) -> tuple[int, int, list[int]]:
    """Length of a chain, chains beside each other, and boxes on (n, three axes) without the axis of the chain."""
    length, spread = chain_of(geo, axis, chain)
    boxes = [-(-extent // size) for extent, size in zip((geo.batch, *geo.y), box)]
    if chain:
        boxes[1 + axis] = 1
    return length, spread, boxes


def choose_lines(geo: Geometry, max_workspace: int | None) -> LineTile:
    """The tile and the number of runs with the lowest estimated time."""
    return min(all_lines(geo, max_workspace), key=lambda tile: tile.seconds)


def all_lines(geo: Geometry, max_workspace: int | None) -> Iterator[LineTile]:
    weight_bytes = 4 * geo.groups * geo.group_out * geo.group_in * geo.taps
    limit = max(WORKSPACE_FLOOR, 2 * weight_bytes)
    if max_workspace is not None:
        limit = min(limit, max_workspace)
    for bk, cb, taps, axis, chain in candidates(geo):
        box = line_box(geo, axis, chain)
        length, spread, boxes = line_counts(geo, box, axis, chain)
        lines = length * spread * math.prod(boxes)
        tiles = (-(-geo.group_out // bk) * -(-geo.group_in // cb) * geo.groups * geo.taps // geo.kernel[axis]
                 * -(-geo.kernel[axis] // taps))
        warps = 8 if bk >= 128 else 4
        y_bytes, x_bytes = PIXELS * bk * 2, PIXELS * cb * 2
        together = 2 if bk * cb * taps <= 64 * 192 else 1  # programs of a multiprocessor
        room = SHARED_BYTES // together
        y_slots = min(6, max(3, room // 3 // y_bytes))
        x_slots = min(3 * taps + 3, (room - y_slots * y_bytes) // x_bytes)
        if x_slots < taps + 2:
            continue
        copied = y_bytes + x_bytes * ((1 + (taps - 1) / length) if chain else taps)
        line_flops = 2 * PIXELS * bk * cb * taps
        rate = PRODUCTS / MULTIPROCESSORS * NARROW[cb] * (0.8 if bk == 64 and together == 1 else 1)
        line_seconds = max(line_flops / rate + LINE_SECONDS / together, copied / (CACHE_BYTES / MULTIPROCESSORS))
        slots = MULTIPROCESSORS * together
        for splits in split_counts(tiles, lines, slots, limit // max(1, weight_bytes)):
            run = -(-lines // splits)
            waves = -(-tiles * splits // slots)
            seconds = LAUNCH_SECONDS + waves * (run + 4) * line_seconds * together
            if splits > 1:
                seconds += LAUNCH_SECONDS + 2 * splits * weight_bytes / MEMORY_BYTES
            yield LineTile(box, bk, cb, taps, axis, chain, y_slots, x_slots, warps, splits, seconds)


def split_counts(tiles: int, lines: int, slots: int, most: int) -> list[int]:
    """Numbers of runs that fill whole waves of programs."""
    found = {1}
    for waves in range(1, 9):
        found.add(waves * slots // tiles)
    return sorted(count for count in found if 1 <= count <= max(1, min(most, lines // 4)))


def shared_layout(box: Box, channels: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(min(128, 2 * channels), 16, rank=5)


def box_descriptor(tensor: Any, box: Box, channels: int) -> TensorDescriptor:
    plain = descriptor(tensor, (*box, channels))
    return TensorDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape, shared_layout(box, channels))


def line_weight(problem: Problem, geo: Geometry, tile: LineTile) -> Step:
    """The launch that writes the weight gradient, or its partial sums, one run after another."""
    length, spread, boxes = line_counts(geo, tile.box, tile.axis, tile.chain)
    lines = length * spread * math.prod(boxes)
    run = -(-lines // tile.splits)
    tiles = (-(-geo.group_out // tile.BK) * -(-geo.group_in // tile.CB) * geo.groups * geo.taps // geo.kernel[tile.axis]
             * -(-geo.kernel[tile.axis] // tile.NT))
    phases = list(product(*(phase_taps(geo, axis) for axis in range(3))))
    pn, b0, b1, b2 = tile.box

    def phase_of(x: Any, taps: tuple[tuple[int, int, int], ...]) -> Any:
        if geo.phases == 1:
            return x
        skip = 5 - x.dim()
        return x[(slice(None), slice(None), *(slice(taps[axis][2], None, geo.stride[axis]) for axis in range(skip, 3)))]

    def leading(dy: Any, x: Any, result: Any) -> tuple[Any, ...]:
        views = tuple(box_descriptor(phase_of(x, taps), tile.box, tile.CB) for taps in phases)
        return box_descriptor(dy, tile.box, tile.BK), views, dy, x, result

    def launch(dy: Any, x: Any, result: Any) -> Launch:
        yn, _, *y = strides_of(dy)
        xn, _, *xs = strides_of(x)
        r_split, (ro, ri, *r) = (result.stride(0), result.stride()[1:]) if tile.splits > 1 else (0, strides_of(result))
        constants = {**geo.constants(), **{f"F{axis}": len(phase_taps(geo, axis)) for axis in range(3)},
                     "KG": geo.group_out, "CG": geo.group_in, "SPLITS": tile.splits, "AXIS": tile.axis, "NT": tile.NT,
                     "CHAIN": tile.chain, "PN": pn, "B0": b0, "B1": b1, "B2": b2, "BK": tile.BK, "CB": tile.CB,
                     "YS": tile.y_slots, "XS": tile.x_slots, "WARPS": tile.warps}
        scalars = (geo.batch, *geo.y, *geo.x, length, spread, *boxes[1:], lines, run, yn, *y, xn, *xs, r_split, ro, ri,
                   *r)
        return Launch((tiles * tile.splits,), scalars, constants, tile.warps, 1, leading)

    return Step(line_weight_kernel, launch)
