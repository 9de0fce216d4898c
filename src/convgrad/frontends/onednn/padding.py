"""The auto_pad rules and the shape law, for one spatial axis; nothing here knows of tensors.

Names per axis: `large` is the extent on the input side of a convolution, `small` on its output side, `span` the extent
of the dilated kernel. Pads are pairs (begin, end).
"""

from __future__ import annotations

from typing import NamedTuple

AUTO_PADS = ("none", "valid", "same_upper", "same_lower")
RULES = ("document", "library")

Pads = tuple[int, int]


class Axis(NamedTuple):
    """What the attributes and the weights say about one spatial axis."""

    kernel: int
    stride: int
    dilation: int
    output_padding: int = 0

    @property
    def span(self) -> int:
        return (self.kernel - 1) * self.dilation + 1


def library_pads(auto_pad: str, axis: Axis, large: int) -> Pads:
    """What oneDNN's code does for a convolution and its gradients: pad so that small = ceil(large / stride).

    The odd element goes to the end for same_upper and to the beginning for same_lower. Neither the small extent nor
    output_padding is consulted.
    """
    if auto_pad == "valid":
        return (0, 0)
    last = large % axis.stride or axis.stride  # elements of the input that the last window must reach
    return split_like_library(auto_pad, max(0, axis.span - last))


def transpose_pads(auto_pad: str, axis: Axis) -> Pads:
    """What oneDNN's code does for ConvTranspose: pad so that large = stride * small (+ output_padding)."""
    if auto_pad == "valid":
        return (0, 0)
    return split_like_library(auto_pad, max(0, axis.span - axis.stride))


def split_like_library(auto_pad: str, total: int) -> Pads:
    begin = total // 2 if auto_pad == "same_upper" else (total + 1) // 2
    return (begin, total - begin)


def document_pads(auto_pad: str, axis: Axis, large: int, small: int) -> Pads:
    """What the reference page of ConvolutionBackwardData says: the total follows from both extents.

    The odd element goes to the beginning for same_upper and to the end for same_lower: the opposite of the code. A
    negative total counts as 0.
    """
    if auto_pad == "valid":
        return (0, 0)
    total = max(0, axis.stride * (small - 1) + axis.span - large + axis.output_padding)
    half = total // 2
    return (total - half, half) if auto_pad == "same_upper" else (half, total - half)


def small_extent(axis: Axis, large: int, pads: Pads) -> int:
    """The shape law: trunc((large + pads - span) / stride) + 1.

    NOTE: the library divides as C does, toward zero: an input too small by less than one stride still gives 1.
    """
    room = large + pads[0] + pads[1] - axis.span
    return (room // axis.stride if room >= 0 else -(-room // axis.stride)) + 1


def large_extent(axis: Axis, small: int, pads: Pads) -> int:
    """The extent that output_padding selects among the `stride` extents that have the same small extent."""
    return axis.stride * (small - 1) + axis.span - pads[0] - pads[1] + axis.output_padding


def engine_axis(axis: Axis, large: int, small: int, pads: Pads) -> tuple[int, Pads]:
    """Large extent and pads for which Conv, which divides toward minus infinity, derives exactly `small`.

    Only the end pad may change, which sets the extent and never enters a sum; and an output_padding that goes beyond
    the last tap by a stride or more is left out: nothing reaches it.
    """
    if (large + pads[0] + pads[1] - axis.span) // axis.stride + 1 == small:
        return large, pads
    reach = axis.stride * (small - 1) + axis.span - pads[0]
    if large - reach < axis.stride:
        return large, (pads[0], max(0, reach - large))
    return reach, (pads[0], 0)
