"""Compare a result of the model with the plain gradient and name the first wrong block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...numbers import dtype_name
from ...problem import Conv, Problem, Unsupported
from ...verify import Wrong, exact_results, magnitudes, wrong_bound
from .tiling_struct import TConv3DBackpropInputTiling
from .trace import COLUMNS, row
from .walk import Block

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Difference:
    """The first element that is wrong, and the block of the trace that wrote it."""

    wrong: Wrong
    block: Block | None

    def __str__(self) -> str:
        if self.block is None:
            return f"{self.wrong}; no block of the trace covers it"
        cells = ", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, row(self.block)))
        return f"{self.wrong}; its block: {cells}"


def conv_of(t: TConv3DBackpropInputTiling) -> Conv:
    """Return the forward convolution that a tiling belongs to; Unsupported if output padding hides it."""
    conv = Conv(t.batch, t.cin, t.cout, (t.di, t.hi, t.wi), (t.dk, t.hk, t.wk), (t.strideD, t.strideH, t.strideW),
                (t.dilationD, t.dilationH, t.dilationW),
                ((t.padFront, t.padBack), (t.padUp, t.padDown), (t.padLeft, t.padRight)))
    if conv.out_size != (t.dout, t.ho, t.wo):
        raise Unsupported(f"the forward convolution of {conv.in_size} gives {conv.out_size}, dY is "
                          f"{(t.dout, t.ho, t.wo)}: an output padding of a whole stride has no plain gradient")
    return conv


def check_against_reference(dx: Array, dy: Array, w: Array, tiling: TConv3DBackpropInputTiling,
                            trace: Iterable[Block] = ()) -> Difference | None:
    """Compare `dx` with the exact gradient.

    Returns
    -------
    Difference or None
        The first element outside the error bound with its block of `trace`; None if every element is right.
    """
    problem = Problem(conv_of(tiling), "input", dtype_name(dx.dtype) or str(dx.dtype))
    operands = {"grad_output": dy, "weight": w}
    wrong = wrong_bound(problem, "input", dx, exact_results(problem, operands)[0], magnitudes(problem, operands)[0])
    if wrong is None:
        return None
    return Difference(wrong, next((block for block in trace if covers(block, wrong.index, tiling.wi)), None))


def covers(block: Block, element: tuple[int, ...], width: int) -> bool:
    n, c, d, h, w = element
    first, last = (place[0] * width + place[1] for place in (block.first, block.last))
    return ((block.batch, block.depth) == (n, d) and block.channels[0] <= c <= block.channels[1]
            and first <= h * width + w <= last)
