"""Adding the parts of a bias gradient: in a launch of its own, or in the one that adds those of the weight gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .launch import Launch, Step
from .part_sums import reduce_kernel
from .tiles import reduce_tile


def bias_add_step(channels: int, parts: int) -> Step:
    """The kernel that adds partial bias gradients in order."""
    return Step(reduce_kernel, lambda partial, result: Launch(
        (-(-channels // reduce_tile(channels, parts)[1]),), (channels, parts, 1, 1, 1, 1, result.stride(0), 0, 0, 0, 0),
        dict(zip(("BS", "BE"), reduce_tile(channels, parts))), 4, 1))


def with_bias(launch: Launch, partial: Any = None, result: Any = None) -> Launch:
    """A launch whose first tensors are the parts and the result of a weight gradient, with those of a bias gradient."""
    programs, *_ = launch.grid
    if partial is None:
        return replace(launch, scalars=(*launch.scalars, programs, 0, 0, 0),
                       constants={**launch.constants, "BIAS": False, "BBS": 1, "BBE": 1},
                       leading=lambda sums, weights: (sums, weights, sums, weights))
    parts, channels = partial.shape
    terms, elements = reduce_tile(channels, parts)
    return replace(launch, grid=(programs + -(-channels // elements),),
                   scalars=(*launch.scalars, programs, channels, parts, result.stride(0)),
                   constants={**launch.constants, "BIAS": True, "BBS": terms, "BBE": elements})
