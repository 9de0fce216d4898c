"""The benchmark itself: for every layer, number format and gradient one row, verified and then timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..problem import DTYPES, Problem, Unsupported
from .arena import Arena
from .judge import WrongResult
from .layers import GRADIENTS, Layer
from .peers import PeerFailed
from .timing import Contestant, alternate

Row = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """What to measure of each layer, and for how long."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    gradients: tuple[str, ...] = GRADIENTS
    layouts: tuple[str, ...] | None = None  # None: all of the layer's
    seconds: float = 0.25                   # of running time per contestant
    limit_seconds: float | None = None      # for all rows together


def measure(layers: Sequence[Layer], choice: Choice, arena: Arena,
            done: Callable[[Row | None], None] = lambda row: None) -> tuple[list[Row], int]:
    """Measure all rows; `done` hears of each. Return the rows and how many the time limit left out."""
    end = time.monotonic() + choice.limit_seconds if choice.limit_seconds else float("inf")
    rows: list[Row] = []
    skipped = 0
    for layer in layers:
        for dtype in choice.dtypes:
            for gradient in choice.gradients:
                if time.monotonic() >= end:
                    skipped += 1
                    done(None)
                    continue
                rows.append(measure_row(layer, gradient, dtype, choice, arena))
                done(rows[-1])
    return rows, skipped


def measure_row(layer: Layer, gradient: str, dtype: str, choice: Choice, arena: Arena) -> Row:
    """Verify and time one gradient of one layer in one number format."""
    layouts = [name for name in layer.layouts if not choice.layouts or name in choice.layouts] or list(layer.layouts)
    questions = {name: layer.question(gradient, dtype, name, arena.device) for name in layouts}
    first = questions[layouts[0]]
    row: Row = {"layer": layer.name, "class": layer.kind, "model": layer.model, "gradient": gradient,
                "dtype": DTYPES[first.dtype][0], "problem": str(first), "transposed": layer.transposed,
                "flops": layer.flops(gradient), "min_bytes": first.min_bytes,
                "ceiling_s": arena.seconds_at_ceiling(first), "ours": {}, "peer": None, "ratio": None}
    arena.prepare(first.with_(layout="", weight_layout=""), layer, gradient)
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
    rivals, row["peer"] = meet_peers(layer, first, arena)
    contend(contestants, rivals, row, choice.seconds, arena)
    for contestant in contestants:
        row["ours"][contestant.layout].update(contestant.summary())
    compare(row)
    return row


def reason_of(error: Exception) -> str:
    """Why there is no time of ours: what the fast backends said, or what was wrong with the result of which kernel."""
    reasons = error.reasons if isinstance(error, Unsupported) else {}
    return "; ".join(f"{backend}: {why}" for backend, why in reasons.items() if backend != "reference") or str(error)


def meet_peers(layer: Layer, problem: Problem, arena: Arena) -> tuple[list[Contestant], Row | None]:
    try:
        rivals, notes = arena.peers(layer, problem)
    except PeerFailed as error:
        return [], {"error": str(error), "ways": {}, "notes": []}
    return rivals, {"name": rivals[0].name, "ways": {}, "notes": notes} if rivals else None


def contend(ours: list[Contestant], rivals: list[Contestant], row: Row, seconds: float, arena: Arena) -> None:
    """Alternate all; when the peer fails in the middle, go on without it."""
    try:
        alternate([*ours, *rivals], seconds, arena.rest, arena.rounds)
    except PeerFailed as error:
        row["peer"]["error"] = str(error)
        rivals.clear()
        alternate(ours, seconds, arena.rest, arena.rounds)
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

