"""`torch.nn.grad` with convgrad's gradients: the same names and arguments; `padding` may be a pair per axis."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...problem import checked_ints
from .arguments import check_rank, check_tensor, ints, pads
from .operators import ops


def input_gradient(axes: int, input_size: Any, weight: Tensor, grad_output: Tensor,
                   arguments: tuple[Any, ...]) -> Tensor:
    check_tensor(weight, "weight")
    check_tensor(grad_output, "grad_output")
    shape = checked_ints(tuple(input_size), "input_size", axes + 2, 0)
    check_rank(weight, "weight", (axes + 2,), f"output channels, input channels, {axes} spatial")
    tail = tail_of(axes, weight.shape[2:], arguments)
    expected = (grad_output.shape[0], weight.shape[1] * tail[-1])
    if shape[:2] != expected:
        raise ValueError(f"input_size={shape} has batch and channels {shape[:2]}, but grad_output of shape "
                         f"{tuple(grad_output.shape)} and weight of shape {tuple(weight.shape)} in {tail[-1]} groups "
                         f"give {expected}")
    result: Tensor = ops.input_grad(grad_output, weight, shape[2:], *tail)
    return result


def weight_gradient(axes: int, input: Tensor, weight_size: Any, grad_output: Tensor,
                    arguments: tuple[Any, ...]) -> Tensor:
    check_tensor(input, "input")
    check_tensor(grad_output, "grad_output")
    shape = checked_ints(tuple(weight_size), "weight_size", axes + 2, 0)
    check_rank(input, "input", (axes + 2,), f"batch, channels, {axes} spatial")
    check_rank(grad_output, "grad_output", (axes + 2,), f"batch, channels, {axes} spatial")
    tail = tail_of(axes, shape[2:], arguments)
    expected = (grad_output.shape[1], input.shape[1] // tail[-1])
    if shape[:2] != expected:
        raise ValueError(f"weight_size={shape} has channels {shape[:2]}, but grad_output of shape "
                         f"{tuple(grad_output.shape)} and input of shape {tuple(input.shape)} in {tail[-1]} groups "
                         f"give {expected}")
    result: Tensor = ops.weight_grad(grad_output, input, shape[2:], *tail)
    return result


def tail_of(axes: int, kernel: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """stride, padding, dilation and groups as the operators take them."""
    stride, padding, dilation, groups = arguments
    stride, dilation = ints(stride, "stride", axes, 1), ints(dilation, "dilation", axes, 1)
    return stride, pads(padding, axes, kernel, stride, dilation), dilation, ints(groups, "groups", 1, 1)[0]


def conv1d_input(input_size: Any, weight: Tensor, grad_output: Tensor, stride: Any = 1, padding: Any = 0,
                 dilation: Any = 1, groups: int = 1) -> Tensor:
    """Gradient of conv1d with respect to an input of shape `input_size`."""
    return input_gradient(1, input_size, weight, grad_output, (stride, padding, dilation, groups))


def conv1d_weight(input: Tensor, weight_size: Any, grad_output: Tensor, stride: Any = 1, padding: Any = 0,
                  dilation: Any = 1, groups: int = 1) -> Tensor:
    """Gradient of conv1d with respect to a weight of shape `weight_size`."""
    return weight_gradient(1, input, weight_size, grad_output, (stride, padding, dilation, groups))


def conv2d_input(input_size: Any, weight: Tensor, grad_output: Tensor, stride: Any = 1, padding: Any = 0,
                 dilation: Any = 1, groups: int = 1) -> Tensor:
    """Gradient of conv2d with respect to an input of shape `input_size`."""
    return input_gradient(2, input_size, weight, grad_output, (stride, padding, dilation, groups))


def conv2d_weight(input: Tensor, weight_size: Any, grad_output: Tensor, stride: Any = 1, padding: Any = 0,
                  dilation: Any = 1, groups: int = 1) -> Tensor:
    """Gradient of conv2d with respect to a weight of shape `weight_size`."""
    return weight_gradient(2, input, weight_size, grad_output, (stride, padding, dilation, groups))


def conv3d_input(input_size: Any, weight: Tensor, grad_output: Tensor, stride: Any = 1, padding: Any = 0,
                 dilation: Any = 1, groups: int = 1) -> Tensor:
    """Gradient of conv3d with respect to an input of shape `input_size`."""
    return input_gradient(3, input_size, weight, grad_output, (stride, padding, dilation, groups))


def conv3d_weight(input: Tensor, weight_size: Any, grad_output: Tensor, stride: Any = 1, padding: Any = 0,
                  dilation: Any = 1, groups: int = 1) -> Tensor:
    """Gradient of conv3d with respect to a weight of shape `weight_size`."""
    return weight_gradient(3, input, weight_size, grad_output, (stride, padding, dilation, groups))
