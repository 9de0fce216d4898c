"""What FP8 operands bring on a GPU: our own times in bf16, in FP8 with exact products, and with `compute="fp8"`.

No peer has gradients of FP8 convolutions. The layers are the dense ones with many channels, whose time is that of the
products; results are rounded to bf16 in all three, and compared with float64 like those of every benchmark.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..machine import cores
from ..plan import BACKENDS
from ..problem import Problem, Unsupported
from .arena import OURS
from .cuda import CudaArena
from .judge import WrongResult
from .layers import ALL_GRADIENTS, Layer
from .results import geometric_mean
from .rows import Choice, Row, layouts_of
from .timing import Contestant, alternate

CHANNELS = 256  # at least, on both sides
MODES = {"bf16": ("bfloat16", ""), "fp8 exact": ("float8_e4m3fn", ""), 'compute="fp8"': ("float8_e4m3fn", "fp8")}
COMPILED_SECONDS = 60.0


def wide_layers(layers: Sequence[Layer]) -> list[Layer]:
    """Those whose FP8 time is of interest."""
    return [layer for layer in layers if layer.kind == "dense" and
            min(layer.problem.conv.in_channels, layer.problem.conv.out_channels) >= CHANNELS]


def questions(layer: Layer, gradient: str, layout: str) -> dict[str, Problem]:
    """The problem of a gradient in every mode."""
    asked = layer.question(gradient, "bfloat16", layout, "cuda")
    return {mode: Problem(asked.conv, asked.wrt, dtype, "bfloat16", compute, asked.layout, asked.weight_layout, "cuda")
            for mode, (dtype, compute) in MODES.items()}


def measure_fp8(layers: Sequence[Layer], choice: Choice, arena: CudaArena,
                done: Callable[[Row | None], None]) -> list[Row]:
    """One row for each layer and gradient until the time is over; `done` hears of each."""
    end = time.monotonic() + (choice.limit_seconds or float("inf"))
    asked = [(layer, gradient, questions(layer, gradient, layouts_of(layer, choice)[-1]))
             for layer in wide_layers(layers) for gradient in choice.gradients if gradient != ALL_GRADIENTS]
    compiling = compile_beside(arena, [problem for _, _, modes in asked for problem in modes.values()])
    rows: list[Row] = []
    for layer, gradient, modes in asked:
        if time.monotonic() >= end:
            done(None)
            continue
        row: Row = {"layer": layer.name, "class": layer.kind, "gradient": gradient, "modes": {}}
        contestants: dict[str, Contestant] = {}
        for mode, problem in modes.items():
            if compiling is not None:
                compiling.wait((str(problem), None), COMPILED_SECONDS)
            try:
                contestants[mode], row["modes"][mode] = contestant_of(problem, layer, gradient, arena)
            except (Unsupported, WrongResult) as error:
                row["modes"][mode] = {"problem": str(problem), "error": str(error)}
        alternate(list(contestants.values()), choice.seconds, arena.rest, arena.rounds, arena.repeats)
        for mode, contestant in contestants.items():
            row["modes"][mode].update(contestant.summary())
            if "bf16" in contestants:
                row["modes"][mode]["ratio"] = contestants["bf16"].median / contestant.median
        rows.append(row)
        done(row)
    return rows


def compile_beside(arena: CudaArena, problems: Sequence[Problem]) -> Any:
    """Compile in other processes what the rows need; None where nothing is compiled."""
    launch = importlib.import_module(f"{BACKENDS['triton']}.launch")
    if launch.INTERPRETED or arena.backend not in (None, "triton"):
        return None
    ahead = importlib.import_module(f"{BACKENDS['triton']}.ahead")
    return ahead.Background([(str(problem), None) for problem in problems], max(1, cores() - 2), 3600.0)


def contestant_of(problem: Problem, layer: Layer, gradient: str, arena: CudaArena) -> tuple[Contestant, dict[str, Any]]:
    """Our call for a problem, verified, and what is told of it."""
    arena.prepare(problem, layer, gradient)
    chosen = arena.plan_of(problem)
    call = arena.call_of(problem)
    # bf16 holds FP8 numbers exactly, and torch can take samples of it
    arena.operands = {name: tensor.to(arena.torch.bfloat16) for name, tensor in arena.operands.items()}
    verified = arena.verified(problem, (call(),), chosen.kernel)
    arena.operands = {}
    told = {"problem": str(problem), "kernel": chosen.kernel, "workspace_bytes": chosen.workspace_bytes,
            "verified": verified.how, "worst_error": verified.worst}
    return Contestant(OURS, str(problem), arena.turn_of(call, "ours")), told


def print_fp8(rows: Sequence[Row], console: Console) -> None:
    """A table of all rows, and the mean of the ratios to bf16."""
    table = Table(title="FP8 (e4m3) beside bf16: microseconds, and how many times faster than bf16")
    for title in ("layer", "gradient", *MODES):
        table.add_column(title)
    for row in rows:
        table.add_row(row["layer"], row["gradient"], *(text_of(row["modes"].get(mode)) for mode in MODES))
    console.print(table)
    for gradient in dict.fromkeys(row["gradient"] for row in rows):
        for mode in list(MODES)[1:]:
            ratios = [entry["ratio"] for row in rows if row["gradient"] == gradient
                      and "ratio" in (entry := row["modes"].get(mode, {}))]
            if ratios:
                console.print(f"{gradient} {mode}: {geometric_mean(ratios):.2f} in the mean of {len(ratios)}, lowest "
                              f"{min(ratios):.2f}", markup=False)


def text_of(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "-"
    if "median_s" not in entry:
        return str(entry["error"])
    return f"{entry['median_s'] * 1e6:.1f}" + (f" ({entry['ratio']:.2f})" if "ratio" in entry else "")
