"""Running plans as prepared calls: a later call costs a few microseconds of the host.

A runner that does more than launch kernels on its tensors' memory is not replayed but run again.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...problem import Problem
from .compile_pool import Wanted, pool
from .launch import INTERPRETED, Share, current
from .packed_adds import NotCompiled, only_from_caches
from .recording import Recording, constant_on, start, without_memory

Run = Callable[[tuple[Any, ...], tuple[Any, ...], Any], None]
MOST_CALLS = 64  # per plan; a plan rarely sees more than one set of strides
UNKNOWN: Any = object()


class Watch(TorchDispatchMode):
    """Sees every torch operation of a runner: views are part of the launches' addresses, zeros a step of their own."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler for the first operation that is seen, for seconds, to keep it out of here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(current, "only_compile", None) is not None:  # see fallback.py: compiled first
            return func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.zero_:
            self.recording.add_zeros(args[0])
            return args[0]
        if not (func.is_view or func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.detach)):
            self.recording.complete = False
        return func(*args, **(kwargs or {}))


def new_scratch(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """Memory for partial sums: of the stream's allocator, or of the workspace of the call that is recorded."""
    memory = torch.empty(shape, dtype=dtype, device=like.device)
    recording = getattr(current, "recording", None)
    if recording is not None:
        recording.add_scratch(memory)
    return memory


def constant_tensor(made: dict[Any, Any], like: Any, make: Callable[[Any], Any]) -> Any:
    """A tensor that `make` gives once per device and that stays where it is, such as a decoding table."""
    return constant_on(made, like, make, getattr(current, "recording", None))


def compile_in_threads(calls: list[Callable[[], None]], device: Any) -> None:
    """Compile what some calls launch, in a thread for each; errors are left to the calls themselves."""
    def compile_only(call: Callable[[], None]) -> None:
        current.only_compile = Share()
        with contextlib.suppress(Exception), on_device(device):
            call()

    threads = [threading.Thread(target=compile_only, args=(call,)) for call in calls]
    with warnings.catch_warnings():  # Triton changes the filters while it compiles, in every thread the same ones
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def on_device(device: Any) -> Any:
    """Makes a device current, where there is one: kernels are compiled for it."""
    return torch.cuda.device(device) if torch.cuda.is_available() else contextlib.nullcontext()


def recorded(run: Run, problem: Problem | str, parts: Callable[..., list[Callable[[], None]]] | None = None) -> Run:
    """The runner as prepared calls; the interpreter has nothing to record."""
    return run if INTERPRETED else Recorded(run, problem, parts)


class Recorded:
    """A runner of tensors of one shape: a prepared call for each set of strides and alignments on CUDA tensors."""

    def __init__(self, run: Run, problem: Problem | str,
                 parts: Callable[..., list[Callable[[], None]]] | None = None) -> None:
        """`problem` is what `run` is the plan of, or a name for messages; `parts` gives the calls that it makes one
        after the other, where it does no more than that."""
        self.run, self.problem, self.parts = run, problem, parts
        self.calls: dict[Any, Any] = {}  # None: cannot be recorded

    def __call__(self, operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any = None) -> None:
        recording = getattr(current, "recording", None)
        if recording is not None:  # of a plan that this one is a part of
            recording.begin_part()
            self.run(operands, results, workspace)
            return
        if not results[0].is_cuda or getattr(current, "only_compile", None) is not None:
            self.run(operands, results, workspace)
            return
        device = results[0].get_device()
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self(operands, results, workspace)
            return
        tensors = (*operands, *results) if workspace is None else (*operands, *results, workspace)
        addresses = [tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in addresses:
            together |= address
        key = (device, *[tensor.stride() for tensor in tensors])
        if together & 15:  # some tensor is not aligned to 16 bytes: it matters which
            key += tuple([address & 15 for address in addresses])
        call = self.calls.get(key, UNKNOWN)
        if call is UNKNOWN:
            alike = [without_memory(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() & 15)
                     for tensor in tensors]
            call = self.record(key, alike, len(operands), results[0].device, workspace is not None)
        if call is None:
            self.run(operands, results, workspace)
        else:
            start(call, addresses, device)

    def prepared(self, problem: Problem, strides: Sequence[Sequence[int]], device: int, dtypes: Sequence[Any]) -> Any:
        """The prepared call for tensors of these strides, aligned to 16 bytes; None where there can be none."""
        key = (device, *[tuple(steps) for steps in strides])
        call = self.calls.get(key, UNKNOWN)
        if call is UNKNOWN:
            shapes = [*map(problem.shape_of_operand, problem.operands), *map(problem.conv.shape_of, problem.results)]
            tensors = [without_memory(*one) for one in zip(shapes, strides, dtypes)]
            call = self.record(key, tensors, len(problem.operands), torch.device("cuda", device), False)
        return call

    def record(self, key: Any, tensors: list[Any], operands: int, device: Any, with_workspace: bool) -> Any:
        """Run the runner on tensors without memory and keep what it launches, under `key`."""
        results = tensors[operands:len(tensors) - with_workspace]
        given = (tuple(tensors[:operands]), tuple(results), tensors[-1] if with_workspace else None)
        with on_device(device):
            try:
                with only_from_caches():
                    recording = self.recording_of(given, tensors, device)
            except NotCompiled:
                self.compile(given, tensors, device)
                recording = self.recording_of(given, tensors, device)
        if len(self.calls) >= MOST_CALLS:
            self.calls.clear()
        call = self.calls[key] = recording.call if recording.complete else None
        return call

    def recording_of(self, given: tuple[Any, ...], tensors: list[Any], device: Any) -> Recording:
        """What the runner launches on tensors without memory."""
        recording = current.recording = Recording(str(self.problem), tensors, device)
        try:
            with Watch(recording):
                self.run(*given)
        finally:
            current.recording = None
        return recording

    def compile(self, given: tuple[Any, ...], tensors: list[Any], device: Any) -> None:
        """Compile what is missing, in processes where these have been started, else in threads."""
        compiling = pool()  # started by the first kernel that is missing
        plain = isinstance(self.problem, Problem) and given[2] is None and not any(
            tensor.data_ptr() for tensor in tensors)  # unaligned
        if plain and compiling is not None and compiling.ready.is_set() and not compiling.failed:
            compiling.compile([Wanted(str(self.problem), tuple(tuple(tensor.stride()) for tensor in tensors))])
        elif self.parts is not None:
            compile_in_threads(self.parts(*given), device)
