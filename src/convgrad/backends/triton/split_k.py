"""Split-K on the host's side: partial weight gradients of several runs in the workspace, added in order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .bias_parts import with_bias
from .geometry import Geometry, strides_of
from .kernel import Operands, Prepared, Query, Run
from .launch import Launch, Step
from .numbers_on_device import scratch
from .part_sums import add_parts_kernel
from .tiles import PROGRAMS, reduce_tile

FEW_PARTS = 8  # that one program of the adding kernel loads at once


def add_step(geo: Geometry, splits: int) -> Step:
    """The kernel that adds `splits` partial weight gradients in order, and a bias gradient's parts where given."""
    size = geo.groups * geo.group_out * geo.group_in * geo.taps
    slabs, be = reduce_tile(size, splits)
    few = splits if splits <= FEW_PARTS else 0
    be = 1024 if few and size >= 2 * 1024 * PROGRAMS else be
    taps = {f"A{axis}": geo.kernel[axis] for axis in range(3)}

    def launch(partial: Any, result: Any, *bias: Any) -> Launch:
        ro, ri, *r = strides_of(result)
        return with_bias(Launch((-(-size // be),), (size, splits, ro, ri, *r),
                                {"INNER": geo.group_in, **taps, "WIDE": size >= 2**31 - 2**12, "FEW": few,
                                 "BS": slabs, "BE": be}, 4, 1), *bias)

    return Step(add_parts_kernel, launch)


def with_sums(query: Query, name: str, note: str, shape: tuple[int, ...], bias_shape: tuple[int, int],
              write: Callable[..., None]) -> Prepared:
    """A weight gradient by write(dy, x, memory of `shape`, result), and of a bias gradient its parts and the result."""
    words = math.prod(shape)
    bias_words = math.prod(bias_shape)

    def run(operands: Operands, results: tuple[Any, ...], workspace: Any) -> None:
        result, *bias = results
        more = bias_words if bias else 0
        memory = scratch(query.problem, workspace, (words + more,), result) if words + more else None
        sums = None if memory is None else memory[:words].view(shape)
        if not bias:
            write(*operands, sums, result)
        elif memory is not None:
            write(*operands, sums, result, memory[words:].view(bias_shape), *bias)

    return Prepared(name, note, 4 * words, run, bias_bytes=4 * bias_words)


def added(query: Query, name: str, note: str, splits: int, bias_shape: tuple[int, int], write: Run | Step) -> Prepared:
    """A weight gradient by write(dy, x, partial gradients of all splits), which are then added, or the one itself."""
    geo = query.geo
    shape: tuple[int, ...] = (splits, geo.groups * geo.group_out, *geo.kernel, geo.group_in)
    shape = shape if splits > 1 or bias_shape[0] else (0,)
    add = add_step(geo, splits)

    def sum_up(dy: Any, x: Any, partial: Any, result: Any, *bias: Any) -> None:
        if partial is None:
            write(dy, x, result)
            return
        write(dy, x, partial, *bias[:1])  # type: ignore[call-arg]
        add(partial, result, *bias)

    return with_sums(query, name, note, shape, bias_shape, sum_up)
