"""Recording what a plan launches, and launching it again: a later call costs a few microseconds of the host.

A plan's runner is ordinary Python: it looks at strides, makes views and descriptors, asks Triton for compiled kernels.
All that depends on the tensors' strides and alignment alone. So the first call with given strides is recorded: the
launches, and where each pointer comes from (which operand, result or scratch memory, at which offset). A runner that
does more than launch kernels on such memory is not replayed but run again.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .direct import Prepared, cuda
from .launch import INTERPRETED, current

Run = Callable[[tuple[Any, ...], tuple[Any, ...], Any], None]
NOWHERE: list[int] = []
SCRATCH_STEP = 512  # bytes: as memory of torch's allocator is aligned
MOST_RECORDINGS = 64  # per plan; a plan rarely sees more than one set of strides


class Recording:
    """The launches of one call: addresses are given as (number of the tensor, offset in bytes)."""

    def __init__(self, tensors: tuple[Any, ...]) -> None:
        self.tensors = tensors  # while recording: operands, results, the caller's workspace, then scratch memory
        self.given = len(tensors)  # tensors of the caller; the number of all scratch memory, which is one piece
        self.offsets: list[int] = []  # of each scratch tensor in it
        self.scratch_bytes = 0
        self.scratch_used = 0
        self.constants: list[Any] = []
        self.launches: list[Prepared] = []
        self.cells: dict[int, list[tuple[Any, int]]] = {}  # by the tensor's number: where its address goes, offset
        self.maps: dict[int, list[tuple[int, int]]] = {}  # the same for tensor maps
        self.whole = True  # nothing happened that a replay would miss
        self.last = NOWHERE  # the tensors' addresses in the parameters now
        self.stream = -1     # the stream in the parameters now
        self.lock = threading.Lock()

    def add(self, prepared: Prepared) -> None:
        """Note a launch that was just made."""
        for tensor, cell in prepared.pointers:
            if not any(tensor is constant for constant in self.constants):
                number, offset = self.place_of(tensor)
                self.cells.setdefault(number, []).append((cell, offset))
        for tensor, address in prepared.maps:
            number, offset = self.place_of(tensor)
            self.maps.setdefault(number, []).append((address, offset))
        self.launches.append(prepared)
        prepared.forget_tensors()

    def add_scratch(self, memory: Any, size: int) -> None:
        """Note memory that the launches use until their part of the plan ends."""
        self.offsets.append(self.scratch_used)
        self.scratch_used += -(-size // SCRATCH_STEP) * SCRATCH_STEP
        self.scratch_bytes = max(self.scratch_bytes, self.scratch_used)
        self.tensors = (*self.tensors, memory)

    def begin_part(self) -> None:
        """What follows may use the scratch memory of what was before: one stream runs both in order."""
        self.scratch_used = 0

    def place_of(self, view: Any) -> tuple[int, int]:
        """Which tensor a view is of, and how many bytes after it begins."""
        begin = view.data_ptr()
        found = [number for number, tensor in enumerate(self.tensors) if view is tensor][:1] or \
            [number for number, tensor in enumerate(self.tensors)
             if tensor.data_ptr() <= begin < tensor.data_ptr() + reach(tensor)]
        if len(found) != 1:  # memory of another origin, or of tensors that lie between each other
            self.whole = False
            return 0, 0
        number, offset = found[0], begin - self.tensors[found[0]].data_ptr()
        return (number, offset) if number < self.given else (self.given, self.offsets[number - self.given] + offset)

    def replay(self, pointers: list[int], device: int) -> None:
        """Make the launches again for tensors that begin at `pointers`, on the current stream."""
        stream = torch._C._cuda_getCurrentRawStream(device)
        if not self.scratch_bytes:
            self.launch(pointers, stream)
            return
        # NOTE: memory of torch's allocator without the tensor around it: 3 microseconds less
        scratch = torch._C._cuda_cudaCachingAllocator_raw_alloc(self.scratch_bytes, stream)
        try:
            pointers.append(scratch)
            self.launch(pointers, stream)
        finally:  # free for what this stream does after these launches
            torch._C._cuda_cudaCachingAllocator_raw_delete(scratch)

    def launch(self, pointers: list[int], stream: int) -> None:
        with self.lock:  # the parameters' memory is shared by all threads
            last = self.last
            if pointers != last:
                self.last = NOWHERE
                for number, pointer in enumerate(pointers):
                    if last is NOWHERE or pointer != last[number]:
                        self.move(number, pointer)
                self.last = pointers
            if stream != self.stream:
                self.stream = -1
                for prepared in self.launches:
                    prepared.config.stream = stream
                self.stream = stream
            for prepared in self.launches:
                status = prepared.start(*prepared.arguments)
                if status:
                    prepared.after(status)

    def move(self, number: int, pointer: int) -> None:
        """Put a tensor's new address everywhere it belongs."""
        for cell, offset in self.cells.get(number, ()):
            cell.value = pointer + offset
        for address, offset in self.maps.get(number, ()):
            replace_address(address, pointer + offset)


