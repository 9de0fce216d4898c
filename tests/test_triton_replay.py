"""Recorded launches: every address of a later call is put where the first call had its own."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import COMPILER, FakeDriver
from triton_here import needs_gpu, torch

import convgrad
from convgrad.backends.triton import recording as recordings
from convgrad.backends.triton.recording import Recording, without_memory
from convgrad.backends.triton.replay import Recorded, Watch, constant_tensor, current, new_scratch
from convgrad.call import prepared_calls

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(built: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setattr(recordings, "DRIVER", built.path)
    built.lines()
    yield built
    current.recording = None


def compiled(driver: FakeDriver, name: str, kinds: Sequence[str], scratch: int = 0) -> Any:
    """What Triton says of a compiled kernel, as far as launches need it."""
    driver.kernel_parameters(name, len(kinds) + 2)
    metadata = SimpleNamespace(num_warps=4, num_ctas=1, shared=0, launch_cooperative_grid=False, launch_pdl=False,
                                     global_scratch_size=scratch)
    return SimpleNamespace(name=name, hash=name, kernel=b"code", metadata=metadata,
                                 src=SimpleNamespace(signature=dict(enumerate(kinds))))


def launch(driver: FakeDriver, name: str, *tensors: Any) -> None:
    current.recording.add(compiled(driver, name, ["*bf16"] * len(tensors)), (2,), tensors)


def arguments(driver: FakeDriver) -> list[list[int]]:
    """Of the launches since the last time, without the last two, which are for the compiler's own memory."""
    return [list(map(int, line.partition(" with ")[2].split()))[:-2] for line in driver.launches()]


def tensor(*shape: int) -> Any:
    return without_memory(shape, torch.empty(shape, device="meta").stride(), torch.float32)


@needs_compiler
def test_addresses_follow_the_tensors(driver: FakeDriver) -> None:
    x, y = tensor(64), tensor(64)
    current.recording = recording = Recording("p", (x, y), CUDA)
    launch(driver, "first", x[8:], y)
    launch(driver, "second", y[4:].view(6, 10)[1:], x)
    assert recording.complete and recording.call.workspace_bytes == 0
    for addresses in ([1000, 5000], [1000, 9000]):
        recording.call.run(addresses, 7)
        assert arguments(driver) == [[1032, addresses[1]], [addresses[1] + 16 + 40, 1000]]


@needs_compiler
def test_scalars_of_every_kind(driver: FakeDriver) -> None:
    x = tensor(8)
    recording = Recording("p", (x,), CUDA)
    kernel = compiled(driver, "scalars", ["i1", "i32", "constexpr", "i64", "fp32", "u8"])
    driver.kernel_parameters("scalars", 5 + 2)  # constants are none
    recording.add(kernel, (1,), (True, 3, None, 2**40, 1.0, 200))
    recording.call.run([0])
    assert arguments(driver) == [[1, 3, 2**40, 0x3F800000, 200]]


@needs_compiler
def test_parts_of_a_plan_share_scratch_memory(driver: FakeDriver) -> None:
    x = tensor(64)

    def part(*sizes: int) -> Recorded:
        def run(operands: Any, results: Any, workspace: Any) -> None:
            memory = [new_scratch((size,), torch.float32, x) for size in sizes]
            launch(driver, f"part{len(sizes)}", *operands, *memory, *(piece[1:] for piece in memory))
        return Recorded(run, "p")

    current.recording = recording = Recording("p", (x,), CUDA)
    part(100)((x,), (x,))
    part(10, 200)((x,), (x,))
    assert recording.complete and recording.call.workspace_bytes == 512 + 1024, "the larger part, its pieces apart"
    recording.call.run([1000], 5, 4096)
    assert arguments(driver) == [[1000, 4096, 4100], [1000, 4096, 4608, 4100, 4612]]


@needs_compiler
def test_memory_that_the_compiler_wants_is_workspace(driver: FakeDriver) -> None:
    recording = Recording("p", (tensor(8),), CUDA)
    recording.add(compiled(driver, "checked", [], scratch=300), (2, 3), ())
    assert recording.call.workspace_bytes == 2048
    recording.call.run([0], 0, 4096)
    assert driver.launches()[0].endswith("with 4096 0")


