"""Is a result right? Every row of a benchmark is compared with the float64 reference before it is timed.

A small problem is compared element by element. A large one would keep the reference busy for minutes, so its channels
are mixed first: the reference is linear in each operand, so mixing the channels of one operand by a small matrix M and
then computing is the same as computing and then mixing the result. The rows of M are of two kinds:

- unit vectors: a few channels of every group, compared element by element at every position;
- signed sums over runs of 32 channels: every element of the result enters one, so none can be forgotten.

The allowed error is the error bound of the numerical contract, `u_out*|exact| + f(L)*2^-24*sum|a*b|`, mixed by |M|.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..frontends.numpy import from_line
from ..numbers import encode, error_bound, storage_dtype
from ..plan import plan
from ..problem import Conv, Problem, axis_order

FULL_FLOPS = 4e8  # up to here the reference computes every element (well under a second)
SUM_RUN = 32      # channels per signed sum: short enough that one wrong bf16 element stands out of the rounding of 32
Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


class WrongResult(Exception):
    """A result that breaks the error bound; such a row is reported and never timed."""


@dataclass(frozen=True)
class Verified:
    """How far a result was from the reference, in units of the error bound, and how it was compared."""

    worst: float
    how: str


def memory_order(layout: str, axes: int, weights: bool = False) -> list[int]:
    """Return the canonical axes in the order in which `layout` has them."""
    position = axis_order(layout, axes, weights)
    return sorted(range(axes + 2), key=position.__getitem__)


def in_layout(array: Array, layout: str, weights: bool = False) -> Array:
    """Return a contiguous copy with the axes in the order of `layout`, at a cache line as torch's arrays are."""
    view = array.transpose(memory_order(layout, array.ndim - 2, weights))
    copy = from_line(view.shape, view.dtype)
    copy[...] = view
    return copy


def canonical(array: Any, layout: str, weights: bool = False) -> Any:
    """Return a view in canonical axis order of an array whose axes are in the order of `layout`."""
    position = axis_order(layout, array.ndim - 2, weights)
    return array.transpose(position) if isinstance(array, np.ndarray) else array.permute(position)


def random_operands(problem: Problem, seed: int = 0) -> dict[str, Array]:
    """Return channels-first operands, uniform in [-1, 1) and rounded to the operand type of `problem`."""
    random = np.random.default_rng(seed)
    operands = {}
    for name in problem.operands:
        values = random.random(problem.shape_of_operand(name), dtype=np.float32)
        values *= 2
        values -= 1
        # One rounding from float32; only hifloat8, which NumPy stores as bytes, needs our own encoder.
        operands[name] = encode(values, problem.dtype) if problem.dtype == "hifloat8" else \
            values.astype(storage_dtype(problem.dtype), copy=False)
    return operands


