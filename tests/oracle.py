"""The test oracle: run any backend on any problem between canaries and judge every byte it wrote.

`check_exact`, `check_bound` and `check_nonfinite` take a problem (or its string) and a backend's name. A refusal is
counted in `refused`; one that tests/refusals.py does not expect is a failure.
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from refusals import expected_refusal

from convgrad import Plan, Problem, Unsupported, plan
from convgrad.guarded import Arena, View
from convgrad.machine import backend_states
from convgrad.numbers import FORMATS, decode
from convgrad.verify import (
    exact_results,
    integer_operands,
    magnitudes,
    real_operands,
    special_operands,
    wrong_bits,
    wrong_bound,
)

Array = np.ndarray[Any, Any]
# How an array lies in memory: every test of a backend should see each of them.
STYLES = ("contiguous", "offset", "gaps", "reversed")

# (backend, why) -> how many problems were refused, as expected; conftest.py prints it.
refused: Counter[tuple[str, str]] = Counter()
# backend -> how many problems were run and found right.
passed: Counter[str] = Counter()


@functools.cache
def states() -> dict[str, str | None]:
    return backend_states()


def available_backends() -> list[str]:
    """The backends that load here; the Triton interpreter counts when TRITON_INTERPRET=1 is set."""
    return [name for name, reason in states().items() if reason is None]


def missing_backends() -> dict[str, str]:
    """Why the other backends are not available here."""
    return {name: reason for name, reason in states().items() if reason is not None}


def interpreted(backend: str) -> bool:
    """Whether the backend runs in the Triton interpreter: correct, on the CPU, and a thousand times slower."""
    return backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def one_in(backend: str) -> int:
    """Of many problems a test takes one in so many: on a GPU kernels are compiled for each, a second or more."""
    compiled = backend == "triton" and not interpreted(backend)
    return int(os.environ.get("CONVGRAD_TEST_ONE_IN", "64")) if compiled else 1


def as_problem(problem: Problem | str, backend: str) -> Problem:
    problem = Problem.parse(problem) if isinstance(problem, str) else problem
    return problem.with_(device="cuda") if backend == "triton" else problem


def views_of(style: str, problem: Problem) -> list[View]:
    """The views of operands and results in which all axes lie alike."""
    if problem.device == "cuda" and style == "reversed":  # torch tensors have no negative strides
        style = "gaps"
    ranks = [problem.conv.axes + 2] * len(problem.operands)
    ranks += [len(problem.conv.shape_of(wrt)) for wrt in problem.results]
    return [View(offset=style == "offset", gaps=tuple(range(rank)) if style == "gaps" else (),
                 flipped=tuple(range(rank)) if style == "reversed" else ()) for rank in ranks]


def planned(problem: Problem, backend: str, **options: Any) -> Plan | None:
    """The backend's plan, or None when it refuses as expected."""
    try:
        chosen = plan(problem, backend=backend, **options)
    except Unsupported as error:
        why = expected_refusal(backend, problem)
        if why is None:
            raise AssertionError(f"unexpected refusal of '{problem}': {error}") from error
        refused[backend, why] += 1
        return None
    assert chosen.problem == problem
    limit = options.get("max_workspace_bytes")
    needed = chosen.workspace_bytes
    assert limit is None or needed <= limit, f"'{problem}': the plan needs {needed} bytes, allowed are {limit}"
    return chosen


def run_guarded(problem: Problem | str, backend: str, operands: dict[str, Array], *, style: str = "contiguous",
                **options: Any) -> tuple[Array, ...] | None:
    """Run a backend between canaries on poisoned outputs; contiguous canonical results, or None when refused."""
    problem = as_problem(problem, backend)
    chosen = planned(problem, backend, **options)
    if chosen is None:
        return None
    arena = Arena(problem, operands, views_of(style, problem), chosen.workspace_bytes)
    inputs, outputs, workspace, collect = arena.lend()
    chosen.run((*inputs, *arena.scales(operands)), tuple(outputs), workspace)
    collect()
    arena.check()
    return arena.results()


def check(problem: Problem | str, backend: str, operands: dict[str, Array],
          judge: Callable[[Problem, str, Array, Array, Array], Any], **options: Any) -> bool:
    problem = as_problem(problem, backend)
    results = run_guarded(problem, backend, operands, **options)
    if results is None:
        return False
    exact = exact_results(problem, operands)
    sizes = magnitudes(problem, operands) if judge is wrong_bound else exact
    for wrt, got, value, size in zip(problem.results, results, exact, sizes, strict=True):
        wrong = judge(problem, wrt, got, value, size)
        assert wrong is None, f"{backend} ({options}): {wrong}"
    passed[backend] += 1
    return True


def check_exact(problem: Problem | str, backend: str, *, seed: int = 0, thin: bool = True, **options: Any) -> bool:
    """Integer operands, bitwise comparison. False when the backend refused as expected."""
    operands = integer_operands(as_problem(problem, "reference"), seed, thin)
    return check(problem, backend, operands, lambda p, wrt, got, exact, size: wrong_bits(p, wrt, got, exact), **options)


def check_bound(problem: Problem | str, backend: str, *, seed: int = 0, positive: bool = False,
                **options: Any) -> bool:
    """Real operands, the error bound of the numerical contract. False when the backend refused as expected."""
    operands = real_operands(as_problem(problem, "reference"), seed, positive)
    return check(problem, backend, operands, wrong_bound, **options)


def check_nonfinite(problem: Problem | str, backend: str, *, seed: int = 0, spots: int = 2, **options: Any) -> bool:
    """A few Inf and NaN among integer operands reach exactly the results whose sums contain them."""
    problem = as_problem(problem, "reference")
    operands = special_operands(problem, seed, spots)
    spoiled = {name: decode(operands[name], problem.dtype) for name in problem.operands}
    results = run_guarded(problem, backend, operands, **options)
    if results is None:
        return False
    exact = exact_results(problem, operands)
    for wrt, got, value in zip(problem.results, results, exact, strict=True):
        reached = reach_of(problem, wrt, {name: ~np.isfinite(values) for name, values in spoiled.items()})
        found = ~np.isfinite(decode(got, problem.out_dtype))
        stray = np.argwhere(found != reached)
        assert not len(stray), (f"'{problem}' on {backend}: {wrt} result at {tuple(stray[0])} is "
                                f"{decode(got, problem.out_dtype)[tuple(stray[0])]}, "
                                f"{'must not' if found[tuple(stray[0])] else 'must'} be reached by Inf or NaN")
        wrong = wrong_bits(as_problem(problem, backend), wrt, got, value)
        assert wrong is None, f"{backend}: {wrong}"
    passed[backend] += 1
    return True


def reach_of(problem: Problem, wrt: str, marked: dict[str, Array]) -> Array:
    """Which elements of a result have a marked operand element among their terms."""
    single = problem.with_(wrt=wrt, dtype="float64", compute="f64", out_dtype="float64", scaled=False)
    reached = np.zeros(problem.conv.shape_of(wrt), bool)
    for marked_name in single.operands:
        counts = {name: (marked[name] if name == marked_name else np.ones_like(marked[name])).astype(np.float64)
                  for name in single.operands}
        reached |= exact_results(single, counts)[0] > 0
    return reached


def overflows(problem: Problem, exact: Array) -> bool:
    """Whether some exact value is too large for the output format."""
    return bool(exact.size) and float(np.abs(exact).max()) > FORMATS[problem.out_dtype].max


def elements(problem: Problem) -> int:
    """Multiply-adds of the problem: what a slow backend is limited by."""
    return math.prod(problem.conv.output_shape) * problem.conv.group_in * problem.conv.taps
