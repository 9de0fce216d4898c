"""The command line: `convgrad` alone reports on the machine; run, verify and explain take problem strings."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .explain import explain
from .machine import backend_states, cores, device_of, graphics_cards, interpreted, processor
from .plan import BACKENDS, plan
from .problem import DTYPES, LONG_DTYPE, WRT, Problem, Unsupported
from .verify import Wrong, check_problem, geometry_sets, in_order, real_operands, run_problem

DONE, WRONG, BAD_INPUT, REFUSED, FAULT = 0, 1, 2, 3, 4
JUDGED_FLOPS = 2e10  # up to here the reference needs seconds
EXIT_CODES = ("exit codes: 0 done, 1 a wrong result was found, 2 bad input or too little memory, 3 no backend can run "
              "the problem, 4 a fault of convgrad itself")

# Commands of other modules, imported when they are asked for. Each module has a function `add_commands(subparsers)`
# whose parsers set `run`, a function of the parsed arguments that returns the exit code.
COMMANDS = {
    "bench": "convgrad.benchmark.commands",
    "report": "convgrad.benchmark.commands",
    "demo": "convgrad.benchmark.commands",
    "view": "convgrad.pages.commands",
    "onednn": "convgrad.frontends.onednn.command",
    "ascendc": "convgrad.frontends.ascendc.commands",
    "cann": "convgrad.frontends.cann.commands",
    "tune": "convgrad.backends.triton.tune",
    "fuzz": "convgrad.fuzz.command",
}

# The self-check: one problem of each kind, all formats, in a second or two.
SELF_CHECK = (
    "input_grad f32 n2 c32 k48 i14x14 w3x3 p1x1",
    "weight_grad f32 n2 c32 k48 i14x14 w3x3 p1x1",
    "conv f32 n2 c32 k48 i14x14 w3x3 p1x1",
    "bias_grad bf16>f32 n2 c1 k48 i14x14 w1x1",
    "input_grad bf16 n2 c33 k31 i13x15 w3x3 s2x2 p1x1 NHWC HWIO",
    "weight_grad bf16 n2 c33 k31 i13x15 w3x3 s2x2 p1x1 NHWC HWIO",
    "input_grad f16 n1 c8 k12 i6x9x8 w3x2x3 s1x2x2 p1x0x1 NDHWC",
    "weight_grad f16 n1 c8 k12 i6x9x8 w3x2x3 s1x2x2 p1x0x1",
    "input_grad f32 n2 c24 k24 i12x12 w5x5 p2x2 g24",
    "weight_grad f32 n2 c24 k24 i12x12 w5x5 p2x2 g24 hf32",
    "input_grad hif8>f32 n1 c16 k16 i33 w4 s3 p2:0 d2 TBC",
    "input_grad f64 n1 c4 k6 i9x9 w3x3 d2x2 g2",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    forced = os.environ.get("CONVGRAD_BACKEND")
    if forced and forced not in BACKENDS:
        print(f"convgrad: the environment variable CONVGRAD_BACKEND={forced!r} is none of {', '.join(BACKENDS)}",
              file=sys.stderr)
        return BAD_INPUT
    try:
        parser = make_parser(words)
        args, unknown = parser.parse_known_args(words)
        if unknown and args.run is not not_available:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        code: int = args.run(args)
        return code
    except Unsupported as error:
        print(f"convgrad: {error}", file=sys.stderr)
        return REFUSED
    except MemoryError as error:
        print(f"convgrad: not enough memory{f': {error}' if str(error) else ''}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception:  # not 1, which says that a wrong result was found
        traceback.print_exc()
        print("convgrad: this is a fault of convgrad, please report it with the lines above", file=sys.stderr)
        return FAULT


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of our own commands and of those others that the words name, or of all for a request of help."""
    parser = argparse.ArgumentParser(
        prog="convgrad", epilog=EXIT_CODES,
        description="Gradients of convolutions. Without a command: report on this machine and check the library.")
    parser.add_argument("--version", action="version", version=f"convgrad {version()}")
    parser.set_defaults(run=report)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    run = commands.add_parser("run", help="run a problem, judge its result, time it", epilog=EXIT_CODES)
    run.add_argument("problem", type=problem_argument, help='such as "input_grad f32 n8 c64 k64 i56x56 w3x3 p1x1"')
    add_choices(run)
    run.add_argument("--seed", type=int_from(0), default=0, help="of the random operands (default: %(default)s)")
    run.add_argument("--judge", action="store_true", help="judge the result of a large problem too: minutes")
    run.add_argument("--seconds", type=seconds_argument, default=0.5, help="how long to time it (default: %(default)s)")
    run.set_defaults(run=run_one)

    check = commands.add_parser("verify", help="compare every backend with the reference", epilog=EXIT_CODES)
    check.add_argument("set", nargs="?", default="all", type=set_argument, help="all, a file of problem strings, or "
                       + ", ".join(geometry_sets()) + " (default: %(default)s)")
    add_choices(check)
    check.add_argument("--dtype", type=dtypes_argument, help="number formats, comma-separated (default: all)")
    check.add_argument("--seed", type=int_from(0), default=0, help="of the random operands (default: %(default)s)")
    check.add_argument("--seconds", type=float, default=280.0, help="for all kernels of a GPU (default: %(default)s)")
    check.set_defaults(run=verify)

    show = commands.add_parser("explain", help="how a problem would be solved, and why so", epilog=EXIT_CODES)
    show.add_argument("problem", type=problem_argument, help="problem string")
    add_choices(show)
    show.add_argument("--axis", type=int, default=-1, help="the spatial axis to sketch (default: the last)")
    show.set_defaults(run=explain_one)

    add_other_commands(commands, words)
    return parser


