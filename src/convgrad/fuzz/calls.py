"""The public functions as ways to run a problem: which one, what it is given, and its results in canonical order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import api
from ..call import exchanged
from ..guarded import order_of
from ..problem import DTYPES, Problem
from .case import Case

Call = Callable[[list[Any], list[Any], dict[str, float], Any], tuple[Any, ...]]
# What the operands and results of a convolution are called in the transposed one.
TRANSPOSED = {"grad_output": "input", "weight": "weight", "input_grad": "output"}
TRANSPOSED_BACKWARD = {"grad_output": "input", "input": "grad_output", "weight": "weight", "output": "input_grad",
                       "weight_grad": "weight_grad"}


def call_of(case: Case, backend: str, threads: int | None) -> Call:
    """Takes operands and results as canonical views, scales by the convolution's names, and a workspace."""
    problem, (way, *given) = case.problem, case.call
    permuted, with_out = "permuted" in given, "out" in given

    def laid(array: Any, name: str) -> Any:
        """A canonical view in the order of axes that the caller of the function has."""
        order = order_of(problem, name)
        if permuted or name == "bias":
            return array
        places = tuple(order.index(place) for place in range(len(order)))
        return array.permute(places) if hasattr(array, "permute") else array.transpose(places)

    def canonical(array: Any, name: str) -> Any:
        if not permuted and name != "bias":
            order = order_of(problem, name)
            array = array.permute(order) if hasattr(array, "permute") else array.transpose(order)
        if not hasattr(array, "permute"):
            return array
        from ..frontends.torch import tensors

        return tensors.to_numpy(array, problem.out_dtype)

    def call(inputs: list[Any], outputs: list[Any], scales: dict[str, float], workspace: Any) -> tuple[Any, ...]:
        operands = {name: laid(array, name) for name, array in zip(problem.operands, inputs)}
        outs = {wrt: laid(array, wrt) for wrt, array in zip(problem.results, outputs)} if with_out else {}
        options = {**options_of(problem, way, permuted), "backend": backend, "num_threads": threads,
                   "max_workspace_bytes": case.limit}
        if "workspace" in given:
            options["workspace"] = workspace
        if problem.scaled:
            names = TRANSPOSED if problem.wrt == "input" else TRANSPOSED_BACKWARD
            options["scales"] = {names[name] if way == "transposed" else name: scale for name, scale in scales.items()}
        results = WAYS[way](problem, operands, outs, options)
        return tuple(canonical(result, wrt) for wrt, result in zip(problem.results, results))

    return call


def options_of(problem: Problem, way: str, permuted: bool) -> dict[str, Any]:
    conv = problem.conv
    options: dict[str, Any] = {
        "stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation, "groups": conv.groups,
        "compute": problem.compute, "out_dtype": problem.out_dtype,
        "dtype": problem.dtype if DTYPES[problem.dtype][1] == 1 else None}
    if not permuted:
        options["layout"] = problem.layout
        options["weight_layout"] = exchanged(problem.weight_layout) if way == "transposed" else problem.weight_layout
    return options


def function(problem: Problem, operands: dict[str, Any], outs: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    options["out"] = outs.get(problem.wrt)
    conv = problem.conv
    if problem.wrt == "output":
        return [api.conv(operands["input"], operands["weight"], **options)]
    if problem.wrt == "input":
        return [api.input_grad(operands["grad_output"], operands["weight"], conv.in_size, **options)]
    if problem.wrt == "weight":
        return [api.weight_grad(operands["grad_output"], operands["input"], conv.kernel_size, **options)]
    for name in ("stride", "padding", "dilation", "groups", "compute", "weight_layout"):
        options.pop(name, None)
    return [api.bias_grad(operands["grad_output"], **options)]


def backward(problem: Problem, operands: dict[str, Any], outs: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """conv_backward takes all three operands, also those that the asked results do not need."""
    three = ("input", "weight", "bias")
    some = next(iter(operands.values()))
    for name in ("grad_output", "input", "weight"):
        if name not in operands:
            operands[name] = unread(problem, name, some, "layout" not in options)
    results = api.conv_backward(operands["grad_output"], operands["input"], operands["weight"],
                                output_mask=[wrt in problem.results for wrt in three],
                                out=[outs.get(wrt) for wrt in three] if outs else None, **options)
    return [result for result in results if result is not None]


def unread(problem: Problem, name: str, like: Any, permuted: bool) -> Any:
    """An operand for its shape only."""
    shape = problem.shape_of_operand(name)
    order = tuple(range(len(shape))) if permuted else order_of(problem, name)
    laid = tuple(shape[order.index(place)] for place in range(len(shape)))
    if hasattr(like, "new_zeros"):
        return like.new_zeros(laid)
    return np.zeros(laid, like.dtype)


def transposed(problem: Problem, operands: dict[str, Any], outs: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    conv = problem.conv
    options["output_padding"] = tuple(
        size + low + high - span - (out - 1) * stride for size, (low, high), span, out, stride
        in zip(conv.in_size, conv.padding, conv.span, conv.out_size, conv.stride))
    if problem.wrt == "input":
        return [api.conv_transpose(operands["grad_output"], operands["weight"], out=outs.get("input"), **options)]
    for name in ("input", "grad_output", "weight"):
        if name not in operands:
            operands[name] = unread(problem, name, next(iter(operands.values())), "layout" not in options)
    by_input = problem.wrt == "output"
    results = api.conv_transpose_backward(
        operands["input"], operands["grad_output"], operands["weight"], output_mask=(by_input, not by_input, False),
        out=(outs.get("output"), outs.get("weight"), None) if outs else None, **options)
    return [result for result in results if result is not None]


WAYS = {"function": function, "backward": backward, "transposed": transposed}
