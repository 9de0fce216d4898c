"""Boxes of a convolution's input and output, and the convolution between two of them. Pure arithmetic.

Per axis, output o, tap k and input i of the whole problem are linked by `i = o*stride + k*dilation - low`. For a box
of inputs that begins at a and a box of outputs that begins at u, the local indices i' = i - a and o' = o - u are
linked by `i' = o'*stride + k*dilation - low'` with

    low' = low + a - u*stride.

So every pair of boxes is a convolution of the same kernel, stride and dilation, where low' is a pad if it is not
negative. The two ways to choose a pair see to that:

- `output_tile` starts from outputs [u, v). They read the inputs from u*stride - low to (v-1)*stride - low + span, of
  which those inside the input are the box: a = max(0, u*stride - low), thus low' = max(0, low - u*stride) >= 0.
- `input_tile` starts from inputs [a, b). Input i takes part in the outputs o with 0 <= i + low - o*stride <= span - 1:
  u = max(0, ceil((a + low - span + 1) / stride)), v = min(out, floor((b - 1 + low) / stride) + 1). Where the stride is
  larger than the span, u*stride may lie beyond a + low: no output reads the inputs before u*stride - low, their
  gradient is zero, and the tile begins there, with low' = 0.

The high pad is what gives exactly v - u outputs: (v-u-1)*stride + span - low' - size, or 0 where that is negative.
Then fewer than `stride` inputs are left over at the end, because output v, if there is one, begins at b or later.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..problem import Conv, checked_int, checked_ints


class Box(NamedTuple):
    """Positions from `begin` to before `end` on every spatial axis, in the coordinates of the whole problem."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(last - first for first, last in zip(self.begin, self.end))

    @property
    def empty(self) -> bool:
        return any(first >= last for first, last in zip(self.begin, self.end))

    def within(self, other: Box) -> bool:
        return all(a >= c and b <= d for a, b, c, d in zip(self.begin, self.end, other.begin, other.end))

    def intersection(self, other: Box) -> Box:
        return Box(tuple(map(max, self.begin, other.begin)), tuple(map(min, self.end, other.end)))

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Where the box lies in a (batch, channels, spatial) array whose first position is `origin`."""
        spatial = (slice(first - o, last - o) for first, last, o in zip(self.begin, self.end, origin))
        return (slice(None), slice(None), *spatial)


class Tile(NamedTuple):
    """A box of the input, a box of the output, and the convolution from one to the other."""

    conv: Conv
    input: Box
    output: Box


def whole(size: tuple[int, ...]) -> Box:
    return Box((0,) * len(size), size)


def checked_box(box: object, size: tuple[int, ...], name: str) -> Box:
    """`box` as a Box inside the extents `size`, or an error that names the argument."""
    if not isinstance(box, Sequence) or isinstance(box, str) or len(box) != 2:
        raise TypeError(f"{name} must be a Box or a pair (begin, end), got {box!r}")
    begin, end = (checked_ints(corner, f"{name}.{word}", len(size), 0) for corner, word in zip(box, ("begin", "end")))
    for axis, (first, last, extent) in enumerate(zip(begin, end, size)):
        if not first <= last <= extent:
            raise ValueError(f"{name} goes from {first} to {last} on axis {axis}, which is not inside 0 to {extent}")
    return Box(begin, end)


def checked_conv(conv: object) -> Conv:
    if not isinstance(conv, Conv):
        raise TypeError(f"conv must be a Conv, got {type(conv).__name__}")
    return conv


def grad_output_box(conv: Conv, box: Box) -> Box:
    """The box of outputs that read an input inside `box`; an empty box where there are none.

    Parameters
    ----------
    conv : Conv
        The whole convolution.
    box : Box
        Positions of its input.

    Examples
    --------
    >>> from convgrad import Conv
    >>> from convgrad.tile import Box, grad_output_box
    >>> grad_output_box(Conv(1, 1, 1, (16,), (3,), padding=1), Box((4,), (8,)))
    Box(begin=(3,), end=(9,))
    """
    conv = checked_conv(conv)
    box = checked_box(box, conv.in_size, "box")
    begin, end = [], []
    for a, b, (low, _), span, stride, out in zip(box.begin, box.end, conv.padding, conv.span, conv.stride,
                                                 conv.out_size):
        first = min(out, max(0, -(-(a + low - span + 1) // stride)))
        begin.append(first)
        end.append(max(first, min(out, (b - 1 + low) // stride + 1)) if b > a else first)
    return Box(tuple(begin), tuple(end))


def input_box(conv: Conv, box: Box) -> Box:
    """The box of inputs that the outputs inside `box` read; an empty box where they read padding only.

    Parameters
    ----------
    conv : Conv
        The whole convolution.
    box : Box
        Positions of its output.

    Examples
    --------
    >>> from convgrad import Conv
    >>> from convgrad.tile import Box, input_box
    >>> input_box(Conv(1, 1, 1, (16,), (3,), stride=2, padding=1), Box((0,), (4,)))
    Box(begin=(0,), end=(8,))
    """
    conv = checked_conv(conv)
    box = checked_box(box, conv.out_size, "box")
    begin, end = [], []
    for u, v, (low, _), span, stride, size in zip(box.begin, box.end, conv.padding, conv.span, conv.stride,
                                                  conv.in_size):
        first = min(size, max(0, u * stride - low))
        begin.append(first)
        end.append(max(first, min(size, (v - 1) * stride - low + span)) if v > u else first)
    return Box(tuple(begin), tuple(end))


def output_tile(conv: Conv, box: Box) -> Tile | None:
    """The convolution that gives the outputs inside `box`; None where they read padding only, or the box is empty.

    The parameters are those of `input_box`.
    """
    needed = input_box(conv, box)
    return None if needed.empty or Box(*box).empty else _tile(conv, needed, Box(*box))


def input_tile(conv: Conv, box: Box) -> Tile | None:
    """The convolution whose input gradient is that of the inputs inside `box`; None where no output reads any.

    The parameters are those of `grad_output_box`. The tile's own box of the input is smaller than `box` where the
    stride is larger than the spread kernel: no output reads the inputs before it, their gradient is zero.
    """
    needed = grad_output_box(conv, box)
    if needed.empty:
        return None
    begin = tuple(max(a, u * stride - low) for a, u, stride, (low, _) in zip(Box(*box).begin, needed.begin, conv.stride,
                                                                           conv.padding))
    return _tile(conv, Box(begin, Box(*box).end), needed)


def _tile(conv: Conv, inputs: Box, outputs: Box) -> Tile:
    pads = []
    for a, u, size, count, (low, _), span, stride in zip(inputs.begin, outputs.begin, inputs.size, outputs.size,
                                                         conv.padding, conv.span, conv.stride):
        local = low + a - u * stride
        pads.append((local, max(0, (count - 1) * stride + span - local - size)))
    local_conv = replace(conv, in_size=inputs.size, padding=tuple(pads))
    assert local_conv.out_size == outputs.size
    return Tile(local_conv, inputs, outputs)


def boxes_of(size: Sequence[int], parts: Sequence[int]) -> Iterator[Box]:
    """Cut extents `size` into `parts` per axis, as even as possible, and give the boxes, the last axis fastest.

    Examples
    --------
    >>> from convgrad.tile import boxes_of
    >>> [box.size for box in boxes_of((7, 4), (2, 1))]
    [(4, 4), (3, 4)]
    """
    if len(size) != len(parts):
        raise ValueError(f"parts must have one value per axis ({len(size)}), got {tuple(parts)}")
    ranges = []
    for axis, (extent, asked) in enumerate(zip(size, parts)):
        count = checked_int(asked, f"parts[{axis}]", 1)
        short, longer = divmod(extent, count)
        edges = [place * short + min(place, longer) for place in range(count + 1)]
        ranges.append(list(itertools.pairwise(edges)))
    for ends in itertools.product(*ranges):
        yield Box(tuple(first for first, _ in ends), tuple(last for _, last in ends))