def replace_address(tensor_map: int, address: int) -> None:
    if cuda().cuTensorMapReplaceAddress(tensor_map, address):
        raise RuntimeError(f"the driver refused address {address:#x} for a tensor map")


def reach(tensor: Any) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    steps = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride()))
    return (int(steps) + 1) * int(tensor.element_size())


class Watch(TorchDispatchMode):
    """Sees every torch operation of a runner: views are part of the launches' addresses, anything else is not."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler for the first operation that is seen, for seconds, to keep it out of here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.detach)):
            self.recording.whole = False
        return func(*args, **(kwargs or {}))


def new_scratch(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """Memory of the stream's allocator for partial sums, which a recording asks for again on each replay."""
    memory = torch.empty(shape, dtype=dtype, device=like.device)
    recording = getattr(current, "recording", None)
    if recording is not None:
        recording.add_scratch(memory, math.prod(shape) * dtype.itemsize)
    return memory


def constant_tensor(made: dict[Any, Any], device: Any, make: Callable[[], Any]) -> Any:
    """A tensor that is made once per device and stays where it is, such as a decoding table."""
    recording = getattr(current, "recording", None)
    found = made.get(device)
    if found is None:
        whole = recording.whole if recording is not None else True
        found = made[device] = make()
        if recording is not None:
            recording.whole = whole  # what made it need not be done again
    if recording is not None:
        recording.constants.append(found)
    return found


def compile_at_once(calls: list[Callable[[], None]], device: int) -> None:
    """Compile what some calls launch, in a thread for each; errors are left to the calls themselves."""
    def compile_only(call: Callable[[], None]) -> None:
        current.only_compile = True
        with contextlib.suppress(Exception), torch.cuda.device(device):
            call()

    threads = [threading.Thread(target=compile_only, args=(call,)) for call in calls]
    with warnings.catch_warnings():  # Triton changes the filters while it compiles, in every thread the same ones
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def recorded(run: Run, parts: Callable[..., list[Callable[[], None]]] | None = None) -> Run:
    """The runner, recorded and repeated; the interpreter has nothing to record."""
    return run if INTERPRETED else Recorded(run, parts)


class Recorded:
    """A runner of tensors of one shape, recorded for each set of strides and alignments on CUDA tensors."""

    def __init__(self, run: Run, parts: Callable[..., list[Callable[[], None]]] | None = None) -> None:
        """`parts` gives the calls that `run` makes one after the other, where it does no more than that."""
        self.run, self.parts = run, parts
        self.recordings: dict[Any, Recording | None] = {}

    def __call__(self, operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any = None) -> None:
        device = results[0].get_device()
        recording = getattr(current, "recording", None)
        if recording is not None:  # of a plan that this one is a part of
            recording.begin_part()
            self.run(operands, results, workspace)
            return
        if device < 0 or not results[0].is_cuda or getattr(current, "only_compile", False):
            self.run(operands, results, workspace)
            return
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self(operands, results, workspace)
            return
        tensors = (*operands, *results) if workspace is None else (*operands, *results, workspace)
        pointers = [tensor.data_ptr() for tensor in tensors]
        together = 0
        for pointer in pointers:
            together |= pointer
        key = (device, *[tensor.stride() for tensor in tensors])
        if together & 15:  # some tensor is not aligned to 16 bytes: it matters which
            key += tuple([pointer & 15 for pointer in pointers])
        if len(set(pointers)) < len(pointers):  # one tensor twice: a recording takes its address from the first place
            key += ("same", *[pointers.index(pointer) for pointer in pointers])
        recording = self.recordings.get(key)
        if recording is not None:
            recording.replay(pointers, device)
        elif key in self.recordings:
            self.run(operands, results, workspace)
        else:
            if self.parts is not None:
                compile_at_once(self.parts(operands, results, workspace), device)
            self.record(key, tensors, lambda: self.run(operands, results, workspace))

    def record(self, key: Any, tensors: tuple[Any, ...], call: Callable[[], None]) -> None:
        recording = Recording(tensors)
        current.recording = recording
        try:
            with Watch(recording):
                call()
        finally:
            current.recording = None
        recording.tensors = ()
        if len(self.recordings) >= MOST_RECORDINGS:
            self.recordings.clear()
        self.recordings[key] = recording if recording.whole else None

    def recording_of(self, operands: tuple[Any, ...], results: tuple[Any, ...]) -> Recording | Literal[False] | None:
        """What calls of tensors like these replay where all are aligned to 16 bytes.

        None: such calls cannot be replayed; False: there was none.
        """
        key = (results[0].get_device(), *[tensor.stride() for tensor in (*operands, *results)])
        return self.recordings.get(key, False)
