"""Who sums which lines: tiles of the weight gradient have different numbers of lines, which programs share.

A tile has only the lines on which one of its taps reads x; at the border of an image others add nothing. Its lines are
either cut into as many runs as those of the other tiles, or the lines of all tiles, one tile after the other, are dealt
out to programs in equal shares, which leaves no multiprocessor idle but needs both operands in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .geometry import Geometry
from .tiles import Box


class Segment(NamedTuple):
    """Lines begin..end of a tile, summed into its part `part`; `fill` further parts of the tile get zeros."""

    tile: int
    part: int
    begin: int
    end: int
    fill: int


NONE = Segment(0, -1, 0, 0, 0)


@dataclass(frozen=True)
class Lines:
    """How a tile walks over the pixels."""

    length: int  # of a chain
    spread: int  # chains between each other: one per residue of the dilation
    boxes: tuple[int, int, int, int]  # on (n, three axes), 1 on the axis of the chain


def lines_of(geo: Geometry, box: Box, axis: int, chain: bool) -> Lines:
    boxes = [-(-extent // size) for extent, size in zip((geo.batch, *geo.y), box)]
    length = spread = 1
    if chain:
        spread = geo.dilation[axis] if geo.stride[axis] == 1 else 1
        length, boxes[1 + axis] = -(-geo.y[axis] // spread), 1
    return Lines(length, spread, tuple(boxes))  # type: ignore[arg-type]


def boxes_inside(geo: Geometry, box: Box, axis: int, first_tap: int, taps: int) -> int:
    """Number of boxes of an axis on which one of some taps reads x (see weight_lines.boxes_inside)."""
    stride, dilation = geo.stride[axis], geo.dilation[axis]
    reach = first_tap * dilation - geo.pad[axis]
    low = -(-max(0, -(reach + (taps - 1) * dilation)) // stride)
    high = min((geo.x[axis] - 1 - reach) // stride + 1, geo.y[axis])
    return max(0, -(-high // box[1 + axis]) - low // box[1 + axis])


def boxes_of_axis(geo: Geometry, box: Box, a: int, axis: int, taps: int, chain: int) -> list[int]:
    """Boxes of axis `a` by first tap, where tiles have `taps` of `axis`; `chain`: lines of a chain along it, or 0.

    A tile's lines are a product of one number of each axis and of the boxes of images.
    """
    step = taps if a == axis else 1
    if chain and a == axis:
        return [chain] * -(-geo.kernel[a] // taps)
    return [boxes_inside(geo, box, a, tap, step) for tap in range(0, geo.kernel[a], step)]


def lines_of_taps(geo: Geometry, box: Box, axis: int, taps: int, chain: bool, length: int) -> list[int]:
    """Lines of the tiles with the same channels, by their first tap in the order of tiles.

    `length` counts the lines of one chain, all residues together, or is 1.
    """
    first, second, third = (boxes_of_axis(geo, box, a, axis, taps, length if chain else 0) for a in range(3))
    images = -(-geo.batch // box[0])
    return [images * b0 * b1 * b2 for b0 in first for b1 in second for b2 in third]


def count_lines(geo: Geometry, box: Box, axis: int, taps: int, chain: bool, length: int) -> tuple[int, int, int]:
    """How many numbers `lines_of_taps` gives, their sum and the largest."""
    first, second, third = (boxes_of_axis(geo, box, a, axis, taps, length if chain else 0) for a in range(3))
    images = -(-geo.batch // box[0])
    return (len(first) * len(second) * len(third), images * sum(first) * sum(second) * sum(third),
            images * max(first) * max(second) * max(third))


def lines_of_tiles(by_taps: Sequence[int], channel_tiles: int, groups: int) -> list[int]:
    """Lines of all tiles: channels fastest, then taps, then groups."""
    return [lines for lines in by_taps for _ in range(channel_tiles)] * groups


def dealt_out(lines: Sequence[int], programs: int) -> list[list[Segment]]:
    """The lines of all tiles in equal shares."""
    share = max(1, -(-sum(lines) // programs))
    found: list[list[Segment]] = [[]]
    room = share
    parts = [0] * len(lines)
    for tile, count in enumerate(lines):
        begin = 0
        while begin < count or (count == 0 and parts[tile] == 0):
            if room == 0:
                found.append([])
                room = share
            end = min(count, begin + room)
            found[-1].append(Segment(tile, parts[tile], begin, end, 0))
            room -= end - begin
            parts[tile] += 1
            begin = end
    most = max(parts)
    return [[segment._replace(fill=most - parts[segment.tile]) if segment.part == parts[segment.tile] - 1 else segment
             for segment in program] for program in found]


def most_parts(schedule: Sequence[Sequence[Segment]]) -> int:
    """Into how many parts a tile falls at most."""
    return 1 + max(segment.part for program in schedule for segment in program)


def as_table(schedule: Sequence[Sequence[Segment]]) -> tuple[list[int], int]:
    """The schedule as numbers, all programs with as many segments as the longest, and how many these are."""
    most = max(map(len, schedule))
    padded = [[*program, *[NONE] * (most - len(program))] for program in schedule]
    return [number for program in padded for segment in program for number in segment], most


def shares(tiles: int, total_lines: int, programs: int) -> tuple[int, int]:
    """About how many lines and segments a program has when the lines are dealt out."""
    share = -(-total_lines // programs)
    return share, 1 + math.ceil(share * tiles / max(1, total_lines))


def split_counts(tiles: int, lines: int, slots: int, most: int) -> list[int]:
    """Numbers of runs that fill whole waves of programs."""
    limit = max(1, min(most, lines // 4))
    found = {1, *(waves * slots // tiles for waves in range(1, 9))}
    return sorted([count for count in found if 1 <= count <= limit])
