"""Compiling in several processes, which share Triton's cache on disk: a whole model ahead, or all gradients of a shape.

Threads share one interpreter lock, and much of a compilation is Python. The processes are forked by one that has
imported Triton (`compile_worker.py`); it is started when a kernel is first missing and ends with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from triton.runtime.driver import driver

from .gpu import current_gpu

LONGEST_WAIT = 600.0  # seconds for one compilation
WORKER = "from convgrad.backends.triton.compile_worker import main; main()"
ENDED = "the compiling process has ended"
SHARES, FEWER_SHARES = 4, 2  # processes for one call, alone or among many: its launches are compiled side by side
Strides = Sequence[Sequence[int]]


class Wanted(NamedTuple):
    """The kernels of a problem on tensors of some strides: those of its operands, then of its results."""

    problem: str
    strides: tuple[tuple[int, ...], ...]


class Job:
    """One process's work: waited for by whoever needs it."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error = ""


def processes_here() -> int:
    """CONVGRAD_COMPILE_PROCESSES, or as many as there are processors, shared with other ranks on this machine."""
    asked = os.environ.get("CONVGRAD_COMPILE_PROCESSES", "")
    if asked:
        if not asked.isdecimal():
            raise ValueError(f"CONVGRAD_COMPILE_PROCESSES must be a number of processes, 0 for none, got {asked!r}")
        return int(asked)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, processors // max(1, int(ranks) if ranks.isdecimal() else 1))


class CompilePool:
    """The processes for one kind of GPU."""

    def __init__(self, target: Any, processes: int) -> None:
        self.processes, self.owner = processes, os.getpid()
        self.ready = threading.Event()
        self.failed = False
        self.jobs: dict[int, Job] = {}
        self.count = 0
        self.lock = threading.Lock()
        self.worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, target.backend, str(target.arch), str(target.warp_size), str(processes),
             current_gpu().text()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        atexit.register(self.close)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        """Hear of the ends of jobs, until the processes are gone."""
        assert self.worker.stdout is not None
        for line in self.worker.stdout:
            answer = json.loads(line)
            if "ready" in answer:
                self.ready.set()
                continue
            with self.lock:
                job = self.jobs.pop(answer["id"])
            job.error = answer["error"]
            job.ended.set()
        with self.lock:
            self.failed = True
            for job in self.jobs.values():  # whoever waits compiles himself
                job.error = ENDED
                job.ended.set()
            self.jobs.clear()
        self.ready.set()

    def submit(self, wanted: Wanted, share: tuple[int, int] = (0, 1)) -> Job:
        """Begin a share of the compilations of a problem."""
        assert self.worker.stdin is not None
        job = Job()
        with self.lock:
            if self.failed:
                job.error = ENDED
                job.ended.set()
                return job
            self.count += 1
            self.jobs[self.count] = job
            text = {"id": self.count, "problem": wanted.problem, "strides": wanted.strides, "share": share}
            with contextlib.suppress(OSError):  # `listen` will see that the process has gone
                self.worker.stdin.write(json.dumps(text).encode() + b"\n")
                self.worker.stdin.flush()
        return job

    def compile(self, wanted: Sequence[Wanted], each: Callable[[Wanted, str], None] | None = None) -> list[str]:
        """Compile all that is wanted and wait; returns the errors. `each` hears of every problem that is done."""
        distinct = list(dict.fromkeys(wanted))
        shares = SHARES if len(distinct) * SHARES <= self.processes else FEWER_SHARES
        begun = [(one, [self.submit(one, (share, shares)) for share in range(shares)]) for one in distinct]
        errors = []
        for one, jobs in begun:
            for job in jobs:
                if not job.ended.wait(LONGEST_WAIT):
                    job.error = f"not compiled within {LONGEST_WAIT:.0f} seconds"
            error = next((job.error for job in jobs if job.error), "")
            errors += [f"{one.problem}: {error}"] if error else []
            if each is not None:
                each(one, error)
        return errors

    def close(self) -> None:
        """End the processes; jobs under way are given up."""
        if os.getpid() != self.owner:  # a fork of the program that started them
            return
        self.worker.kill()
        self.worker.wait()


_pools: dict[Any, CompilePool] = {}
_lock = threading.Lock()


def pool() -> CompilePool | None:
    """The processes for the current GPU, started where they are not there yet; None where there shall be none."""
    if processes_here() == 0:
        return None
    target = driver.active.get_current_target()
    key = (target, os.environ.get("TRITON_CACHE_DIR"), os.getpid())
    with _lock:
        found = _pools.get(key)
        if found is None or found.failed:
            found = _pools[key] = CompilePool(target, processes_here())
        return found


def precompile(wanted: Sequence[Wanted]) -> tuple[float, list[str]]:
    """Compile kernels in all processes and wait; returns the seconds that it took and the errors."""
    start = time.monotonic()
    compiling = pool()
    if compiling is None:
        return 0.0, ["CONVGRAD_COMPILE_PROCESSES=0 leaves no process to compile in"]
    compiling.ready.wait(LONGEST_WAIT)
    errors = compiling.compile(wanted)
    return time.monotonic() - start, errors
