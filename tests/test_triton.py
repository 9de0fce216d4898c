"""The GPU backend: every tile it may choose gives right results, tuning files are used, memory stays within its limit.

Without a GPU the kernels run in Triton's interpreter on small problems; with one, the same tests run on it, and more.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from convgrad import Problem, Unsupported  # noqa: E402
from convgrad.backends.triton import box_plans, tiles, tuning  # noqa: E402
from convgrad.backends.triton.candidates import candidates  # noqa: E402
from convgrad.backends.triton.elements import as_result  # noqa: E402
from convgrad.backends.triton.geometry import geometry  # noqa: E402
from convgrad.backends.triton.launch import INTERPRETED  # noqa: E402
from convgrad.backends.triton.numbers_on_device import TORCH_DTYPES  # noqa: E402
from convgrad.backends.triton.plans import make_plan  # noqa: E402
from convgrad.backends.triton.tune import Bench, in_turns  # noqa: E402
from convgrad.numbers import decode, encode  # noqa: E402

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SMALL = [
    "input_grad bf16 n2 c32 k64 i9x7 w3x3 p1x1 NHWC OHWI",
    "input_grad bf16 n2 c64 k40 i8x8 w3x3 s2x2 p1x1 NHWC OHWI",
    "conv bf16 n2 c64 k64 i8x6 w2x2 s2x2 NHWC OHWI",
    "conv f16 n1 c32 k48 i6x5x4 w3x2x3 p1x0:1x2:0 d1x2x2 NDHWC ODHWI",
    "input_grad bf16 n2 c3 k32 i8x8 w4x4 s4x4 NHWC OHWI",
    "input_grad bf16 n2 c3 k16 i9x9 w5x5 s2x2 p2x2 NHWC OHWI",
    "input_grad f32 n1 c6 k10 i7x7 w3x3 p1x1 g2 NHWC OHWI",
    "weight_grad bf16 n2 c3 k16 i9x9 w5x5 s2x2 p2x2 NHWC OHWI",
    "weight_grad bf16 n1 c1 k32 i5x4x6 w3x3x3 p1x1x1 NDHWC ODHWI",
    "weight_grad bf16 n2 c32 k32 i6x6 w3x3 p1x1 NHWC OHWI",
    "weight_grad f32 n2 c8 k12 i10 w3 d2 p2:0 g4 NLC OLI",
    "input_grad bf16 n2 c20 k20 i9x8 w3x3 s2x2 p1x1 g20 NHWC OHWI",
    "weight_grad bf16 n2 c20 k20 i9x8 w5x5 p2x2 g20 NHWC OHWI",
    "input_grad+weight_grad+bias_grad bf16 n1 c16 k16 i9x8 w3x3 p1x1 g16 NHWC OHWI",
]


@triton.jit
def store_as(values, result, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + at, as_result(tl.load(values + at, mask=at < size, other=0.0), result), mask=at < size)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "hifloat8"])
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_8bit_results_are_rounded_as_numbers_py_says(wide: str, name: str, seed: int) -> None:
    """Every value of the format, the middles between them, their neighbours, and what lies beyond."""
    random = np.random.default_rng(seed)
    codes = np.arange(256, dtype=np.uint8)
    exact = decode(codes, name)
    exact = np.unique(exact[np.isfinite(exact)])
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-40]
    values = np.concatenate([exact, (exact[1:] + exact[:-1]) / 2, 1.5 * exact[[0, -1]], special,
                             random.standard_normal(2000) * np.exp2(random.uniform(-30, 20, 2000))]).astype(wide)
    values = np.concatenate([values, np.nextafter(values, values.dtype.type(np.inf)),
                             np.nextafter(values, values.dtype.type(-np.inf))])
    device = "cpu" if INTERPRETED else "cuda"
    stored = torch.zeros(len(values), dtype=torch.uint8, device=device).view(TORCH_DTYPES[name])
    store_as[(-(-len(values) // 1024),)](torch.from_numpy(values).to(device), stored, len(values), BLOCK=1024)
    got, wanted = stored.view(torch.uint8).cpu().numpy(), encode(values.astype(np.float64), name).view(np.uint8)
    wrong = (got != wanted) & ~(np.isnan(decode(got, name)) & np.isnan(decode(wanted, name)))
    assert not wrong.any(), [(values[i], hex(got[i]), hex(wanted[i])) for i in np.flatnonzero(wrong)[:5]]


def relative_error(got: Any, wanted: Any) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def exact(bench: Bench, problem: Problem) -> list[Any]:
    """The problem's results on the bench's operands, by the float64 reference."""
    from convgrad.backends.reference import plan as reference

    arrays = tuple(operand.double().cpu().numpy() for operand in bench.operands)
    wide = problem.with_(dtype="float64", out_dtype="float64", compute="f64", device="cpu")
    results = tuple(np.empty(problem.conv.shape_of(wrt)) for wrt in problem.results)
    reference(wide).run(arrays, results, None)
    return [torch.from_numpy(result) for result in results]


@pytest.mark.parametrize("text", SMALL)
def test_every_candidate_is_right(text: str) -> None:
    """Whatever tuning may choose computes the same function: no tile is fast because it is wrong."""
    problem = Problem.parse(text).with_(device="cuda")
    bench = Bench(problem, repeats=1)
    wanted = exact(bench, problem)
    choices = candidates(problem)
    assert choices
    ran = 0
    for choice in choices:
        try:
            plan = make_plan(problem, None, choice)
        except Unsupported:
            continue
        for result in bench.results:
            result.fill_(float("nan"))
        plan.run(bench.operands, bench.results, None)
        for got, value in zip(bench.results, wanted):
            assert relative_error(got.cpu(), value) < 4e-3, f"{choice}: {plan.kernel}"
        ran += 1
    assert ran


@pytest.mark.parametrize("text", SMALL)
def test_the_same_bits_every_time(text: str) -> None:
    problem = Problem.parse(text).with_(device="cuda")
    bench = Bench(problem, repeats=1)
    plan = make_plan(problem, None)
    plan.run(bench.operands, bench.results, None)
    first = [result.clone() for result in bench.results]
    plan.run(bench.operands, bench.results, None)
    assert all(torch.equal(a, b) for a, b in zip(first, bench.results))


@pytest.mark.parametrize("style", ["offset", "gaps"])
@pytest.mark.parametrize("text", ["input_grad bf16 n2 c32 k64 i9x7 w3x3 p1x1 NHWC OHWI",
                                  "weight_grad bf16 n2 c3 k16 i9x9 w5x5 s2x2 p2x2 NHWC OHWI",
                                  "conv bf16 n2 c64 k64 i8x6 w2x2 s2x2 NHWC OHWI"])
def test_tensors_that_are_not_aligned(text: str, style: str) -> None:
    """Boxes and line segments need aligned tensors without gaps; others take the plain kernels of the same plan."""
    if "triton" in oracle.available_backends():
        assert oracle.check_exact(text, "triton", style=style)


def test_a_measured_entry_goes_before_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.parse("input_grad bf16 n2 c8 k8 i9x9 w3x3 p1x1 NHWC OHWI cuda")
    wanted = next(choice for choice in candidates(problem) if choice["kernel"] == "gather" and choice["BM"] == 256)
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"device": "test", "entries": {tuning.key(problem): wanted}}))
    assert "cost model" in make_plan(problem, None).notes[-1]
    monkeypatch.setenv("CONVGRAD_TUNING", str(path))
    plan = make_plan(problem, None)
    assert "tuned.json" in plan.notes[-1] and "gather_bf16_256x" in plan.kernel
    half = problem.with_(dtype="float16", out_dtype="float16")
    assert "tuned.json" in make_plan(half, None).notes[-1], "bfloat16 and float16 share their tiles"


def test_ways_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.parse("input_grad bf16 n1 c32 k32 i5x4 w1x1 NCHW OIHW cuda")
    first = make_plan(problem, None).kernel
    assert first.startswith("points_")
    monkeypatch.setenv("CONVGRAD_GPU_WITHOUT", "point,cells")
    assert make_plan(problem, None).kernel == first, "names are compared from their beginning"
    monkeypatch.setenv("CONVGRAD_GPU_WITHOUT", "points,copied")
    plan = make_plan(problem, None)
    assert plan.kernel.startswith("gather_")
    bench = Bench(problem, repeats=1)
    plan.run(bench.operands, bench.results, None)
    assert relative_error(bench.results[0].cpu(), exact(bench, problem)[0]) < 4e-3


def test_tuning_keeps_right_results_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from convgrad.cli import main

    text = "weight_grad bf16 n1 c4 k8 i5x4 w2x2 NHWC OHWI"
    bench = Bench(Problem.parse(text).with_(device="cuda"), repeats=1)
    choices = candidates(bench.problem)
    assert bench.time(choices[0]) is not None
    bench.wanted[0][0, 0, 0, 0] += 0.1 * bench.wanted[0].float().norm()  # one element of 128 is another
    assert bench.time(choices[0]) is None and "wrong result" in capsys.readouterr().out
    assert [choice["kernel"] for choice in in_turns([{"kernel": name} for name in "aabac"])] == list("abcaa")
    (tmp_path / "problems").write_text(text)
    assert main(["tune", f"{tmp_path}/problems", "--candidates", "2", "--repeats", "1", "--file",
                 f"{tmp_path}/tuned.json"]) == 0
    if (tmp_path / "tuned.json").exists():  # unless the plan without an entry was faster
        (entry,) = tuning.entries(tmp_path / "tuned.json").values()
        assert entry in choices


def test_the_shipped_entries_can_be_planned() -> None:
    entries = tuning.entries(tuning.SHIPPED)
    assert entries
    for text, choice in entries.items():
        try:
            plan = make_plan(Problem.parse(text), None)
        except Unsupported:
            # strips in one pass run on a GPU only; the plain kernels need several passes for some of them
            assert choice["kernel"] == "separate" or (choice["kernel"] == "slide" and INTERPRETED)
            continue
        assert "measured" in plan.notes[-1], text


@pytest.mark.parametrize("limit", [0, 1000, 10**6])
def test_the_workspace_limit_is_kept(limit: int) -> None:
    for text in ("weight_grad bf16 n64 c64 k64 i56x56 w3x3 p1x1 NHWC OHWI",
                 "weight_grad bf16 n64 c3 k64 i224x224 w7x7 s2x2 p3x3 NHWC OHWI",
                 "weight_grad f32 n64 c64 k128 i56x56 w3x3 p1x1"):
        problem = Problem.parse(text).with_(device="cuda")
        dw_bytes = 4 * math.prod(problem.conv.weight_shape)
        assert make_plan(problem, None).workspace_bytes <= max(2**26, 2 * dw_bytes)
        assert make_plan(problem, limit).workspace_bytes <= limit


def test_boxes_cover_what_they_should() -> None:
    box = tiles.best_box((256, 1, 14, 14), 128)
    assert math.prod(box) == 128
    assert math.prod(-(-extent // size) * size for extent, size in zip((256, 1, 14, 14), box)) == 256 * 14 * 14
    assert tiles.best_box((256, 1, 28, 28), 64, most=(1, 1, 256))[2] == 1
    patch = Problem.parse("input_grad bf16 n2 c3 k32 i8x8 w4x4 s4x4 NHWC OHWI cuda")
    assert box_plans.is_patch(patch, geometry(patch.conv))


@on_gpu
@pytest.mark.parametrize("text", ["input_grad bf16 n8 c256 k256 i28x28 w3x3 p1x1 NHWC OHWI",
                                  "weight_grad bf16 n8 c256 k256 i28x28 w3x3 p1x1 NHWC OHWI",
                                  "input_grad f32 n8 c128 k128 i28x28 w3x3 p1x1 NHWC OHWI",
                                  "input_grad bf16 n8 c64 k64 i28x28 w7x7 p3x3 g64 NHWC OHWI"])
def test_a_captured_graph_repeats_the_call(text: str) -> None:
    problem = Problem.parse(text).with_(device="cuda")
    bench = Bench(problem, repeats=1)
    plan = make_plan(problem, None)
    plan.run(bench.operands, bench.results, None)
    wanted = bench.results[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(bench.operands, bench.results, None)
    bench.results[0].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bench.results[0], wanted)


@on_gpu
@pytest.mark.parametrize("text", ["input_grad bf16 n8 c256 k256 i28x28 w3x3 p1x1 NHWC OHWI",
                                  "weight_grad bf16 n32 c128 k128 i28x28 w3x3 s2x2 p1x1 NHWC OHWI",
                                  "weight_grad bf16 n8 c64 k64 i28x28 w7x7 p3x3 g64 NHWC OHWI",
                                  "bias_grad bf16 n8 c8 k64 i28x28 w1x1 NHWC OHWI"])
def test_a_repeated_call_follows_its_tensors(text: str) -> None:
    problem = Problem.parse(text).with_(device="cuda")
    plan = make_plan(problem, None)
    first, second = Bench(problem, repeats=1), Bench(problem, repeats=1)
    plan.run(first.operands, first.results, None)
    for bench, workspace in ((second, None), (first, None),
                             (second, torch.empty(plan.workspace_bytes + 16, dtype=torch.uint8, device="cuda"))):
        bench.results[0].fill_(math.nan)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            plan.run(bench.operands, bench.results, workspace)
        stream.synchronize()
        wanted = torch.empty_like(bench.results[0])
        make_plan(problem, None).run(bench.operands, (wanted,), None)
        assert torch.equal(bench.results[0], wanted)


@on_gpu
@pytest.mark.alone
@pytest.mark.parametrize("channels", [64, 256])
def test_a_cached_call_is_launched_quickly(channels: int) -> None:
    import time

    import convgrad

    last = {"device": "cuda", "dtype": torch.bfloat16}
    x, dy = (torch.randn(2, channels, 28, 28, **last).contiguous(memory_format=torch.channels_last) for _ in range(2))
    w = torch.randn(channels, channels, 3, 3, **last).contiguous(memory_format=torch.channels_last)
    for call in (lambda: convgrad.input_grad(dy, w, (28, 28), padding=1),
                 lambda: convgrad.weight_grad(dy, x, (3, 3), padding=1)):
        call()
        torch.cuda.synchronize()
        times = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
            if len(times) % 20 == 0:
                torch.cuda.synchronize()
        assert sorted(times)[100] < 40e-6
