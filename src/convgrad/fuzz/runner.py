"""The search: cases from the generator to the processes, failures shrunk, everything counted."""

from __future__ import annotations

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
    """Runs cases until their count, the time, or the number of different failures is reached."""

    generator: Generator
    workers: Workers
    count: int | None = None
    seconds: float | None = None
    most_failures: int = 5
    shrink_seconds: float = 60.0
    say: Callable[[str], None] = lambda text: None
    verdicts: Counter[str] = field(default_factory=Counter)
    sorts: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    failures: dict[tuple[str, ...], Failed] = field(default_factory=dict)
    found: list[tuple[tuple[str, ...], Case, Outcome]] = field(default_factory=list)  # not yet shrunk
    given: int = 0

    def run(self) -> None:
        began = time.monotonic()
        self.end = began + self.seconds if self.seconds is not None else float("inf")
        while not self.over():
            for answer in self.workers.judge(self.cases()):
                if answer is not None:
                    self.note(*answer)
                self.say(f"{sum(self.verdicts.values()):,} problems, {self.failed:,} failed")
            for kind, case, outcome in self.found:
                self.failures[kind] = self.smallest(case, outcome)
            self.found.clear()
        self.spent = time.monotonic() - began

    def over(self) -> bool:
        return (time.monotonic() > self.end or (self.count is not None and self.given >= self.count)
                or len(self.failures) >= self.most_failures)

    def cases(self) -> Iterator[tuple[str, Case]]:
        """The next cases; they end for a while when a new failure waits to be shrunk."""
        while not self.over() and not self.found:
            self.given += 1
            yield self.generator.case(self.given - 1)

    @property
    def failed(self) -> int:
        return sum(count for verdict, count in self.verdicts.items() if Outcome(verdict).failed)

    def note(self, sort: str, case: Case, outcome: Outcome) -> None:
        self.verdicts[outcome.verdict] += 1
        self.sorts[sort] += 1
        self.families.update(outcome.families)
        kind = kind_of(outcome)
        if outcome.failed and kind not in self.failures and kind not in [known for known, _, _ in self.found]:
            self.found.append((kind, case, outcome))

    def smallest(self, case: Case, outcome: Outcome) -> Failed:
        last = [outcome]

        def first_failing(cases: Sequence[Case]) -> int | None:
            answers = [answer for answer in self.workers.judge(enumerate(cases)) if answer is not None]
            self.say(f"making a failure small: {cases[0].problem}")
            alike = {place: found for place, _, found in answers if found.verdict == outcome.verdict}
            if not alike:
                return None
            last[0] = alike[min(alike)]
            return int(min(alike))

        small = shrink(case, first_failing, max(1, len(self.workers.workers)), self.shrink_seconds)
        return Failed(case, small, last[0])


def kind_of(outcome: Outcome) -> tuple[str, ...]:
    """Failures of one kind are shown once: verdict, kernel families, and the message without problem and numbers."""
    message = re.sub(r"'.*?'|[\d.]+|\(.*?\)", "", outcome.detail)[:60]
    if outcome.verdict == "error":
        return outcome.verdict, message
    return outcome.verdict, *outcome.families
