"""Calls of aten::convolution_backward on CUDA tensors as prepared calls: from their addresses to launches in C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...problem import Plan
from .aten_backward import (
    DB,
    DW,
    DX,
    DY,
    BackwardCall,
    Question,
    W,
    X,
    compute_on_cuda,
    parts_of,
    result_format,
    result_strides,
    through_api,
)
from .tensors import native, torch_functions

# Places of a plan's operands and results among the tensors of a call. A transposed convolution exchanges x and dy.
OPERANDS = {"grad_output": DY, "input": X, "weight": W}
RESULTS = {"input": DX, "weight": DW, "bias": DB}
OPERANDS_TRANSPOSED = {"grad_output": X, "input": DY, "weight": W}
RESULTS_TRANSPOSED = {"output": DX, "weight": DW, "bias": DB}


def places_of(plan: Plan, transposed: bool) -> list[int]:
    """Which tensors of the call a plan takes, in the order of its operands and results."""
    problem = plan.problem
    operands, results = (OPERANDS_TRANSPOSED, RESULTS_TRANSPOSED) if transposed else (OPERANDS, RESULTS)
    if problem.wrt == "bias":  # the sums of dy, whatever dy is to the other plans
        return [DY, DB]
    return [*(operands[name] for name in problem.operands), *(results[name] for name in problem.results)]


def tensor_strides(call: BackwardCall) -> list[tuple[int, ...]]:
    """Strides of dy, x, w and of the gradients of x, w and bias as torch would return them."""
    memory_format = result_format(call)
    return [*(tuple(tensor.stride()) for tensor in call.tensors), result_strides(call.input.shape, memory_format),
            result_strides(call.weight.shape, memory_format), (1,)]


def wanted_calls(call: BackwardCall, asked: Question) -> list[tuple[Plan, list[int], list[tuple[int, ...]]]]:
    """The plans of a call, the places of their tensors and their strides."""
    strides = tensor_strides(call)
    found = []
    for part in parts_of(asked):
        places = places_of(part.plan, asked.transposed)
        found.append((part.plan, places, [strides[place] for place in places]))
    return found


def prepared_on_cuda(call: BackwardCall, asked: Question) -> Any | None:
    """The call for the native core to serve; None where it goes through the public functions.

    So does a dy that lies otherwise than the results, because a copy of it is faster.
    """
    if native is None or not lies_as_the_results(call):
        return None
    device = call.input.get_device()
    asked = asked._replace(compute=compute_on_cuda(call))
    calls = []
    for plan, places, strides in wanted_calls(call, asked):
        prepared = plan.prepared(strides, device)
        if prepared is None:
            return None
        calls.append((prepared, places))
    return native.CudaBackward(calls, new_results(call), torch_functions(), through_api, while_as_exact(call))


def while_as_exact(call: BackwardCall) -> Callable[[], bool] | None:
    """Whether torch wants float32 as exact as now: a program may change that between two calls."""
    if call.input.dtype != torch.float32:
        return None
    rounded: Callable[[], bool] = torch._C._get_cudnn_allow_tf32
    return rounded if rounded() else lambda: not rounded()


def lies_as_the_results(call: BackwardCall) -> bool:
    dy = call.grad_output
    return dy.dim() == 3 or dy.is_contiguous(memory_format=result_format(call))


def new_results(call: BackwardCall) -> Sequence[Any]:
    """Size, strides and dtype of each gradient that is wanted."""
    shapes = (call.input.shape, call.weight.shape, call.grad_output.shape[1:2])
    return tuple((tuple(shape), strides, call.input.dtype) if wanted else None
                 for shape, strides, wanted in zip(shapes, tensor_strides(call)[3:], call.output_mask))
