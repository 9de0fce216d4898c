"""Differentiable convolutions with the arguments of `torch.nn.functional`, and one-sided padding besides.

The forward is PyTorch's where it has one (ours for one-sided pads, without a padded copy), the gradients are
convgrad's. Number formats that convgrad does not have, complex ones for example, are PyTorch's altogether.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import batching as _batching
from . import derivatives as _derivatives
from . import prepared as _prepared
from . import rules as _rules
from .arguments import check_rank, check_tensor, ints, pads
from .geometry import Geometry
from .operators import ops
from .tensors import FORMATS

REGISTERED = (_derivatives, _batching, _rules, _prepared)  # importing them completes the operators


def conv(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: Any = 1, padding: Any = 0,
         dilation: Any = 1, groups: int = 1) -> Tensor:
    """Differentiable convolution with as many spatial axes as `weight` has.

    Parameters
    ----------
    input, weight, bias : torch.Tensor
        (N, C, spatial) or (C, spatial); (K, C/groups, spatial); (K,) or None.
    stride, dilation : int or one int per axis
    padding : int, one int per axis, one (low, high) pair per axis, "same" or "valid"
    groups : int

    Examples
    --------
    >>> import torch, convgrad
    >>> x = torch.ones(1, 1, 4, requires_grad=True)
    >>> convgrad.torch.conv(x, torch.ones(1, 1, 2), padding=[(1, 0)]).shape
    torch.Size([1, 1, 4])
    """
    return plainly(spatial_axes(weight), (input, weight, bias), stride, padding, dilation, groups)


def conv1d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1) -> Tensor:
    """`torch.nn.functional.conv1d` with convgrad's gradients; `padding` may be a (low, high) pair per axis."""
    return plainly(1, (input, weight, bias), stride, padding, dilation, groups)


def conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1) -> Tensor:
    """`torch.nn.functional.conv2d` with convgrad's gradients; `padding` may be a (low, high) pair per axis."""
    return plainly(2, (input, weight, bias), stride, padding, dilation, groups)


def conv3d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1) -> Tensor:
    """`torch.nn.functional.conv3d` with convgrad's gradients; `padding` may be a (low, high) pair per axis."""
    return plainly(3, (input, weight, bias), stride, padding, dilation, groups)


