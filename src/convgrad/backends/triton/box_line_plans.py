"""Plans for output and input gradient on boxes by copying and multiplying warps: when, descriptors, launches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import triton.experimental.gluon.language as gl

from ...problem import Problem
from . import box_plans
from .box_line_tiles import BoxLineTile, all_tiles, narrow_products, spaced, tile_count, units_of, work_of
from .box_lines import box_lines_kernel
from .box_places import add_box_parts_kernel
from .descriptors import BoxDescriptor
from .geometry import Geometry, Three, strides_of
from .gpu import WORKSPACE_FLOOR, Gpu
from .kernel import Kernel, Operands, Prepared, Query
from .launch import Launch, Step, aligned_strides
from .numbers_on_device import STORED_8BIT, TORCH_DTYPES, rounding, scratch
from .padded import PAD_ELEMENTS, space_kernel
from .padding import padded, turned, up8
from .part_copies import PART_BYTES, split_step
from .tiles import Box, packs_phases, workspace_limit

ONES: Three = (1, 1, 1)
UNSCALED = (None, None, None)
NARROW_BOXES = 1.6  # of the expected time, as measured where boxes of single taps are narrow
WEIGHT_PIECES = 3  # of a float32 number, as products take it
MOST_PHASES = 4096  # of an input gradient, or taps, so that planning takes milliseconds
SHORTEST_RUN = 32  # seen on an H200: lines of 32 and more were faster than a copy of the result, of 14 much slower


@dataclass(frozen=True)
class Copies:
    """Operands that are copied first, because the copy engine cannot read them where they lie: bytes of each copy."""

    source: int
    weight: int

    @property
    def bytes(self) -> int:
        return self.source + self.weight


def turned_weight(problem: Problem, geo: Geometry) -> bool:
    """Whether output channels are the neighbours in a weight that the copy engine can read as it lies."""
    return (problem.weight_layout.endswith("IO") and problem.dtype not in STORED_8BIT and geo.groups == 1
            and geo.group_in % 8 == 0 and geo.group_out % 8 == 0)


def copies_for(problem: Problem, geo: Geometry) -> Copies:
    """Which operands have rows that are no multiples of 16 bytes, or lie as the kernel does not read them."""
    is_input, channels_in = problem.wrt == "input", geo.group_in
    red = geo.group_out if is_input else channels_in
    pixels = geo.batch * math.prod(geo.y if is_input else geo.x)
    rows = geo.groups * geo.group_out * geo.taps
    rows_of_inputs = problem.weight_layout.startswith("O") and problem.weight_layout.endswith("I")
    other = not (rows_of_inputs or turned_weight(problem, geo))
    # taps that do not begin at multiples of 16 bytes, where a copy begins at a tap
    ragged = channels_in % 8 and (channels_in * geo.taps % 8 or not box_plans.is_patch(problem, geo))
    if problem.dtype == "float32":
        return Copies(0, PART_BYTES * WEIGHT_PIECES * rows * channels_in)
    if wide := spaced(problem, geo):
        return Copies(0, 2 * geo.groups * geo.taps * (wide * channels_in if is_input else geo.group_out * wide))
    if narrow_products(problem, geo):
        return Copies(0, rows * channels_in if is_input or other else 0)
    decoded = problem.dtype in STORED_8BIT  # weights as 16-bit numbers; the source is decoded on its way to products
    return Copies(2 * pixels * up8(red) if red % 8 and not decoded else 0,
                  2 * rows * up8(channels_in) if ragged or other or decoded else 0)


def limit_of(problem: Problem, geo: Geometry, max_workspace: int | None) -> int:
    """Bytes of workspace: parts of float32 weights always fit, but for what the caller allows."""
    if problem.dtype == "float32":
        return workspace_limit(geo, max_workspace)
    return WORKSPACE_FLOOR if max_workspace is None else min(WORKSPACE_FLOOR, max_workspace)


def supports(problem: Problem, geo: Geometry) -> str | None:
    """Dense problems of 16 bits, FP8 or float32 with channels last, and groups of 32 channels and more."""
    whole = problem.dtype in ("bfloat16", "float16", "float32") and rounding(problem) == ""
    red = geo.group_out if problem.wrt == "input" else geo.group_in
    if not (whole or (rounding(problem) == "exact_f16" and red % 16 == 0)) or problem.out_dtype == "float64":
        return "16 bits, float32, or FP8 with multiples of 16 channels"
    if problem.out_dtype == "hifloat8":
        return "rounds to FP8, not to HiFloat8"
    if not problem.layout.endswith("C"):
        return "channels last only"
    if min(geo.pad) < 0 or (problem.wrt == "output" and max(geo.stride) > 8):
        return "no negative padding, and outputs at strides of at most 8"  # as far apart as a copy takes elements
    if problem.wrt == "input" and max(geo.phases, geo.taps) > MOST_PHASES:
        return f"at most {MOST_PHASES} taps and phases"
    copies, patch = copies_for(problem, geo), box_plans.is_patch(problem, geo)
    if patch:
        return "patches are not copied" if copies.bytes and problem.dtype != "float32" else None
    if problem.wrt == "input" and packs_phases(geo):
        return "columns fill a tile only with the phases of several positions packed into one"
    if problem.dtype == "float32" and (red % 8 or geo.group_in % 8):
        return "float32 with multiples of 8 channels only"
    fewest = min(geo.group_in, geo.group_out)
    if geo.groups == 1:
        return "at least 16 channels on both sides" if fewest < 16 else None
    fits = fewest >= 32 and geo.group_in % 8 == 0 and geo.group_out % 8 == 0
    return None if fits else "groups of 32 channels and more, multiples of 8"


def accepts(query: Query) -> str | None:
    """How the tensors lie: see `lies`; the weight in rows, unless it is copied."""
    problem, geo, (source, weight, *_) = query.problem, query.geo, query.operands
    copies = copies_for(problem, geo)
    if copies.bytes > limit_of(problem, geo, query.max_workspace):
        return f"copies of {copies.bytes} bytes pass the workspace"
    rows_fit = box_plans.turned_rows_fit if turned_weight(problem, geo) else box_plans.weight_rows_fit
    if not copies.weight and not rows_fit(weight):
        return "the weight's rows have gaps, or do not begin at multiples of 16 bytes"
    if not lies(problem, geo, copies, source, query.result):
        return "channels are not neighbours in memory, or rows not at multiples of 16 bytes"
    return None


def lies(problem: Problem, geo: Geometry, copies: Copies, source: Any, result: Any) -> bool:
    """Whether source and result lie as needed."""
    there = result.shape[1] == 1 or result.stride(1) == 1 or writes_columns(problem, geo)
    if box_plans.is_patch(problem, geo):
        there = there and (result.shape[-1] == 1 or result.stride(-1) == result.shape[1])
    steps = [step for axis, step in enumerate(source.stride()) if axis != 1 and source.shape[axis] > 1]
    aligned = box_plans.tensors_fit(source) and not any(step * source.element_size() % 16 for step in steps)
    return there and (copies.source > 0 or aligned)


def tiles(query: Query) -> Iterator[BoxLineTile]:
    problem, geo, result = query.problem, query.geo, query.result
    left = limit_of(problem, geo, query.max_workspace) - copies_for(problem, geo).bytes
    to_columns = result.shape[1] > 1 and result.stride(1) != 1
    return all_tiles(work_of(problem, geo, to_columns), left, query.gpu)


def seconds(query: Query, tile: BoxLineTile) -> float:
    narrow = query.geo.groups > 1 and query.geo.taps == 1 and tile.CB < 32
    return tile.seconds * (NARROW_BOXES if narrow else 1.0)


def build(query: Query, tile: BoxLineTile) -> Prepared:
    problem, geo = query.problem, query.geo
    plan = box_lines(problem, geo, tile, query.gpu)
    if 4 * plan.memory > limit_of(problem, geo, query.max_workspace):  # measured, with more memory than there is
        tile = replace(tile, whole=tile_count(work_of(problem, geo), tile), parts=1)
        plan = box_lines(problem, geo, tile, query.gpu)

    def run(operands: Operands, results: tuple[Any, ...], workspace: Any) -> None:
        memory = scratch(problem, workspace, (plan.memory,), results[0]) if plan.memory else None
        plan.run(operands[0], operands[1], results[0], memory, *operands[2:])

    return Prepared(f"box_lines_{query.short}_{tile.BM}x{tile.BN}x{tile.CB}", str(tile), 4 * plan.memory, run,
                    scales=True)


def writes_columns(problem: Problem, geo: Geometry) -> bool:
    """Whether results with channels first are written about as fast: in runs of neighbours that are not too short."""
    return not box_plans.is_patch(problem, geo) and (
        geo.stride[2] == 1 and geo.x[2] >= SHORTEST_RUN if problem.wrt == "input" else geo.y[2] >= SHORTEST_RUN)


def layout_of(element_bytes: int, inner: int, rank: int) -> Any:
    return gl.NVMMASharedLayout(min(128, element_bytes * inner), 8 * element_bytes, rank=rank)


def box_descriptor(tensor: Any, box: Box, channels: int, steps: Three) -> BoxDescriptor:
    plain = box_plans.descriptor(tensor, (1, 1, 1, 8, channels))
    return BoxDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape,
                         layout_of(tensor.element_size(), channels, 5), box=(*box, channels), steps=(1, *steps, 1))


def weight_descriptor(weight: Any, block: tuple[int, int], turned: bool) -> BoxDescriptor:
    """Of the weight as (output channel, all taps and input channels), or `turned`."""
    outputs, row = weight.shape[0], math.prod(weight.shape[1:])
    shape, step = ([row, outputs], outputs) if turned else ([outputs, row], weight.stride(0) if outputs > 1 else row)
    return BoxDescriptor(weight, shape, [step, 1], list(block), layout_of(weight.element_size(), block[1], 2))


@dataclass(frozen=True)
class BoxLines:
    """The launches of a problem on boxes."""

    problem: Problem
    geo: Geometry
    tile: BoxLineTile
    copies: Copies
    write: Step
    add: Step
    space: Step

    @property
    def parts_shape(self) -> tuple[int, ...]:
        """Of the partial sums, in float32."""
        tile = self.tile
        rest = tile_count(work_of(self.problem, self.geo), tile) - tile.whole
        return (rest, tile.parts, tile.BM, tile.BN) if tile.parts > 1 else (0,)

    @property
    def memory(self) -> int:
        """Elements of float32 that a call needs beside its tensors."""
        return math.prod(self.parts_shape) + self.copies.bytes // 4

    def run(self, source: Any, weight: Any, result: Any, memory: Any, *scales: Any) -> None:
        """Write the result; `memory` has as many float32 elements as a call needs.

        `scales` are those of a scaled problem: of the operands and the result, None where there is none.
        """
        scales = scales or UNSCALED
        source_end = self.copies.source // 4
        weight_end = source_end + self.copies.weight // 4
        if self.copies.source:
            source = padded(source, memory[:source_end], source.dtype)
        rows = self.weight_rows(weight, memory[source_end:weight_end]) if self.copies.weight else weight
        if self.tile.parts == 1:
            self.write(source, weight, rows, result, result, *scales)
        else:
            parts = memory[weight_end:]
            self.write(source, weight, rows, result, parts, *scales)
            self.add(parts, result, *scales)

    def weight_rows(self, weight: Any, memory: Any) -> Any:
        """A copy of the weight as products want it."""
        is_input = self.problem.wrt == "input"
        if wide := spaced(self.problem, self.geo):
            outs, ins, *kernel = weight.shape
            shape = (self.geo.groups * wide, *kernel, ins) if is_input else (outs, *kernel, wide)
            copy = memory.view(weight.dtype).view(shape).permute(0, -1, *range(1, weight.dim() - 1))
            self.space(weight, copy)
            return copy
        if self.problem.dtype == "float32":
            outs, ins, *kernel = weight.shape
            parts = memory.view(TORCH_DTYPES["bfloat16"]).view(WEIGHT_PIECES * outs, *kernel, ins)
            split_step(WEIGHT_PIECES, outs, self.geo.kernel)(weight, parts)
            return parts.permute(0, -1, *range(1, weight.dim() - 1))
        if narrow_products(self.problem, self.geo):
            return turned(weight, memory) if is_input else padded(weight, memory, weight.dtype)
        if self.problem.dtype in STORED_8BIT:
            return padded(weight, memory, TORCH_DTYPES["float16"], "rows" if is_input else "channels")
        return padded(weight, memory, weight.dtype)


def half_box(box: Box, rows: int) -> Box | None:
    """How far the box of the second `rows` positions lies from the first one's; None where they are no box."""
    axis = next((axis for axis in range(4) if box[axis] > 1), 3)
    if math.prod(box) != 2 * rows or box[axis] % 2:
        return None
    beside = [0, 0, 0, 0]
    beside[axis] = box[axis] // 2
    return beside[0], beside[1], beside[2], beside[3]


