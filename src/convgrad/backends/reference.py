"""The definition: convolution and its gradients in float64 NumPy, one tap at a time, one rounding at the end."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..numbers import decode, encode, round_operand
from ..problem import Conv, Plan, Problem, Unsupported
from ..scaled import factor, scales_of

Array = npt.NDArray[Any]
NAME = "reference"


def plan(problem: Problem, *, max_workspace_bytes: int | None = None, num_threads: int | None = None) -> Plan:
    if problem.device != "cpu":
        raise Unsupported(f"the reference runs on the cpu, not on {problem.device}")

    def run(operands: tuple[Any, ...], results: tuple[Array, ...], workspace: Any = None) -> None:
        stored = dict(zip(problem.operands, operands))
        values = {name: decode(array, problem.dtype) for name, array in stored.items()}
        with np.errstate(invalid="ignore", over="ignore"):  # Inf and NaN are values like others here
            for wrt, result in zip(problem.results, results):
                exact = solve(problem.conv, wrt, values, problem.compute)
                if problem.scaled:
                    exact = exact * factor(*map(float, scales_of(problem, wrt)(operands)))
                store(result, encode(exact, problem.out_dtype))

    return Plan(problem, NAME, "float64_numpy", run, notes=("float64 NumPy, one tap at a time",))


def store(result: Array, encoded: Array) -> None:
    """Copy encoded values into the result; en_dtypes' hifloat8 results receive the codes themselves."""
    (result.view(np.uint8) if encoded.dtype == np.uint8 else result)[...] = encoded


def solve(conv: Conv, wrt: str, values: dict[str, Array], compute: str = "f64") -> Array:
    """Derivative of T(x, w, dy) = sum x*w*dy with respect to `wrt`, from float64 operands by name."""
    if wrt == "bias":  # a sum, not a product: the compute mode does not touch it
        total: Array = values["grad_output"].sum(axis=(0, *range(2, conv.axes + 2)))
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
    for tap in itertools.product(*(range(k) for k in conv.kernel_size)):
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
    result: Array = {"output": y, "input": x, "weight": w}[wrt].reshape(conv.shape_of(wrt))
    return result


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
