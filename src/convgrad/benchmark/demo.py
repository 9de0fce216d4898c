"""`convgrad demo`: in two minutes, the gradients of real layers on this machine, proved and timed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..plan import BACKENDS, plan
from ..problem import Unsupported, default_compute
from .arena import Arena, CpuArena
from .layers import Layer, layer_of, load_layers
from .peer_torch import smaller
from .peers import Peer
from .provenance import describe_machine, versions
from .report import SHORT, ms, ratio_text
from .results import document, geometric_mean, our_time
from .rows import Choice, Here, Row, failed, measure

SECONDS = 0.1             # of running time per contestant
LIMIT_SECONDS = 95.0      # for all rows of one device
REFERENCE_FLOPS = 1e8     # size of a layer for the reference, which is there to be right and not to be fast
HEAD = ("layer", "dtype", "gradient", "kernel", "error", "ms", "GFLOP/s", "of ceiling", "vs torch")


@dataclass(frozen=True)
class Stage:
    """One backend of this machine, and the layers it shows."""

    backend: str
    device: str
    layers: list[Layer]
    dtypes: tuple[str, ...]


def demonstrate(words: list[str], threads: int, console: Console, html: str | None = None) -> int:
    """Run the demonstration on the layers of the set `demo`, or on the one described by `words`.

    `html` names a page to write for the backends of the processor; one for a GPU goes beside it.
    """
    try:
        layers = [own_layer(" ".join(words))] if words else load_layers("demo")
    except (ValueError, TypeError) as error:
        console.print(f"convgrad demo: {escape(str(error))}", style="red")
        console.print(escape('A layer is written like this: "input_grad f32 n8 c64 k64 i56x56 w3x3 s2x2 p1x1"'))
        return 2
    dtypes = (layers[0].problem.dtype,) if words else ("float32", "bfloat16")
    machine = describe_machine()
    console.print(f"[bold]{escape(machine['cpu'])}[/], {machine['cores']} cores, "
                  f"{machine['memory_bytes'] / 2**30:.0f} GiB, {' '.join(machine['instructions'])}")
    console.print(escape("  ".join(f"{name} {version}" for name, version in versions().items())), style="dim")
    stages = find_stages(layers, dtypes, console)
    wrong = 0
    for stage in stages:
        wrong += show(stage, threads, console, html)
    console.print('Your own layer:  convgrad demo "input_grad f32 n8 c64 k64 i56x56 w3x3 s2x2 p1x1"', style="dim",
                  markup=False, highlight=False)
    return 1 if wrong else 0


def own_layer(text: str) -> Layer:
    layer = layer_of(text)
    if layer.problem.compute != default_compute(layer.problem.dtype):
        raise ValueError(f"problem string {text!r}: the demonstration knows no compute mode but the default")
    return layer


def find_stages(layers: list[Layer], dtypes: tuple[str, ...], console: Console) -> list[Stage]:
    """Return the backends that run here, fast ones at full size; the reference only where there is no fast one."""
    found: list[Stage] = []
    for backend in BACKENDS:
        device = "cuda" if backend == "triton" else "cpu"
        if backend == "reference" and any(stage.device == "cpu" for stage in found):
            console.print("[green]reference[/]: float64 NumPy, used to prove the results below")
            continue
        try:
            if device == "cuda":
                from .cuda import cuda_missing

                if missing := cuda_missing():
                    raise Unsupported(missing)
            plan(layers[0].question("input_grad", dtypes[0], layers[0].layouts[0], device), backend=backend)
        except Unsupported as error:
            reason = error.reasons.get(backend, str(error))
            console.print(f"[yellow]{backend}[/]: {escape(reason)}", highlight=False)
            continue
        shown = [part_of(layer) for layer in layers] if backend == "reference" else layers
        remark = ": float64 NumPy, exact and slow, so each layer is cut down" if backend == "reference" else ""
        console.print(f"[green]{backend}[/]{remark}")
        found.append(Stage(backend, device, shown, dtypes))
    return found


def part_of(layer: Layer) -> Layer:
    """Return the layer with less batch and fewer output channels."""
    return replace(layer, problem=smaller(layer.problem, REFERENCE_FLOPS))


def show(stage: Stage, threads: int, console: Console, html: str | None) -> int:
    """Measure one backend, print its table, return the number of wrong rows."""
    has_torch = Peer.installed("torch")
    if not has_torch:
        console.print("torch is not installed: no comparison (pip install torch)", style="yellow")
    if stage.device == "cuda":
        from .cuda import CudaArena

        return measure_and_print(stage, CudaArena(has_torch, stage.backend), console, html)
    with Peer("torch", threads) as peer:
        return measure_and_print(stage, CpuArena(threads, peer if has_torch else None, stage.backend), console, html)


def measure_and_print(stage: Stage, arena: Arena, console: Console, html: str | None) -> int:
    choice = Choice(dtypes=stage.dtypes, seconds=SECONDS, limit_seconds=LIMIT_SECONDS)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=len(stage.layers) * len(stage.dtypes) * 2)

        def done(row: Row | None) -> None:
            progress.update(task, advance=1, description=f"{row['layer'] if row else '':<28.28}")

        rows, skipped = measure(stage.layers, choice, Here(arena), done)
    console.print(table_of(stage, rows))
    conclude(stage, rows, skipped, console)
    if html:
        write_page(stage, document("demo", arena.describe(), rows, skipped), html, console)
    return sum(map(failed, rows))


def write_page(stage: Stage, results: dict[str, Any], html: str, console: Console) -> None:
    from ..pages.report import write_report

    path = Path(html) if stage.device == "cpu" else Path(html).with_suffix(f".{stage.device}.html")
    write_report(results, path)
    console.print(f"The same as a page with charts: {path.resolve()}", style="bold", markup=False, highlight=False)


def table_of(stage: Stage, rows: list[Row]) -> Table:
    table = Table(title=f"backend {stage.backend} on {stage.device}: gradients proved against float64, then timed")
    for title in HEAD:
        table.add_column(title, justify="left" if HEAD.index(title) < 4 else "right", overflow="fold")
    for row in rows:
        start = [row["layer"], row["dtype"], row["gradient"]]
        entry = our_time(row)
        if entry is None:
            errors = "; ".join(e["error"] for e in row["ours"].values() if "error" in e)
            table.add_row(*start, escape(errors), "WRONG" if failed(row) else "", "", "", "", "", style="red")
            continue
        worst = max(e["worst_error"] for e in row["ours"].values() if "worst_error" in e)
        lost = row["ratio"] is not None and row["ratio"] < 1
        versus = f"[{'red' if lost else 'green'}]{ratio_text(row)}[/] {SHORT[entry['layout']]}" if row["ratio"] else "-"
        table.add_row(*start, entry["kernel"], f"{worst:.2f}", ms(entry["median_s"]), f"{entry['gflops']:.3g}",
                      f"{entry['of_ceiling']:.0%}", versus)
    return table


def conclude(stage: Stage, rows: list[Row], skipped: int, console: Console) -> None:
    timed = [row for row in rows if our_time(row)]
    wrong = sum(map(failed, rows))
    verdict = f"[red]{wrong} results are wrong[/]" if wrong else f"[green]all {len(timed)} within the error bound[/]"
    console.print(f"{verdict} (error is in units of the bound, 1.00 is the limit; narrow formats come close to it by "
                  "their own rounding)")
    compared = [row for row in timed if row["ratio"]]
    if compared and stage.backend != "reference":
        lost = [row for row in compared if row["ratio"] < 1]
        names = [f"{row['layer']} {row['dtype']} {row['gradient']}" for row in lost]
        mean = geometric_mean(row["ratio"] for row in compared)
        console.print(f"speed against torch, geometric mean: [bold]{mean:.3g}x[/]; slower on {len(lost)} of "
                      f"{len(compared)}" + (": " + ", ".join(names) if names else ""))
    if skipped:
        console.print(f"{skipped} rows left out to stay within two minutes", style="yellow")
