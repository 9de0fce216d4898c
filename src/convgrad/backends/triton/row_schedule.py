"""Who sums which steps of rows of pixels (see `row_weight.py`): tiles whole as far as that is even, the others shared.

Only sums of tiles that several programs share wait in memory, one slot of a tile's size for each, to be added in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

SHORTEST = 6  # steps that are worth a segment of their own
TO_RESULT, NOWHERE = -1, -2


class Segment(NamedTuple):
    """Steps begin..end of a tile; their sums go to a slot, or to the result itself."""

    tile: int
    slot: int
    begin: int
    end: int


class Schedule(NamedTuple):
    """The segments of each program, and of each tile that is shared its number, its first slot and how many it has."""

    programs: list[list[Segment]]
    shared: list[tuple[int, int, int]]

    @property
    def slots(self) -> int:
        return sum(count for _, _, count in self.shared)

    @property
    def segments(self) -> int:
        """Of the program that has most."""
        return max(map(len, self.programs))

    def table(self) -> list[int]:
        """The segments as numbers, of all programs as many."""
        most = self.segments
        return [number for program in self.programs
                for segment in [*program, *[Segment(0, NOWHERE, 0, 0)] * (most - len(program))] for number in segment]


def even_shares(steps: Sequence[int], programs: int) -> Schedule:
    """The steps of all tiles in about equal shares; longer tiles first, so that short ones fill the gaps."""
    share = max(1, -(-sum(steps) // programs), min(SHORTEST, max(steps)))
    found: list[list[Segment]] = [[] for _ in range(programs)]
    loads = [(0, program) for program in range(programs)]
    rest = []
    for tile in sorted(range(len(steps)), key=lambda tile: -steps[tile]):
        load, program = loads[0]
        if load + steps[tile] <= share:
            found[program].append(Segment(tile, TO_RESULT, 0, steps[tile]))
            heapq.heapreplace(loads, (load + steps[tile], program))
        else:
            rest.append(tile)
    cuts: dict[int, list[tuple[int, int, int]]] = {tile: [] for tile in rest}
    filled = {program: load for load, program in loads}
    roomy = iter([program for program in range(programs) if share - filled[program] >= SHORTEST])
    program = next(roomy, -1)
    for tile in rest:
        begin = 0
        while begin < steps[tile]:
            if program >= 0 and share - filled[program] < SHORTEST:
                program = next(roomy, -1)
            goes_to = program if program >= 0 else min(filled, key=lambda one: filled[one])
            end = begin + share - filled[goes_to]
            if program < 0 or steps[tile] - end < SHORTEST:
                end = steps[tile]
            cuts[tile].append((goes_to, begin, end))
            filled[goes_to] += end - begin
            begin = end
    shared, slot = [], 0
    for tile, pieces in cuts.items():
        if len(pieces) > 1:
            shared.append((tile, slot, len(pieces)))
        for one, begin, end in pieces:
            found[one].append(Segment(tile, slot if len(pieces) > 1 else TO_RESULT, begin, end))
            slot += len(pieces) > 1
    return Schedule([program for program in found if program], shared)
