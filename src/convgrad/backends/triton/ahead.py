"""Compiling ahead of time, in several processes: fills Triton's cache on disk and touches no GPU.

A first call then loads its kernels instead of compiling them. Tuning and benchmarks compile all they need this way,
the benchmark beside its measurements.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.runtime.driver import driver

from ...problem import Plan, Problem, Unsupported
from .gpu import Gpu, Planning, current_gpu
from .launch import Share, current
from .no_gpu import NoDriver
from .plans import make_plan
from .registry import empty_tensor
from .scaled_plans import make_scaled_plan
from .tuning import SEPARATE, Entry

LONGEST_WAIT = 3600.0  # seconds for one job
Job = tuple[str, Entry | None]  # a problem's string, and the choice where it is not the plan's own


def plans_of(problem: Problem, choice: Entry | None) -> list[Plan]:
    """The plans that a call of this problem runs: one, or one for each result that none computes together."""
    try:
        return [make_scaled_plan(problem, None) if problem.scaled else make_plan(problem, None, choice)]
    except Unsupported:
        if len(problem.results) == 1 or choice not in (None, SEPARATE):
            raise
        parts = list(problem.results)
        if parts[-2:] == ["weight", "bias"] and len(parts) == 3:
            parts[1:] = ["weight+bias"]
        return [plan for part in parts for plan in plans_of(problem.with_(wrt=part), None)]


def compile_job(job: Job) -> tuple[Job, float, str]:
    """Compile the kernels of one job; returns it with the seconds that it took and the error, if any."""
    start = time.perf_counter()
    problem, error = Problem.parse(job[0]).with_(device="cuda"), ""
    current.only_compile = Share()
    try:
        for plan in plans_of(problem, job[1]):
            asked = plan.problem
            scales = (torch.empty(1, device="meta") for _ in asked.scales)
            plan.run((*(empty_tensor(asked, name, asked.dtype, "meta") for name in asked.operands), *scales),
                     tuple(empty_tensor(asked, name, asked.out_dtype, "meta") for name in asked.results), None)
    except Unsupported as refusal:
        error = f"not supported: {refusal}"
    except Exception as failure:  # the compiler's own errors are of many kinds; the caller reports them
        error = f"{type(failure).__name__}: {failure}"
    finally:
        current.only_compile = None
    return job, time.perf_counter() - start, error


def fresh_processes() -> Any:
    """Processes that share nothing with this one, whose GPU they must not touch; they import this module but once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _begin(target: tuple[str, int, int], gpu: Gpu) -> None:
    if sys.platform == "linux":  # a killed command must not leave processes that go on compiling
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # of a kernel that does not compile Triton prints all it knows
    driver.set_active(NoDriver(target))
    Planning.gpu = gpu
    torch.set_num_threads(1)


def compile_ahead(jobs: Sequence[Job], workers: int, limit_seconds: float,
                  done: Callable[[Job, float, str], None] = lambda job, seconds, error: None) -> int:
    """Compile jobs in `workers` processes until all are done or the time is over; returns how many were done.

    The jobs are begun in their order; `done` hears of each that has ended.
    """
    if not jobs:
        return 0
    target = driver.active.get_current_target()
    end = time.monotonic() + limit_seconds
    finished = 0
    start = ((target.backend, target.arch, target.warp_size), current_gpu())
    with fresh_processes().Pool(min(workers, len(jobs)), _begin, start) as pool:
        results = pool.imap_unordered(compile_job, jobs)
        while finished < len(jobs):
            try:
                done(*results.next(timeout=min(LONGEST_WAIT, max(0.01, end - time.monotonic()))))
            except multiprocessing.TimeoutError:
                break
            finished += 1
        pool.terminate()
    return finished


class Background:
    """Compiles jobs in other processes while this one goes on."""

    def __init__(self, jobs: Sequence[Job], workers: int, limit_seconds: float) -> None:
        self.ended = {key(job): threading.Event() for job in jobs}
        self.errors: dict[str, str] = {}
        # NOTE: daemons, as the pool's processes are: the end of this process ends them
        threading.Thread(target=compile_ahead, args=(jobs, workers, limit_seconds, self.note), daemon=True).start()

    def note(self, job: Job, seconds: float, error: str) -> None:
        self.errors[key(job)] = error
        self.ended[key(job)].set()

    def wait(self, job: Job, limit_seconds: float) -> bool:
        """Whether a job is compiled, after waiting for it; whoever needs one that is not compiles it himself."""
        return key(job) in self.ended and self.ended[key(job)].wait(limit_seconds) and not self.errors[key(job)]


def key(job: Job) -> str:
    return json.dumps(job, sort_keys=True)
