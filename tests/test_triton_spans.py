"""Weight gradients of few channels by spans of rows: the walk over lines on the CPU, the kernel on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracle import check_bound, check_exact, check_nonfinite
from triton_here import channels_last, integers_and_result, needs_gpu, needs_interpreter, torch

from convgrad import Problem
from convgrad.plan import clear_plan_cache

GEOMETRIES = (
    "n3 c3 k64 i5x9x24 w3x7x7 s2x2x2 p1x3x3 NDHWC ODHWI",
    "n70 c3 k64 i9x24 w7x7 s2x2 p3x3 NHWC OHWI",
    "n2 c16 k16 i9x10x8 w3x5x5 p1x2x2 NDHWC ODHWI",
    "n5 c4 k16 i4x9x10 w3x3x3 p1x1x1 NDHWC ODHWI",
    "n2 c32 k4 i5x6x10 w3x3x3 p1x1x1 NDHWC ODHWI",
    "n2 c1 k32 i5x6x16 w3x3x3 p1:0x1x2:1 NDHWC ODHWI",
    "n2 c3 k8 i3x9x32 w3x7x7 s1x2x2 p1x3x3 NDHWC ODHWI",
    "n2 c1 k64 i6x18x16 w3x3x3 s2x2x2 p1x1x1 NDHWC ODHWI",
    "n3 c8 k64 i6x7 w2x4 NHWC OHWI",
)


def some_tiles(text: str) -> list[Any]:
    """Tiles of different kinds for a problem, in two runs, some in two segments."""
    from convgrad.backends.triton import span_plans
    from convgrad.backends.triton.geometry import geometry
    from convgrad.backends.triton.gpu import H200

    problem = Problem.parse(f"weight_grad bf16 {text} cuda")
    geo = geometry(problem.conv)
    assert span_plans.supports(problem, geo) is None
    kinds = {(tile.swapped, tile.fold, tile.BN, tile.NT0, tile.x_slots): tile
             for tile in span_plans.all_spans(geo, None, H200)}
    found = [replace(tile, splits=2, segments=1 + number % 2) for number, tile in enumerate(kinds.values())]
    return found[::-(-len(found) // 2)]


def copied(box: Any, tensor: Any, start: tuple[int, ...]) -> Any:
    """What one copy brings, as a matrix of places and elements; zeros beside the tensor."""
    assert start[-1] % 8 == 0, "the copy engine reads from multiples of 16 bytes"
    size = (*box.box[:-1], box.block_shape[-1])
    at = [first + step * np.arange(count) for first, step, count in zip(start, box.steps, size)]
    brought = tensor[np.ix_(*(np.clip(index, 0, extent - 1) for index, extent in zip(at, tensor.shape)))]
    for axis, (index, extent) in enumerate(zip(at, tensor.shape)):
        brought = np.moveaxis(np.moveaxis(brought, axis, -1) * ((index >= 0) & (index < extent)), -1, axis)
    return brought.reshape(-1, size[-1])


def all_come(begins: list[bool], slots: int, drain: bool) -> bool:
    """Whether all lines are copied and multiplied; each says whether a unit begins with it.

    A line is given back when the next one has come, from which the first operand is loaded meanwhile.
    """
    copied_lines = given_back = 0
    for _ in range(2 * len(begins)):
        if copied_lines < len(begins) and copied_lines - given_back < slots and not (
                drain and begins[copied_lines] and given_back < copied_lines):
            copied_lines += 1
        following = given_back + 1
        if given_back < copied_lines and (
                following >= len(begins) or following < copied_lines or (drain and begins[following])):
            given_back += 1
    return given_back == len(begins)


def walk(spans: Any, dy: Any, x: Any, partial: Any) -> None:
    """The sums of weight_spans.py in NumPy, from the launch that the plan describes."""
    from convgrad.backends.triton.span_plans import span_views

    views = span_views(*((x, dy) if spans.tile.swapped else (dy, x)))
    launch = spans.step.describe(*views, partial)
    names = spans.step.kernel.arg_names[6:6 + len(launch.scalars)]
    v = {**dict(zip(names, launch.scalars)), **launch.constants}
    dy_box, x_box, *_ = launch.leading(*views, partial)
    rows_of_dy, rows_of_x = (box.base.as_strided(box.shape, box.strides).float().numpy() for box in (dy_box, x_box))
    positions, fold, step = v["POSITIONS"], v["FOLD"], v["T2"] * v["CG"]
    parts, window = positions // fold, v["K2"] * v["CG"]
    count = -(-v["K0"] // v["NT0"]) * parts * v["COLUMN_TILES"]
    assert launch.grid[0] == count * v["runs"] and positions * step % 8 == 0
    out = partial.view(v["runs"], parts, v["COLUMN_TILES"], v["KG"], v["K0"], v["K1"], window).numpy()
    live = 0
    for pid in range(launch.grid[0]):
        tile, run = pid % count, pid // count
        tap, part, column = tile // (v["COLUMN_TILES"] * parts) * v["NT0"], tile // v["COLUMN_TILES"] % parts, \
            tile % v["COLUMN_TILES"]
        position = part * fold - v["SHIFT"]
        begin, before = divmod(position * step - v["P2"] * v["CG"], 8)
        begin *= 8
        sums = np.zeros((v["NT0"], v["K1"], fold * v["KG"], v["BN"]))
        slots: list[list[int]] = []  # of x, that each line needs, counted on without an end
        filled, begins = 0, []
        for unit in range(run, v["units"], v["runs"]):
            rest, cell = divmod(unit, v["cells"])
            segment, rest = divmod(rest, v["boxes_0"] * v["boxes_n"])
            n, q0 = rest // v["boxes_0"] * v["PN"], rest % v["boxes_0"] * v["B0"]
            if v["DRAIN"]:
                slots = []
            for q1 in range(segment * v["rows"], min((segment + 1) * v["rows"], v["Q1"])):
                begins.append(q1 == segment * v["rows"])
                fresh = v["K1"] if begins[-1] else v["T1"]
                filled += fresh
                slots = [*slots[-v["YS"] + 1:], list(range(filled - v["K1"], filled))]
                live = max(live, filled - slots[0][0])
                a = copied(dy_box, rows_of_dy, (n, q0, q1, 0, (cell * positions + position) * v["KG"]))
                for p in range(v["NT0"]):
                    for t in range(v["K1"]):
                        start = (n, q0 * v["T0"] + tap + p - v["P0"], q1 * v["T1"] + t - v["P1"], 0,
                                 cell * positions * step + begin + column * v["BN"])
                        sums[p, t] += a.T @ copied(x_box, rows_of_x, start)
        assert all_come(begins, v["YS"], v["DRAIN"]), "copies and products wait for each other"
        out[run, part, column, :, tap:tap + v["NT0"]] = 0
        taps = min(v["NT0"], v["K0"] - tap)
        for f in range(fold):
            for element in range(v["BN"]):
                w = column * v["BN"] + element - before - f * step
                if 0 <= w < window:
                    out[run, part, column, :, tap:tap + taps, :, w] += sums[
                        :taps, :, f * v["KG"]:(f + 1) * v["KG"], element].transpose(2, 0, 1)
    assert live <= v["XS"], "a slot is filled before its row was multiplied"


@needs_interpreter
@pytest.mark.parametrize("text", GEOMETRIES)
def test_spans_cover_every_product_once(text: str) -> None:
    from convgrad.backends.triton import span_plans
    from convgrad.backends.triton.geometry import geometry

    problem, operands, expected = integers_and_result(f"weight_grad bf16 {text}")
    dy, x = map(channels_last, operands)
    for tile in some_tiles(text):
        spans = span_plans.span_plan(geometry(problem.conv), tile)
        partial = torch.full(spans.shape, float("nan"))
        walk(spans, dy, x, partial)
        result = torch.empty(expected.shape)
        spans.collect(partial, result)
        assert np.array_equal(result.double().numpy(), expected), tile


@needs_interpreter
def test_spans_are_left_alone_where_they_do_not_lie_without_gaps() -> None:
    from convgrad.backends.triton.gpu import H200
    from convgrad.backends.triton.registry import query_of
    from convgrad.backends.triton.span_plans import accepts

    text = GEOMETRIES[1]
    problem = Problem.parse(f"weight_grad bf16 {text} cuda")
    query = query_of(problem, gpu=H200)
    dy, x = (torch.zeros(shape[0], *shape[2:], shape[1], dtype=torch.bfloat16).permute(0, 3, 1, 2)
             for shape in map(problem.shape_of_operand, problem.operands))
    assert accepts(replace(query, operands=(dy, x))) is None
    assert accepts(replace(query, operands=(dy.contiguous(), x))) is not None
    gaps = torch.zeros(70, 11, 24, 4, dtype=torch.bfloat16).permute(0, 3, 1, 2)[:, :3]
    assert accepts(replace(query, operands=(dy, gaps))) is not None


@needs_gpu
@pytest.mark.parametrize("text", GEOMETRIES)
def test_spans_agree_with_their_plain_twin(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.backends.triton import tuning
    from convgrad.backends.triton.candidates import entry_for
    from convgrad.backends.triton.plans import make_plan

    problem, operands, expected = integers_and_result(f"weight_grad bf16 {text}")
    problem = problem.with_(device="cuda")
    tensors = tuple(channels_last(operand).cuda() for operand in operands)
    wanted = torch.from_numpy(expected).bfloat16()
    kinds = [entry_for("spans", tile) for tile in some_tiles(text)]
    for choice in kinds:
        result = torch.full(expected.shape, float("nan"), device="cuda").bfloat16()
        plan = make_plan(problem, None, choice)
        assert plan.kernel.startswith("spans")
        plan.run(tensors, (result,), None)
        assert torch.equal(result.cpu(), wanted), choice
    monkeypatch.setattr(tuning, "entries", lambda path: {tuning.key(problem): kinds[0]})
    clear_plan_cache()
    for check in (check_exact, check_bound, check_nonfinite):
        check(f"weight_grad bf16 {text}", "triton")
    clear_plan_cache()