def add_choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=tuple(BACKENDS), help="ask this backend only")
    parser.add_argument("--threads", type=int_from(1), help="default: all processors")


def add_other_commands(commands: Any, words: Sequence[str]) -> None:
    """Load the modules of the commands that the words ask for; a command whose module is missing says so."""
    first = next((word for word in words if not word.startswith("-")), None)
    wanted = {first} if first else set(COMMANDS) if words else set()
    for module_name in dict.fromkeys(module for name, module in COMMANDS.items() if name in wanted):
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            for name in (name for name, module in COMMANDS.items() if module == module_name):
                missing = commands.add_parser(name, add_help=False, help=f"not available here: {error}")
                missing.set_defaults(run=not_available, command=name, reason=str(error))
            continue
        module.add_commands(commands)


def not_available(args: argparse.Namespace) -> int:
    print(f"convgrad: the command {args.command} is not available here: {args.reason}", file=sys.stderr)
    return BAD_INPUT


def version() -> str:
    from . import __version__

    return __version__


# --- arguments --------------------------------------------------------------------------------------------------------

def problem_argument(text: str) -> Problem:
    try:
        return Problem.parse(text)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def int_from(minimum: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {minimum}")
        return int(text)

    return number


def seconds_argument(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def dtypes_argument(text: str) -> tuple[str, ...]:
    names = tuple(LONG_DTYPE.get(name, "") for name in text.split(","))
    if not all(names):
        known = ", ".join(short for short, _ in DTYPES.values())
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {known}")
    return names


def set_argument(name: str) -> tuple[Problem, ...]:
    """The problems of a named set, of all of them, or of a file."""
    sets = geometry_sets()
    if name in sets or name == "all":
        return tuple(problem for key, problems in sets.items() if name in (key, "all") for problem in problems)
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise argparse.ArgumentTypeError(f"{name!r} is neither a file nor one of all, {', '.join(sets)}") from None
    return tuple(problem_argument(line) for line in lines if line.strip() and line.lstrip()[0] not in "#[")


# --- commands ---------------------------------------------------------------------------------------------------------

def report(args: argparse.Namespace) -> int:
    """Without a command: what this machine has, which backends run, and a dozen problems as proof."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    name, flags = processor()
    console.print(f"[bold]convgrad {version()}[/] on Python {sys.version.split()[0]}")
    console.print(f"processor  {name}, {cores()} usable: {' '.join(flags) or 'no instruction set that is known here'}",
                  highlight=False)
    console.print(f"graphics   {'; '.join(graphics_cards()) or 'no NVIDIA card or driver'}", highlight=False)
    states = backend_states()
    table = Table("backend", "computes on", "state", box=None, pad_edge=False)
    for backend, reason in states.items():
        table.add_row(backend, device_of(backend), "[green]ready[/]" if reason is None else f"[yellow]{reason}[/]")
    console.print(table)
    backend = "native" if states["native"] is None else "reference"
    console.print(f"\nself-check on {backend}: exact integers bit by bit, real numbers within the bound")
    for text in SELF_CHECK:
        start = time.perf_counter()
        found = judged(Problem.parse(text), backend)
        if isinstance(found, Wrong):
            console.print(f"[red]wrong[/]  {found}", highlight=False)
            return WRONG
        spent = f"{1e3 * (time.perf_counter() - start):6.1f} ms"
        state = f"[green]right[/] {spent}" if found is None else f"[yellow]refused[/] ({found})"
        console.print(f"{state}  {text}", highlight=False)
    return DONE


def judged(problem: Problem, backend: str, threads: int | None = None, seed: int = 0) -> Wrong | str | None:
    """What is wrong with the backend's results, why it refuses the problem, or None."""
    try:
        return check_problem(problem, backend, threads, seed)
    except Unsupported as error:
        return error.reasons.get(backend, str(error))


def run_one(args: argparse.Namespace) -> int:
    """Run one problem: the plan, the verdict of the reference, the time, and a checksum to compare machines by."""
    problem: Problem = args.problem
    chosen = plan(problem, backend=args.backend, num_threads=args.threads)
    print(f"{problem}\n{chosen.backend}: {chosen.kernel}, workspace {chosen.workspace_bytes:,} bytes")
    if problem.flops <= JUDGED_FLOPS or args.judge:
        wrong = check_problem(problem, args.backend, args.threads, args.seed)
        if wrong is not None:
            print(f"wrong: {wrong}", file=sys.stderr)
            return WRONG
        print("right: exact integers bit by bit, real numbers within the bound")
    else:
        print(f"not judged: {problem.flops:,} FLOP keep the reference busy for minutes; --judge does it")
    operands = real_operands(problem, args.seed)
    results = run_problem(problem, operands, args.backend, args.threads)
    for wrt, result in zip(problem.results, results):
        print(f"checksum of the {wrt} result (seed {args.seed}): {zlib.crc32(result.tobytes()):08x}")
    if problem.device == "cpu":
        stored = in_order(problem, operands)
        best, end = float("inf"), time.perf_counter() + args.seconds
        while time.perf_counter() < end or best == float("inf"):
            start = time.perf_counter()
            chosen.run(stored, results, None)
            best = min(best, time.perf_counter() - start)
        print(f"time {1e3 * best:.3f} ms, {problem.flops / best / 1e9:.2f} GFLOP/s")
    return DONE


def verify(args: argparse.Namespace) -> int:
    """All results and formats of a set of geometries, on every backend; stops at the first wrong element."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console()
    states = {name: reason for name, reason in backend_states().items() if args.backend in (None, name)}
    backends = [name for name, reason in states.items() if reason is None and (name != "reference" or args.backend)]
    for name, reason in states.items():
        if reason is not None:
            console.print(f"{name}: not verified, {reason}", highlight=False)
    if not backends:
        print("convgrad: no backend to verify is available here", file=sys.stderr)
        return REFUSED
    everything = args.set == set_argument("all") and args.dtype is None
    for backend in [name for name in backends if everything and device_of(name) == "cuda" and not interpreted()]:
        from .fuzz.coverage import verify_on_gpu  # which kernels run decides there, not which geometries

        backends.remove(backend)
        if not verify_on_gpu(backend, args.seconds, lambda text: console.print(text, highlight=False)):
            return WRONG
    problems = list(asked(args.set, args.dtype))
    refusals: Counter[tuple[str, str]] = Counter()
    columns = TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        for backend in backends:
            for problem in progress.track(problems, description=backend):
                placed = problem.with_(device=device_of(backend))
                found = judged(placed, backend, args.threads, args.seed)
                if isinstance(found, Wrong):
                    progress.stop()
                    print(f"wrong on {backend}: {found}\nrepeat it: convgrad run --backend {backend} "
                          f"--seed {args.seed} \"{placed}\"", file=sys.stderr)
                    return WRONG
                if found is not None:
                    refusals[backend, found] += 1
    for backend in backends:
        refused = sum(count for (name, _), count in refusals.items() if name == backend)
        console.print(f"[green]{backend}: {len(problems) - refused} problems right[/], {refused} refused",
                      highlight=False)
    for (backend, reason), count in refusals.most_common(10):
        console.print(f"{backend} refused {count}: {reason}", highlight=False)
    return DONE


def asked(geometries: Iterable[Problem], dtypes: tuple[str, ...] | None) -> Iterable[Problem]:
    """Every geometry with all results in all asked formats; 8-bit operands give float32 or their own format in turn."""
    for place, problem in enumerate(geometries):
        for dtype in dtypes or tuple(DTYPES):
            for wrt in WRT:
                narrow = DTYPES[dtype][1] == 1
                yield problem.with_(wrt=wrt, dtype=dtype, out_dtype="float32" if narrow and place % 2 else dtype,
                                    compute="")


def explain_one(args: argparse.Namespace) -> int:
    try:
        print(explain(args.problem, backend=args.backend, num_threads=args.threads, axis=args.axis))
    except ValueError as error:  # the axis
        print(f"convgrad: {error}", file=sys.stderr)
        return BAD_INPUT
    return DONE