@needs_compiler
def test_what_else_a_runner_does_is_seen(driver: FakeDriver) -> None:
    x, y = tensor(8, 4), tensor(8, 4)

    def complete(run: Any) -> bool:
        recording = current.recording = Recording("p", (x,), CUDA)
        with Watch(recording):
            run()
        return recording.complete

    assert complete(lambda: x.permute(1, 0)[1:].detach())
    assert not complete(lambda: x + 1), "no view"
    assert not complete(lambda: launch(driver, "foreign", y)), "memory of another origin"
    assert complete(lambda: x.zero_()) and not complete(lambda: x[:, 1:].zero_()), "zeros fill memory without holes"
    assert not complete(lambda: y.zero_())


@needs_compiler
def test_results_of_empty_sums_are_filled_by_the_driver(driver: FakeDriver) -> None:
    call = Recorded(lambda operands, results, workspace: results[0].zero_(), "p").prepared(
        convgrad.Problem.parse("weight_grad f32 n0 c3 k4 i5 w2 cuda"), [(15, 5, 1), (16, 4, 1), (6, 1, 3)], 0,
        [torch.float32] * 3)
    call.run([0, 0, 640], 9)
    assert "memset 640 value 0 bytes 96 stream 9" in driver.lines()


@needs_compiler
def test_constants_stay_where_they_are_and_live_as_long_as_the_call(driver: FakeDriver) -> None:
    x, made = tensor(8), dict[Any, Any]()
    recording = current.recording = Recording("p", (x,), torch.device("cpu"))
    with Watch(recording):
        table = constant_tensor(made, x, lambda device: torch.arange(4, device=device))
        launch(driver, "looked_up", x, table)
    assert recording.complete and table.device.type == "cpu"
    address, kept, call = table.data_ptr(), weakref.ref(table), recording.call
    call.run([64])
    assert arguments(driver) == [[64, address]]
    made.clear()
    current.recording = recording = table = None
    assert kept() is not None
    del call
    assert kept() is None


def test_misaligned_tensors_are_recorded_as_such() -> None:
    assert without_memory((3, 4), (8, 2), torch.bfloat16, 6).data_ptr() == 6
    assert without_memory((3, 4), (8, 2), torch.bfloat16, 6)[1].data_ptr() == 6 + 16
    assert without_memory((0, 4), (8, 2), torch.bfloat16).shape == (0, 4)


WHOLE_WAY = """
import ctypes, sys
from triton.runtime.driver import driver
from convgrad import plan
from convgrad.backends.triton import no_gpu, recording
driver.set_active(no_gpu.NoDriver(("cuda", 90, 32)))
recording.DRIVER = sys.argv[1]
chosen = plan("input_grad bf16 n8 c64 k64 i14x14 w3x3 p1x1 NHWC OHWI cuda")
image, weight = (14 * 14 * 64, 1, 14 * 64, 64), (9 * 64, 1, 3 * 64, 64)
call = chosen.prepared([image, weight, image])
assert call is chosen.prepared([image, weight, image]), "kept"
call.run([0x10000, 0x20000, 0x30000], 5, 0x40000)
library = ctypes.CDLL(sys.argv[1])
library.fake_lines.restype = ctypes.c_char_p
print(library.fake_lines().decode())
"""


@needs_compiler
def test_from_a_problem_to_the_driver(built: FakeDriver) -> None:
    """A plan compiled for a GPU that is not here: its tensor maps are of the tensors, its launch on the stream."""
    done = subprocess.run([sys.executable, "-c", WHOLE_WAY, built.path], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "TRITON_INTERPRET": "0", "CONVGRAD_COMPILE_PROCESSES": "0",
                               "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    addresses, _, types = zip(*[line.split()[1:4] for line in lines if line.startswith("encode")])
    assert addresses == (str(0x10000), str(0x20000), str(0x30000)) and set(types) == {"9"}, "of three bf16 tensors"
    launches = [line for line in lines if line.startswith("launch")]
    assert launches and all("stream 5 context 100" in line for line in launches)


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
              "recording = Recording('p', (), torch.device('cuda', 0))\n"
              "with Watch(recording):\n"
              "    view = torch.zeros(4)[1:]\n"
              "print(recording.complete, 'torch._dynamo.convert_frame' in sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.stdout.split() == ["False", "False"], "zeros are no view"
