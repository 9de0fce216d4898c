"""How sums of a scaled problem are kept, multiplied and rounded on the GPU (see scaled.Sums)."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...problem import Problem
from ...scaled import ALIGNMENT, Three, factor
from .geometry import needs_wide
from .launch import Launch, Step
from .numbers_on_device import TORCH_DTYPES, on_tensors
from .replay import Run
from .scaling import scale_kernel

ELEMENTS = 2048  # of a program
Kinds = tuple[Any, bool, bool]  # format of the first factor; whether there are a second one and the result's own scale


class TritonSums:
    """Sums of a problem; `most_bytes` of them stay in the cache of a large GPU."""

    most_bytes = 32 * 2**20

    def __init__(self, problem: Problem) -> None:
        format_name = "float64" if problem.dtype == "float64" else "float32"
        self.problem = problem.with_(dtype=format_name, compute="", scaled=False)
        self.runs: dict[Kinds, Run] = {}

    def memory(self, workspace: Any, size: int, like: Any) -> tuple[Any, Any]:
        if workspace is None:
            return torch.empty(size, dtype=torch.uint8, device=device_of(like)), None
        workspace = torch.as_tensor(workspace)
        begin = -workspace.data_ptr() % ALIGNMENT
        return workspace[begin:begin + size], workspace[begin + size:]

    def view(self, memory: Any, shape: tuple[int, ...], order: tuple[int, ...], format_name: str) -> Any:
        return memory.view(TORCH_DTYPES[format_name]).view(shape).permute(order)

    def store(self, wrt: str, sums: Any, result: Any, scales: Three) -> None:
        factors, kinds = factors_on(scales, device_of(result))
        run = self.runs.get(kinds)
        if run is None:
            run = self.runs[kinds] = on_tensors(self.problem, scaling(kinds))
        run((sums, *factors), (result,), None)


def device_of(array: Any) -> Any:
    return array.device if isinstance(array, torch.Tensor) else "cpu"  # NumPy arrays come to the interpreter


def factors_on(scales: Three, device: Any) -> tuple[list[Any], Kinds]:
    """What makes the factor, as tensors on the device: nothing waits for the values of those that are there."""
    *operands, own = scales
    if all(isinstance(scale, float) for scale in scales):
        return [torch.full((1,), factor(*scales), dtype=torch.float64, device=device)], (torch.float64, False, False)

    def tensor(scale: Any) -> Any:  # the value travels as an argument of a kernel, which a graph can capture
        return scale if isinstance(scale, torch.Tensor) else torch.full((1,), scale, dtype=torch.float32, device=device)

    found = [tensor(scale) for scale in operands if isinstance(scale, torch.Tensor) or scale != 1.0] or [tensor(1.0)]
    own_is_one = isinstance(own, float) and own == 1.0
    return [*found, *([] if own_is_one else [tensor(own)])], (torch.float32, len(found) == 2, not own_is_one)


def scaling(kinds: Kinds) -> Run:
    """The runner of the kernel on sums and factors, and the result."""
    _, second, own = kinds
    step = Step(scale_kernel, lambda sums, result, *factors: scale_launch(sums, result, second, own))

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        sums, first, *others = operands
        step(sums, results[0], first, others[0] if second else first, others[-1] if own else first)

    return run


def scale_launch(sums: Any, result: Any, second: bool, own: bool) -> Launch:
    axes = merged_axes(sums, result)
    dense = len(axes) == 1 and axes[0][1:] == (1, 1)
    extents, source, target = zip(*[(1, 0, 0)] * (5 - len(axes)), *axes)
    size = math.prod(extents)
    constants = {"SECOND": second, "OWN": own, "DENSE": dense, "WIDE": needs_wide(sums, result), "BE": ELEMENTS}
    return Launch((-(-size // ELEMENTS),), (size, *extents[1:], *source, *target), constants, 4, 1)


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