def box_lines(problem: Problem, geo: Geometry, tile: BoxLineTile, gpu: Gpu, joined: int = 1) -> BoxLines:
    """The launches of a tile; `joined`: of how many groups the weights are the diagonal (see joined_plans.py)."""
    work = work_of(problem, geo)
    is_input, patch = work.is_input, work.patch
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    copies = copies_for(problem, geo)
    weight_col = up8(col) if is_input and copies.weight else col  # columns of a tap in the weight's rows
    weight_red = spaced(problem, geo) or (red if is_input else up8(red))  # rows of a group, or columns of a tap
    if not is_input:
        red = up8(red)
    boxes = tuple(-(-extent // size) for extent, size in zip(work.positions, tile.box))
    rest = tile_count(work, tile) - tile.whole
    items = tile.whole + rest * tile.parts
    programs = min(items, gpu.multiprocessors * tile.together)
    turn = max(1, programs // (-(-work.columns // tile.BN) * len(work.phases)))
    copied = list(tile.box)
    copied[1 + tile.axis] += (tile.NT - 1) * geo.dilation[tile.axis]
    units, line_units = units_of(work, tile.BM, tile.box, tile.axis, tile.NT)
    chunk = min(tile.BN, 128 // work.out_bytes)
    lies_turned = turned_weight(problem, geo) and not copies.weight
    weight_block = (tile.BN, tile.CB) if is_input == lies_turned or work.narrow else (tile.CB, tile.BN)
    halves = tile.warps // 4
    beside = half_box(tile.box, tile.BM // halves)
    dense = (not patch and (geo.groups == 1 or col % tile.BN == 0) and (halves == 1 or beside is not None)
             and (not is_input or geo.phases == 1 or (max(geo.stride) <= 8 and all(
                 (size - 1) * stride < 256 for size, stride in zip(tile.box[1:], geo.stride)))))
    half: Box = tile.box if halves == 1 or beside is None else \
        tuple(more or size for more, size in zip(beside, tile.box))  # type: ignore[assignment]
    to_extents = geo.x if is_input else geo.y
    pn, b0, b1, b2 = tile.box
    constants = {**geo.constants(), **geo.phase_constants("G"), "COL": col, "INPUT": is_input,
                 "PATCH": patch, "PN": pn, "B0": b0, "B1": b1, "B2": b2, "PARTS": tile.parts, "BM": tile.BM,
                 "BN": tile.BN}

    def by_box(result: Any) -> bool:
        return dense and box_plans.tensors_fit(result) and result.shape[1] * result.element_size() % 16 == 0

    def leading(source: Any, weight: Any, rows: Any, result: Any, parts: Any, *scales: Any) -> tuple[Any, ...]:
        target = box_descriptor(result, half, chunk, geo.stride if is_input else ONES) if by_box(result) else None
        steps = ONES if is_input else geo.stride
        return (box_descriptor(source, (copied[0], copied[1], copied[2], copied[3]), tile.CB, steps),
                weight_descriptor(rows, weight_block, lies_turned), target, source, weight, result, parts, *scales)

    def write(source: Any, weight: Any, rows: Any, result: Any, parts: Any, *scales: Any) -> Launch:
        sn, _, *s = strides_of(source)
        rn, rc, *r = strides_of(result)
        ralign, (rn, *r) = aligned_strides((rn, *r))
        scalars = (items, tile.whole, geo.batch, *(geo.y if is_input else geo.x), *to_extents, *boxes, turn, sn, *s,
                   *strides_of(weight), rn, *r, rc)
        more = {"RALIGN": ralign, "RED": red, "WEIGHT_RED": weight_red, "WEIGHT_COL": weight_col,
                "TURNED": lies_turned, "PIECE_ROWS": geo.groups * geo.group_out, "JOINED": joined, "NT": tile.NT,
                "AXIS": tile.axis if tile.NT > 1 else -1, "UNITS": units, "LINE_UNITS": line_units,
                "SOURCE_BYTES": math.prod(copied) * tile.CB * work.source_bytes, "CB": tile.CB, "SS": tile.source_slots,
                "WS": tile.weight_slots, "OS": tile.out_slots, "CHUNK": chunk,
                "STORE": "box" if by_box(result) else "rows" if rc == 1 else "columns",
                "HALVES": halves, **dict(zip(("HN", "H0", "H1", "H2"), beside or (0, 0, 0, 0)))}
        registers = {1: None, 2: 128, 3: 80}[tile.together]
        return Launch((programs,), scalars, {**constants, **more}, 4, 1, leading, registers)

    def add(parts: Any, result: Any, *scales: Any) -> Launch:
        rn, rc, *r = strides_of(result)
        ralign, (rn, *r) = aligned_strides((rn, *r))
        few = min(tile.BM, max(8, 4096 // tile.BN))
        return Launch((rest, tile.BM // few), (tile.whole, geo.batch, *to_extents, *boxes, turn, rn, *r, rc),
                      {**constants, "RALIGN": ralign, "FEW": few, "WARPS": 4}, 4, 1)

    def space(weight: Any, copy: Any) -> Launch:
        outs, ins = (weight_red, geo.group_in) if is_input else (geo.group_out, weight_red)
        return Launch((-(-copy.numel() // PAD_ELEMENTS),), (copy.numel(), *geo.kernel[1:], *strides_of(weight)),
                      {"KG": geo.group_out, "CG": geo.group_in, "OUTS": outs, "INS": ins, "TAPS": geo.taps,
                       "BE": PAD_ELEMENTS}, 4, 1)

    return BoxLines(problem, geo, tile, copies, Step(box_lines_kernel, write), Step(add_box_parts_kernel, add),
                    Step(space_kernel, space))


KERNEL = Kernel("box_lines", frozenset({"output", "input"}), supports, accepts, tiles, build, BoxLineTile, seconds,
                kind=lambda query, tile: (tile.BM, tile.BN, tile.warps, tile.NT), eight_bits=True)
