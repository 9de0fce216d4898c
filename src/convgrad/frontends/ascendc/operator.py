"""The whole operator on plain arrays: pack, find a tiling, run every piece of every core, unpack."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...blocked import pack_fractal_z_3d, pack_ndc1hwc0, unpack_ndc1hwc0
from ...problem import Unsupported, checked_int, checked_ints
from .conv_types import DOCUMENTED_TYPES, UNDOCUMENTED_TYPES, ConvFormat, TPosition, type_name
from .duration import LongRun, announcement
from .global_tensor import GlobalTensor
from .kernel import Conv3DBackpropInput, conv_types
from .misuse import Misuse
from .piece_checks import check_coverage, check_zeroed
from .pieces import Piece, split_pieces
from .platform import PlatformInfo
from .tile_search import fit_cores
from .tiling import Conv3DBpInputTiling, host_type, six_pads
from .tiling_struct import TConv3DBackpropInputTiling
from .walk import Block

Array = np.ndarray[Any, Any]


def describe(dy_shape: Sequence[int], w_shape: Sequence[int], dtype: np.dtype[Any], *,
             input_size: int | Sequence[int] | None = None, stride: int | Sequence[int] = 1, padding: Any = 0,
             dilation: int | Sequence[int] = 1, output_padding: int | Sequence[int] | None = None,
             platform: PlatformInfo | None = None) -> Conv3DBpInputTiling:
    """Return the host object with every setter called; its `GetTiling` finds the tiling.

    With `output_padding`, or without `input_size`, the problem is a transposed convolution, whose output size is
    inferred. The other arguments are those of `run`.
    """
    batch, cout, *_ = dy_shape
    host = Conv3DBpInputTiling(platform)
    host.SetWeightShape(*w_shape)
    if not host.SetGradOutputShape(*dy_shape):
        raise ValueError(f"dy has {cout} channels, w has {w_shape[0]} output channels")
    size = None if input_size is None else checked_ints(input_size, "input_size", 3, 1)
    if size is not None and output_padding is None:
        host.SetInputShape(batch, w_shape[1], *size)
    else:
        host.SetOutputPadding(*checked_ints(0 if output_padding is None else output_padding, "output_padding", 3, 0))
    host.SetPadding(*six_pads(padding))
    host.SetStride(*checked_ints(stride, "stride", 3, 1))
    host.SetDilation(*checked_ints(dilation, "dilation", 3, 1))
    name = host_type(dtype)
    host.SetWeightType(TPosition.GM, ConvFormat.FRACTAL_Z_3D, name)
    host.SetInputType(TPosition.GM, ConvFormat.NDC1HWC0, name)
    host.SetGradOutputType(TPosition.GM, ConvFormat.NDC1HWC0, name)
    if size is not None and host.input_size != size:
        raise ValueError(f"input_size={size}: the transposed convolution with output_padding={output_padding} gives "
                         f"{host.input_size}")
    return host


def find_tiling(host: Conv3DBpInputTiling, cores: int = 1) -> TConv3DBackpropInputTiling:
    """Return the tiling of a described problem, its pieces cut for `cores`; Unsupported with every reason if none."""
    tiling = TConv3DBackpropInputTiling()
    if host.GetTiling(tiling):
        raise Unsupported("Conv3DBackpropInput: " + "; ".join(host.explain().splitlines()))
    tiling.output_format = None  # the object that runs it says how dX is stored
    return fit_cores(tiling, cores)


def run(dy: Array, w: Array, *, input_size: int | Sequence[int] | None = None, stride: int | Sequence[int] = 1,
        padding: Any = 0, dilation: int | Sequence[int] = 1, output_padding: int | Sequence[int] | None = None,
        cores: int = 1, tiling: TConv3DBackpropInputTiling | None = None, platform: PlatformInfo | None = None,
        output_format: ConvFormat = ConvFormat.NDC1HWC0, fidelity: str = "block", strict: bool = True,
        allow_undocumented: bool = False, trace: list[Block] | None = None) -> Array:
    """Compute the gradient of the input block by block, as the kernels of `cores` cores would.

    Parameters
    ----------
    dy : (N, Cout, Do, Ho, Wo) array, half or bfloat16
        Gradient of the output; for a transposed convolution its input.
    w : (Cout, Cin, Kd, Kh, Kw) array of the same type
    input_size : int or three ints, optional
        Spatial size of the result; inferred for a transposed convolution.
    stride, dilation : int or three ints
    padding : int, three ints, three (low, high) pairs or six ints in the order of SetPadding
    output_padding : int or three ints, optional
        Makes the problem a transposed convolution, as leaving out `input_size` does.
    cores : int
    tiling : TConv3DBackpropInputTiling, optional
        A tile of your own; `find_tiling` chooses one unless given.
    platform : PlatformInfo, optional
    output_format : ConvFormat
        NDC1HWC0, or NCDHW through a workspace slot per core and `TransposeBlock`.
    fidelity, strict, allow_undocumented, trace
        See `Conv3DBackpropInput`.

    Returns
    -------
    (N, Cin, Di, Hi, Wi) array of the type of `dy`
    """
    dy, w, cores = np.asarray(dy), np.asarray(w), checked_int(cores, "cores", 1)
    if dy.ndim != 5 or w.ndim != 5:
        raise ValueError(f"dy must be (N, C, D, H, W) and w (O, I, D, H, W), got shapes {dy.shape} and {w.shape}")
    if dy.dtype != w.dtype:
        raise TypeError(f"dy is {type_name(dy.dtype)} and w is {type_name(w.dtype)}; they must be the same")
    check_dtype(dy.dtype, allow_undocumented)
    host = describe(dy.shape, w.shape, dy.dtype, input_size=input_size, stride=stride, padding=padding,
                    dilation=dilation, output_padding=output_padding, platform=platform)
    found = find_tiling(host, cores)
    if tiling is not None:
        same_problem(tiling, found)
        found = tiling
    said = announcement(found, cores)
    if said:
        warnings.warn(said, LongRun, stacklevel=2)
    return run_tiling(found, dy, w, cores, output_format, fidelity=fidelity, strict=strict, trace=trace)


def Conv3DTranspose(x: Array, w: Array, *, stride: int | Sequence[int] = 1, padding: Any = 0,
                    output_padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1,
                    **options: Any) -> Array:
    """Compute a transposed convolution block by block: `run` with `x` as dY and the output size inferred.

    Parameters
    ----------
    x : (N, Cin, D, H, W) array, half or bfloat16
    w : (Cin, Cout, Kd, Kh, Kw) array of the same type
    stride, padding, output_padding, dilation
        Of the transposed convolution, spelt as in `run`.
    **options
        `cores`, `tiling`, `trace` and the other options of `run`.
    """
    return run(x, w, stride=stride, padding=padding, output_padding=output_padding, dilation=dilation, **options)


def check_dtype(dtype: np.dtype[Any], allow_undocumented: bool) -> None:
    if dtype in UNDOCUMENTED_TYPES and not allow_undocumented:
        raise TypeError(f"dtype {dtype} is not documented for this API; allow_undocumented=True runs it all the same")
    if dtype not in DOCUMENTED_TYPES + UNDOCUMENTED_TYPES:
        raise TypeError(f"dtype {dtype} is none of half (float16), bfloat16_t (bfloat16), float32")


def same_problem(tiling: TConv3DBackpropInputTiling, expected: TConv3DBackpropInputTiling) -> None:
    """Raise ValueError if a tiling was made for another problem."""
    for name in ("batch", "cin", "cout", "c0", "dout", "ho", "wo", "di", "hi", "wi", "dk", "hk", "wk", "strideD",
                 "strideH", "strideW", "padFront", "padUp", "padLeft", "dilationD", "dilationH", "dilationW"):
        if getattr(tiling, name) != getattr(expected, name):
            raise ValueError(f"tiling: {name}={getattr(tiling, name)}, the arrays and arguments say "
                             f"{getattr(expected, name)}")


def run_tiling(t: TConv3DBackpropInputTiling, dy: Array, w: Array, cores: int, output_format: ConvFormat,
               *, fidelity: str, strict: bool, trace: list[Block] | None) -> Array:
    """Pack, run every core's pieces and unpack."""
    grad_output, weight = GlobalTensor(pack_ndc1hwc0(dy)), GlobalTensor(pack_fractal_z_3d(w))
    plain = output_format == ConvFormat.NCDHW
    shape: tuple[int, ...] = ((t.batch, t.cin, t.di, t.hi, t.wi) if plain else
                              (t.batch, t.di, t.cin1, t.hi, t.wi, t.c0))
    # Memory that nobody zeroed holds anything; NaN shows what was forgotten.
    memory = np.full(shape, 0 if t.initOutputFlag else np.nan, dy.dtype)
    output = GlobalTensor(memory)
    workspace = GlobalTensor(np.zeros(cores * t.baseM * t.baseN if plain else 0, dy.dtype))
    pieces = split_pieces(t, cores)
    for core in range(cores):
        mine = [piece for piece in pieces if piece.core == core and not piece.skipped]
        if not mine:
            continue
        with Conv3DBackpropInput(*conv_types(dy.dtype, output_format), strict=strict, allow_undocumented=True,
                                 fidelity=fidelity, block_idx=core, trace=trace) as op:
            op.Init(t)
            for piece in mine:
                set_piece(op, piece, grad_output, weight)
                while op.Iterate():
                    if plain:
                        op.GetTensorC(workspace)
                        TransposeBlock(op, workspace, output)
                    else:
                        op.GetTensorC(output[piece.offsetC])
                op.ctx.isFirstIter_ = True
    if strict:
        check_coverage(output, t, output_format)
    return memory if plain else unpack_ndc1hwc0(memory, t.cin)


