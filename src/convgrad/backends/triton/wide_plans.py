"""Weight gradients of few channels or small groups as part of a wider, dense one, of which the lines kernel sums all.

`fold` neighbouring positions of dy (stride x fold of x) on the last axis, or the channels of several groups, become the
channels of the wider problem (see cells.py). Its gradient holds every weight's sum in `fold` parts, which
`collect_kernel` adds. Every entry of the wider gradient is a sum over true products only, so Inf and NaN stay where
they belong. With few output channels dy and x may change places, so that the wider operand is read once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...problem import Problem
from . import line_plans
from .bias_parts import with_bias
from .box_plans import channels_fit, tensors_fit, whole_channels
from .cells import collect_kernel
from .geometry import Geometry, strides_of
from .kernel import Kernel, Prepared, Query
from .launch import Launch, Step
from .line_tiles import LineTile
from .split_k import with_sums
from .tiles import reduce_tile


@dataclass(frozen=True)
class Widening:
    """How a problem is part of a wider one."""

    fold: int
    GP: int
    swapped: bool

    def __str__(self) -> str:
        return (f"{self.fold} positions x {self.GP} groups as channels"
                f"{', dy and x exchanged' if self.swapped else ''}")


def turned_round(geo: Geometry) -> Geometry:
    """The same weight gradient with dy and x exchanged (stride 1), which turns the kernel around."""
    pad: Any = tuple(kernel - 1 - pad for kernel, pad in zip(geo.kernel, geo.pad))
    return replace(geo, x=geo.y, y=geo.x, pad=pad, group_in=geo.group_out, group_out=geo.group_in)


def lowest_cell(geo: Geometry, way: Widening) -> int:
    """The cell of x, counted from that of dy, that the first tap meets."""
    if geo.groups > 1:
        return 0
    pad = geo.kernel[2] - 1 - geo.pad[2] if way.swapped else geo.pad[2]
    return -pad // ((1 if way.swapped else geo.stride[2]) * way.fold)


def wider(geo: Geometry, way: Widening) -> Geometry:
    """The geometry of the wider problem."""
    if geo.groups > 1:
        return replace(geo, groups=geo.groups // way.GP, group_in=geo.group_in * way.GP,
                       group_out=geo.group_out * way.GP)
    low = lowest_cell(geo, way)
    if way.swapped:
        geo = turned_round(geo)
    stride, reach = geo.stride[2], (geo.kernel[2] - 1) * geo.dilation[2] - geo.pad[2]
    high = (stride * (way.fold - 1) + reach) // (stride * way.fold)

    def outer(values: tuple[int, ...], last: int) -> Any:
        return (*values[:2], last)

    return replace(
        geo, group_in=geo.group_in * stride * way.fold, group_out=geo.group_out * way.fold,
        x=outer(geo.x, geo.x[2] // (stride * way.fold)), y=outer(geo.y, geo.y[2] // way.fold),
        kernel=outer(geo.kernel, high - low + 1), stride=outer(geo.stride, 1), dilation=outer(geo.dilation, 1),
        pad=outer(geo.pad, -low), common=outer(geo.common, 1), inverse=outer(geo.inverse, 0))


def ways(problem: Problem, geo: Geometry) -> Iterator[Widening]:
    """The widenings that the tensors' shapes allow and that fill a tile better."""
    if geo.groups > 1:
        for count in range(2, geo.groups + 1):
            if geo.groups % count == 0 and count * min(geo.group_in, geo.group_out) >= 32 and \
                    count * max(geo.group_in, geo.group_out) <= 128:
                yield Widening(1, count, False)
        return
    if not problem.layout.endswith(("LC", "WC")):
        return
    for fold in (1, 2, 4, 8, 16):
        for swapped in (False, True):
            if swapped and (geo.phases > 1 or set(geo.dilation) != {1}):
                continue
            stride = geo.stride[2]
            narrow, widest = sorted((geo.group_out * fold, geo.group_in * stride * fold))
            if fold * stride > 1 and geo.y[2] % fold == 0 and geo.x[2] % (stride * fold) == 0 and narrow % 8 == 0 and \
                    widest % 8 == 0 and narrow >= 16 and widest <= 512:
                yield Widening(fold, 1, swapped)


def supports(problem: Problem, geo: Geometry) -> str | None:
    """Small groups, or few channels on one side."""
    fewest, most = sorted((geo.group_in, geo.group_out))
    if not (most <= 32 if geo.groups > 1 else fewest <= 16 and most <= 128) or geo.taps == 1:
        return "groups of at most 32 channels, or at most 16 channels on one side and 128 on the other, several taps"
    return None if whole_channels(problem) else "16-bit operands with channels last only"


