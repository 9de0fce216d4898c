"""Plans for the weight gradient by windows of x in registers: when it fits, which tile, runs of pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import Problem
from .box_plans import descriptor, tensors_fit
from .geometry import Geometry, needs_wide, strides_of
from .launch import INTERPRETED, Launch, Step
from .numbers_on_device import rounding
from .tiles import MULTIPROCESSORS, SHARED_BYTES, Box, best_box, workspace_limit
from .tuning import Choice, fields_of
from .weight_windows import window_weight_kernel
from .wide_plans import Widening, collect_step

ROWS = 64  # (tap, channel) pairs of one product
# What the cost model counts with, fitted to four layers on an H200: programs mostly wait for x, so that their number on
# a multiprocessor counts
WAIT_SECONDS = 0.7e-6  # of a box
PIXEL_SECONDS = 3e-9
WINDOW_SECONDS = 4e-9  # of 64 rows at a pixel, waiting
BUSY_SECONDS = 1.6e-9  # the same where other programs fill the time
PRODUCTS = 750e12
MEMORY_BYTES = 3.5e12
LAUNCH_SECONDS = 8e-6


@dataclass(frozen=True)
class WindowTile:
    """RT x 64 pairs of tap and channel x BN output channels a program, boxes of pixels; swapped: dy has the windows."""

    swapped: bool
    box: Box
    BN: int
    RT: int
    stages: int
    together: int
    splits: int
    seconds: float = field(compare=False)

    def __str__(self) -> str:
        return (f"windows of {'dy' if self.swapped else 'x'}, {self.RT}x{ROWS} rows x {self.BN} columns, boxes of "
                f"{'x'.join(map(str, self.box))} pixels, {self.stages} stages, {self.splits} runs, "
                f"{self.seconds * 1e6:.0f} us expected")


def turned_round(geo: Geometry) -> Geometry:
    """The same weight gradient with dy and x exchanged (stride 1), which turns the kernel around."""
    pad: Any = tuple(kernel - 1 - pad for kernel, pad in zip(geo.kernel, geo.pad))
    return replace(geo, x=geo.y, y=geo.x, pad=pad, group_in=geo.group_out, group_out=geo.group_in)


def windows_fit(problem: Problem, geo: Geometry) -> bool:
    """Whether windows can serve this problem: 16-bit tensors with channels last."""
    return (not INTERPRETED and problem.dtype in ("bfloat16", "float16") and rounding(problem) == ""
            and problem.layout.endswith("C"))


def all_windows(geo: Geometry, max_workspace: int | None) -> Iterator[WindowTile]:
    for swapped in (False, True):
        if swapped and (geo.phases > 1 or set(geo.dilation) != {1} or geo.groups > 1):
            continue
        seen = turned_round(geo) if swapped else geo
        pairs = seen.taps * seen.group_in
        if seen.group_out % 8 or seen.group_in > (16 if geo.groups == 1 else 64) or pairs > 8192:
            continue
        bytes_moved = 2 * geo.groups * (seen.group_out * seen.pixels + seen.group_in * seen.batch * math.prod(seen.x))
        most = max(1, min(2048, workspace_limit(geo, max_workspace) // (4 * pairs * geo.groups * seen.group_out)))
        for bn in (16, 32, 64, 128, 256):
            if (bn > 16 and bn >= 2 * seen.group_out) or (bn < 128 and bn * 2 <= seen.group_out):
                continue
            for count in (1, 2, 3, 4, 6):
                if count > -(-pairs // ROWS) or count * bn > 256:
                    continue
                yield from tiles_of(seen, swapped, bn, count, bytes_moved, most)


def tiles_of(seen: Geometry, swapped: bool, bn: int, count: int, bytes_moved: int, most: int) -> Iterator[WindowTile]:
    pairs = seen.taps * seen.group_in
    for pixels in (32, 64):
        if pixels * count > 128:
            continue
        box = best_box((seen.batch, *seen.y), pixels)
        boxes = math.prod(-(-extent // size) for extent, size in zip((seen.batch, *seen.y), box))
        registers = count * (bn // 2 + pixels // 2) + (60 if count == 1 else 85)
        together = min(4, max(1, 65536 // (128 * min(255, registers))))
        stages = min(4, (SHARED_BYTES // together - 1024) // (pixels * bn * 2))
        over = -(-pairs // (ROWS * count)) * -(-seen.group_out // bn)  # programs that read the same dy
        tiles = over * seen.groups
        if stages < 2 or registers > 230:
            continue
        busy = max(BUSY_SECONDS * pixels * count, 2 * pixels * ROWS * count * bn * MULTIPROCESSORS / PRODUCTS)
        turn = max(WAIT_SECONDS + pixels * (PIXEL_SECONDS + WINDOW_SECONDS * count), busy * together)
        slots = MULTIPROCESSORS * together
        for waves in (1, 2, 4):
            splits = min(most, boxes, max(1, waves * slots // tiles))
            run = -(-boxes // splits)
            filled = -(-tiles * splits // slots)
            memory = bytes_moved * (1 + 0.1 * (over - 1)) / MEMORY_BYTES  # other row tiles find dy in the cache
            seconds = LAUNCH_SECONDS + max(filled * (run + 3) * turn, memory)
            seconds += 2 * splits * 4 * pairs * seen.groups * seen.group_out / MEMORY_BYTES
            # a little more: few layers were measured so far, and other kernels were seen on all
            yield WindowTile(swapped, box, bn, count, stages, together, splits, 1.15 * seconds)


@dataclass(frozen=True)
class WindowPlan:
    """The weight gradient of a problem by windows: `take` says whether the tensors lie as it needs."""

    geo: Geometry
    tile: WindowTile
    step: Step
    collect: Step

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the partial sums."""
        seen = turned_round(self.geo) if self.tile.swapped else self.geo
        return (self.tile.splits, seen.groups * seen.group_out, *seen.kernel, seen.group_in)

    def take(self, dy: Any, x: Any) -> bool:
        return tensors_fit(x if self.tile.swapped else dy)

    @property
    def bias_shape(self) -> tuple[int, int]:
        """Of the partial sums of the bias gradient; no rows where there is no row of a tile to spare for them."""
        pairs, tile = self.geo.taps * self.geo.group_in, self.tile
        spare = not tile.swapped and pairs % (ROWS * tile.RT) > 0
        return tile.splits if spare else 0, self.geo.groups * self.geo.group_out

    def write(self, dy: Any, x: Any, partial: Any, result: Any, *bias: Any) -> None:
        if self.tile.swapped:
            dy, x = x, dy
        self.step(dy, x, partial, *bias[:1])
        self.collect(partial, result, *bias)


