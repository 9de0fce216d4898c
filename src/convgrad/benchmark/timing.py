"""Contestants that alternate: so that a slow minute of the machine is a slow minute for all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

TURN_SECONDS = 0.02   # a turn repeats a fast contestant until about this much time has passed
MAX_REPEATS = 50
ROUNDS = 25           # at most
FEWEST = 3            # samples of a contestant, unless one run takes longer than its whole share of time
REST_SECONDS = 0.03   # between turns: OpenMP workers spin on after a parallel region, over 15 ms where PAUSE is slow
HOPELESS = 1.5        # a rival layout of the same contestant this much slower than the best is not run again

# Processor time leaves out the moments in which other processes ran; it makes sense for one thread only.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Contestant:
    """Something to time: `turn(repeats)` returns the seconds of each repetition."""

    name: str
    layout: str
    turn: Callable[[int], list[float]]
    scale: float = 1.0  # of its times: a contestant that runs only a part of the problem is scaled up
    samples: list[float] = field(default_factory=list)
    first: float = 0.0  # seconds of the first, warming run

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def summary(self) -> dict[str, Any]:
        """Median, quartiles and best of the samples, in seconds."""
        q1, middle, q3 = quartiles(self.samples)
        return {"median_s": middle, "q1_s": q1, "q3_s": q3, "best_s": min(self.samples), "runs": len(self.samples),
                **({"scaled": self.scale} if self.scale != 1 else {})}


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of at least one sample."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    q1, middle, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return q1, middle, q3


def clocked(function: Callable[[], Any], repeats: int, clock: str = "wall") -> list[float]:
    """Return the seconds of each of `repeats` calls."""
    now, seconds = CLOCKS[clock], []
    for _ in range(repeats):
        start = now()
        function()
        seconds.append(now() - start)
    return seconds


def alternate(contestants: Sequence[Contestant], seconds: float, rest: float = REST_SECONDS,
              rounds: int = ROUNDS, most: int = MAX_REPEATS) -> None:
    """Run all contestants in turn until each has had about `seconds` of running time, or `rounds` turns of `most` runs.

    The first run of each only warms up (caches, plans, memory), unless it takes longer than `seconds` itself.
    """
    spent = {id(c): 0.0 for c in contestants}
    for contestant in contestants:
        (contestant.first,) = contestant.turn(1)
        if contestant.first > seconds:
            record(contestant, [contestant.first], spent)
        time.sleep(rest)
    for number in range(rounds):
        running = [c for c in contestants if wants_more(c, spent[id(c)], seconds) and
                   not (number and hopeless(c, contestants))]
        if not running:
            return
        for contestant in running:
            fastest = min([contestant.first, *(s / contestant.scale for s in contestant.samples)])
            repeats = min(most, max(1, int(TURN_SECONDS / max(fastest, 1e-7))))
            record(contestant, contestant.turn(repeats), spent)
            time.sleep(rest)


def record(contestant: Contestant, seconds: list[float], spent: dict[int, float]) -> None:
    contestant.samples += [s * contestant.scale for s in seconds]
    spent[id(contestant)] += sum(seconds)


def wants_more(contestant: Contestant, spent: float, seconds: float) -> bool:
    if not contestant.samples:
        return True
    return spent < seconds or (len(contestant.samples) < FEWEST and spent < 4 * seconds)


def hopeless(contestant: Contestant, contestants: Sequence[Contestant]) -> bool:
    """Whether another layout of the same name is far ahead: only the faster of a peer's layouts counts."""
    rivals = [c.median for c in contestants if c.name == contestant.name and c.samples]
    return bool(contestant.samples) and contestant.name != "convgrad" and contestant.median > HOPELESS * min(rivals)
