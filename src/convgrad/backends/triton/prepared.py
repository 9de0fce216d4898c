"""Plans whose calls are prepared: the runner is recorded, and front ends may ask for the prepared call itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...problem import Plan
from .numbers_on_device import TORCH_DTYPES
from .replay import Recorded, recorded


def prepared_plan(plan: Plan, parts: Callable[..., list[Callable[[], None]]] | None = None) -> Plan:
    """The plan with its runner recorded; `parts` gives the calls that it makes one after the other."""
    problem = plan.problem
    runner = recorded(plan.run, problem, parts)
    if not isinstance(runner, Recorded):  # the interpreter launches nothing
        return plan
    dtypes = [TORCH_DTYPES[problem.dtype]] * len(problem.operands) + \
        [TORCH_DTYPES[problem.out_dtype]] * len(problem.results)

    def prepared(strides: Sequence[Sequence[int]], device: int = 0) -> Any:
        return runner.prepared(problem, strides, device, dtypes)

    return plan._replace(run=runner, prepared=prepared)
