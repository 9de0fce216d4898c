"""Rows of a GPU, measured in a process of their own that is watched.

A search of the peer's can take minutes, a call can crash and take the GPU's state with it. The process is then killed
and started anew. Where a search of the peer's did not end, there and in the rows like it the peer runs what it chooses
without one; where not even that ends, the layout is left out. A row that we did not finish says so. Meanwhile other
processes compile the kernels of the rows to come.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ..machine import cores
from ..plan import BACKENDS
from .ceilings import Ceilings
from .cuda import CudaArena, questions_of, seconds_at_ceiling
from .layers import ALL_GRADIENTS, Layer
from .peer_torch import ALL_WAYS
from .rows import Choice, Row, asked, blank_row, layouts_of, measure_row

CONTEXT: Any = multiprocessing.get_context("spawn")  # with a GPU in use a process must not be forked
START_SECONDS = 180.0    # for the process to begin
PATIENCE_SECONDS = 45.0  # for one step of a row: a call of ours, some timed runs, a search that is known to end
SEARCH_SECONDS = 8.0     # for any other search of the peer's; nearly all take less than 2 seconds
SAY_SECONDS = 10.0       # after so much time a row is named
GRACE_SECONDS = 5.0      # after the end of the time for a row that is under way
COMPILE_SECONDS = 3600.0  # for all problems
COMPILED_SECONDS = 60.0  # for one problem


def serve(connection: Any, with_peer: bool, backend: str | None, ceilings: Ceilings | None) -> None:
    """Measure a row for each request; tell of every step before it begins."""
    if sys.platform == "linux" and multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: in a search it would not see its parent's end
    arena = CudaArena(with_peer, backend, ceilings, lambda step: connection.send(("at", step)))
    connection.send(("ready", (arena.ceilings, arena.describe())))
    while (request := connection.recv()) is not None:
        layer, gradient, dtype, choice, left_out, arena.hurried = request
        try:
            connection.send(("row", measure_row(layer, gradient, dtype, choice, arena, left_out)))
        except Exception as error:  # of the GPU, whose state may be lost: this process ends
            lines = str(error).splitlines()
            connection.send(("lost", f"{type(error).__name__}: {lines[0] if lines else ''}"))
            return


class Watched:
    """Measures rows in a process that may be lost."""

    device = "cuda"

    def __init__(self, with_peer: bool, backend: str | None, layers: Sequence[Layer], choice: Choice,
                 known: Iterable[Row] = (), serve: Callable[..., None] = serve,
                 say: Callable[[str], None] = lambda text: None) -> None:
        """`known` are rows of earlier runs, from which searches that do not end are known."""
        self.end = time.monotonic() + (choice.limit_seconds or float("inf"))
        self.with_peer, self.backend, self.serve, self.say = with_peer, backend, serve, say
        # By layer, gradient and whether in f32 (16-bit formats run alike): the peer's ways whose search ended or not.
        self.finished: dict[tuple[str, str, bool], set[str]] = {}
        self.unfinished: dict[tuple[str, str, bool], set[str]] = {}
        for row in known:
            self.learn(row)
        self.process: Any = None
        self.connection: Any = None
        self.ceilings: Ceilings | None = None
        self.description: dict[str, Any] = {}
        self.compiling: Any = None
        if backend in (None, "triton") and not importlib.import_module(f"{BACKENDS['triton']}.launch").INTERPRETED:
            questions = dict.fromkeys(
                str(question) for dtype, layer, gradient in asked(layers, choice)
                for layout in layouts_of(layer, choice) for question in questions_of(layer, gradient, dtype, layout))
            ahead = importlib.import_module(f"{BACKENDS['triton']}.ahead")
            self.compiling = ahead.Background([(question, None) for question in questions], max(1, cores() - 2),
                                              COMPILE_SECONDS)
        self.start()

    def describe(self) -> dict[str, Any]:
        return self.description

    def start(self) -> None:
        self.connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=self.serve, args=(theirs, self.with_peer, self.backend, self.ceilings))
        self.process.daemon = True
        self.process.start()
        theirs.close()  # in this process: so that the other one's end is seen here
        answer, _, _ = self.answer("start", float("inf"))
        if not isinstance(answer, tuple):
            raise RuntimeError(f"the process that measures did not begin: {answer or 'no answer'}")
        self.ceilings, self.description = answer

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None and hasattr(process, "kill"):
            process.kill()
            process.join()

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.connection.send(None)
            self.process.join(GRACE_SECONDS)
            self.stop()

    def answer(self, step: str, end: float,
               waiting: Callable[[float, str], None] = lambda seconds, step: None,
               short: Collection[str] = ()) -> tuple[Any, str, float]:
        """What the process sends but steps; or why it was lost, or None when it was waited for in vain.

        Then the last step and its seconds; `step` is the first one, `short` are those with little time.
        """
        began = time.monotonic()
        while True:
            now = time.monotonic()
            patience = START_SECONDS if step == "start" else SEARCH_SECONDS if step in short else PATIENCE_SECONDS
            if now > min(end, began + patience):
                self.stop()
                return None, step, now - began
            waiting(now - began, step)
            try:
                if not self.connection.poll(0.5):
                    continue
                what, value = self.connection.recv()
            except (EOFError, ConnectionError):
                self.process.join()
                code, self.process = self.process.exitcode, None
                return f"the process ended with status {code}", step, now - began
            if what == "at":
                step, began = value, time.monotonic()
                continue
            if what == "lost":
                self.stop()
            return value, step, time.monotonic() - began

    def learn(self, row: Row) -> None:
        """Take from a row which searches of the peer's end."""
        peer = row["peer"] or {}
        vain = set(peer.get("unfinished", ()))
        for known, ways in ((self.finished, peer.get("ways", {}).keys() - vain), (self.unfinished, vain)):
            for gradient in dict.fromkeys((row["gradient"], ALL_GRADIENTS)):
                known.setdefault((row["layer"], gradient, row["dtype"] == "f32"), set()).update(ways)

    def row(self, layer: Layer, gradient: str, dtype: str, choice: Choice, left_out: dict[str, float]) -> Row | None:
        """One row; None where the time for all rows ended before it."""
        layouts = layouts_of(layer, choice)
        if self.compiling is not None:
            for layout in layouts:
                for question in questions_of(layer, gradient, dtype, layout):
                    self.compiling.wait((str(question), None), COMPILED_SECONDS)
        given_up: dict[str, float] = {}
        like = (layer.name, gradient, dtype == "float32")
        unfinished = dict.fromkeys(self.unfinished.get(like, ()), 0.0)
        name, said = f"{layer.name} {dtype} {gradient}", set[str]()

        def waiting(seconds: float, step: str) -> None:
            if seconds > SAY_SECONDS and step not in said:
                said.add(step)
                self.say(f"{name}: {step} takes more than {SAY_SECONDS:g} s")

        while True:
            if self.process is None:
                self.start()
            self.connection.send((layer, gradient, dtype, choice, {**left_out, **given_up}, set(unfinished)))
            short = {f"peer {way}" for way in ALL_WAYS if way not in self.finished.get(like, ())}
            answer, step, seconds = self.answer("row", self.end + GRACE_SECONDS, waiting, short)
            if isinstance(answer, dict):
                for what, ways in (("unfinished", unfinished), ("given_up", given_up)):
                    if ways and answer["peer"]:
                        answer["peer"][what] = ways
                        answer["spent_s"]["peer"] += sum(ways.values())
                self.learn(answer)
                return answer
            if answer is None and time.monotonic() > self.end:
                return None
            reason = answer or f"not done within {seconds:.0f} s"
            self.say(f"{name}: {step}: {reason}")
            who, _, way = step.partition(" ")
            if who == "peer" and way not in given_up:
                (given_up if way in unfinished else unfinished)[way] = seconds
                continue
            first = layer.question(gradient, dtype, layouts[0], self.device)
            assert self.ceilings is not None
            return {**blank_row(layer, gradient, first, seconds_at_ceiling(self.ceilings, first)),
                    "ours": {layouts[0]: {"error": f"{step}: {reason}",
                                         "wrong": who == "ours" and "OutOfMemory" not in reason}},
                    "spent_s": {"peer": 0.0, "ours": seconds, "timing": 0.0}}


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
