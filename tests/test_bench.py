"""The benchmark: its layers are what their names say, wrong results are caught, peers may crash."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from convgrad.backends import reference
from convgrad.benchmark import ceilings, judge, peer_amx
from convgrad.benchmark.arena import CpuArena
from convgrad.benchmark.commands import main
from convgrad.benchmark.judge import Expected, WrongResult, canonical, in_layout, random_operands
from convgrad.benchmark.layers import CLASSES, GRADIENTS, class_of, layer_of, load_layers, parse_layers, select
from convgrad.benchmark.peers import Peer, PeerFailed
from convgrad.benchmark.report import markdown
from convgrad.benchmark.results import load
from convgrad.benchmark.rows import Choice, failed, measure_row
from convgrad.benchmark.timing import Contestant, alternate, quartiles
from convgrad.call import prepared_calls
from convgrad.machine import processor
from convgrad.plan import BACKENDS, clear_plan_cache, plan
from convgrad.problem import Plan, Problem

TINY = """
conv2d | dense | tiny | input_grad f32 n2 c12 k40 i9x8 w3x3 s2x2 p1x1
wide | dense | tiny | input_grad f32 n2 c70 k8 i5x4 w3x3 p0:1x1:0
transposed | dense | tiny | conv f32 n2 c12 k8 i10x9 w3x3 s2x2 p1x1
volume | grouped | tiny | input_grad f32 n1 c12 k24 i4x5x6 w3x2x1 s1x2x1 p1x0x0 g2
depthwise | depthwise | tiny | input_grad f32 n2 c16 k16 i14 w3 p4:0 d2 g16
time_first | conv_tbc | tiny | input_grad f32 n2 c16 k32 i14 w3 p1 TBC LIO
"""
LAYERS = {layer.name: layer for layer in parse_layers(TINY, "tiny")}


# ---- layers -----------------------------------------------------------------------------------------------------


def test_sets_have_their_layers() -> None:
    cpu, core, gpu, demo = (load_layers(name) for name in ("cpu", "core", "gpu", "demo"))
    assert (len(cpu), len(core), len(gpu)) == (100, 34, 100) and 8 <= len(demo) <= 10
    assert [layer.name for layer in cpu] == [layer.name for layer in gpu]
    assert set(core) <= set(cpu)
    assert {layer.name for layer in demo} <= {layer.name for layer in cpu}
    assert {layer.kind for layer in core} == set(CLASSES)


@pytest.mark.parametrize("name", ["cpu", "core", "gpu", "demo"])
def test_layers_are_what_their_names_say(name: str) -> None:
    for layer in load_layers(name):
        conv = layer.problem.conv
        assert Problem.parse(str(layer.problem)) == layer.problem
        assert layer.kind == class_of(layer.problem), layer.name
        assert min(conv.out_size) >= 1
        assert layer.transposed == bool(re.search(r"_up\d?_|_tconv|_deconv|dcgan", layer.name)), layer.name
        for pattern, found in ((r"_k(\d+)", conv.kernel_size), (r"dw(\d+)_", conv.kernel_size),
                               (r"_s(\d)(?:_|$)", conv.stride), (r"k\d+s(\d)", conv.stride),
                               (r"_d(\d+)(?:_|$)", conv.dilation)):
            for number in re.findall(pattern, layer.name):
                assert int(number) in found, (layer.name, pattern, found)
        if (groups := re.search(r"_g(\d+)(?:_|$)", layer.name)) and "dcgan" not in layer.name:
            assert conv.groups == int(groups[1]), layer.name
        for sizes in re.findall(r"_(\d+(?:x\d+)+)(?:_|$)", layer.name):
            if sizes not in ("480x720", "6x1090"):  # those are of the input
                assert tuple(map(int, sizes.split("x"))) == conv.kernel_size, layer.name


def test_cpu_and_gpu_sizes_are_the_same_layers() -> None:
    for small, large in zip(load_layers("cpu"), load_layers("gpu")):
        a, b = small.problem.conv, large.problem.conv
        assert (a.kernel_size, a.stride, a.dilation, a.padding) == (b.kernel_size, b.stride, b.dilation, b.padding)
        assert (a.group_in, a.group_out) == (b.group_in, b.group_out)
        assert small.problem.flops <= large.problem.flops


def test_layer_questions() -> None:
    layer = LAYERS["transposed"]
    assert layer.question("input_grad", "bfloat16", "channels_last").wrt == "output"
    assert layer.question("weight_grad", "float32", "channels_first").wrt == "weight"
    assert layer.question("weight_grad", "float32", "channels_last").layout == "NHWC"
    assert LAYERS["time_first"].layouts == ("time_first",)
    assert LAYERS["time_first"].question("input_grad", "float16", "time_first").layout == "TBC"
    assert layer_of("weight_grad f32 n1 c8 k8 i4 w3 g8").kind == "depthwise"
    assert [x.name for x in select(LAYERS.values(), "volume, depthwise")] == ["volume", "depthwise"]


@pytest.mark.parametrize("line, message", [
    ("a | dense | m", "tiny:1: expected 'name"), ("a | thick | m | input_grad f32 n1 c1 k1 i1 w1", "class 'thick'"),
    ("a | dense | m | weight_grad f32 n1 c1 k1 i1 w1", "begins with"),
    ("a | dense | m | input_grad f32 n1", "missing")])
def test_bad_lines_are_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_layers(line, "tiny")


# ---- verification -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", LAYERS)
def test_right_results_pass_and_wrong_elements_do_not(name: str, gradient: str, dtype: str, whole: bool,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    if not whole:
        monkeypatch.setattr(judge, "FULL_FLOPS", 0)
    problem = LAYERS[name].question(gradient, dtype, "channels_first")
    operands = random_operands(problem)
    expected = Expected(problem, operands)
    if not whole and name == "wide":
        assert "signed sums" in expected.how
    result = np.empty(problem.conv.shape_of(problem.wrt), operands[problem.operands[0]].dtype)
    plan(problem, backend="reference").run(tuple(operands[o] for o in problem.operands), (result,), None)
    assert expected.check(result).worst <= 1
    places = np.random.default_rng(1).integers(0, result.size, 6)
    for place in places:
        wrong = result.copy()
        wrong.flat[place] = 0 if abs(wrong.flat[place]) > 0.5 else wrong.flat[place] + 2
        with pytest.raises(WrongResult, match="times the error bound"):
            expected.check(wrong)
    wrong = result.copy()
    wrong.flat[int(places[0])] = np.nan
    with pytest.raises(WrongResult):
        expected.check(wrong)


def test_f32_rounded_to_bf16_is_caught() -> None:
    problem = Problem.parse("weight_grad f32 n2 c4 k6 i9x9 w3x3")
    operands = random_operands(problem)
    rounded = problem.with_(compute="bf16")
    result = np.empty(problem.conv.weight_shape, np.float32)
    plan(rounded, backend="reference").run(tuple(operands[o] for o in problem.operands), (result,), None)
    with pytest.raises(WrongResult):
        Expected(problem, operands).check(result)


def test_layouts_are_views_and_back() -> None:
    array = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    placed = in_layout(array, "HWNC")
    assert placed.shape == (4, 5, 2, 3) and placed.flags.c_contiguous
    assert np.array_equal(canonical(placed, "HWNC"), array)


@pytest.mark.parametrize("elements_at_a_time", [2**26, 100])
def test_samples_agree_with_the_reference(elements_at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from convgrad.benchmark import samples
    from convgrad.benchmark.samples import check_samples

    monkeypatch.setattr(samples, "ELEMENTS", elements_at_a_time)
    for layer in LAYERS.values():
        for gradient in GRADIENTS:
            problem = layer.question(gradient, "float32", "channels_first")
            operands = {name: torch.as_tensor(array) for name, array in random_operands(problem).items()}
            exact = np.empty(problem.conv.shape_of(problem.wrt))
            question = problem.with_(dtype="float64", out_dtype="float64", compute="f64")
            plan(question, backend="reference").run(
                tuple(operands[name].double().numpy() for name in problem.operands), (exact,), None)
            right = torch.as_tensor(exact).float()
            assert check_samples(problem, operands, right, problem.wrt, "exact").worst < 1
            with pytest.raises(WrongResult, match="spoiled is off by"):
                check_samples(problem, operands, right * 1.01, problem.wrt, "spoiled")
            with pytest.raises(WrongResult):
                check_samples(problem, operands, right * float("nan"), problem.wrt, "not a number")


def test_samples_of_a_bias_gradient() -> None:
    torch = pytest.importorskip("torch")
    from convgrad.benchmark.samples import check_samples

    problem = Problem.parse("bias_grad f32 n3 c1 k5 i7 w1")
    dy = torch.rand(3, 5, 7)
    assert check_samples(problem, {"grad_output": dy}, dy.sum((0, 2)), "bias", "torch").worst < 1
    with pytest.raises(WrongResult):
        check_samples(problem, {"grad_output": dy}, dy.sum((0, 2)) + 1e-3, "bias", "torch")


def forget_plans() -> None:
    clear_plan_cache()
    prepared_calls.clear()


class PlainArena(CpuArena):
    """One thread, a named backend, perhaps a peer, and made-up ceilings."""

    def __init__(self, backend: str, peer: Peer | None = None) -> None:
        self.threads, self.peer, self.backend, self.clock = 1, peer, backend, "wall"
        self.memory, self.ceilings = "fresh", ceilings.Ceilings(1e12, 0, 1e12, "made up")


@pytest.fixture
def fake_backend(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A backend that computes like the reference and then spoils element `spoil`, if that is not None."""
    module = types.ModuleType("convgrad_fake_backend")
    module.spoil = None  # type: ignore[attr-defined]

    def fake_plan(problem: Problem, **_: object) -> Plan:
        exact = reference.plan(problem)

        def run(operands: tuple, results: tuple, workspace: object = None) -> None:
            exact.run(operands, results, None)
            if module.spoil is not None:
                index = np.unravel_index(module.spoil % results[0].size, results[0].shape)
                results[0][index] += 1
        return Plan(problem, "fake", "float64_numpy", run)

    module.plan = fake_plan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(BACKENDS, "fake", module.__name__)
    yield module
    forget_plans()


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_row_with_a_wrong_element_is_not_timed(name: str, gradient: str, fake_backend: types.ModuleType) -> None:
    layer, choice = LAYERS[name], Choice(seconds=0.0)
    arena = PlainArena("fake")
    row = measure_row(layer, gradient, "float32", choice, arena)
    assert not failed(row) and all("median_s" in row["ours"][layout] for layout in layer.layouts)
    assert row["ours"][layer.layouts[0]]["backend"] == "fake"
    for spoiled in (0, 17, 10**6 + 1):
        fake_backend.spoil = spoiled
        row = measure_row(layer, gradient, "float32", choice, arena)
        assert failed(row) and row["ratio"] is None
        assert all("median_s" not in entry and "numpy is off by" in entry["error"] for entry in row["ours"].values())


