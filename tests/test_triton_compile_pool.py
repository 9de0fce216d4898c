"""Compiling in other processes: jobs and their ends, processes that die, and one real compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from convgrad.backends.triton import compile_pool
from convgrad.backends.triton.compile_pool import FEWER_SHARES, SHARES, CompilePool, Wanted, processes_here
from convgrad.backends.triton.launch import Share

# Answers as compile_worker does: an error for "wrong", none for others, and dies of "fatal".
STAND_IN = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if job["problem"] == "fatal":
        sys.exit(1)
    said = "as it is" if job["problem"] == "wrong" else ""
    print(json.dumps({"id": job["id"], "seconds": 0.0, "error": said}), flush=True)
"""
TARGET = SimpleNamespace(backend="cuda", arch=90, warp_size=32)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompilePool]:
    monkeypatch.setattr(compile_pool, "WORKER", STAND_IN)
    found = CompilePool(TARGET, 8)
    assert found.ready.wait(60) and not found.failed
    yield found
    found.close()


def wanted(problem: str) -> Wanted:
    return Wanted(problem, ((3, 1), (1,)))


def test_jobs_end_and_errors_name_the_problem(pool: CompilePool) -> None:
    heard: list[tuple[str, str]] = []
    errors = pool.compile([wanted("a"), wanted("wrong"), wanted("a"), wanted("b")],
                          lambda one, error: heard.append((one.problem, error)))
    assert errors == ["wrong: as it is"]
    assert heard == [("a", ""), ("wrong", "as it is"), ("b", "")], "each problem once"
    assert pool.count == 3 * FEWER_SHARES and not pool.jobs, "eight processes are too few for all shares of three"
    assert not pool.compile([wanted("c"), wanted("d")]) and pool.count == 3 * FEWER_SHARES + 2 * SHARES


def test_nobody_waits_for_a_process_that_is_gone(pool: CompilePool) -> None:
    errors = pool.compile([wanted("fatal"), wanted("late")])
    assert errors and all("the compiling process has ended" in error for error in errors)
    assert pool.failed
    assert pool.submit(wanted("more")).ended.wait(60)


def test_shares_are_all_launches_once() -> None:
    shares = [Share(first, 3) for first in range(3)]
    assert [[share.has_next() for share in shares].index(True) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGRAD_COMPILE_PROCESSES", "5")
    assert processes_here() == 5
    monkeypatch.setenv("CONVGRAD_COMPILE_PROCESSES", "0")
    assert compile_pool.pool() is None
    monkeypatch.setenv("CONVGRAD_COMPILE_PROCESSES", "many")
    with pytest.raises(ValueError, match="CONVGRAD_COMPILE_PROCESSES must be a number of processes, 0 for none, got "
                                         "'many'"):
        processes_here()
    monkeypatch.delenv("CONVGRAD_COMPILE_PROCESSES")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    assert processes_here() == 1


COMPILE = """
from triton.runtime.driver import driver
from convgrad.backends.triton import plan, precompile
from convgrad.backends.triton.no_gpu import NoDriver
from convgrad import Problem
driver.set_active(NoDriver(("cuda", 90, 32)))
good = Problem.parse("bias_grad f32 n2 c1 k3 i5 w1 cuda")
seconds, errors = precompile([(good, ((15, 5, 1), (1,))), (good.with_(layout="NLC"), ((15, 5),))])
assert len(errors) == 1 and "NLC" in errors[0], errors
"""


def test_kernels_are_in_the_cache_on_disk(tmp_path: object) -> None:
    folder = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=300, check=False,
                          env={**os.environ, "TRITON_INTERPRET": "0", "CONVGRAD_COMPILE_PROCESSES": "2",
                               "TRITON_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.returncode == 0, done.stderr
    assert [name for _, _, names in os.walk(folder) for name in names if name.endswith(".cubin")]
