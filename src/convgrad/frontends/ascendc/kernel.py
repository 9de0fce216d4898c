"""Conv3DBackpropInput: the kernel-side object. Each Iterate computes one block of dX from packed memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...blocked import BLOCK_OUT
from ...numbers import round_operand
from ...problem import Unsupported
from .conv_types import (
    DOCUMENTED_TYPES,
    UNDOCUMENTED_TYPES,
    ConvFormat,
    ConvType,
    TPosition,
    float32,
    int32_t,
    type_name,
    whole_numbers,
)
from .global_tensor import GlobalTensor
from .kernel_object import KernelObject
from .misuse import Misuse
from .piece_checks import (
    PiecePointers,
    check_output,
    check_piece,
    check_single_shape,
    check_start,
    check_workspace,
    check_zeroed,
)
from .tiling_struct import TConv3DBackpropInputTiling, ceil_div
from .walk import Block, PieceShape, Walk

Array = np.ndarray[Any, Any]

NAME = "Conv3DBackpropInput"
SETTERS = ("SetSingleShape", "SetStartPosition", "SetGradOutput", "SetWeight")
FORMATS = {"weightType": (ConvFormat.FRACTAL_Z_3D,), "inputSizeType": (ConvFormat.ND,),
           "gradOutputType": (ConvFormat.NDC1HWC0,), "gradInputType": (ConvFormat.NDC1HWC0, ConvFormat.NCDHW)}


def conv_types(dtype: np.dtype[Any], output_format: ConvFormat = ConvFormat.NDC1HWC0) -> tuple[ConvType, ...]:
    """Return the four types of the page, in the order of its template, for one number format."""
    return (ConvType(TPosition.GM, ConvFormat.FRACTAL_Z_3D, dtype), ConvType(TPosition.GM, ConvFormat.ND, int32_t),
            ConvType(TPosition.GM, ConvFormat.NDC1HWC0, dtype), ConvType(TPosition.GM, output_format, dtype))


def check_types(types: dict[str, ConvType], allow_undocumented: bool) -> None:
    """Raise Misuse unless positions, formats and number formats are a combination of the page's tables."""
    for name, conv_type in types.items():
        if conv_type.pos != TPosition.GM:
            raise Misuse("types", f"{NAME}: {name} lies in {conv_type.pos.name}, only GM is possible")
        if conv_type.format not in FORMATS[name]:
            listed = " or ".join(f.name for f in FORMATS[name])
            raise Misuse("types", f"{NAME}: {name} has the format {conv_type.format.name}, it must be {listed}")
    element, size = types["weightType"].dtype, types["inputSizeType"].dtype
    if size != int32_t:
        raise Misuse("types", f"{NAME}: inputSizeType holds {type_name(size)}, it must be int32_t")
    if element not in DOCUMENTED_TYPES and not (allow_undocumented and element in UNDOCUMENTED_TYPES):
        hint = " (float needs allow_undocumented=True)" if element in UNDOCUMENTED_TYPES else ""
        raise Misuse("types", f"{NAME}: weightType holds {type_name(element)}, it must be half or bfloat16_t{hint}")
    for name in ("gradOutputType", "gradInputType"):
        if types[name].dtype != element:
            raise Misuse("types", f"{NAME}: {name} holds {type_name(types[name].dtype)}, weightType "
                         f"{type_name(element)}; they must be the same")


