"""Run one case and say what is wrong with it: results, bytes around them, refusals, errors, the time of planning."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..guarded import Arena, Damage, constant_along
from ..machine import device_of
from ..plan import plan
from ..problem import DTYPES, Conv, Plan, Problem, Unsupported
from ..verify import EXACT_DATA, REAL_DATA, exact_results, magnitudes, wrong_bits, wrong_bound
from .calls import call_of
from .case import Case

Array = npt.NDArray[Any]
PLAN_SECONDS = 2.0  # processor time of one plan; the promise is some milliseconds
PLAN_KILOBYTES = 256 * 1024
FP8_EXACT_TERMS = 512  # sums of so many products of 1 and 2 have less than the 13 bits that compute mode fp8 keeps


@dataclass(frozen=True)
class Outcome:
    """`verdict` is right, refused, or what failed: wrong, damage, error, plan; crash and hang are seen from outside."""

    verdict: str
    detail: str = ""
    kernel: str = ""  # the plan's
    lost: bool = False  # this process must not go on: its GPU is in an unknown state, or its memory has grown

    @property
    def families(self) -> tuple[str, ...]:
        return families_of(self.kernel) if self.kernel else ()

    @property
    def failed(self) -> bool:
        return self.verdict not in ("right", "refused")


def kernels_of(kernel: str) -> list[str]:
    """The parts of a plan's kernel name."""
    return [part.strip() for part in re.split(r" \+ |, ", kernel)]


def families_of(kernel: str) -> tuple[str, ...]:
    """The kernel families in a plan's kernel name: its parts up to the first word of a number format or a size."""
    shorts = {short for short, _ in DTYPES.values()}
    found = []
    for part in kernels_of(kernel):
        words = part.split("_")
        end = next((place for place, word in enumerate(words) if word in shorts or any(map(str.isdigit, word))), None)
        found.append("_".join(words[:end]) or words[0])
    return tuple(dict.fromkeys(found))


def judged(case: Case, backend: str, plan_only: bool = False) -> Outcome:
    """Never raises: whatever the case provokes is an outcome."""
    chosen: Plan | None = None
    try:
        chosen = planned(case, backend)
        if not plan_only:
            for data in case.data:
                check(case, backend, chosen, data)
        return Outcome("right", "", chosen.kernel)
    except Unsupported as refusal:
        if case.limit is not None and "max_workspace_bytes" in str(refusal):
            return Outcome("refused", "the workspace limit")
        return Outcome("error", f"refused: {refusal}", chosen.kernel if chosen else "")
    except Exception as error:  # of any kind: it is what we look for
        verdict = next((name for kind, name in VERDICTS.items() if isinstance(error, kind)), "error")
        words = str(error) if verdict != "error" else f"{type(error).__name__}: {error}"
        lost = verdict == "plan" or any(sign in words for sign in ("CUDA", "cuda", "device-side"))
        return Outcome(verdict, words[:2000], chosen.kernel if chosen else "", lost)


def warm_up(backend: str) -> None:
    """Import what the backend needs, so that the first plan's time is that of a plan."""
    with contextlib.suppress(Exception):  # the cases themselves will say what is wrong
        plan(Problem(Conv(1, 1, 1, (3,), (2,)), device=device_of(backend)), backend=backend)


class Failure(AssertionError):
    """A result that the contract does not allow."""


class SlowPlan(AssertionError):
    """A plan that took too much time or memory."""


VERDICTS = {Failure: "wrong", SlowPlan: "plan", Damage: "damage"}


def planned(case: Case, backend: str) -> Plan:
    threads = case.threads[0] if case.threads else None
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with timer(f"planning '{case.problem}' took more than {PLAN_SECONDS:g} s of processor time"):
        chosen = plan(case.problem, backend=backend, max_workspace_bytes=case.limit, num_threads=threads)
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    if more > PLAN_KILOBYTES:
        raise SlowPlan(f"planning '{case.problem}' took {more // 1024:,} MB of memory")
    if case.limit is not None and chosen.workspace_bytes > case.limit:
        raise Failure(f"'{case.problem}': the plan needs {chosen.workspace_bytes} bytes, allowed are {case.limit}")
    return chosen


@contextlib.contextmanager
def timer(message: str) -> Iterator[None]:
    """Raise SlowPlan when the processor time is over; in C++ code no sooner than it returns."""

    def over(signal_number: int, frame: Any) -> None:
        raise SlowPlan(message)

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, PLAN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def check(case: Case, backend: str, chosen: Plan, data: str) -> None:
    """Run a case on one kind of data, as often and with as many threads as it says; raise what is wrong."""
    problem = case.problem
    on_host = problem.with_(device="cpu")
    operands = (EXACT_DATA.get(data) or REAL_DATA[data])(on_host, case.seed)
    for name, view in zip(problem.operands, case.all_views):
        if view.broadcast:
            operands[name] = constant_along(operands[name], view.broadcast)
    exact = exact_results(problem, operands)
    sizes: tuple[Array, ...] | None = None
    if data in REAL_DATA or (problem.compute == "fp8" and data != "special"
                             and max(map(problem.conv.reduction_length, problem.results)) > FP8_EXACT_TERMS):
        sizes = magnitudes(problem, operands)
    first: tuple[Array, ...] | None = None
    for threads in case.threads or (None,):
        for _ in range(case.repeats):
            results = run(case, backend, chosen, operands, threads)
            if first is not None:
                check_same(problem, first, results, threads)
                continue
            first = results
            for place, (wrt, got) in enumerate(zip(problem.results, results)):
                wrong = wrong_bits(problem, wrt, got, exact[place]) if sizes is None else \
                    wrong_bound(problem, wrt, got, exact[place], sizes[place])
                if wrong is not None:
                    raise Failure(f"{data} data: {wrong}")


def check_same(problem: Problem, first: tuple[Array, ...], again: tuple[Array, ...], threads: int | None) -> None:
    for wrt, one, other in zip(problem.results, first, again):
        if one.tobytes() != other.tobytes():
            raise Failure(f"'{problem}': the {wrt} result has other bits when it is computed again"
                          + (f" with {threads} threads" if threads else ""))


def run(case: Case, backend: str, chosen: Plan, operands: dict[str, Array], threads: int | None) -> tuple[Array, ...]:
    """The results of one run between canaries, contiguous and in canonical axis order."""
    problem = case.problem
    same_plan = threads is None or not case.threads or threads == case.threads[0]
    mine = chosen if same_plan else plan(problem, backend=backend, max_workspace_bytes=case.limit, num_threads=threads)
    arena = Arena(problem, operands, case.all_views, mine.workspace_bytes)
    inputs, outputs, workspace, collect = arena.lend()
    returned: tuple[Array, ...] | None = None
    if case.call[0] == "plan":
        mine.run((*inputs, *arena.scales(operands)), tuple(outputs), workspace)
    else:
        scales = {name.removesuffix("_scale"): float(operands[name]) for name in problem.scales}
        returned = call_of(case, backend, threads)(inputs, outputs, scales, workspace)
    collect()
    arena.check()
    if returned is None or "out" in case.call:
        return arena.results()
    return tuple(np.ascontiguousarray(array) for array in returned)
