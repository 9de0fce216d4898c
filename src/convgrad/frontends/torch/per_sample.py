"""Gradients of the parameters for every image of a batch by itself, as private training and data attribution ask."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .arguments import check_rank, check_tensor, ints, pads
from .batching import Mapped, weight_grad
from .geometry import plain


def per_sample_weight_grad(grad_output: Tensor, input: Tensor, kernel_size: Any, *, stride: Any = 1, padding: Any = 0,
                           dilation: Any = 1, groups: int = 1) -> Tensor:
    """The weight gradient of each image of a convolution: (N, K, C/groups, spatial).

    Nothing is unfolded: the images become groups of one weight gradient. `torch.func.vmap` of `torch.func.grad` over
    the functions and layers of `convgrad.torch` takes the same way.

    Examples
    --------
    >>> import torch, convgrad
    >>> convgrad.torch.per_sample_weight_grad(torch.ones(5, 4, 6), torch.ones(5, 2, 8), 3).shape
    torch.Size([5, 4, 2, 3])
    """
    check_tensor(grad_output, "grad_output")
    check_tensor(input, "input")
    check_rank(input, "input", (3, 4, 5), "batch, channels, 1 to 3 spatial")
    axes = input.dim() - 2
    check_rank(grad_output, "grad_output", (axes + 2,), f"batch, channels, {axes} spatial")
    if grad_output.shape[0] != input.shape[0]:
        raise ValueError(f"grad_output has batch {grad_output.shape[0]}, but input has {input.shape[0]}")
    kernel = ints(kernel_size, "kernel_size", axes, 1)
    stride, dilation = ints(stride, "stride", axes, 1), ints(dilation, "dilation", axes, 1)
    (groups,) = ints(groups, "groups", 1, 1)
    if input.shape[1] % groups or grad_output.shape[1] % groups:
        raise ValueError(f"groups={groups} does not divide the {input.shape[1]} channels of input and the "
                         f"{grad_output.shape[1]} of grad_output")
    geometry = plain(stride, pads(padding, axes, kernel, stride, dilation), dilation, groups)
    images = [Mapped(tensor.unsqueeze(1), True) for tensor in (grad_output, input)]
    return weight_grad(input.shape[0], images[0], images[1], kernel, geometry)
