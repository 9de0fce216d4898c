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
from .tuning import Choice, entries, key, user_file

DONE, BAD_INPUT, REFUSED = 0, 2, 3
AGREEMENT = 0.01  # largest relative difference (norms) of two correct results: both are rounded to 16 bits at worst
FLUSH_BYTES = 256 * 2**20  # written between runs, so that none finds its operands in the L2 cache
HOPELESS = 1.3  # a candidate whose first runs take this much longer than the best is not measured further
FIRST_RUNS = 3
COMPILING_SHARE = 0.6  # of the time limit, at most
AHEAD_CYCLES = 2_000_000  # for which the GPU waits (about 1 ms), so that launching is not part of what is measured


def add_commands(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "tune", help="measure GPU tiles for problems and remember the fastest",
        description="Measure all candidate tiles of every problem and keep the fastest in a file that plans read.")
    parser.add_argument("problems", nargs="*",
                        help="problem strings, names of files with one per line, or files of layers as `bench` reads")
    parser.add_argument("--file", type=Path, default=None, help="where to keep the winners (default: the user's file)")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs per candidate (default: 9)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="stop after this much time")
    parser.add_argument("--new", action="store_true", help="leave out problems that the file already has")
    parser.set_defaults(run=run)


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
    problems = [problem for problem in read_problems(args.problems) if not (args.new and key(problem) in known)]
    path.parent.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
    won: dict[str, Choice] = {}

    def keep(entry: str, choice: Choice) -> None:
        won[entry] = choice
        text = json.dumps({"device": name, "entries": {**known, **won}}, indent=1, sort_keys=True) + "\n"
        unfinished = path.with_suffix(".tmp")  # the file is whole at any time
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)

    tune(problems, args.repeats, args.workers, args.limit_seconds, keep)
    print(f"{len(won)} entries written to {path}")
    return DONE


def read_problems(words: Iterable[str]) -> list[Problem]:
    """Problems from strings and from files with one string, or one layer of a benchmark, per line."""
    found: list[Problem] = []
    for word in words:
        path = Path(word)
        lines = path.read_text(encoding="utf-8").splitlines() if " " not in word and path.is_file() else [word]
        for line in lines:
            if not line.strip() or line.startswith("#"):
                continue
            found += gradients_of(line.rpartition("|")[2]) if "|" in line else [Problem.parse(line)]
    return [problem.with_(device="cuda") for problem in found]


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
         keep: Callable[[str, Choice], None] = lambda entry, choice: None) -> dict[str, Choice]:
    """The fastest choice for every problem that has one, by the problem's key; `keep` hears of each at once."""
    from rich.progress import Progress

    from .ahead import compile_ahead
    from .candidates import candidates
    from .launch import INTERPRETED

    end = time.monotonic() + limit_seconds
    won: dict[str, Choice] = {}
    jobs = [(problem, choices) for problem, choices in ((problem, candidates(problem)) for problem in problems)
            if choices]
    with Progress() as progress:
        ready = {str(problem): list(range(len(choices))) for problem, choices in jobs}
        if not INTERPRETED:
            # the models' first picks of all problems first, then their second ones: time may be short
            ranks = max((len(choices) for _, choices in jobs), default=0)
            ahead = [(str(problem), choices[rank]) for rank in range(ranks) for problem, choices in jobs
                     if rank < len(choices)]
            bar = progress.add_task("compiling", total=len(ahead))
            compiled: dict[str, list[Choice | None]] = {name: [] for name in ready}

            def done(job: tuple[str, Choice | None], seconds: float, error: str) -> None:
                compiled[job[0]] += [] if error else [job[1]]
                progress.advance(bar)

            compile_ahead(ahead, workers, limit_seconds * COMPILING_SHARE, done)
            ready = {str(problem): [place for place, choice in enumerate(choices) if choice in compiled[str(problem)]]
                     for problem, choices in jobs}
        bar = progress.add_task("measuring", total=sum(map(len, ready.values())))
        for problem, choices in jobs:
            if time.monotonic() > end:
                progress.console.print(f"out of time before {problem}")
                break
            progress.update(bar, description=str(problem)[:60])
            found = fastest(problem, [choices[place] for place in ready[str(problem)]], repeats,
                            lambda: progress.advance(bar))
            if found is not None:
                best, model, choice = found
                won[key(problem)] = choice
                keep(key(problem), choice)
                progress.console.print(f"{best:9.4f} ms (model {model:9.4f})  {problem}: {choice}", soft_wrap=True)
    return won


