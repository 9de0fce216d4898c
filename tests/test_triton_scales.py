"""Scales on the GPU: read there when the result is computed, without waiting, also by a captured graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from triton_here import needs_gpu, needs_triton, torch

import convgrad
from convgrad import Problem, plan
from convgrad.backends.triton import scaled_plans
from convgrad.backends.triton.scaled_plans import factors_on, merged_axes
from convgrad.numbers import encode
from convgrad.verify import check_problem, real_operands

LAYERS = [
    "input_grad e4m3 n2 c256 k256 i28x28 w3x3 p1x1 NHWC OHWI",
    "input_grad e4m3>f32 n2 c256 k256 i28x28 w3x3 p1x1 fp8 NHWC OHWI",
    "conv e4m3>bf16 n2 c256 k256 i28x28 w3x3 p1x1 fp8 NHWC OHWI",
    "weight_grad e5m2>bf16 n2 c256 k256 i28x28 w3x3 p1x1 NHWC OHWI",
    "input_grad bf16>e4m3 n2 c64 k64 i28x28 w7x7 p3x3 g64 NHWC OHWI",
    "weight_grad+bias_grad e4m3>bf16 n2 c64 k64 i28x28 w3x3 p1x1 g64 NHWC OHWI",
    "bias_grad hif8 n8 c8 k64 i28x28 w1x1",
]
# What box lines multiply and round where they store: sums in parts, phases, rows of any length, groups, FP8 results.
MULTIPLIED = [
    "input_grad e5m2 n1 c512 k512 i7x7 w3x3 p1x1 fp8 NHWC OHWI",
    "input_grad e5m2 n4 c64 k64 i28x28 w3x3 s2x2 p1x1 NHWC OHWI",
    "conv e5m2>bf16 n4 c64 k64 i28x28 w3x3 s2x2 p1x1 NHWC OHWI",
    "input_grad e4m3 n4 c200 k64 i14x14 w3x3 p1x1 NHWC OHWI",
    "input_grad bf16>e5m2 n4 c64 k64 i14x14 w3x3 p1x1 g2 NHWC OHWI",
    "conv e4m3 n64 c64 k128 i28x28 w1x1 fp8 NHWC OHWI",
    "conv e5m2 n32 c64 k256 i28x28 w1x1 NHWC OHWI",
]


def stored(array: Any, dtype: Any) -> Any:
    return torch.from_numpy(array.view(np.uint8)).view(dtype).cuda()


def same_bits(a: Any, b: Any) -> bool:
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))


def operands_of(text: str) -> tuple[Any, Any, dict[str, Any]]:
    """e4m3 tensors of a problem and scales in one tensor, as training keeps them."""
    values = real_operands(Problem.parse(text))
    first, second = (stored(values[name], torch.float8_e4m3fn) for name in Problem.parse(text).operands)
    kept = torch.tensor([0.3, 2.5, 0.7, 1.0], device="cuda")
    return first, second, {"grad_output": kept[0], "weight": kept[1:2], "input_grad": kept[2]}


def test_axes_of_sums_and_result_are_merged_where_both_are_one_run() -> None:
    base = torch.empty(3, 4, 5, 6).permute(0, 3, 1, 2)
    assert merged_axes(base, base) == [(360, 1, 1)]
    rows = torch.empty(3, 8, 5, 6).permute(0, 3, 1, 2)[:, :, 2:6]
    assert merged_axes(base, rows) == [(3, 120, 240), (120, 1, 1)]
    gaps = torch.empty(3, 4, 5, 12)[..., ::2].permute(0, 3, 1, 2)
    assert merged_axes(base, gaps) == [(360, 1, 2)]
    turned = torch.empty(3, 6, 4, 5)
    assert merged_axes(base, turned) == [(3, 120, 120), (6, 1, 20), (20, 6, 1)]
    assert merged_axes(torch.empty(1), torch.empty(1)) == [(1, 1, 1)]


def test_a_recording_is_for_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are repeated by strides alone, and the last images of a result are fewer with the same strides."""
    seen: list[set[Any]] = []

    def noting(run: Any, problem: str) -> Any:
        shapes: set[Any] = set()
        seen.append(shapes)
        return lambda operands, results, workspace: shapes.add(results[0].shape)

    monkeypatch.setattr(scaled_plans, "recorded", noting)
    sums = scaled_plans.TritonSums(Problem.parse("input_grad e4m3>bf16 n7 c8 k4 i6x5 w3x3 p1x1 scaled"))
    result = torch.empty(7, 8, 6, 5, dtype=torch.bfloat16)
    for begin in (0, 3, 6):
        part = result[begin:begin + 3]
        sums.store(torch.empty(part.shape), part, (1.0, 2.0, 1.0))
    assert [len(shapes) for shapes in seen] == [1, 1]


def test_numbers_become_one_factor_and_tensors_stay_where_they_are() -> None:
    tensor = torch.tensor(0.3)
    (alone,), kinds = factors_on((0.5, 3.0, 4.0), "cpu")
    assert alone.item() == 0.375 and kinds == (False, False)
    found, kinds = factors_on((tensor, 1.0, 1.0), "cpu")
    assert found[0] is tensor and len(found) == 1 and kinds == (False, False)
    found, kinds = factors_on((2.0, tensor, tensor), "cpu")
    assert [value.item() for value in found] == [2.0, tensor.item(), tensor.item()]
    assert kinds == (True, True)
    found, kinds = factors_on((1.0, 1.0, tensor), "cpu")
    assert [value.item() for value in found] == [1.0, tensor.item()] and kinds == (False, True)


