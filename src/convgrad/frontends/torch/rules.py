"""Autocast and the counting of floating-point operations, as PyTorch has them for its own convolutions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .operators import library, ops

AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def autocast_kernel(device: str, key: str) -> Any:
    """`convolution` in the type of autocast; float64 stays. The gradients come in the type that the forward had."""
    without: Any = torch._C._ExcludeDispatchKeyGuard
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(value: Any, dtype: torch.dtype) -> Any:
        eligible = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if eligible else value

    def kernel(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with without(keys):
            return ops.convolution.default(*[cast(value, dtype) for value in arguments])

    return kernel


for device, key in AUTOCAST_KEYS.items():
    library.impl("convolution", autocast_kernel(device, key), key)


def products(weight: Any, images: int, positions: Any) -> int:
    """Twice the multiplications of every weight at every position of the smaller activations; padding counts."""
    return 2 * images * math.prod(weight) * math.prod(positions)


@register_flop_formula(ops.convolution)
def convolution_flops(input: Any, weight: Any, bias: Any, *arguments: Any, out_shape: Any = None, **_: Any) -> int:
    return products(weight, input[0], (input if arguments[3] else out_shape)[2:])


@register_flop_formula(ops.convolution_backward)
def convolution_backward_flops(grad_output: Any, input: Any, weight: Any, *arguments: Any, **_: Any) -> int:
    transposed, mask = arguments[4], arguments[-1]
    return products(weight, input[0], (input if transposed else grad_output)[2:]) * (mask[0] + mask[1])


@register_flop_formula(ops.input_grad)
def input_grad_flops(grad_output: Any, weight: Any, *_: Any, **__: Any) -> int:
    return products(weight, grad_output[0], grad_output[2:])


@register_flop_formula(ops.weight_grad)
def weight_grad_flops(grad_output: Any, input: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return products(out_shape, grad_output[0], grad_output[2:])


@register_flop_formula(ops.bias_grad)
def bias_grad_flops(grad_output: Any, *_: Any, **__: Any) -> int:
    return 0  # PyTorch counts products only
