"""The next kernel where one does not compile: that is not the caller's problem, but one to report.

Compilers refuse kernels that their versions or cards do not suit. What a plan would run first is therefore compiled
before anything is launched or recorded; where that fails, the plan goes on with what comes next, and says so once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from triton.errors import TritonError

from ...problem import Problem
from .launch import INTERPRETED, Share, current
from .packed_adds import NotCompiled

failed: dict[tuple[Problem, str], str] = {}  # by kernel's name: the compiler's message
compiled: set[Any] = set()


def compile_only(run: Callable[[], None]) -> None:
    """Compile what a call launches, and launch nothing; within a recording, nothing is recorded."""
    recording = getattr(current, "recording", None)
    current.recording, current.only_compile = None, Share()
    try:
        run()
    finally:
        current.recording, current.only_compile = recording, None


def run_first_compiled(problem: Problem, choices: Iterable[tuple[str, Callable[[], None]]],
                       tensors: Iterable[Any]) -> None:
    """Run the first of (name, call) that compiles for tensors that lie like these; of the last the error is raised."""
    strides = tuple(tensor.stride() for tensor in tensors)
    for name, run in choices:
        if compiles(problem, name, run, strides):
            break
    run()


def compiles(problem: Problem, name: str, run: Callable[[], None], strides: tuple[Any, ...]) -> bool:
    """Whether all kernels of a call compile; a refusal is remembered, and the caller is told once."""
    key = (problem, name)
    if INTERPRETED or (*key, strides) in compiled or getattr(current, "only_compile", None) is not None:
        return True
    if key in failed:
        return False
    try:
        compile_only(run)
    except NotCompiled:
        raise
    except (TritonError, RuntimeError) as error:
        failed[key] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        warnings.warn(f"convgrad: {name} does not compile here and another kernel computes '{problem}'; please report "
                      f"this line: {failed[key]}", RuntimeWarning, stacklevel=2)
        return False
    compiled.add((*key, strides))
    return True


def failures(problem: Problem) -> tuple[str, ...]:
    """What `explain` says of kernels that did not compile in this process, for any of a problem's results."""
    return tuple(f"does not compile here, so the next one runs: {name} ({message})"
                 for (asked, name), message in failed.items()
                 if (asked.conv, asked.dtype, asked.layout) == (problem.conv, problem.dtype, problem.layout))
