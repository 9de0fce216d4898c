"""Who serves a call of aten::convolution_backward, ours or torch's own kernel, and the account of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...beside_torch import why_torch
from ...problem import Unsupported
from . import aten_backward
from .aten_backward import PLAIN_TYPES, BackwardCall, Question
from .cuda_backward import prepared_on_cuda
from .tensors import has_c_exchange, native, threads

MOST_ROWS = 4096  # programs with ever new shapes: the rest is counted together


@dataclass
class PlainTally:
    """How often and how long something was served, where the native core is not there to count."""

    calls: int = 0
    seconds: float = 0.0


def new_tally() -> Any:
    return PlainTally() if native is None else native.Tally()


@dataclass
class Row:
    """A line of the report: a geometry, who serves it, and why."""

    geometry: str
    served_by: str  # a backend of ours, or "torch"
    why: str
    tally: Any = field(default_factory=new_tally)


rows: dict[tuple[str, str, str], Row] = {}


def row_of(geometry: str, served_by: str, why: str) -> Row:
    if len(rows) >= MOST_ROWS:
        geometry, why = "others", ""
    return rows.setdefault((geometry, served_by, why), Row(geometry, served_by, why))


def why_served_by_torch(asked: Question) -> str | None:
    """The rule's word on one gradient, None where ours serves it."""
    part = aten_backward.parts_of(asked)[0]
    first = part.plan.problem.results[0]
    return why_torch(part.plan.problem.with_(wrt=first), part.plan.kernel, threads() or 1)


class Desk:
    """Answers the first call of every signature: a prepared call of ours, or a function that serves it otherwise.

    `by_torch` is torch's own kernel; `again` the registered kernel, for calls that have been made plain.
    """

    def __init__(self, by_torch: Callable[..., Any], again: Callable[..., Any]) -> None:
        self.by_torch = by_torch
        self.again = again

    def prepare(self, keys: Any, *arguments: Any) -> tuple[Any, Any]:
        if any(type(tensor) not in PLAIN_TYPES for tensor in arguments[:3]):
            return self.made_plain, new_tally()
        call = BackwardCall(*arguments)
        try:
            asked = aten_backward.question(call)
        except Unsupported as error:
            return self.by_torch, row_of(call.text(), "torch", str(error)).tally
        if asked.device == "cpu" and aten_backward.in_one_format(call) is not call:
            return self.laid_out, new_tally()
        try:
            halves = asked.halves() if asked.device == "cpu" else []  # on GPUs ours serves all
            verdicts = [why_served_by_torch(half) for half in halves]
            if len(verdicts) == 2 and (verdicts[0] is None) != (verdicts[1] is None):
                return self.by_halves, new_tally()  # each is counted by itself
            if verdicts and verdicts[0] is not None:
                return self.by_torch, row_of(str(asked), "torch", verdicts[0]).tally
            parts = aten_backward.parts_of(asked)
        except Unsupported as error:
            return self.by_torch, row_of(str(asked), "torch", str(error)).tally
        backends = "+".join(dict.fromkeys(part.plan.backend for part in parts))
        tally = row_of(str(asked), backends, " + ".join(part.plan.kernel for part in parts)).tally
        if backends == "native" and has_c_exchange():
            return aten_backward.prepared_on_cpu(call, parts, aten_backward.result_format(call)), tally
        prepared = prepared_on_cuda(call, asked) if call.input.is_cuda else None
        return prepared or aten_backward.through_api, tally

    def by_halves(self, keys: Any, *arguments: Any) -> tuple[Any, Any, Any]:
        """The gradient of the input, and those of weight and bias, each by who is faster."""
        *rest, (dx, dw, db) = arguments
        return (self.again(keys, *rest, [dx, False, False])[0], *self.again(keys, *rest, [False, dw, db])[1:])

    def laid_out(self, keys: Any, *arguments: Any) -> Any:
        """A dy that lies in another memory format than the input is copied first, as torch does."""
        return self.again(keys, *aten_backward.in_one_format(BackwardCall(*arguments)))

    def made_plain(self, keys: Any, *arguments: Any) -> Any:
        """Tensors of a subclass that has left its operations to torch: the numbers in them are what counts."""
        with torch._C.DisableTorchFunctionSubclass():
            plain = [tensor.as_subclass(torch.Tensor) for tensor in arguments[:3]]  # type: ignore[attr-defined]
        return self.again(keys, *plain, *arguments[3:])
