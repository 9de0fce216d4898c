"""Launching: compile once per specialisation, then call the compiled kernel with nothing in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.driver import driver

INTERPRETED: bool = bool(knobs.runtime.interpret)


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
    """One kernel of a plan: `describe(*tensors)` gives the launch, asked once per set of strides and alignments."""

    kernel: Any
    describe: Callable[..., Launch]
    ready: dict[Any, tuple[Any, Any, tuple[Any, ...]]] = field(default_factory=dict)

    def __call__(self, *tensors: Any) -> None:
        key = tuple((t.data_ptr() & 15, t.stride(), t.get_device()) for t in tensors)
        found = self.ready.get(key)
        if found is not None:
            compiled, leading, arguments = found
            compiled(*(leading(*tensors) if leading else tensors), *arguments,
                     stream=driver.active.get_current_stream(key[0][2]))
            return
        launch = self.describe(*tensors)
        if 0 in launch.grid:
            return
        options = {} if INTERPRETED else launch.options
        first = launch.leading(*tensors) if launch.leading else tensors
        compiled = self.kernel[launch.grid](*first, *launch.scalars, **launch.constants, **options)
        if not INTERPRETED:
            grid = (*launch.grid, 1, 1)[:3]
            names = self.kernel.arg_names[len(first) + len(launch.scalars):]
            fixed = (*launch.scalars, *(launch.constants[name] for name in names))
            self.ready[key] = (compiled[grid], launch.leading, fixed)


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


def device_of(tensor: Any) -> Any:
    """Context in which launches go to the tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else torch.no_grad()


if INTERPRETED:
    from .interpreter import correct_interpreter

    correct_interpreter()
