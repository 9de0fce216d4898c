"""Candidates for tuning: the tiles worth measuring for a problem, every kernel's own pick first."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from ...problem import Problem
from .copied_plans import KERNEL as COPIED
from .flat import flattened
from .kernel import worth_measuring
from .registry import KERNELS, query_of
from .tuning import SEPARATE, Entry


def candidates(problem: Problem) -> list[Entry]:
    """All entries to measure for a problem; empty where there is nothing to choose."""
    problem = flattened(problem) or problem
    query = query_of(problem, tuned=False)
    if math.prod(problem.conv.output_shape) == 0 or problem.wrt == "bias" or (
            len(problem.results) > 1 and not query.geo.depthwise):
        return []
    found = [entry_for(kernel.name, tile) for kernel in KERNELS for tile in worth_measuring(kernel, query)]
    if found and "input" in problem.results and len(problem.results) > 1:
        found.insert(0, SEPARATE)
    if COPIED.why_not(query) is None:
        found.insert(0, {"kernel": COPIED.name})
    return [entry for place, entry in enumerate(found) if entry not in found[:place]]


def entry_for(kernel: str, tile: Any) -> Entry:
    """A kernel and its tile as a tuning file has them; a tile within a tile is written flat."""
    entry: Entry = {"kernel": kernel}
    for name, value in asdict(tile).items():
        entry |= value if isinstance(value, dict) else {name: value}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in entry.items()}
