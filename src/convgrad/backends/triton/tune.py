"""`convgrad tune`: measure the candidates for given problems on this GPU and keep the fastest in the tuning file."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...problem import SPATIAL_LETTERS, Plan, Problem, Unsupported
from .tuning import Entry, entries, key, user_file

DONE, BAD_INPUT, REFUSED = 0, 2, 3
PLAIN: Entry = {"kernel": "plain"}  # no special way: the kernels whose results all others are compared with
TWO_ROUNDINGS = 2.0**-7  # of two right results to bfloat16, relative to an element
SUMMATION = 1e-3  # difference of two right sums of up to LONG terms in float32, relative to the result's mean square
LONG = 1e6  # of longer sums it grows with the root of their length
FLUSH_BYTES = 256 * 2**20  # written between runs, so that none finds its operands in the L2 cache
HOPELESS = 1.3  # a candidate whose first runs take this much longer than the best is not measured further
FIRST_RUNS = 3
WORTH_AN_ENTRY = 1.02  # an entry may be so much slower than the plan without one: that is what measuring can tell
AHEAD_CYCLES = 2_000_000  # for which the GPU waits (about 1 ms), so that launching is not part of what is measured


def add_commands(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "tune", help="measure GPU tiles for problems and remember the fastest",
        description="Measure the tiles that the cost models expect to be best for every problem, compare their results "
                    "with those of the plain kernels, and keep the fastest in a file that plans read.")
    parser.add_argument("problems", nargs="*", help="problem strings, names of files with one per line, sets or files "
                        "of layers as `bench` reads (bfloat16 and all gradients then)")
    parser.add_argument("--filter", default="", help="only lines of files with one of these words")
    parser.add_argument("--candidates", type=int, default=8, help="tiles to measure for a problem (default: 8)")
    parser.add_argument("--file", type=Path, default=None, help="where to keep the winners (default: the user's file)")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs per candidate (default: 9)")
    parser.add_argument("--workers", type=int, default=processors() - 1 or 1, help="processes that compile")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="stop after this much time")
    parser.add_argument("--new", action="store_true", help="leave out problems that the file already has")
    parser.set_defaults(run=run)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    import torch

    from .launch import INTERPRETED

    if not args.problems:
        print("tune: name at least one problem, such as 'input_grad bf16 n32 c64 k64 i56x56 w3x3 p1x1 NHWC'")
        return BAD_INPUT
    if not torch.cuda.is_available() and not INTERPRETED:
        print("tune: no CUDA device is here, so there is nothing to measure")
        return REFUSED
    path = args.file or user_file()
    known = entries(path)
    problems = [problem for problem in read_problems(args.problems, args.filter)
                if not (args.new and key(problem) in known)]
    path.parent.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
    won: dict[str, Entry] = {}

    def keep(entry: str, choice: Entry) -> None:
        won[entry] = choice
        unfinished = path.with_suffix(".tmp")  # the file is whole at any time
        unfinished.write_text(text_of(name, {**known, **won}), encoding="utf-8")
        unfinished.replace(path)

    tune(problems, args.repeats, args.workers, args.limit_seconds, keep, args.candidates)
    print(f"{len(won)} entries written to {path}")
    return DONE


def text_of(device: str, found: dict[str, Entry]) -> str:
    """A tuning file: JSON with a line for each entry."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(choice)}" for name, choice in sorted(found.items()))
    return f'{{"device": {json.dumps(device)}, "entries": {{\n{lines}\n}}}}\n'


def read_problems(words: Iterable[str], wanted: str = "") -> list[Problem]:
    """Problems from strings, and from sets and files with one string, or one layer of a benchmark, per line."""
    found: list[Problem] = []
    some = [word.strip() for word in wanted.split(",") if word.strip()]
    for word in words:
        path = Path(word)
        shipped = Path(__file__).parents[2] / "benchmark" / "problems" / f"{word}.txt"
        path = path if path.is_file() else shipped
        lines = path.read_text(encoding="utf-8").splitlines() if " " not in word and path.is_file() else [word]
        for line in lines:
            if not line.strip() or line.startswith("#") or (line is not word and some and
                                                            not any(part in line for part in some)):
                continue
            found += gradients_of(line.rpartition("|")[2]) if "|" in line else [Problem.parse(line)]
    return [problem.with_(device="cuda", scaled=False) for problem in found]