def set_piece(op: Conv3DBackpropInput, piece: Piece, grad_output: GlobalTensor, weight: GlobalTensor) -> None:
    """Make the four setter calls of one piece."""
    op.SetSingleShape(piece.singleShapeM, piece.singleShapeK, piece.singleShapeN)
    op.SetStartPosition(piece.d, piece.curHoStartIdx)
    op.SetGradOutput(grad_output[piece.offsetA])
    op.SetWeight(weight[piece.offsetB])


def check_transposed(op: Conv3DBackpropInput, workspace: GlobalTensor, output: GlobalTensor) -> None:
    """Check that TransposeBlock reads the memory that GetTensorC wrote, and writes other memory, from its start."""
    source = op.dumped_to
    if source is not None and (source.buffer is not workspace.buffer or source.offset != workspace.offset):
        raise Misuse("workspace", "Conv3DBackpropInput: TransposeBlock reads another workspace than the one that "
                     f"GetTensorC wrote (offset {workspace.offset}, written at {source.offset})")
    if np.may_share_memory(workspace.buffer.array, output.buffer.array):
        raise Misuse("workspace", "Conv3DBackpropInput: TransposeBlock from and into the same memory; the workspace "
                     "and dX are two")
    t = op.tiling
    size = t.batch * t.cin * t.di * t.hi * t.wi
    if output.offset or output.buffer.array.size != size:
        raise Misuse("output-offset", f"Conv3DBackpropInput: TransposeBlock takes dX from its start, {size} elements "
                     f"in NCDHW; got {output.buffer.array.size} elements from {output.offset} on")


