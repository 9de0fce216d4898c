"""Checks of one piece: do its shape, its start position and its pointers describe the same part of dX?

The device believes every argument. Here they are compared with each other: the start position fixes the dY row, the
dY pointer fixes the sample, the weight pointer fixes the channels, and all three fix the output pointer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .conv_types import ConvFormat
from .global_tensor import GlobalTensor
from .misuse import Misuse
from .tiling_struct import TConv3DBackpropInputTiling, ceil_div
from .walk import PieceShape

if TYPE_CHECKING:
    from .kernel import Conv3DBackpropInput

NAME = "Conv3DBackpropInput"


def aligned_row(start_row: int, stride: int) -> int:
    """Return the first real dY row at or after a row of the stretched dY."""
    return 0 if start_row < 0 else ceil_div(start_row, stride)


class PiecePointers(NamedTuple):
    """A piece as the setters described it."""

    tiling: TConv3DBackpropInputTiling
    shape: PieceShape
    depth: int
    start_row: int
    grad_output: GlobalTensor
    weight: GlobalTensor

    @property
    def batch(self) -> int:
        return self.grad_output.offset // self.tiling.grad_output_sample

    @property
    def group(self) -> int:
        return self.weight.offset // self.tiling.weight_group

    @property
    def first_row(self) -> int:
        """First dX row of the piece."""
        return self.start_row + self.tiling.backpropPadUp


def check_single_shape(t: TConv3DBackpropInputTiling, m: int, k: int, n: int) -> None:
    """Check SetSingleShape(m, k, n) against the tiling."""
    call = f"{NAME}: SetSingleShape(M={m}, K={k}, N={n})"
    column = t.dk * t.kernel_column
    if k != t.full_k:
        if n == t.full_k:
            raise Misuse("argument-order", f"{call}: K must be dk*cout1*hk*wk*c0 = {t.full_k}, which is what N got; "
                         "the order is M, K, N (Conv3DBackpropFilter has M, N, K)")
        if m == t.full_k:
            raise Misuse("argument-order", f"{call}: K must be dk*cout1*hk*wk*c0 = {t.full_k}, which is what M got; "
                         "the order is M, K, N")
        if k == t.inner_k:
            hint = f"; {k} is the K of one kernel depth, dk={t.dk} is missing"
        elif k % column:
            hint = f"; {k} is not even a multiple of dk*hk*wk*c0 = {column}"
        else:
            hint = "; a part of K cannot be placed, the weight pointer has no start in K"
        raise Misuse("single-shape", f"{call}: K must be dk*cout1*hk*wk*c0 = {t.full_k}{hint}")
    if m < 1:
        raise Misuse("rows", f"{call}: M must be at least one dX row of wi={t.wi} pixels")
    if m % t.wi:
        raise Misuse("rows", f"{call}: M must be a whole number of dX rows, {m} is not a multiple of wi={t.wi}")
    if m > t.hi * t.wi:
        raise Misuse("rows", f"{call}: M is more than the hi*wi = {t.hi * t.wi} pixels of a plane of dX")
    if not 1 <= n <= t.cin1 * t.c0:
        raise Misuse("single-shape", f"{call}: N is the number of channels of the piece, from 1 to cin1*c0 = "
                     f"{t.cin1 * t.c0}")
    if t.weights_resident and ceil_div(n, t.c0) * t.c0 > t.baseN:
        raise Misuse("resident-weights", f"{call}: the weights of baseN={t.baseN} channels stay in L1 for the whole "
                     f"piece (dk=1, bl1Pbuffer=1, stepKb*baseK={t.stepKb * t.baseK} holds all of K); a second block of "
                     f"channels would be multiplied by the weights of the first. Keep N <= singleCoreCin="
                     f"{t.singleCoreCin}")


def check_start(t: TConv3DBackpropInputTiling, depth: int, start_row: int) -> None:
    """Check SetStartPosition(depth, start_row) against the tiling."""
    call = f"{NAME}: SetStartPosition(curDinStartIdx={depth}, curHoStartIdx={start_row})"
    lowest, highest = -t.backpropPadUp, t.hi - 1 - t.backpropPadUp
    if not 0 <= depth < t.di:
        if 0 <= start_row < t.di and lowest <= depth <= highest:
            raise Misuse("argument-order", f"{call}: {depth} is no depth of dX (0..{t.di - 1}), {start_row} is one; "
                         "the depth comes first, then the row")
        raise Misuse("start-position", f"{call}: the depth must be in 0..{t.di - 1}")
    if lowest <= start_row <= highest:
        return
    if start_row > highest and start_row < t.hi:
        raise Misuse("start-row-pad", f"{call}: the row must be in {lowest}..{highest}; {start_row} looks like the dX "
                     f"row itself, curHoStartIdx is that row minus backpropPadUp={t.backpropPadUp}")
    raise Misuse("start-position", f"{call}: the row must be in {lowest}..{highest}, the first dX row minus "
                 f"backpropPadUp={t.backpropPadUp}")


def check_piece(p: PiecePointers) -> None:
    """Check at the first Iterate that rows, dY pointer and weight pointer belong together."""
    t = p.tiling
    dy_size, sizes = t.batch * t.grad_output_sample, (p.grad_output.buffer.array.size, p.weight.buffer.array.size)
    if sizes == (t.weight_size, dy_size) and dy_size != t.weight_size:
        raise Misuse("argument-order", f"{NAME}: SetGradOutput got {sizes[0]} elements, SetWeight {sizes[1]}; dY has "
                     f"{dy_size} and the weight {t.weight_size}: the two are exchanged")
    if p.first_row + p.shape.rows > t.hi:
        row = aligned_row(p.start_row - t.backpropPadUp, t.strideH)
        if (t.backpropPadUp and p.start_row >= 0 and p.start_row + p.shape.rows <= t.hi
                and p.grad_output.offset % t.grad_output_sample == row * t.wo * t.c0):
            raise Misuse("start-row-pad", f"{NAME}: {p.shape.rows} rows from dX row {p.first_row} on do not fit hi="
                         f"{t.hi}; curHoStartIdx={p.start_row} looks like the dX row itself, it must be that row minus "
                         f"backpropPadUp={t.backpropPadUp}: {p.start_row - t.backpropPadUp}")
        raise Misuse("rows", f"{NAME}: {p.shape.rows} rows from dX row {p.first_row} on do not fit hi={t.hi}")
    check_grad_output(p)
    check_weight(p)


def check_grad_output(p: PiecePointers) -> None:
    t = p.tiling
    row = t.wo * t.c0
    got = p.grad_output.offset % t.grad_output_sample
    expected = aligned_row(p.start_row, t.strideH) * row
    if got == expected:
        return
    if p.depth and got == expected + p.depth * t.cout1 * t.ho * row:
        raise Misuse("depth-twice", f"{NAME}: the GradOutput pointer holds the depth {p.depth} "
                     f"({p.depth * t.cout1 * t.ho * row} elements); the object chooses the depth itself, for each "
                     "kernel depth another one")
    if t.backpropPadUp and got == aligned_row(p.start_row - t.backpropPadUp, t.strideH) * row:
        raise Misuse("start-row-pad", f"{NAME}: the GradOutput pointer starts at dY row {got // row}, "
                     f"curHoStartIdx={p.start_row} at row {expected // row}; backpropPadUp={t.backpropPadUp} was "
                     "probably not subtracted from the start row")
    raise Misuse("grad-output-offset", f"{NAME}: curHoStartIdx={p.start_row} starts at dY row {expected // row}, so "
                 f"the GradOutput pointer must be n*{t.grad_output_sample} + {expected}; got "
                 f"{p.grad_output.offset} = {p.batch}*{t.grad_output_sample} + {got}")


def check_weight(p: PiecePointers) -> None:
    t = p.tiling
    offset = p.weight.offset
    if offset % t.weight_group or p.group >= t.cin1:
        raise Misuse("weight-offset", f"{NAME}: the Weight pointer {offset} must be j*{t.weight_group} "
                     f"(j*hk*wk*cout1*16*c0) for a group of channels j in 0..{t.cin1 - 1}")
    if p.group + p.shape.cin1 > t.cin1:
        raise Misuse("weight-offset", f"{NAME}: {p.shape.n} channels from group {p.group} on (Weight pointer {offset}) "
                     f"go beyond the {t.cin1} groups of the weight")


def check_output(p: PiecePointers, output: GlobalTensor) -> None:
    """Check at GetTensorC that the output pointer belongs to the piece."""
    t = p.tiling
    row = t.wi * t.c0
    whole = (p.grad_output.buffer.array.size == t.batch * t.grad_output_sample
             and output.buffer.array.size == t.batch * t.output_sample)
    # A caller who keeps every sample in a buffer of its own has pointers inside that sample only.
    batch = p.batch if whole else output.offset // t.output_sample
    expected = batch * t.output_sample + p.group * t.hi * row + p.first_row * row
    difference = output.offset - expected
    if not difference:
        return
    depth = p.depth * t.output_depth
    if p.depth and difference == depth:
        raise Misuse("depth-twice", f"{NAME}: the output pointer holds the depth {p.depth} ({depth} elements); "
                     f"GetTensorC adds it itself, so the block would land {depth} elements too far. Pass {expected}")
    if t.backpropPadUp and difference == -t.backpropPadUp * row:
        raise Misuse("start-row-pad", f"{NAME}: the output pointer is at dX row {p.start_row}, "
                     f"curHoStartIdx={p.start_row} means dX row {p.first_row}; backpropPadUp={t.backpropPadUp} was not "
                     "subtracted from the start row")
    raise Misuse("output-offset", f"{NAME}: sample {batch}, channel group {p.group} and dX row {p.first_row} lie at "
                 f"{expected} (n*{t.output_sample} + j*{t.hi * row} + row*{row}); the output pointer is "
                 f"{output.offset}, {difference:+d} elements away")


def check_workspace(op: Conv3DBackpropInput, output: GlobalTensor) -> None:
    """Check that an NCDHW block goes to a free slot of a workspace: GetTensorC puts every block into the same one."""
    t, dumped = op.tiling, op.dumped
    length = t.baseM * t.baseN
    first = output.offset + op.block_idx * length
    if dumped is not None:
        size = output.buffer.array.size
        if size in (t.batch * t.output_sample, t.batch * t.cin * t.di * t.hi * t.wi):
            raise Misuse("workspace", f"{NAME}: GetTensorC over block m={dumped.m} n={dumped.n} of depth "
                         f"{dumped.depth}, which TransposeBlock has not moved. With an NCDHW gradInputType GetTensorC "
                         f"takes a workspace of baseM*baseN = {length} elements per core, not dX itself ({size} "
                         "elements)")
        raise Misuse("not-transposed", f"{NAME}: GetTensorC while block m={dumped.m} n={dumped.n} of depth "
                     f"{dumped.depth} still lies in the workspace; TransposeBlock moves it first")
    for start, (taken, owner) in output.buffer.slots.items():
        if start < first + length and first < start + taken and owner is not op:
            raise Misuse("operand-overwritten", f"{NAME}: GetTensorC into the workspace slot at {first}, where the "
                         f"block of another core (slot at {start}) waits for TransposeBlock; each core has its own "
                         f"block_idx and baseM*baseN = {length} elements")


def check_zeroed(t: TConv3DBackpropInputTiling, output: GlobalTensor) -> None:
    """Check before the first block that an output with unreached elements was zeroed."""
    buffer = output.buffer
    if not t.initOutputFlag or buffer.zero_checked:
        return
    if buffer.untouched and buffer.array.any():  # NaN counts as not zero
        first = int(np.flatnonzero(buffer.array)[0])
        raise Misuse("not-zeroed", f"{NAME}: initOutputFlag={t.initOutputFlag} says that some elements of dX are "
                     f"written by no block, so the output must be zero before the first one; element {first} is "
                     f"{float(buffer.array[first])}")
    buffer.zero_checked = True


def reached(t: TConv3DBackpropInputTiling) -> tuple[np.ndarray, np.ndarray]:
    """Return which depths and which rows of dX some element of dY reaches."""
    masks = []
    for size, out, kernel, stride, dilation, pad in (
            (t.di, t.dout, t.dk, t.strideD, t.dilationD, t.padFront),
            (t.hi, t.ho, t.hk, t.strideH, t.dilationH, t.padUp)):
        at = np.arange(out)[:, None] * stride + np.arange(kernel) * dilation - pad
        mask = np.zeros(size, bool)
        mask[at[(at >= 0) & (at < size)]] = True
        masks.append(mask)
    return masks[0], masks[1]


def check_coverage(output: GlobalTensor, tiling: TConv3DBackpropInputTiling,
                   format: ConvFormat = ConvFormat.NDC1HWC0) -> None:
    """Raise Misuse unless every element of the output was written (or may stay zero).

    Call it when all cores are done. With initOutputFlag, elements that no dY reaches may be left as they were zeroed.
    """
    t = tiling
    open_objects = {id(order) for order in (writer() for writer in output.buffer.writers)
                    if order is not None and order.strict and not order.ended}
    if open_objects:
        raise Misuse("end-missing", f"{NAME}: {len(open_objects)} object(s) that wrote dX have not called End; it "
                     "comes once, after the last piece, and before the result is read")
    shape: tuple[int, ...] = (t.batch, t.di, t.cin1, t.hi, t.wi, t.c0)
    if format == ConvFormat.NCDHW:
        shape = (t.batch, t.cin, t.di, t.hi, t.wi)
    missing = output.buffer.write_counts.reshape(shape) == 0
    if t.initOutputFlag:
        depths, rows = reached(t)
        missing &= (depths[:, None, None] & rows[:, None] if format == ConvFormat.NCDHW else
                    depths[:, None, None, None, None] & rows[:, None, None])
    if missing.any():
        count = int(missing.sum())
        where = [int(index[0]) for index in np.nonzero(missing)]
        n, d, c, h, w = ((where[0], where[2], where[1], where[3], where[4]) if format == ConvFormat.NCDHW else
                         (where[0], where[1], where[2] * t.c0 + where[5], where[3], where[4]))
        raise Misuse("never-written", f"{NAME}: {count} of {missing.size} elements of dX were written by no block, the "
                     f"first at n={n} d={d} channel={c} h={h} w={w}")
