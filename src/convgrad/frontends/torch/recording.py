"""Calls of the public functions on tensors that PyTorch follows: they go through the operators.

`convgrad.conv(x, w)` of tensors that require gradients is differentiable, and what `make_fx` or `torch.func` trace
holds the operators, in any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import Order, Recorded
from . import functional  # noqa: F401  it completes the operators
from .geometry import plain
from .operators import ops
from .tensors import TORCH_DTYPES


def record(asked: Recorded, arrays: dict[str, Any]) -> Sequence[Tensor]:
    """The results of a problem by the operators, from and to the caller's axis orders."""
    problem = asked.problem
    conv = problem.conv
    geometry = plain(conv.stride, [pad for pair in conv.padding for pad in pair], conv.dilation, conv.groups)
    tail = (*geometry[:3], conv.groups, TORCH_DTYPES[problem.out_dtype])
    if "output" in problem.results and problem.out_dtype != problem.dtype:
        raise ValueError("the tensors are recorded (they require gradients, or a program is traced), which does not go "
                         f"with out_dtype={problem.out_dtype!r} for {problem.dtype}: detach them first")
    given = {name: array if order is None else array.permute(order)
             for (name, array), order in zip(arrays.items(), asked.operand_orders)}
    compute = {
        "output": lambda: ops.convolution(given["input"], given["weight"], None, *geometry),
        "input": lambda: ops.input_grad(given["grad_output"], given["weight"], conv.in_size, *tail),
        "weight": lambda: ops.weight_grad(given["grad_output"], given["input"], conv.kernel_size, *tail),
        "bias": lambda: ops.bias_grad(given["grad_output"], tail[-1])}
    return [in_order(compute[wrt](), order) for wrt, order in zip(problem.results, asked.result_orders)]


def in_order(result: Tensor, order: Order) -> Tensor:
    """A canonical result in the axis order of the caller."""
    return result if order is None else result.permute([order.index(place) for place in range(len(order))])
