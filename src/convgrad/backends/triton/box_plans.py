"""Plans on tensor-memory-access boxes: when they fit, which box of positions is a tile, descriptors of the tensors."""

from __future__ import annotations

import math

from dataclasses import dataclass
from typing import Any

from triton.tools.tensor_descriptor import TensorDescriptor

from ...problem import Problem
from .boxes import box_gather_kernel, box_weight_kernel
from .geometry import Geometry, needs_wide, strides_of
from .launch import Launch, Step, aligned_strides, power_of_two
from .numbers_on_device import rounding
from .tiles import MULTIPROCESSORS, Box, best_box, choose_splits, stages_for


@dataclass(frozen=True)
class BoxTile:
    """A box of positions x BN result channels, CB channels a step (input gradient, output); or, for the weight
    gradient, BN output channels x CB input channels, one box of pixels a step."""

    box: Box
    BN: int
    CB: int
    warps: int
    stages: int
    splits: int = 1

    def __str__(self) -> str:
        return (f"box {'x'.join(map(str, self.box))} = {math.prod(self.box)} positions x {self.BN} x {self.CB}, "
                f"{self.warps} warps, {self.stages} stages" + (f", {self.splits} runs" if self.splits > 1 else ""))


def channels_fit(problem: Problem, geo: Geometry) -> bool:
    """Whether the copy engine can read this problem: 16-bit channels last, enough of them, aligned to 16 bytes."""
    return (problem.dtype in ("bfloat16", "float16") and rounding(problem) == "" and problem.layout.endswith("C")
            and geo.group_in % 8 == 0 and geo.group_out % 8 == 0)


def tensors_fit(*tensors: Any) -> bool:
    """Whether tensors lie as the copy engine needs: neighbouring channels, strides and start multiples of 16 bytes."""
    for t in tensors:
        steps = t.stride()
        if (t.shape[1] > 1 and steps[1] != 1) or t.data_ptr() % 16:
            return False
        if any(step % 8 for axis, step in enumerate(steps) if axis != 1 and t.shape[axis] > 1):
            return False
    return True