def for_problem(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> WindowPlan | None:
    """The plan of the measured choice, or of the cost model; None where nothing fits or another kernel was chosen."""
    # groups were not seen on a GPU yet: only where tuning compared and named them
    if (choice["kernel"] != "windows" if choice is not None else geo.groups > 1) or not windows_fit(problem, geo):
        return None
    tile = WindowTile(**fields_of(choice)) if choice is not None else min(
        all_windows(geo, max_workspace), key=lambda tile: tile.seconds, default=None)
    return None if tile is None else window_plan(geo, tile)


def worth_measuring(problem: Problem, geo: Geometry, count: int = 4) -> list[WindowTile]:
    """The best tiles of different shapes."""
    if not windows_fit(problem, geo):
        return []
    best: dict[tuple[bool, int, int, int], WindowTile] = {}
    for tile in sorted(all_windows(geo, None), key=lambda tile: tile.seconds):
        best.setdefault((tile.swapped, tile.BN, tile.RT, math.prod(tile.box)), tile)
    return list(best.values())[:count]


def window_plan(geo: Geometry, tile: WindowTile) -> WindowPlan:
    seen = turned_round(geo) if tile.swapped else geo
    pairs = seen.taps * seen.group_in
    boxes = tuple(-(-extent // size) for extent, size in zip((seen.batch, *seen.y), tile.box))
    run = -(-math.prod(boxes) // tile.splits)
    tiles = -(-pairs // (ROWS * tile.RT)) * -(-seen.group_out // tile.BN) * geo.groups
    pn, b0, b1, b2 = tile.box

    def leading(dy: Any, x: Any, partial: Any, bias: Any = None) -> tuple[Any, ...]:
        plain = descriptor(dy, (*tile.box, tile.BN))
        dy_box = TensorDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape,
                                  gl.NVMMASharedLayout(min(128, 2 * tile.BN), 16, rank=5))
        return dy_box, dy, x, partial, bias

    def launch(dy: Any, x: Any, partial: Any, bias: Any = None) -> Launch:
        yn, yc, *y = strides_of(dy)
        xn, xc, *xs = strides_of(x)
        constants = {**seen.constants(), "KG": seen.group_out, "CG": seen.group_in, "GROUPS": geo.groups,
                     "WIDE": needs_wide(x),
                     "PN": pn, "B0": b0, "B1": b1, "B2": b2, "BN": tile.BN, "RT": tile.RT, "STAGES": tile.stages,
                     "WARPS": 4, "x_0": xs[0], "x_1": xs[1], "x_2": xs[2], "x_c": xc, "BIAS": bias is not None}
        scalars = (seen.batch, *seen.y, *seen.x, *boxes[1:], math.prod(boxes), run, yn, *y, yc, xn,
                   geo.groups * seen.group_out * pairs, pairs)
        return Launch((tiles * tile.splits,), scalars, constants, 4, 1, leading)

    collect = collect_step(geo, Widening(1, 1, tile.swapped), seen, tile.splits, folded=False)
    return WindowPlan(geo, tile, Step(window_weight_kernel, launch), collect)
