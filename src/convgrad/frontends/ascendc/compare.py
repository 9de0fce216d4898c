"""Compare a result of the model with the plain gradient and name the first wrong block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...numbers import dtype_name, error_bound
from ...plan import plan
from ...problem import Conv, Problem, Unsupported
from .tiling_struct import TConv3DBackpropInputTiling
from .trace import COLUMNS, row
from .walk import Block

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Difference:
    """The first element that is wrong, and the block that should have written it."""

    wrong: int  # how many elements differ
    element: tuple[int, ...]  # n, c, d, h, w
    got: float
    expected: float
    block: Block | None

    def __str__(self) -> str:
        n, c, d, h, w = self.element
        text = (f"{self.wrong} elements differ, the first at n={n} c={c} d={d} h={h} w={w}: got {self.got:g}, expected "
                f"{self.expected:g}")
        if self.block is None:
            return text + "; no block of the trace covers it"
        return text + "; its block: " + ", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, row(self.block)))


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
    """Return the first element of `dx` outside the error bound, with its block of the trace; None if all are right."""
    name = dtype_name(dx.dtype)
    problem = Problem(conv_of(tiling), "input", name or str(dx.dtype), "float32")
    chosen = plan(problem, backend="reference")
    exact, magnitude = np.empty(dx.shape, np.float32), np.empty(dx.shape, np.float32)
    chosen.run((dy, w), (exact,), None)
    chosen.run((abs(dy), abs(w)), (magnitude,), None)
    bound = error_bound(problem.with_(out_dtype=name), "input", exact.astype(np.float64), magnitude.astype(np.float64))
    got = dx.astype(np.float64)
    wrong = ~(np.abs(got - exact) <= bound)
    if not wrong.any():
        return None
    first = tuple(int(index[0]) for index in np.nonzero(wrong))
    return Difference(int(wrong.sum()), first, float(got[first]), float(exact[first]),
                      next((block for block in trace if covers(block, first, tiling.wi)), None))


def covers(block: Block, element: tuple[int, ...], width: int) -> bool:
    n, c, d, h, w = element
    first, last = (place[0] * width + place[1] for place in (block.first, block.last))
    return ((block.batch, block.depth) == (n, d) and block.channels[0] <= c <= block.channels[1]
            and first <= h * width + w <= last)
