"""The process that compiles: it imports Triton once and forks a child for every job, which fills the cache on disk.

A job is a line of JSON on the standard input, its end a line on the standard output. Nothing here touches a GPU. The
process is our own and not one of `multiprocessing`, whose children would import the caller's main program again.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import Any

import torch
from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from ...problem import Problem
from .ahead import plans_of
from .gpu import Gpu, Planning
from .launch import Share, current
from .no_gpu import NoDriver
from .numbers_on_device import TORCH_DTYPES
from .recording import without_memory


def compile_job(job: dict[str, Any]) -> str:
    """Compile a share of the kernels of a problem on tensors of given strides; returns the error, if any."""
    try:
        problem = Problem.parse(job["problem"])
        steps = iter(job["strides"])
        operands = {name: without_memory(problem.shape_of_operand(name), next(steps), TORCH_DTYPES[problem.dtype])
                    for name in problem.operands}
        results = {name: without_memory(problem.conv.shape_of(name), next(steps), TORCH_DTYPES[problem.out_dtype])
                   for name in problem.results}
        current.only_compile = Share(*job["share"])
        for plan in plans_of(problem, None):
            part = plan.problem
            plan.run(tuple(operands[name] for name in part.operands), tuple(results[name] for name in part.results),
                     None)
    except Exception as failure:  # the compiler's own errors are of many kinds; whoever needs the kernel gets them
        return f"{type(failure).__name__}: {failure}"
    return ""


def run_in_child(job: dict[str, Any], answers: int) -> int:
    """Fork a process for a job; it writes one line when it has ended. Returns its number."""
    child = os.fork()
    if child:
        return child
    if sys.platform == "linux":  # a killed program must not leave processes that go on compiling
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    start = time.perf_counter()
    error = compile_job(job)
    answer = {"id": job["id"], "seconds": time.perf_counter() - start, "error": error[:300]}
    os.write(answers, json.dumps(answer).encode() + b"\n")  # one write of less than PIPE_BUF: lines do not mix
    os._exit(0)


def serve(processes: int, answers: int) -> None:
    """Run jobs until the standard input ends, at most so many at once."""
    waiting: list[dict[str, Any]] = []
    running: set[int] = set()
    text, opened = b"", True
    while opened or waiting or running:
        while waiting and len(running) < processes:
            running.add(run_in_child(waiting.pop(0), answers))
        # children's ends are looked for often while there are any
        if opened and select.select([0], [], [], 0.01 if running else None)[0]:
            more = os.read(0, 1 << 16)
            opened = bool(more)
            *lines, text = (text + more).split(b"\n")
            waiting += [json.loads(line) for line in lines]
        elif not opened:
            break
        for child in list(running):
            if os.waitpid(child, os.WNOHANG)[0]:
                running.remove(child)


def main() -> None:
    """`python -c "from … import main; main()" BACKEND ARCH WARP_SIZE PROCESSES GPU`."""
    backend, arch, warp, processes, gpu = sys.argv[1:6]
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # of a kernel that does not compile Triton prints all it knows
    driver.set_active(NoDriver((backend, int(arch), int(warp))))
    Planning.gpu = Gpu.parse(gpu)
    torch.set_num_threads(1)
    triton_key()  # reads all of Triton, for 0.4 s, in every process that does not have it from here
    make_backend(driver.active.get_current_target()).hash()  # asks ptxas for its version

    os.write(answers, b'{"ready": true}\n')
    serve(int(processes), answers)
