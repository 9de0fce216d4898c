"""The peer torch, in a process of its own: `python -m convgrad.benchmark.peer_torch THREADS kept|fresh`.

Reads one JSON request per line and answers with one JSON line. A crash of the peer ends this process only.

    {"do": "describe"}                                            -> {"version": …, "note": …}
    {"do": "prepare", "way": …, "problem": …, "transposed": …, "max_seconds": …}  -> {"scale": …, "note": …}
    {"do": "time", "way": …, "repeats": …, "clock": …}            -> {"seconds": […]}
    {"do": "forget"}                                              -> {}
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..problem import Conv, Problem
from .allocator import give_back_memory, keep_freed_memory
from .peer_amx import protect_peer
from .timing import clocked

CONV_TBC, VIEWS = "conv_tbc", "views"  # the two ways to torch's gradients of time-first data
LAYOUT_WAYS = ("channels_first", "channels_last")
ALL_WAYS = (CONV_TBC, VIEWS, *LAYOUT_WAYS)
PROBE_FLOPS = 2e7


def ways(problem: Problem) -> tuple[str, ...]:
    """The ways in which torch can compute a problem, of which the faster counts."""
    return (CONV_TBC, VIEWS) if problem.layout == "TBC" else LAYOUT_WAYS


@dataclass(frozen=True)
class Prepared:
    """One call of the peer: `run()`, whose time times `scale` is the time of the problem."""

    run: Callable[[], Any]
    scale: float = 1.0
    note: str = ""


def torch_tensor(shape: tuple[int, ...], dtype: str, way: str, values: Any) -> Any:
    """A tensor in canonical axis order whose memory order is that of `way`; random unless values are given."""
    import torch

    kind = getattr(torch, dtype)
    tensor = torch.empty(shape, dtype=kind).uniform_(-1, 1) if values is None else torch.as_tensor(values).to(kind)
    if way == "channels_last":
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    if way in (CONV_TBC, VIEWS):
        return tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    return tensor.contiguous()


def prepare(problem: Problem, transposed: bool, way: str, operands: dict[str, Any] | None = None,
            together: bool = False) -> Prepared:
    """Make the call that gives the answer to `problem`, on random data or on given channels-first float32 values.

    `together` asks for the gradients of input, weight and bias from one call.

    One-sided padding is unknown to torch: the peer gets an input that is padded already, and the gradient it returns is
    that of the padded input. What padding and slicing would cost is not counted.
    """
    import torch

    conv, given = problem.conv, operands or {}

    def tensor(name: str, of_way: str = way) -> Any:
        return torch_tensor(problem.shape_of_operand(name), problem.dtype, of_way, given.get(name))

    wants_weight = problem.wrt == "weight"
    x, dy = tensor("input"), tensor("grad_output")
    # torch lays weights out like activations; conv_tbc has its own order (taps, in, out), which a view can have too.
    if way in (CONV_TBC, VIEWS):
        w = tensor("weight", "channels_first").permute(2, 1, 0).contiguous().permute(2, 1, 0)
    else:
        w = tensor("weight")
    mask = [together or not wants_weight, together or wants_weight, together]
    place = 1 if wants_weight else 0

    if way == CONV_TBC:
        if conv.padding[0][0] != conv.padding[0][1] or conv.stride != (1,) or conv.dilation != (1,) or conv.groups > 1:
            raise ValueError(f"conv_tbc has equal pads, no stride, dilation or groups: '{problem}'")
        time_first = [t.permute(2, 0, 1) for t in (dy, x)]
        arguments = (*time_first, w.permute(2, 1, 0), torch.zeros(conv.out_channels, dtype=dy.dtype))

        def both() -> Any:
            results = torch.ops.aten.conv_tbc_backward(*arguments, conv.padding[0][0])
            return results[1].permute(2, 1, 0) if wants_weight else results[0].permute(1, 2, 0)

        if together:
            return Prepared(both)
        return Prepared(both, 0.5, "conv_tbc_backward computes both gradients: half of its time is counted")

    note, padding = "", [low for low, _ in conv.padding]
    if any(low != high for low, high in conv.padding):
        if transposed:
            raise ValueError(f"a transposed convolution with one-sided padding has no call in torch: '{problem}'")
        pads = [pad for low_high in reversed(conv.padding) for pad in low_high]
        x, padding = torch.nn.functional.pad(x, pads), [0] * conv.axes
        note = "the peer gets a padded input for free"
    backward = torch.ops.aten.convolution_backward
    if transposed:  # torch's layer maps our output to our input
        extra = [size - ((out - 1) * stride - 2 * pad + span) for size, out, stride, pad, span in
                 zip(conv.in_size, conv.out_size, conv.stride, padding, conv.span)]
        x, dy = dy, x
    else:
        extra = [0] * conv.axes

    biases = [conv.in_channels if transposed else conv.out_channels] if together else None

    def run() -> Any:
        results = backward(dy, x, w, biases, conv.stride, padding, conv.dilation, transposed, extra, conv.groups, mask)
        return results if together else results[place]

    return Prepared(run, 1.0, note)


def affordable(problem: Problem, transposed: bool, way: str, max_seconds: float) -> tuple[Problem, float]:
    """Return a problem that torch finishes in about `max_seconds`, and by how much smaller it is.

    f16 weight gradients run in a scalar loop on CPUs without f16 arithmetic, whose time is proportional to the number
    of products; a part of the batch (and of the output channels) then tells the time of the whole.
    """
    if problem.dtype != "float16" or problem.wrt != "weight":
        return problem, 1.0
    probe = smaller(problem, PROBE_FLOPS)
    rate = probe.flops / min(clocked(prepare(probe, transposed, way).run, 2))
    if problem.flops / rate <= max_seconds:
        return problem, 1.0
    part = smaller(problem, max_seconds * rate)
    return part, problem.flops / part.flops


def smaller(problem: Problem, flops: float) -> Problem:
    """Return the problem with less batch, then fewer output channels, so that it has about `flops`."""
    conv: Conv = problem.conv
    excess = problem.flops / flops
    batch = max(1, min(conv.batch, math.floor(conv.batch / excess)))
    excess /= conv.batch / batch
    group_out = max(1, min(conv.group_out, math.floor(conv.group_out / excess)))
    return problem.with_(conv=replace(conv, batch=batch, out_channels=conv.groups * group_out))


def answer(request: dict[str, Any], prepared: dict[str, Prepared], note: str) -> dict[str, Any]:
    import torch

    if request["do"] == "describe":
        return {"version": torch.__version__, "threads": torch.get_num_threads(), "note": note}
    if request["do"] == "prepare":
        problem, way = Problem.parse(request["problem"]), request["way"]
        part, scale = affordable(problem, request["transposed"], way, request["max_seconds"])
        call = prepare(part, request["transposed"], way)
        prepared[way] = replace(call, scale=call.scale * scale)
        notes = [call.note] if call.note else []
        notes += [f"timed on 1/{scale:.3g} of the problem"] if scale != 1 else []
        return {"scale": prepared[way].scale, "note": "; ".join(notes)}
    if request["do"] == "time":
        with torch.no_grad():
            return {"seconds": clocked(prepared[request["way"]].run, request["repeats"], request["clock"])}
    prepared.clear()
    give_back_memory()
    return {}


def main() -> int:
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if sys.argv[2] == "kept":
        keep_freed_memory()
    import torch

    note = protect_peer(os.path.dirname(torch.__file__))
    torch.set_num_threads(int(sys.argv[1]))
    prepared: dict[str, Prepared] = {}
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line), prepared, note)
        except Exception as error:  # the parent turns it into a row
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(reply), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
