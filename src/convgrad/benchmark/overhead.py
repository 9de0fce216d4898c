"""What a call costs the host on a GPU: the first one on a new shape, which compiles, and every later one.

The kernels are compiled into an empty folder, so that the first call is that of a user who never had this shape. The
later calls are timed by the host's clock; the GPU works behind them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..problem import DTYPES
from .cuda import CudaArena
from .layers import Layer, layer_of
from .rows import Choice, Row, asked

CALLS = 200
TOGETHER = 20  # calls after which the host waits for the GPU, whose queue is finite
WARMING = "input_grad f32 n1 c8 k8 i4 w3 NLC OLI"
HEAD = ("layer", "dtype", "gradient", "first call s", "later calls us", "quartiles", "kernel")


def use_an_empty_cache() -> Any:
    """Let Triton compile into a new folder, which is removed with the returned object; before Triton is imported."""
    folder = tempfile.TemporaryDirectory(prefix="convgrad_")
    os.environ["TRITON_CACHE_DIR"] = folder.name
    return folder


def host_seconds(call: Callable[[], Any], wait: Callable[[], None]) -> list[float]:
    """Seconds that the host spends in each of some calls."""
    seconds = []
    for number in range(CALLS):
        if number % TOGETHER == 0:
            wait()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    wait()
    return seconds


def measure_overhead(layers: Sequence[Layer], choice: Choice, arena: CudaArena,
                     done: Callable[[Row], None]) -> list[Row]:
    """One row for each layer, number format and gradient, until the time is over; `done` hears of each."""
    end = time.monotonic() + (choice.limit_seconds or float("inf"))
    rows: list[Row] = []
    # The driver, Triton and its compiler start with the first kernel of a process, whatever it is.
    started = first_call(layer_of(WARMING), "input_grad", "float32", arena)[0]
    for dtype, layer, gradient in asked(layers, choice):
        if time.monotonic() >= end:
            break
        first, call, kernel = first_call(layer, gradient, dtype, arena)
        q1, median, q3 = statistics.quantiles(host_seconds(call, arena.torch.cuda.synchronize), n=4)
        rows.append({"layer": layer.name, "class": layer.kind, "dtype": DTYPES[dtype][0], "gradient": gradient,
                     "kernel": kernel, "first_call_s": first, "host_s": median, "host_q1_s": q1, "host_q3_s": q3,
                     "start_s": started})
        done(rows[-1])
    return rows


def first_call(layer: Layer, gradient: str, dtype: str, arena: CudaArena) -> tuple[float, Callable[[], Any], str]:
    """Seconds of the first call of a layer's gradient until the GPU has done it, the call, and its kernel."""
    problem = layer.question(gradient, dtype, layer.layouts[-1], "cuda")
    arena.prepare(problem, layer, gradient)
    call = arena.call_of(problem)
    arena.torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    arena.torch.cuda.synchronize()
    return time.perf_counter() - start, call, arena.plan_of(problem).kernel


def print_overhead(rows: list[Row], console: Console) -> None:
    table = Table(title="Host time of a call; the first one compiles")
    for title in HEAD:
        table.add_column(title, no_wrap=title != "kernel", overflow="fold")
    for row in rows:
        table.add_row(row["layer"], row["dtype"], row["gradient"], f"{row['first_call_s']:.2f}",
                      f"{row['host_s'] * 1e6:.1f}", f"{row['host_q1_s'] * 1e6:.1f}-{row['host_q3_s'] * 1e6:.1f}",
                      row["kernel"])
    console.print(table)
    if rows:
        console.print(f"Before them the first kernel of the process took {rows[0]['start_s']:.1f} s; the slowest first "
                      f"call {max(row['first_call_s'] for row in rows):.1f} s, the median later call "
                      f"{statistics.median(row['host_s'] for row in rows) * 1e6:.1f} us.")
