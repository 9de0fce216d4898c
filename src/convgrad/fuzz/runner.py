"""The search: cases from the generator to the processes, failures shrunk, everything counted."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .case import Case
from .generator import Generator
from .judge import Outcome
from .shrink import shrink
from .workers import Workers


@dataclass(frozen=True)
class Failed:
    """A failure: the case as it was drawn, the smallest one like it, and what is wrong with that."""

    drawn: Case
    case: Case
    outcome: Outcome


@dataclass
class Search:
    """Runs cases until their count, the time, or the number of kinds of failures is reached."""

    generator: Generator
    workers: Workers
    count: int | None = None
    seconds: float | None = None
    most_failures: int = 5
    shrink_seconds: float = 20.0  # for all of them
    say: Callable[[str], None] = lambda text: None  # the state, often
    tell: Callable[[str], None] = lambda text: None  # a new kind of failure, at once
    verdicts: Counter[str] = field(default_factory=Counter)
    sorts: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    found: dict[tuple[str, ...], tuple[Case, Outcome]] = field(default_factory=dict)  # the first of every kind
    spent: float = 0.0  # seconds of the search

    def run(self) -> None:
        """Judge cases and count them."""
        began = time.monotonic()
        end = began + self.seconds if self.seconds is not None else float("inf")
        for answer in self.workers.judge(self.cases(end), end):
            if answer is not None:
                self.note(*answer)
            self.say(f"{sum(self.verdicts.values()):,} problems, {self.failed:,} failed")
        self.spent = time.monotonic() - began

    def smallest_failures(self) -> list[Failed]:
        """Make one failure of every kind small."""
        return [self.smallest(case, outcome) for case, outcome in self.found.values()]

    def cases(self, end: float) -> Iterator[tuple[str, Case]]:
        for index in itertools.count() if self.count is None else range(self.count):
            if time.monotonic() > end or len(self.found) >= self.most_failures:
                return
            yield self.generator.case(index)

    @property
    def failed(self) -> int:
        return sum(count for verdict, count in self.verdicts.items() if Outcome(verdict).failed)

    def note(self, sort: str, case: Case, outcome: Outcome) -> None:
        self.verdicts[outcome.verdict] += 1
        self.sorts[sort] += 1
        self.families.update(outcome.families)
        kind = kind_of(outcome)
        if outcome.failed and kind not in self.found:
            self.found[kind] = case, outcome
            self.tell(f"{outcome.verdict}: {outcome.detail.strip()[:400]}\n  {case}")

    def smallest(self, case: Case, outcome: Outcome) -> Failed:
        last = [outcome]
        seconds = self.shrink_seconds / len(self.found)
        end = time.monotonic() + seconds

        def first_failing(cases: Sequence[Case]) -> int | None:
            answers = [answer for answer in self.workers.judge(enumerate(cases), end) if answer is not None]
            self.say(f"making a failure small: {cases[0].problem}")
            alike = {place: found for place, _, found in answers if found.verdict == outcome.verdict}
            if not alike:
                return None
            last[0] = alike[min(alike)]
            return int(min(alike))

        small = shrink(case, first_failing, max(1, len(self.workers.workers)), seconds)
        return Failed(case, small, last[0])


def kind_of(outcome: Outcome) -> tuple[str, ...]:
    """Failures of one kind are shown once: verdict, kernel families, and the message without problem and numbers."""
    message = re.sub(r"'.*?'|[\d.]+|\(.*?\)", "", outcome.detail)[:60]
    if outcome.verdict == "error":
        return outcome.verdict, message
    return outcome.verdict, *outcome.families
