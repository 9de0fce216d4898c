"""Conv3DBackpropFilter: the sibling object for the gradient of the weight. Its GetTensorC adds by default."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...blocked import BLOCK_OUT
from .conv_types import (
    DOCUMENTED_TYPES,
    ConvFormat,
    ConvType,
    IterateOrder,
    TPosition,
    float32,
    int32_t,
    type_name,
    whole_numbers,
)
from .filter_tiling import C0, DwTiling, TConv3DBpFilterTiling
from .global_tensor import GlobalTensor
from .kernel_object import KernelObject
from .misuse import Misuse
from .tiling_struct import ceil_div

Array = np.ndarray[Any, Any]

NAME = "Conv3DBackpropFilter"
SETTERS = ("SetSingleShape", "SetStartPosition", "SetGradOutput", "SetInput")
FORMATS = {"inputType": ConvFormat.NDC1HWC0, "weightSizeType": ConvFormat.ND, "gradOutputType": ConvFormat.NDC1HWC0,
           "gradWeightType": ConvFormat.FRACTAL_Z_3D}


@dataclass(frozen=True)
class FilterBlock:
    """What one Iterate computes. Ranges are (first, last), both inclusive; a column is (cin1, kh, kw) x 16 channels."""

    core: int
    iterate: int
    m: int
    n: int
    couts: tuple[int, int]  # inside the piece
    columns: tuple[int, int]  # inside the piece
    dy_rows: tuple[int, int]
    input_rows: tuple[int, int]  # negative and beyond hi where the padding is
    products: int
    offset: int  # element offset that GetTensorC adds to the output pointer


class Conv3DBackpropFilter(KernelObject[FilterBlock]):
    """The gradient of the weight of one kernel depth, from some rows of one depth of one sample.

    Parameters
    ----------
    inputType, weightSizeType, gradOutputType, gradWeightType : ConvType
        NDC1HWC0, ND int32_t, NDC1HWC0 (half or bfloat16_t) and FRACTAL_Z_3D float.
    strict, fidelity, block_idx, trace
        As for `Conv3DBackpropInput`.

    Notes
    -----
    Pointers: GradOutput at (sample, dY depth, first group of cout, first dY row), Input at (sample, X depth, first
    group of cin, first row that exists), output at (kernel depth, first group of cin, first cout).
    """

    def __init__(self, inputType: ConvType, weightSizeType: ConvType, gradOutputType: ConvType,
                 gradWeightType: ConvType, *, strict: bool = True, fidelity: str = "block", block_idx: int = 0,
                 trace: list[FilterBlock] | None = None) -> None:
        types = {"inputType": inputType, "weightSizeType": weightSizeType, "gradOutputType": gradOutputType,
                 "gradWeightType": gradWeightType}
        for name, conv_type in types.items():
            if conv_type.pos != TPosition.GM or conv_type.format != FORMATS[name]:
                raise Misuse("types", f"{NAME}: {name} is {conv_type}, it must be GM, {FORMATS[name].name}")
        if inputType.dtype not in DOCUMENTED_TYPES or gradOutputType.dtype != inputType.dtype:
            raise Misuse("types", f"{NAME}: inputType holds {type_name(inputType.dtype)} and gradOutputType "
                         f"{type_name(gradOutputType.dtype)}; both must be half or both bfloat16_t")
        if gradWeightType.dtype != float32 or weightSizeType.dtype != int32_t:
            raise Misuse("types", f"{NAME}: gradWeightType must hold float and weightSizeType int32_t, got "
                         f"{type_name(gradWeightType.dtype)} and {type_name(weightSizeType.dtype)}")
        super().__init__(NAME, SETTERS, strict=strict, fidelity=fidelity, block_idx=block_idx, trace=trace)
        self.SrcT = inputType.dtype
        self._tiling: DwTiling | None = None
        self._shape = (0, 0, 0)  # M, N, K
        self._start_row = 0
        self._input: GlobalTensor | None = None
        self._grad_output: GlobalTensor | None = None
        self._index = 0
        self._rows_of_m: dict[int, Array] = {}
        self._accumulator: Array | None = None

    def __class_getitem__(cls, types: tuple[ConvType, ...]) -> partial[Any]:
        """`Conv3DBackpropFilter[a, b, c, d]()` is `Conv3DBackpropFilter(a, b, c, d)`, as the template of the page."""
        return partial(cls, *types)

    @property
    def tiling(self) -> DwTiling:
        if self._tiling is None:
            raise Misuse("init-missing", f"{NAME}: the tiling is read before Init")
        return self._tiling

    def Init(self, tiling: TConv3DBpFilterTiling) -> None:
        """Take the tiling; once, before everything else."""
        if not isinstance(tiling, TConv3DBpFilterTiling):
            raise TypeError(f"Init takes a TConv3DBpFilterTiling, got {type(tiling).__name__}")
        self.order.init()
        t = tiling.dwTiling
        if self.order.strict:
            found = t.problems()
            if found:
                raise Misuse("tiling-invalid", f"{NAME}: Init with an unusable tiling: {'; '.join(found)}")
        if t.element_type is not None and t.element_type != self.SrcT:
            self.order.refuse("types", f"{NAME}: the tiling was made for {type_name(t.element_type)}, the object for "
                              f"{type_name(self.SrcT)}")
        self._tiling = t

    def SetSingleShape(self, singleShapeM: int, singleShapeN: int, singleShapeK: int) -> None:
        """Give the piece: output channels, input channels * hk*wk, and pixels of dY (whole rows). Order M, N, K."""
        self.order.setter("SetSingleShape")
        singleShapeM, singleShapeN, singleShapeK = whole_numbers(
            "SetSingleShape", singleShapeM=singleShapeM, singleShapeN=singleShapeN, singleShapeK=singleShapeK)
        t, call = self.tiling, f"{NAME}: SetSingleShape(M={singleShapeM}, N={singleShapeN}, K={singleShapeK})"
        taps = t.hk * t.wk
        if self.order.strict:
            fits_n = singleShapeN % taps == 0 and 0 < singleShapeN <= t.columns
            fits_k = singleShapeK % t.wo == 0 and 0 < singleShapeK <= t.ho * t.wo
            if not (fits_n and fits_k) and (singleShapeK % taps == 0 and singleShapeK <= t.columns
                                            and singleShapeN % t.wo == 0 and singleShapeN <= t.ho * t.wo):
                raise Misuse("argument-order", f"{call}: N must be channels*hk*wk (at most {t.columns}) and K whole "
                             f"rows of wo={t.wo} pixels (at most {t.ho * t.wo}); the two look exchanged, the order is "
                             "M, N, K (Conv3DBackpropInput has M, K, N)")
            if not fits_k:
                raise Misuse("rows", f"{call}: K must be whole dY rows of wo={t.wo} pixels, at most {t.ho * t.wo}")
            if not fits_n:
                raise Misuse("single-shape", f"{call}: N must be channels*hk*wk, a multiple of {taps} up to "
                             f"{t.columns}")
            if not 0 < singleShapeM <= t.cout1 * BLOCK_OUT:
                raise Misuse("single-shape", f"{call}: M must be from 1 to cout1*16 = {t.cout1 * BLOCK_OUT}")
        self._shape = (singleShapeM, ceil_div(singleShapeN // taps, C0) * C0 * taps, singleShapeK)

    def SetStartPosition(self, hoStartIdx: int) -> None:
        """Give the first dY row of the piece; its first X row is hoStartIdx*strideH - padUp."""
        self.order.setter("SetStartPosition")
        (hoStartIdx,) = whole_numbers("SetStartPosition", hoStartIdx=hoStartIdx)
        if self.order.strict and not 0 <= hoStartIdx < self.tiling.ho:
            raise Misuse("start-position", f"{NAME}: SetStartPosition(hoStartIdx={hoStartIdx}): the dY row must be in "
                         f"0..{self.tiling.ho - 1}")
        self._start_row = hoStartIdx

    def SetInput(self, input: GlobalTensor) -> None:
        """Point to X: sample, depth, first group of channels, first row of the piece that exists."""
        self.order.setter("SetInput")
        self._same_type("SetInput", input, self.SrcT)
        self._input = input

    def SetGradOutput(self, gradOutput: GlobalTensor) -> None:
        """Point to dY: sample, depth, first group of channels, first row."""
        self.order.setter("SetGradOutput")
        self._same_type("SetGradOutput", gradOutput, self.SrcT)
        self._grad_output = gradOutput

    def Iterate(self, enPartialSum: bool = False, *, sync: bool = True) -> bool:
        """Compute the next block; False, and nothing computed, when the piece is finished."""
        self._next_iterate(enPartialSum)
        if self.ctx.isFirstIter_:
            if self.order.strict:
                self._check_pointers()
            self._index, self._rows_of_m = 0, {}
            self.ctx.isFirstIter_, self.order.setter_since_start = False, False
        else:
            self._index += 1
        block = self._block(self._index)
        if block is None:
            self.order.exhausted()
            return False
        self._accumulator = self._multiply(block)
        self._computed(block)
        return True

    def _check_pointers(self) -> None:
        t = self.tiling
        assert self._input is not None and self._grad_output is not None
        if self._start_row + self._shape[2] // t.wo > t.ho:
            raise Misuse("rows", f"{NAME}: {self._shape[2] // t.wo} rows from dY row {self._start_row} on do not fit "
                         f"ho={t.ho}")
        row, rest = divmod(self._grad_output.offset % t.grad_output_plane, t.wo * C0)
        if row != self._start_row or rest:
            raise Misuse("grad-output-offset", f"{NAME}: the GradOutput pointer {self._grad_output.offset} is at dY "
                         f"row {row} (+{rest} elements), hoStartIdx={self._start_row}")
        first = max(0, self._start_row * t.strideH - t.padUp)
        row, rest = divmod(self._input.offset % t.input_plane, t.wi * C0)
        if first < t.hi and (row != first or rest):
            raise Misuse("input-offset", f"{NAME}: the Input pointer {self._input.offset} is at X row {row} (+{rest} "
                         f"elements), hoStartIdx={self._start_row} starts at X row {first} "
                         f"= max(0, hoStartIdx*strideH - padUp)")

    def _block(self, index: int) -> FilterBlock | None:
        t, (m_length, n_length, k_length) = self.tiling, self._shape
        m_iter, n_iter = ceil_div(m_length, t.baseM), ceil_div(n_length, t.baseN)
        if index >= m_iter * n_iter:
            return None
        m, n = divmod(index, n_iter) if t.iterateOrder == IterateOrder.ORDER_M else divmod(index, m_iter)[::-1]
        rows = k_length // t.wo
        first_row = self._start_row * t.strideH - t.padUp
        return FilterBlock(
            self.block_idx, index, m, n, (m * t.baseM, min((m + 1) * t.baseM, ceil_div(m_length, C0) * C0) - 1),
            (n * t.baseN, min((n + 1) * t.baseN, n_length) - 1), (self._start_row, self._start_row + rows - 1),
            (first_row, first_row + (rows - 1) * t.strideH + (t.hk - 1) * t.dilationH), ceil_div(k_length, t.baseK),
            n * t.baseN * t.cout1 * BLOCK_OUT + m * t.baseM * C0)

    def _multiply(self, block: FilterBlock) -> Array:
        a, b = self._couts(block), self._columns(block)
        if self.fidelity == "block":
            total: Array = a @ b
            return total
        total = np.zeros((a.shape[0], b.shape[1]), np.float32)
        for first in range(0, a.shape[1], self.tiling.baseK):
            total += a[:, first:first + self.tiling.baseK] @ b[first:first + self.tiling.baseK]
        return total

    def _couts(self, block: FilterBlock) -> Array:
        """Return A: output channels x pixels of dY."""
        if block.m not in self._rows_of_m:
            t, tensor = self.tiling, self._grad_output
            assert tensor is not None
            groups = (block.couts[1] + 1 - block.couts[0]) // C0
            rows = self._shape[2] // t.wo
            read = tensor.read(block.couts[0] // C0 * t.grad_output_plane, (groups, rows * t.wo, C0),
                               (t.grad_output_plane, C0, 1), f"{NAME}: block m={block.m} reads dY")
            self._rows_of_m[block.m] = np.ascontiguousarray(
                read.transpose(0, 2, 1).astype(np.float32)).reshape(groups * C0, -1)
        return self._rows_of_m[block.m]

    def _columns(self, block: FilterBlock) -> Array:
        """Return B: pixels x columns, X gathered for each (cin1, kh, kw) of the block; zero in the padding."""
        t, tensor = self.tiling, self._input
        assert tensor is not None
        rows = self._shape[2] // t.wo
        fractals = range(block.columns[0] // C0, (block.columns[1] + 1) // C0)
        base = max(0, self._start_row * t.strideH - t.padUp)
        b = np.zeros((rows, t.wo, len(fractals), C0), np.float32)
        for place, fractal in enumerate(fractals):
            group, tap = divmod(fractal, t.hk * t.wk)
            kh, kw = divmod(tap, t.wk)
            low_h, high_h, row = landing(rows, t.strideH, self._start_row * t.strideH - t.padUp + kh * t.dilationH,
                                         t.hi)
            low_w, high_w, column = landing(t.wo, t.strideW, kw * t.dilationW - t.padLeft, t.wi)
            if low_h < high_h and low_w < high_w:
                b[low_h:high_h, low_w:high_w, place] = tensor.read(
                    group * t.input_plane + ((row - base) * t.wi + column) * C0, (high_h - low_h, high_w - low_w, C0),
                    (t.strideH * t.wi * C0, t.strideW * C0, 1), f"{NAME}: block n={block.n} reads X")
        return b.reshape(rows * t.wo, -1)

    def GetTensorC(self, output: GlobalTensor, enAtomic: int = 1, enSequentialWrite: bool = False, *,
                   sync: bool = True) -> None:
        """Add the block to dW (`enAtomic=0` overwrites; `enSequentialWrite` puts it packed at `output`)."""
        self._take(output, float32, enAtomic)
        block, total, t = self.block, self._accumulator, self.tiling
        if block is None or total is None:
            return
        if self.order.strict:
            self._check_apart(output, {"dY": self._grad_output, "X": self._input})
            if enAtomic:
                self._check_added(output, "dW")
        values = total.reshape(total.shape[0], -1, C0).transpose(1, 0, 2)  # (cin1 kh kw), cout, cin0
        start, fractal = block.offset, t.cout1 * BLOCK_OUT * C0
        if enSequentialWrite:
            start, fractal = 0, total.shape[0] * C0
        output.write(start, values, (fractal, C0, 1), atomic=bool(enAtomic), check=self.order.strict,
                     what=f"{NAME}: block m={block.m} n={block.n} writes dW")

    def IterateAll(self, output: GlobalTensor, enAtomic: int = 1) -> None:
        """Compute and add the whole piece, then set `ctx.isFirstIter_` (an extension of this model)."""
        self._iterate_all(output, enAtomic)

    # The same methods in Python's spelling (an extension of this model)
    init, iterate, get_tensor_c, iterate_all = Init, Iterate, GetTensorC, IterateAll
    set_single_shape, set_start_position = SetSingleShape, SetStartPosition
    set_grad_output, set_input = SetGradOutput, SetInput


def landing(count: int, stride: int, shift: int, size: int) -> tuple[int, int, int]:
    """Return the half-open range of o in 0..count whose o*stride + shift lies in 0..size, and where the first lies."""
    low = max(0, ceil_div(-shift, stride))
    high = max(low, min(count, (size - 1 - shift) // stride + 1))
    return low, high, low * stride + shift