def descriptor(tensor: Any, block: tuple[int, ...], fold: int = 1) -> TensorDescriptor:
    """Descriptor of an activation (canonical view) as (n, three axes, channel), `fold` places of the last axis in one."""
    n, _, *spatial = strides_of(tensor)
    shape = [tensor.shape[0], *(1,) * (5 - tensor.dim()), *tensor.shape[2:], tensor.shape[1] * fold]
    shape[3] //= fold
    spatial[2] *= fold
    spare = -(-tensor.shape[1] // 8) * 8  # an axis of extent 1 has no stride of its own
    return TensorDescriptor(tensor, shape, [step or spare for step in (n, *spatial)] + [1], list(block))


def folds(geo: Geometry, x: Any = None) -> bool:
    """Whether the last axis of x can be folded by its stride: evenly, and (given the tensor) without gaps."""
    fold = geo.stride[2]
    return fold == 1 or (geo.x[2] % fold == 0 and (x is None or x.stride(-1) == x.shape[1]))


def weight_descriptor(weight: Any, block: tuple[int, ...]) -> TensorDescriptor:
    """Descriptor of a weight whose taps lie evenly: (output channel, tap, input channel)."""
    taps = math.prod(weight.shape[2:])
    spare = -(-weight.shape[1] // 8) * 8
    last = weight.stride(-1) if weight.shape[-1] > 1 else next(
        (weight.stride(a) for a in range(weight.dim() - 1, 1, -1) if weight.shape[a] > 1), spare)
    return TensorDescriptor(weight, [weight.shape[0], taps, weight.shape[1]],
                            [weight.stride(0) if weight.shape[0] > 1 else taps * spare, last if taps > 1 else spare, 1],
                            list(block))


def patch_descriptor(weight: Any, block: tuple[int, ...]) -> TensorDescriptor:
    """Descriptor of a weight as (output channel, 1, all taps and input channels)."""
    row = math.prod(weight.shape[1:])
    return TensorDescriptor(weight, [weight.shape[0], 1, row], [row, row, 1], list(block))


def weight_fits_box(weight: Any, patch: bool) -> bool:
    """Whether the copy engine can read a weight: channels last and aligned, or (patch) everything after O in one row."""
    if patch:
        order = weight.permute(0, *range(2, weight.dim()), 1)
        return bool(order.is_contiguous() and weight.data_ptr() % 16 == 0)
    return tensors_fit(weight) and taps_even(weight)


def taps_even(weight: Any) -> bool:
    """Whether the taps of a weight follow each other at one stride, the last axis fastest."""
    expected = None
    for axis in range(weight.dim() - 1, 1, -1):
        if weight.shape[axis] == 1:
            continue
        if expected is not None and weight.stride(axis) != expected:
            return False
        expected = weight.stride(axis) * weight.shape[axis]
    return True


def step_channels(depth: int) -> int:
    """Channels of one step: 64 fill a row of the copy engine's swizzle; fewer where that leaves less to spare."""
    return min((64, 32, 16), key=lambda width: (-(-depth // width) * width, -width))


def choose_box_gather(geo: Geometry, is_input: bool, patch: bool) -> BoxTile:
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    col = col * geo.taps if patch else col
    positions = geo.phase_positions if is_input else geo.y
    extents = (geo.batch, *positions)
    # NOTE: tiles as measured on an H200: 256 columns where they fill, else 256 rows for wide results; narrow results
    # want several small programs per multiprocessor.
    rows, bn, warps, per_sm = (128, 256, 8, 1) if col % 256 == 0 else (256, 128, 8, 1) if col > 160 else \
        (128, 128, 4, 2) if col > 64 else (128, 64, 4, 3) if col > 32 else (256, 32, 4, 2)
    phases = geo.phases if is_input and not patch else 1

    def tiles() -> int:
        return -(-geo.batch * math.prod(positions) // rows) * -(-col // bn) * phases * geo.groups

    while tiles() < MULTIPROCESSORS and rows * bn > 64 * 32:
        if bn > 64 or (bn > 32 and rows == 64):
            bn //= 2
        else:
            rows //= 2
        warps, per_sm = 4, 2
    cb = step_channels(red)
    stages = stages_for((rows + bn) * cb * 2 * per_sm)
    return BoxTile(best_box(extents, rows, (1, 1, 1) if is_input else geo.stride), bn, cb, warps, stages)


def is_patch(problem: Problem, geo: Geometry) -> bool:
    """Whether windows lie side by side (kernel = stride) and all taps of few channels fill a row of 16-byte units."""
    return (problem.wrt == "input" and geo.groups == 1 and geo.kernel == geo.stride and set(geo.dilation) == {1}
            and not any(geo.pad) and geo.taps > 1 and geo.group_in < 64 and geo.group_in * geo.taps % 8 == 0
            and geo.group_out % 8 == 0 and geo.group_out >= 16)


def gather_fits(problem: Problem, geo: Geometry) -> bool:
    is_input = problem.wrt == "input"
    red = geo.group_out if is_input else geo.group_in
    if is_patch(problem, geo):
        return problem.dtype in ("bfloat16", "float16") and rounding(problem) == "" and problem.layout.endswith("C")
    if not channels_fit(problem, geo) or not (is_input or folds(geo)) or red < 16:
        return False
    return geo.groups == 1 or (red % step_channels(red) == 0 and min(geo.group_in, geo.group_out) >= 32)


def box_gather(problem: Problem, geo: Geometry, tile: BoxTile) -> Step:
    is_input = problem.wrt == "input"
    positions = geo.phase_positions if is_input else geo.y
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    boxes = tuple(-(-extent // size) for extent, size in zip((geo.batch, *positions), tile.box))
    patch = is_patch(problem, geo)
    columns = col * geo.taps if patch else col
    tiles = math.prod(boxes) * -(-columns // tile.BN) * geo.groups * (geo.phases if is_input and not patch else 1)
    weight_block = (tile.CB, 1, tile.BN) if is_input else (tile.BN, 1, tile.CB)

    def leading(source: Any, weight: Any, result: Any) -> tuple[Any, ...]:
        taps = patch_descriptor(weight, weight_block) if patch else weight_descriptor(weight, weight_block)
        return (descriptor(source, (*tile.box, tile.CB), 1 if is_input else geo.stride[2]), taps, source, weight, result)

    def launch(source: Any, weight: Any, result: Any) -> Launch:
        from_extents, to_extents = (geo.y, geo.x) if is_input else (geo.x, geo.y)
        rn, rc, *r = strides_of(result)
        ralign, (rn, *r) = aligned_strides((rn, *r))
        pn, b0, b1, b2 = tile.box
        constants = {"RALIGN": ralign, **geo.constants(), **geo.phase_constants("GV"), "RED": red, "COL": col,
                     "CHANNELS": red * geo.groups, "INPUT": is_input, "PATCH": patch, "WIDE": needs_wide(source, weight, result), "PN": pn, "B0": b0, "B1": b1,
                     "B2": b2, "BN": tile.BN, "CB": tile.CB}
        scalars = (geo.batch, *from_extents, *to_extents, *boxes, *strides_of(source), *strides_of(weight), rn, rc, *r)
        return Launch((tiles,), scalars, constants, tile.warps, tile.stages, leading)

    return Step(box_gather_kernel, launch)


def weight_fits(problem: Problem, geo: Geometry) -> bool:
    return channels_fit(problem, geo) and min(geo.group_in, geo.group_out) >= 32 and folds(geo)


def choose_box_weight(geo: Geometry, max_workspace: int | None) -> BoxTile:
    def width(channels: int) -> int:
        return min((128, 64, 32), key=lambda size: -(-channels // size) * size / {128: 1.0, 64: 0.75, 32: 0.4}[size])

    bk, cb = max(64, width(geo.group_out)), width(geo.group_in)  # 64: rows of one tensor-core instruction
    tiles = -(-geo.group_out // bk) * -(-geo.group_in // cb) * geo.taps * geo.groups
    pixels = 128  # measured: better than 64 at every width
    splits = choose_splits(geo, tiles, pixels, max_workspace, waves=3)
    warps = 8 if bk * cb >= 128 * 128 else 4
    return BoxTile(best_box((geo.batch, *geo.y), pixels, geo.stride), bk, cb, warps, stages_for((bk + cb) * pixels * 2),
                   splits)


def box_weight(problem: Problem, geo: Geometry, tile: BoxTile) -> Step:
    boxes = tuple(-(-extent // size) for extent, size in zip((geo.batch, *geo.y), tile.box))
    total = math.prod(boxes)
    run = -(-total // tile.splits)
    pn, b0, b1, b2 = tile.box

    def leading(dy: Any, x: Any, result: Any) -> tuple[Any, ...]:
        return (descriptor(dy, (*tile.box, tile.BN)), descriptor(x, (*tile.box, tile.CB), geo.stride[2]), dy, x, result)

    def launch(dy: Any, x: Any, result: Any) -> Launch:
        r_split, (ro, ri, *r) = (result.stride(0), result.stride()[1:]) if tile.splits > 1 else (0, strides_of(result))
        programs = -(-geo.group_in // tile.CB) * -(-geo.group_out // tile.BN) * geo.taps * tile.splits * geo.groups
        constants = {**geo.constants(), "KG": geo.group_out, "CG": geo.group_in, "CHANNELS": geo.group_in * geo.groups,
                     "SPLITS": tile.splits, "WIDE": needs_wide(dy, x, result), "PN": pn, "B0": b0, "B1": b1, "B2": b2,
                     "BK": tile.BN, "CB": tile.CB}
        scalars = (geo.batch, *geo.y, *geo.x, *boxes[1:], total, run, *strides_of(dy), *strides_of(x), r_split, ro, ri,
                   *r)
        return Launch((programs,), scalars, constants, tile.warps, tile.stages, leading)

    return Step(box_weight_kernel, launch)
