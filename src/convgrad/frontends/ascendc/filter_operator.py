"""The whole weight gradient on plain arrays with Conv3DBackpropFilter."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ...blocked import BLOCK_OUT, pack_ndc1hwc0, unpack_fractal_z_3d
from ...problem import Unsupported, checked_int, checked_ints
from .conv_types import DOCUMENTED_TYPES, ConvDtype, ConvFormat, ConvType, TPosition, float32, half, int32_t, type_name
from .duration import LongRun, said_if_long
from .filter_kernel import Conv3DBackpropFilter, FilterBlock
from .filter_tiling import C0, Conv3dBpFilterTiling, DwTiling, TConv3DBpFilterTiling
from .global_tensor import GlobalTensor
from .platform import PlatformInfo
from .tiling import host_type, six_pads
from .tiling_struct import ceil_div

Array = np.ndarray[Any, Any]


class FilterPiece(NamedTuple):
    """Some output channels and input channels of one kernel depth, from some rows of one dY depth of one sample."""

    core: int
    kd: int
    n: int
    do: int
    hoStartIdx: int
    offsetInput: int
    offsetGradOutput: int
    offsetOutput: int
    singleShapeM: int
    singleShapeN: int
    singleShapeK: int


def split_filter_pieces(tiling: TConv3DBpFilterTiling, cores: int = 1) -> list[FilterPiece]:
    """Cut the sum into pieces and deal them to `cores`: kernel depth outermost, then channels, samples, rows."""
    t, cores = tiling.dwTiling, checked_int(cores, "cores", 1)
    found = []
    for kd in range(t.dk):
        for m0 in range(0, t.cout, t.singleCoreCout):
            for j0 in range(0, t.cin1, t.singleCoreCin // C0):
                for n in range(t.batch):
                    for do in range(t.dout):
                        d = do * t.strideD + kd * t.dilationD - t.padFront
                        if 0 <= d < t.di:
                            place = (kd, m0, j0, n, do, d)
                            found += [piece_at(t, place, row) for row in range(0, t.ho, t.singleCoreHo)]
    share, more = divmod(len(found), cores)
    dealt, first = [], 0
    for core in range(cores):
        last = first + share + (core < more)
        dealt += [piece._replace(core=core) for piece in found[first:last]]
        first = last
    return dealt


def piece_at(t: DwTiling, place: tuple[int, ...], row: int) -> FilterPiece:
    kd, m0, j0, n, do, d = place
    groups = min(t.singleCoreCin // C0, t.cin1 - j0)
    first_input_row = min(max(0, row * t.strideH - t.padUp), t.hi - 1)
    return FilterPiece(
        core=0, kd=kd, n=n, do=do, hoStartIdx=row,
        offsetInput=((n * t.di + d) * t.cin1 + j0) * t.input_plane + first_input_row * t.wi * C0,
        offsetGradOutput=((n * t.dout + do) * t.cout1 + m0 // C0) * t.grad_output_plane + row * t.wo * C0,
        offsetOutput=(kd * t.cin1 + j0) * t.weight_group + m0 * C0,
        singleShapeM=min(t.singleCoreCout, t.cout - m0), singleShapeN=groups * C0 * t.hk * t.wk,
        singleShapeK=min(t.singleCoreHo, t.ho - row) * t.wo)


def filter_types(dtype: np.dtype[Any]) -> tuple[ConvType, ...]:
    """Return the four types of Conv3DBackpropFilter, in the order of its template."""
    return (ConvType(TPosition.GM, ConvFormat.NDC1HWC0, dtype), ConvType(TPosition.GM, ConvFormat.ND, int32_t),
            ConvType(TPosition.GM, ConvFormat.NDC1HWC0, dtype),
            ConvType(TPosition.GM, ConvFormat.FRACTAL_Z_3D, float32))


def find_filter_tiling(dy_shape: Sequence[int], x_shape: Sequence[int], kernel_size: Sequence[int],
                       dtype: np.dtype[Any], *, stride: int | Sequence[int] = 1, padding: Any = 0,
                       dilation: int | Sequence[int] = 1, cores: int = 1,
                       platform: PlatformInfo | None = None) -> TConv3DBpFilterTiling:
    """Return the tiling for a problem, its rows cut for `cores`; Unsupported with every reason if there is none."""
    host = Conv3dBpFilterTiling(platform)
    host.SetWeightShape(dy_shape[1], x_shape[1], *kernel_size)
    host.SetInputShape(*x_shape)
    host.SetGradOutputShape(*dy_shape)
    host.SetPadding(*six_pads(padding))
    host.SetStride(*checked_ints(stride, "stride", 3, 1))
    host.SetDilation(*checked_ints(dilation, "dilation", 3, 1))
    host.SetWeightType(TPosition.GM, ConvFormat.FRACTAL_Z_3D, ConvDtype.FLOAT32)
    host.SetInputType(TPosition.GM, ConvFormat.NDC1HWC0, host_type(dtype))
    host.SetGradOutputType(TPosition.GM, ConvFormat.NDC1HWC0, host_type(dtype))
    tiling = TConv3DBpFilterTiling()
    if host.GetTiling(tiling):
        raise Unsupported("Conv3DBackpropFilter: " + "; ".join(host.explain().splitlines()))
    t = tiling.dwTiling
    pieces = t.dk * t.batch * t.dout
    cuts = min(t.ho, ceil_div(cores, pieces))
    tiling.dwTiling = t.with_(singleCoreHo=ceil_div(t.ho, cuts))
    tiling.basicBlockTiling.singleCoreK = tiling.dwTiling.singleCoreHo * t.wo
    return tiling


def filter_model_seconds(tiling: TConv3DBpFilterTiling, cores: int = 1) -> float:
    """Return about how long `run_filter` takes here: the first block is run on zeros and timed."""
    t, pieces = tiling.dwTiling, split_filter_pieces(tiling, cores)
    if not pieces:
        return 0.0
    dtype, first = t.element_type or half, pieces[0]
    op = Conv3DBackpropFilter(*filter_types(dtype))
    op.Init(tiling)
    set_piece(op, first, GlobalTensor(np.zeros(t.batch * t.di * t.cin1 * t.input_plane, dtype)),
              GlobalTensor(np.zeros(t.batch * t.dout * t.cout1 * t.grad_output_plane, dtype)))
    start = perf_counter()
    op.Iterate()
    op.GetTensorC(GlobalTensor(np.zeros(t.dk * t.cin1 * t.weight_group, np.float32))[first.offsetOutput])
    return (perf_counter() - start) * blocks_of(t, pieces)


def blocks_of(t: DwTiling, pieces: list[FilterPiece]) -> int:
    return sum(ceil_div(piece.singleShapeM, t.baseM) * ceil_div(piece.singleShapeN, t.baseN) for piece in pieces)


def set_piece(op: Conv3DBackpropFilter, piece: FilterPiece, input: GlobalTensor, grad_output: GlobalTensor) -> None:
    """Make the four setter calls of one piece."""
    op.SetSingleShape(piece.singleShapeM, piece.singleShapeN, piece.singleShapeK)
    op.SetStartPosition(piece.hoStartIdx)
    op.SetInput(input[piece.offsetInput])
    op.SetGradOutput(grad_output[piece.offsetGradOutput])


def run_filter(dy: Array, x: Array, *, kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
               padding: Any = 0, dilation: int | Sequence[int] = 1, cores: int = 1,
               tiling: TConv3DBpFilterTiling | None = None, fidelity: str = "block", strict: bool = True,
               trace: list[FilterBlock] | None = None) -> Array:
    """Compute the gradient of the weight block by block, as the kernels of `cores` cores would.

    Parameters
    ----------
    dy : (N, Cout, Do, Ho, Wo) array, half or bfloat16
    x : (N, Cin, Di, Hi, Wi) array of the same type
    kernel_size : int or three ints
    stride, padding, dilation, cores, fidelity, strict, trace
        As for `run`.
    tiling : TConv3DBpFilterTiling, optional

    Returns
    -------
    (Cout, Cin, Kd, Kh, Kw) array of float32
    """
    dy, x, cores = np.asarray(dy), np.asarray(x), checked_int(cores, "cores", 1)
    if dy.ndim != 5 or x.ndim != 5:
        raise ValueError(f"dy and x must be (N, C, D, H, W), got shapes {dy.shape} and {x.shape}")
    if dy.dtype != x.dtype or dy.dtype not in DOCUMENTED_TYPES:
        raise TypeError(f"dy is {type_name(dy.dtype)} and x is {type_name(x.dtype)}; both must be half or both "
                        "bfloat16")
    kernel = checked_ints(kernel_size, "kernel_size", 3, 1)
    found = tiling or find_filter_tiling(dy.shape, x.shape, kernel, dy.dtype, stride=stride, padding=padding,
                                         dilation=dilation, cores=cores)
    t = found.dwTiling
    grad_output, input = GlobalTensor(pack_ndc1hwc0(dy)), GlobalTensor(pack_ndc1hwc0(x))
    memory = np.zeros((t.dk * t.cin1 * t.hk * t.wk, t.cout1, BLOCK_OUT, C0), np.float32)
    output = GlobalTensor(memory)
    pieces = split_filter_pieces(found, cores)
    flop = sum(2 * piece.singleShapeM * piece.singleShapeN * piece.singleShapeK for piece in pieces)
    said = said_if_long(flop, blocks_of(t, pieces), lambda: filter_model_seconds(found, cores))
    if said:
        warnings.warn(said, LongRun, stacklevel=2)
    for core in sorted({piece.core for piece in pieces}):
        with Conv3DBackpropFilter(*filter_types(dy.dtype), strict=strict, fidelity=fidelity, block_idx=core,
                                  trace=trace) as op:
            op.Init(found)
            for piece in (piece for piece in pieces if piece.core == core):
                set_piece(op, piece, input, grad_output)
                while op.Iterate():
                    op.GetTensorC(output[piece.offsetOutput])
                op.ctx.isFirstIter_ = True
    return unpack_fractal_z_3d(memory, (t.cout, t.cin, t.dk, t.hk, t.wk))
