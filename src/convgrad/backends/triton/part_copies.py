"""Launches that write float32 tensors as parts (see parts.py)."""

from __future__ import annotations

import math
from typing import Any

from ...problem import Problem
from .geometry import needs_wide, strides_of, three
from .launch import Launch, Step, power_of_two
from .parts import split_kernel

PART_BYTES = 2
# Products of parts, highest first: high*high, high*middle, middle*high, middle*middle, then high*low and low*high.
# A middle part is at most 2^-8 of a number, a low one 2^-17: so three products leave out up to 2^-16 (middle*middle)
# and 2 * 2^-17, four the latter, in units of 2^-24 of a product's magnitude. All six leave out nothing that counts.
LEFT_OUT = {3: 512, 4: 256}
FEW_PRODUCTS = 3
OTHER_ERRORS = 40  # units left for the sums themselves


def products_needed(problem: Problem) -> int:
    """How many products of parts keep the error bound of a problem, whatever its numbers."""
    # NOTE: of f(L) only the part that grows: the rest is for the roundings of the sums.
    allowed = 8 + 2 * math.sqrt(problem.conv.reduction_length(problem.wrt)) - OTHER_ERRORS
    return next((products for products, left_out in LEFT_OUT.items() if left_out <= allowed), 6)


def parts_of(products: int) -> int:
    return 3 if products == 6 else 2


def with_axis(extents: tuple[int, int, int], axis: int, value: int) -> tuple[int, int, int]:
    """Extents with that of one axis replaced."""
    return (*extents[:axis], value, *extents[axis + 1:])  # type: ignore[return-value]


def split_step(part_count: int, padded: int, block: tuple[int, int, int], axis: int = 0, first: int = 0,
               stack: str = "") -> Step:
    """Split a block of float32 images into parts: step(source, parts); it begins at row `first` of an axis.

    `stack`: for which operand of as many products the parts are stored (see parts.py); none where each is stored once.
    """
    def launch(source: Any, parts: Any) -> Launch:
        channels = source.shape[1]
        sn, sc, *s = strides_of(source)
        bc = min(64, power_of_two(channels))
        bp = 4096 // bc
        pixels = padded * math.prod(block)
        return Launch((-(-pixels // bp), -(-channels // bc)),
                      (source.shape[0], padded, channels, *block, *with_axis((0, 0, 0), axis, first),
                       *three(tuple(source.shape[2:]), 1), sn, sc, *s),
                      {"PARTS": part_count, "STACK": stack, "FIRST": channels > 1 and sc != 1,
                       "WIDE": needs_wide(source), "BP": bp, "BC": bc}, 4, 1)

    return Step(split_kernel, launch)