def fastest(problem: Problem, choices: Sequence[Choice], repeats: int,
            done: Callable[[], None] = lambda: None) -> tuple[float, float, Choice] | None:
    """Milliseconds of the fastest choice and of the first one (the model's), and the fastest itself."""
    import torch

    bench = None
    try:
        bench = Bench(problem, repeats)
        times = []
        for choice in choices:
            times.append(bench.time(choice))
            done()
    except torch.OutOfMemoryError:
        return None
    votes = [opinion for _, opinion in times]
    right = max(range(len(bench.opinions)), key=votes.count, default=0)  # of those with as many votes the first
    measured = [(spent, place) for place, (spent, opinion) in enumerate(times)
                if spent is not None and opinion == right]
    if not measured:
        return None
    best, place = min(measured)
    return best, times[0][0] if times[0][0] is not None else float("nan"), choices[place]


class Bench:
    """Operands and results of one problem, and the different results that candidates gave: the most common is right."""

    def __init__(self, problem: Problem, repeats: int) -> None:
        import torch

        from .launch import INTERPRETED

        self.problem, self.repeats = problem, repeats
        self.operands = tuple(self.tensor(name, problem.dtype) for name in problem.operands)
        self.results = tuple(self.tensor(wrt, problem.out_dtype) for wrt in problem.results)
        self.opinions: list[tuple[Any, ...]] = []
        self.best = float("inf")
        self.flush = None if INTERPRETED else torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def tensor(self, name: str, dtype: str) -> Any:
        """A random tensor that lies in memory as the problem's layout says, as a view in canonical axis order."""
        import torch

        from .ahead import empty_tensor
        from .launch import INTERPRETED

        made = empty_tensor(self.problem, name, dtype, "cpu" if INTERPRETED else "cuda")
        if dtype == "hifloat8":
            return made.random_(0, 110)
        if made.element_size() == 1:
            return made.copy_(torch.randn(made.shape, device=made.device))
        return made.normal_()

    def time(self, choice: Choice) -> tuple[float | None, int]:
        """Median milliseconds of a choice (None where it cannot run), and the number of the result that it gave."""
        from triton.runtime.errors import OutOfResources

        from .plans import make_plan

        try:
            plan = make_plan(self.problem, None, choice)
            for result in self.results:
                result.fill_(float("nan") if result.is_floating_point() else 0)
            plan.run(self.operands, self.results, None)
        except (Unsupported, OutOfResources):
            return None, -1
        opinion = self.opinion()
        return self.median(plan), opinion

    def opinion(self) -> int:
        """The number of the result that lies in memory now."""
        for number, known in enumerate(self.opinions):
            if all(self.agrees(got, wanted) for got, wanted in zip(self.results, known)):
                return number
        self.opinions.append(tuple(result.clone() for result in self.results))
        return len(self.opinions) - 1

    @staticmethod
    def agrees(got: Any, wanted: Any) -> bool:
        difference = (got.float() - wanted.float()).norm()
        return bool(difference <= AGREEMENT * wanted.float().norm())

    def median(self, plan: Plan) -> float:
        if self.flush is None:
            start = time.perf_counter()
            plan.run(self.operands, self.results, None)
            return 1e3 * (time.perf_counter() - start)
        times = self.timed(plan, FIRST_RUNS)
        if min(times) < HOPELESS * self.best:
            times += self.timed(plan, self.repeats - FIRST_RUNS)
        found = statistics.median(times)
        self.best = min(self.best, found)
        return found

    def timed(self, plan: Plan, count: int) -> list[float]:
        """Milliseconds of `count` runs by the GPU's clock, with a cold L2 cache and the host far ahead."""
        import torch

        assert self.flush is not None
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                 for _ in range(max(1, count))]
        torch.cuda._sleep(AHEAD_CYCLES)
        for begin, end in pairs:
            self.flush.zero_()
            begin.record()
            plan.run(self.operands, self.results, None)
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]
