"""A backend with faults to be found: the reference, but wrong, deadly, or endless for some problems."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from convgrad.backends import reference
from convgrad.fuzz.workers import serve
from convgrad.plan import BACKENDS
from convgrad.problem import Plan, Problem, Unsupported

NAME = "faulty"


def plan(problem: Problem, *, max_workspace_bytes: int | None = None, num_threads: int | None = None) -> Plan:
    conv = problem.conv
    if len(problem.results) > 1:
        raise Unsupported("one result after the other")
    if conv.dilation[0] == 4:
        raise ZeroDivisionError("planning fails for a dilation of 4")
    right = reference.plan(problem)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any = None) -> None:
        if conv.kernel_size[0] == 4:
            os.kill(os.getpid(), signal.SIGSEGV)
        if conv.kernel_size[0] == 3 and conv.stride[0] == 3:
            time.sleep(3600)
        right.run(operands, results, workspace)
        if problem.wrt == "weight" and conv.stride[0] == 2 and conv.group_in >= 3 and results[0].size:
            results[0][(-1,) * results[0].ndim] += np.ones((), results[0].dtype)
        if conv.batch == 3 and problem.wrt == "bias":  # one element beyond
            np.lib.stride_tricks.as_strided(results[0], (results[0].size + 1,))[-1] = 0

    return right._replace(backend=NAME, kernel="faulty_f32_1x1", run=run)


def register() -> None:
    BACKENDS[NAME] = __name__


def serve_faulty(pipe: Any, backend: str, plan_only: bool) -> None:
    register()
    serve(pipe, backend, plan_only)