@needs_triton
def test_a_scale_of_its_own_for_each_step_of_two_tensors() -> None:
    """The same tensor as both scales, then two: a recorded launch must not mistake one for the other."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = Problem.parse("conv e4m3>f32 n1 c4 k4 i5 w3")
    values = real_operands(problem)
    x, w = (torch.from_numpy(values[name].view(np.uint8)).view(torch.float8_e4m3fn).to(device)
            for name in ("input", "weight"))
    if device == "cpu":
        pytest.skip("the public functions take CUDA tensors only to the GPU backend")
    plain = convgrad.conv(x, w)
    same, other = torch.tensor(2.0, device=device), torch.tensor(8.0, device=device)
    for first, second, times in ((same, same, 4), (same, other, 16), (other, same, 16), (other, other, 64)):
        assert torch.equal(convgrad.conv(x, w, scales={"input": first, "weight": second}), times * plain)


@needs_gpu
@pytest.mark.parametrize("text", LAYERS)
def test_layers(text: str) -> None:
    wrong = check_problem(Problem.parse(text).with_(device="cuda", scaled=True))
    assert wrong is None, str(wrong)


@needs_gpu
@pytest.mark.parametrize("scaled", ["", " scaled"])
@pytest.mark.parametrize("text", MULTIPLIED)
def test_box_lines_multiply_and_round(text: str, scaled: str) -> None:
    problem = Problem.parse(text + " cuda" + scaled)
    assert plan(problem).kernel.startswith("box_lines") and "+" not in plan(problem).kernel
    assert oracle.check_exact(problem, "triton", thin=False)
    assert oracle.check_bound(problem, "triton")
    assert oracle.check_nonfinite(problem, "triton")


@needs_gpu
@pytest.mark.parametrize("out_dtype", ["float32", "float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_a_captured_graph_reads_new_scales(out_dtype: str, layout: str) -> None:
    """Nothing waits for the GPU, and a replay uses the scales that are in the tensors then."""
    dy, w, scales = operands_of("input_grad e4m3 n4 c64 k64 i16x16 w3x3 p1x1")
    if layout == "NHWC":
        dy, w = (array.view(torch.uint8).to(memory_format=torch.channels_last).view(torch.float8_e4m3fn)
                 for array in (dy, w))

    def call() -> Any:
        return convgrad.input_grad(dy, w, 16, padding=1, out_dtype=out_dtype, scales=scales)

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    assert same_bits(result, first)
    scales["weight"].fill_(0.9)
    scales["input_grad"].fill_(1.3)
    graph.replay()
    wanted = convgrad.input_grad(dy, w, 16, padding=1, out_dtype=out_dtype,
                                 scales={"grad_output": 0.3, "weight": 0.9, "input_grad": 1.3})
    assert same_bits(result, wanted)
    assert not same_bits(result, first)


@needs_gpu
def test_bad_scales_on_the_gpu() -> None:
    dy, w, scales = operands_of("input_grad e4m3 n2 c8 k8 i8x8 w3x3 p1x1")
    out = torch.full((2, 8, 8, 8), 7.0, device="cuda")
    with pytest.raises(TypeError, match="all tensors must be on one device: the first operand is on cuda:0, "
                                        r"scales\['weight'\] is on cpu"):
        convgrad.input_grad(dy, w, 8, padding=1, out=out, scales={"weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"out overlaps scales\['weight'\] in memory"):
        convgrad.input_grad(dy, w, 8, padding=1, out=out, scales=scales | {"weight": out.view(-1)[5]})
    assert bool((out == 7).all())


@needs_gpu
def test_a_scale_that_is_nan_on_the_gpu_gives_nan() -> None:
    dy, w, scales = operands_of("input_grad e4m3 n2 c8 k8 i8x8 w3x3 p1x1")
    scales["weight"].fill_(float("nan"))
    for out_dtype in ("float32", "float8_e4m3fn"):
        result = convgrad.input_grad(dy, w, 8, padding=1, out_dtype=out_dtype, scales=scales)
        assert bool(result.float().isnan().all())


@needs_gpu
def test_a_result_can_be_the_next_operand() -> None:
    """Stored numbers and scale of a result go into the next call as they are."""
    values = np.random.default_rng(2).standard_normal
    x, w = (stored(encode(values(shape), "float8_e4m3fn"), torch.float8_e4m3fn)
            for shape in ((2, 16, 9, 9), (16, 16, 3, 3)))
    one, out = torch.tensor(1.0, device="cuda"), torch.tensor(0.25, device="cuda")
    hidden = convgrad.conv(x, w, scales={"weight": one, "output": out}, out_dtype="float8_e4m3fn")
    y = convgrad.conv(hidden, w, scales={"input": out, "weight": one})
    wide = convgrad.conv(hidden.double() * 0.25, w.double())
    assert bool((y.double() - wide).abs().max() <= 1e-5 * wide.abs().max())
