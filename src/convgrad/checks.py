"""What `Plan.run` refuses, whatever the backend."""

from __future__ import annotations

import math
from typing import Any

from .problem import Problem


def check_counts(problem: Problem, operands: Any, results: Any) -> None:
    """Refuse tuples for `Plan.run` that have not one array (or scale) for every name."""
    for given, what, names in ((operands, "operands", (*problem.operands, *problem.scales)),
                               (results, "results", problem.results)):
        if not isinstance(given, tuple) or len(given) != len(names):
            raise ValueError(f"{what} must be a tuple of {len(names)} ({', '.join(names)}), got "
                             f"{len(given) if isinstance(given, tuple) else type(given).__name__}")


def check_room(workspace: Any, needed: int) -> None:
    """Refuse a workspace for `Plan.run` that is smaller than the whole plan needs."""
    if workspace is not None and math.prod(workspace.shape) < needed:
        raise ValueError(f"workspace has {math.prod(workspace.shape)} bytes, but the plan needs {needed}")