def conv_transpose(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: Any = 1, padding: Any = 0,
                   output_padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Tensor:
    """Differentiable transposed convolution with as many spatial axes as `weight` has.

    The arguments are those of `conv`, with `weight` (C, K/groups, spatial) and no words for `padding`; `output_padding`
    adds positions at the high end, as many as are asked for.

    Examples
    --------
    >>> import torch, convgrad
    >>> convgrad.torch.conv_transpose(torch.ones(1, 1, 4), torch.ones(1, 1, 2), stride=2).shape
    torch.Size([1, 1, 8])
    """
    return transposed(spatial_axes(weight), (input, weight, bias), stride, padding, output_padding, dilation, groups)


def conv_transpose1d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                     output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Tensor:
    """`torch.nn.functional.conv_transpose1d` with convgrad's gradients, pairs as `padding`, any `output_padding`."""
    return transposed(1, (input, weight, bias), stride, padding, output_padding, dilation, groups)


def conv_transpose2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                     output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Tensor:
    """`torch.nn.functional.conv_transpose2d` with convgrad's gradients, pairs as `padding`, any `output_padding`."""
    return transposed(2, (input, weight, bias), stride, padding, output_padding, dilation, groups)


def conv_transpose3d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                     output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Tensor:
    """`torch.nn.functional.conv_transpose3d` with convgrad's gradients, pairs as `padding`, any `output_padding`."""
    return transposed(3, (input, weight, bias), stride, padding, output_padding, dilation, groups)


def conv_tbc(input: Tensor, weight: Tensor, bias: Tensor | None = None, pad: Any = 0) -> Tensor:
    """`torch.conv_tbc` with convgrad's gradients: input (time, batch, channels), weight (taps, in, out).

    `pad` is one number, or a (low, high) pair. Nothing is copied to another layout for the gradients.
    """
    check_tensors(input, weight, bias)
    check_rank(input, "input", (3,), "time, batch, channels")
    check_rank(weight, "weight", (3,), "taps, input channels, output channels")
    padding = [tuple(pad)] if isinstance(pad, (tuple, list)) else pad
    return conv1d(input.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=padding).permute(2, 0, 1)


# --- from arguments to an operator ------------------------------------------------------------------------------------

Tensors = tuple[Tensor, Tensor, Tensor | None]  # input, weight, bias
Serve = Callable[..., Tensor]  # of input, weight, bias and the fields of a Geometry


def plainly(axes: int, tensors: Tensors, stride: Any, padding: Any, dilation: Any, groups: Any,
            serve: Serve | None = None) -> Tensor:
    check_operands(axes, tensors)
    stride, dilation = ints(stride, "stride", axes, 1), ints(dilation, "dilation", axes, 1)
    padding = pads(padding, axes, tensors[1].shape[2:], stride, dilation)
    (groups,) = ints(groups, "groups", 1, 1)
    return computed(tensors, Geometry(stride, padding, dilation, False, [0] * axes, groups), serve)


def transposed(axes: int, tensors: Tensors, stride: Any, padding: Any, output_padding: Any, dilation: Any,
               groups: Any, serve: Serve | None = None) -> Tensor:
    check_operands(axes, tensors)
    if isinstance(padding, str):
        raise TypeError(f"padding={padding!r}: a transposed convolution takes numbers or (low, high) pairs")
    stride, dilation = ints(stride, "stride", axes, 1), ints(dilation, "dilation", axes, 1)
    padding = pads(padding, axes, tensors[1].shape[2:], stride, dilation)
    output_padding = ints(output_padding, "output_padding", axes, 0)
    (groups,) = ints(groups, "groups", 1, 1)
    return computed(tensors, Geometry(stride, padding, dilation, True, output_padding, groups), serve)


def computed(tensors: Tensors, geometry: Geometry, serve: Serve | None) -> Tensor:
    input, weight, bias = tensors
    unbatched = input.dim() < weight.dim()
    if unbatched:
        input = input.unsqueeze(0)
    serve = serve or (ops.convolution if input.dtype in FORMATS else of_torch)
    result: Tensor = serve(input, weight, bias, *geometry)
    return result.squeeze(0) if unbatched else result


def of_torch(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """PyTorch's own convolution and gradients, for number formats that are not ours."""
    geometry = Geometry(*arguments)
    if geometry.one_sided and not geometry.transposed:
        input = pad(input, [width for pair in reversed(geometry.pairs) for width in pair])
        geometry = geometry._replace(padding=[0] * len(geometry.stride))
    if not geometry.torch_takes_it:
        raise TypeError(f"input is {input.dtype}, which PyTorch computes, and it takes neither one-sided padding nor "
                        f"output_padding={tuple(geometry.output_padding)} in a transposed convolution of "
                        f"stride {tuple(geometry.stride)} and dilation {tuple(geometry.dilation)}")
    # not torch.convolution, which knows no complex numbers
    function = getattr(torch.nn.functional, f"conv{'_transpose' * geometry.transposed}{len(geometry.stride)}d")
    rest: dict[str, Any] = {"output_padding": geometry.output_padding} if geometry.transposed else {}
    result: Tensor = function(input, weight, bias, stride=geometry.stride, padding=[low for low, _ in geometry.pairs],
                              dilation=geometry.dilation, groups=geometry.groups, **rest)
    return result


def check_tensors(input: object, weight: object, bias: object) -> None:
    check_tensor(input, "input")
    check_tensor(weight, "weight")
    if bias is not None:
        check_tensor(bias, "bias")


def check_operands(axes: int, tensors: Tensors) -> None:
    input, weight, bias = tensors
    check_tensors(input, weight, bias)
    check_rank(weight, "weight", (axes + 2,), f"channels, channels, {axes} spatial")
    check_rank(input, "input", (axes + 1, axes + 2), f"channels and {axes} spatial, with or without a batch")


def spatial_axes(weight: Tensor) -> int:
    check_tensor(weight, "weight")
    check_rank(weight, "weight", (3, 4, 5), "channels, channels, 1 to 3 spatial")
    return weight.dim() - 2
