"""The benchmark itself: for every layer, number format and gradient one row, verified and then timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..problem import DTYPES, Problem, Unsupported
from .arena import Arena
from .judge import WrongResult
from .layers import ALL_GRADIENTS, GRADIENTS, Layer
from .peers import PeerFailed
from .timing import Contestant, alternate

Row = dict[str, Any]
FAR_SLOWER = 1.3  # a layout of the peer that was slower than the other by this factor is not asked again


@dataclass(frozen=True)
class Choice:
    """What to measure of each layer, and for how long."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    gradients: tuple[str, ...] = GRADIENTS
    layouts: tuple[str, ...] | None = None  # None: all of the layer's
    seconds: float = 0.25                   # of running time per contestant
    limit_seconds: float | None = None      # for all rows together


class Measurer(Protocol):
    """Who measures rows: this process in an arena, or another one (see watched.py)."""

    device: str

    def describe(self) -> dict[str, Any]:
        """Machine, peer and ceilings, for the results."""

    def row(self, layer: Layer, gradient: str, dtype: str, choice: Choice, left_out: dict[str, float]) -> Row | None:
        """One row, without some ways of the peer; None where the time for all rows ended before it."""


class Here:
    """Rows of an arena, measured by this process."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.device, self.describe = arena, arena.device, arena.describe

    def row(self, layer: Layer, gradient: str, dtype: str, choice: Choice, left_out: dict[str, float]) -> Row | None:
        return measure_row(layer, gradient, dtype, choice, self.arena, left_out)


class PeerTimes:
    """What is known of the peer's layouts from other rows: of two, one that was far slower need not be searched again.

    To prepare a layout can take the peer longer than to time it (cuDNN tries all its algorithms). On a GPU float16 and
    bfloat16 run alike.
    """

    def __init__(self, device: str, rows: Iterable[Row] = ()) -> None:
        self.device = device
        self.seconds: dict[tuple[str, str, str], dict[str, float]] = {}
        for row in rows:
            self.add(row)

    def of(self, layer: str, gradient: str, dtype: str) -> dict[str, float]:
        """The known times of a row's ways."""
        return self.seconds.setdefault(
            (layer, gradient, "16 bits" if self.device == "cuda" and dtype in ("bf16", "f16") else dtype), {})

    def add(self, row: Row) -> None:
        """Take a row's times, and the seconds after which a way of the peer's was given up."""
        peer = row["peer"] or {}
        known = {way: entry["median_s"] for way, entry in peer.get("ways", {}).items()}
        self.of(row["layer"], row["gradient"], row["dtype"]).update({**peer.get("given_up", {}), **known})

    def far_slower(self, layer: str, gradient: str, dtype: str) -> dict[str, float]:
        """The ways that are not worth a search, with how many times slower than the best they were."""
        known = self.of(layer, gradient, dtype)
        if gradient == ALL_GRADIENTS and len(known) < 2:
            parts = [self.of(layer, part, dtype) for part in GRADIENTS]
            known = {way: sum(part[way] for part in parts) for way in parts[0] if all(way in part for part in parts)}
        best = min(known.values(), default=0.0)
        return {way: seconds / best for way, seconds in known.items() if seconds > FAR_SLOWER * best}


def measure(layers: Sequence[Layer], choice: Choice, measurer: Measurer,
            done: Callable[[Row | None], None] = lambda row: None, known: Iterable[Row] = ()) -> tuple[list[Row], int]:
    """Measure all rows; `done` hears of each. Return the rows and how many the time limit left out.

    `known` are rows measured before, from which the peer's faster layouts are known.
    """
    end = time.monotonic() + choice.limit_seconds if choice.limit_seconds else float("inf")
    rows: list[Row] = []
    skipped = 0
    times = PeerTimes(measurer.device, known)
    for dtype, layer, gradient in asked(layers, choice):
        row = None
        if time.monotonic() < end:
            left_out = times.far_slower(layer.name, gradient, DTYPES[dtype][0])
            row = measurer.row(layer, gradient, dtype, choice, left_out)
        if row is None:
            skipped += 1
        else:
            rows.append(row)
            times.add(row)
        done(row)
    return rows, skipped


def asked(layers: Sequence[Layer], choice: Choice) -> Iterator[tuple[str, Layer, str]]:
    """What the rows ask, in their order: number format, layer and gradient.

    Formats come one after the other, so that a run which ends early has the first one whole; the gradients of a layer
    follow each other, because the peer keeps what it found for two of them for the third.
    """
    return itertools.product(choice.dtypes, layers, choice.gradients)


def layouts_of(layer: Layer, choice: Choice) -> list[str]:
    """The layouts in which we are measured: those asked for, or the one that the layer fixes."""
    return [name for name in layer.layouts if not choice.layouts or name in choice.layouts] or list(layer.layouts)


