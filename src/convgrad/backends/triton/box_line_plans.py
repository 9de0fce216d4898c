"""Plans for output and input gradient on boxes by copying and multiplying warps: when, which tile, descriptors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import triton.experimental.gluon.language as gl

from ...problem import DTYPES, Problem
from . import box_plans
from .box_lines import box_lines_kernel
from .box_places import add_parts_kernel
from .descriptors import BoxDescriptor
from .direct import KNOWN_TRITON
from .geometry import Geometry, strides_of
from .launch import INTERPRETED, Launch, Step, aligned_strides
from .numbers_on_device import rounding
from .tiles import MULTIPROCESSORS, WORKSPACE_FLOOR, Box
from .tuning import Choice, fields_of

SHARED_BYTES = 227 * 1024  # of a multiprocessor
SPARE_BYTES = 2560  # for barriers and what the compiler needs
# (positions, columns, warps, programs that share a multiprocessor)
SHAPES = ((128, 256, 8, 1), (256, 128, 8, 1), (128, 128, 8, 1), (128, 128, 4, 2), (64, 256, 4, 2), (256, 64, 8, 1),
          (256, 64, 4, 2), (128, 64, 4, 2), (64, 128, 4, 2), (64, 64, 4, 3), (256, 32, 4, 2), (128, 32, 4, 3))
# What the cost model counts with, for one multiprocessor: operations and bytes a second, and seconds.
PRODUCTS = 850e12 / MULTIPROCESSORS
SHARED_RATE = 210e9
CACHE_RATE = 80e9
MEMORY_RATE = 3.8e12  # of all together
STEP_SECONDS = 0.02e-6
TILE_SECONDS = 1.2e-6  # to fill the pipeline, to store a tile
STORE_RATE = 60e9
LAUNCH_SECONDS = 3e-6
PARTS_SECONDS = 3e-6  # of the kernel that adds parts, beside its bytes
PARTS_RATE = 2.5e12


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
    out_bytes: int

    @property
    def phases(self) -> list[tuple[int, int, int]]:
        """Slots per axis of every phase, those with the most taps first, as the kernel counts them."""
        if not self.is_input:
            return [self.geo.kernel]
        if self.patch:
            return [(1, 1, 1)]
        per_axis = []
        for k, t, g in zip(self.geo.kernel, self.geo.stride, self.geo.common):
            step = t // g
            per_axis.append([max(0, -(-(k - order) // step)) if order < step else 0 for order in range(t)])
        return [(a, b, c) for a in per_axis[0] for b in per_axis[1] for c in per_axis[2]]


def work_of(problem: Problem, geo: Geometry) -> Work:
    is_input, patch = problem.wrt == "input", box_plans.is_patch(problem, geo)
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    return Work(geo, is_input, patch, red, col * geo.taps if patch else col,
                (geo.batch, *(geo.phase_positions if is_input else geo.y)), DTYPES[problem.out_dtype][1])


def fits(problem: Problem, geo: Geometry) -> bool:
    """Whether these kernels can do a problem: aligned 16-bit channels last, and enough of them."""
    if (INTERPRETED or not KNOWN_TRITON or problem.dtype not in ("bfloat16", "float16") or rounding(problem) != ""
            or problem.out_dtype == "float64" or not problem.layout.endswith("C") or min(geo.pad) < 0):
        return False
    if box_plans.is_patch(problem, geo):
        return True
    fewest = min(geo.group_in, geo.group_out)
    return (geo.group_in % 8 == 0 and geo.group_out % 8 == 0 and fewest >= (16 if geo.groups == 1 else 32)
            and (problem.wrt == "input" or max(geo.stride) <= 8))  # of elements that a box takes on an axis


def choose(problem: Problem, geo: Geometry, max_workspace: int | None) -> BoxLineTile | None:
    """The tile with the lowest estimated time."""
    return min(all_tiles(work_of(problem, geo), max_workspace), key=lambda tile: tile.seconds, default=None)


def worth_measuring(problem: Problem, geo: Geometry, count: int = 6) -> list[BoxLineTile]:
    """The best tiles of different shapes."""
    if not fits(problem, geo):
        return []
    best: dict[tuple[int, ...], BoxLineTile] = {}
    for tile in sorted(all_tiles(work_of(problem, geo), None), key=lambda tile: tile.seconds):
        best.setdefault((tile.BM, tile.BN, tile.warps, tile.NT), tile)
    return list(best.values())[:count]


def all_tiles(work: Work, max_workspace: int | None) -> Iterator[BoxLineTile]:
    widest = max(32, 1 << (work.columns - 1).bit_length())
    for rows, columns, warps, together in SHAPES:
        if columns > widest:
            continue
        for axis in (-1, 0, 1):
            taps = work.geo.kernel[axis] if axis >= 0 else 1
            if axis >= 0 and (taps == 1 or taps > 8 or work.patch or work.geo.stride[axis] > 1):
                continue
            box = box_for(work, rows, axis, taps)
            if box is None:
                continue
            for depth in (64, 32, 16):
                yield from tiles_with(work, (rows, columns, warps, together), max(axis, 0), taps, box, depth,
                                      max_workspace)


def sizes(extent: int, most: int) -> list[int]:
    """Extents of a box worth trying on an axis: those that cut it into few equal parts, and powers of two."""
    few = -(-extent // most)
    equal = {-(-extent // parts) for parts in range(few, few + 4)} | {extent if extent <= 16 else 1}
    return sorted(size for size in equal | {1, 2, 4, 8, 16, 32, 64, 128, 256} if size <= most and size < 2 * extent)


@lru_cache(maxsize=256)
def box_for(work: Work, rows: int, axis: int, taps: int) -> Box | None:
    """The box of at most `rows` positions that needs the fewest boxes, then the most compact one.

    Taps that share a box are whole units of 8 rows apart, and on the axes before theirs the box has extent 1.
    """
    n, e0, e1, e2 = work.positions
    k0, k1, k2 = work.geo.kernel
    d0, d1, d2 = work.geo.dilation
    t0, t1, t2 = (1, 1, 1) if work.is_input else work.geo.stride  # a copy reaches over 256 elements of an axis
    best: tuple[float, Box] | None = None
    for b2 in sizes(e2, min(rows, 256 // t2)):
        if axis == 1 and b2 * d1 % 8:
            continue
        boxes_2 = -(-e2 // b2)
        for b1 in sizes(e1, min(rows // b2, 256 // t1)):
            if axis == 0 and b1 * b2 * d0 % 8:
                continue
            boxes_1 = boxes_2 * -(-e1 // b1)
            for b0 in sizes(e0, min(rows // (b2 * b1), 256 // t0)) if axis != 1 else (1,):
                pn = min(n, 256, rows // (b2 * b1 * b0)) if axis < 0 else 1
                images = -(-n // pn)
                boxes = boxes_1 * -(-e0 // b0) * images
                # lines beside the box's own, which the cache has to bring once more; short runs of memory
                more = (k0 - 1) * d0 / b0 + (k1 - 1) * d1 / b1 + (k2 - 1) * d2 / b2
                shared = (taps - 1) * (d0 / b0 if axis == 0 else d1 / b1 if axis == 1 else 0)
                cost = boxes * (1 + 0.002 * more + 0.02 * shared + 0.02 / b2 + 0.02 / (b1 * b2))
                if best is None or cost < best[0]:
                    best = (cost, (-(-n // images), b0, b1, b2))
    return best[1] if best is not None else None


def copied_rows(work: Work, box: Box, axis: int, taps: int) -> int:
    """Rows of a box of the source, with the lines that taps of `axis` add."""
    lines = list(box)
    if taps > 1:
        lines[1 + axis] += (taps - 1) * work.geo.dilation[axis]
    return math.prod(lines) if max(lines) <= 256 else 0


def tiles_with(work: Work, shape: tuple[int, int, int, int], axis: int, taps: int, box: Box, depth: int,
               max_workspace: int | None) -> Iterator[BoxLineTile]:
    """Tiles with as many slots as fit into shared memory, and their estimated times; none where it cannot be."""
    geo = work.geo
    rows, columns, warps, together = shape
    copied = copied_rows(work, box, axis, taps)
    if copied == 0 or (work.red % depth and geo.groups > 1) or (depth > 16 and work.red <= depth // 2):
        return
    units, _ = units_of(work, rows, box, axis, taps)
    source_bytes, weight_bytes = units * 8 * depth * 2, columns * depth * 2
    chunk = min(columns, 128 // work.out_bytes)
    room = SHARED_BYTES // together - SPARE_BYTES
    source_slots = weight_slots = out_slots = 0
    for out_slots in (2, 1):
        left = room - out_slots * rows * chunk * work.out_bytes
        if taps == 1:
            source_slots = weight_slots = min(8, left // (source_bytes + weight_bytes))
        else:
            source_slots = 2 if left - 3 * source_bytes < 4 * weight_bytes else 3
            weight_slots = min(8, (left - source_slots * source_bytes) // weight_bytes)
        if weight_slots >= 4 or out_slots * chunk > columns:
            break
    if source_slots < 2 or weight_slots < 3:
        return
    products = 2 * rows * columns * depth / PRODUCTS
    read = rows // 64 * (64 + columns) * depth * 2
    filled = copied * depth * 2 / taps + weight_bytes
    step = together * max(products, (read + filled) / SHARED_RATE, filled / CACHE_RATE) + STEP_SECONDS
    depth_steps = -(-work.red // depth)
    boxes = math.prod(-(-extent // size) for extent, size in zip(work.positions, box))
    per_phase = boxes * -(-work.columns // columns) * geo.groups
    slots = MULTIPROCESSORS * together
    store = rows * columns * work.out_bytes / STORE_RATE + TILE_SECONDS / 2
    phases = work.phases
    seconds = TILE_SECONDS
    for place, slots_of_axes in enumerate(phases):  # the busiest program has the first tile of every wave
        waves = -(-(place + 1) * per_phase // slots) - -(-place * per_phase // slots)
        last = max(math.prod(slots_of_axes) * depth_steps * step + store, together * store)
        seconds += waves * last
    moved = 2 * geo.batch * geo.groups * (geo.group_in * math.prod(geo.x) + geo.group_out * math.prod(geo.y))
    tiles = per_phase * len(phases)
    floor = moved / MEMORY_RATE

    def tile(whole: int, parts: int, seconds: float) -> BoxLineTile:
        return BoxLineTile(box, rows, columns, depth, axis, taps, source_slots, weight_slots, out_slots, warps,
                           together, whole, parts, LAUNCH_SECONDS + max(seconds, floor))

    yield tile(tiles, 1, seconds)
    rest = tiles % slots
    if rest == 0 or len(phases) > 1:
        return
    # the last tiles, which do not fill all multiprocessors, in parts
    steps = math.prod(phases[0]) // taps * depth_steps
    limit = WORKSPACE_FLOOR if max_workspace is None else min(WORKSPACE_FLOOR, max_workspace)
    parts = min(slots // rest, steps // 8, 16, limit // (rest * rows * columns * 4))
    if parts > 1:
        again = 4 * (parts + 1) * rest * rows * columns
        yield tile(tiles - rest, parts, seconds - last + last / parts + store + PARTS_SECONDS + again / PARTS_RATE)


def units_of(work: Work, rows: int, box: Box, axis: int, taps: int) -> tuple[int, int]:
    """Units of 8 rows in a slot of the source, and from one tap to the next that shares it."""
    line = math.prod(box[2 + axis:]) * work.geo.dilation[axis] // 8 if taps > 1 else 0
    return max(-(-copied_rows(work, box, axis, taps) // 8), rows // 8 + (taps - 1) * line), line


def layout_of(element_bytes: int, inner: int, rank: int) -> Any:
    return gl.NVMMASharedLayout(min(128, element_bytes * inner), 8 * element_bytes, rank=rank)


def box_descriptor(tensor: Any, box: Box, channels: int, steps: tuple[int, int, int] = (1, 1, 1)) -> BoxDescriptor:
    plain = box_plans.descriptor(tensor, (1, 1, 1, 8, channels))
    return BoxDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape,
                         layout_of(tensor.element_size(), channels, 5), box=(*box, channels), steps=(1, *steps, 1))


def weight_descriptor(weight: Any, block: tuple[int, int]) -> BoxDescriptor:
    plain = box_plans.weight_descriptor(weight, block)
    return BoxDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape,
                         layout_of(weight.element_size(), block[1], 2))


@dataclass(frozen=True)
class BoxLines:
    """A problem on boxes: `take` says whether the tensors lie as it needs."""

    problem: Problem
    geo: Geometry
    tile: BoxLineTile
    write: Step
    add: Step

    @property
    def parts_shape(self) -> tuple[int, ...]:
        """Of the partial sums, in float32."""
        tile = self.tile
        rest = tile_count(work_of(self.problem, self.geo), tile) - tile.whole
        return (rest, tile.parts, tile.BM, tile.BN) if tile.parts > 1 else (0,)

    def take(self, source: Any, weight: Any, result: Any) -> bool:
        lies = result.shape[1] == 1 or result.stride(1) == 1
        if box_plans.is_patch(self.problem, self.geo):
            lies = lies and (result.shape[-1] == 1 or result.stride(-1) == result.shape[1])
        return lies and box_plans.tensors_fit(source) and box_plans.weight_rows_fit(weight)

    def run(self, source: Any, weight: Any, result: Any, parts: Any) -> None:
        """Write the result; `parts` is memory of `parts_shape` where tiles are summed in parts."""
        self.write(source, weight, result, result if parts is None else parts)
        if parts is not None:
            self.add(parts, result)


def for_problem(problem: Problem, geo: Geometry, choice: Choice | None, max_workspace: int | None) -> BoxLines | None:
    """The plan of a problem on boxes, or None where it does not fit or was not chosen."""
    if choice is not None and choice["kernel"] != "box_lines":
        return None
    if not fits(problem, geo):
        return None
    tile = choose(problem, geo, max_workspace) if choice is None else BoxLineTile(**fields_of(choice))
    return None if tile is None else box_lines(problem, geo, tile)


def tile_count(work: Work, tile: BoxLineTile) -> int:
    boxes = math.prod(-(-extent // size) for extent, size in zip(work.positions, tile.box))
    return boxes * -(-work.columns // tile.BN) * work.geo.groups * len(work.phases)


def box_lines(problem: Problem, geo: Geometry, tile: BoxLineTile) -> BoxLines:
    """The launches of a tile."""
    work = work_of(problem, geo)
    is_input, patch = work.is_input, work.patch
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    boxes = tuple(-(-extent // size) for extent, size in zip(work.positions, tile.box))
    rest = tile_count(work, tile) - tile.whole
    items = tile.whole + rest * tile.parts
    copied = list(tile.box)
    copied[1 + tile.axis] += (tile.NT - 1) * geo.dilation[tile.axis]
    units, line_units = units_of(work, tile.BM, tile.box, tile.axis, tile.NT)
    chunk = min(tile.BN, 128 // work.out_bytes)
    weight_block = (tile.CB, tile.BN) if is_input else (tile.BN, tile.CB)
    dense = not patch and (not is_input or geo.phases == 1) and (geo.groups == 1 or col % tile.BN == 0)
    to_extents = geo.x if is_input else geo.y
    pn, b0, b1, b2 = tile.box
    constants = {**geo.constants(), **geo.phase_constants("G"), "COL": col, "GROUPS": geo.groups, "INPUT": is_input,
                 "PATCH": patch, "PN": pn, "B0": b0, "B1": b1, "B2": b2, "PARTS": tile.parts, "BM": tile.BM,
                 "BN": tile.BN}

    def by_box(result: Any) -> bool:
        return dense and box_plans.tensors_fit(result) and result.shape[1] * result.element_size() % 16 == 0

    def leading(source: Any, weight: Any, result: Any, parts: Any) -> tuple[Any, ...]:
        target = box_descriptor(result, tile.box, chunk) if by_box(result) else None
        steps = (1, 1, 1) if is_input else geo.stride
        return (box_descriptor(source, (copied[0], copied[1], copied[2], copied[3]), tile.CB, steps),
                weight_descriptor(weight, weight_block), target, source, weight, result, parts)

    def write(source: Any, weight: Any, result: Any, parts: Any) -> Launch:
        sn, _, *s = strides_of(source)
        rn, _, *r = strides_of(result)
        ralign, (rn, *r) = aligned_strides((rn, *r))
        scalars = (items, tile.whole, geo.batch, *(geo.y if is_input else geo.x), *to_extents, *boxes, sn, *s,
                   *strides_of(weight), rn, *r)
        more = {"RALIGN": ralign, "RED": red, "AXIS": tile.axis if tile.NT > 1 else -1, "NT": tile.NT, "UNITS": units,
                "LINE_UNITS": line_units, "SOURCE_BYTES": math.prod(copied) * tile.CB * 2, "CB": tile.CB,
                "SS": tile.source_slots, "WS": tile.weight_slots, "OS": tile.out_slots, "CHUNK": chunk,
                "BY_BOX": by_box(result), "WARPS": tile.warps}
        programs = min(items, MULTIPROCESSORS * tile.together)
        registers = {1: None, 2: 128, 3: 80}[tile.together]
        return Launch((programs,), scalars, {**constants, **more}, tile.warps, 1, leading, registers)

    def add(parts: Any, result: Any) -> Launch:
        rn, _, *r = strides_of(result)
        ralign, (rn, *r) = aligned_strides((rn, *r))
        few = min(tile.BM, max(8, 4096 // tile.BN))
        return Launch((rest, tile.BM // few), (tile.whole, geo.batch, *to_extents, *boxes, rn, *r),
                      {**constants, "RALIGN": ralign, "FEW": few, "WARPS": 4}, 4, 1)

    return BoxLines(problem, geo, tile, Step(box_lines_kernel, write), Step(add_parts_kernel, add))
