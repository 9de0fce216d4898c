"""A kernel as the registry knows it, what is asked of it, and the choice among all.

`choose` is the only place where kernels compete. Each says in words why it cannot serve; of those that can, the one
with the fewest expected seconds is built, and nothing else is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...problem import DTYPES, Problem
from .flat import flattened
from .geometry import Geometry, geometry
from .gpu import Gpu, needs_hopper
from .tiles import workspace_limit
from .tuning import Entry, entry_of, fields_of

Operands = tuple[Any, ...]
Run = Callable[[Operands, tuple[Any, ...], Any], None]  # (operands, results, workspace)


@dataclass(frozen=True)
class Query:
    """A problem, a card, and tensors: real ones, or on the meta device, of which only shapes and strides are read."""

    problem: Problem
    gpu: Gpu
    operands: Operands
    results: tuple[Any, ...]
    max_workspace: int | None = None  # bytes
    kernels: tuple[Kernel, ...] = field(default=(), repr=False)
    tuned: bool = True  # whether measured entries count

    @cached_property
    def geo(self) -> Geometry:
        return geometry(self.problem.conv)

    @property
    def result(self) -> Any:
        return self.results[0]

    @property
    def limit(self) -> int:
        """Bytes of workspace: what the caller allows, or max(64 MiB, twice the weight in float32)."""
        return workspace_limit(self.geo, self.max_workspace)

    @property
    def short(self) -> str:
        """The number format's short name."""
        return DTYPES[self.problem.dtype][0]

    def channels_last(self) -> bool:
        return self.problem.layout.endswith("C")


@dataclass(frozen=True)
class Prepared:
    """A kernel with its tile: `run(operands, results, workspace)` launches, no decisions left.

    One that gives a weight gradient with `bias_bytes` (of workspace, more) sums the bias gradient as well, where `run`
    gets that result too. `scales`: takes the three scales of a scaled problem behind the operands.
    """

    name: str
    note: str
    workspace_bytes: int
    run: Run
    bias_bytes: int = 0
    scales: bool = False


@dataclass(frozen=True)
class Kernel:
    """One way to compute some results; a reason is a text that says what does not fit, None that all does."""

    name: str  # of entries in tuning files, and what CONVGRAD_GPU_WITHOUT names
    results: frozenset[str]  # what may be asked: values of Problem.wrt
    supports: Callable[[Problem, Geometry], str | None]
    accepts: Callable[[Query], str | None]  # how the tensors lie
    tiles: Callable[[Query], Iterable[Any]]
    build: Callable[[Query, Any], Prepared]
    tile: Callable[..., Any] | None = None  # made of a tuning entry's fields; None: there is nothing to tune
    seconds: Callable[[Query, Any], float] = lambda query, tile: float(tile.seconds)
    requires: Callable[[Gpu], str | None] = needs_hopper
    kind: Callable[[Query, Any], Hashable] = lambda query, tile: tile  # of which tuning measures one tile each
    measured: int = 6  # kinds that tuning measures
    candidates: Callable[[Query], Iterable[Any]] | None = None  # for tuning, where more than `tiles` are worth it
    depthwise: bool = False  # one channel a group, for which the others do not compete
    eight_bits: bool = False  # rounds results to 8-bit formats
    copies: bool = False  # an adapter that copies tensors, and asks for the rest without its like
    fallback: bool = False  # only where no other serves

    def why_not(self, query: Query) -> str | None:
        """Why this kernel cannot serve at all; None where it may."""
        problem = query.problem
        if problem.wrt not in self.results:
            return f"computes {' or '.join(sorted(self.results))}"
        if problem.wrt != "bias" and query.geo.depthwise != self.depthwise:
            return "one channel a group only" if self.depthwise else "one channel a group has kernels of its own"
        if disabled(self.name):
            return "disabled by CONVGRAD_GPU_WITHOUT"
        if DTYPES[problem.out_dtype][1] == 1 and not self.eight_bits:
            return "does not store 8-bit results"
        return self.requires(query.gpu) or self.supports(problem, query.geo) or self.accepts(query)


