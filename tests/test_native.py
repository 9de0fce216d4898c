"""The native backend beyond the general suite: instruction sets, threads, fork, workspace limits, huge arrays."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest

import convgrad
from convgrad.numbers import decode, encode, storage_dtype
from convgrad.plan import plan
from convgrad.problem import Problem, Unsupported

if "native" not in oracle.available_backends():
    pytest.skip("the native module is not built", allow_module_level=True)

from convgrad import _native

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "native"
LEVELS = ("generic", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated")

# Every kernel path of the dense family: both orientations, joined and separate rows, several channel blocks, phases,
# dilated taps that are packed apart, every kind of packed element.
PATHS = [
    "input_grad f32 n2 c40 k70 i14x14 w3x3 p1x1",
    "input_grad f32 n2 c40 k70 i14x14 w3x3 p1x1 NHWC OHWI",
    "input_grad bf16>f32 n1 c33 k65 i9x11 w3x3 s2x2 p1x1",
    "input_grad bf16 n1 c33 k64 i9x11 w3x3 s2x2 p1x1 NHWC",
    "input_grad f32 n1 c9 k1500 i12x12 w3x3 p1x1",
    "input_grad f32 n1 c9 k1500 i12x12 w3x3 p1x1 NHWC",
    "conv f16 n2 c20 k40 i17x15 w5x3 s2x3 d2x1 p4:1x0",
    "conv e4m3 n1 c24 k35 i40 w3 d13 p13 NLC",
    "conv f64 n2 c7 k18 i5x6x7 w2x3x2 p1x1x0",
    "weight_grad f32 n6 c40 k70 i7x7 w3x3 p1x1",
    "weight_grad f32 n3 c40 k70 i28x28 w3x3 s2x2 p1x1 NHWC OHWI",
    "weight_grad bf16>f32 n3 c40 k70 i9x30 w3x3 p1x1",
    "weight_grad+bias_grad hif8 n3 c33 k65 i19x17 w3x3 p1x1 NHWC HWIO",
    "weight_grad f16 n2 c16 k32 i60 w5 s3 d4 p8",
    "weight_grad f64 n2 c17 k19 i4x6x6 w3x3x3 p1x1x1",
    "conv f32 n1 c64 k96 i20x20 w1x1 NHWC OHWI",
    "bias_grad f32 n5 c1 k50 i30x30 w1x1",
]


def run_on_new_arrays(problem: Problem, seed: int = 0, **options: Any) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    operands = tuple(encode(rng.standard_normal(problem.shape_of_operand(name)), problem.dtype)
                     for name in problem.operands)
    results = tuple(np.zeros(problem.conv.shape_of(wrt), storage_dtype(problem.out_dtype)) for wrt in problem.results)
    plan(problem, backend="native", **options).run(operands, results, None)
    return results


def in_process(script: str, **environment: str) -> str:
    """Run a script in a fresh interpreter: instruction set and default threads are chosen once per process."""
    paths = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                            env=os.environ | {"PYTHONPATH": paths} | environment)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.parametrize("text", PATHS)
def test_every_path_is_exact(text: str, seed: int) -> None:
    problem = Problem.parse(text)
    assert oracle.check_exact(problem, "native", seed=seed)


@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set_is_exact(level: str) -> None:
    if not _native.isa_available(level):
        pytest.skip(f"this CPU cannot run {level}")
    script = f"""
import oracle
from convgrad import _native
assert _native.isa() == {level!r}
for text in {PATHS[::4] if level == "amx_emulated" else PATHS!r}:  # tiles in software take seconds
    assert oracle.check_exact(text, "native", seed=1)
    assert oracle.check_bound(text, "native", seed=2)
