"""Weight gradients added where the optimizer wants them: to `weight.main_grad` in float32, beside 16-bit weights.

Training in bf16 over several micro-batches sums the weight gradients in float32. PyTorch makes a 16-bit gradient first,
rounds it, and adds the copy to the float32 sum. Here each gradient is computed in float32 and added once, unrounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .geometry import Geometry, Transposed
from .operators import ops
from .scaled import checked_main_grad


def accumulate_main_grad(model: nn.Module) -> nn.Module:
    """Let the convolution layers of `convgrad.torch` in a model add their weight and bias gradients to `main_grad`.

    Parameters that have no `main_grad` get one of zeros, float32. Their `grad` stays None; an optimizer reads
    `main_grad` and sets it to zero. Returns the model.

    Examples
    --------
    >>> import torch, convgrad.torch
    >>> layer = convgrad.torch.accumulate_main_grad(convgrad.torch.Conv1d(1, 1, 2, bias=False, dtype=torch.bfloat16))
    >>> for _ in range(2):
    ...     layer(torch.ones(1, 1, 3, dtype=torch.bfloat16)).sum().backward()
    >>> layer.weight.main_grad
    tensor([[[4., 4.]]])
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "adds_to_main_grad")]
    if not layers:
        raise ValueError("the model has no convolution layer of convgrad.torch: nothing would be accumulated")
    for layer in layers:
        for parameter in (layer.weight, layer.bias):
            if parameter is not None and getattr(parameter, "main_grad", None) is None:
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        layer.adds_to_main_grad = True
    return model


def main_grads(weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Where the gradients of two parameters go, None where one needs none."""
    found = []
    for name, parameter in (("weight", weight), ("bias", bias)):
        target = None
        if parameter is not None and parameter.requires_grad:
            target = getattr(parameter, "main_grad", None)
            if target is None:
                raise ValueError(f"{name}.main_grad is gone: call accumulate_main_grad again, or zero it in place")
            checked_main_grad(target, parameter.shape)
        found.append(target)
    return found[0], found[1]


class IntoMainGrad(Function):
    """A convolution whose backward adds the gradients of weight and bias to tensors, and returns that of the input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry,
                targets: tuple[Tensor | None, Tensor | None]) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.geometry, ctx.targets = geometry, targets
        result: Tensor = ops.convolution(input, weight, bias, *geometry)
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = (tensor.to(grad.dtype) for tensor in ctx.saved_tensors)  # autocast ran the forward in grad's
        geometry: Geometry = ctx.geometry
        for_weight, for_bias = ctx.targets
        dx = None
        if ctx.needs_input_grad[0]:
            dx = ops.convolution_backward(grad, input, weight, None, *geometry, [True, False, False])[0]
        if for_weight is not None:
            inner = Transposed.of(geometry)
            pair = (input, inner.kept(grad)) if geometry.transposed else (grad, input)
            plain = inner.geometry if geometry.transposed else geometry
            ops.add_weight_grad_(for_weight, *pair, *plain[:3], plain.groups)
        if for_bias is not None:
            ops.add_bias_grad_(for_bias, grad)
        return dx, None, None, None, None
