"""Recording what a plan launches: each launch becomes a step of a prepared call.

A plan's runner is ordinary Python: it looks at strides, makes views and descriptors, asks Triton for compiled kernels.
All that depends on the tensors' strides and alignment alone. So it runs once, on tensors without memory, and every
launch is noted with where each pointer comes from: which operand, result or scratch memory, at which offset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _native
from .direct import add_launch

DRIVER = "libcuda.so.1"
SCRATCH_STEP = 512  # bytes: as memory of torch's allocator is aligned


class Recording:
    """Builds a prepared call from launches on `tensors`: the operands, the results, the caller's workspace if any."""

    def __init__(self, problem: str, tensors: Sequence[Any], device: Any) -> None:
        self.call = _native.GpuCall(problem, len(tensors), device.index or 0, DRIVER)
        self.device = device
        self.tensors = list(tensors)  # while recording; then scratch memory, whose slot comes after all others
        self.slots: dict[int, tuple[int, int]] = {}  # by storage: slot, and the address that is its beginning
        for number, tensor in enumerate(tensors):
            self.slots.setdefault(storage_of(tensor), (number, tensor.data_ptr()))
        self.scratch_slot = len(tensors)
        self.scratch_used = 0
        self.constants: list[Any] = []
        self.complete = True  # nothing happened that running the prepared call would miss

    def add(self, compiled: Any, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        """Note the launch of a compiled kernel."""
        metadata = compiled.metadata
        wanted = metadata.global_scratch_size * metadata.num_ctas * math.prod(grid)
        add_launch(self.call, compiled, grid, arguments, self.place_of,
                   (self.scratch_slot, self.reserve(wanted)) if wanted else None)

    def add_zeros(self, tensor: Any) -> None:
        """Note that a tensor is filled with zeros."""
        place = self.place_of(tensor)
        if place is None or not is_dense(tensor):
            self.complete = False
        elif tensor.numel():
            self.call.add_zeros(*place, tensor.numel() * tensor.element_size())

    def add_scratch(self, memory: Any) -> None:
        """Note memory that the launches use until their part of the plan ends."""
        begin = self.reserve(memory.numel() * memory.element_size())
        self.tensors.append(memory)
        self.slots[storage_of(memory)] = (self.scratch_slot, memory.data_ptr() - begin)

    def reserve(self, size: int) -> int:
        """Offset of so many bytes in the workspace of the prepared call."""
        begin = self.scratch_used
        self.scratch_used += -(-size // SCRATCH_STEP) * SCRATCH_STEP
        self.call.workspace_bytes = max(self.call.workspace_bytes, self.scratch_used)
        return begin

    def begin_part(self) -> None:
        """What follows may use the scratch memory of what was before: one stream runs both in order."""
        self.scratch_used = 0

    def place_of(self, view: Any) -> tuple[int, int] | None:
        """The slot of a view's memory, and how many bytes after its beginning the view begins; None for constants."""
        if any(view is constant for constant in self.constants):
            return None
        found = self.slots.get(storage_of(view))
        if found is None:  # memory of another origin
            self.complete = False
            return 0, 0
        slot, beginning = found
        return slot, view.data_ptr() - beginning


def storage_of(tensor: Any) -> int:
    """What all views of the same memory have in common, also where there is no memory."""
    return int(tensor.untyped_storage()._cdata)


def without_memory(shape: Sequence[int], strides: Sequence[int], dtype: Any, misaligned: int = 0) -> Any:
    """A tensor to record with; its address is `misaligned` bytes, all others of its kind begin at 0."""
    reach = 1 + sum((extent - 1) * step for extent, step in zip(shape, strides)) if 0 not in shape else 0
    begin = misaligned // dtype.itemsize
    return torch.empty(begin + reach, dtype=dtype, device="meta").as_strided(tuple(shape), tuple(strides), begin)


def is_dense(tensor: Any) -> bool:
    """Whether a tensor's elements fill the memory from its first to its last, each its own place."""
    step = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape)):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def launch_at_once(compiled: Any, grid: Sequence[int], arguments: Sequence[Any]) -> None:
    """Start a kernel on tensors with memory, on the current stream, keeping nothing."""
    tensors = [base for value in arguments if isinstance(base := getattr(value, "base", value), torch.Tensor)]
    device = tensors[0].device
    recording = Recording(compiled.name, tensors, device)
    recording.add(compiled, grid, arguments)
    start(recording.call, [tensor.data_ptr() for tensor in tensors], device.index)


def start(call: Any, addresses: list[int], device: int) -> None:
    """Run a prepared call on torch's current stream, with workspace from torch's allocator."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    if not call.workspace_bytes:
        call.run(addresses, stream)
        return
    # NOTE: memory of torch's allocator without the tensor around it: 3 microseconds less
    workspace = torch._C._cuda_cudaCachingAllocator_raw_alloc(call.workspace_bytes, stream)
    try:
        call.run(addresses, stream, workspace)
    finally:  # free for what this stream does after these launches
        torch._C._cuda_cudaCachingAllocator_raw_delete(workspace)


def constant_on(made: dict[Any, Any], like: Any, make: Callable[[Any], Any], recording: Recording | None) -> Any:
    """`make(device)`, once per device; kept by the calls that use it."""
    device = recording.device if recording is not None and like.is_meta else like.device
    found = made.get(device)
    if found is None:
        complete = recording is None or recording.complete
        found = made[device] = make(device)
        if recording is not None:
            recording.complete = complete  # what made it need not be done again
    if recording is not None:
        recording.constants.append(found)
    return found
