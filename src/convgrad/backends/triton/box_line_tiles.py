"""Which tile for output and input gradient on boxes: a cost model that picks one without measuring."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ...problem import DTYPES, Problem
from . import box_plans
from .geometry import Geometry
from .gpu import WORKSPACE_FLOOR, Gpu
from .tiles import Box

MOST_SLOTS = 12
SPACING = 64  # channels that a step takes at most
LOST_BYTES = 1024 + 512  # of a program: kept by the driver, and for barriers and what the compiler needs
# (positions, columns, warps, programs that share a multiprocessor)
SHAPES = ((128, 256, 8, 1), (256, 128, 8, 1), (128, 128, 8, 1), (128, 128, 4, 2), (64, 256, 4, 2), (256, 64, 8, 1),
          (256, 64, 4, 2), (128, 64, 4, 2), (64, 128, 4, 2), (64, 64, 4, 3), (256, 32, 4, 2), (128, 32, 4, 3))
# Those of float32: sums of a step beside the others', and rows in three parts, leave registers for 64 sums a thread.
SPLIT_SHAPES = ((128, 128, 8, 1), (128, 64, 8, 1), (128, 32, 8, 1), (64, 128, 4, 1), (64, 64, 4, 1))
DEPTHS = {1: (64, 32), 2: (64, 32, 16), 4: (32, 16)}  # channels of a step, by bytes of an element
SPLIT_PRODUCTS = 6  # of parts of float32 numbers
# What the cost model counts with, for one multiprocessor: shares of its part of the card, and seconds.
PRODUCTS = 0.9  # of the tensor cores' speed, of tiles with 64 columns and more; fewer take the same time
NARROW = 1.6  # how much faster products of FP8 numbers are
# From the end of a step's products to the next ones of the same warps, where these are waited for: FP8 sums that are
# added in float32, FP8 numbers that are decoded (which takes some time for each row beside it).
NARROW_SECONDS = 0.27e-6
DECODED_SECONDS = 0.15e-6
SPLIT_SECONDS = 0.2e-6  # of float32 numbers
SPLIT_NARROW = 1.3  # how much longer their products take with at most 64 columns
DECODED_ROW_SECONDS = 0.2e-9
CACHE_SHARE = 0.95  # of the L2 cache's speed
STEP_SECONDS = 0.01e-6
DISTURBANCE = 0.5e-12  # seconds that a copied byte takes from the products
ROW_SECONDS = 0.95e-9  # to copy a row of up to 128 bytes
COPY_SECONDS = 0.9e-6  # from the start of a copy to its end
TILE_SECONDS = 0.8e-6  # to fill the pipeline
# of a tile, by warps, seconds and bytes a second: of eight warps, one half multiplies meanwhile
STORES = {8: (0.4e-6, 70e9), 4: (1.6e-6, 34e9)}
PARTS_SECONDS = 5e-6  # of the kernel that adds parts, beside its bytes
PARTS_SHARE = 0.42  # of the memory's speed


@dataclass(frozen=True)
class BoxLineTile:
    """A box of at most BM positions x BN channels, CB channels a step; NT taps of `axis` share a box of the source."""

    box: Box
    BM: int
    BN: int
    CB: int
    axis: int
    NT: int
    source_slots: int
    weight_slots: int
    out_slots: int
    warps: int
    together: int  # programs that share a multiprocessor
    whole: int  # tiles summed by one program
    parts: int  # programs that share the sum of each other tile
    seconds: float

    def __str__(self) -> str:
        shared = f", {self.NT} taps of axis {self.axis} share a box" if self.NT > 1 else ""
        shared += f", tiles from {self.whole} on in {self.parts} parts" if self.parts > 1 else ""
        return (f"box {'x'.join(map(str, self.box))} of {self.BM} positions x {self.BN} x {self.CB}{shared}, "
                f"{self.source_slots}+{self.weight_slots} slots, {self.warps} warps, {self.together} programs a "
                f"multiprocessor, {self.seconds * 1e6:.0f} us expected")


@dataclass(frozen=True)
class Work:
    """What the tiles of a problem have in common."""

    geo: Geometry
    is_input: bool
    patch: bool
    red: int
    columns: int
    positions: Box
    source_bytes: int  # of an element
    out_bytes: int
    to_columns: bool = False  # the result has channels first
    narrow: bool = False  # products of FP8 numbers
    spaced: int = 0  # see `spaced`

    @property
    def phases(self) -> list[tuple[int, int, int]]:
        """Slots per axis of every phase, as the kernel counts them."""
        if not self.is_input:
            return [self.geo.kernel]
        if self.patch:
            return [(1, 1, 1)]
        per_axis = []
        for k, t, g in zip(self.geo.kernel, self.geo.stride, self.geo.common):
            step = t // g
            per_axis.append([max(0, -(-(k - order) // step)) if order < step else 0 for order in range(t)])
        return [(a, b, c) for a in per_axis[0] for b in per_axis[1] for c in per_axis[2]]


def work_of(problem: Problem, geo: Geometry, to_columns: bool = False) -> Work:
    is_input, patch = problem.wrt == "input", box_plans.is_patch(problem, geo)
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    return Work(geo, is_input, patch, red, col * geo.taps if patch else col,
                (geo.batch, *(geo.phase_positions if is_input else geo.y)), DTYPES[problem.dtype][1],
                DTYPES[problem.out_dtype][1], to_columns, narrow_products(problem, geo), spaced(problem, geo))


def spaced(problem: Problem, geo: Geometry) -> int:
    """Channels of a group in a copy of the weight with zeros behind each group; 0 where there is none.

    Then a step takes 64 channels, those of the next group with zeros, where otherwise it would take few at a time.
    """
    red = geo.group_out if problem.wrt == "input" else geo.group_in
    wide = -(-red // SPACING) * SPACING
    pays = geo.groups > 1 and geo.taps > 1 and red % (SPACING // 2) and wide <= 1.5 * red
    return wide if pays and DTYPES[problem.dtype][1] == 2 else 0


def narrow_products(problem: Problem, geo: Geometry) -> bool:
    """Whether FP8 numbers are multiplied as they are; groups would need a weight turned group by group."""
    return problem.compute == "fp8" and (geo.groups == 1 or problem.wrt == "output")


def all_tiles(work: Work, max_workspace: int | None, gpu: Gpu) -> Iterator[BoxLineTile]:
    widest = max(32, 1 << (work.columns - 1).bit_length())
    for rows, columns, warps, together in SPLIT_SHAPES if work.source_bytes == 4 else SHAPES:
        decoded = work.source_bytes == 1 and not work.narrow
        if columns > widest or (decoded and columns == 256 and together > 1):  # sums and operand: too many registers
            continue
        for axis in (-1, 0, 1):
            taps = work.geo.kernel[axis] if axis >= 0 else 1
            if axis >= 0 and (taps == 1 or taps > 8 or work.patch or work.geo.stride[axis] > 1):
                continue
            box = box_for(work, rows, axis, taps)
            if box is None:
                continue
            for depth in (128, 64, 32) if work.narrow else DEPTHS[work.source_bytes]:
                for shared in {1, together}:
                    yield from tiles_with(work, (rows, columns, warps, shared), (max(axis, 0), taps), box, depth,
                                          max_workspace, gpu)


def sizes(extent: int, most: int) -> list[int]:
    """Extents of a box worth trying on an axis: those that cut it into few equal parts, and powers of two."""
    few = -(-extent // most)
    equal = {-(-extent // parts) for parts in range(few, few + 4)} | {extent if extent <= 16 else 1}
    return sorted(size for size in equal | {1, 2, 4, 8, 16, 32, 64, 128, 256} if size <= most and size < 2 * extent)


@lru_cache(maxsize=256)
def box_for(work: Work, rows: int, axis: int, taps: int) -> Box | None:
    """The box of at most `rows` positions with the least to sum, then the most compact one.

    Taps that share a box are whole units of 8 rows apart, and on the axes before theirs the box has extent 1.
    """
    n, e0, e1, e2 = work.positions
    k0, k1, k2 = work.geo.kernel
    d0, d1, d2 = work.geo.dilation
    t0, t1, t2 = (1, 1, 1) if work.is_input else work.geo.stride  # a copy reaches over 256 elements of an axis
    run_cost = 0.3 if work.to_columns else 0.02  # of short runs of memory
    best: tuple[float, Box] | None = None
    for b2 in sizes(e2, min(rows, 256 // t2)):
        if axis == 1 and b2 * d1 % 8:
            continue
        boxes_2 = -(-e2 // b2) * inside_share(work, b2, 2)
        for b1 in sizes(e1, min(rows // b2, 256 // t1)):
            if axis == 0 and b1 * b2 * d0 % 8:
                continue
            boxes_1 = boxes_2 * -(-e1 // b1) * (1.0 if axis == 1 else inside_share(work, b1, 1))
            for b0 in sizes(e0, min(rows // (b2 * b1), 256 // t0)) if axis != 1 else (1,):
                pn = min(n, 256, rows // (b2 * b1 * b0)) if axis < 0 else 1
                images = -(-n // pn)
                boxes = boxes_1 * -(-e0 // b0) * images * (1.0 if axis == 0 else inside_share(work, b0, 0))
                # lines beside the box's own, which the cache has to bring once more; short runs of memory
                more = (k0 - 1) * d0 / b0 + (k1 - 1) * d1 / b1 + (k2 - 1) * d2 / b2
                shared = (taps - 1) * (d0 / b0 if axis == 0 else d1 / b1 if axis == 1 else 0)
                cost = boxes * (1 + 0.002 * more + 0.02 * shared + run_cost / b2 + 0.02 / (b1 * b2))
                if best is None or cost < best[0]:
                    best = (cost, (-(-n // images), b0, b1, b2))
    return best[1] if best is not None else None


def copied_rows(work: Work, box: Box, axis: int, taps: int) -> int:
    """Rows of a box of the source, with the lines that taps of `axis` add."""
    lines = list(box)
    if taps > 1:
        lines[1 + axis] += (taps - 1) * work.geo.dilation[axis]
    return math.prod(lines) if max(lines) <= 256 else 0


def tiles_with(work: Work, shape: tuple[int, int, int, int], sharing: tuple[int, int], box: Box, depth: int,
               max_workspace: int | None, gpu: Gpu) -> Iterator[BoxLineTile]:
    """Tiles with as many slots as fit into shared memory, and their estimated times; none where it cannot be.

    `sharing`: an axis, and how many of its taps share a box.
    """
    geo, (axis, taps) = work.geo, sharing
    rows, columns, warps, together = shape
    boxes = math.prod(-(-extent // size) for extent, size in zip(work.positions, box))
    tiles = boxes * -(-work.columns // columns) * geo.groups * len(work.phases)
    if warps == 4 and (together == 1) != (tiles <= gpu.multiprocessors):
        return  # four warps have a multiprocessor to themselves, and more slots, where there are enough of them
    copied = copied_rows(work, box, axis, taps)
    mixed = geo.groups > 1 and work.red % depth > 0 and (work.spaced == 0 or depth < SPACING)
    if copied == 0 or mixed or (depth > 16 and work.red <= depth // 2):
        return
    units, _ = units_of(work, rows, box, axis, taps)
    source_bytes = units * 8 * depth * work.source_bytes
    weight_bytes = columns * depth * (1 if work.narrow else 6 if work.source_bytes == 4 else 2)
    chunk = min(columns, 128 // work.out_bytes)
    room = gpu.shared_bytes // together - LOST_BYTES
    source_slots = weight_slots = out_slots = 0
    for out_slots in (2, 1) if columns > chunk else (1,):
        left = room - out_slots * rows * chunk * work.out_bytes
        if taps == 1:
            source_slots = weight_slots = min(MOST_SLOTS, left // (source_bytes + weight_bytes))
        else:
            source_slots = 2 if left - 3 * source_bytes < 4 * weight_bytes else 3
            weight_slots = min(MOST_SLOTS, (left - source_slots * source_bytes) // weight_bytes)
        if weight_slots >= 4 or out_slots * chunk > columns:
            break
    if source_slots < 2 or weight_slots < 3:
        return
    rate = PRODUCTS * gpu.tensor_flops / gpu.multiprocessors
    products = 2 * rows * max(columns, 64) * depth / (rate * NARROW if work.narrow else rate)
    if work.source_bytes == 1:
        products += 0 if work.narrow else DECODED_ROW_SECONDS * rows
        waited = NARROW_SECONDS if work.narrow else DECODED_SECONDS
        products = max(products, (waited + products / (warps // 4)) / together)
    elif work.source_bytes == 4:
        products *= SPLIT_PRODUCTS * (SPLIT_NARROW if columns <= 64 else 1.0)
        products = max(products, SPLIT_SECONDS + products / (warps // 4))
    filled = copied * depth * work.source_bytes / taps + weight_bytes
    copies = copied / taps + (depth * -(-columns // 64) if work.is_input and not work.narrow else columns) * (
        3 if work.source_bytes == 4 else 1)
    cache = filled * gpu.multiprocessors / (CACHE_SHARE * gpu.l2_bytes_per_s)
    step = max(products, cache, copies * ROW_SECONDS) + DISTURBANCE * filled + STEP_SECONDS
    depth_steps = -(-work.red // depth)
    phases = work.phases
    slots = gpu.multiprocessors * together
    step = max(step * min(together, -(-tiles // gpu.multiprocessors)), COPY_SECONDS / weight_slots)
    store = STORES[warps][0] + rows * columns * work.out_bytes / STORES[warps][1]
    share = math.prod(inside_share(work, box[1 + a], a) for a in range(3) if taps == 1 or a != axis)
    seconds = TILE_SECONDS + STORES[4][0] - STORES[warps][0]  # nothing is left to multiply while the last is stored
    steps = sum(map(math.prod, phases)) / len(phases)
    last = steps * share * depth_steps * step + store
    seconds += -(-tiles // slots) * last
    x_bytes, y_bytes = (work.out_bytes, work.source_bytes) if work.is_input else (work.source_bytes, work.out_bytes)
    moved = geo.batch * geo.groups * (x_bytes * geo.group_in * math.prod(geo.x)
                                      + y_bytes * geo.group_out * math.prod(geo.y))
    floor = moved / gpu.memory_bytes_per_s

    def tile(whole: int, parts: int, seconds: float) -> BoxLineTile:
        return BoxLineTile(box, rows, columns, depth, axis, taps, source_slots, weight_slots, out_slots, warps,
                           together, whole, parts, gpu.launch_s + max(seconds, floor))

    yield tile(tiles, 1, seconds)
    rest = tiles % slots
    if rest == 0 or len(phases) > 1:
        return
    # the last tiles, which do not fill all multiprocessors, in parts
    whole_steps = math.prod(phases[0]) // taps * depth_steps
    limit = WORKSPACE_FLOOR if max_workspace is None else min(WORKSPACE_FLOOR, max_workspace)
    parts = min(slots // rest, whole_steps // 8, 16, limit // (rest * rows * columns * 4))
    if parts > 1:
        again = 4 * (parts + 1) * rest * rows * columns
        yield tile(tiles - rest, parts, seconds - last + last / parts + store + PARTS_SECONDS + again / (
            PARTS_SHARE * gpu.memory_bytes_per_s))


@lru_cache(maxsize=1024)
def inside_share(work: Work, size: int, axis: int) -> float:
    """The part of an axis' slots in which boxes read more than padding; the kernel leaves out the others."""
    geo = work.geo
    extent, pad = work.positions[1 + axis], geo.pad[axis]
    kernel, stride, dilation = geo.kernel[axis], geo.stride[axis], geo.dilation[axis]
    starts = range(0, extent, size)
    if kernel == 1 or len(starts) > 64 or (work.is_input and stride > 1):
        return 1.0
    limit = geo.y[axis] if work.is_input else geo.x[axis]
    there = 0
    for start in starts:
        for k in range(kernel):
            low = start + pad - k * dilation if work.is_input else start * stride - pad + k * dilation
            reach = size - 1 if work.is_input else (size - 1) * stride
            there += low + reach >= 0 and low < limit
    return there / (len(starts) * kernel)


def units_of(work: Work, rows: int, box: Box, axis: int, taps: int) -> tuple[int, int]:
    """Units of 8 rows in a slot of the source, and from one tap to the next that shares it."""
    line = math.prod(box[2 + axis:]) * work.geo.dilation[axis] // 8 if taps > 1 else 0
    return max(-(-copied_rows(work, box, axis, taps) // 8), rows // 8 + (taps - 1) * line), line


def tile_count(work: Work, tile: BoxLineTile) -> int:
    boxes = math.prod(-(-extent // size) for extent, size in zip(work.positions, tile.box))
    return boxes * -(-work.columns // tile.BN) * work.geo.groups * len(work.phases)
