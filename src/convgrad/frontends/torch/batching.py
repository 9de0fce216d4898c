"""`torch.func.vmap` over the operators, without a loop: the mapped axis becomes part of another axis.

Mapped activations are more images, mapped weights more channels of each group, and where both operands are mapped the
pairs are groups that know nothing of each other. Per-sample weight gradients, `vmap(grad(loss))`, are the last kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .geometry import Geometry, Transposed, plain
from .operators import library, ops

Run = Callable[[Tensor, Tensor, int], Any]  # both operands and the number of groups
CHANNELS = 1  # the axis of channels in activations; weights have output channels on axis 0, input channels on axis 1


class Mapped(NamedTuple):
    """An operand, with the mapped axis in front where it has one."""

    tensor: Tensor
    mapped: bool

    @staticmethod
    def of(tensor: Tensor, dim: int | None) -> Mapped:
        return Mapped(tensor if dim is None else tensor.movedim(dim, 0), dim is not None)


def into(tensor: Tensor, axis: int, groups: int = 1) -> Tensor:
    """Put the mapped axis in front of `axis` (counted without it), inside each group."""
    tensor = tensor.movedim(0, axis)
    channels = tensor.shape[axis + 1] // groups
    return tensor.unflatten(axis + 1, (groups, channels)).movedim(axis, axis + 1).flatten(axis, axis + 2)


def out_of(tensor: Tensor, axis: int, count: int, groups: int = 1) -> Tensor:
    """Undo `into`: the mapped axis comes to the front."""
    tensor = tensor.unflatten(axis, (groups, count, tensor.shape[axis] // (groups * count)))
    return tensor.movedim(axis + 1, 0).flatten(axis + 1, axis + 2)


def by_pairs(tensor: Tensor, axis: int) -> Tensor:
    """Put the mapped axis in front of `axis` as further groups."""
    return tensor.movedim(0, axis).flatten(axis, axis + 1)


def of_pairs(tensor: Tensor, axis: int, count: int) -> Tensor:
    """Undo `by_pairs`."""
    return tensor.unflatten(axis, (count, tensor.shape[axis] // count)).movedim(axis, 0)


def activations(run: Run, count: int, images: Mapped, weight: Mapped, groups: int, channel_axis: int) -> Tensor:
    """An output or an input gradient, with the mapped axis in front if an operand has one.

    `channel_axis` is the axis of the weight that has the channels of the result.
    """
    if not weight.mapped:
        found = run(images.tensor.flatten(0, 1) if images.mapped else images.tensor, weight.tensor, groups)
        return of_pairs(found, 0, count) if images.mapped else found
    if not images.mapped:
        inside = groups if channel_axis == 0 else 1  # input channels of a weight are those of one group
        return out_of(run(images.tensor, into(weight.tensor, channel_axis, inside), groups), CHANNELS, count, groups)
    found = run(by_pairs(images.tensor, CHANNELS), by_pairs(weight.tensor, 0), groups * count)
    return of_pairs(found, CHANNELS, count)


def convolution(count: int, input: Mapped, weight: Mapped, geometry: Geometry) -> Tensor:
    def run(x: Tensor, w: Tensor, groups: int) -> Any:
        return ops.convolution(x, w, None, *geometry._replace(groups=groups))

    return activations(run, count, input, weight, geometry.groups, 0)


def input_grad(count: int, grad_output: Mapped, weight: Mapped, size: Any, geometry: Geometry, *dtype: Any) -> Tensor:
    def run(dy: Tensor, w: Tensor, groups: int) -> Any:
        return ops.input_grad(dy, w, size, geometry.stride, geometry.padding, geometry.dilation, groups, *dtype)

    return activations(run, count, grad_output, weight, geometry.groups, 1)


def weight_grad(count: int, grad_output: Mapped, input: Mapped, size: Any, geometry: Geometry, *dtype: Any) -> Tensor:
    def run(dy: Tensor, x: Tensor, groups: int) -> Any:
        return ops.weight_grad(dy, x, size, geometry.stride, geometry.padding, geometry.dilation, groups, *dtype)

    groups = geometry.groups
    if not grad_output.mapped and not input.mapped:
        return run(grad_output.tensor, input.tensor, groups)  # type: ignore[no-any-return]
    if not input.mapped:
        return out_of(run(into(grad_output.tensor, CHANNELS, groups), input.tensor, groups), 0, count, groups)
    if not grad_output.mapped:
        return out_of(run(grad_output.tensor, into(input.tensor, CHANNELS, groups), groups), 1, count)
    return of_pairs(run(by_pairs(grad_output.tensor, CHANNELS), by_pairs(input.tensor, CHANNELS), groups * count),
                    0, count)


def bias_grad(count: int, grad_output: Mapped, *dtype: Any) -> Tensor:
    if not grad_output.mapped:
        return ops.bias_grad(grad_output.tensor, *dtype)  # type: ignore[no-any-return]
    return of_pairs(ops.bias_grad(by_pairs(grad_output.tensor, CHANNELS), *dtype), 0, count)


# --- the rules --------------------------------------------------------------------------------------------------------

def batched(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the rule of an operator, called with VmapInfo, the mapped dimension of each argument, the arguments."""
    return torch.library.register_vmap(f"convgrad::{name}", lib=library)  # type: ignore[no-any-return]


