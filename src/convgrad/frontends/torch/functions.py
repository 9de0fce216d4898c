"""Differentiable convolutions of PyTorch tensors.

All three tensors of a convolution enter one trilinear form, so one autograd function serves every derivative of every
order: the derivative of the form with respect to one role is the form with the other roles filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ... import api

ROLES = ("output", "input", "weight")


class Geometry(NamedTuple):
    """What a convolution needs besides its tensors; `in_size` and `kernel_size` belong to the plain convolution."""

    in_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int


class Form(torch.autograd.Function):
    """The trilinear form solved for one role from the other two, differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, geometry: Geometry, wrt: str, out_dtype: str | None, a: torch.Tensor,
                b: torch.Tensor) -> torch.Tensor:
        ctx.geometry, ctx.wrt = geometry, wrt
        ctx.save_for_backward(a, b)
        return solve(geometry, wrt, out_dtype, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        a, b = ctx.saved_tensors
        roles = [role for role in ROLES if role != ctx.wrt]
        filled = dict(zip(roles, (a, b))) | {ctx.wrt: grad.to(a.dtype)}
        results: list[torch.Tensor | None] = []
        for role, wanted in zip(roles, ctx.needs_input_grad[3:]):
            others = [filled[other] for other in ROLES if other != role]
            results.append(Form.apply(ctx.geometry, role, None, *others) if wanted else None)
        return (None, None, None, *results)


def solve(geometry: Geometry, wrt: str, out_dtype: str | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Run the form: (input, weight) -> output, (output, weight) -> input, (output, input) -> weight."""
    rest: dict[str, Any] = {"stride": geometry.stride, "padding": geometry.padding, "dilation": geometry.dilation,
                            "groups": geometry.groups, "out_dtype": out_dtype}
    if wrt == "output":
        result = api.conv(a, b, **rest)
    elif wrt == "input":
        result = api.input_grad(a, b, geometry.in_size, **rest)
    else:
        result = api.weight_grad(a, b, geometry.kernel_size, **rest)
    tensor: torch.Tensor = result
    return tensor


class Layer(torch.autograd.Function):
    """PyTorch's forward, our backward. `transposed` exchanges the roles of input and output."""

    @staticmethod
    def forward(ctx: Any, geometry: Geometry, transposed: bool, output_padding: tuple[int, ...], x: torch.Tensor,
                weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.geometry, ctx.transposed, ctx.output_padding = geometry, transposed, output_padding
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        lows, highs = zip(*geometry.padding)
        if transposed and lows == highs:
            return torch.convolution(x, weight, bias, geometry.stride, lows, geometry.dilation, True,
                                     output_padding, geometry.groups)
        if lows != highs:  # one-sided pads, which torch.convolution does not know: our forward, no padded copy
            y = solve(geometry, "input" if transposed else "output", None, x, weight)
            return y if bias is None else y + bias.reshape(-1, *[1] * len(lows))
        return torch.convolution(x, weight, bias, geometry.stride, lows, geometry.dilation, False,
                                 [0] * len(lows), geometry.groups)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        want_x, want_w, want_b = ctx.needs_input_grad[3:]
        # Under autocast dy is narrower than the saved tensors: compute in dy's type, return each its own.
        x_in, w_in = x.to(dy.dtype), weight.to(dy.dtype)
        out_x, out_w = (str(t.dtype).removeprefix("torch.") for t in (x, weight))
        geometry: Geometry = ctx.geometry
        if not torch.is_grad_enabled() and x.dtype == weight.dtype:  # nothing to differentiate again: one call
            backward = api.conv_transpose_backward if ctx.transposed else api.conv_backward
            extra = {"output_padding": ctx.output_padding} if ctx.transposed else {}
            return (None, None, None, *backward(
                dy, x_in, w_in, stride=geometry.stride, padding=geometry.padding, dilation=geometry.dilation,
                groups=geometry.groups, output_mask=(want_x, want_w, want_b), out_dtype=out_x, **extra))
        dx = dw = None
        if want_x:
            dx = Form.apply(geometry, "output" if ctx.transposed else "input", out_x, dy, w_in)
        if want_w:
            pair = (x_in, dy) if ctx.transposed else (dy, x_in)
            dw = Form.apply(geometry, "weight", out_w, *pair)
        db = None
        if want_b:
            db = dy.sum(dim=[0, *range(2, dy.dim())]) if torch.is_grad_enabled() else \
                api.bias_grad(dy, out_dtype=str(ctx.bias_dtype).removeprefix("torch."))
        return (None, None, None, dx, dw, db)


def conv(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, stride: Any = 1,
         padding: Any = 0, dilation: Any = 1, groups: int = 1) -> torch.Tensor:
    """Differentiable convolution of torch tensors; `padding` may be one (low, high) pair per axis.

    The forward is PyTorch's (ours for one-sided pads, without a padded copy), the gradients are convgrad's.

    Examples
    --------
    >>> import torch, convgrad
    >>> x = torch.ones(1, 1, 4, requires_grad=True)
    >>> convgrad.torch.conv(x, torch.ones(1, 1, 2), padding=[(1, 0)]).shape
    torch.Size([1, 1, 4])
    """
    axes = input.dim() - 2
    kernel = tuple(weight.shape[2:])
    geometry = Geometry(tuple(input.shape[2:]), kernel, per_axis(stride, axes), pairs(padding, axes),
                        per_axis(dilation, axes), groups)
    result: torch.Tensor = Layer.apply(geometry, False, (0,) * axes, input, weight, bias)
    return result


def conv_transpose(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, stride: Any = 1,
                   padding: Any = 0, output_padding: Any = 0, dilation: Any = 1, groups: int = 1) -> torch.Tensor:
    """Differentiable transposed convolution of torch tensors; arguments as in `torch.nn.functional`.

    Examples
    --------
    >>> import torch, convgrad
    >>> convgrad.torch.conv_transpose(torch.ones(1, 1, 4), torch.ones(1, 1, 2), stride=2).shape
    torch.Size([1, 1, 8])
    """
    axes = input.dim() - 2
    kernel, strides, dilations = tuple(weight.shape[2:]), per_axis(stride, axes), per_axis(dilation, axes)
    pads, extra = pairs(padding, axes), per_axis(output_padding, axes)
    large = tuple((size - 1) * s + d * (k - 1) + 1 + more - low - high for size, s, d, k, more, (low, high)
                  in zip(input.shape[2:], strides, dilations, kernel, extra, pads))
    geometry = Geometry(large, kernel, strides, pads, dilations, groups)
    result: torch.Tensor = Layer.apply(geometry, True, extra, input, weight, bias)
    return result


def per_axis(value: Any, axes: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Sequence) else (int(value),) * axes


def pairs(padding: Any, axes: int) -> tuple[tuple[int, int], ...]:
    items = padding if isinstance(padding, Sequence) else (padding,) * axes
    return tuple((item[0], item[1]) if isinstance(item, Sequence) else (int(item), int(item)) for item in items)
