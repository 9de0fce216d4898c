"""What kernels on boxes of the copy engine share: which tensors it can read, and their descriptors."""

from __future__ import annotations

from typing import Any

from triton.tools.tensor_descriptor import TensorDescriptor

from ...problem import Problem
from .geometry import Geometry, strides_of
from .kernel import Query
from .numbers_on_device import sixteen_bits


def whole_channels(problem: Problem) -> bool:
    """Whether tensor cores multiply the channels of this problem as they lie: 16-bit numbers, channels last."""
    return sixteen_bits(problem) and problem.layout.endswith("C")


def channels_fit(problem: Problem, geo: Geometry) -> bool:
    """Whether the copy engine can read this problem: whole channels, aligned to 16 bytes."""
    return whole_channels(problem) and geo.group_in % 8 == 0 and geo.group_out % 8 == 0


def tensors_fit(*tensors: Any) -> bool:
    """Whether tensors lie as the copy engine needs: neighbouring channels, strides and start multiples of 16 bytes.

    It takes no stride of 0, as broadcast tensors have: a descriptor has some other one where an extent is 1.
    """
    for t in tensors:
        steps = t.stride()
        if (t.shape[1] > 1 and steps[1] != 1) or t.data_ptr() % 16:
            return False
        if any(step % 8 or step <= 0 for axis, step in enumerate(steps) if axis != 1 and t.shape[axis] > 1):
            return False
    return True


def at_16_bytes(*tensors: Any) -> bool:
    """Whether channels are next to each other, everything else at multiples of 16 bytes, and no axis is repeated."""
    return all(t.data_ptr() % 16 == 0 and t.stride(1) == 1 and all(
        step % 8 == 0 and step > 0 for axis, (step, extent) in enumerate(zip(t.stride(), t.shape))
        if axis != 1 and extent > 1) for t in tensors)


def accepts(query: Query) -> str | None:
    """What the copy engine reads and writes: all tensors but weights and bias gradients."""
    problem = query.problem
    named = zip((*problem.operands, *problem.results), (*query.operands, *query.results))
    if at_16_bytes(*(tensor for name, tensor in named if name not in ("weight", "bias"))):
        return None
    return "channels are not neighbours in memory, or rows not at multiples of 16 bytes"


def descriptor(tensor: Any, block: tuple[int, ...]) -> TensorDescriptor:
    """Descriptor of an activation as (n, three axes, channel)."""
    n, _, *spatial = strides_of(tensor)
    shape = [tensor.shape[0], *(1,) * (5 - tensor.dim()), *tensor.shape[2:], tensor.shape[1]]
    spare = -(-tensor.shape[1] // 8) * 8  # an axis of extent 1 has no stride of its own
    return TensorDescriptor(tensor, shape, [step or spare for step in (n, *spatial)] + [1], list(block))


def weight_rows_fit(weight: Any) -> bool:
    """Whether taps and input channels of each output channel make one row without gaps, aligned to 16 bytes."""
    row = weight[:1].permute(0, *range(2, weight.dim()), 1)
    unit = 16 // weight.element_size()
    return bool(row.is_contiguous() and weight.data_ptr() % 16 == 0 and row.numel() % unit == 0
                and (weight.shape[0] == 1 or (weight.stride(0) % unit == 0 and weight.stride(0) > 0)))


def turned_rows_fit(weight: Any) -> bool:
    """Whether the output channels of each tap and input channel make one row, and the rows follow without gaps."""
    rows = weight.permute(*range(2, weight.dim()), 1, 0)
    return bool(rows.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[0] % 8 == 0)


def is_patch(problem: Problem, geo: Geometry) -> bool:
    """Whether windows lie side by side (kernel = stride) and all taps of few channels fill a row of 16-byte units."""
    return (problem.wrt == "input" and geo.groups == 1 and geo.kernel == geo.stride and set(geo.dilation) == {1}
            and not any(geo.pad) and geo.taps > 1 and geo.group_in < 64 and geo.group_in * geo.taps % 8 == 0
            and geo.group_out % 8 == 0 and geo.group_out >= 16)