class Conv3DBackpropInput(KernelObject[Block]):
    """The gradient of the input, one piece and one block at a time.

    Parameters
    ----------
    weightType, inputSizeType, gradOutputType, gradInputType : ConvType
        As in the template of the page. gradInputType may be NDC1HWC0 (its table) or NCDHW (its sample: each block is
        put into a workspace slot and `TransposeBlock` brings it to its place).
    strict : bool
        Raise Misuse for calls that the device would answer with wrong data; off, do what the device would do.
    allow_undocumented : bool
        Accept float32, which the documentation does not list.
    fidelity : "block" or "slice"
        One product per kernel depth, or one per slice of baseK as the matrix unit sums them. The trace of "slice"
        also lists every load to L1.
    block_idx : int
        Number of the core, for the trace and for the workspace slot.
    trace : list of Block, optional
        Every block is appended here.
    """

    def __init__(self, weightType: ConvType, inputSizeType: ConvType, gradOutputType: ConvType,
                 gradInputType: ConvType, *, strict: bool = True, allow_undocumented: bool = False,
                 fidelity: str = "block", block_idx: int = 0, trace: list[Block] | None = None) -> None:
        check_types({"weightType": weightType, "inputSizeType": inputSizeType, "gradOutputType": gradOutputType,
                     "gradInputType": gradInputType}, allow_undocumented)
        super().__init__(NAME, SETTERS, strict=strict, fidelity=fidelity, block_idx=block_idx, trace=trace)
        self.SrcT, self.DstT = weightType.dtype, gradInputType.dtype
        self.output_format = gradInputType.format
        self._tiling: TConv3DBackpropInputTiling | None = None
        self._shape: PieceShape | None = None
        self._start = (0, 0)
        self._grad_output: GlobalTensor | None = None
        self._weight: GlobalTensor | None = None
        self._walk: Walk | None = None
        self._place = (0, 0)
        self._iterate = 0
        self._columns: dict[tuple[int, int], Array] = {}  # weights of (kernel depth, n), as a K x N matrix
        self._accumulator: Array | None = None
        self.dumped: Block | None = None  # NCDHW: the block in the workspace slot, until TransposeBlock moves it
        self.dumped_to: GlobalTensor | None = None

    def __class_getitem__(cls, types: tuple[ConvType, ...]) -> partial[Any]:
        """`Conv3DBackpropInput[a, b, c, d]()` is `Conv3DBackpropInput(a, b, c, d)`, as the template of the page."""
        return partial(cls, *types)

    # Description of the piece

    @property
    def tiling(self) -> TConv3DBackpropInputTiling:
        if self._tiling is None:
            raise Misuse("init-missing", f"{NAME}: the tiling is read before Init")
        return self._tiling

    def Init(self, tiling: TConv3DBackpropInputTiling) -> None:
        """Take the tiling; once, before everything else."""
        if not isinstance(tiling, TConv3DBackpropInputTiling):
            raise TypeError(f"Init takes a TConv3DBackpropInputTiling, got {type(tiling).__name__}")
        self.order.init()
        if self.order.strict:
            found = tiling.problems()
            if found:
                raise Misuse("tiling-invalid", f"{NAME}: Init with an unusable tiling: {'; '.join(found)}")
        c0 = 32 // self.SrcT.itemsize
        made_for = tiling.element_type
        if tiling.output_format is not None and tiling.output_format != self.output_format:
            self.order.refuse("types", f"{NAME}: SetInputType said {tiling.output_format.name} on the host, "
                              f"gradInputType is {self.output_format.name}")
        if tiling.c0 != c0 or (made_for is not None and made_for != self.SrcT):
            made = type_name(made_for) if made_for is not None else f"c0={tiling.c0}"
            self.order.refuse("types", f"{NAME}: the tiling was made for {made}, the object for "
                              f"{type_name(self.SrcT)} (c0={c0})")
        self._tiling = tiling

    def SetSingleShape(self, singleShapeM: int, singleShapeK: int, singleShapeN: int) -> None:
        """Give the piece: pixels (whole dX rows), K over all kernel depths, and channels. The order is M, K, N."""
        self.order.setter("SetSingleShape")
        singleShapeM, singleShapeK, singleShapeN = whole_numbers(
            "SetSingleShape", singleShapeM=singleShapeM, singleShapeK=singleShapeK, singleShapeN=singleShapeN)
        if self.order.strict:
            check_single_shape(self.tiling, singleShapeM, singleShapeK, singleShapeN)
        self._shape = PieceShape.of(self.tiling, singleShapeM, singleShapeK, singleShapeN)

    def SetStartPosition(self, curDinStartIdx: int, curHoStartIdx: int) -> None:
        """Give the depth of dX, and the first row in rows of the stretched dY: first dX row - backpropPadUp."""
        self.order.setter("SetStartPosition")
        curDinStartIdx, curHoStartIdx = whole_numbers("SetStartPosition", curDinStartIdx=curDinStartIdx,
                                                      curHoStartIdx=curHoStartIdx)
        if self.order.strict:
            check_start(self.tiling, curDinStartIdx, curHoStartIdx)
        self._start = (curDinStartIdx, curHoStartIdx)

    def SetGradOutput(self, gradOutput: GlobalTensor) -> None:
        """Point to dY: sample of the piece, depth 0, channel group 0, first row that the piece reads."""
        self.order.setter("SetGradOutput")
        self._same_type("SetGradOutput", gradOutput, self.SrcT)
        self._grad_output = gradOutput

    def SetWeight(self, weight: GlobalTensor) -> None:
        """Point to the weights: kernel depth 0, first group of input channels of the piece."""
        self.order.setter("SetWeight")
        self._same_type("SetWeight", weight, self.SrcT)
        self._weight = weight
        self._columns.clear()

    # The loop

    def Iterate(self, enPartialSum: bool = False, *, sync: bool = True) -> bool:
        """Compute the next block; False, and nothing computed, when the piece is finished."""
        self._next_iterate(enPartialSum)
        if self.ctx.isFirstIter_:
            self._begin_piece()
        elif not self._advance():
            self.order.exhausted()
            return False
        walk = self._current(self._walk)
        block = walk.block(self._place, self._iterate, self.block_idx, with_loads=self.fidelity == "slice")
        self._accumulator = None if block.skipped else self._multiply(block)
        self._computed(block)
        return True

    def _current(self, value: Any) -> Any:
        if value is None:
            raise Misuse("piece-incomplete", f"{NAME}: Iterate before {', '.join(SETTERS)}")
        return value

    def _pointers(self) -> PiecePointers:
        return PiecePointers(self.tiling, self._current(self._shape), *self._start, self._current(self._grad_output),
                             self._current(self._weight))

    def _begin_piece(self) -> None:
        pointers = self._pointers()
        if self.order.strict:
            check_piece(pointers)
        self._walk = Walk(self.tiling, self._current(self._shape), *self._start, pointers.batch, pointers.group)
        self._place, self._iterate = (0, 0), 0
        self.ctx.isFirstIter_, self.order.setter_since_start = False, False

    def _advance(self) -> bool:
        """Step the block counters. They are not reset by new setters: that is what isFirstIter_ is for."""
        walk = self._current(self._walk)
        walk.shape = self._current(self._shape)
        m, n = self._place
        self._place, more = walk.next_place(m, n)
        self._iterate += 1
        return bool(more)

    def _multiply(self, block: Block) -> Array:
        """Return the block, summed in float32 over every valid kernel depth and all of K."""
        t = self.tiling
        total = np.zeros((block.pixels, block.columns), np.float32)
        for kd, depth in block.kernel_depths:
            a, b = self._pixels(block, depth), self._weight_columns(block, kd)
            if t.hf32Flag and self.SrcT == float32:
                a, b = (round_operand(x, "hf32").astype(np.float32) for x in (a, b))
            with np.errstate(over="ignore", invalid="ignore"):
                if self.fidelity == "block":
                    total += a @ b
                else:
                    for first in range(0, a.shape[1], t.baseK):
                        total += a[:, first:first + t.baseK] @ b[first:first + t.baseK]
        weight: GlobalTensor = self._current(self._weight)
        weight.count_read(block.bytes_b // t.element_bytes)
        return total

    def _pixels(self, block: Block, depth: int) -> Array:
        """Return A: for each pixel its window of the stretched dY, columns in the order (cout1, kh, kw, cout0)."""
        t, start_row = self.tiling, self._start[1]
        groups = self._current(self._shape).cout1
        rows, width = t.window_rows, t.wi + (t.wk - 1) * t.dilationW
        window = np.zeros((groups, rows, width, t.c0), np.float32)
        if block.dy_rows:
            first, last = block.dy_rows
            aligned = 0 if start_row < 0 else ceil_div(start_row, t.strideH)
            tensor: GlobalTensor = self._current(self._grad_output)
            real = tensor.read(
                depth * t.cout1 * t.ho * t.wo * t.c0 + (first - aligned) * t.wo * t.c0,
                (groups, last - first + 1, t.wo, t.c0), (t.ho * t.wo * t.c0, t.wo * t.c0, t.c0, 1),
                f"{NAME}: block m={block.m} n={block.n} reads dY")
            top = first * t.strideH - block.start_row
            place = window[:, top:, t.backpropPadLeft:][:, ::t.strideH, ::t.strideW]
            fits = min(t.wo, place.shape[2])
            place[:, :last - first + 1, :fits] = real[:, :, :fits]
        column, row, depth_step = t.c0, width * t.c0, rows * width * t.c0
        taps = np.lib.stride_tricks.as_strided(
            window, (rows - (t.hk - 1) * t.dilationH, t.wi, groups, t.hk, t.wk, t.c0),
            tuple(4 * s for s in (row, column, depth_step, t.dilationH * row, t.dilationW * column, 1)))
        a = np.empty((block.pixels, groups, t.hk, t.wk, t.c0), np.float32)
        for done, (top, left, height, length) in rectangles(block.first[1], block.pixels, t.wi):
            part = a[done:done + height * length].reshape(height, length, *a.shape[1:])
            part[...] = taps[top:top + height, left:left + length]
        return a.reshape(block.pixels, -1)

    def _weight_columns(self, block: Block, kd: int) -> Array:
        """Return B: the weights of the block's channels, kernel reversed, rows in the order of A's columns."""
        t = self.tiling
        key = (kd, block.n)
        if key not in self._columns:
            tensor: GlobalTensor = self._current(self._weight)
            groups, couts = block.columns // t.c0, t.weight_n1 * BLOCK_OUT
            start = kd * t.cin1 * t.weight_group + block.n * (t.baseN // t.c0) * t.weight_group
            shape = (groups, t.hk, t.wk, couts, t.c0)
            strides = (t.weight_group, t.wk * couts * t.c0, couts * t.c0, t.c0, 1)
            packed = tensor.peek(start, shape, strides, f"{NAME}: block n={block.n} reads weight")
            cout1 = self._current(self._shape).cout1
            used = packed[:, ::-1, ::-1, :cout1 * t.c0].reshape(groups, t.hk, t.wk, cout1, t.c0, t.c0)
            self._columns[key] = np.ascontiguousarray(
                used.transpose(3, 1, 2, 4, 0, 5).astype(np.float32)).reshape(-1, groups * t.c0)
        return self._columns[key]

    def GetTensorC(self, output: GlobalTensor, enAtomic: int = 0, enSequentialWrite: bool = False, *,
                   sync: bool = True) -> None:
        """Round the block once and move it to its place: from `output`, which carries no depth offset."""
        self._take(output, self.DstT, enAtomic)
        if enSequentialWrite:
            raise Unsupported(f"{NAME}: enSequentialWrite writes nothing for dX; leave it False")
        block = self._current(self.block)
        strict, t = self.order.strict, self.tiling
        if strict:
            self._check_apart(output, {"dY": self._grad_output, "the weight": self._weight})
        if strict and self.output_format == ConvFormat.NDC1HWC0:
            check_output(self._pointers(), output)
            check_zeroed(t, output)
            if enAtomic:
                self._check_added(output, "dX")
        elif strict:
            check_workspace(self, output)
        if self._accumulator is None:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            values = self._accumulator.astype(self.DstT).reshape(block.pixels, block.runs, t.c0).transpose(1, 0, 2)
        if self.output_format == ConvFormat.NCDHW:
            slot = self.block_idx * t.baseM * t.baseN
            output.write(slot, values, (block.run_length, t.c0, 1), check=False, what="workspace writes")
            self.dumped, self.dumped_to = block, output
            output.buffer.slots[output.offset + slot] = (t.baseM * t.baseN, self)
        else:
            output.write(block.offset, values, (block.run_stride, t.c0, 1), atomic=bool(enAtomic), check=strict,
                         what=f"{NAME}: block m={block.m} n={block.n} of depth {block.depth} writes dX")

    def IterateAll(self, output: GlobalTensor, enAtomic: int = 0) -> None:
        """Compute and write the whole piece, then set `ctx.isFirstIter_` (an extension of this model)."""
        self._iterate_all(output, enAtomic)

    def End(self) -> None:
        """Free the queues; once, last, and with no block left in the workspace."""
        if self.dumped is not None:
            self.order.refuse("not-transposed", f"{NAME}: End while block m={self.dumped.m} n={self.dumped.n} of depth "
                              f"{self.dumped.depth} lies in the workspace; with an NCDHW gradInputType TransposeBlock "
                              "brings each block to its place in dX")
        super().End()

    end = End

    # The same methods in Python's spelling (an extension of this model)
    init, iterate, get_tensor_c, iterate_all = Init, Iterate, GetTensorC, IterateAll
    set_single_shape, set_start_position = SetSingleShape, SetStartPosition
    set_grad_output, set_weight = SetGradOutput, SetWeight


def rectangles(column: int, pixels: int, width: int) -> list[tuple[int, tuple[int, int, int, int]]]:
    """Cut `pixels` pixels that start in `column` of row 0 into (pixels before, (row, column, rows, columns))."""
    found, done, row = [], 0, 0
    if column:
        length = min(width - column, pixels)
        found.append((0, (0, column, 1, length)))
        done, row = length, 1
    whole = (pixels - done) // width
    if whole:
        found.append((done, (row, 0, whole, width)))
        done, row = done + whole * width, row + whole
    if done < pixels:
        found.append((done, (row, 0, 1, pixels - done)))
    return found
