"""Plans on tensor-memory-access boxes: when they fit, which box of positions is a tile, descriptors of the tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from triton.tools.tensor_descriptor import TensorDescriptor

from ...problem import Problem
from .boxes import box_gather_kernel
from .geometry import Geometry, needs_wide, strides_of
from .launch import Launch, Step, aligned_strides
from .numbers_on_device import rounding
from .tiles import MULTIPROCESSORS, Box, best_box, stages_for


@dataclass(frozen=True)
class BoxTile:
    """A box of positions x BN result channels, CB channels summed a step."""

    box: Box
    BN: int
    CB: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return (f"box {'x'.join(map(str, self.box))} = {math.prod(self.box)} positions x {self.BN} x {self.CB}, "
                f"{self.warps} warps, {self.stages} stages")


def whole_channels(problem: Problem) -> bool:
    """Whether tensor cores multiply the channels of this problem as they lie: 16-bit numbers, channels last."""
    return (problem.dtype in ("bfloat16", "float16") and rounding(problem) == "" and problem.layout.endswith("C"))


def channels_fit(problem: Problem, geo: Geometry) -> bool:
    """Whether the copy engine can read this problem: whole channels, aligned to 16 bytes."""
    return whole_channels(problem) and geo.group_in % 8 == 0 and geo.group_out % 8 == 0


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
    """Descriptor of an activation as (n, three axes, channel), `fold` places of the last axis in one."""
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
    """Descriptor of a weight as (output channel, all taps and input channels)."""
    row = math.prod(weight.shape[1:])
    return TensorDescriptor(weight, [weight.shape[0], row], [weight.stride(0) if weight.shape[0] > 1 else row, 1],
                            list(block))


def weight_rows_fit(weight: Any) -> bool:
    """Whether taps and input channels of each output channel make one row without gaps, aligned to 16 bytes."""
    row = weight[:1].permute(0, *range(2, weight.dim()), 1)
    unit = 16 // weight.element_size()
    return bool(row.is_contiguous() and weight.data_ptr() % 16 == 0 and row.numel() % unit == 0
                and (weight.shape[0] == 1 or weight.stride(0) % unit == 0))


def turned_rows_fit(weight: Any) -> bool:
    """Whether the output channels of each tap and input channel make one row, and the rows follow without gaps."""
    rows = weight.permute(*range(2, weight.dim()), 1, 0)
    return bool(rows.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[0] % 8 == 0)


def step_channels(depth: int) -> int:
    """Channels of one step: 64 fill a row of the copy engine's swizzle; fewer where that leaves less to spare."""
    return min((64, 32, 16), key=lambda width: (-(-depth // width) * width, -width))


def choose_box_gather(geo: Geometry, is_input: bool, patch: bool) -> BoxTile:
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    col = col * geo.taps if patch else col
    positions = geo.phase_positions if is_input else geo.y
    extents = (geo.batch, *positions)
    # NOTE: narrow results want several programs per multiprocessor (measured on an H200). Tiles of 256 channels gave
    # wrong sums there (bench/h200.md) and stay out until they are seen right.
    rows, bn, warps, per_sm = (256, 128, 8, 1) if col > 64 else (128, 64, 4, 3)
    phases = geo.phases if is_input and not patch else 1

    def tiles() -> int:
        return -(-geo.batch * math.prod(positions) // rows) * -(-col // bn) * phases * geo.groups

    while tiles() < MULTIPROCESSORS and rows * bn > 64 * 64:  # 64 channels: rows of one tensor-core instruction
        if bn > 64:
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
    if not is_input and geo.stride[2] > 1 and red % step_channels(red):
        return False  # a step would reach into the neighbour folded beside these channels
    return geo.groups == 1 or (red % step_channels(red) == 0 and min(geo.group_in, geo.group_out) >= 32)


def box_gather(problem: Problem, geo: Geometry, tile: BoxTile) -> Step:
    is_input = problem.wrt == "input"
    positions = geo.phase_positions if is_input else geo.y
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    boxes = tuple(-(-extent // size) for extent, size in zip((geo.batch, *positions), tile.box))
    patch = is_patch(problem, geo)
    columns = col * geo.taps if patch else col
    tiles = math.prod(boxes) * -(-columns // tile.BN) * geo.groups * (geo.phases if is_input and not patch else 1)
    weight_block = (tile.CB, tile.BN) if is_input else (tile.BN, tile.CB)

    def leading(source: Any, weight: Any, result: Any) -> tuple[Any, ...]:
        return (descriptor(source, (*tile.box, tile.CB), 1 if is_input else geo.stride[2]),
                weight_descriptor(weight, weight_block), source, weight, result)

    def launch(source: Any, weight: Any, result: Any) -> Launch:
        from_extents, to_extents = (geo.y, geo.x) if is_input else (geo.x, geo.y)
        rn, rc, *r = strides_of(result)
        ralign, (rn, *r) = aligned_strides((rn, *r))
        pn, b0, b1, b2 = tile.box
        constants = {"RALIGN": ralign, **geo.constants(), **geo.phase_constants("GV"), "RED": red, "COL": col,
                     "CHANNELS": red * geo.groups, "INPUT": is_input, "PATCH": patch,
                     "WIDE": needs_wide(source, weight, result), "PN": pn, "B0": b0, "B1": b1, "B2": b2, "BN": tile.BN,
                     "CB": tile.CB}
        scalars = (geo.batch, *from_extents, *to_extents, *boxes, *strides_of(source), *strides_of(weight), rn, rc, *r)
        return Launch((tiles,), scalars, constants, tile.warps, tile.stages, leading)

    return Step(box_gather_kernel, launch)
