"""How long the model itself will take, said before a long run."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from .conv_types import float32, half
from .global_tensor import GlobalTensor
from .kernel import Conv3DBackpropInput, conv_types
from .pieces import split_pieces
from .tiling_struct import TConv3DBackpropInputTiling
from .traffic import estimate

SAY_HOW_LONG = 60.0  # seconds; a longer run is announced

# Slower than any machine we know: a problem that is short at this speed needs no measurement.
PESSIMISTIC_FLOP_PER_SECOND = 2e9
PESSIMISTIC_SECONDS_PER_BLOCK = 5e-4


class LongRun(UserWarning):
    """Said before a run that takes longer than `SAY_HOW_LONG` seconds."""


def announcement(tiling: TConv3DBackpropInputTiling, cores: int = 1) -> str | None:
    """Return the sentence to say before a run of Conv3DBackpropInput, or None if it is short."""
    traffic = estimate(tiling, cores)
    return said_if_long(traffic.flop, traffic.blocks, lambda: model_seconds(tiling, cores))


def said_if_long(flop: int, blocks: int, measure: Callable[[], float]) -> str | None:
    """Return the sentence for a run whose seconds `measure` tells, or None; a surely short run is not measured."""
    if flop / PESSIMISTIC_FLOP_PER_SECOND + blocks * PESSIMISTIC_SECONDS_PER_BLOCK <= SAY_HOW_LONG:
        return None
    seconds = measure()
    if seconds <= SAY_HOW_LONG:
        return None
    return f"this run will take about {seconds:.0f} s: the model computes every block on the CPU"


def model_seconds(tiling: TConv3DBackpropInputTiling, cores: int = 1) -> float:
    """Return about how long `run` takes here: two blocks are run on zeros and timed.

    The first block of a piece also brings the weights into the form of a matrix, the others find them there.
    """
    t = tiling
    dtype = t.element_type or (half if t.c0 == 16 else float32)
    pieces = [piece for piece in split_pieces(t, cores) if not piece.skipped]
    if not pieces:
        return 0.0
    piece = max(pieces, key=lambda candidate: (len(candidate.walk(t).kernel_depths), candidate.rows))
    op = Conv3DBackpropInput(*conv_types(dtype), strict=False, allow_undocumented=True)
    output = GlobalTensor(np.zeros(t.batch * t.output_sample, dtype))
    op.Init(t)
    op.SetSingleShape(piece.singleShapeM, piece.singleShapeK, piece.singleShapeN)
    op.SetStartPosition(piece.d, piece.curHoStartIdx)
    op.SetGradOutput(GlobalTensor(np.zeros(t.batch * t.grad_output_sample, dtype))[piece.offsetA])
    op.SetWeight(GlobalTensor(np.zeros(t.weight_size, dtype))[piece.offsetB])
    times = []
    for _ in range(3):  # with weights, without, without
        op.ctx.isFirstIter_ = True
        start = time.perf_counter()
        op.Iterate()
        op.GetTensorC(output[piece.offsetC])
        times.append(time.perf_counter() - start)
    first, later = times[0], min(times[1:])
    depths = max(1, len(piece.walk(t).kernel_depths))
    traffic = estimate(t, cores)
    return later * traffic.passes / depths + max(0.0, first - later) * len(pieces) * traffic.passes / (
        depths * max(1, traffic.blocks))