"""
    in_process(script, CONVGRAD_ISA=level, **({"CONVGRAD_PARTS": "1"} if level.startswith("amx") else {}))


# What only kernels on tiles do: operands in parts, x in pairs once and twice, pieces that stay in L1.
TILED = [
    "input_grad f16 n2 c40 k70 i14x14 w3x3 p1x1 NHWC",
    "input_grad f32 n1 c33 k40 i6x10x10 w3x3x3 p1x1x1 NDHWC ODHWI",
    "input_grad f32 n1 c33 k40 i20x20 w3x3 p1x1 NHWC hf32",
    "weight_grad f16 n2 c40 k70 i14x14 w3x3 p1x1 NHWC",
    "weight_grad f32 n1 c64 k64 i24x24 w3x3 p1x1 NHWC",
    "weight_grad bf16 n2 c64 k64 i14x14 w3x3 p1x1 NHWC OHWI",
    "weight_grad bf16 n1 c64 k130 i30x30 w1x1 NHWC OHWI",
    "weight_grad+bias_grad bf16 n3 c40 k33 i4x9x12 w3x3x3 s1x2x2 p1x1x1",
    "weight_grad bf16>f32 n1 c33 k40 i32x32 w3x3 d12x12 p12x12 NHWC HWIO",
    "weight_grad bf16 n1 c35 k32 i48x48 w3x3 p1x1 NHWC OHWI",  # more pixels than one call sums
    "input_grad bf16 n1 c70 k40 i9x12 w3x3 s2x2 p1x1 NHWC OHWI",  # three panels, the last one narrow
    "weight_grad+bias_grad bf16 n2 c80 k160 i40 w5 s2 p2 g5 NLC OLI",  # groups side by side, the last ones fewer
    "weight_grad bf16 n2 c192 k66 i9x9 w3x3 p1x1 g6",
    "conv bf16 n1 c64 k64 i14x14 w1x1 p1x1 NHWC OHWI",  # not read in place: taps beside the tensor
    "conv bf16 n2 c64 k70 i9x11 w2x2 s2x2 NHWC OHWI",
    "input_grad bf16 n2 c64 k40 i14x14 w3x3 p1x1 NHWC OHWI",  # rows of fewer pixels than a tile has: joined
    "weight_grad bf16 n4 c40 k64 i20 w3 p1 TBC LIO",  # images are columns
    # Taps in pairs: rows joined, row by row, with half a panel of channels, next to a tap without pixels.
    "weight_grad bf16 n3 c70 k40 i9x11 w3x4 p1x2 NHWC OHWI", "weight_grad bf16 n1 c40 k33 i7x64 w3x3 p1x1 NHWC OHWI",
    "weight_grad f32 n1 c12 k33 i40 w7 p3 NLC OLI", "weight_grad bf16 n1 c48 k20 i2x5 w5x4 p4x2 NHWC OHWI",
]


def test_tiles_are_exact() -> None:
    if not _native.isa_available("amx_emulated"):
        pytest.skip("the emulation of tiles needs AVX-512")
    script = f"""
import oracle
from convgrad.plan import plan
for text in {TILED!r}:
    assert plan(text, backend="native").kernel.endswith("amx")
    assert oracle.check_exact(text, "native", seed=1)
    assert oracle.check_bound(text, "native", seed=2)
    assert oracle.check_nonfinite(text, "native", seed=3)
"""
    in_process(script, CONVGRAD_PARTS="1", CONVGRAD_ISA="amx" if _native.isa_available("amx") else "amx_emulated")


def test_the_number_of_threads_changes_no_bit_of_tiles() -> None:
    """Blocks of channels follow the number of threads here: there must be several cuts, all with the same sums."""
    if not _native.isa_available("amx_emulated"):
        pytest.skip("the emulation of tiles needs AVX-512")
    script = """
import ml_dtypes
import numpy as np
from convgrad.plan import plan
from convgrad.problem import Problem
problem, rng = Problem.parse("weight_grad bf16 n2 c70 k200 i9x9 w3x3 p1x1"), np.random.default_rng(0)
seen, cuts = set(), set()
dtype = np.dtype(ml_dtypes.bfloat16)
operands = tuple(rng.standard_normal(problem.shape_of_operand(name)).astype(dtype) for name in problem.operands)
for threads in (1, 3, 16):
    chosen = plan(problem, backend="native", num_threads=threads)
    (found,) = results = (np.zeros(problem.shape_of_operand("weight"), dtype),)
    chosen.run(operands, results, None)
    seen.add(found.tobytes())
    cuts.add(next(note for note in chosen.notes if "result channels" in note))
assert len(seen) == 1 and len(cuts) > 1, (len(seen), cuts)
"""
    in_process(script, CONVGRAD_ISA="amx" if _native.isa_available("amx") else "amx_emulated")


@pytest.mark.parametrize("exponents", [(0, 0), (-45, -45), (-60, -60), (-126, 10), (60, 60), (100, -100)])
def test_parts_hold_the_bound_for_small_and_large_values(exponents: tuple[int, int]) -> None:
    """Three bf16 parts hold values whose products stay far from underflow and overflow; others must take f32."""
    if not _native.isa_available("amx_emulated"):
        pytest.skip("the emulation of tiles needs AVX-512")
    script = f"""
