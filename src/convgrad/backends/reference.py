"""The definition: convolution and its gradients in float64 NumPy, one tap at a time, one rounding at the end."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks import check_counts
from ..numbers import decode, dtype_name, encode, round_operand, storage_dtype
from ..problem import Conv, Plan, Problem, Unsupported
from ..scaled import factor, scales_of

Array = npt.NDArray[Any]
NAME = "reference"
LONGEST_CHAIN = 256  # taps that are added one after the other; their sums are added after that (docs/contract.md)


def plan(problem: Problem, *, max_workspace_bytes: int | None = None, num_threads: int | None = None) -> Plan:
    if problem.device != "cpu":
        raise Unsupported(f"the reference runs on the cpu, not on {problem.device}")

    def run(operands: tuple[Any, ...], results: tuple[Array, ...], workspace: Any = None) -> None:
        check_arrays(problem, operands, results)
        stored = dict(zip(problem.operands, operands))
        values = {name: decode(array, problem.dtype) for name, array in stored.items()}
        with np.errstate(invalid="ignore", over="ignore"):  # Inf and NaN are values like others here
            for wrt, result in zip(problem.results, results):
                exact = solve(problem.conv, wrt, values, problem.compute)
                if problem.scaled:
                    exact = exact * factor(*map(float, scales_of(problem, wrt)(operands)))
                store(result, encode(exact, problem.out_dtype))

    return Plan(problem, NAME, "float64_numpy", run, notes=("float64 NumPy, one tap at a time",))


def check_arrays(problem: Problem, operands: tuple[Any, ...], results: tuple[Array, ...]) -> None:
    """Refuse arrays that do not fit the problem."""
    check_counts(problem, operands, results)
    for name, array in zip(problem.operands, operands):
        check_array(array, name, problem.shape_of_operand(name), problem.dtype)
    for wrt, array in zip(problem.results, results):
        check_array(array, f"the result with respect to {wrt}", problem.conv.shape_of(wrt), problem.out_dtype)
        if not array.flags.writeable:
            raise ValueError(f"the result with respect to {wrt} is read-only")


def check_array(array: Any, name: str, shape: tuple[int, ...], format_name: str) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy.ndarray, got {type(array).__name__}")
    if array.dtype != storage_dtype(format_name) and dtype_name(array.dtype) != format_name:
        raise TypeError(f"{name} must have dtype {storage_dtype(format_name)}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} must have the canonical shape {shape}, got {array.shape}")


def store(result: Array, encoded: Array) -> None:
    """Copy encoded values into the result; en_dtypes' hifloat8 results receive the codes themselves."""
    (result.view(np.uint8) if encoded.dtype == np.uint8 else result)[...] = encoded


def solve(conv: Conv, wrt: str, values: dict[str, Array], compute: str = "f64") -> Array:
    """Derivative of T(x, w, dy) = sum x*w*dy with respect to `wrt`, from float64 operands by name."""
    if wrt == "bias":  # a sum, not a product: the compute mode does not touch it
        # NOTE: NumPy adds pairwise along the last axis only; over several axes it would make one long chain.
        by_channel = np.moveaxis(values["grad_output"], 1, 0)
        lines = by_channel.reshape(conv.out_channels, conv.batch * math.prod(conv.out_size))
        total: Array = np.ascontiguousarray(lines).sum(axis=1)
        return total
    values = {name: round_operand(array, compute) for name, array in values.items()}
    # Channels split by group: x (N G C i), w (G K C taps), dy (N G K o).
    n, g = conv.batch, conv.groups
    x_shape = (n, g, conv.group_in, *conv.in_size)
    w_shape = (g, conv.group_out, conv.group_in, *conv.kernel_size)
    y_shape = (n, g, conv.group_out, *conv.out_size)
    x = values["input"].reshape(x_shape) if wrt != "input" else np.zeros(x_shape)
    w = values["weight"].reshape(w_shape) if wrt != "weight" else np.zeros(w_shape)
    y = values["grad_output"].reshape(y_shape) if wrt != "output" else np.zeros(y_shape)
    sums, earlier = {"output": y, "input": x, "weight": None}[wrt], None
    for number, tap in enumerate(itertools.product(*(range(k) for k in conv.kernel_size))):
        if sums is not None and number and number % LONGEST_CHAIN == 0:
            earlier = sums.copy() if earlier is None else earlier + sums
            sums[...] = 0
        at_x, at_y = slices_of(conv, tap)
        at_w: Any = (..., *tap)
        w_tap = w[at_w]  # G K C
        x_tap, y_tap = x[at_x], y[at_y]
        pixels = x_tap.shape[3:]
        x_flat = x_tap.reshape(n, g, conv.group_in, math.prod(pixels))
        y_flat = y_tap.reshape(n, g, conv.group_out, math.prod(pixels))
        if wrt == "output":
            y[at_y] += (w_tap @ x_flat).reshape(n, g, conv.group_out, *pixels)
        elif wrt == "input":
            x[at_x] += (w_tap.swapaxes(1, 2) @ y_flat).reshape(n, g, conv.group_in, *pixels)
        else:
            w[at_w] = (y_flat @ x_flat.swapaxes(2, 3)).sum(axis=0)
    result: Array = {"output": y, "input": x, "weight": w}[wrt]
    return (result if earlier is None else result + earlier).reshape(conv.shape_of(wrt))


def slices_of(conv: Conv, tap: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where one tap lands: the slices of x (N G C i) and of dy (N G K o) that it links."""
    at_x: list[slice] = [slice(None)] * 3
    at_y: list[slice] = [slice(None)] * 3
    for axis, k in enumerate(tap):
        first, last = conv.tap_range(axis, k)
        stride = conv.stride[axis]
        start = first * stride + k * conv.dilation[axis] - conv.padding[axis][0]
        at_x.append(slice(start, start + (last - first) * stride, stride) if last > first else slice(0, 0))
        at_y.append(slice(first, last))
    return tuple(at_x), tuple(at_y)
