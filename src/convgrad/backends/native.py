"""The CPU backend: C++ kernels chosen for the instruction set of the machine (see native/README.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _native
from ..numbers import storage_dtype
from ..problem import COMPUTE_MODES, DTYPES, Plan, Problem, Unsupported, axis_order
from ..scaled import ALIGNMENT, Three, factor, scaled_plan

NAME = "native"
UNLIMITED = 2**62
MOST_THREADS = 256  # max_threads in native/conv.h: more are never used

# The numbering of the enums Wrt, Dtype and Compute in native/conv.h and native/isa.h.
WRT_BIT = {"output": 1, "input": 2, "weight": 4, "bias": 8}
DTYPE_CODE = {name: code for code, name in enumerate(DTYPES)}
COMPUTE_CODE = {"f64": 0, "f32": 1, "hf32": 2, "hf32_even": 3, "hf32_10": 4, "tf32": 4, "hf32_10_even": 5, "bf16": 6,
                "f16": 7, "fp8": 1}  # sums of FP8 products in full are within the wider error that fp8 allows
assert set(COMPUTE_CODE) == set(COMPUTE_MODES)


def plan(problem: Problem, *, max_workspace_bytes: int | None = None, num_threads: int | None = None) -> Plan:
    if problem.device != "cpu":
        raise Unsupported(f"runs on the cpu, not on {problem.device}")
    num_threads = None if num_threads is None else min(num_threads, MOST_THREADS)
    if problem.scaled:
        return scaled_plan(problem, lambda part, room: plan(part, max_workspace_bytes=room, num_threads=num_threads),
                           NativeSums(problem, num_threads or get_num_threads()), max_workspace_bytes)
    if "input" in problem.results and len(problem.results) > 1:
        raise Unsupported(f"wrt={problem.wrt!r} is computed one result after the other")
    conv = problem.conv
    itemsize = DTYPES[problem.dtype][1]
    missing = 3 - conv.axes
    low = tuple(pair[0] for pair in conv.padding)
    spatial = [(filler,) * missing + values for filler, values in (
        (1, conv.in_size), (1, conv.out_size), (1, conv.kernel_size), (1, conv.stride), (1, conv.dilation), (0, low))]
    nominal = [dense_strides(conv.input_shape, axis_order(problem.layout, conv.axes), itemsize),
               dense_strides(conv.weight_shape, axis_order(problem.weight_layout, conv.axes, weights=True), itemsize),
               dense_strides(conv.output_shape, axis_order(problem.layout, conv.axes), itemsize)]
    numbers = (sum(WRT_BIT[wrt] for wrt in problem.results),
               conv.batch, conv.in_channels, conv.out_channels, conv.groups,
               *(value for row in spatial for value in row),
               DTYPE_CODE[problem.dtype], DTYPE_CODE[problem.out_dtype], COMPUTE_CODE[problem.compute],
               *(stride for row in nominal for stride in row), num_threads or 0,
               UNLIMITED if max_workspace_bytes is None else max_workspace_bytes)
    try:
        chosen = _native.plan(numbers, conv.axes, storage_dtype(problem.dtype), storage_dtype(problem.out_dtype))
    except RuntimeError as error:
        raise Unsupported(str(error)) from None
    return Plan(problem, NAME, chosen.kernel, chosen.run, chosen.workspace_bytes,
                (f"instruction set {_native.isa()}, {chosen.threads} threads", *chosen.notes), numbers=numbers)


class NativeSums:
    """See scaled.Sums."""

    most_bytes = 8 * 2**20  # they should stay in the caches until they are multiplied

    def __init__(self, problem: Problem, threads: int) -> None:
        self.types = (DTYPE_CODE["float64" if problem.dtype == "float64" else "float32"],
                      DTYPE_CODE[problem.out_dtype])
        self.threads = threads

    def memory(self, workspace: Any, size: int, like: Any) -> tuple[Any, Any]:
        given = np.empty(size + ALIGNMENT - 1, np.uint8) if workspace is None else workspace
        begin = -given.ctypes.data % ALIGNMENT
        return given[begin:begin + size], None if workspace is None else given[begin + size:]

    def view(self, memory: Any, shape: tuple[int, ...], order: tuple[int, ...], format_name: str) -> Any:
        return memory.view(format_name).reshape(shape).transpose(order)

    def store(self, sums: Any, result: Any, scales: Three) -> None:
        _native.scale(sums, result, self.types, factor(*scales), self.threads)


def dense_strides(shape: tuple[int, ...], order: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides, in canonical order and normalised to three spatial axes, of a dense array in some axis order."""
    strides = [0] * len(shape)
    step = itemsize
    for axis in sorted(range(len(shape)), key=lambda axis: -order[axis]):
        strides[axis] = step
        step *= max(1, shape[axis])
    return (*strides[:2], *(step,) * (5 - len(shape)), *strides[2:])


def set_num_threads(threads: int) -> None:
    """Threads that plans use when they are not told; 0 goes back to the default (the CPUs this process may use)."""
    _native.set_num_threads(min(threads, MOST_THREADS))


def get_num_threads() -> int:
    threads: int = _native.get_num_threads()
    return threads
