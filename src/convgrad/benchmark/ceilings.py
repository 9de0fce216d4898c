"""What this machine can do: FMA and bf16 arithmetic and copy bandwidth, measured in the same run as the rows."""

from __future__ import annotations

import importlib
import threading
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from ..problem import Problem
from .timing import Contestant, clocked

MATRIX = 2048           # NumPy's product when the native module is absent: large enough to hide its packing
COPY_BYTES = 256 << 20  # per copy: larger than the last-level caches


@dataclass(frozen=True)
class Ceilings:
    """Flops per second in f32 and bf16 (0: the machine has no bf16 products), bytes per second read plus written."""

    f32_flops: float
    bf16_flops: float
    copy_bytes: float
    how: str

    def seconds(self, problem: Problem) -> float:
        """Least time this machine needs for a problem: its arithmetic or its bytes, whichever takes longer.

        Products of f16 are summed in f32, for which CPUs have no instruction but f32 FMA (or exact bf16 splits).
        """
        flops = max(self.f32_flops, self.bf16_flops) if exact_in_bf16(problem) else self.f32_flops
        return max(problem.flops / flops, problem.min_bytes / self.copy_bytes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def exact_in_bf16(problem: Problem) -> bool:
    return problem.dtype == "bfloat16" or problem.dtype.startswith("float8") or problem.dtype == "hifloat8"


def products(problem: Problem, threads: int, clock: str) -> Contestant:
    """Return the arithmetic of a problem, run from registers, as a contestant: what the machine can do at that time.

    Its times are scaled to the whole problem.
    """
    native = importlib.import_module("convgrad._native")
    run = partial(native.run_products, exact_in_bf16(problem), threads)
    return Contestant("ceiling", "registers", lambda repeats: clocked(run, repeats, clock), problem.flops / run())


def measure_ceilings(threads: int) -> Ceilings:
    """Measure with the native module, or with NumPy (which has no bf16 product) where it is not built."""
    try:
        native = importlib.import_module("convgrad._native")
        f32, bf16, copy, how = native.measure_ceilings(threads)
        return Ceilings(f32, bf16, copy, how)
    except (ImportError, AttributeError):
        return Ceilings(numpy_product(), 0.0, numpy_copy(threads), "NumPy matrix product and copies")


def numpy_product() -> float:
    a = np.ones((MATRIX, MATRIX), np.float32)
    b, c = np.ones_like(a), np.empty_like(a)
    return 2 * MATRIX**3 / min(clocked(lambda: np.matmul(a, b, out=c), 6))


def numpy_copy(threads: int) -> float:
    """Bytes per second read plus written by `threads` copies at once (np.copyto releases the GIL)."""
    sources = [np.ones(COPY_BYTES // threads, np.uint8) for _ in range(threads)]
    targets = [np.zeros_like(source) for source in sources]

    def copy_all() -> None:
        workers = [threading.Thread(target=np.copyto, args=pair) for pair in zip(targets, sources)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return 2 * sum(source.nbytes for source in sources) / min(clocked(copy_all, 5))
