"""Arrays between canaries: memory in any layout and view, where every byte that is no element is watched."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from .numbers import encode, storage_dtype
from .problem import Problem, axis_order
from .verify import POISON

Array = npt.NDArray[Any]
CANARY = 0xC5
GUARD_BYTES = 192


class Damage(AssertionError):
    """A run changed bytes that are not its own."""


@dataclass(frozen=True)
class View:
    """How an array lies in memory, by canonical axes. As a string, such as `offset+gaps01+flipped2`; `plain` is none.

    Broadcast axes have stride 0, which only operands can have.
    """

    offset: bool = False  # it starts one element behind an aligned address
    gaps: tuple[int, ...] = ()  # axes with every second element only
    sliced: tuple[int, ...] = ()  # axes that are part of longer ones
    flipped: tuple[int, ...] = ()  # axes that run backwards
    broadcast: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = ["offset"] * self.offset
        for field in fields(self)[1:]:
            axes = getattr(self, field.name)
            words += [field.name + "".join(map(str, axes))] if axes else []
        return "+".join(words) or "plain"

    @staticmethod
    def parse(text: str) -> View:
        found: dict[str, Any] = {}
        for word in () if text == "plain" else text.split("+"):
            match = re.fullmatch(r"(offset)|(gaps|sliced|flipped|broadcast)([0-4]+)", word)
            if match is None:
                raise ValueError(f"view {text!r}: {word!r} is none of plain, offset, gaps…, sliced…, flipped…, "
                                 "broadcast… followed by axes")
            found[match[1] or match[2]] = True if match[1] else tuple(map(int, match[3]))
        return View(**found)


PLAIN = View()
SLICED_BY = 3  # elements of the longer axis that are no part of the array


class Guarded:
    """An array between canaries. `view` has canonical axis order; memory has the order and the view asked for."""

    def __init__(self, shape: tuple[int, ...], format_name: str, order: tuple[int, ...], view: View = PLAIN) -> None:
        dtype = storage_dtype(format_name)
        size = dtype.itemsize
        strides, total = [0] * len(shape), 1
        for axis in sorted(range(len(shape)), key=lambda axis: -order[axis]):
            if axis in view.broadcast:
                continue
            strides[axis] = total * (2 if axis in view.gaps else 1)
            total = strides[axis] * (max(1, shape[axis]) + (SLICED_BY if axis in view.sliced else 0))
        start = GUARD_BYTES + (size if view.offset else 0)
        self.raw = np.full(start + total * size + GUARD_BYTES, CANARY, np.uint8)
        self.strides = tuple(strides)  # in elements, before any axis is flipped
        self.shape, self.start, self.dtype, self.format = shape, start, dtype, format_name
        self.view: Array = np.ndarray(shape, dtype, self.raw, start, tuple(step * size for step in strides))
        if view.flipped:
            self.view = self.view[tuple(slice(None, None, -1 if axis in view.flipped else 1)
                                        for axis in range(len(shape)))]

    def fill(self, values: Array) -> None:
        self.view[...] = values

    def snapshot(self) -> Array:
        """All bytes with this array's elements blanked: equal before and after a run, or something else was hit."""
        kept = self.view.copy()
        self.view[...] = np.zeros((), self.dtype)
        copy: Array = self.raw.copy()
        self.view[...] = kept
        return copy


def order_of(problem: Problem, name: str) -> tuple[int, ...]:
    """Positions of the canonical axes of an operand or result in the problem's layouts."""
    if name == "bias":
        return (0,)
    weights = name == "weight"
    return axis_order(problem.weight_layout if weights else problem.layout, problem.conv.axes, weights)


def constant_along(array: Array, axes: tuple[int, ...]) -> Array:
    """An array whose elements along some axes are those of their first index, as a broadcast operand's are."""
    first = array[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(array.ndim))]
    return np.ascontiguousarray(np.broadcast_to(first, array.shape)) if array.size else array


class Arena:
    """The memory of one run: operands, poisoned results and a workspace between canaries, and what became of them."""

    def __init__(self, problem: Problem, operands: dict[str, Array], views: Sequence[View],
                 workspace_bytes: int) -> None:
        """`views` are those of the operands, then of the results."""
        self.problem = problem
        placed = iter(views)
        self.inputs = [Guarded(problem.shape_of_operand(name), problem.dtype, order_of(problem, name), next(placed))
                       for name in problem.operands]
        for name, array in zip(problem.operands, self.inputs):
            array.fill(operands[name])
        self.outputs = [Guarded(problem.conv.shape_of(wrt), problem.out_dtype, order_of(problem, wrt), next(placed))
                        for wrt in problem.results]
        for array in self.outputs:
            array.fill(encode(np.full(array.shape, POISON[problem.out_dtype]), problem.out_dtype))
        # Bytes, at an odd address; on a GPU memory is handed out in aligned blocks.
        self.workspace = Guarded((workspace_bytes,), "hifloat8", (0,), View(offset=problem.device == "cpu"))
        self.before = self.snapshots()

    def snapshots(self) -> list[Array]:
        return [*(array.raw.copy() for array in self.inputs),
                *(array.snapshot() for array in (*self.outputs, self.workspace))]

    def check(self) -> None:
        """Raise Damage where bytes of operands, or around results and workspace, have changed."""
        names = [f"of or around the operand {name}" for name in self.problem.operands]
        names += [f"around the {wrt} result" for wrt in self.problem.results] + ["around the workspace"]
        for name, old, new in zip(names, self.before, self.snapshots()):
            if not np.array_equal(old, new):
                raise Damage(f"'{self.problem}': bytes {name} changed")

    def results(self) -> tuple[Array, ...]:
        """Contiguous canonical results."""
        return tuple(array.view.copy(order="C") for array in self.outputs)

    def scales(self, operands: dict[str, Array]) -> tuple[Any, ...]:
        """The problem's scales as a plan takes them: floats, or tensors on the problem's device."""
        if self.problem.device == "cpu":
            return tuple(float(operands[name]) for name in self.problem.scales)
        from .frontends.torch import tensors

        return tuple(tensors.from_numpy(operands[name], "float32") for name in self.problem.scales)

    def lend(self) -> tuple[list[Any], list[Any], Any, Callable[[], None]]:
        """Operands, results and workspace for a run: the views, or tensors on the problem's device with the same bytes
        and strides; and what brings the bytes back afterwards."""
        every = (*self.inputs, *self.outputs, self.workspace)
        if self.problem.device == "cpu":
            lent: list[Any] = [array.view for array in every]
            return lent[:len(self.inputs)], lent[len(self.inputs):-1], lent[-1], lambda: None
        from .frontends.torch import tensors

        memory = [tensors.from_numpy(array.raw, "hifloat8") for array in every]
        lent = [tensors.strided(part[array.start:-GUARD_BYTES], array.shape, array.strides, array.format)
                for part, array in zip(memory, every)]

        def collect() -> None:
            for part, array in zip(memory, every):
                array.raw[...] = tensors.to_numpy(part, "hifloat8")

        return lent[:len(self.inputs)], lent[len(self.inputs):-1], lent[-1], collect