import numpy as np
from convgrad.numbers import error_bound
from convgrad.plan import plan
from convgrad.problem import Problem
problem = Problem.parse("input_grad f32 n1 c64 k64 i12x12 w3x3 p1x1")
exact_problem = problem.with_(dtype="float64", out_dtype="float64", compute="f64")
assert "bf16x3" in plan(problem, backend="native").kernel
rng = np.random.default_rng(0)
for spread in (0, 30, 120):
    operands = tuple(np.ldexp(rng.standard_normal(problem.shape_of_operand(name)),
                              exponent - rng.integers(0, spread + 1, problem.shape_of_operand(name))).astype(np.float32)
                     for name, exponent in zip(problem.operands, {exponents!r}, strict=True))
    (found,) = results = (np.zeros(problem.conv.shape_of("input"), np.float32),)
    plan(problem, backend="native").run(operands, results, None)
    wide = tuple(o.astype(np.float64) for o in operands)
    (exact,), (magnitude,) = ((np.zeros(found.shape),) for _ in range(2))
    plan(exact_problem, backend="reference").run(wide, (exact,), None)
    plan(exact_problem, backend="reference").run(tuple(np.abs(o) for o in wide), (magnitude,), None)
    inside = np.abs(exact) < 3e38
    assert inside.any()
    assert (np.abs(found - exact) <= error_bound(problem, "input", exact, magnitude))[inside].all()
"""
    in_process(script, CONVGRAD_PARTS="1", CONVGRAD_ISA="amx" if _native.isa_available("amx") else "amx_emulated")


def test_an_unknown_instruction_set_is_ignored_with_a_word() -> None:
    script = "from convgrad import _native; print(_native.isa())"
    assert in_process(script, CONVGRAD_ISA="mmx").strip() == _native.isa() or "CONVGRAD_ISA" in os.environ


LARGE_WEIGHTS = [  # of channels-first layouts: with several threads they are packed around the caches
    "input_grad bf16 n2 c256 k260 i14x14 w3x3 p1x1", "conv bf16 n2 c260 k256 i14x14 w3x3 p1x1",
    "conv f32 n2 c133 k264 i14x14 w3x3 p1x1"]


@pytest.mark.parametrize("text", LARGE_WEIGHTS)
def test_large_weights_packed_by_several_threads(text: str, seed: int) -> None:
    shared = next(int(note.split(" KiB shared")[0].split()[-1])
                  for note in plan(text, backend="native", num_threads=3).notes if " KiB shared" in note)
    assert shared >= 1024
    assert oracle.check_exact(Problem.parse(text), "native", seed=seed, num_threads=3)


@pytest.mark.parametrize("text", [*PATHS, *LARGE_WEIGHTS, "weight_grad f32 n8 c64 k64 i28x28 w3x3 p1x1",
                                  "weight_grad+bias_grad bf16 n4 c64 k96 i30x30 w3x3 p1x1"])
def test_the_number_of_threads_changes_no_bit(text: str) -> None:
    problem = Problem.parse(text)
    alone = run_on_new_arrays(problem, num_threads=1)
    for threads in (2, 3, 7):
        for one, other in zip(alone, run_on_new_arrays(problem, num_threads=threads), strict=True):
            assert np.array_equal(one.view(np.uint8), other.view(np.uint8)), f"{threads} threads"


def test_threads_are_set_and_reset() -> None:
    default = convgrad.get_num_threads()
    try:
        convgrad.set_num_threads(3)
        assert convgrad.get_num_threads() == 3
        assert "3 threads" in plan("weight_grad f32 n8 c64 k64 i28x28 w3x3 p1x1", backend="native").notes[0]
    finally:
        convgrad.set_num_threads(0)
    assert convgrad.get_num_threads() == default
    with pytest.raises(ValueError, match="num_threads must be at least 0, got -1"):
        convgrad.set_num_threads(-1)


def test_the_environment_sets_the_threads() -> None:
    script = "import convgrad; print(convgrad.get_num_threads())"
    assert in_process(script, CONVGRAD_NUM_THREADS="5").strip() == "5"
    assert int(in_process(script, CONVGRAD_NUM_THREADS="many")) >= 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_affinity_limits_the_default_threads() -> None:
    script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " \
             "import convgrad; print(convgrad.get_num_threads())"
    environment = {"CONVGRAD_NUM_THREADS": ""} if "CONVGRAD_NUM_THREADS" in os.environ else {}
    assert in_process(script, **environment).split()[-1] == "1"


def test_many_python_threads_at_once() -> None:
    problem = Problem.parse("weight_grad f32 n4 c32 k48 i20x20 w3x3 p1x1")
    expected = [run_on_new_arrays(problem, seed, num_threads=1)[0] for seed in range(4)]
    wrong = []

    def work(seed: int) -> None:
        for _ in range(10):
            if not np.array_equal(run_on_new_arrays(problem, seed, num_threads=2)[0], expected[seed]):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert not any(worker.is_alive() for worker in workers)
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_computes_the_same() -> None:
    script = """
