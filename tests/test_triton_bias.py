"""Weight and bias gradient in one pass, groups joined into a dense problem: plans on the CPU, sums on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracle import check_bound, check_exact, check_nonfinite
from triton_here import DEVICE, channels_last, integers_and_result, integers_on_gpu, needs_gpu, needs_triton, torch

from convgrad import Problem, Unsupported
from convgrad.plan import clear_plan_cache

# a way to the weight gradient, and problems whose bias gradient it sums as well
TOGETHER = (
    ("lines", "n3 c64 k64 i9x10 w3x3 p1x1 NHWC OHWI"),
    ("lines", "n2 c128 k72 i12x9 w3x3 p1x1 NHWC OHWI"),
    ("lines", "n5 c64 k136 i17 w3 d4 p8:0 NLC OLI"),
    ("lines", "n2 c64 k64 i10x10 w3x3 p1x1 g2 NHWC OHWI"),
    ("lines", "n2 c50 k44 i9x8 w3x3 p1x1 NHWC OHWI"),
    ("lines", "n8 c96 k64 i19 w5 p2 g2 NLC OLI"),
    ("lines", "n18 c64 k72 i9 w4 p3 NLC OLI"),
    ("blocks", "n18 c64 k64 i9x11 w3x3 p1x1 g16 NHWC OHWI"),
    ("blocks", "n33 c128 k128 i14x14 w3x3 p1x1 g8 NHWC OHWI"),
    ("blocks", "n5 c64 k64 i7x9 w2x3 p1x1 g32 NHWC OHWI"),
    ("groups", "n40 c32 k64 i70 w9 s4 p4 g2 NLC OLI"),
    ("groups", "n18 c128 k96 i15x14 w3x3 s2x2 p1x1 g2 NHWC OHWI"),
    ("spans", "n3 c3 k64 i9x10x24 w3x7x7 s2x2x2 p1x3x3 NDHWC ODHWI"),
    ("spans", "n3 c4 k64 i6x9x24 w3x3x3 p1x1x1 NDHWC ODHWI"),
    ("spans", "n70 c2 k64 i9x12 w3x3 p1x1 NHWC OHWI"),
    ("wide", "n2 c4 k16 i16x16x16 w3x3x3 p1x1x1 NDHWC ODHWI"),
    ("wide", "n18 c64 k64 i9x11 w3x3 p1x1 g16 NHWC OHWI"),
    ("wide", "n4 c8 k24 i16x24 w3x3 p1x1 NHWC OHWI"),
)
JOINED = (
    "n3 c48 k48 i9x10 w1x1 g3 NHWC OHWI",
    "n2 c120 k240 i7x6 w1x1 g3 NHWC OHWI",
    "n2 c72 k96 i8x7 w1x1 s2x2 g2 NHWC OIHW",
    "n2 c72 k56 i9 w1 p1:0 g2 NLC OLI",
)


def as_if_there_were_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.backends.triton.gpu import H200, Planning

    monkeypatch.setattr(Planning, "gpu", H200)


def choices(kind: str, text: str) -> list[Any]:
    """Choices of a kernel that sums the bias gradient, too."""
    from convgrad.backends.triton.candidates import entry_for
    from convgrad.backends.triton.kernel import worth_measuring
    from convgrad.backends.triton.registry import KERNELS, query_of

    query = query_of(Problem.parse(f"weight_grad bf16 {text} cuda"))
    kernel = replace(next(kernel for kernel in KERNELS if kernel.name == kind), measured=20)
    return [entry_for(kind, tile) for tile in worth_measuring(kernel, query) if kernel.build(query, tile).bias_bytes]


@pytest.mark.parametrize(("kind", "text"), TOGETHER)
def test_the_bias_gradient_is_summed_in_the_same_pass(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.backends.triton.plans import make_plan

    as_if_there_were_a_gpu(monkeypatch)
    problem = Problem.parse(f"weight_grad+bias_grad bf16 {text} cuda")
    choice = choices(kind, text)[0]
    alone = make_plan(problem.with_(wrt="weight"), None, choice)
    both = make_plan(problem, None, choice)
    assert both.kernel == f"{alone.kernel}_bias" and alone.kernel.startswith(kind)
    assert alone.workspace_bytes < both.workspace_bytes <= 64 << 20
    with pytest.raises(Unsupported, match="one kernel each"):
        make_plan(problem, both.workspace_bytes - 4, choice)


@needs_gpu
@pytest.mark.parametrize(("kind", "text"), TOGETHER)
def test_weight_and_bias_gradient_together(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.backends.triton import tuning
    from convgrad.backends.triton.plans import make_plan

    together = f"weight_grad+bias_grad bf16 {text}"
    problem = Problem.parse(f"{together} cuda")
    twins = [make_plan(problem.with_(wrt=wrt), None, {"kernel": "plain"}) for wrt in problem.results]
    choice = choices(kind, text)[0]
    monkeypatch.setattr(tuning, "entries", lambda path: {tuning.key(problem.with_(wrt="weight")): choice})
    clear_plan_cache()
    for check in (check_exact, check_bound, check_nonfinite):
        check(together, "triton")
    operands = integers_on_gpu(problem)
    shapes = [problem.conv.shape_of(wrt) for wrt in problem.results]
    found, expected = ([torch.full(shape, math.nan, device="cuda").bfloat16() for shape in shapes] for _ in "ab")
    plan = make_plan(problem, None)
    assert plan.kernel.endswith("_bias") and plan.kernel.startswith(kind)
    plan.run(operands, tuple(found), None)
    for twin, result in zip(twins, expected):
        twin.run(operands[:len(twin.problem.operands)], (result,), None)
    assert all(map(torch.equal, found, expected))
    clear_plan_cache()


@needs_triton
@pytest.mark.parametrize("splits", [2, 11])
@pytest.mark.parametrize("kind", ["added", "collected"])
def test_parts_of_both_gradients_are_added_in_one_launch(kind: str, splits: int) -> None:
    from convgrad.backends.triton import split_k, wide_plans
    from convgrad.backends.triton.geometry import geometry

    problem = Problem.parse("weight_grad bf16 n2 c24 k40 i9x9 w3x2 NHWC OHWI")
    geo = geometry(problem.conv)
    add = split_k.add_step(geo, splits) if kind == "added" else wide_plans.collect_step(
        geo, wide_plans.Widening(1, 1, False), geo, splits, folded=False)
    generator = torch.Generator().manual_seed(1)
    parts, bias_parts = (torch.randint(-9, 9, shape, generator=generator).float().to(DEVICE)
                         for shape in ((splits, 40, 3, 2, 24), (3 * splits, 40)))
    weights, bias = torch.full((40, 24, 3, 2), math.nan, device=DEVICE), torch.full((40,), math.nan, device=DEVICE)
    add(parts, weights, bias_parts, bias)
    assert torch.equal(weights, parts.sum(0).permute(0, 3, 1, 2))
    assert torch.equal(bias, bias_parts.sum(0))


@needs_triton
@pytest.mark.parametrize("text", JOINED)
@pytest.mark.parametrize("routine", ["conv", "input_grad"])
def test_joined_weights(routine: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense problem of the joined weights has the groups' results."""
    from convgrad.backends.triton import box_line_plans, joined_plans
    from convgrad.backends.triton.registry import query_of
    from convgrad.plan import plan

    as_if_there_were_a_gpu(monkeypatch)
    monkeypatch.setattr(joined_plans, "pays", lambda query: True)
    problem, operands, expected = integers_and_result(f"{routine} bf16 {text}")
    query = query_of(problem)
    seen: list[Any] = []
    monkeypatch.setattr(box_line_plans.BoxLines, "run",
                        lambda self, source, weight, result, memory: seen.append(weight))
    prepared = joined_plans.build(query, next(iter(joined_plans.tiles(query))))
    prepared.run((None, channels_last(operands[1]).to(DEVICE)), (torch.empty(expected.shape, device=DEVICE),), None)
    weight = seen[0].cpu().double().numpy()
    dense = joined_plans.dense(problem)
    assert weight.shape == dense.conv.weight_shape
    result = np.empty(expected.shape)
    plan(dense.with_(dtype="float64", compute="f64", out_dtype="float64", device="cpu"), backend="reference").run(
        (operands[0], weight), (result,), None)
    assert np.array_equal(result, expected)


@needs_gpu
@pytest.mark.parametrize("text", JOINED)
@pytest.mark.parametrize("routine", ["conv", "input_grad"])
def test_joined_groups_on_a_gpu(routine: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.backends.triton import joined_plans
    from convgrad.backends.triton.plans import make_plan

    monkeypatch.setattr(joined_plans, "pays", lambda query: True)
    monkeypatch.setenv("CONVGRAD_GPU_WITHOUT", "cells,box_lines")
    clear_plan_cache()
    assert make_plan(Problem.parse(f"{routine} bf16 {text} cuda"), None).kernel.startswith("joined")
    for check in (check_exact, check_bound, check_nonfinite):
        check(f"{routine} bf16 {text}", "triton")
    clear_plan_cache()