def mixing_matrix(channels: int, whole: bool, seed: int) -> Float64:
    """Return M: the identity, or a few unit rows above signed sums over runs of SUM_RUN channels."""
    if whole or channels <= 4:
        return np.eye(channels)
    random = np.random.default_rng(seed)
    picked = sorted({0, channels - 1, int(random.integers(1, channels - 1))})
    runs = -(-channels // SUM_RUN)
    matrix = np.zeros((len(picked) + runs, channels))
    matrix[np.arange(len(picked)), picked] = 1
    signs = random.choice((-1.0, 1.0), channels)
    for run in range(runs):
        part = slice(run * SUM_RUN, (run + 1) * SUM_RUN)
        matrix[len(picked) + run, part] = signs[part]
    return matrix


def mix(array: Array, axis: int, groups: int, matrix: Float64) -> Float64:
    """Return float64 `array` with the channels of every group on `axis` replaced by `matrix` @ channels."""
    rows, channels = matrix.shape
    if rows == channels and np.array_equal(matrix, np.eye(rows)):
        return array.astype(np.float64)
    moved = np.moveaxis(array, axis, 0)
    parts = [matrix @ moved[first:first + channels].reshape(channels, -1).astype(np.float64)
             for first in range(0, groups * channels, channels)]
    mixed = np.concatenate(parts).reshape(groups * rows, *moved.shape[1:])
    return cast(Float64, np.moveaxis(mixed, 0, axis))


@dataclass(frozen=True)
class Cut:
    """Which channels of a problem are mixed: on which operand, and where they are in the result."""

    operand: str
    operand_axis: int
    result_axis: int
    channels: int  # per group
    conv_side: str  # "in" or "out": the channels of the Conv they are

    @staticmethod
    def of(problem: Problem) -> Cut:
        conv = problem.conv
        if problem.wrt == "output":
            return Cut("weight", 0, 1, conv.group_out, "out")
        if problem.wrt == "input":
            return Cut("weight", 1, 1, conv.group_in, "in")
        if problem.wrt == "weight":  # has both kinds of channels: mix the more numerous
            if conv.group_out >= conv.group_in:
                return Cut("grad_output", 1, 0, conv.group_out, "out")
            return Cut("input", 1, 1, conv.group_in, "in")
        raise ValueError(f"wrt={problem.wrt!r}: only conv, input_grad and weight_grad are benchmarked")

    def smaller(self, conv: Conv, rows: int) -> Conv:
        """The same geometry with `rows` instead of `channels` in every group."""
        if self.conv_side == "in":
            return replace(conv, in_channels=conv.groups * rows)
        return replace(conv, out_channels=conv.groups * rows)


def bound_coefficients(problem: Problem) -> tuple[float, float, float]:
    """The error bound is linear: a constant, and what multiplies |exact| and sum|a*b|."""
    zero, one = np.zeros(()), np.ones(())
    constant = float(error_bound(problem, problem.wrt, zero, zero))
    return (constant, float(error_bound(problem, problem.wrt, one, zero)) - constant,
            float(error_bound(problem, problem.wrt, zero, one)) - constant)


class Expected:
    """What the float64 reference says about one problem on given operands; checks results in any layout."""

    def __init__(self, problem: Problem, operands: dict[str, Any], seed: int = 0) -> None:
        self.problem = problem
        self.cut = cut = Cut.of(problem)
        self.matrix = mixing_matrix(cut.channels, problem.flops <= FULL_FLOPS, seed)
        rows = len(self.matrix)
        sums = int((np.abs(self.matrix).sum(axis=1) > 1).sum())
        self.how = "every element" if rows == cut.channels else \
            f"{rows - sums} of {cut.channels} channels element by element, all in {sums} signed sums"
        self.conv = cut.smaller(problem.conv, rows)
        self.exact = self.computed(operands, self.matrix, False)
        self.magnitude = self.computed(operands, np.abs(self.matrix), True)

    def computed(self, operands: dict[str, Any], matrix: Float64, magnitude: bool) -> Any:
        """The reference on mixed operands, or the same sums over absolute values."""
        mixed = {}
        for name in self.problem.operands:
            values = abs(operands[name]) if magnitude else operands[name]
            mixed[name] = self.mixed(values, matrix, self.cut.operand_axis, name == "weight") \
                if name == self.cut.operand else self.float64(values)
        return self.reference(mixed)

    def reference(self, operands: dict[str, Any]) -> Any:
        question = Problem(self.conv, self.problem.wrt, "float64")
        result = np.empty(self.conv.shape_of(self.problem.wrt))
        plan(question, backend="reference").run(tuple(operands[name] for name in question.operands), (result,), None)
        return result

    def float64(self, array: Any) -> Any:
        return array.astype(np.float64)

    def mixed(self, array: Any, matrix: Float64, axis: int, weights: bool) -> Any:
        # The I axis of a weight holds the channels of one group, every other channel axis those of all groups.
        return mix(array, axis, 1 if weights and axis == 1 else self.problem.conv.groups, matrix)

    def check(self, result: Any, kernel: str = "the result") -> Verified:
        """Compare a result (a canonical view); raise WrongResult, which names the kernel, where it breaks the bound."""
        wrt, shape = self.problem.wrt, self.problem.conv.shape_of(self.problem.wrt)
        if tuple(result.shape) != shape:
            raise WrongResult(f"{kernel} has shape {tuple(result.shape)}, not {shape}")
        got = self.mixed(result, self.matrix, self.cut.result_axis, wrt == "weight")
        size = self.mixed(abs(result), np.abs(self.matrix), self.cut.result_axis, wrt == "weight")
        constant, of_size, of_magnitude = bound_coefficients(self.problem)
        with np.errstate(invalid="ignore"):
            units = abs(got - self.exact) / (constant + of_size * size + of_magnitude * self.magnitude)
        if units.size == 0 if isinstance(units, np.ndarray) else units.numel() == 0:
            return Verified(0.0, self.how)
        units[units != units] = math.inf  # NaN is never right here: the operands are finite
        worst = float(units.max())
        if worst > 1:
            where = tuple(map(int, np.unravel_index(int(units.argmax()), tuple(units.shape))))
            raise WrongResult(f"{kernel} is off by {worst:.3g} times the error bound at {where} "
                              f"({self.how}): got {float(got[where]):.9g}, exact {float(self.exact[where]):.9g}")
        return Verified(worst, self.how)