@batched("convolution")
def convolution_rule(info: Any, dims: Any, input: Tensor, weight: Tensor, bias: Tensor | None,
                     *arguments: Any) -> tuple[Tensor, int | None]:
    geometry = Geometry(*arguments)
    axes = len(geometry.stride)
    x, w = Mapped.of(input, dims[0]), Mapped.of(weight, dims[1])
    if geometry.transposed:
        inner = Transposed.of(geometry)
        size = geometry.output_size(x.tensor.shape[-axes:], w.tensor.shape[-axes:])
        result = inner.filled(input_grad(info.batch_size, x, w, inner.kept_size(size), inner.geometry))
    else:
        result = convolution(info.batch_size, x, w, geometry)
    if bias is not None:
        b = Mapped.of(bias, dims[2])
        result = result + b.tensor.reshape(*b.tensor.shape[:-1], *[1] * b.mapped, -1, *[1] * axes)
    return result, 0


@batched("convolution_backward")
def convolution_backward_rule(info: Any, dims: Any, grad_output: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any,
                              *arguments: Any) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    *rest, mask = arguments
    geometry, count = Geometry(*rest), info.batch_size
    dy, x, w = (Mapped.of(tensor, dim) for tensor, dim in zip((grad_output, input, weight), dims))
    axes = len(geometry.stride)
    size, kernel = x.tensor.shape[-axes:], w.tensor.shape[-axes:]
    inner = Transposed.of(geometry)
    reached = Mapped(inner.kept(dy.tensor), dy.mapped)
    dx = dw = db = None
    if mask[0]:
        dx = convolution(count, reached, w, inner.geometry) if geometry.transposed else \
            input_grad(count, dy, w, size, geometry)
    if mask[1]:
        dw = weight_grad(count, x, reached, kernel, inner.geometry) if geometry.transposed else \
            weight_grad(count, dy, x, kernel, geometry)
    if mask[2]:
        db = bias_grad(count, dy)
    mapped = (dy.mapped or w.mapped, dy.mapped or x.mapped, dy.mapped)
    return (dx, dw, db), tuple(0 if asked and here else None for asked, here in zip(mask, mapped))


@batched("input_grad")
def input_grad_rule(info: Any, dims: Any, grad_output: Tensor, weight: Tensor, size: Any,
                    *rest: Any) -> tuple[Tensor, int]:
    return input_grad(info.batch_size, Mapped.of(grad_output, dims[0]), Mapped.of(weight, dims[1]), size,
                      plain(*rest[:4]), *rest[4:]), 0


@batched("weight_grad")
def weight_grad_rule(info: Any, dims: Any, grad_output: Tensor, input: Tensor, size: Any,
                     *rest: Any) -> tuple[Tensor, int]:
    return weight_grad(info.batch_size, Mapped.of(grad_output, dims[0]), Mapped.of(input, dims[1]), size,
                       plain(*rest[:4]), *rest[4:]), 0


@batched("bias_grad")
def bias_grad_rule(info: Any, dims: Any, grad_output: Tensor, *dtype: Any) -> tuple[Tensor, int]:
    return bias_grad(info.batch_size, Mapped.of(grad_output, dims[0]), *dtype), 0
