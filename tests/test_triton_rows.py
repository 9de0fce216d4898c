"""Weight gradients by FP8 products: rows of pixels, who sums them, the plain twin in the interpreter, all on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from oracle import check_bound, check_exact, check_nonfinite
from triton_here import ON_GPU, needs_gpu, needs_triton

from convgrad import Problem, plan
from convgrad.plan import clear_plan_cache

# Lines and planes in a row, taps and phases of the last axis, parts of images as images; images that are no multiple of
# those side by side.
GEOMETRIES = (
    ("n3 c64 k80 i3x5 w3x2 p1x1", 2, False, 1), ("n3 c64 k80 i3x5 w2x3 p1x1", 16, True, 1),
    ("n3 c64 k64 i5x6 w2x3 s2x2 p1x2 d1x2", 16, False, 1), ("n2 c64 k64 i4x9 w2x3 s1x2 p0x1 d2x1", 16, True, 1),
    ("n2 c64 k64 i4x8 w3x2 s3x4", 2, False, 1), ("n3 c64 k64 i3x2x3 w2x1x3 s2x1x1 p1x0x1", 2, True, 1),
    ("n2 c64 k64 i70 w4 s3 p7:1 d2", 2, False, 1), ("n5 c80 k64 i3x4 w1x1", 5, True, 1),
    ("n2 c64 k64 i5x4 w3x2 p1x1", 16, False, 2), ("n1 c64 k64 i9x5 w2x3 s2x1 p1x1 d2x1", 16, False, 2),
)
LAYOUTS = {1: "NLC OLI", 2: "NHWC OHWI", 3: "NDHWC ODHWI"}


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Lets plans have one tile of rows; counts the calls that were computed by it."""
    from convgrad.backends.triton import row_plans

    runs: list[Any] = []
    write = row_plans.RowPlan.write

    def counted(self: Any, *given: Any) -> None:
        runs.append(self)
        write(self, *given)

    def choose(tile: Any) -> list[Any]:
        monkeypatch.setattr(row_plans, "choose", lambda geo, limit: tile)
        monkeypatch.setattr(row_plans.RowPlan, "write", counted)
        monkeypatch.setattr(row_plans, "take", lambda dy, x: ON_GPU is False or row_plans.channels_last(dy))
        return runs

    clear_plan_cache()
    row_plans.for_problem.cache_clear()
    yield choose
    row_plans.for_problem.cache_clear()
    clear_plan_cache()


@needs_triton
@pytest.mark.parametrize(("text", "images", "plane", "cuts"), GEOMETRIES)
def test_rows_of_pixels(text: str, images: int, plane: bool, cuts: int, only: Any,
                        monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.backends.triton import row_schedule
    from convgrad.backends.triton.row_plans import RowTile, schedule_of

    schedule_of.cache_clear()
    text = f"{text} fp8 {LAYOUTS[text.split('i')[1].split(' ')[0].count('x') + 1]}"
    runs = only(RowTile(images, plane, 64, 64, 7, 1e-6, cuts))
    monkeypatch.setattr(row_schedule, "SHORTEST", 1)
    assert plan(Problem.parse(f"weight_grad e4m3>f32 {text}{' cuda' if ON_GPU else ''}"), backend="triton").kernel == \
        "rows_e4m3_64x64_7"
    assert check_exact(f"weight_grad e4m3>f32 {text}", "triton")
    assert check_bound(f"weight_grad e5m2>bf16 {text}", "triton", positive=True)
    assert check_nonfinite(f"weight_grad e5m2>f32 {text}", "triton")
    assert len(runs) == 3 and runs[0].rows.fits and all(run.schedule.slots or max(run.rows.steps) < 6 for run in runs)
    schedule_of.cache_clear()


@needs_gpu
@pytest.mark.parametrize(("bk", "cb"), [(128, 256), (128, 128), (64, 256)])
@pytest.mark.parametrize("text", ["n16 c320 k192 i17x19 w3x3 p1x1", "n3 c256 k128 i40x33 w3x3 s2x2 p1x1"])
def test_tiles_of_rows(text: str, bk: int, cb: int, only: Any) -> None:
    from convgrad.backends.triton.row_plans import RowTile

    runs = only(RowTile(4, False, bk, cb, 132, 1e-6))
    for data in (check_exact, check_bound, check_nonfinite):
        assert data(f"weight_grad e4m3>f32 {text} fp8 NHWC OHWI", "triton")
    assert runs  # one plan serves all three


@pytest.mark.parametrize("programs", [1, 7, 132])
@pytest.mark.parametrize("steps", [[5] * 18, [100] * 18, [40, 30, 30] * 48, [0, 3, 0, 1000, 17], [1] * 300])
def test_programs_share_all_steps(steps: list[int], programs: int) -> None:
    """Every step once; tiles that are shared have slots that follow each other in the order of their steps."""
    from convgrad.backends.triton.row_schedule import SHORTEST, TO_RESULT, even_shares

    schedule = even_shares(steps, programs)
    assert len(schedule.programs) <= programs
    parts: dict[int, list[Any]] = {}
    for program in schedule.programs:
        for segment in program:
            parts.setdefault(segment.tile, []).append(segment)
    for tile, count in enumerate(steps):
        pieces = sorted(parts[tile], key=lambda segment: segment.begin)
        assert [piece.begin for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
        assert pieces[-1].end == count
    shared = {tile: (first, many) for tile, first, many in schedule.shared}
    assert sorted(slot for first, many in shared.values() for slot in range(first, first + many)) == \
        list(range(schedule.slots))
    for tile, pieces in parts.items():
        first, many = shared.get(tile, (TO_RESULT, 1))
        assert [piece.slot for piece in sorted(pieces, key=lambda segment: segment.begin)] == \
            list(range(first, first + many))
    most = max(sum(segment.end - segment.begin for segment in program) for program in schedule.programs)
    assert most <= -(-sum(steps) // programs) + 2 * SHORTEST
    assert len(schedule.table()) == 4 * schedule.segments * len(schedule.programs)


@pytest.mark.parametrize("text", ["n256 c256 k256 i14x14 w3x3 p1x1 fp8 NHWC OHWI",
                                  "n1 c512 k512 i512x512 w3x3 p1x1 fp8 NHWC OHWI"])
@pytest.mark.parametrize("limit", [None, 40 << 20])
def test_rows_stay_within_the_workspace(text: str, limit: int | None) -> None:
    from convgrad.backends.triton.plans import make_plan

    chosen = make_plan(Problem.parse(f"weight_grad e4m3>bf16 {text} cuda"), limit)
    assert chosen.kernel.startswith(("rows_e4m3", "pieces_rows_e4m3"))
    assert chosen.workspace_bytes <= (limit or 64 << 20)


def test_rows_are_for_the_mode_alone() -> None:
    from convgrad.backends.triton import row_plans
    from convgrad.backends.triton.geometry import geometry

    for text, fits in (("e4m3>f32 n8 c64 k64 i14 w3 fp8 NLC OLI", True), ("e4m3>f32 n8 c64 k64 i14 w3 NLC OLI", False),
                       ("e4m3 n8 c64 k64 i14 w3 fp8 NLC OLI", False), ("e4m3>f32 n8 c64 k64 i14 w3 fp8", False),
                       ("e4m3>f32 n8 c128 k128 i14 w3 g2 fp8 NLC OLI", False),
                       ("e4m3>f32 n8 c72 k64 i14 w3 fp8 NLC OLI", False)):
        problem = Problem.parse(f"weight_grad {text}")
        assert row_plans.fits(problem, geometry(problem.conv)) is fits