def gradients_of(layer: str) -> list[Problem]:
    """The gradients of a benchmark's layer in bfloat16, channels last (or in the layout that it names)."""
    asked = Problem.parse(layer.strip())
    letters = SPATIAL_LETTERS[asked.conv.axes]
    own = asked.layout != "NC" + letters
    placed = Problem(asked.conv, asked.wrt, "bfloat16", layout=asked.layout if own else f"N{letters}C",
                     weight_layout=asked.weight_layout if own else f"O{letters}I")
    together = ["input+weight+bias"] if asked.conv.depthwise and asked.wrt == "input" else []
    return [placed.with_(wrt=wrt) for wrt in (asked.wrt, "weight", *together)]


def tune(problems: Sequence[Problem], repeats: int, workers: int = 1, limit_seconds: float = float("inf"),
         keep: Callable[[str, Entry], None] = lambda entry, choice: None, most: int = 8) -> dict[str, Entry]:
    """The fastest choice for every problem that has one, by the problem's key; `keep` hears of each at once."""
    from rich.progress import Progress

    from .ahead import Background
    from .candidates import candidates
    from .launch import INTERPRETED

    end = time.monotonic() + limit_seconds
    won: dict[str, Entry] = {}
    jobs = [(problem, choices) for problem, choices in ((p, in_turns(candidates(p))[:most]) for p in problems)
            if choices]
    compiling = None if INTERPRETED else Background(
        [job for problem, choices in jobs for job in jobs_of(problem, choices)], workers, limit_seconds)
    with Progress() as progress:
        bar = progress.add_task("measuring", total=len(jobs))
        for problem, choices in jobs:
            progress.update(bar, description=str(problem)[:60], advance=0)
            if compiling is not None:
                ready = [compiling.wait(job, max(0.0, min(3600.0, end - time.monotonic())))
                         for job in jobs_of(problem, choices)][-len(choices):]
                choices = [choice for choice, compiled in zip(choices, ready) if compiled]
            if time.monotonic() > end:
                progress.console.print(f"out of time before {problem}")
                break
            found = fastest(problem, choices, repeats)
            progress.advance(bar)
            if found is None:
                progress.console.print(f"no entry for {problem}", soft_wrap=True)
                continue
            best, before, choice = found
            won[key(problem)] = choice
            keep(key(problem), choice)
            progress.console.print(f"{best:9.4f} ms (before {before:9.4f})  {problem}: {choice}", soft_wrap=True)
    return won


def in_turns(choices: Sequence[Entry]) -> list[Entry]:
    """The first of every kernel, then the second of every kernel, and so on: each model knows its own tiles only."""
    by_kernel: dict[str, list[Entry]] = {}
    for choice in choices:
        by_kernel.setdefault(choice["kernel"], []).append(choice)
    return [some[place] for place in range(len(choices)) for some in by_kernel.values() if place < len(some)]


def jobs_of(problem: Problem, choices: Sequence[Entry]) -> list[tuple[str, Entry | None]]:
    """What is compiled to tune a problem: the kernels to compare with, the candidates.

    The plan of now is one of the candidates most of the time.
    """
    single: list[tuple[str, Entry | None]] = [(str(problem.with_(wrt=wrt)), PLAIN) for wrt in problem.results]
    return [*single, *((str(problem), choice) for choice in choices)]


def fastest(problem: Problem, choices: Sequence[Entry], repeats: int) -> tuple[float, float, Entry] | None:
    """Milliseconds of the fastest choice and of the plan of now, and the choice; None where none is right and fast."""
    import torch

    try:
        bench = Bench(problem, repeats)
        now = bench.time(None)
        times = [(spent, place) for place, spent in enumerate(map(bench.time, choices)) if spent is not None]
    except torch.OutOfMemoryError:
        return None
    best, place = min(times, default=(float("inf"), 0))
    if best == float("inf") or (now is not None and best > WORTH_AN_ENTRY * now):
        return None
    return best, float("nan") if now is None else now, choices[place]


