"""Tensors with channels first on the Triton backend: products of one point, and copies in pieces for all others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from oracle import check_bound, check_exact, check_nonfinite
from triton_here import DEVICE, needs_gpu, needs_triton, torch

from convgrad import Conv, Problem
from convgrad.plan import clear_plan_cache

pytestmark = needs_triton

# Problems, and how many images a piece may have: of less than one, some rows.
PIECES = (
    ("input_grad bf16 n3 c8 k8 i5x6 w3x3 p1x1", 2),
    ("input_grad bf16 n1 c8 k8 i9x4 w3x3 p1x1", 0.5),
    ("input_grad bf16 n2 c8 k8 i9x8 w3x3 s2x2 p1x1", 0.6),
    ("input_grad f16 n1 c4 k4 i5x3x2 w3x2x1 p1x0x0", 0.5),
    ("input_grad bf16 n2 c8 k8 i17 w3 d4 p8:0", 0.7),
    ("input_grad bf16 n2 c8 k8 i9x7 w3x3 p3x3 d3x2 g2", 1),
    ("input_grad bf16 n1 c8 k8 i9x6 w1x1 s3x3", 0.4),
    ("input_grad bf16 n2 c9 k10 i4x3 w2x2 p1x1", 9),
    ("input_grad bf16 n1 c3 k8 i12x5 w5x5 s2x2 p2x2", 0.5),
    ("conv bf16 n3 c8 k8 i5x6 w3x3 p1x1", 1),
    ("conv bf16 n1 c8 k8 i11x4 w4x4 s2x2 p1x1", 0.5),
    ("weight_grad bf16 n5 c8 k16 i5x6 w3x3 p1x1", 1),
    ("weight_grad bf16 n1 c16 k8 i9x6 w3x3 s2x2 p1x1", 0.3),
    ("weight_grad f16 n1 c8 k8 i7x3x4 w3x2x3 p1x0x1", 0.4),
    ("weight_grad bf16 n2 c8 k8 i17 w3 d4 p8:0", 0.6),
    ("weight_grad bf16 n2 c8 k8 i9x7 w3x3 p3x3 d3x2 g2", 1),
    ("weight_grad bf16 n2 c9 k10 i6x5 w3x3 p1x1", 9),
)


@pytest.fixture(autouse=True)
def _always_copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small problems are not worth copies: take them nevertheless."""
    from convgrad.backends.triton import copied_plans

    monkeypatch.setattr(copied_plans, "pointer_seconds", lambda query: math.inf)
    clear_plan_cache()
    yield
    clear_plan_cache()


def planned(text: str, limit: int | None = None) -> Any:
    from convgrad.backends.triton.plans import make_plan

    return make_plan(Problem.parse(f"{text} cuda"), limit)


@pytest.mark.parametrize(("text", "images"), PIECES)
def test_pieces_give_the_whole(text: str, images: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole problems, some images, and some rows of an image at a time."""
    from convgrad.backends.triton import copied_plans

    conv = Problem.parse(text).conv
    image = 2 * (math.prod(conv.input_shape[1:]) + math.prod(conv.output_shape[1:]))
    monkeypatch.setattr(copied_plans, "PREFERRED_BYTES", int(images * image))
    plan = planned(text)
    assert plan.kernel.startswith("copied")
    assert plan.notes[0].startswith("tile: 1 pieces") == (images > conv.batch)
    assert check_exact(text, "triton")
    if images < 1:  # where a piece's padding is not the problem's
        assert check_nonfinite(text, "triton")


@needs_gpu
@pytest.mark.parametrize("text", ["input_grad bf16 n2 c64 k64 i19x40 w3x3 p1x1",
                                  "conv f16 n3 c64 k48 i80x70 w3x3 s2x2 p1x1",
                                  "input_grad bf16 n2 c64 k128 i8x6x33 w3x3x3 p1x1x1",
                                  "input_grad f16 n2 c64 k48 i147 w3 d4 p8:0"])
def test_results_go_to_their_place_at_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.backends.triton import copied_plans

    source = Problem.parse(text).shape_of_operand("grad_output" if text.startswith("input") else "input")
    monkeypatch.setattr(copied_plans, "PREFERRED_BYTES", math.prod(source[1:]))  # half an image
    assert "at once to their place" in planned(text).notes[0]
    assert check_exact(text, "triton") and check_bound(text, "triton") and check_nonfinite(text, "triton")


@pytest.mark.parametrize("text", ["input_grad e4m3>f32 n1 c8 k8 i4x5 w3x3 p1x1",
                                  "weight_grad hif8>bf16 n1 c8 k8 i4x5 w2x2", "input_grad f16 n1 c8 k16 i4x5 w2x2"])
def test_number_formats(text: str) -> None:
    assert planned(text).kernel.startswith("copied")
    assert check_exact(text, "triton") and check_bound(text, "triton")


@pytest.mark.parametrize("style", ["offset", "gaps"])
@pytest.mark.parametrize("question", ["input_grad", "weight_grad"])
@pytest.mark.parametrize("layout", ["NCHW OIHW", "NHWC OHWI", "CNHW IOHW"])
def test_tensors_with_gaps(layout: str, question: str, style: str) -> None:
    assert check_exact(f"{question} bf16 n1 c8 k8 i4x5 w3x3 p1x1 {layout}", "triton", style=style)


def test_the_workspace_limit_is_kept() -> None:
    for question in ("input_grad", "weight_grad"):
        text = f"{question} bf16 n4 c16 k16 i8x8 w2x2"
        for limit in (0, 500, 12_000):
            assert planned(text, limit).workspace_bytes <= limit
        assert "copied" in planned(text, 12_000).kernel
        assert any("not copied: no tile fits" in note for note in planned(text, 500).notes)
        assert check_exact(text, "triton", max_workspace_bytes=12_000)


@pytest.mark.parametrize("orders", list(product(("first", "last"), repeat=2)))
@pytest.mark.parametrize("question", ["input_grad", "weight_grad"])
def test_operands_may_lie_in_different_orders(question: str, orders: tuple[str, str]) -> None:
    """One plan, whatever the tensors' orders: the same bits."""
    plan = planned(f"{question} bf16 n1 c8 k8 i3x4 w2x2")
    problem = plan.problem
    generator = torch.Generator().manual_seed(1)
    canonical = [torch.randint(-3, 4, problem.shape_of_operand(name), generator=generator).to(torch.bfloat16).to(DEVICE)
                 for name in problem.operands]
    shape = problem.conv.shape_of(problem.wrt)
    wanted = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    plan.run(tuple(canonical), (wanted,), None)
    formats = {"first": torch.contiguous_format, "last": torch.channels_last}
    for kept in (torch.contiguous_format, torch.channels_last):
        result = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE, memory_format=kept)
        plan.run(tuple(tensor.contiguous(memory_format=formats[order]) for tensor, order in zip(canonical, orders)),
                 (result,), None)
        assert torch.equal(result, wanted)