def TransposeBlock(op: Conv3DBackpropInput, workspace: GlobalTensor, output: GlobalTensor) -> None:
    """Move the block that GetTensorC put into the core's workspace slot to its place in an NCDHW output.

    The vector core's part of the operator; `output` points to the start of dX.
    """
    block, t = op.block, op.tiling
    if op.output_format != ConvFormat.NCDHW or block is None:
        raise ValueError("TransposeBlock moves the block of an object whose gradInputType is NCDHW, after GetTensorC")
    if op.order.strict:
        check_zeroed(t, output)
    if block.skipped:
        return
    if op.dumped is not block:
        op.order.refuse("no-block", f"Conv3DBackpropInput: TransposeBlock of block m={block.m} n={block.n}, which is "
                        "not in the workspace; GetTensorC(workspace) comes first, then one TransposeBlock")
    if op.order.strict:
        check_transposed(op, workspace, output)
    if op.dumped_to is not None:
        op.dumped_to.buffer.slots.pop(op.dumped_to.offset + op.block_idx * t.baseM * t.baseN, None)
    op.dumped = op.dumped_to = None
    output.buffer.writers.append(weakref.ref(op.order))
    slot = workspace.read(op.block_idx * t.baseM * t.baseN, (block.runs, block.pixels, t.c0),
                          (block.run_length, t.c0, 1), "workspace reads")
    first = block.channels[0]
    channels = min(block.columns, t.cin - first)  # the padding channels stay behind
    values = np.ascontiguousarray(slot.transpose(0, 2, 1)).reshape(-1, block.pixels)[:channels]
    plane = t.hi * t.wi
    pixel = block.first[0] * t.wi + block.first[1]
    output.write(((block.batch * t.cin + first) * t.di + block.depth) * plane + pixel, values, (t.di * plane, 1),
                 check=op.order.strict, what=f"TransposeBlock: block m={block.m} n={block.n} writes dX")
