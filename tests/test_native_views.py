"""Operands that are views: axes that a broadcast gives a stride of zero, axes that run backwards, odd distances."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
import pytest

from convgrad import Problem, plan
from convgrad.numbers import storage_dtype
from convgrad.verify import integer_operands

if "native" not in oracle.available_backends():
    pytest.skip("the native module is not built", allow_module_level=True)

# Every family, and what was wrong where a line says so.
PROBLEMS = [
    # the weight of a kernel as large as the image was misread where its taps were one broadcast number
    "conv n1 c2 k5 i3 w3", "input_grad n3 c4 k8 i3x4 w3x4", "conv n2 c3 k16 i2x3x2 w2x3x2 NDHWC",
    # few channels in bf16 with AVX512-BF16 divided by the stride of the input
    "weight_grad n1 c1 k36 i39 w3", "weight_grad n2 c3 k32 i17x17 w4x4 s2x2 p1x1",
    "weight_grad n2 c32 k3 i16x17 w4x4 s2x2 p1x1", "conv n2 c3 k24 i9x10 w3x3 p1x1",
    "input_grad n2 c3 k24 i9x10 w3x3 p1x1", "conv n2 c33 k31 i7x8 w3x3 p1x1",
    "input_grad n2 c33 k31 i7x8 w3x3 s2x2 p1x1", "weight_grad n2 c33 k31 i7x8 w3x3 p1x1",
    "weight_grad n2 c16 k24 i8x8 w2x2 s2x2", "conv n2 c16 k24 i8x8 w2x2 s2x2 NHWC", "conv n2 c24 k16 i6x6 w1x1 NHWC",
    "conv n3 c8 k16 i9 w3 p1 TBC", "conv n2 c32 k32 i9x9 w3x3 p1x1 g32 NHWC",
    "weight_grad n2 c32 k32 i9x9 w3x3 p1x1 g32 NHWC", "input_grad n2 c40 k40 i40 w5 p2 g40",
    "weight_grad n2 c40 k40 i40 w12 p6 g40", "input_grad n2 c32 k64 i7x8 w3x3 p1x1 g8 NHWC",
    "weight_grad n2 c32 k64 i7x8 w3x3 p1x1 g8 NHWC", "bias_grad n2 c1 k5 i6x7 w1x1",
    "weight_grad+bias_grad n2 c5 k7 i6x7 w3x3 p1x1",
]


def parsed(text: str, dtype: str) -> Problem:
    result, sizes = text.split(" ", 1)
    return Problem.parse(f"{result} {dtype} {sizes}")


def broadcast(array: Any, axis: int) -> Any:
    """The first plane of an axis in the place of all."""
    return np.broadcast_to(np.take(array, [0], axis), array.shape)


def backwards(array: Any, axis: int) -> Any:
    return np.flip(np.ascontiguousarray(np.flip(array, axis)), axis)


def oddly(array: Any, axis: int) -> Any:
    """The same values, an odd number of bytes from one to the next along an axis."""
    order = [*(a for a in range(array.ndim) if a != axis), axis]
    step = array.itemsize + 1
    strides, run = [0] * array.ndim, step
    for place in reversed(order):
        strides[place] = run
        run *= array.shape[place]
    memory = np.zeros(run + array.itemsize, np.uint8)
    view: Any = np.ndarray(array.shape, array.dtype, memory, 0, strides)
    view[...] = array
    return view


def views_of(problem: Problem) -> Iterator[tuple[Any, ...]]:
    operands = integer_operands(problem, thin=False)
    stored = [operands[name] for name in problem.operands]
    for place, view in itertools.product(range(len(stored)), (broadcast, backwards, oddly)):
        for axis in range(stored[place].ndim):
            yield (*stored[:place], view(stored[place], axis), *stored[place + 1:])
    yield tuple(np.broadcast_to(array[(0,) * array.ndim], array.shape) for array in stored)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "e4m3"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_views_give_what_copies_give(text: str, dtype: str) -> None:
    problem = parsed(text, dtype)
    chosen, judge = plan(problem, backend="native", num_threads=2), plan(problem, backend="reference")
    for operands in views_of(problem):
        got, expected = (tuple(np.full(problem.conv.shape_of(wrt), 7, storage_dtype(problem.out_dtype))
                               for wrt in problem.results) for _ in range(2))
        chosen.run(operands, got, None)
        judge.run(tuple(np.ascontiguousarray(array) for array in operands), expected, None)
        for mine, theirs in zip(got, expected):
            assert mine.tobytes() == theirs.tobytes(), [(array.shape, array.strides) for array in operands]
