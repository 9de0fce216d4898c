"""Engines and streams: accepted for line-by-line translations; arrays decide where the work is done."""

from __future__ import annotations

from enum import IntEnum


class engine:
    """A CPU or a GPU; the arrays that are executed on decide where the work is done."""

    class kind(IntEnum):
        any = 0
        cpu = 1
        gpu = 2

    def __init__(self, kind: kind = kind.cpu, index: int = 0) -> None:
        self.engine_kind, self.index = engine.kind(kind), index

    def get_kind(self) -> kind:
        return self.engine_kind


class stream:
    """Work is done when the call returns; a stream orders nothing."""

    def __init__(self, eng: engine) -> None:
        self.engine = eng

    def wait(self) -> stream:
        return self