def test_tuning_measures_copies() -> None:
    from convgrad.backends.triton.candidates import candidates
    from convgrad.backends.triton.plans import make_plan

    problem = Problem.parse("weight_grad bf16 n2 c8 k8 i5x6 w3x3 p1x1 cuda")
    choice = candidates(problem)[0]
    assert choice == {"kernel": "copied"} and make_plan(problem, None, choice).kernel.startswith("copied")
    assert choice not in candidates(problem.with_(layout="NHWC"))


def test_pieces_cover_the_problem() -> None:
    """Every row of the result is in one piece, and every pair that a window links is in the piece of the result."""
    from convgrad.backends.triton.pieces import pieces_of

    for size, kernel, stride, dilation, low, high in product((7, 12), (1, 2, 3, 5), (1, 2, 3), (1, 2), (0, 1, 3),
                                                             (0, 2)):
        conv = Conv(1, 1, 1, (size,), (kernel,), (stride,), (dilation,), ((low, high),))
        if conv.out_size[0] == 0:
            continue
        links = {(i, o, k) for o in range(conv.out_size[0]) for k in range(kernel)
                 if 0 <= (i := o * stride + k * dilation - low) < size}
        for is_input, rows in product((True, False), (stride, 2 * stride, 4 * stride)):
            pieces = pieces_of(conv, is_input, 0, 1, rows)
            if not pieces:
                continue
            seen = []
            for piece in pieces:
                part = piece.conv
                seen += [(i + piece.x_row, o + piece.y_row, k) for o in range(part.out_size[0]) for k in range(kernel)
                         if 0 <= (i := o * stride + k * dilation - part.padding[0][0]) < part.in_size[0]]
            assert len(seen) == len(links) and set(seen) == links, (conv, is_input, rows)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", [(2, 70, 9, 11), (3, 5, 200), (1, 130, 3, 4, 5), (2, 1, 8, 8), (2, 64, 1, 1)])
def test_copies_are_exact(shape: tuple[int, ...], size: int) -> None:
    from convgrad.backends.triton.copied_plans import AS_INTEGERS, copy_all

    first = torch.arange(torch.Size(shape).numel(), device=DEVICE).to(AS_INTEGERS[size]).view(shape)
    last = torch.zeros_like(first).movedim(1, -1).contiguous().movedim(-1, 1)
    again, rows = torch.zeros_like(first), torch.zeros_like(first)
    copy_all([(first, last)])
    assert torch.equal(first, last)
    copy_all([(last, again), (first.narrow(2, 0, shape[2] // 2 + 1), rows.narrow(2, 0, shape[2] // 2 + 1))])
    assert torch.equal(first, again) and torch.equal(rows.narrow(2, 0, shape[2] // 2 + 1),
                                                     first.narrow(2, 0, shape[2] // 2 + 1))
    assert not rows.narrow(2, shape[2] // 2 + 1, shape[2] - shape[2] // 2 - 1).any()


@pytest.mark.parametrize("text", ["input_grad bf16 n2 c24 k40 i5x7 w1x1", "conv f16 n2 c40 k24 i3x4x2 w1x1x1",
                                  "weight_grad bf16 n3 c24 k40 i5x16 w1x1", "weight_grad bf16>f32 n2 c70 k66 i15 w1",
                                  "input_grad bf16 n1 c16 k130 i8x8 w1x1 NCHW IOHW"])
def test_products_of_one_point(text: str) -> None:
    assert planned(text).kernel.startswith("points")
    assert check_exact(text, "triton") and check_bound(text, "triton") and check_nonfinite(text, "triton")
    assert check_exact(text, "triton", style="gaps")
    if "weight" in text:
        assert check_exact(text, "triton", max_workspace_bytes=0)
