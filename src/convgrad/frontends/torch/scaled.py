"""Operators for what aten has no words for: FP8 operands with scales, and gradients added to a main gradient.

They have no derivatives of their own: the layers of `fp8.py` and `main_grad.py` call them in their backward passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import api
from .geometry import Geometry, Ints, checked_shapes, plain
from .operators import (
    TAIL,
    check_dtypes,
    checked_input_grad,
    checked_weight_grad,
    fake,
    keywords,
    library,
    name_of,
    new_result,
    on_devices,
    placed,
)

REST = f"{TAIL}, SymInt groups, ScalarType out_dtype, str? compute=None) -> Tensor"
SCHEMAS = (
    f"scaled_convolution(Tensor input, Tensor input_scale, Tensor weight, Tensor weight_scale, {REST}",
    "scaled_input_grad(Tensor grad_output, Tensor grad_output_scale, Tensor weight, Tensor weight_scale, "
    f"SymInt[] input_size, {REST}",
    "scaled_weight_grad(Tensor grad_output, Tensor grad_output_scale, Tensor input, Tensor input_scale, "
    f"SymInt[] kernel_size, {REST}",
    f"add_weight_grad_(Tensor(a!) main_grad, Tensor grad_output, Tensor input, {TAIL}, SymInt groups) -> ()",
    "add_bias_grad_(Tensor(a!) main_grad, Tensor grad_output) -> ()",
)


def refusing(operator: Any) -> Any:
    """The Autograd kernel of an operator without a derivative: a lost gradient must not go unnoticed."""
    def kernel(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in arguments):
            raise RuntimeError(f"{operator} has no derivative: call it under torch.no_grad(), or on detached tensors")
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    return kernel


for schema in SCHEMAS:
    library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    name = schema.partition("(")[0]
    library.impl(name, refusing(getattr(torch.ops.convgrad, name).default), "Autograd")


class Tail:
    """What stands behind the tensors and sizes of a scaled operator."""

    def __init__(self, stride: Ints, padding: Ints, dilation: Ints, groups: int, out_dtype: torch.dtype,
                 compute: str | None = None) -> None:
        self.geometry = plain(stride, padding, dilation, groups)
        self.dtype = out_dtype
        self.keywords = {**keywords(self.geometry), "out_dtype": name_of(out_dtype), "compute": compute}


def check_scales(**scales: Tensor) -> None:
    for name, scale in scales.items():
        if scale.dtype != torch.float32 or scale.numel() != 1:
            raise TypeError(f"{name} must be one float32 number, got {scale.dtype} of shape {tuple(scale.shape)}")


def output_shape(input: Tensor, weight: Tensor, geometry: Geometry) -> Ints:
    check_dtypes(input=input, weight=weight)
    checked_shapes({"input": input.shape, "weight": weight.shape}, geometry)
    return (input.shape[0], weight.shape[0], *geometry.output_size(input.shape[2:], weight.shape[2:]))


@on_devices("scaled_convolution")
def scaled_convolution(input: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor,
                       *rest: Any) -> Tensor:
    tail = Tail(*rest)
    check_scales(input_scale=input_scale, weight_scale=weight_scale)
    output_shape(input, weight, tail.geometry)
    return placed(api.conv(input, weight, scales={"input": input_scale, "weight": weight_scale}, **tail.keywords),
                  input, weight)


@fake("scaled_convolution")
def scaled_convolution_fake(input: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor,
                            *rest: Any) -> Tensor:
    tail = Tail(*rest)
    return new_result(output_shape(input, weight, tail.geometry), tail.dtype, input, weight)


@on_devices("scaled_input_grad")
def scaled_input_grad(grad_output: Tensor, grad_output_scale: Tensor, weight: Tensor, weight_scale: Tensor,
                      input_size: Ints, *rest: Any) -> Tensor:
    tail = Tail(*rest)
    check_scales(grad_output_scale=grad_output_scale, weight_scale=weight_scale)
    checked_input_grad(grad_output, weight, input_size, tail.geometry)
    scales = {"grad_output": grad_output_scale, "weight": weight_scale}
    return placed(api.input_grad(grad_output, weight, tuple(input_size), scales=scales, **tail.keywords),
                  grad_output, weight)


@fake("scaled_input_grad")
def scaled_input_grad_fake(grad_output: Tensor, grad_output_scale: Tensor, weight: Tensor, weight_scale: Tensor,
                           input_size: Ints, *rest: Any) -> Tensor:
    tail = Tail(*rest)
    shape = checked_input_grad(grad_output, weight, input_size, tail.geometry)
    return new_result(shape, tail.dtype, grad_output, weight)


@on_devices("scaled_weight_grad")
def scaled_weight_grad(grad_output: Tensor, grad_output_scale: Tensor, input: Tensor, input_scale: Tensor,
                       kernel_size: Ints, *rest: Any) -> Tensor:
    tail = Tail(*rest)
    check_scales(grad_output_scale=grad_output_scale, input_scale=input_scale)
    checked_weight_grad(grad_output, input, kernel_size, tail.geometry)
    scales = {"grad_output": grad_output_scale, "input": input_scale}
    return placed(api.weight_grad(grad_output, input, tuple(kernel_size), scales=scales, **tail.keywords),
                  grad_output, input)


@fake("scaled_weight_grad")
def scaled_weight_grad_fake(grad_output: Tensor, grad_output_scale: Tensor, input: Tensor, input_scale: Tensor,
                            kernel_size: Ints, *rest: Any) -> Tensor:
    tail = Tail(*rest)
    shape = checked_weight_grad(grad_output, input, kernel_size, tail.geometry)
    return new_result(shape, tail.dtype, grad_output, input)


# --- accumulation -----------------------------------------------------------------------------------------------------

def checked_main_grad(main_grad: Tensor, shape: Ints | None = None) -> None:
    if main_grad.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"main_grad must be float32 or float64, got {main_grad.dtype}")
    if shape is not None and tuple(main_grad.shape) != tuple(shape):
        raise ValueError(f"main_grad has shape {tuple(main_grad.shape)}, but the gradient has {tuple(shape)}")


@on_devices("add_weight_grad_")
def add_weight_grad_(main_grad: Tensor, grad_output: Tensor, input: Tensor, *rest: Any) -> None:
    geometry = plain(*rest)
    checked_main_grad(main_grad)
    kernel = tuple(main_grad.shape[2:])
    checked_main_grad(main_grad, checked_weight_grad(grad_output, input, kernel, geometry))
    api.weight_grad(grad_output, input, kernel, out=main_grad, accumulate=True, **keywords(geometry))


@fake("add_weight_grad_")
def add_weight_grad_fake(main_grad: Tensor, grad_output: Tensor, input: Tensor, *rest: Any) -> None:
    checked_main_grad(main_grad, checked_weight_grad(grad_output, input, main_grad.shape[2:], plain(*rest)))


@on_devices("add_bias_grad_")
def add_bias_grad_(main_grad: Tensor, grad_output: Tensor) -> None:
    checked_main_grad(main_grad, (grad_output.shape[1],))
    api.bias_grad(grad_output, out=main_grad, accumulate=True)


@fake("add_bias_grad_")
def add_bias_grad_fake(main_grad: Tensor, grad_output: Tensor) -> None:
    checked_main_grad(main_grad, (grad_output.shape[1],))
