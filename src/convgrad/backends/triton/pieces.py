"""Pieces of a problem, some images or some rows of one, each as a convolution of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ...problem import Conv


@dataclass(frozen=True)
class Piece:
    """Images from `image` on, and from `x_row` and `y_row` on the rows of one axis, as a convolution of their own."""

    conv: Conv
    image: int
    axis: int
    x_row: int
    y_row: int

    def x_of(self, tensor: Any) -> Any:
        return self.view(tensor, self.x_row, self.conv.in_size[self.axis])

    def y_of(self, tensor: Any) -> Any:
        return self.view(tensor, self.y_row, self.conv.out_size[self.axis])

    def view(self, tensor: Any, row: int, rows: int) -> Any:
        return tensor[self.image:self.image + self.conv.batch].narrow(2 + self.axis, row, rows)


def rows_of(conv: Conv, is_input: bool, axis: int, begin: int, end: int) -> tuple[int, int, int, int, int] | None:
    """First rows of x and y, rows of x and the padding of both sides, of some rows of the input gradient (or y)."""
    extent, outputs, stride, span = conv.in_size[axis], conv.out_size[axis], conv.stride[axis], conv.span[axis]
    low = conv.padding[axis][0]
    if is_input:
        x_first, x_last = begin, end - 1
        reach = -(-(begin + low - span + 1) // stride)
        y_first = min(max(0, min(reach, (begin + low) // stride)), outputs - 1)
        y_last = max(y_first, min(outputs - 1, (end - 1 + low) // stride))
    else:
        y_first, y_last = begin, end - 1
        x_first, x_last = max(0, begin * stride - low), min(extent, (end - 1) * stride - low + span) - 1
        if x_last < x_first:
            return None  # nothing but padding
    return (x_first, y_first, x_last - x_first + 1, low + x_first - y_first * stride,
            max(0, y_last * stride - low + span - 1 - x_last))


def pieces_of(conv: Conv, is_input: bool, axis: int, images: int, rows: int) -> list[Piece]:
    """The pieces of a problem, image after image; none where one would be nothing but padding."""
    extent = (conv.in_size if is_input else conv.out_size)[axis]
    begins = range(0, extent, rows)
    places = [rows_of(conv, is_input, axis, begin, min(extent, begin + rows)) for begin in begins]
    if len(places) == 1:
        places = [(0, 0, conv.in_size[axis], *conv.padding[axis])]
    alike = lru_cache(maxsize=None)(lambda batch, *row: with_rows(replace(conv, batch=batch), axis, *row))
    found = []
    for image in range(0, conv.batch, images):
        for place in places:
            if place is None:
                return []
            x_first, y_first, *row = place
            found.append(Piece(alike(min(images, conv.batch - image), *row), image, axis, x_first, y_first))
    return found


def with_rows(conv: Conv, axis: int, extent: int, low: int, high: int) -> Conv:
    """The convolution with another extent and padding of one axis."""
    sizes, pads = list(conv.in_size), list(conv.padding)
    sizes[axis], pads[axis] = extent, (low, high)
    return replace(conv, in_size=tuple(sizes), padding=tuple(pads))
