"""Processes that judge cases and may be lost: each is watched, and whoever dies or hangs says by what case."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from .case import Case
from .judge import Outcome, judged, warm_up

PATIENCE_SECONDS = {False: 60.0, True: 180.0}  # for one case; where kernels are compiled first it is more
CHUNK = {False: 8, True: 1}  # cases that a process is given at once
GRACE_SECONDS = 4.0  # after the end, for cases that are under way
PRELOADED = {"triton": ("torch", "triton", "triton.language")}  # imported once, before processes are forked
# One process has one processor; libraries that would start more threads only disturb the others.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
Serve = Callable[[Any, str, bool], None]


def serve(pipe: Any, backend: str, plan_only: bool) -> None:
    """Judge what comes and answer each case in its order; end when nothing more comes or the GPU is lost."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # in a case that hangs it would not see its parent's end
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # of a kernel that does not compile Triton prints all it knows
    os.dup2(nowhere, 2)
    warm_up(backend)
    with contextlib.suppress(EOFError, ConnectionError):
        while (texts := pipe.recv()) is not None:
            for text in texts:
                outcome = judged(Case.parse(text), backend, plan_only)
                pipe.send(outcome)
                if outcome.lost:
                    return


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The environment in which processes are started."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass
class Worker:
    """One process, and what it has still to answer."""

    backend: str
    plan_only: bool
    serve: Serve
    patience: float
    process: Any = None
    pipe: Any = None
    pending: deque[Any] = field(default_factory=deque)
    since: float = 0.0  # when the first pending case was begun

    def start(self) -> None:
        context: Any = multiprocessing.get_context("forkserver")  # with a GPU in use a process must not be forked
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=self.serve, args=(theirs, self.backend, self.plan_only), daemon=True)
        with one_thread():
            self.process.start()
        theirs.close()  # in this process: so that the other one's end is seen here

    def give(self, cases: Sequence[tuple[Any, Case]]) -> None:
        if self.process is None:
            self.start()
        with contextlib.suppress(ConnectionError):  # it has ended: its answers will say so
            self.pipe.send([str(case) for _, case in cases])
        self.pending.extend(cases)
        self.since = time.monotonic()

    def answers(self) -> Iterator[tuple[Any, Case, Outcome]]:
        """What has been answered by now; the death of the process is the answer of the case that it was at."""
        try:
            while self.pending and self.pipe.poll():
                outcome: Outcome = self.pipe.recv()
                self.since = time.monotonic()
                yield (*self.pending.popleft(), outcome)
                if outcome.lost:
                    self.stop()
                    return
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            self.stop()
            name = signal.Signals(-code).name if code < 0 else f"status {code}"
            yield (*self.pending.popleft(), Outcome("crash", f"the process died with {name}"))
            return
        if self.pending and time.monotonic() - self.since > self.patience:
            self.stop()
            yield (*self.pending.popleft(), Outcome("hang", f"no answer within {self.patience:g} s"))

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None


class Workers:
    """Some processes that judge a stream of cases. With no processes the cases are judged here, unwatched."""

    def __init__(self, backend: str, processes: int, plan_only: bool = False, serve: Serve = serve,
                 patience: float | None = None) -> None:
        self.backend, self.plan_only = backend, plan_only
        multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, *PRELOADED.get(backend, ())])
        compiled = backend == "triton" and not plan_only
        self.chunk = CHUNK[compiled]
        self.workers = [Worker(backend, plan_only, serve, patience or PATIENCE_SECONDS[compiled])
                        for _ in range(processes)]

    def judge(self, cases: Iterable[tuple[Any, Case]],
              end: float = float("inf")) -> Iterator[tuple[Any, Case, Outcome] | None]:
        """Outcomes as they come, each with its case and what the caller tied to it; None about once a second.

        What is under way at the `end` (of time.monotonic) is given a moment and then up.
        """
        source = iter(cases)
        if not self.workers:
            yield from ((tag, case, judged(case, self.backend, self.plan_only)) for tag, case in source)
            return
        returned: deque[tuple[Any, Case]] = deque()  # given to a process that did not live to see them
        ended = False
        while True:
            for worker in self.workers:
                if worker.process is None and worker.pending:
                    returned.extend(worker.pending)
                    worker.pending.clear()
                while not worker.pending and not (ended and not returned):
                    some: list[tuple[Any, Case]] = []
                    while len(some) < self.chunk:
                        following = returned.popleft() if returned else next(source, None)
                        if following is None:
                            ended = True
                            break
                        some.append(following)
                    if some:
                        worker.give(some)
            busy = [worker for worker in self.workers if worker.pending]
            if not busy:
                return
            if time.monotonic() > end + GRACE_SECONDS:
                for worker in busy:
                    worker.stop()
                    worker.pending.clear()
                return
            connection.wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                yield from worker.answers()
            yield None

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