import os, signal
import numpy as np
from convgrad.plan import plan
from convgrad.problem import Problem
problem = Problem.parse("input_grad f32 n4 c48 k48 i30x30 w3x3 p1x1")
rng = np.random.default_rng(0)
operands = tuple(rng.standard_normal(problem.shape_of_operand(name), dtype=np.float32) for name in problem.operands)
def compute():
    result = np.zeros(problem.conv.input_shape, np.float32)
    plan(problem, backend="native", num_threads=3).run(operands, (result,), None)
    return result
first = compute()          # the pool has workers now
child = os.fork()
if child == 0:
    signal.alarm(30)       # a deadlock would end the child with a signal
    os._exit(0 if np.array_equal(compute(), first) and np.array_equal(compute(), first) else 1)
assert np.array_equal(compute(), first)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert in_process(script).strip() == "0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_while_others_take_workspaces() -> None:
    """A child inherited the locked mutex of the kept workspaces when another thread was just taking one."""
    script = """
import os, signal, threading, warnings
import numpy as np
import convgrad
warnings.simplefilter("ignore")  # of forks with threads
x, w = np.ones((1, 16, 6, 6), np.float32), np.ones((16, 16, 3, 3), np.float32)
done = False
def others():
    while not done:
        convgrad.conv(x, w, num_threads=1)
workers = [threading.Thread(target=others) for _ in range(3)]
for worker in workers:
    worker.start()
failed = 0
for _ in range(100):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        convgrad.conv(x, w, num_threads=1)
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
done = True
for worker in workers:
    worker.join()
print(failed)
"""
    assert in_process(script).strip() == "0"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_signal_interrupts_a_long_call(threads: int) -> None:
    """The call takes minutes; the signal comes when it has begun, and most of the result is never written."""
    script = f"""
import os, signal, threading
import numpy as np
from convgrad import Problem, plan
problem = Problem.parse("conv f32 n64 c512 k512 i64x64 w3x3 p1x1")
x = np.broadcast_to(np.ones((1, 512, 64, 64), np.float32), (64, 512, 64, 64))
w, result = np.ones((512, 512, 3, 3), np.float32), np.zeros((64, 512, 64, 64), np.float32)
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    plan(problem, backend="native", num_threads={threads}).run((x, w), (result,), None)
    print("went on to the end")
except KeyboardInterrupt:
    print("interrupted", bool((result[-1] == 0).any()))
small = np.empty((1, 512, 3, 3), np.float32)
plan("conv f32 n1 c512 k512 i3x3 w3x3 p1x1", num_threads={threads}).run((x[:1, :, :3, :3], w), (small,), None)
print(small[0, 0].tolist())
"""
    expected = [[4 * 512.0, 6 * 512.0, 4 * 512.0], [6 * 512.0, 9 * 512.0, 6 * 512.0], [4 * 512.0, 6 * 512.0, 4 * 512.0]]
    assert in_process(script).splitlines() == ["interrupted True", str(expected)]


@pytest.mark.parametrize("text", ["weight_grad f32 n4 c64 k64 i28x28 w3x3 p1x1",
                                  "input_grad f32 n1 c64 k256 i28x28 w3x3 p1x1 NHWC",
                                  "bias_grad f32 n4 c1 k64 i9x9 w1x1"])
def test_a_workspace_limit_is_kept_down_to_a_stated_minimum(text: str, seed: int) -> None:
    problem = Problem.parse(text)
    with pytest.raises(Unsupported) as refusal:
        plan(problem, backend="native", max_workspace_bytes=64)
    minimum = min(int(number) for number in re.findall(r"at least (\d+) bytes", str(refusal.value)))
    assert oracle.check_exact(problem, "native", seed=seed, max_workspace_bytes=minimum + 63)
    usual = plan(problem, backend="native").workspace_bytes
    for part in (0.9, 0.6):
        limit = max(int(usual * part), minimum + 63)
        assert oracle.check_exact(problem, "native", seed=seed, max_workspace_bytes=limit)


