"""The arguments that stand behind the tensors of every operator, and the sizes that follow from them.

Extents may be symbolic here: `torch.compile` and `torch.export` trace these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Ints = Sequence[int]
Pairs = tuple[tuple[int, int], ...]


class Geometry(NamedTuple):
    """As in `aten::convolution`; `padding` has one number per axis, or low and high of each axis in turn."""

    stride: Ints
    padding: Ints
    dilation: Ints
    transposed: bool
    output_padding: Ints
    groups: int

    @property
    def pairs(self) -> Pairs:
        return pairs_of(self.padding, len(self.stride))

    @property
    def one_sided(self) -> bool:
        return len(self.padding) != len(self.stride) and any(low != high for low, high in self.pairs)

    @property
    def torch_takes_it(self) -> bool:
        """Whether PyTorch's own convolution does: equal pads, output padding below the stride or the dilation."""
        return not self.one_sided and (not self.transposed or all(
            more < max(step, spread) for more, step, spread in zip(self.output_padding, self.stride, self.dilation)))

    def output_size(self, size: Ints, kernel: Ints) -> tuple[int, ...]:
        """Spatial size of the output of a convolution, transposed or not, of an input of spatial size `size`."""
        pairs = self.pairs
        spans = [spread * (taps - 1) + 1 for spread, taps in zip(self.dilation, kernel)]
        if self.transposed:
            return tuple((extent - 1) * step + span + more - low - high for extent, step, span, more, (low, high)
                         in zip(size, self.stride, spans, self.output_padding, pairs))
        return tuple((extent + low + high - span) // step + 1 for extent, step, span, (low, high)
                     in zip(size, self.stride, spans, pairs))


class Transposed(NamedTuple):
    """A transposed convolution as the input gradient of a plain one, and how many trailing outputs no tap reaches.

    Output padding beyond the stride adds positions that the plain convolution would count as outputs of its own. High
    padding takes up whole strides of them; the rest is cut off before the gradient and filled with zeros after it.
    """

    geometry: Geometry
    cut: tuple[int, ...]

    @staticmethod
    def of(geometry: Geometry) -> Transposed:
        padding: list[int] = []
        cut = []
        for step, more, (low, high) in zip(geometry.stride, geometry.output_padding, geometry.pairs):
            left = high - more // step * step
            padding += [low, max(left, 0)]
            cut.append(max(-left, 0))
        return Transposed(plain(geometry.stride, padding, geometry.dilation, geometry.groups), tuple(cut))

    def kept(self, large: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the output's size that taps reach."""
        for axis, beyond in enumerate(self.cut, start=-len(self.cut)):
            if beyond:
                large = large.narrow(axis, 0, large.shape[axis] - beyond)
        return large

    def filled(self, kept: torch.Tensor) -> torch.Tensor:
        """Undo `kept`, with zeros."""
        if not any(self.cut):
            return kept
        return torch.nn.functional.pad(kept, [pad for beyond in reversed(self.cut) for pad in (0, beyond)])

    def kept_size(self, size: Ints) -> tuple[int, ...]:
        return tuple(extent - beyond for extent, beyond in zip(size, self.cut))


def plain(stride: Ints, padding: Ints, dilation: Ints, groups: int) -> Geometry:
    """The geometry of a convolution that is not transposed."""
    return Geometry(stride, padding, dilation, False, [0] * len(stride), groups)


def pairs_of(padding: Ints, axes: int) -> Pairs:
    if len(padding) == axes:
        return tuple((pad, pad) for pad in padding)
    if len(padding) != 2 * axes:
        raise ValueError(f"padding must have one number per axis ({axes}), or low and high of each ({2 * axes}), got "
                         f"{len(padding)}: {tuple(padding)}")
    return tuple((padding[axis], padding[axis + 1]) for axis in range(0, 2 * axes, 2))


def checked_shapes(shapes: dict[str, Ints], geometry: Geometry, output: str | None = None) -> None:
    """Refuse operands that do not fit each other: `shapes` of input, weight, and (named `output`) of the output."""
    axes = len(geometry.stride)
    for name, shape in shapes.items():
        if len(shape) != axes + 2:
            raise ValueError(f"{name} must have {axes + 2} axes for {axes} strides, got shape {tuple(shape)}")
    input, weight = shapes["input"], shapes["weight"]
    channels, groups = input[1], geometry.groups
    if geometry.transposed:
        if weight[0] != channels:
            raise ValueError(f"weight has {weight[0]} input channels, but input has {channels}")
        if channels % groups:
            raise ValueError(f"groups={groups} does not divide the {channels} input channels")
        produced = weight[1] * groups
    else:
        if weight[1] * groups != channels:
            raise ValueError(f"weight has {weight[1]} input channels per group, but input has {channels} channels in "
                             f"{groups} groups")
        if weight[0] % groups:
            raise ValueError(f"groups={groups} does not divide the {weight[0]} output channels")
        produced = weight[0]
    size = geometry.output_size(input[2:], weight[2:])
    for axis, extent in enumerate(size):
        if extent < (0 if geometry.transposed else 1):
            raise ValueError(f"the output would have {extent} positions on spatial axis {axis}: input "
                             f"{tuple(input[2:])}, kernel {tuple(weight[2:])}, stride {tuple(geometry.stride)}, "
                             f"padding {geometry.pairs}, dilation {tuple(geometry.dilation)}")
    if output is not None and tuple(shapes[output]) != (input[0], produced, *size):
        raise ValueError(f"{output} has shape {tuple(shapes[output])}, but the output of this convolution has "
                         f"{(input[0], produced, *size)}")
