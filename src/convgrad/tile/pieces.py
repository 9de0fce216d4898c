"""A tensor that lies in pieces: a block and the halo slabs around it, read where they are.

Results that depend on one piece are computed from a view of it. Those near a seam, where two pieces meet, depend on
both: what they read is copied into a small array, so that each is still summed in one place. The copies are as wide as
the kernel reaches; the interior of a piece is never copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..frontends import Kind
from ..problem import Conv, checked_ints
from .boxes import Box

Ranges = list[tuple[int, int]]


class Piece(NamedTuple):
    """A (batch, channels, spatial) array, and the place of its first position in the whole tensor."""

    begin: tuple[int, ...]
    array: Any


class Pieces:
    """Arrays of one tensor by the boxes they hold, as a backend reads them."""

    def __init__(self, kind: Kind, format_name: str, views: list[tuple[Box, Any]], like: Any) -> None:
        self.kind, self.format_name, self.views, self.like = kind, format_name, views, like

    def cuts(self, needed: Box) -> list[list[int]]:
        """Per axis, where a piece begins or ends inside the box; none where one piece holds it all."""
        if any(needed.within(box) for box, _ in self.views):
            return [[] for _ in needed.begin]
        edges = [{edge for box, _ in self.views for edge in (box.begin[axis], box.end[axis])}
                 for axis in range(len(needed.begin))]
        return [sorted(edge for edge in found if first < edge < last)
                for found, first, last in zip(edges, needed.begin, needed.end)]

    def cells(self, needed: Box) -> Iterator[tuple[Box, Box | None, Any]]:
        """The parts of the box between cuts, each with the first piece that holds it (or None, None)."""
        edges = [[first, *cuts, last] for first, cuts, last in zip(needed.begin, self.cuts(needed), needed.end)]
        for ends in itertools.product(*map(list, map(itertools.pairwise, edges))):
            cell = Box(tuple(first for first, _ in ends), tuple(last for _, last in ends))
            yield cell, *next(((box, view) for box, view in self.views if cell.within(box)), (None, None))

    def check_cover(self, needed: Box, name: str) -> None:
        for cell, box, _ in self.cells(needed):
            if box is None:
                raise ValueError(f"{name}: no piece holds the box from {cell.begin} to {cell.end}; the tile reads "
                                 f"{needed.begin} to {needed.end}")

    def read(self, needed: Box) -> Any:
        """The box as one array: a view of the piece that holds it, or a copy from several."""
        for box, view in self.views:
            if needed.within(box):
                return view[needed.slices(box.begin)]
        shape = (*self.views[0][1].shape[:2], *needed.size)
        copy = self.kind.operand(self.kind.empty(shape, self.format_name, self.like), "a seam", None, self.format_name)
        for cell, holder, view in self.cells(needed):
            if holder is not None:
                copy[cell.slices(needed.begin)] = view[cell.slices(holder.begin)]
        return copy


def checked_pieces(pieces: object, size: tuple[int, ...], shape: tuple[int, ...], name: str) -> list[Piece]:
    """A sequence of pieces of a tensor of spatial `size` with (batch, channels) `shape`."""
    if not isinstance(pieces, Sequence) or isinstance(pieces, str) or not pieces:
        raise TypeError(f"{name} must be a sequence of at least one Piece (begin, array), got {type(pieces).__name__}")
    found = []
    for place, piece in enumerate(pieces):
        if not isinstance(piece, tuple) or len(piece) != 2 or not hasattr(piece[1], "shape"):
            raise TypeError(f"{name}[{place}] must be a Piece (begin, array), got {type(piece).__name__}")
        begin = checked_ints(piece[0], f"{name}[{place}].begin", len(size), 0)
        extents = tuple(piece[1].shape)
        if len(extents) != len(size) + 2 or extents[:2] != shape:
            raise ValueError(f"{name}[{place}] has shape {extents}, but (batch, channels) = {shape} and {len(size)} "
                             "spatial axes are expected")
        for axis, (first, extent, limit) in enumerate(zip(begin, extents[2:], size)):
            if first + extent > limit:
                raise ValueError(f"{name}[{place}] goes from {first} to {first + extent} on axis {axis}, which is not "
                                 f"inside 0 to {limit}")
        found.append(Piece(begin, piece[1]))
    return found


Seam = Callable[[Conv, int, int], tuple[int, int]]


def seam_of_inputs(conv: Conv, axis: int, cut: int) -> tuple[int, int]:
    """Inputs read by outputs on both sides of a cut of the output: cut*s - low <= i < (cut-1)*s - low + span."""
    low, stride = conv.padding[axis][0], conv.stride[axis]
    return cut * stride - low, (cut - 1) * stride - low + conv.span[axis]


def seam_of_outputs(conv: Conv, axis: int, cut: int) -> tuple[int, int]:
    """Outputs that read inputs on both sides of a cut of the input: o*s - low < cut < o*s - low + span."""
    low, stride = conv.padding[axis][0], conv.stride[axis]
    return (cut + low - conv.span[axis]) // stride + 1, (cut + low - 1) // stride + 1


def parts_of(conv: Conv, box: Box, cuts: list[list[int]], seam: Seam) -> Iterator[Box]:
    """Cut a box of results into the parts that depend on one piece, and those near seams; a fixed order."""
    axes = [segments(first, last, [seam(conv, axis, cut) for cut in cuts[axis]])
            for axis, (first, last) in enumerate(zip(box.begin, box.end))]
    for ends in itertools.product(*axes):
        yield Box(tuple(first for first, _ in ends), tuple(last for _, last in ends))


def segments(first: int, last: int, seams: Ranges) -> Ranges:
    """Cut a range at the ends of the seams inside it; seams that overlap become one.

    A seam without results is still a cut: those on its two sides read different pieces.
    """
    found: Ranges = []
    merged: Ranges = []
    for begin, end in sorted((max(first, min(begin, last)), min(last, max(begin, end))) for begin, end in seams):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    at = first
    for begin, end in [*merged, (last, last)]:
        found += [(at, begin)] if begin > at else []
        found += [(begin, end)] if end > begin else []
        at = max(at, end)
    return found
