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
from .box_plans import channels_fit, tensors_fit
from .cells import collect_kernel
from .geometry import Geometry, strides_of
from .launch import INTERPRETED, Launch, Step
from .line_plans import LineTile
from .tiles import reduce_tile, workspace_limit
from .tuning import Choice, fields_of


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


def expected_to_pay(geo: Geometry) -> bool:
    """Small groups, or few channels on one side."""
    fewest, most = sorted((geo.group_in, geo.group_out))
    return (most <= 32 if geo.groups > 1 else fewest <= 16 and most <= 128) and geo.taps > 1


def all_wide(problem: Problem, geo: Geometry, max_workspace: int | None) -> Iterator[tuple[Widening, LineTile]]:
    limit = workspace_limit(geo, max_workspace)
    for way in ways(problem, geo):
        wide = wider(geo, way)
        if not channels_fit(problem, wide):
            continue
        size = 4 * wide.groups * wide.group_out * wide.group_in * wide.taps
        for tile in line_plans.all_lines(wide, limit):
            if tile.splits * size <= limit:
                yield way, tile


@dataclass(frozen=True)
class WidePlan:
    """The weight gradient of a problem as part of a wider one: `take` says whether the tensors lie as it needs."""

    geo: Geometry
    way: Widening
    wide: Geometry
    splits: int
    seconds: float
    step: Step  # (dy, x, partial) -> None, of the wider problem
    collect: Step
    note: str
    bias_shape: tuple[int, int] = (0, 0)  # of the partial sums of the bias gradient; no rows where there can be none

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the partial sums."""
        wide = self.wide
        return (self.splits, wide.groups * wide.group_out, *wide.kernel, wide.group_in)

    def views(self, dy: Any, x: Any) -> tuple[Any, Any] | None:
        """dy and x as the wider problem sees them; None where positions do not follow each other without gaps."""
        if self.geo.groups > 1:
            return dy, x
        if self.way.swapped:
            dy, x = x, dy
        seen = []
        for tensor, fold in ((dy, self.way.fold), (x, self.way.fold * self.wide_stride)):
            channels = tensor.shape[1]
            if fold > 1:
                if (channels > 1 and tensor.stride(1) != 1) or tensor.stride(-1) != channels:
                    return None
                shape = (*tensor.shape[:1], channels * fold, *tensor.shape[2:-1], tensor.shape[-1] // fold)
                steps = (*tensor.stride()[:1], 1, *tensor.stride()[2:-1], channels * fold)
                tensor = tensor.as_strided(shape, steps)
            seen.append(tensor)
        return seen[0], seen[1]

    @property
    def wide_stride(self) -> int:
        return 1 if self.way.swapped else self.geo.stride[2]

    def take(self, dy: Any, x: Any) -> bool:
        seen = self.views(dy, x)
        return seen is not None and tensors_fit(*seen)

    def write(self, dy: Any, x: Any, partial: Any, result: Any, *bias: Any) -> None:
        seen = self.views(dy, x)
        assert seen is not None
        self.step(*seen, partial.permute(0, 1, 5, 2, 3, 4), *bias[:1])
        self.collect(partial, result, *bias)


def for_problem(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> WidePlan | None:
    """The plan of the measured choice, or of the cost model; None where nothing fits or another kernel was chosen."""
    if INTERPRETED or (choice is not None and choice["kernel"] != "wide"):
        return None
    if choice is not None:
        fields = fields_of(choice)
        way = Widening(fields.pop("fold"), fields.pop("GP"), fields.pop("swapped"))
        return wide_plan(geo, way, LineTile(**fields))
    if not expected_to_pay(geo):
        return None
    best = min(all_wide(problem, geo, max_workspace), key=lambda pair: pair[1].seconds, default=None)
    return None if best is None else wide_plan(geo, *best)


def worth_measuring(problem: Problem, geo: Geometry, count: int = 6) -> list[Choice]:
    """The best tiles of different kinds, as choices."""
    if INTERPRETED or not expected_to_pay(geo):
        return []
    found: list[Choice] = []
    kinds: set[tuple[Any, ...]] = set()
    for way, tile in sorted(all_wide(problem, geo, None), key=lambda pair: pair[1].seconds):
        kind = (way, tile.axis if tile.NT > 1 else 3, tile.chain)
        if kind not in kinds:
            kinds.add(kind)
            values = {**way.__dict__, **tile.__dict__}
            found.append({"kernel": "wide", **{name: list(value) if isinstance(value, tuple) else value
                                               for name, value in values.items()}})
    return found[:count]


def wide_plan(geo: Geometry, way: Widening, tile: LineTile) -> WidePlan:
    wide = wider(geo, way)
    return WidePlan(geo, way, wide, tile.splits, tile.seconds, line_plans.line_weight(wide, tile),
                    collect_step(geo, way, wide, tile.splits), f"{tile}; {way}",
                    (0 if way.swapped else way.fold * line_plans.bias_rows(wide, tile), geo.groups * geo.group_out))


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
