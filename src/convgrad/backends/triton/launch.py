"""Launches: what a kernel is compiled for and started with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs

from .descriptors import BoxDescriptor
from .direct import understands
from .packed_adds import compiled_without
from .recording import launch_at_once

INTERPRETED: bool = bool(knobs.runtime.interpret)
current = threading.local()  # of this thread: .recording (see replay.py), .only_compile: a Share, where nothing is run


class Share:
    """Every `of`-th launch of a plan, from number `first` on, is compiled here; others elsewhere."""

    def __init__(self, first: int = 0, of: int = 1) -> None:
        self.first, self.of = first, of
        self.seen = 0

    def has_next(self) -> bool:
        """Whether the next launch of the plan is in this share."""
        self.seen += 1
        return (self.seen - 1) % self.of == self.first


@dataclass(frozen=True)
class Launch:
    """Everything about one kernel launch but its pointers."""

    grid: tuple[int, ...]
    scalars: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    leading: Callable[..., tuple[Any, ...]] | None = None  # makes the first kernel arguments from the tensors
    registers: int | None = None  # most registers of a thread, where the compiler should not choose

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is asked for."""
        asked = {"num_warps": self.warps, "num_stages": self.stages}
        return asked if self.registers is None else {**asked, "maxnreg": self.registers}


@dataclass
class Step:
    """One kernel of a plan: `describe(*tensors)` gives the launch.

    Within a recording (see replay.py) the launch is added to a prepared call, and nothing is started.
    """

    kernel: Any
    describe: Callable[..., Launch]

    def __call__(self, *tensors: Any) -> None:
        launch = self.describe(*tensors)
        if 0 in launch.grid:
            return
        first = launch.leading(*tensors) if launch.leading else tensors
        if INTERPRETED:
            self.kernel[launch.grid](*first, *launch.scalars, **launch.constants)
            return
        share = getattr(current, "only_compile", None)
        if share is not None:
            if share.has_next():
                self.compiled(first, launch)
            return
        compiled = self.compiled(first, launch)
        recording = getattr(current, "recording", None)
        if not understands(compiled):
            if recording is not None:
                recording.complete = False
                return
            assert not any(isinstance(value, BoxDescriptor) for value in first), "boxes are for our own launches only"
            self.kernel[launch.grid](*first, *launch.scalars, **launch.constants, **launch.options)
            return
        names = self.kernel.arg_names[len(first) + len(launch.scalars):]
        arguments = (*first, *launch.scalars, *(launch.constants[name] for name in names))
        if recording is not None:
            recording.add(compiled, launch.grid, arguments)
        else:
            launch_at_once(compiled, launch.grid, arguments)

    def compiled(self, first: tuple[Any, ...], launch: Launch) -> Any:
        """The kernel, compiled for these arguments."""
        return compiled_without(self.kernel, lambda: self.kernel.warmup(
            *first, *launch.scalars, grid=launch.grid, **launch.constants, **launch.options))


def aligned_strides(strides: Sequence[int], limit: int = 16) -> tuple[int, tuple[int, ...]]:
    """The largest power of two up to `limit` that divides all strides, and the strides divided by it.

    The kernels multiply it back in as a constant, so that the compiler sees which vector loads are aligned.
    """
    align = limit
    while align > 1 and any(stride % align for stride in strides):
        align //= 2
    return align, tuple(stride // align for stride in strides)


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return int(triton.next_power_of_2(max(1, value)))


if INTERPRETED:
    from .interpreter import correct_interpreter

    correct_interpreter()