@dataclass(frozen=True)
class WideTile:
    """How a problem is part of a wider one, and the tile of that."""

    way: Widening
    lines: LineTile

    @property
    def seconds(self) -> float:
        return self.lines.seconds

    @classmethod
    def of(cls, fold: int, GP: int, swapped: bool, **lines: Any) -> WideTile:
        return cls(Widening(fold, GP, swapped), LineTile(**lines))


def tiles(query: Query) -> Iterator[WideTile]:
    geo, limit = query.geo, query.limit
    for way in ways(query.problem, geo):
        wide = wider(geo, way)
        seen = views(geo, way, *query.operands)
        if not channels_fit(query.problem, wide) or seen is None or not tensors_fit(*seen):
            continue
        size = 4 * wide.groups * wide.group_out * wide.group_in * wide.taps
        for tile in line_plans.all_lines(wide, limit, query.gpu):
            if tile.splits * size <= limit:
                yield WideTile(way, tile)


def views(geo: Geometry, way: Widening, dy: Any, x: Any) -> tuple[Any, Any] | None:
    """dy and x as the wider problem sees them; None where positions do not follow each other without gaps."""
    if geo.groups > 1:
        return dy, x
    stride = 1 if way.swapped else geo.stride[2]
    if way.swapped:
        dy, x = x, dy
    seen = []
    for tensor, fold in ((dy, way.fold), (x, way.fold * stride)):
        channels = tensor.shape[1]
        if fold > 1:
            if (channels > 1 and tensor.stride(1) != 1) or tensor.stride(-1) != channels:
                return None
            shape = (*tensor.shape[:1], channels * fold, *tensor.shape[2:-1], tensor.shape[-1] // fold)
            steps = (*tensor.stride()[:1], 1, *tensor.stride()[2:-1], channels * fold)
            tensor = tensor.as_strided(shape, steps)
        seen.append(tensor)
    return seen[0], seen[1]


def build(query: Query, tile: WideTile) -> Prepared:
    geo, way, splits = query.geo, tile.way, tile.lines.splits
    wide = wider(geo, way)
    step, collect = line_plans.line_weight(wide, tile.lines), collect_step(geo, way, wide, splits)
    bias_rows = 0 if way.swapped else way.fold * line_plans.bias_rows(wide, tile.lines)

    def write(dy: Any, x: Any, partial: Any, result: Any, *bias: Any) -> None:
        seen = views(geo, way, dy, x)
        assert seen is not None
        step(*seen, partial.permute(0, 1, 5, 2, 3, 4), *bias[:1])
        collect(partial, result, *bias)

    shape = (splits, wide.groups * wide.group_out, *wide.kernel, wide.group_in)
    return with_sums(query, f"wide_{query.short}_{way.fold}x{way.GP}_split{splits}", f"{tile.lines}; {way}", shape,
                     (bias_rows, geo.groups * geo.group_out), write)


def collect_step(geo: Geometry, way: Widening, wide: Geometry, splits: int, folded: bool = True) -> Step:
    """The launch that adds the partial sums that belong to each weight; not `folded`: taps are still taps."""
    size = geo.groups * geo.group_out * geo.group_in * geo.taps
    plain = geo.groups > 1 or not (folded or way.swapped)
    inner = wide.group_in
    steps = (math.prod(wide.kernel) * inner, 1, wide.kernel[1] * wide.kernel[2] * inner, wide.kernel[2] * inner, inner)

    def launch(partial: Any, result: Any, *bias: Any) -> Launch:
        terms, elements = reduce_tile(size, splits * way.fold)
        terms = max(4, terms // 4)  # addresses take registers
        constants = {**{f"K{axis}": geo.kernel[axis] for axis in range(3)},
                     "T2": 1 if plain or way.swapped else geo.stride[2], "D2": 1 if plain else geo.dilation[2],
                     "P2": 0 if plain else geo.pad[2], "L2": 0 if plain else lowest_cell(geo, way), "KG": geo.group_out,
                     "CG": geo.group_in, "GP": way.GP, "FOLD": way.fold, "SWAPPED": way.swapped, "BS": terms,
                     "BE": elements}
        r_split = wide.groups * wide.group_out * steps[0]
        return with_bias(Launch((-(-size // elements),), (size, splits, r_split, *steps, *strides_of(result)),
                                constants, 4, 1), *bias)

    return Step(collect_kernel, launch)


KERNEL = Kernel("wide", frozenset({"weight"}), supports, lambda query: None, tiles, build, WideTile.of,
                kind=lambda query, tile: (tile.way, tile.lines.axis if tile.lines.NT > 1 else 3, tile.lines.chain))