def measure_row(layer: Layer, gradient: str, dtype: str, choice: Choice, arena: Arena,
                left_out: dict[str, float] | None = None) -> Row:
    """Verify and time one gradient of one layer in one number format.

    `left_out` are the peer's ways that are not tried, with how many times slower they were.
    """
    started = time.perf_counter()
    layouts = layouts_of(layer, choice)
    questions = {name: layer.question(gradient, dtype, name, arena.device) for name in layouts}
    first = questions[layouts[0]]
    row = blank_row(layer, gradient, first, arena.seconds_at_ceiling(first))
    arena.prepare(first.with_(layout="", weight_layout=""), layer, gradient)
    rivals, row["peer"] = meet_peers(layer, first, arena, left_out or {})
    prepared = time.perf_counter()
    contestants: list[Contestant] = []
    for name, problem in questions.items():
        try:
            entry = arena.ours(problem, name)
        except (Unsupported, WrongResult) as error:
            row["ours"][name] = {"error": reason_of(error), "wrong": isinstance(error, WrongResult)}
            continue
        contestants.append(entry.contestant)
        row["ours"][name] = {"backend": entry.plan.backend, "kernel": entry.plan.kernel,
                             "workspace_bytes": entry.plan.workspace_bytes,
                             "verified": entry.verified.how, "worst_error": entry.verified.worst}
    verified = time.perf_counter()
    ceiling = arena.products(first)
    contend([*contestants, *ceiling], rivals, row, choice.seconds, arena)
    for products in ceiling:
        row["ceiling"] = products.summary()
        row["ceiling_s"] = max(products.median, first.min_bytes / arena.ceilings.copy_bytes)
    row["spent_s"] = {name: round(seconds, 4) for name, seconds in (
        ("peer", prepared - started), ("ours", verified - prepared), ("timing", time.perf_counter() - verified))}
    for contestant in contestants:
        row["ours"][contestant.layout].update(contestant.summary())
    compare(row)
    return row


def blank_row(layer: Layer, gradient: str, problem: Problem, ceiling_s: float) -> Row:
    """A row before anything was measured."""
    return {"layer": layer.name, "class": layer.kind, "model": layer.model, "gradient": gradient,
            "dtype": DTYPES[problem.dtype][0], "problem": str(problem), "transposed": layer.transposed,
            "flops": layer.flops(gradient), "min_bytes": problem.min_bytes, "ceiling_s": ceiling_s, "ours": {},
            "peer": None, "ratio": None}


def reason_of(error: Exception) -> str:
    """Why there is no time of ours: what the fast backends said, or what was wrong with the result of which kernel."""
    reasons = error.reasons if isinstance(error, Unsupported) else {}
    return "; ".join(f"{backend}: {why}" for backend, why in reasons.items() if backend != "reference") or str(error)


def meet_peers(layer: Layer, problem: Problem, arena: Arena,
               left_out: dict[str, float]) -> tuple[list[Contestant], Row | None]:
    try:
        rivals, notes = arena.peers(layer, problem, left_out)
    except PeerFailed as error:
        return [], {"error": str(error), "ways": {}, "notes": []}
    notes = [*notes, *(f"{way} was {factor:.2g} times slower before: left out" for way, factor in left_out.items())]
    return rivals, {"name": rivals[0].name, "ways": {}, "notes": notes} if rivals else None


def contend(ours: list[Contestant], rivals: list[Contestant], row: Row, seconds: float, arena: Arena) -> None:
    """Alternate all; when the peer fails in the middle, go on without it."""
    try:
        alternate([*ours, *rivals], seconds, arena.rest, arena.rounds, arena.repeats)
    except PeerFailed as error:
        row["peer"]["error"] = str(error)
        rivals.clear()
        alternate(ours, seconds, arena.rest, arena.rounds, arena.repeats)
    for rival in rivals:
        row["peer"]["ways"][rival.layout] = rival.summary()


def compare(row: Row) -> None:
    """Fill in the ratio: the peer's time in its faster layout over ours in the same layout (above 1: we are faster)."""
    timed = {layout: entry for layout, entry in row["ours"].items() if "median_s" in entry}
    for entry in timed.values():
        entry["gflops"] = row["flops"] / entry["median_s"] / 1e9
        entry["of_ceiling"] = row["ceiling_s"] / entry["median_s"]
    ways = (row["peer"] or {}).get("ways")
    if not ways:
        return
    best = min(ways, key=lambda way: float(ways[way]["median_s"]))
    row["peer"].update(best=best, gflops=row["flops"] / ways[best]["median_s"] / 1e9,
                       estimated="scaled" in ways[best])
    if not timed or failed(row):  # a layout that is wrong is not made good by another one
        return
    layout = best if best in timed else min(timed, key=lambda name: float(timed[name]["median_s"]))
    row["ratio"], row["ratio_layout"] = ways[best]["median_s"] / timed[layout]["median_s"], layout
    row["ratio_of_best"] = ways[best]["best_s"] / timed[layout]["best_s"]  # less disturbed on a busy machine


def failed(row: Row) -> bool:
    """Whether any of our results was wrong."""
    return any(entry.get("wrong") for entry in row["ours"].values())

