"""`patch(model)`: our gradients behind PyTorch's own layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .functional import conv, conv_transpose


class _ConvgradConv:
    """Mixed into Conv1d/2d/3d: same parameters, same forward, our gradients."""

    def _conv_forward(self: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if input.dim() != weight.dim():  # unbatched input: torch adds the batch axis
            return self._conv_forward(input.unsqueeze(0), weight, bias).squeeze(0)  # type: ignore[no-any-return]
        axes, twice = weight.dim() - 2, self._reversed_padding_repeated_twice
        padding: Any = [(twice[2 * axis], twice[2 * axis + 1]) for axis in reversed(range(axes))]
        if self.padding_mode != "zeros":
            input = nn.functional.pad(input, twice, mode=self.padding_mode)
            padding = 0
        input, weight, bias = autocast(input, weight, bias)
        return conv(input, weight, bias, stride=self.stride, padding=padding, dilation=self.dilation,
                    groups=self.groups)


class _ConvgradConvTranspose:
    """Mixed into ConvTranspose1d/2d/3d."""

    def forward(self: Any, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        axes = self.weight.dim() - 2
        if input.dim() != self.weight.dim():
            return self.forward(input.unsqueeze(0), output_size).squeeze(0)  # type: ignore[no-any-return]
        extra = self._output_padding(input, output_size, self.stride, self.padding, self.kernel_size, axes,
                                     self.dilation)
        if any(more >= step for more, step in zip(extra, self.stride)):  # torch allows up to the dilation: its kernel
            return super().forward(input, output_size)  # type: ignore[misc, no-any-return]
        input, weight, bias = autocast(input, self.weight, self.bias)
        return conv_transpose(input, weight, bias, stride=self.stride, padding=self.padding, output_padding=extra,
                              dilation=self.dilation, groups=self.groups)


def autocast(input: torch.Tensor, weight: torch.Tensor,
             bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cast as torch.autocast does for its own convolutions; the casts are part of the graph."""
    device = input.device.type
    if not torch.is_autocast_enabled(device):
        return input, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class Conv1d(_ConvgradConv, nn.Conv1d): ...
class Conv2d(_ConvgradConv, nn.Conv2d): ...
class Conv3d(_ConvgradConv, nn.Conv3d): ...
class ConvTranspose1d(_ConvgradConvTranspose, nn.ConvTranspose1d): ...
class ConvTranspose2d(_ConvgradConvTranspose, nn.ConvTranspose2d): ...
class ConvTranspose3d(_ConvgradConvTranspose, nn.ConvTranspose3d): ...


PATCHES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: Conv1d, nn.Conv2d: Conv2d, nn.Conv3d: Conv3d, nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose2d: ConvTranspose2d, nn.ConvTranspose3d: ConvTranspose3d}


def patch(model: nn.Module) -> nn.Module:
    """Give every convolution layer of a model our gradients; parameters, state dict and forward stay as they are.

    Only layers whose class is exactly torch.nn's are changed. Returns the model.

    Examples
    --------
    >>> import torch, convgrad
    >>> model = convgrad.torch.patch(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()))
    >>> type(model[0]).__module__
    'convgrad.frontends.torch.patching'
    """
    for module in model.modules():
        if type(module) in PATCHES:
            module.__class__ = PATCHES[type(module)]
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Undo `patch`."""
    originals = {ours: theirs for theirs, ours in PATCHES.items()}
    for module in model.modules():
        if type(module) in originals:
            module.__class__ = originals[type(module)]
    return model


@contextlib.contextmanager
def patched(model: nn.Module) -> Iterator[nn.Module]:
    """`patch` inside a with block."""
    try:
        yield patch(model)
    finally:
        unpatch(model)
