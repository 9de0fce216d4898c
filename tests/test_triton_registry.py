"""The registry: who may serve which card, why others were not chosen, and tiles that count on one card only."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from convgrad import Problem, Unsupported, plan
from convgrad.backends.triton import gpu as gpu_module
from convgrad.backends.triton.gpu import H200, Gpu, current_gpu, needs_hopper
from convgrad.backends.triton.kernel import choose, worth_measuring
from convgrad.backends.triton.plans import make_plan
from convgrad.backends.triton.registry import KERNELS, query_of

AMPERE = replace(H200, name="NVIDIA A100", capability=(8, 0), multiprocessors=108, shared_bytes=164 * 1024)
LAYERS = (
    "input_grad bf16 n32 c64 k64 i56x56 w3x3 p1x1 NHWC OHWI cuda",
    "weight_grad bf16 n32 c3 k64 i64x64 w7x7 s2x2 NHWC OHWI cuda",
    "weight_grad bf16 n32 c128 k128 i28x28 w3x3 p1x1 g32 NHWC OHWI cuda",
    "input_grad f32 n8 c32 k32 i28x28 w3x3 p1x1 g32 NHWC OHWI cuda",
    "weight_grad f32 n32 c64 k64 i56x56 w3x3 p1x1 cuda",
    "input_grad bf16 n8 c64 k64 i14x14 w3x3 p1x1 cuda",
    "weight_grad e4m3>f32 n8 c64 k64 i14x14 w3x3 p1x1 NHWC OHWI cuda",
    "bias_grad bf16 n8 c64 k64 i14x14 w3x3 cuda",
)


def test_names_are_one_kernel_each() -> None:
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)


@pytest.mark.parametrize("text", LAYERS)
def test_cards_that_are_not_hopper_get_kernels_for_any_card(text: str) -> None:
    query = query_of(Problem.parse(text), gpu=AMPERE)
    choice = choose(query)
    assert choice is not None and choice.kernel.requires(AMPERE) is None
    refused = [reason for reason in choice.reasons.values() if "Hopper" in reason]
    assert refused or choice.kernel.name == "bias"
    assert all("NVIDIA A100 has 8.0" in reason for reason in refused)


@pytest.mark.parametrize("text", LAYERS)
def test_every_kernel_is_chosen_or_says_why_not(text: str) -> None:
    choice = choose(query_of(Problem.parse(text), gpu=H200, tuned=False))
    assert choice is not None
    assert {choice.kernel.name, *choice.reasons} == {kernel.name for kernel in KERNELS}
    assert all(choice.reasons.values())


def test_another_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module.triton, "__version__", "3.9.1")
    assert needs_hopper(H200) == "needs Triton 3.6.x, which it was tested with, and this is 3.9.1"


def test_measured_tiles_count_on_their_card() -> None:
    query = query_of(Problem.parse("input_grad bf16 n256 c64 k64 i56x56 w3x3 p1x1 NHWC OHWI cuda"), gpu=H200)
    there, other = choose(query), choose(replace(query, gpu=replace(H200, name="NVIDIA H100")))
    assert there is not None and "h200.json" in there.source
    assert other is not None and other.source.startswith("cost model") and other.kernel.name == "box_lines"


def test_facts_travel_as_text() -> None:
    assert Gpu.parse(AMPERE.text()) == AMPERE


def test_explain_names_the_card_and_the_others() -> None:
    notes = make_plan(Problem.parse("input_grad bf16 n2 c24 k24 i9x9 w3x3 p1x1 NHWC OHWI cuda"), None).notes
    assert any(note.endswith(f"on {current_gpu().name}") for note in notes)
    assert any(note.startswith("not points: ") for note in notes)


def test_tiles_worth_measuring_are_of_different_kinds() -> None:
    query = query_of(Problem.parse(LAYERS[0]), gpu=H200)
    kernel = next(kernel for kernel in KERNELS if kernel.name == "box_lines")
    found = worth_measuring(kernel, query)
    assert 2 <= len(found) <= kernel.measured
    assert len({kernel.kind(query, tile) for tile in found}) == len(found)
    assert [tile.seconds for tile in found] == sorted(tile.seconds for tile in found)


def test_kernels_that_round_to_fp8_do_not_take_hifloat8() -> None:
    """Box lines stored HiFloat8 results as FP8 once: the format of an 8-bit result was not asked for."""
    for dtype in ("float8_e4m3fn", "hifloat8"):
        problem = Problem.parse("input_grad f16 n2 c32 k48 i28x7 w5x5 p2x2 NHWC cuda").with_(out_dtype=dtype)
        choice = choose(query_of(problem, gpu=H200))
        assert choice is not None and (choice.kernel.name == "box_lines") == (dtype == "float8_e4m3fn")


@pytest.mark.parametrize("text", ["input_grad f32 n1 c2 k2 i5 w3 p1 g2 cuda",
                                  "weight_grad bf16 n1 c9 k9 i16 w3 g9 cuda",
                                  "input_grad+weight_grad f32 n1 c2 k2 i5 w3 p1 g2 cuda"])
def test_a_refusal_names_the_workspace_that_is_missing(text: str) -> None:
    with pytest.raises(Unsupported, match=r"needs a workspace of \d+ bytes, but max_workspace_bytes=1"):
        plan(Problem.parse(text), backend="triton", max_workspace_bytes=1)