def test_bench_command_fails_on_a_wrong_result(fake_backend: types.ModuleType, tmp_path: object) -> None:
    path, results = f"{tmp_path}/tiny.txt", f"{tmp_path}/out.json"
    with open(path, "w") as file:
        file.write(TINY)
    arguments = ["bench", path, "--backend", "fake", "--peer", "none", "--seconds", "0", "--dtype", "f32", "--threads",
                 "1", "--filter", "conv2d", "--json", results]
    assert main(arguments) == 0
    fake_backend.spoil = 3
    assert main(arguments) == 1
    assert "times the error bound" in markdown(load([results]))
    assert main([*arguments, "--filter", "no such layer"]) == 2
    assert main([*arguments, "--dtype", "f31"]) == 2
    assert main([*arguments, "--threads", "2", "--clock", "cpu"]) == 2


# ---- timing -----------------------------------------------------------------------------------------------------


def test_contestants_alternate() -> None:
    order: list[str] = []

    def contestant(name: str, layout: str, seconds: float, scale: float = 1.0) -> Contestant:
        def turn(repeats: int) -> list[float]:
            order.append(name + layout)
            return [seconds] * repeats
        return Contestant(name, layout, turn, scale)

    ours, fast = contestant("convgrad", "a", 0.05), contestant("peer", "b", 0.04, 2.0)
    slow = contestant("peer", "c", 0.3)
    alternate([ours, fast, slow], 0.2, rest=0.0)
    assert order[:6] == ["convgrada", "peerb", "peerc"] * 2
    assert order[6:8] == ["convgrada", "peerb"] and "peerc" not in order[6:]  # hopeless beside its faster layout
    assert fast.median == pytest.approx(0.08) and fast.summary()["scaled"] == 2.0
    assert ours.summary()["runs"] >= 3
    assert quartiles([3.0]) == (3.0, 3.0, 3.0) and quartiles([1.0, 2.0, 3.0]) == (1.5, 2.0, 2.5)