@dataclass(frozen=True)
class Choice:
    """The kernel that won, built, and why the others did not."""

    query: Query
    kernel: Kernel
    tile: Any
    seconds: float
    prepared: Prepared
    source: str  # of the tile: the cost model, or a measured entry
    reasons: dict[str, str]


def disabled(name: str) -> bool:
    """Whether CONVGRAD_GPU_WITHOUT, words as in "cells,lines", names the beginning of a kernel's name."""
    words = os.environ.get("CONVGRAD_GPU_WITHOUT", "").split(",")
    return any(f"{name}_".startswith(f"{word}_") for word in words if word)


def choose(query: Query, entry: Entry | None = None) -> Choice | None:
    """The fastest kernel and tile that serve the query, None where there is none; `entry`: what to take, if it fits.

    Without one, measured entries come before the models.
    """
    if entry is not None:
        return fastest(query, named(query, entry), entry, "given")
    entry, source = None, ""
    if query.tuned and flattened(query.problem) is None:  # entries of such problems are for what they become
        entry, source = entry_of(query.problem, query.gpu)
    measured = None if entry is None else fastest(query, named(query, entry), entry, source)
    return measured or fastest(query, query.kernels, None, "cost model (no measured entry)")


def named(query: Query, entry: Entry) -> tuple[Kernel, ...]:
    """The kernels that an entry names; "plain": those that serve where no other does."""
    return tuple(kernel for kernel in query.kernels
                 if kernel.name == entry["kernel"] or (entry["kernel"] == "plain" and kernel.fallback))


def fastest(query: Query, kernels: tuple[Kernel, ...], entry: Entry | None, source: str) -> Choice | None:
    """The choice among some kernels."""
    reasons: dict[str, str] = {}
    found: list[tuple[bool, float, int, Kernel, Any]] = []
    for place, kernel in enumerate(kernels):
        reason = kernel.why_not(query)
        if reason is None:
            tile, seconds = best_tile(kernel, query, entry)
            if tile is not None:
                found.append((kernel.fallback, seconds, place, kernel, tile))
                continue
            reason = "no tile fits the registers, shared memory or workspace"
        reasons[kernel.name] = reason
    found.sort(key=lambda candidate: candidate[:3])
    for place, (_, seconds, _, kernel, tile) in enumerate(found):
        prepared = kernel.build(query, tile)
        if query.max_workspace is None or prepared.workspace_bytes <= query.max_workspace:
            slower = {other.name: "serves where no other does" if other.fallback else f"{1e6 * time:.0f} us expected"
                      for _, time, _, other, _ in found[place + 1:]}
            return Choice(query, kernel, tile, seconds, prepared, source, {**reasons, **slower})
        reasons[kernel.name] = f"needs {prepared.workspace_bytes} bytes of workspace"
    return None


def best_tile(kernel: Kernel, query: Query, entry: Entry | None) -> tuple[Any, float]:
    """The tile that an entry names, or the fastest by the model, with its expected seconds; (None, inf): none."""
    if entry is not None and entry["kernel"] == kernel.name and kernel.tile is not None:
        tile = kernel.tile(**fields_of(entry))
        return tile, kernel.seconds(query, tile)
    best, least = None, math.inf
    for tile in kernel.tiles(query):
        seconds = kernel.seconds(query, tile)
        if best is None or seconds < least:
            best, least = tile, seconds
    return best, least


def worth_measuring(kernel: Kernel, query: Query) -> list[Any]:
    """The fastest tiles of different kinds, for tuning."""
    if kernel.tile is None or kernel.why_not(query) is not None:
        return []
    found: dict[Hashable, Any] = {}
    for tile in sorted((kernel.candidates or kernel.tiles)(query), key=lambda tile: kernel.seconds(query, tile)):
        found.setdefault(kernel.kind(query, tile), tile)
    return list(found.values())[:kernel.measured]
