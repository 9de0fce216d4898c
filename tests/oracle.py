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
from convgrad.machine import backend_states
from convgrad.numbers import FORMATS, decode, encode, storage_dtype
from convgrad.problem import SPATIAL_LETTERS, axis_order
from convgrad.verify import (
    POISON,
    exact_results,
    integer_operands,
    magnitudes,
    real_operands,
    wrong_bits,
    wrong_bound,
)

Array = np.ndarray[Any, Any]
CANARY = 0xC5
GUARD_BYTES = 192
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


class Guarded:
    """An array between canaries. `view` has canonical axis order; memory has the problem's layout and a style."""

    def __init__(self, shape: tuple[int, ...], format_name: str, order: tuple[int, ...], style: str) -> None:
        dtype = storage_dtype(format_name)
        size = dtype.itemsize
        stored = [0] * len(shape)  # the shape in memory order
        for axis, place in enumerate(order):
            stored[place] = shape[axis]
        gap = 2 if style == "gaps" else 1
        steps, total = [0] * len(stored), gap
        for place in reversed(range(len(stored))):
            steps[place] = total
            total *= max(1, stored[place]) * gap
        start = GUARD_BYTES + (size if style == "offset" else 0)
        self.raw = np.full(start + total * size + GUARD_BYTES, CANARY, np.uint8)
        self.strides = tuple(steps[place] for place in order)  # in elements, before any reversal
        self.shape, self.start, self.dtype, self.format = shape, start, dtype, format_name
        self.view: Array = np.ndarray(shape, dtype, self.raw, start, tuple(step * size for step in self.strides))
        if style == "reversed":
            self.view = self.view[(slice(None, None, -1),) * len(shape)]

    def fill(self, values: Array) -> None:
        self.view[...] = values

    def snapshot(self) -> Array:
        """All bytes with this array's elements blanked: equal before and after a run, or something else was hit."""
        kept, outside = self.view.copy(), self.raw
        self.view[...] = np.zeros((), self.dtype)
        copy = outside.copy()
        self.view[...] = kept
        return copy


def axis_orders(problem: Problem, name: str) -> tuple[int, ...]:
    """Positions of the canonical axes of an operand or result in the problem's layouts."""
    if name == "bias":
        return (0,)
    axes = problem.conv.axes
    if name == "weight":
        return axis_order(problem.weight_layout or "OI" + SPATIAL_LETTERS[axes], axes, weights=True)
    return axis_order(problem.layout or "NC" + SPATIAL_LETTERS[axes], axes)


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
    if backend == "triton" and style == "reversed":  # torch tensors have no negative strides
        style = "gaps"
    inputs, outputs = [], []
    for name in problem.operands:
        array = Guarded(problem.shape_of_operand(name), problem.dtype, axis_orders(problem, name), style)
        array.fill(operands[name])
        inputs.append(array)
    for wrt in problem.results:
        array = Guarded(problem.conv.shape_of(wrt), problem.out_dtype, axis_orders(problem, wrt), style)
        array.fill(encode(np.full(array.shape, POISON[problem.out_dtype]), problem.out_dtype))
        outputs.append(array)
    # Bytes, at an odd address; on a GPU memory is handed out in aligned blocks.
    workspace = Guarded((chosen.workspace_bytes,), "hifloat8", (0,), "contiguous" if backend == "triton" else "offset")
    before = [array.raw.copy() for array in inputs] + [array.snapshot() for array in outputs]
    guards = workspace.snapshot()
    execute(chosen, backend, inputs, [operands[name] for name in problem.scales], outputs, workspace)
    after = [array.raw for array in inputs] + [array.snapshot() for array in outputs]
    names = [*problem.operands, *(f"the {wrt} result" for wrt in problem.results)]
    for name, old, new in zip(names, before, after, strict=True):
        assert np.array_equal(old, new), f"'{problem}' ({style}): bytes of or around {name} changed"
    assert np.array_equal(guards, workspace.snapshot()), f"'{problem}' ({style}): bytes around the workspace changed"
    return tuple(array.view.copy(order="C") for array in outputs)


def execute(chosen: Plan, backend: str, inputs: list[Guarded], scales: list[Array], outputs: list[Guarded],
            workspace: Guarded) -> None:
    """Run the plan on the views themselves, or on tensors with the same bytes and strides for a GPU backend."""
    if backend != "triton":
        chosen.run((*(a.view for a in inputs), *map(float, scales)), tuple(a.view for a in outputs), workspace.view)
        return
    import torch

    device = "cpu" if interpreted(backend) else "cuda"
    bytes_of = {id(a): torch.from_numpy(a.raw).to(device) for a in (*inputs, *outputs, workspace)}

    def tensor(array: Guarded) -> Any:
        body = bytes_of[id(array)][array.start:-GUARD_BYTES]
        dtype = torch.uint8 if array.format == "hifloat8" else getattr(torch, array.format)
        if array.start % array.dtype.itemsize == 0:
            return body.view(dtype).as_strided(array.shape, array.strides)
        raise AssertionError("tensors start at a multiple of their element size")

    chosen.run((*(tensor(a) for a in inputs), *(torch.from_numpy(scale).to(device) for scale in scales)),
               tuple(tensor(a) for a in outputs), tensor(workspace))
    for array in (*inputs, *outputs, workspace):
        array.raw[...] = bytes_of[id(array)].cpu().numpy()


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
    random = np.random.default_rng(seed)
    operands = integer_operands(problem, seed, thin=False)
    spoiled = {name: decode(operands[name], problem.dtype) for name in problem.operands}
    for values in spoiled.values():
        if values.size:
            places = random.choice(values.size, min(spots, values.size), replace=False)
            values.flat[places] = random.choice([np.inf, -np.inf, np.nan], len(places))  # NaN in a format without Inf
    operands |= {name: encode(values, problem.dtype) for name, values in spoiled.items()}
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