def test_ceilings_are_plausible() -> None:
    found = ceilings.measure_ceilings(1)
    assert 1e9 < found.f32_flops < 1e13 and 1e8 < found.copy_bytes < 1e13
    problem = Problem.parse("input_grad f32 n1 c64 k64 i9x9 w3x3")
    limits = ceilings.Ceilings(1e9, 4e9, 1e12, "made up")
    assert limits.seconds(problem) == pytest.approx(problem.flops / 1e9)
    assert limits.seconds(problem.with_(dtype="bfloat16", out_dtype="")) == pytest.approx(problem.flops / 4e9)
    assert ceilings.Ceilings(1e15, 0, 1e3, "").seconds(problem) == pytest.approx(problem.min_bytes / 1e3)


def test_the_ceiling_beside_a_row_is_the_one_that_counts() -> None:
    pytest.importorskip("convgrad._native")
    arena = PlainArena("native")
    arena.row_ceilings, arena.ceilings = True, ceilings.Ceilings(1e18, 1e18, 1e18, "made up, out of reach")
    row = measure_row(LAYERS["conv2d"], "weight_grad", "bfloat16", Choice(seconds=0.0), arena)
    assert row["ceiling"]["scaled"] < 1  # a tiny layer has fewer products than a run of the contestant
    assert row["ceiling_s"] == pytest.approx(row["ceiling"]["median_s"])
    assert 1e9 < row["flops"] / row["ceiling_s"] < 1e14
    for entry in row["ours"].values():
        assert entry["of_ceiling"] == pytest.approx(row["ceiling_s"] / entry["median_s"])
    arena.row_ceilings = False
    row = measure_row(LAYERS["conv2d"], "weight_grad", "bfloat16", Choice(seconds=0.0), arena)
    assert "ceiling" not in row and row["ceiling_s"] < 1e-9


