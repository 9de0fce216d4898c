"""The command `convgrad fuzz`."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
import time
from collections import Counter
from typing import Any

from ..machine import backend_state, cores, device_of, interpreted, planner_state
from ..plan import BACKENDS
from .case import Case
from .generator import Generator
from .judge import judged, warm_up
from .runner import Failed, Search
from .workers import Workers

DONE, WRONG, BAD_INPUT, REFUSED = 0, 1, 2, 3
SAY_SECONDS = 15.0  # between two lines of the count where the output is no terminal
LEVELS = ("generic", "avx2", "avx512", "amx_emulated", "amx")


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "fuzz", help="random problems, judged by the reference, until something is wrong",
        description="Draw random problems, call them in random ways, and judge every result by the reference: whole "
        "numbers bit by bit, real ones by the error bound. What fails is made small and shown with the command that "
        "repeats it.",
        epilog="exit codes: 0 nothing found, 1 something is wrong, 2 bad input, 3 the backend is missing")
    parser.add_argument("--backend", choices=tuple(BACKENDS), help="default: triton with a GPU, else native")
    parser.add_argument("--seconds", type=positive, help="how long (default: 60, or until --count)")
    parser.add_argument("--count", type=whole, help="how many problems")
    parser.add_argument("--seed", type=whole, help="the same seed draws the same problems (default: a new one)")
    parser.add_argument("--processes", type=whole, help="default: one per processor; 0 is this one, unwatched")
    parser.add_argument("--plan-only", action="store_true", help="plan the problems and run none; needs no GPU")
    parser.add_argument("--failures", type=whole, default=5, help="stop after so many kinds of them (%(default)s)")
    parser.add_argument("--shrink-seconds", type=positive, default=20.0,
                        help="for making failures small, all together (default: %(default)s)")
    parser.add_argument("--isa", choices=LEVELS, help="instruction set of the native backend (CONVGRAD_ISA)")
    parser.add_argument("--case", type=case_argument, help="judge this one case, as a failure shows it")
    parser.set_defaults(run=fuzz)


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def positive(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return seconds


def case_argument(text: str) -> Case:
    try:
        return Case.parse(text)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def fuzz(args: argparse.Namespace) -> int:
    if args.isa is not None:
        os.environ["CONVGRAD_ISA"] = args.isa
    backend = args.backend or ("native" if interpreted() or backend_state("triton") else "triton")
    reason = planner_state(backend) if args.plan_only else backend_state(backend)
    if reason is not None:
        print(f"convgrad: {backend} is not available here: {reason}", file=sys.stderr)
        return REFUSED
    if args.case is not None:
        return repeat(args.case, backend, args.plan_only)
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    processes = cores() if args.processes is None else args.processes
    workers = Workers(backend, processes, args.plan_only)
    generator = Generator(backend, seed, args.plan_only, backend == "triton" and interpreted())
    seconds = args.seconds or (None if args.count is not None else 60.0)
    search = Search(generator, workers, args.count, seconds, max(1, args.failures), args.shrink_seconds, Live(),
                    lambda text: print(text, flush=True))
    print(f"convgrad fuzz: {backend}, seed {seed}, {processes} processes", flush=True)
    try:
        search.run()
        print(f"\nsorts     {listed(search.sorts)}\nfamilies  {listed(search.families)}", flush=True)
        failures = search.smallest_failures()
    finally:
        workers.close()
    for failed in failures:
        print(described(failed, backend, args))
    print(closing_line(search, backend, seed))
    return WRONG if search.failed else DONE


def repeat(case: Case, backend: str, plan_only: bool) -> int:
    """Judge one case in this process: a crash is one to be debugged."""
    warm_up(backend)
    outcome = judged(case.with_(problem=case.problem.with_(device=device_of(backend))), backend, plan_only)
    print(f"{outcome.verdict}: {outcome.detail or case}\nkernels: {', '.join(outcome.families) or 'none'}")
    return WRONG if outcome.failed else DONE


def described(failed: Failed, backend: str, args: argparse.Namespace) -> str:
    words = ["convgrad", "fuzz", "--backend", backend]
    words += ["--plan-only"] if args.plan_only else []
    words += ["--isa", args.isa] if args.isa else []
    command = shlex.join([*words, "--case", str(failed.case)])
    return (f"\n{failed.outcome.verdict.upper()} {failed.case.problem}\n  {failed.outcome.detail.strip()}\n"
            f"  kernels: {', '.join(failed.outcome.families) or 'none'}\n  drawn as: {failed.drawn}\n"
            f"  repeat it: {command}")


def closing_line(search: Search, backend: str, seed: int) -> str:
    total = sum(search.verdicts.values())
    rate = 60 * total / max(1e-9, search.spent)
    return (f"{backend}: {total:,} problems in {search.spent:.0f} s ({rate:,.0f} a minute, seed {seed}): "
            f"{listed(search.verdicts)}")


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common()) or "none"


class Live:
    """The count while it grows: one line of a terminal, or a line now and then."""

    def __init__(self) -> None:
        self.began = self.said = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        on_terminal = sys.stderr.isatty()
        if now - self.said > (0.2 if on_terminal else SAY_SECONDS):
            self.said = now
            end = "\x1b[K\r" if on_terminal else "\n"
            print(f"{now - self.began:5.0f} s  {text[:100]}", end=end, file=sys.stderr, flush=True)
