"""explain(problem): which plan was chosen and why, and a sketch of the taps of one axis."""

from __future__ import annotations

from dataclasses import dataclass

from .beside_torch import why_torch
from .machine import cores
from .plan import notes_since, plan
from .problem import Conv, Plan, Problem

SKETCH_WIDTH = 72  # columns; longer axes are cut with an ellipsis


@dataclass(frozen=True)
class Explanation:
    """A printable account of a plan."""

    plan: Plan
    sketch: str
    threads: int

    def __str__(self) -> str:
        chosen, problem = self.plan, self.plan.problem
        intensity = problem.flops / max(1, problem.min_bytes)
        lines = [
            f"problem    {problem}",
            f"backend    {chosen.backend}",
            f"kernel     {chosen.kernel}",
            f"workspace  {chosen.workspace_bytes:,} bytes",
            f"work       {problem.flops:,} FLOP, at least {problem.min_bytes:,} bytes ({intensity:.1f} FLOP/byte)",
        ]
        lines += [f"note       {note}" for note in (*chosen.notes, *notes_since(chosen))]
        lines += [f"refused    {who}: {why}" for who, why in chosen.refusals]
        if problem.device == "cpu" and chosen.backend == "native":
            why = why_torch(problem, chosen.kernel, self.threads)
            lines.append(f"install()  served by {'torch, ' + why if why else 'convgrad'}")
        return "\n".join([*lines, "", self.sketch])


def explain(problem: Problem | str, *, backend: str | None = None, max_workspace_bytes: int | None = None,
            num_threads: int | None = None, axis: int = -1) -> Explanation:
    """Explain how a problem would be solved: backend, kernel, workspace, work, refusals, tap pattern of one axis.

    Parameters are those of `plan`; `axis` is the spatial axis that is sketched.

    Examples
    --------
    >>> import convgrad
    >>> print(convgrad.explain("conv f32 n1 c1 k1 i5 w3 s2 p1", backend="reference").sketch)
    axis L: 5 inputs, kernel 3, stride 2, dilation 1, pad 1 low 1 high -> 3 outputs
              .-----.   input (-), padding (.)
       o=0    ***
       o=1      ***
       o=2        ***
    """
    chosen = plan(problem, backend=backend, max_workspace_bytes=max_workspace_bytes, num_threads=num_threads)
    conv = chosen.problem.conv
    if not -conv.axes <= axis < conv.axes:
        raise ValueError(f"axis={axis} is not one of the {conv.axes} spatial axes (0 to {conv.axes - 1}, or negative)")
    return Explanation(chosen, sketch_axis(conv, axis % conv.axes), num_threads or cores())


def sketch_axis(conv: Conv, axis: int) -> str:
    """Rows of taps over the padded input of one axis: the first outputs and the last."""
    size, kernel = conv.in_size[axis], conv.kernel_size[axis]
    stride, dilation, (low, high) = conv.stride[axis], conv.dilation[axis], conv.padding[axis]
    outputs, letter = conv.out_size[axis], "DHWL"[axis + 3 - conv.axes] if conv.axes > 1 else "L"
    lines = [f"axis {letter}: {size} inputs, kernel {kernel}, stride {stride}, dilation {dilation}, "
             f"pad {low} low {high} high -> {outputs} outputs"]

    def cut(row: str) -> str:
        return row if len(row) <= SKETCH_WIDTH else row[:SKETCH_WIDTH - 1] + "…"

    shown = min(low + size + high, SKETCH_WIDTH + 1)
    ground = "".join("-" if low <= place < low + size else "." for place in range(shown))
    lines.append(f"{'':10}{cut(ground)}   input (-), padding (.)")
    picks: list[int | None] = list(range(outputs)) if outputs <= 6 else [0, 1, 2, None, outputs - 1]
    for o in picks:
        if o is None:
            lines.append(f"{'':5}...")
            continue
        taps = {o * stride + k * dilation for k in range(min(kernel, SKETCH_WIDTH + 1))}
        row = "".join("*" if place in taps else " " for place in range(min(max(taps) + 1, SKETCH_WIDTH + 1)))
        lines.append(f"   o={o:<5}{cut(row)}")
    return "\n".join(lines)
