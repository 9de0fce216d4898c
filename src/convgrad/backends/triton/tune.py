"""`convgrad tune`: measure the candidates for given problems on this GPU and keep the fastest in the tuning file."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...problem import Plan, Problem, Unsupported
from .tuning import Choice, entries, key, user_file

DONE, BAD_INPUT, REFUSED = 0, 2, 3
AGREEMENT = 0.01  # largest relative difference (norms) of two correct results: both are rounded to 16 bits at worst
FLUSH_BYTES = 256 * 2**20  # written between runs, so that none finds its operands in the L2 cache


def add_commands(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "tune", help="measure GPU tiles for problems and remember the fastest",
        description="Measure all candidate tiles of every problem and keep the fastest in a file that plans read.")
    parser.add_argument("problems", nargs="*", help="problem strings, or names of files with one per line")
    parser.add_argument("--file", type=Path, default=None, help="where to keep the winners (default: the user's file)")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs per candidate (default: 10)")
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
    won = tune(read_problems(args.problems), args.repeats)
    merged = {**entries(path), **won}
    path.parent.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
    path.write_text(json.dumps({"device": name, "entries": merged}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(won)} entries written to {path}")
    return DONE


def read_problems(words: Iterable[str]) -> list[Problem]:
    """Problems from strings and from files with one string per line."""
    found = []
    for word in words:
        path = Path(word)
        lines = path.read_text(encoding="utf-8").splitlines() if " " not in word and path.is_file() else [word]
        found += [Problem.parse(line).with_(device="cuda") for line in lines
                  if line.strip() and not line.startswith("#")]
    return found


def tune(problems: Sequence[Problem], repeats: int) -> dict[str, Choice]:
    """The fastest choice for every problem that has one, by the problem's key."""
    from rich.progress import Progress

    from .candidates import candidates

    won: dict[str, Choice] = {}
    jobs = [(problem, candidates(problem)) for problem in problems]
    with Progress() as progress:
        bar = progress.add_task("tuning", total=sum(len(choices) for _, choices in jobs))
        for problem, choices in jobs:
            progress.update(bar, description=str(problem)[:60])
            times = []
            bench = Bench(problem, repeats)
            for choice in choices:
                times.append(bench.time(choice))
                progress.advance(bar)
            measured = [(time, place) for place, time in enumerate(times) if time is not None]
            if measured:
                best, place = min(measured)
                won[key(problem)] = choices[place]
                model = times[0] or float("nan")
                progress.console.print(f"{best:9.4f} ms (model {model:9.4f})  {problem}: {choices[place]}")
    return won


class Bench:
    """Operands and results of one problem, and the result of the first candidate to compare the others with."""

    def __init__(self, problem: Problem, repeats: int) -> None:
        self.problem, self.repeats = problem, repeats
        self.operands = tuple(self.tensor(name, problem.shape_of_operand(name), problem.dtype)
                              for name in problem.operands)
        self.results = tuple(self.tensor(wrt, problem.conv.shape_of(wrt), problem.out_dtype)
                             for wrt in problem.results)
        self.expected: tuple[Any, ...] | None = None

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """A random tensor that lies in memory as the problem's layout says, as a view in canonical axis order."""
        import torch

        from ...problem import axis_order
        from .launch import INTERPRETED
        from .numbers_on_device import TORCH_DTYPES

        order: tuple[int, ...] = tuple(range(len(shape)))
        if name != "bias":
            layout = self.problem.weight_layout if name == "weight" else self.problem.layout
            order = axis_order(layout, self.problem.conv.axes, weights=name == "weight")
        lying = [0] * len(shape)
        for place, extent in zip(order, shape):
            lying[place] = extent
        device = "cpu" if INTERPRETED else "cuda"
        values = torch.randn(lying, device=device)
        stored = values.to(TORCH_DTYPES[dtype]) if dtype != "hifloat8" else \
            torch.randint(0, 110, lying, dtype=torch.uint8, device=device)
        return stored.permute(order)

    def time(self, choice: Choice) -> float | None:
        """Median milliseconds of a choice, or None where it cannot run or gives another result."""
        from triton.runtime.errors import OutOfResources

        from .plans import make_plan

        try:
            plan = make_plan(self.problem, None, choice)
            for result in self.results:
                result.fill_(float("nan") if result.is_floating_point() else 0)
            plan.run(self.operands, self.results, None)
        except (Unsupported, OutOfResources):
            return None
        if self.expected is None:
            self.expected = tuple(result.double().clone() for result in self.results)
        elif not all(self.agrees(got, wanted) for got, wanted in zip(self.results, self.expected)):
            return None
        return self.median(plan)

    @staticmethod
    def agrees(got: Any, wanted: Any) -> bool:
        return bool((got.double() - wanted).norm() <= AGREEMENT * wanted.norm())

    def median(self, plan: Plan) -> float:
        import time

        import torch

        from .launch import INTERPRETED

        if INTERPRETED:
            start = time.perf_counter()
            plan.run(self.operands, self.results, None)
            return 1e3 * (time.perf_counter() - start)
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                 for _ in range(self.repeats)]
        for begin, end in pairs:
            flush.zero_()
            begin.record()
            plan.run(self.operands, self.results, None)
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs)
