"""Where contestants meet: how we and the peers are called on one kind of device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from .. import api
from ..call import exchanged
from ..plan import plan
from ..problem import Plan, Problem
from .allocator import give_back_memory, keep_freed_memory
from .ceilings import Ceilings, measure_ceilings, products
from .judge import Expected, Verified, canonical, in_layout, random_operands
from .layers import Layer
from .peers import Peer
from .provenance import describe_machine
from .timing import MAX_REPEATS, REST_SECONDS, ROUNDS, Contestant, clocked

OURS = "convgrad"


@dataclass(frozen=True)
class Entry:
    """One of our contestants: ready to be timed, because its result was right."""

    contestant: Contestant
    plan: Plan
    verified: Verified


class Arena(Protocol):
    """A device on which problems are verified and timed."""

    device: str
    rest: float  # seconds between turns
    rounds: int  # turns of each contestant at most
    repeats: int  # of a turn at most
    ceilings: Ceilings

    def describe(self) -> dict[str, Any]:
        """Machine, peer and ceilings, for the results."""

    def seconds_at_ceiling(self, problem: Problem) -> float:
        """Least time the device needs for a problem."""

    def products(self, problem: Problem) -> list[Contestant]:
        """The ceiling of a problem's arithmetic as a contestant, if it is measured beside every row."""

    def prepare(self, problem: Problem, layer: Layer, gradient: str) -> None:
        """Take a layer's gradient, a problem in channels-first order, as the next one; forget the last operands."""

    def ours(self, problem: Problem, layout: str) -> Entry:
        """Verify our result for the prepared problem in the layouts of `problem`."""

    def peers(self, layer: Layer, problem: Problem, left_out: Collection[str]) -> tuple[list[Contestant], list[str]]:
        """The peer's contestants for the prepared problem, without some of its ways, and remarks for the row."""


def public_call(problem: Problem, operands: dict[str, Any], backend: str | None,
                threads: int | None) -> Callable[[], Any]:
    """Return a call of the public function that answers `problem`; operands have the axis orders of its layouts.

    The result is allocated by the call, as it is by the peers' calls.
    """
    conv = problem.conv
    options: dict[str, Any] = {
        "stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation, "groups": conv.groups,
        "layout": problem.layout, "weight_layout": problem.weight_layout, "compute": problem.compute,
        "out_dtype": problem.out_dtype, "backend": backend, "num_threads": threads}
    if len(problem.results) > 1:
        three = tuple(operands[name] for name in ("grad_output", "input", "weight"))
        return lambda: api.conv_backward(*three, **options)
    a, b = (operands[name] for name in problem.operands)
    if problem.wrt == "output":
        return lambda: api.conv(a, b, **options)
    if problem.wrt == "input":
        return lambda: api.input_grad(a, b, conv.in_size, **options)
    if problem.wrt == "weight":
        return lambda: api.weight_grad(a, b, conv.kernel_size, **options)
    raise ValueError(f"wrt={problem.wrt!r}: only conv, input_grad and weight_grad are benchmarked")


def transposed_backward(problem: Problem, operands: dict[str, Any], backend: str | None) -> Callable[[], Any]:
    """Return a call for all gradients of the transposed layer whose input gradient `problem` is."""
    conv = problem.conv
    extra = tuple((size + low + high - span) % stride for size, (low, high), span, stride in
                  zip(conv.in_size, conv.padding, conv.span, conv.stride))
    three = tuple(operands[name] for name in ("input", "grad_output", "weight"))
    options: dict[str, Any] = {
        "stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation, "groups": conv.groups,
        "output_padding": extra, "layout": problem.layout, "weight_layout": exchanged(problem.weight_layout),
        "compute": problem.compute, "backend": backend}
    return lambda: api.conv_transpose_backward(*three, **options)


class CpuArena:
    """The processor: NumPy arrays for us, the peer in a process of its own."""

    device = "cpu"
    rest = REST_SECONDS
    rounds = ROUNDS
    repeats = MAX_REPEATS
    row_ceilings = False  # whether the ceiling of arithmetic is measured again beside every row

    def __init__(self, threads: int, peer: Peer | None = None, backend: str | None = None, clock: str = "wall",
                 fresh_memory: bool = False) -> None:
        self.threads, self.peer, self.backend, self.clock = threads, peer, backend, clock
        self.memory = "kept" if not fresh_memory and keep_freed_memory() else "fresh"
        self.ceilings: Ceilings = measure_ceilings(threads)
        self.operands: dict[str, Any] = {}
        self.expected: Expected | None = None

    def describe(self) -> dict[str, Any]:
        return {"machine": describe_machine(), "threads": self.threads, "clock": self.clock, "memory": self.memory,
                "ceilings": self.ceilings.as_dict(),
                "peer": {"name": self.peer.name, **self.peer.describe()} if self.peer else None}

    def seconds_at_ceiling(self, problem: Problem) -> float:
        return self.ceilings.seconds(problem)

    def products(self, problem: Problem) -> list[Contestant]:
        return [products(problem, self.threads, self.clock)] if self.row_ceilings else []

    def prepare(self, problem: Problem, layer: Layer, gradient: str) -> None:
        self.problem, self.operands, self.expected = problem, {}, None
        give_back_memory()

    def ours(self, problem: Problem, layout: str) -> Entry:
        chosen = plan(problem, backend=self.backend, num_threads=self.threads)
        if self.expected is None:  # not before we know that the problem can be run
            self.operands = random_operands(self.problem)
            self.expected = Expected(self.problem, self.operands)
        placed = {name: in_layout(self.operands[name], problem.weight_layout if name == "weight" else problem.layout,
                                  name == "weight") for name in problem.operands}
        call = public_call(problem, placed, self.backend, self.threads)
        weights = problem.wrt == "weight"
        result = canonical(call(), problem.weight_layout if weights else problem.layout, weights)
        verified = self.expected.check(result, chosen.kernel)
        return Entry(Contestant(OURS, layout, lambda repeats: clocked(call, repeats, self.clock)), chosen, verified)

    def peers(self, layer: Layer, problem: Problem, left_out: Collection[str]) -> tuple[list[Contestant], list[str]]:
        return self.peer.contestants(problem, layer.transposed, left_out) if self.peer else ([], [])
