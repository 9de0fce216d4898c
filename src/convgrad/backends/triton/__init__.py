"""The GPU backend: Triton kernels for CUDA tensors (and, under TRITON_INTERPRET=1, for CPU arrays, to test them)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ...problem import Plan, Problem, Unsupported


def plan(problem: Problem, *, max_workspace_bytes: int | None = None, num_threads: int | None = None) -> Plan:
    """Choose kernels for a problem on CUDA tensors, or raise Unsupported."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if problem.device != "cuda" and not interpreted:
        raise Unsupported("the arrays are in CPU memory; Triton runs on CUDA tensors (TRITON_INTERPRET=1 tests on CPU)")
    from .plans import make_plan

    if problem.scaled:
        from .scaled_plans import make_scaled_plan

        return make_scaled_plan(problem, max_workspace_bytes)
    return make_plan(problem, max_workspace_bytes)


def as_one(plan: Plan, calls: Any) -> Plan:
    """A plan of several plans as one: compiled at once, their launches prepared and repeated together.

    `calls` gives for the arguments of its runner the calls of the plans' own runners.
    """
    from .prepared import prepared_plan

    return prepared_plan(plan, calls)


def precompile(wanted: Sequence[tuple[Problem, Any]]) -> tuple[float, list[str]]:
    """Compile the kernels of problems on tensors of given strides in parallel processes; seconds and errors."""
    from .compile_pool import Wanted
    from .compile_pool import precompile as compile_now

    return compile_now([Wanted(str(problem), strides) for problem, strides in wanted])


def notes_since(problem: Problem) -> tuple[str, ...]:
    """What happened to plans of a problem since they were made."""
    from .fallback import failures

    return failures(problem)
