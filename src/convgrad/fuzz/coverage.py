"""`convgrad verify` on a GPU: every kernel family on problems that take its different tiles and paths.

Kernels are compiled for each problem, seconds each, so all geometries in all formats would take hours. Instead the
planner says which kernels a problem takes, and those problems are run that bring something new.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from ..machine import cores, device_of
from ..problem import Problem
from ..verify import geometry_sets
from .case import Case
from .generator import Generator
from .judge import families_of, kernels_of
from .workers import Workers

DATA = ("whole", "positive", "special")
DRAWN, DRAWN_SEED = 1500, 1  # random problems that are planned: the same on every machine
TILES_OF_A_FAMILY = 5  # different ones to run


class Coverage:
    """Which kernels have been taken: names of their tiles, by family."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken: dict[str, set[str]] = {}

    def add(self, kernel: str) -> bool:
        """Whether a plan's kernel brings tiles that its family does not have enough of; then it is noted."""
        fresh = False
        for part in kernels_of(kernel):
            names = self.taken.setdefault(families_of(part)[0], set())
            if part not in names and len(names) < self.most:
                names.add(part)
                fresh = True
        return fresh


def listed_problems() -> Iterator[Problem]:
    """The problems of `data/kernels.txt`, chosen for families that random problems hardly meet."""
    lines = (Path(__file__).parents[1] / "data" / "kernels.txt").read_text(encoding="utf-8").splitlines()
    yield from (Problem.parse(line) for line in lines if line and line[0] not in "#[")


def offered(backend: str, drawn: int) -> Iterator[Problem]:
    """What may be run, the most telling first: listed problems, random ones, all geometries in one format."""
    yield from listed_problems()
    generator = Generator(backend, DRAWN_SEED)
    yield from (generator.case(index)[1].problem for index in range(drawn))
    for place, problem in enumerate(problem for some in geometry_sets().values() for problem in some):
        dtype = ("bfloat16", "float32")[place // 2 % 2]
        yield problem.with_(wrt=("input+weight+bias", "output")[place % 2], dtype=dtype, out_dtype="", compute="")


def chosen_cases(backend: str, workers: Workers, drawn: int, most: int) -> tuple[list[Case], Coverage]:
    """Plan everything that is offered, and keep what brings new tiles; `workers` plan only."""
    problems = (problem.with_(device=device_of(backend)) for problem in offered(backend, drawn))
    plans = [(place, case, outcome) for answer in workers.judge(enumerate(map(Case, problems))) if answer
             for place, case, outcome in [answer]]
    coverage = Coverage(most)
    kept = [case.with_(data=DATA, repeats=2) for _, case, outcome in sorted(plans, key=lambda plan: plan[0])
            if outcome.kernel and coverage.add(outcome.kernel)]
    return kept, coverage


def verify_on_gpu(backend: str, seconds: float, say: Callable[[str], None]) -> bool:
    """Whether all kernels that were run are right; says what was covered, by family, and what is wrong."""
    end = time.monotonic() + seconds
    planners, workers = Workers(backend, cores(), plan_only=True), Workers(backend, cores())
    right, wrong, done = Counter[str](), list[str](), 0
    try:
        cases, coverage = chosen_cases(backend, planners, DRAWN, TILES_OF_A_FAMILY)
        planners.close()
        say(f"{backend}: {len(cases)} problems chosen, which take {len(coverage.taken)} kernel families")
        in_time = ((place, case) for place, case in enumerate(cases) if time.monotonic() < end)
        for answer in workers.judge(in_time, end):
            if answer is None:
                continue
            _, case, outcome = answer
            done += 1
            right.update(() if outcome.failed else outcome.families)
            if outcome.failed:
                wrong.append(f"{outcome.verdict} on {backend}: {outcome.detail}\n"
                             f"repeat it: convgrad fuzz --backend {backend} --case '{case}'")
                say(wrong[-1])
    finally:
        planners.close()
        workers.close()
    missed = [family for family in coverage.taken if family not in right]
    say(f"problems right by kernel family: {', '.join(f'{name} {count}' for name, count in right.most_common())}")
    say(f"{backend}: {done - len(wrong)} problems right, {len(wrong)} not, {len(cases) - done} left out for time"
        + (f"; families without a right one: {', '.join(missed)}" if missed else ""))
    return not wrong