def test_a_workspace_of_the_caller_is_checked() -> None:
    problem = Problem.parse("input_grad f32 n1 c8 k8 i9x9 w3x3")
    chosen = plan(problem, backend="native")
    operands = tuple(np.zeros(problem.shape_of_operand(name), np.float32) for name in problem.operands)
    result = np.ones(problem.conv.input_shape, np.float32)
    with pytest.raises(ValueError, match=f"at least {chosen.workspace_bytes} bytes, got 5"):
        chosen.run(operands, (result,), np.zeros(5, np.uint8))
    with pytest.raises(ValueError, match=re.escape("weight must have the canonical shape (8, 8, 3, 3), got (8, 8, 3)")):
        chosen.run((operands[0], operands[1][..., 0]), (result,), None)
    assert (result == 1).all()


@pytest.mark.parametrize("text", ["input_grad f32 n1 c40 k700 i12x12 w3x3 p1x1", "conv bf16 n1 c64 k40 i30 w3 p1 NLC",
                                  "conv f32 n1 c8 k40 i30x30 w3x3 p1x1", "conv f64 n1 c8 k10 i9x9 w3x3 p2x2"])
def test_padding_meets_no_infinite_weight(text: str) -> None:
    """A zero that stands for padding, times Inf, would be NaN: the tile is then computed again, tap by tap."""
    problem = Problem.parse(text)
    rng = np.random.default_rng(3)
    operands = {name: rng.integers(-2, 3, problem.shape_of_operand(name)).astype(float) for name in problem.operands}
    operands["weight"][0, 0] = np.inf
    stored = tuple(encode(operands[name], problem.dtype) for name in problem.operands)
    wrt = problem.results[0]
    result = np.zeros(problem.conv.shape_of(wrt), storage_dtype(problem.out_dtype))
    plan(problem, backend="native").run(stored, (result,), None)
    expected = np.zeros_like(result)
    plan(problem, backend="reference").run(stored, (expected,), None)
    assert np.isnan(decode(expected, problem.out_dtype)).any()
    assert np.array_equal(decode(result, problem.out_dtype), decode(expected, problem.out_dtype), equal_nan=True)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    """Offsets are 64-bit: the last pixels of a 2.2 GB operand are read, and those of a 2.2 GB result are written."""
    length, stride = 1_100_000_003, 1000
    problem = Problem.parse(f"weight_grad e4m3>f32 n1 c2 k2 i{length} w2 s{stride}")
    conv = problem.conv
    x = np.zeros(conv.input_shape, np.uint8)
    dy = np.zeros(conv.output_shape, np.uint8)
    one, two = (int(encode(np.array([value]), problem.dtype).view(np.uint8)[0]) for value in (1.0, 2.0))
    last = conv.out_size[0] - 1
    x[0, 1, last * stride + 1] = two
    x[0, 0, 0] = one
    dy[0, 1, last] = two
    dy[0, 0, 0] = one
    stored = storage_dtype(problem.dtype)
    dw = np.ones(conv.weight_shape, np.float32)
    plan(problem, backend="native").run((dy.view(stored), x.view(stored)), (dw,), None)
    expected = np.zeros_like(dw)
    expected[1, 1, 1], expected[0, 0, 0] = 4, 1
    assert np.array_equal(dw, expected)

    backward = problem.with_(wrt="input", out_dtype="float8_e4m3fn")
    w = np.full(conv.weight_shape, one, np.uint8)
    x.fill(0x77)
    plan(backward, backend="native").run((dy.view(stored), w.view(stored)), (x.view(stored),), None)
    assert (x[0, :, 0] == one).all()
    assert (x[0, :, last * stride:last * stride + 2] == two).all()
    assert not x[0, :, 2:stride].any()
    assert not x[0, :, last * stride + 2:].any()


def test_every_source_file_is_built_and_every_listed_family_exists() -> None:
    """A kernel file that is not listed does not exist for a user, and nothing else would say so."""
    build = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    listed = set(re.findall(r"\b[a-z][a-z0-9_]+\b", build))
    sources = {path.stem: path.read_text(encoding="utf-8") for path in NATIVE.glob("*.cpp")}
    assert {stem for stem in sources if not stem.endswith("_check")} <= listed
    lines = re.findall(r"^CONVGRAD_FAMILY\((\w+), (\w+)\)", (NATIVE / "kernels.inc").read_text(encoding="utf-8"), re.M)
    assert len(lines) == len(set(lines)) >= 2
    for family, planner in lines:
        assert f"std::optional<Plan> {planner}(const Problem& problem" in sources[family], f"{family}.cpp: {planner}"
