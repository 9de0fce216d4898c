"""The commands `convgrad bench`, `convgrad report` and `convgrad demo`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..machine import cores
from ..plan import BACKENDS
from ..problem import LONG_DTYPE
from .arena import CpuArena
from .layers import ALL_GRADIENTS, CLASSES, GRADIENTS, LAYOUTS, Layer, known_sets, load_layers, select, spread
from .peers import Peer
from .report import markdown, print_tables, ratio_text
from .results import document, load, save
from .rows import Choice, Here, Measurer, Row, failed, measure
from .timing import CLOCKS

CLASS_WORDS = {name.replace(" ", "_"): name for name in CLASSES}
SAVE_SECONDS = 1.0  # after so much time the file of results is written anew


def add_commands(subparsers: Any) -> None:
    """Add the commands to the `convgrad` command line; each sets `run` to its function."""
    bench = subparsers.add_parser("bench", help="time the gradients of real layers, verified, beside a peer")
    bench.add_argument("set", nargs="?", default="core", help=f"{', '.join(known_sets())}, a .txt file of layers, or "
                       "torch: training steps of whole models with and without convgrad.torch.install()")
    bench.add_argument("--dtype", help="number formats, comma-separated (default: f32,bf16,f16; on a GPU bf16,f16)")
    bench.add_argument("--gradient", help=f"comma-separated (default: {','.join(GRADIENTS)}; on a GPU {ALL_GRADIENTS} "
                       "too, which is input, weight and bias from one call)")
    bench.add_argument("--filter", default="", help="only layers with one of these words in name, class or model")
    bench.add_argument("--class", dest="classes", default="",
                       help=f"only layers of these classes: {', '.join(CLASS_WORDS)}")
    bench.add_argument("--peer", choices=("torch", "none"), default="torch", help="whom to compare with")
    bench.add_argument("--layout", choices=LAYOUTS,
                       help="measure ours in this layout only (default: both; on a GPU channels_last)")
    bench.add_argument("--threads", type=int, default=cores(), help="for both sides (default: all cores, %(default)s)")
    bench.add_argument("--backend", choices=tuple(BACKENDS), help="ask this backend only")
    bench.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda for the set gpu, else cpu")
    bench.add_argument("--clock", choices=tuple(CLOCKS), default="wall",
                       help="cpu: processor time, for a machine that others use too; needs --threads 1")
    bench.add_argument("--fresh-memory", action="store_true",
                       help="let the C library give memory back between calls, on both sides (default: keep it)")
    bench.add_argument("--seconds", type=float, help="running time per contestant (default: 0.25, on a GPU 0.03)")
    bench.add_argument("--row-ceilings", action="store_true", help="on a CPU: measure the ceiling of arithmetic again "
                       "beside every row, in turn with the contestants (for machines whose speed changes)")
    bench.add_argument("--limit-seconds", type=float,
                       help="start no new row after this much time; the classes then share it evenly")
    bench.add_argument("--known", nargs="+", metavar="FILE",
                       help="results of earlier runs: a layout that was far slower for the peer there is not searched; "
                       "with --limit-seconds the layers that they lack come first")
    bench.add_argument("--overhead", action="store_true", help="on a GPU: the host's time of first and later calls, "
                       "with nothing compiled before; --limit-seconds shares the time among the classes")
    bench.add_argument("--fp8", action="store_true", help="on a GPU: our own times with FP8 operands beside bf16, on "
                       "the dense layers with many channels")
    bench.add_argument("--models", default="", help="with torch: only these, comma-separated")
    bench.add_argument("--size", default="224,128", help="with torch: pixels of a side (default: %(default)s)")
    bench.add_argument("--batch", type=int, default=4, help="with torch: (default: %(default)s)")
    bench.add_argument("--json", metavar="FILE", help="write the results here")
    bench.add_argument("--html", metavar="FILE", help="write the results here as a page for a browser")
    bench.set_defaults(run=run_bench)

    report = subparsers.add_parser("report", help="make a page from results of `bench`: Markdown, or HTML with --html")
    report.add_argument("results", nargs="+", help="JSON files; rows of later files replace those of earlier ones")
    report.add_argument("--output", "-o", metavar="FILE", help="write here instead of to standard output")
    report.add_argument("--html", metavar="FILE", help="write a self-contained page for a browser here")
    report.set_defaults(run=run_report)

    demo = subparsers.add_parser("demo", help="two minutes: gradients of real layers, proved and timed on this machine")
    demo.add_argument("problem", nargs="*", help='your own layer, as "input_grad f32 n8 c64 k64 i56x56 w3x3 p1x1"')
    demo.add_argument("--threads", type=int, default=cores(), help="default: all cores, %(default)s")
    demo.add_argument("--html", metavar="FILE", help="write the results here as a page for a browser")
    demo.set_defaults(run=run_demo)


def run(args: argparse.Namespace) -> int:
    """Run the command that `args` came from."""
    code: int = args.run(args)
    return code


def words(text: str, known: dict[str, str], option: str) -> tuple[str, ...]:
    chosen = [word.strip() for word in text.split(",") if word.strip()]
    for word in chosen:
        if word not in known:
            raise ValueError(f"{option} {word!r} is none of {', '.join(known)}")
    return tuple(known[word] for word in chosen)


def run_bench(args: argparse.Namespace) -> int:
    if args.set == "torch":
        from .training import run_training

        return run_training(args)
    console = Console(stderr=True)
    device = args.device or ("cuda" if args.set == "gpu" else "cpu")
    on_gpu = device == "cuda"
    known = (*GRADIENTS, ALL_GRADIENTS) if on_gpu else GRADIENTS
    layout = args.layout or ("channels_last" if on_gpu else None)
    try:
        classes = words(args.classes, CLASS_WORDS, "--class") or CLASSES
        layers = select(load_layers(args.set), args.filter, classes)
        earlier: list[Row] = load(args.known)["rows"] if args.known else []
        choice = Choice(words(args.dtype or ("bf16,f16" if on_gpu else "f32,bf16,f16"), LONG_DTYPE, "--dtype"),
                        words(args.gradient or ",".join(known), {name: name for name in known}, "--gradient"),
                        (layout,) if layout else None, args.seconds or (0.03 if on_gpu else 0.25), args.limit_seconds)
        if not layers:
            raise ValueError(f"no layer of {args.set} matches --filter {args.filter!r} --class {args.classes!r}")
        if args.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {args.threads}")
        if args.clock == "cpu" and args.threads != 1:
            raise ValueError(f"--clock cpu needs --threads 1, got {args.threads}: idle threads use it too")
    except (ValueError, OSError) as error:
        console.print(f"convgrad bench: {error}", style="red", markup=False)
        return 2
    if choice.limit_seconds is not None:
        slow = {row["layer"] for row in earlier if (row["peer"] or {}).get("unfinished")}
        layers = sorted(spread(layers, {row["layer"] for row in earlier}), key=lambda layer: layer.name in slow)
    wanted = args.peer != "none"
    if wanted and not Peer.installed(args.peer):
        console.print(f"{args.peer} is not installed: no comparison (pip install {args.peer})", style="yellow")
        wanted = False
    if on_gpu:
        from .cuda import cuda_missing

        missing = cuda_missing()
        if missing:
            console.print(f"convgrad bench: {missing}", style="red", markup=False)
            return 2
        start = time.monotonic()
        if args.overhead:
            return run_overhead(layers, choice, args, console)
        if args.fp8:
            return run_fp8(layers, choice, args, console)
        from .watched import Watched, to_stderr

        watched = Watched(wanted, args.backend, layers, choice, earlier, say=to_stderr)
        if choice.limit_seconds is not None:
            choice = replace(choice, limit_seconds=choice.limit_seconds - (time.monotonic() - start))
        try:
            results = measured(args.set, layers, choice, watched, console, args.json, earlier)
        finally:
            watched.close()
    else:
        with Peer(args.peer, args.threads, args.clock, args.fresh_memory) as peer:
            arena = CpuArena(args.threads, peer if wanted else None, args.backend, args.clock, args.fresh_memory)
            arena.row_ceilings = args.row_ceilings
            results = measured(args.set, layers, choice, Here(arena), console, args.json, earlier)
    print_tables(results, Console(width=None if sys.stdout.isatty() else 220))
    spent = {name: sum(row["spent_s"][name] for row in results["rows"]) for name in ("ours", "peer", "timing")}
    console.print("seconds spent: {ours:.0f} on our results and their proof, {peer:.0f} on preparing the peer, "
                  "{timing:.0f} on timing".format(**spent))
    if args.json:
        save(results, args.json)
        console.print(f"results: {args.json}")
    if args.html:
        from ..pages.report import write_report

        write_report(results, args.html)
        console.print(f"page: {args.html}")
    return 1 if any(failed(row) for row in results["rows"]) else 0


def run_overhead(layers: list[Layer], choice: Choice, args: argparse.Namespace, console: Console) -> int:
    from .overhead import measure_overhead, print_overhead, use_an_empty_cache

    with use_an_empty_cache(), progress_bar(console) as progress:
        from .cuda import CudaArena

        arena = CudaArena(False, args.backend)
        task = progress.add_task("overhead", total=len(layers) * len(choice.dtypes) * len(choice.gradients))
        results = document(args.set, arena.describe(), [], 0)
        results["rows"] = measure_overhead(spread(layers), choice, arena, lambda row: progress.advance(task))
    print_overhead(results["rows"], Console(width=None if sys.stdout.isatty() else 160))
    if args.json:
        save({**results, "schema": "convgrad-overhead/1"}, args.json)
    return 0


def run_fp8(layers: list[Layer], choice: Choice, args: argparse.Namespace, console: Console) -> int:
    from .cuda import CudaArena
    from .fp8 import measure_fp8, print_fp8, wide_layers

    arena = CudaArena(False, args.backend)
    results = document(args.set, arena.describe(), [], 0)
    with progress_bar(console) as progress:
        task = progress.add_task("fp8", total=len(wide_layers(layers)) * len(choice.gradients))
        results["rows"] = measure_fp8(layers, choice, arena, lambda row: progress.advance(task))
    print_fp8(results["rows"], Console(width=None if sys.stdout.isatty() else 160))
    if args.json:
        save({**results, "schema": "convgrad-fp8/1"}, args.json)
    return 1 if any("error" in entry for row in results["rows"] for entry in row["modes"].values()) else 0


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def measured(name: str, layers: list[Layer], choice: Choice, measurer: Measurer, console: Console,
             path: str | None = None, known: Sequence[Row] = ()) -> dict[str, Any]:
    """Measure with a progress bar; return the results. They are written to `path` as they come."""
    total = len(layers) * len(choice.dtypes) * len(choice.gradients)
    so_far: list[Row] = []
    results = document(name, measurer.describe(), so_far, total)
    saved = time.monotonic()
    with progress_bar(console) as progress:
        task = progress.add_task("bench", total=total)

        def done(row: Row | None) -> None:
            nonlocal saved
            if row:
                so_far.append(row)
                results["skipped"] = total - len(so_far)
                if path and time.monotonic() > saved + SAVE_SECONDS:
                    save(results, path)
                    saved = time.monotonic()
            text = f"{row['layer']} {row['dtype']} {row['gradient']} x{ratio_text(row)}" if row else "out of time"
            progress.update(task, advance=1, description=f"{text:<60.60}")

        measure(layers, choice, measurer, done, known)
    return results


def run_report(args: argparse.Namespace) -> int:
    try:
        results = load(args.results)
        if args.html:
            from ..pages.report import write_report

            write_report(results, args.html)
            return 0
        page = markdown(results)
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"convgrad report: {error}", style="red", markup=False)
        return 2
    if args.output:
        Path(args.output).write_text(page)
    else:
        sys.stdout.write(page)
    return 0


def run_demo(args: argparse.Namespace) -> int:
    from .demo import demonstrate

    return demonstrate(args.problem, args.threads, Console(width=None if sys.stdout.isatty() else 160), args.html)


def main(arguments: list[str] | None = None) -> int:
    """Run the commands of this module alone: `python -m convgrad.benchmark.commands bench …`."""
    parser = argparse.ArgumentParser(prog="convgrad")
    add_commands(parser.add_subparsers(dest="command", required=True))
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