def test_freed_memory_is_kept() -> None:
    """Faults of a child that allocates 16 times 64 MB: some for each allocation, or some for the first only."""
    script = ("import sys, resource, ctypes; from convgrad.benchmark.allocator import keep_freed_memory\n"
              "kept = sys.argv[1] == 'kept' and keep_freed_memory()\n"
              "if sys.argv[1] == 'kept' and not kept: print(-1); sys.exit()\n"
              "libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p\n"
              "libc.free.argtypes = [ctypes.c_void_p]; size = 64 << 20\n"
              "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
              "for _ in range(16):\n"
              "    block = libc.malloc(ctypes.c_size_t(size)); ctypes.memset(block, 1, size); libc.free(block)\n"
              "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)")
    faults = {}
    for memory in ("kept", "fresh"):
        done = subprocess.run([sys.executable, "-c", script, memory], capture_output=True, text=True, check=True,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        faults[memory] = int(done.stdout)
    if faults["kept"] < 0:
        pytest.skip("this C library cannot be told")
    assert faults["kept"] * 8 <= faults["fresh"]


# ---- the peer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", LAYERS)
def test_peer_answers_the_same_question(name: str, gradient: str) -> None:
    pytest.importorskip("torch")
    from convgrad.benchmark.peer_torch import prepare, ways

    layer = LAYERS[name]
    problem = layer.question(gradient, "float32", layer.layouts[0])
    plain = problem.with_(layout="", weight_layout="")
    operands = random_operands(plain)
    for way in ways(problem):
        found = prepare(problem, layer.transposed, way, operands).run()
        if problem.wrt == "input" and tuple(found.shape) != problem.conv.input_shape:  # gradient of the padded input
            inside = tuple(slice(low, low + size) for (low, _), size in zip(problem.conv.padding, problem.conv.in_size))
            found = found[(slice(None), slice(None), *inside)]
        Expected(plain, operands).check(found.numpy())


def test_peer_process_times_crashes_and_comes_back() -> None:
    pytest.importorskip("torch")
    layer = LAYERS["transposed"]
    problem = layer.question("input_grad", "float32", "channels_first")
    with Peer("torch", 1) as peer:
        contestants, notes = peer.contestants(problem, True)
        assert [c.layout for c in contestants] == ["channels_first", "channels_last"] and notes == []
        assert all(0 < s < 10 for c in contestants for s in c.turn(2))
        assert peer.describe()["threads"] == 1
        with pytest.raises(PeerFailed, match="KeyError"):
            peer.ask({"do": "time", "way": "nowhere", "repeats": 1, "clock": "wall"})
        assert peer.process is not None
        os.kill(peer.process.pid, signal.SIGILL)
        row = measure_row(layer, "input_grad", "float32", Choice(seconds=0.0), PlainArena("reference", peer))
        assert "SIGILL" in row["peer"]["error"] and "median_s" in row["ours"]["channels_first"]
        row = measure_row(layer, "input_grad", "float32", Choice(seconds=0.0), PlainArena("reference", peer))
        assert row["ratio"] and "error" not in row["peer"]


def test_long_peer_runs_are_scaled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from convgrad.benchmark import peer_torch

    monkeypatch.setattr(peer_torch, "PROBE_FLOPS", 1e4)
    problem = Problem.parse("weight_grad f16 n8 c8 k8 i12x12 w3x3")
    part, scale = peer_torch.affordable(problem, False, "channels_first", 1e-6)
    assert part.conv.batch == 1 and part.conv.out_channels < 8
    assert scale == pytest.approx(problem.flops / part.flops)
    assert peer_torch.affordable(problem, False, "channels_first", 100.0) == (problem, 1.0)
    assert peer_torch.affordable(problem.with_(dtype="float32"), False, "channels_first", 1e-6)[1] == 1.0


@pytest.mark.skipif(platform.machine() != "x86_64" or not os.path.exists("/proc/cpuinfo"), reason="x86 on Linux")
def test_cpuid_reads_this_processor() -> None:
    _, ebx, ecx, edx = peer_amx.cpuid(0)
    vendor = b"".join(word.to_bytes(4, "little") for word in (ebx, edx, ecx)).decode()
    info = Path("/proc/cpuinfo").read_text()
    assert re.search(rf"vendor_id\s*: {vendor}$", info, re.M)
    if "amx_tile" not in processor()[1]:
        assert not peer_amx.palettes_hidden() and peer_amx.protect_peer("") == ""


def test_hidden_palettes_without_symbols_switch_amx_off(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(peer_amx, "palettes_hidden", lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    note = peer_amx.protect_peer(str(tmp_path))  # no library there
    assert "without AMX" in note and os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
