"""Recorded launches: every address of a later call is put where the first call had its own."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import types
from typing import Any

import pytest
from triton_here import needs_gpu, torch

import convgrad
from convgrad.backends.triton.replay import Recorded, Recording, current, new_scratch
from convgrad.call import prepared_calls


class Launch:
    """Stands for a prepared launch: its parameters are addresses; a start notes the stream and them."""

    def __init__(self, started: list[Any], *tensors: Any) -> None:
        self.pointers = [(tensor, ctypes.c_uint64(tensor.data_ptr())) for tensor in tensors]
        self.cells = [cell for _, cell in self.pointers]
        self.maps: list[Any] = []
        self.config = types.SimpleNamespace(stream=0)
        self.started = started
        self.arguments = ()

    def start(self) -> int:
        self.started.append((self.config.stream, [cell.value for cell in self.cells]))
        return 0

    def forget_tensors(self) -> None:
        self.pointers = []


def test_addresses_follow_the_tensors() -> None:
    x, y = torch.zeros(64), torch.zeros(64)
    recording, started = Recording((x, y)), list[Any]()
    recording.add(Launch(started, x[8:], y))
    recording.add(Launch(started, y[4:], x))
    assert recording.whole
    recording.launch([1000, 5000], 7)
    recording.launch([1000, 9000], 7)
    recording.launch([1000, 9000], 3)
    assert started == [(7, [1032, 5000]), (7, [5016, 1000]), (7, [1032, 9000]), (7, [9016, 1000]),
                       (3, [1032, 9000]), (3, [9016, 1000])]


def test_parts_of_a_plan_share_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(64)
    started, allocated, freed = list[Any](), list[int](), list[int]()

    def part(*sizes: int) -> Recorded:
        def run(operands: Any, results: Any, workspace: Any) -> None:
            memory = [new_scratch((size,), torch.float32, x) for size in sizes]
            current.recording.add(Launch(started, *operands, *memory, *(piece[1:] for piece in memory)))
        return Recorded(run)

    recording = Recording((x,))
    monkeypatch.setattr(current, "recording", recording, raising=False)
    part(100)((x,), (x,))
    part(10, 200)((x,), (x,))
    assert recording.whole and recording.scratch_bytes == 512 + 1024, "the larger part, its pieces apart"
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc",
                        lambda size, stream: allocated.append(size) or 4096, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", freed.append, raising=False)
    recording.replay([1000], 0)
    assert started == [(5, [1000, 4096, 4100]), (5, [1000, 4096, 4608, 4100, 4612])]
    assert allocated == [1536] and freed == [4096]


def test_memory_that_is_not_known_by_one_tensor_is_not_replayed() -> None:
    x, y = torch.zeros(64), torch.zeros(64)
    for tensors, used in (((x,), y), ((x, x[8:]), x[16:])):
        recording = Recording(tensors)
        recording.add(Launch([], used))
        assert not recording.whole


LAID: dict[str, Any] = {"padding": 1, "layout": "NLC", "weight_layout": "OLI"}
CALLS = {
    "input": lambda x, w, dy, **more: convgrad.input_grad(dy, w, 12, **LAID, **more),
    "weight": lambda x, w, dy, **more: convgrad.weight_grad(dy, x, 3, **LAID, **more),
    "all": lambda x, w, dy, **more: convgrad.conv_backward(dy, x, w, **LAID, **more),
}


def tensors_for(shift: int, channels: int) -> tuple[Any, ...]:
    """x, w and dy at new addresses, `shift` elements off what is aligned."""
    found = []
    for shape in ((4, 12, channels), (channels, 3, channels), (4, 12, channels)):
        memory = torch.randint(-3, 4, (math.prod(shape) + shift,), device="cuda").to(torch.bfloat16)
        found.append(memory[shift:].view(shape))
    return tuple(found)


@needs_gpu
@pytest.mark.parametrize("name", CALLS)
def test_later_triton_calls_are_like_the_first(name: str) -> None:
    call = CALLS[name]
    prepared_calls.clear()
    kept = []
    for shift in (0, 0, 1, 0, 8, 0):
        x, w, dy = tensors_for(shift, 64)
        got = call(x, w, dy)
        wanted = call(*(tensor.cpu().float() for tensor in (x, w, dy)), backend="reference")
        kept.append((got, wanted))
    assert [bool(one.again) for one in prepared_calls.values() if one.plan.backend == "triton"] == [True]
    for got, wanted in kept:  # not before all were computed: none may write over another's memory
        for one, exact in zip(got, wanted) if isinstance(got, tuple) else [(got, wanted)]:
            assert torch.equal(one.cpu(), exact.to(torch.bfloat16))


@needs_gpu
def test_a_graph_captures_a_later_triton_call() -> None:
    x, w, dy = tensors_for(0, 32)
    wanted = [CALLS["all"](x, w, dy) for _ in range(2)][-1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = CALLS["all"](x, w, dy)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, wanted))


@needs_gpu
def test_triton_refuses_a_negative_view_in_later_calls() -> None:
    x, w, dy = tensors_for(0, 64)
    CALLS["input"](x, w, dy)
    with pytest.raises(TypeError, match="plain strided"):
        CALLS["input"](x, w, torch._neg_view(dy))


def test_watching_a_call_does_not_import_torchs_compiler() -> None:
    """It takes seconds, in the first call of a process."""
    script = ("import sys, torch\n"
              "from convgrad.backends.triton.replay import Recording, Watch\n"
              "recording = Recording(())\n"
              "with Watch(recording):\n"
              "    view = torch.zeros(4)[1:]\n"
              "print(recording.whole, 'torch._dynamo.convert_frame' in sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.stdout.split() == ["False", "False"], "zeros are no view"
