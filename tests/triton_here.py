"""What tests of the GPU backend share: where its kernels run here, and whole numbers, whose sums are exact."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from convgrad import Problem
from convgrad.plan import plan

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = not INTERPRETED and torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_triton = pytest.mark.skipif(not INTERPRETED and not ON_GPU, reason="needs a GPU or TRITON_INTERPRET=1")
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="Gluon kernels run on a GPU only")


def channels_last(array: Any) -> Any:
    """A canonical array as a bfloat16 tensor whose channels are neighbours in memory."""
    order = (0, *range(2, array.ndim), 1)
    return torch.from_numpy(np.ascontiguousarray(array.transpose(order))).bfloat16().permute(
        *(order.index(axis) for axis in range(array.ndim)))


def integers_and_result(text: str) -> tuple[Problem, list[Any], Any]:
    """A problem, small whole numbers as its operands, and the exact result, all in float64."""
    problem = Problem.parse(text)
    random = np.random.default_rng(3)
    operands = [random.integers(-3, 4, problem.shape_of_operand(name)).astype(np.float64) for name in problem.operands]
    expected = np.empty(problem.conv.shape_of(problem.wrt))
    plan(problem.with_(dtype="float64", compute="f64", out_dtype="float64", device="cpu"), backend="reference").run(
        tuple(operands), (expected,), None)
    return problem, operands, expected


def integers_and_results(problem: Problem, special: bool) -> tuple[list[Any], list[Any]]:
    """Small whole numbers as float32 operands, with some Inf and NaN if `special`, and each of the exact results."""
    random = np.random.default_rng(3)
    operands = [random.integers(-2, 3, problem.shape_of_operand(name)).astype(np.float32) for name in problem.operands]
    if special:
        for operand in operands:
            operand.reshape(-1)[random.integers(0, operand.size, 2)] = np.inf, np.nan
    expected = []
    for result in problem.results:
        part = problem.with_(wrt=result, dtype="float32", compute="", out_dtype="float32", device="cpu")
        expected.append(np.empty(problem.conv.shape_of(result), np.float32))
        chosen = [operand for name, operand in zip(problem.operands, operands) if name in part.operands]
        plan(part, backend="reference").run(tuple(chosen), (expected[-1],), None)
    return operands, expected


def integers_on_gpu(problem: Problem, largest: int = 3) -> tuple[Any, ...]:
    """Whole numbers as operands on the GPU, channels last in memory."""
    generator = torch.Generator(device="cuda").manual_seed(5)
    operands = []
    for name in problem.operands:
        shape = problem.shape_of_operand(name)
        stored = torch.randint(-largest, largest + 1, (shape[0], *shape[2:], shape[1]), device="cuda",
                               generator=generator).to(getattr(torch, problem.dtype))
        operands.append(stored.permute(0, -1, *range(1, len(shape) - 1)))
    return tuple(operands)


def box_at(tensor: Any, start: tuple[int, ...], size: tuple[int, ...]) -> Any:
    """What the copy engine brings: a box of a tensor, zeros outside."""
    assert start[-1] % 8 == 0, "it reads from multiples of 16 bytes"
    out = np.zeros(size)
    inner = [(max(0, -s), min(n, extent - s)) for s, n, extent in zip(start, size, tensor.shape)]
    if all(low < high for low, high in inner):
        out[tuple(slice(low, high) for low, high in inner)] = tensor[tuple(
            slice(s + low, s + high) for s, (low, high) in zip(start, inner))]
    return out
