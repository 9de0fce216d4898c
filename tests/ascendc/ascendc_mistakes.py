"""Every mistake that the model tells apart, provoked on one small problem; run as a program, the table of the docs.

The problem: W 20x40x1x3x3, dX 1x40x4x6x8, dY 1x20x4x6x8, height and width padded by 1, half; tile 16 x 16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from convgrad import ascendc
from convgrad.frontends.ascendc import (
    Conv3DBackpropFilter,
    Conv3DBackpropInput,
    ConvFormat,
    ConvType,
    GlobalTensor,
    TPosition,
)

half = ascendc.half
DY, W, X = (1, 20, 4, 6, 8), (20, 40, 1, 3, 3), (1, 40, 4, 6, 8)


def small_tiling(**changes: Any) -> ascendc.TConv3DBackpropInputTiling:
    found = ascendc.find_tiling(ascendc.describe(DY, W, half, input_size=X[2:], padding=(0, 1, 1)))
    tile = {"baseM": 16, "baseN": 16, "baseK": 144, "stepKa": 1, "stepKb": 1, "al1Pbuffer": 2, "bl1Pbuffer": 2,
            "singleCoreM": 24, "singleCoreCin": 32}
    return found.with_(**(tile | changes))


class Launch:
    """Packed operands, an object, and a correct way through its calls, to deviate from."""

    def __init__(self, tiling: ascendc.TConv3DBackpropInputTiling | None = None, **options: Any) -> None:
        self.tiling = tiling or small_tiling()
        self.grad_output = GlobalTensor(ascendc.pack_ndc1hwc0(np.ones(DY, half)))
        self.weight = GlobalTensor(ascendc.pack_fractal_z_3d(np.ones(W, half)))
        self.memory = np.full(self.tiling.batch * self.tiling.output_sample, np.nan, half)
        self.output = GlobalTensor(self.memory)
        self.op = Conv3DBackpropInput(*ascendc.conv_types(half), **options)

    def pieces(self) -> list[ascendc.Piece]:
        return ascendc.split_pieces(self.tiling)

    def piece(self, d: int = 0, row0: int = 0, group: int = 0) -> ascendc.Piece:
        return next(p for p in self.pieces() if (p.d, p.row0, p.cin1_0) == (d, row0, group))

    def set(self, piece: ascendc.Piece, **changes: Any) -> ascendc.Piece:
        piece = piece._replace(**changes)
        self.op.SetSingleShape(piece.singleShapeM, piece.singleShapeK, piece.singleShapeN)
        self.op.SetStartPosition(piece.d, piece.curHoStartIdx)
        self.op.SetGradOutput(self.grad_output[piece.offsetA])
        self.op.SetWeight(self.weight[piece.offsetB])
        return piece

    def begin(self, piece: ascendc.Piece | None = None, **changes: Any) -> ascendc.Piece:
        self.op.Init(self.tiling)
        return self.set(piece or self.piece(), **changes)

    def finish(self, piece: ascendc.Piece) -> None:
        while self.op.Iterate():
            self.op.GetTensorC(self.output[piece.offsetC])


def launch(action: Callable[[Launch], Any], **options: Any) -> Callable[[], None]:
    return lambda: action(Launch(**options))


def iterate_twice(run: Launch) -> None:
    run.begin()
    run.op.Iterate()
    run.op.Iterate()


def end_with_a_block(run: Launch) -> None:
    run.begin()
    run.op.Iterate()
    run.op.End()


def take_before_iterate(run: Launch) -> None:
    run.op.GetTensorC(run.output[run.begin().offsetC])


def take_twice(run: Launch) -> None:
    piece = run.begin()
    run.op.Iterate()
    run.op.GetTensorC(run.output[piece.offsetC])
    run.op.GetTensorC(run.output[piece.offsetC])


def forget_first_iter(run: Launch) -> None:
    run.finish(run.begin())
    run.set(run.piece(d=1))
    run.op.Iterate()


def first_block(run: Launch, piece: ascendc.Piece | None = None, output: int | None = None, **changes: Any) -> None:
    piece = run.begin(piece, **changes)
    run.op.Iterate()
    run.op.GetTensorC(run.output[piece.offsetC if output is None else output])


def exchange_tensors(run: Launch) -> None:
    run.grad_output, run.weight = run.weight, run.grad_output
    first_block(run)


def iterate_on(run: Launch) -> None:
    run.finish(run.begin())
    run.op.Iterate()


def plain_output(run: Launch) -> None:
    """The sample of the page as it stands: gradInputType is NCDHW, GetTensorC gets dX."""
    run.op = Conv3DBackpropInput(*ascendc.conv_types(half, ConvFormat.NCDHW))
    run.finish(run.begin())


def transpose_too_early(run: Launch) -> None:
    run.op = Conv3DBackpropInput(*ascendc.conv_types(half, ConvFormat.NCDHW))
    run.begin()
    run.op.Iterate()
    ascendc.TransposeBlock(run.op, GlobalTensor(np.zeros(256, half)), run.output)


def end_twice(run: Launch) -> None:
    run.finish(run.begin())
    run.op.End()
    run.op.End()


def init_twice(run: Launch) -> None:
    run.op.Init(run.tiling)
    run.op.Init(run.tiling)


def write_twice(run: Launch) -> None:
    run.op.Init(run.tiling)
    for _ in range(2):
        run.finish(run.set(run.piece()))
        run.op.ctx.isFirstIter_ = True


def leave_one_out(run: Launch) -> None:
    run.op.Init(run.tiling)
    for piece in run.pieces()[:-1]:
        run.finish(run.set(piece))
        run.op.ctx.isFirstIter_ = True
    run.op.End()
    ascendc.check_coverage(run.output, run.tiling)


def coverage_before_end(run: Launch) -> None:
    run.finish(run.begin())
    ascendc.check_coverage(run.output, run.tiling)


def end_in_mid_piece(run: Launch) -> None:
    first_block(run)
    run.op.End()


def end_after_setters(run: Launch) -> None:
    run.finish(run.begin())
    run.op.ctx.isFirstIter_ = True
    run.set(run.piece(d=1))
    run.op.End()


def plain(run: Launch, core: int = 0) -> GlobalTensor:
    """An object for NCDHW at its first block, and a workspace for two cores."""
    run.op = Conv3DBackpropInput(*ascendc.conv_types(half, ConvFormat.NCDHW), block_idx=core)
    run.begin()
    run.op.Iterate()
    return GlobalTensor(np.zeros(2 * 256, half))


def forget_transpose(run: Launch) -> None:
    workspace = plain(run)
    run.op.GetTensorC(workspace)
    run.op.Iterate()
    run.op.GetTensorC(workspace)


def end_without_transpose(run: Launch) -> None:
    """A piece of one block, so that nothing but End can tell."""
    run.tiling = small_tiling(baseM=48, singleCoreM=48)
    workspace = GlobalTensor(np.zeros(48 * 16, half))
    run.op = Conv3DBackpropInput(*ascendc.conv_types(half, ConvFormat.NCDHW))
    run.begin(singleShapeN=16)
    while run.op.Iterate():
        run.op.GetTensorC(workspace)
    run.op.End()


def iterate_all_into_dx(run: Launch) -> None:
    run.op = Conv3DBackpropInput(*ascendc.conv_types(half, ConvFormat.NCDHW))
    run.begin()
    run.op.IterateAll(run.output)


def another_workspace(run: Launch) -> None:
    workspace = plain(run)
    run.op.GetTensorC(workspace)
    dx = GlobalTensor(np.zeros(X, half))
    ascendc.TransposeBlock(run.op, GlobalTensor(np.zeros(512, half)), dx)


def the_slot_of_another_core(run: Launch) -> None:
    workspace = plain(run)
    run.op.GetTensorC(workspace)
    first = run.op
    plain(run)
    run.op.GetTensorC(workspace)
    first.End()


def overwrite_dy(run: Launch) -> None:
    run.begin()
    run.op.Iterate()
    run.op.GetTensorC(run.grad_output)


def add_to_anything(run: Launch) -> None:
    piece = run.begin()
    run.op.Iterate()
    run.op.GetTensorC(run.output[piece.offsetC], enAtomic=1)


def host_and_kernel(run: Launch) -> None:
    host = ascendc.describe(DY, W, half, input_size=X[2:], padding=(0, 1, 1))
    host.SetInputType(TPosition.GM, ConvFormat.NCDHW, ascendc.ConvDtype.FLOAT16)
    data = ascendc.Conv3DBackpropInputTilingData()
    host.GetTiling(data)
    run.op.Init(data.conv3DDxTiling)


def row_for_both(run: Launch) -> None:
    """Start row and dY pointer both from the dX row, as if there were no padding: only the output pointer tells."""
    piece = run.piece()
    first_block(run, piece, curHoStartIdx=piece.row0)


def row_alone(run: Launch) -> None:
    piece = run.piece(row0=3)
    first_block(run, piece, curHoStartIdx=piece.row0 - 1 + 1, singleShapeM=16)


def other_type() -> None:
    bfloat = ascendc.bfloat16_t
    Conv3DBackpropInput(*ascendc.conv_types(bfloat)).Init(small_tiling())


def mixed_types() -> None:
    types = list(ascendc.conv_types(half))
    types[2] = ConvType(TPosition.GM, ConvFormat.NDC1HWC0, ascendc.bfloat16_t)
    Conv3DBackpropInput(*types)


def undocumented_type() -> None:
    Conv3DBackpropInput(*ascendc.conv_types(ascendc.float32))


def filter_begin(action: Callable[..., Any]) -> Callable[[], None]:
    def provoke() -> None:
        tiling = ascendc.find_filter_tiling(DY, X, W[2:], half, padding=(0, 1, 1))
        op = Conv3DBackpropFilter(*ascendc.filter_types(half))
        op.Init(tiling)
        action(op, GlobalTensor(ascendc.pack_ndc1hwc0(np.ones(DY, half))),
               GlobalTensor(ascendc.pack_ndc1hwc0(np.ones(X, half))), tiling.dwTiling)
    return provoke


def filter_block(op: Conv3DBackpropFilter, dy: GlobalTensor, x: GlobalTensor, t: ascendc.DwTiling,
                 row: int = 0) -> None:
    op.SetSingleShape(20, 40 * 9 if row == 0 else 48 * 9, 48 if row == 0 else 24)
    op.SetStartPosition(row)
    op.SetGradOutput(dy[row * 8 * 16])
    op.SetInput(x)
    op.Iterate()
    op.GetTensorC(GlobalTensor(np.full(3 * t.weight_group, np.nan, np.float32)))


# (mistake, what the caller did, how to do it)
PROVOKED: list[tuple[str, str, Callable[[], None]]] = [
    ("init-missing", "SetSingleShape before Init", launch(lambda run: run.op.SetSingleShape(24, 288, 32))),
    ("init-missing", "Iterate before Init", launch(lambda run: run.op.Iterate())),
    ("init-twice", "Init twice", launch(init_twice)),
    ("after-end", "End twice", launch(end_twice)),
    ("tiling-invalid", "a tile of 512 x 80 for L0C",
     launch(lambda run: run.op.Init(small_tiling(baseM=512, baseN=80, baseK=16, stepKa=9, stepKb=9)))),
    ("types", "a tiling for half, an object for bfloat16_t", other_type),
    ("types", "dY of another type than the weight", mixed_types),
    ("types", "float without allow_undocumented", undocumented_type),
    ("types", "a GlobalTensor of another type",
     launch(lambda run: (run.op.Init(run.tiling), run.op.SetWeight(GlobalTensor(np.zeros(9, np.float32)))))),
    ("piece-incomplete", "Iterate before the setters", launch(lambda run: (run.op.Init(run.tiling), run.op.Iterate()))),
    ("rows", "M is not whole dX rows", launch(lambda run: run.begin(singleShapeM=20))),
    ("rows", "more rows than are left", launch(lambda run: first_block(run, run.piece(row0=3), singleShapeM=32))),
    ("argument-order", "SetSingleShape(M, N, K)",
     launch(lambda run: run.begin(singleShapeK=32, singleShapeN=288))),
    ("argument-order", "SetStartPosition(row, depth)", launch(lambda run: run.begin(d=-1, curHoStartIdx=0))),
    ("argument-order", "the tensors of SetGradOutput and SetWeight exchanged", launch(exchange_tensors)),
    ("single-shape", "K of half the channels", launch(lambda run: run.begin(singleShapeK=144))),
    ("single-shape", "N beyond the channels", launch(lambda run: run.begin(singleShapeN=49))),
    ("resident-weights", "two blocks of channels over weights that stay in L1",
     launch(lambda run: run.begin(singleShapeN=32),
            tiling=small_tiling(bl1Pbuffer=1, stepKa=2, stepKb=2, singleCoreCin=16))),
    ("start-position", "a depth that dX does not have", launch(lambda run: run.begin(d=4))),
    ("start-row-pad", "the start row of the last row itself", launch(lambda run: run.begin(curHoStartIdx=5))),
    ("start-row-pad", "start row 0 for the whole plane",
     launch(lambda run: first_block(run, singleShapeM=48, curHoStartIdx=0))),
    ("start-row-pad", "the dX row as start row, the dY pointer right", launch(row_alone)),
    ("start-row-pad", "the dX row as start row, first piece", launch(row_for_both)),
    ("grad-output-offset", "the dY pointer of another row", launch(lambda run: first_block(run, offsetA=3 * 128))),
    ("depth-twice", "the depth in the dY pointer",
     launch(lambda run: first_block(run, run.piece(d=2), offsetA=2 * 2 * 6 * 8 * 16))),
    ("weight-offset", "a weight pointer inside a group", launch(lambda run: first_block(run, offsetB=256))),
    ("weight-offset", "channels beyond the weight",
     launch(lambda run: first_block(run, run.piece(group=2), singleShapeN=32))),
    ("depth-twice", "the depth in the output pointer",
     launch(lambda run: first_block(run, run.piece(d=2), output=2 * 3 * 6 * 8 * 16))),
    ("output-offset", "the output pointer of another group",
     launch(lambda run: first_block(run, output=6 * 8 * 16))),
    ("block-lost", "Iterate twice without GetTensorC", launch(iterate_twice)),
    ("block-lost", "End with a block in L0C", launch(end_with_a_block)),
    ("no-block", "GetTensorC before Iterate", launch(take_before_iterate)),
    ("block-taken", "GetTensorC twice", launch(take_twice)),
    ("first-iter", "the next piece without isFirstIter_", launch(forget_first_iter)),
    ("first-iter", "Iterate again after it returned False", launch(iterate_on)),
    ("workspace", "NCDHW blocks written to dX itself", launch(plain_output)),
    ("workspace", "NCDHW: IterateAll into dX", launch(iterate_all_into_dx)),
    ("not-transposed", "NCDHW: the next block before TransposeBlock", launch(forget_transpose)),
    ("not-transposed", "NCDHW: End with a single block that was not transposed", launch(end_without_transpose)),
    ("workspace", "TransposeBlock from another workspace", launch(another_workspace)),
    ("operand-overwritten", "two cores with one workspace slot", launch(the_slot_of_another_core)),
    ("operand-overwritten", "GetTensorC into dY", launch(overwrite_dy)),
    ("end-early", "Init, then End", launch(lambda run: (run.op.Init(run.tiling), run.op.End()))),
    ("end-early", "End in the middle of a piece", launch(end_in_mid_piece)),
    ("end-early", "End after the setters of the next piece", launch(end_after_setters)),
    ("end-missing", "the coverage is checked before End", launch(coverage_before_end)),
    ("types", "SetInputType(NCDHW) on the host, gradInputType NDC1HWC0", launch(host_and_kernel)),
    ("no-block", "TransposeBlock before GetTensorC", launch(transpose_too_early)),
    ("not-zeroed", "enAtomic=1 into memory that is not zero", launch(add_to_anything)),
    ("not-zeroed", "initOutputFlag = 1, output not zeroed",
     launch(lambda run: first_block(run), tiling=small_tiling(initOutputFlag=1))),
    ("written-twice", "the same piece twice", launch(write_twice)),
    ("never-written", "the last piece left out", launch(leave_one_out)),
    ("argument-order", "Filter: SetSingleShape(M, K, N)",
     filter_begin(lambda op, dy, x, t: op.SetSingleShape(20, 48, 432))),
    ("input-offset", "Filter: the X pointer of row 0 for dY row 3",
     filter_begin(lambda op, dy, x, t: filter_block(op, dy, x, t, 3))),
    ("not-zeroed", "Filter: dW not zeroed", filter_begin(filter_block)),
]


def message_of(provoke: Callable[[], None]) -> tuple[str, str]:
    """Return the name and the message of the mistake."""
    try:
        provoke()
    except ascendc.Misuse as error:
        return error.mistake, str(error)
    raise AssertionError("nothing was refused")


def table() -> str:
    """Return the Markdown table of the documentation."""
    lines = ["| what was done | mistake | message |", "|---|---|---|"]
    for _, what, provoke in PROVOKED:
        mistake, message = message_of(provoke)
        lines.append(f"| {what} | `{mistake}` | {message} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
