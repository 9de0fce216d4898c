"""Plans of scaled problems: box lines multiply where they store, all others' sums are multiplied afterwards."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...problem import Plan, Problem
from ...scaled import ALIGNMENT, Three, factor, scaled_plan, scales_of
from .flat import flattened
from .geometry import needs_wide
from .kernel import Prepared, Query, choose
from .launch import Launch, Step
from .numbers_on_device import TORCH_DTYPES, on_tensors
from .plans import lie_of, make_plan
from .registry import query_of
from .replay import Run, recorded
from .scaling import scale_kernel

ELEMENTS = 2048  # of a program
Kinds = tuple[bool, bool]  # whether there are a second operand's and the result's own scale


def make_scaled_plan(problem: Problem, max_workspace: int | None) -> Plan:
    """The plan of a scaled problem."""
    composed = scaled_plan(problem, make_plan, TritonSums(problem), max_workspace)
    query = query_of(problem.with_(scaled=False), max_workspace)
    first = multiplying(query)
    if first is None:
        return composed
    scales = scales_of(problem, problem.wrt)
    known: dict[Any, Prepared | None] = {}
    runs: dict[Any, Run] = {}

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any = None) -> None:
        lies = lie_of(operands[:2], results)
        if lies not in known:
            known[lies] = multiplying(replace(query, operands=operands[:2], results=results))
        prepared = known[lies]
        if prepared is None or (workspace is not None and prepared.workspace_bytes > first.workspace_bytes):
            composed.run(operands, results, workspace)
            return
        factors, kinds = factors_on(scales(operands), results[0].device)
        if (lies, kinds) not in runs:
            runs[lies, kinds] = recorded(lambda operands, results, workspace: prepared.run(
                (*operands[:2], *in_places(operands[2:], kinds)), results, workspace), str(problem))
        runs[lies, kinds]((*operands[:2], *factors), results, workspace)

    return Plan(problem, "triton", first.name, run, max(first.workspace_bytes, composed.workspace_bytes),
                (f"tile: {first.note}", "scales: sums times their factor and rounded once where they are stored",
                 *(f"where tensors do not lie as that needs: {note}" for note in composed.notes[-1:])))


def multiplying(query: Query) -> Prepared | None:
    """The kernel for a scaled problem's sums, where it multiplies by scales itself."""
    problem = query.problem
    if problem.wrt not in ("output", "input") or problem.out_dtype in ("float64", "hifloat8") or 0 in (
            *problem.conv.output_shape, *problem.conv.input_shape) or flattened(problem) is not None:
        return None
    choice = choose(query)
    return choice.prepared if choice is not None and choice.prepared.scales else None


class TritonSums:
    """See scaled.Sums."""

    most_bytes = 64 * 2**20  # seen on an H200: two halves of 49 MiB took 12 % longer than the whole

    def __init__(self, problem: Problem) -> None:
        format_name = "float64" if problem.dtype == "float64" else "float32"
        self.problem = problem.with_(dtype=format_name, compute="", scaled=False)
        self.runs: dict[tuple[Any, Kinds], Run] = {}

    def memory(self, workspace: Any, size: int, like: Any) -> tuple[Any, Any]:
        if workspace is None:
            return torch.empty(size, dtype=torch.uint8, device=device_of(like)), None
        workspace = torch.as_tensor(workspace)
        begin = -workspace.data_ptr() % ALIGNMENT
        return workspace[begin:begin + size], workspace[begin + size:]

    def view(self, memory: Any, shape: tuple[int, ...], order: tuple[int, ...], format_name: str) -> Any:
        return memory.view(TORCH_DTYPES[format_name]).view(shape).permute(order)

    def store(self, sums: Any, result: Any, scales: Three) -> None:
        factors, kinds = factors_on(scales, device_of(result))
        key = (result.shape, kinds)  # a recording is for one shape, and the last images may be fewer
        if key not in self.runs:
            self.runs[key] = recorded(on_tensors(self.problem, lambda operands, results, workspace: scale(
                operands[0], results[0], *in_places(operands[1:], kinds))), f"{self.problem} scaled")
        self.runs[key]((sums, *factors), (result,), None)


def device_of(array: Any) -> Any:
    return array.device if isinstance(array, torch.Tensor) else "cpu"  # NumPy arrays come to the interpreter


def factors_on(scales: Three, device: Any) -> tuple[list[Any], Kinds]:
    """What makes the factor, as tensors on the device: nothing waits for the values of those that are there."""
    *operands, own = scales
    if all(isinstance(scale, float) for scale in scales):
        operands, own = [factor(*scales)], 1.0

    def tensor(scale: Any) -> Any:  # the value travels as an argument of a kernel, which a graph can capture
        return scale if isinstance(scale, torch.Tensor) else \
            torch.full((1,), scale, dtype=torch.float32, device=device)

    found = [tensor(scale) for scale in operands if isinstance(scale, torch.Tensor) or scale != 1.0] or [tensor(1.0)]
    own_is_one = isinstance(own, float) and own == 1.0
    return [*found, *([] if own_is_one else [tensor(own)])], (len(found) == 2, not own_is_one)


def in_places(factors: tuple[Any, ...], kinds: Kinds) -> tuple[Any, Any, Any]:
    """First and second operand's scale and the result's own, None where there is none."""
    second, own = kinds
    return factors[0], factors[1] if second else None, factors[-1] if own else None


def scale_launch(sums: Any, result: Any, *scales: Any) -> Launch:
    axes = merged_axes(sums, result)
    dense = len(axes) == 1 and axes[0][1:] == (1, 1)
    extents, source, target = zip(*[(1, 0, 0)] * (5 - len(axes)), *axes)
    size = math.prod(extents)
    return Launch((-(-size // ELEMENTS),), (size, *extents[1:], *source, *target),
                  {"DENSE": dense, "WIDE": needs_wide(sums, result), "BE": ELEMENTS}, 4, 1)


def merged_axes(sums: Any, result: Any) -> list[tuple[int, int, int]]:
    """(extent, stride of the sums, stride of the result), the result's narrowest last, as few as there are in both."""
    found: list[tuple[int, int, int]] = []
    for extent, source, target in sorted(zip(result.shape, sums.stride(), result.stride()), key=lambda axis: -axis[2]):
        if extent == 1:
            continue
        if found and found[-1][1:] == (extent * source, extent * target):
            found[-1] = (found[-1][0] * extent, source, target)
        else:
            found.append((extent, source, target))
    return found or [(1, 1, 1)]


scale = Step(scale_kernel, scale_launch)