class Bench:
    """Operands and results of one problem; results are right where they agree with those of the plain kernels."""

    def __init__(self, problem: Problem, repeats: int) -> None:
        import torch

        from .launch import INTERPRETED

        self.problem, self.repeats = problem, repeats
        self.operands = tuple(self.tensor(name, problem.dtype) for name in problem.operands)
        self.results = tuple(self.tensor(wrt, problem.out_dtype) for wrt in problem.results)
        self.wanted: tuple[Any, ...] = ()
        self.best = float("inf")
        self.flush = None if INTERPRETED else torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def tensor(self, name: str, dtype: str) -> Any:
        """A random tensor that lies in memory as the problem's layout says, as a view in canonical axis order."""
        import torch

        from .launch import INTERPRETED
        from .registry import empty_tensor

        made = empty_tensor(self.problem, name, dtype, "cpu" if INTERPRETED else "cuda")
        if dtype == "hifloat8":
            return made.random_(0, 110)
        if made.element_size() == 1:
            return made.copy_(torch.randn(made.shape, device=made.device))
        return made.normal_()

    def time(self, choice: Entry | None) -> float | None:
        """Median milliseconds of a choice; None where it cannot run or is wrong."""
        from ..._native import OutOfResources
        from .ahead import plans_of

        try:
            plans = plans_of(self.problem, choice)
            self.wanted = self.wanted or self.plain_results()
            for result in self.results:
                result.fill_(float("nan") if result.is_floating_point() else 0)
            self.run(plans)
        except (Unsupported, OutOfResources):
            return None
        longer = max(1.0, self.problem.flops / 2 / sum(result.numel() for result in self.results) / LONG)
        if not all(agree(*pair, SUMMATION * longer**0.5) for pair in zip(self.results, self.wanted)):
            print(f"wrong result: {self.problem} {choice}")
            return None
        return self.median(plans)

    def run(self, plans: Sequence[Plan]) -> None:
        """Compute the results, by one plan or by several that have some of them each."""
        operands = dict(zip(self.problem.operands, self.operands))
        results = dict(zip(self.problem.results, self.results))
        for plan in plans:
            plan.run(tuple(operands[name] for name in plan.problem.operands),
                     tuple(results[name] for name in plan.problem.results), None)

    def plain_results(self) -> tuple[Any, ...]:
        """What the plain kernels compute, one result after the other."""
        from .plans import make_plan

        self.run([make_plan(self.problem.with_(wrt=wrt), None, PLAIN) for wrt in self.problem.results])
        return tuple(result.clone() for result in self.results)

    def median(self, plans: Sequence[Plan]) -> float:
        if self.flush is None:
            start = time.perf_counter()
            self.run(plans)
            return 1e3 * (time.perf_counter() - start)
        times = self.timed(plans, FIRST_RUNS)
        if min(times) < HOPELESS * self.best:
            times += self.timed(plans, self.repeats - FIRST_RUNS)
        found = statistics.median(times)
        self.best = min(self.best, found)
        return found

    def timed(self, plans: Sequence[Plan], count: int) -> list[float]:
        """Milliseconds of `count` runs by the GPU's clock, with a cold L2 cache and the host far ahead."""
        import torch

        assert self.flush is not None
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                 for _ in range(max(1, count))]
        torch.cuda._sleep(AHEAD_CYCLES)
        for begin, end in pairs:
            self.flush.zero_()
            begin.record()
            self.run(plans)
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]


def agree(got: Any, wanted: Any, summation: float) -> bool:
    """Whether every element of two results is the same but for what two right kernels may differ in."""
    got, wanted = got.float(), wanted.float()
    slack = summation * wanted.square().mean().sqrt()
    return bool(((got - wanted).abs() <= TWO_ROUNDINGS * wanted.abs() + slack).all())
