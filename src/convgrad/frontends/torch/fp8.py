"""Training in FP8: operands of all three passes in E4M3 with delayed scales, parameters and results in more bits.

The scale of a tensor comes from the largest magnitudes that it had in the last steps, so no pass over it has to end
before it can be rounded, and nothing waits for the device. A tensor without a history has its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import scaled as _scaled
from .arguments import ints, pads
from .functional import check_operands
from .geometry import Geometry, plain
from .modules import OneSided
from .operators import check_bias, ops

REGISTERED = (_scaled,)  # importing it defines the operators
FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max
SMALLEST_SCALE = 2.0**-100  # of a tensor of zeros
INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2  # rows of a history


class History:
    """The largest magnitudes of a layer's three tensors: a row for each, a column for each of the last steps."""

    def __init__(self, values: Tensor, margin: int) -> None:
        self.values, self.margin = values, margin

    def quantized(self, tensor: Tensor, row: int, remember: bool) -> tuple[Tensor, Tensor]:
        """A tensor in FP8, and its scale."""
        now = tensor.detach().abs().amax().float() if tensor.numel() else self.values.new_zeros(())
        now = torch.where(now.isfinite(), now, 0)  # an overflow says nothing about the next step
        before = self.values[row].amax()
        scale = (torch.where(before > 0, before, now) * (2.0**self.margin / LARGEST)).clamp(min=SMALLEST_SCALE)
        if remember:
            self.values[row] = self.values[row].roll(1)
            self.values[row, 0] = now
        return (tensor / scale).clamp(-LARGEST, LARGEST).to(FORMAT), scale


class Fp8Convolution(Function):
    """A convolution and its gradients of FP8 operands."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, history: History,
                training: bool) -> Tensor:
        x8, x_scale = history.quantized(input, INPUT, training)
        w8, w_scale = history.quantized(weight, WEIGHT, training)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.tail = (*geometry[:3], geometry.groups)
        ctx.history, ctx.training, ctx.parameter_dtype = history, training, weight.dtype
        y: Tensor = ops.scaled_convolution(x8, x_scale, w8, w_scale, *ctx.tail, input.dtype, "fp8")
        return y if bias is None else y + bias.to(y.dtype).reshape(-1, *[1] * len(geometry.stride))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        want_x, want_w, want_b = ctx.needs_input_grad[:3]
        g8, g_scale = ctx.history.quantized(grad, GRAD_OUTPUT, ctx.training)
        return (
            ops.scaled_input_grad(g8, g_scale, w8, w_scale, x8.shape[2:], *ctx.tail, grad.dtype, "fp8")
            if want_x else None,
            ops.scaled_weight_grad(g8, g_scale, x8, x_scale, w8.shape[2:], *ctx.tail, ctx.parameter_dtype, "fp8")
            if want_w else None,
            ops.bias_grad(grad, ctx.parameter_dtype) if want_b else None, None, None, None)


class Fp8(OneSided):
    """Mixed into torch's layers. `history` is how many steps a scale looks back, `margin` how many powers of two it
    leaves free above the largest of them. The state dict is that of torch's layer: the history is not part of it."""

    def __init__(self: Any, *arguments: Any, history: int = 16, margin: int = 0, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if self.padding_mode != "zeros":
            raise ValueError(f"padding_mode={self.padding_mode!r}: FP8 layers pad with zeros")
        (steps,) = ints(history, "history", 1, 1)
        (self.margin,) = ints(margin, "margin", 1, 0)
        zeros = torch.zeros(3, steps, dtype=torch.float32, device=self.weight.device)
        self.register_buffer("amax_history", zeros, persistent=False)

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        """Keep the history in float32 when the layer is cast."""
        history = self.amax_history
        super()._apply(fn, recurse)  # type: ignore[misc]
        self.amax_history = history.to(self.amax_history.device)
        return self

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        check_operands(self.axes, (input, weight, bias))
        check_bias(bias, weight.shape[0])
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        padding = pads(self.padding, self.axes, self.kernel_size, self.stride, self.dilation)
        geometry = plain(self.stride, padding, self.dilation, self.groups)
        unbatched = input.dim() < weight.dim()
        result: Tensor = Fp8Convolution.apply(input.unsqueeze(0) if unbatched else input, weight, bias, geometry,
                                              History(self.amax_history, self.margin), self.training)
        return result.squeeze(0) if unbatched else result


class Fp8Conv1d(Fp8, nn.Conv1d):
    __doc__ = f"`torch.nn.Conv1d` in FP8. {Fp8.__doc__}"
    axes = 1


class Fp8Conv2d(Fp8, nn.Conv2d):
    __doc__ = f"`torch.nn.Conv2d` in FP8. {Fp8.__doc__}"
    axes = 2


class Fp8Conv3d(Fp8, nn.Conv3d):
    __doc__ = f"`torch.nn.Conv3d` in FP8. {Fp8.__doc__}"
    axes = 3
