"""The other side of a comparison: a library that runs in a child process, so that its crash is a row."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

from ..problem import Problem
from .peer_torch import ways
from .timing import Contestant

PATIENCE_SECONDS = 180.0  # for one answer
MAX_SECONDS = 2.0         # a peer's run longer than this is timed on a part of the problem, where that is possible


class PeerFailed(Exception):
    """The peer crashed, hung or refused; the message says which."""


class Peer:
    """A peer in its own process; a crashed one is started again for the next problem."""

    def __init__(self, name: str, threads: int, clock: str = "wall", fresh_memory: bool = False,
                 max_seconds: float = MAX_SECONDS) -> None:
        self.name, self.threads, self.clock, self.max_seconds = name, threads, clock, max_seconds
        self.memory = "fresh" if fresh_memory else "kept"
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[str] | None = None

    @staticmethod
    def installed(name: str) -> bool:
        return importlib.util.find_spec(name) is not None

    def describe(self) -> dict[str, Any]:
        """Return version, threads and remarks of the peer."""
        return self.ask({"do": "describe"})

    def contestants(self, problem: Problem, transposed: bool,
                    left_out: Collection[str] = ()) -> tuple[list[Contestant], list[str]]:
        """Prepare every way the peer has to solve `problem`; return them and the remarks for the row."""
        found: list[Contestant] = []
        notes: list[str] = []
        failures: list[str] = []
        self.ask({"do": "forget"})
        for way in (way for way in ways(problem) if way not in left_out):
            try:
                reply = self.ask({"do": "prepare", "way": way, "problem": str(problem), "transposed": transposed,
                                  "max_seconds": self.max_seconds})
            except PeerFailed as error:
                failures.append(f"{way}: {error}")
                continue
            notes += [reply["note"]] if reply["note"] and reply["note"] not in notes else []
            found.append(Contestant(self.name, way, self.turn_of(way), reply["scale"]))
        if not found:
            raise PeerFailed("; ".join(failures))
        return found, notes + failures

    def turn_of(self, way: str) -> Any:
        def turn(repeats: int) -> list[float]:
            seconds: list[float] = self.ask({"do": "time", "way": way, "repeats": repeats,
                                                "clock": self.clock})["seconds"]
            return seconds
        return turn

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        process = self.process or self.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], PATIENCE_SECONDS)
            if not ready:
                self.close()
                raise PeerFailed(f"no answer within {PATIENCE_SECONDS:g} s")
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerFailed(self.obituary())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerFailed(reply["error"])
        return reply

    def start(self) -> subprocess.Popen[str]:
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"convgrad.benchmark.peer_{self.name}", str(self.threads), self.memory],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(self.threads)})
        return self.process

    def obituary(self) -> str:
        """Collect a dead peer and say how it died."""
        process, errors = self.process, self.errors
        assert process is not None and errors is not None
        code = process.wait(10)
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [""])[-1]
        self.close()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"the peer was {how}" if code < 0 else f"the peer {how}: {last}"

    def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # of a request that it did not live to read
                        pipe.close()
        if self.errors is not None:
            self.errors.close()
            self.errors = None

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
