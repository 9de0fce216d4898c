"""Layers: PyTorch's own with convgrad's gradients and one-sided padding, causal ones, and ConvTBC.

Each is a subclass of the layer of the same name, with its parameters, initialisation and state dict. No layer makes a
padded copy of its input unless its `padding_mode` asks for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...problem import checked_padding
from .arguments import check_rank, check_tensor, ints
from .functional import conv_tbc, plainly, transposed
from .geometry import Geometry
from .main_grad import IntoMainGrad, main_grads


def has_pairs(padding: Any) -> bool:
    return isinstance(padding, Sequence) and any(isinstance(item, Sequence) for item in padding) \
        and not isinstance(padding, str)


class OneSided:
    """Mixed into torch's layers: `padding` may have one (low, high) pair per axis."""

    axes: int

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
                 *arguments: Any, **keywords: Any) -> None:
        pairs = checked_padding(padding, self.axes) if has_pairs(padding) else None
        super().__init__(in_channels, out_channels, kernel_size, stride,  # type: ignore[call-arg]
                         0 if pairs else padding, *arguments, **keywords)
        if pairs:
            self.padding: Any = pairs
            self._reversed_padding_repeated_twice = [pad for pair in reversed(pairs) for pad in pair]


class Ours(OneSided):
    """What the layers below have in common: who computes them."""

    adds_to_main_grad = False  # see main_grad.py

    def serve(self, weight: Tensor, bias: Tensor | None) -> Any:
        """The function of input, weight, bias and geometry; None for the usual one."""
        if not self.adds_to_main_grad or not torch.is_grad_enabled():
            return None
        targets = main_grads(weight, bias)

        def into_main_grad(input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Any:
            return IntoMainGrad.apply(input, weight, bias, Geometry(*geometry), targets)

        return into_main_grad


class Plain(Ours):
    """The forward of Conv1d, Conv2d and Conv3d."""

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            check_tensor(input, "input")
            input = nn.functional.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        return plainly(self.axes, (input, weight, bias), self.stride, padding, self.dilation, self.groups,
                       self.serve(weight, bias))


class Transposed(Ours):
    """The forward of ConvTranspose1d, ConvTranspose2d and ConvTranspose3d."""

    def forward(self: Any, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        extra = self.output_padding if output_size is None else self.extra_positions(input, output_size)
        return transposed(self.axes, (input, self.weight, self.bias), self.stride, self.padding, extra, self.dilation,
                          self.groups, self.serve(self.weight, self.bias))

    def extra_positions(self: Any, input: Tensor, output_size: Sequence[int]) -> tuple[int, ...]:
        """The output padding that makes an output of `output_size`, spatial or with the axes before."""
        axes = self.axes
        check_tensor(input, "input")
        check_rank(input, "input", (axes + 1, axes + 2), f"channels and {axes} spatial, with or without a batch")
        asked = tuple(output_size)
        if len(asked) not in (axes, input.dim()):
            raise ValueError(f"output_size must have {axes} values, or {input.dim()} with the axes before them, got "
                             f"{len(asked)}: {asked}")
        pairs = checked_padding(self.padding, axes)
        extra = []
        for axis, (size, wanted) in enumerate(zip(input.shape[-axes:], asked[-axes:])):
            step, span = self.stride[axis], self.dilation[axis] * (self.kernel_size[axis] - 1) + 1
            least = (size - 1) * step + span - sum(pairs[axis])
            if not least <= wanted < least + step:
                raise ValueError(f"output_size={asked}: spatial axis {axis} can have {least} to {least + step - 1} "
                                 f"positions, not {wanted}")
            extra.append(wanted - least)
        return tuple(extra)


class Conv1d(Plain, nn.Conv1d):
    """`torch.nn.Conv1d` with convgrad's gradients; `padding` may be one (low, high) pair per axis."""

    axes = 1


class Conv2d(Plain, nn.Conv2d):
    """`torch.nn.Conv2d` with convgrad's gradients; `padding` may be one (low, high) pair per axis."""

    axes = 2


class Conv3d(Plain, nn.Conv3d):
    """`torch.nn.Conv3d` with convgrad's gradients; `padding` may be one (low, high) pair per axis."""

    axes = 3


class ConvTranspose1d(Transposed, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` with convgrad's gradients; `padding` may be one (low, high) pair per axis."""

    axes = 1


class ConvTranspose2d(Transposed, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` with convgrad's gradients; `padding` may be one (low, high) pair per axis."""

    axes = 2


class ConvTranspose3d(Transposed, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` with convgrad's gradients; `padding` may be one (low, high) pair per axis."""

    axes = 3


class Causal:
    """Mixed into layers whose output at one time depends on this time and earlier ones only.

    Time is the first spatial axis; it is padded at its beginning by dilation * (kernel - 1), so that the output has
    ceil(time / stride) steps. `padding` is that of the other axes: a number, one number or pair for each, or "same".
    """

    axes: int

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
                 dilation: Any = 1, **keywords: Any) -> None:
        kernel, spread = ints(kernel_size, "kernel_size", self.axes, 1), ints(dilation, "dilation", self.axes, 1)
        others = self.axes - 1
        if padding == "same":
            steps = ints(stride, "stride", self.axes, 1)
            if any(step != 1 for step in steps[1:]):
                raise ValueError(f"padding='same' goes with stride 1 on the axes behind time, got stride={steps}")
            totals = [s * (k - 1) for k, s in zip(kernel[1:], spread[1:])]
            beside = tuple((total // 2, total - total // 2) for total in totals)
        elif others == 0:
            if padding != 0:
                raise ValueError(f"padding={padding!r}: CausalConv1d pads the beginning of time by dilation * "
                                 "(kernel_size - 1), and has no other axis")
            beside = ()
        else:
            beside = checked_padding(padding, others)
        super().__init__(in_channels, out_channels, kernel, stride,  # type: ignore[call-arg]
                         ((spread[0] * (kernel[0] - 1), 0), *beside), spread, **keywords)


class CausalConv1d(Causal, Conv1d):
    __doc__ = Causal.__doc__


class CausalConv2d(Causal, Conv2d):
    __doc__ = Causal.__doc__


class CausalConv3d(Causal, Conv3d):
    __doc__ = Causal.__doc__


class ConvTBC(nn.Module):
    """A 1-D convolution of (time, batch, channels) tensors; weight (taps, in, out), as for `torch.conv_tbc`.

    `padding` is one number, or a (low, high) pair.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, padding: Any = 0, bias: bool = True,
                 device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        (taps,) = ints(kernel_size, "kernel_size", 1, 1)
        self.in_channels, self.out_channels, self.kernel_size, self.padding = in_channels, out_channels, taps, padding
        self.weight = nn.Parameter(torch.empty(taps, in_channels, out_channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the other layers begin: uniform, by the number of products in an output."""
        bound = (self.kernel_size * self.in_channels) ** -0.5 if self.in_channels else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        return conv_tbc(input, self.weight, self.bias, self.padding)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, padding={self.padding}"
