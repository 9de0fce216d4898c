"""Each mistake is provoked, named and explained; with the checks off the model does what the device would do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ascendc_mistakes import PROVOKED, Launch, message_of, row_for_both, small_tiling, table

from convgrad import Unsupported, ascendc

DOCS = Path(__file__).parents[2] / "docs" / "ascendc.md"


@pytest.mark.parametrize(("mistake", "what", "provoke"), PROVOKED, ids=[what for _, what, _ in PROVOKED])
def test_mistake_is_refused_with_its_reason(mistake: str, what: str, provoke: Callable[[], None]) -> None:
    found, message = message_of(provoke)
    assert found == mistake
    assert message.startswith(("Conv3DBackpropInput: ", "Conv3DBackpropFilter: "))


def test_every_mistake_of_the_list_is_provoked() -> None:
    assert {mistake for mistake, _, _ in PROVOKED} == set(ascendc.MISTAKES)


def test_documentation_shows_every_message() -> None:
    assert table() in DOCS.read_text(encoding="utf-8"), "run tests/ascendc/ascendc_mistakes.py and paste its table"


def expected() -> np.ndarray:
    run = Launch()
    run.op.Init(run.tiling)
    for piece in run.pieces():
        run.finish(run.set(piece))
        run.op.ctx.isFirstIter_ = True
    run.op.End()
    ascendc.check_coverage(run.output, run.tiling)
    return run.memory


def test_correct_calls_pass_with_and_without_checks() -> None:
    relaxed = Launch(strict=False)
    relaxed.op.Init(relaxed.tiling)
    for piece in relaxed.pieces():
        relaxed.set(piece)
        relaxed.op.IterateAll(relaxed.output[piece.offsetC])
    relaxed.op.End()
    assert relaxed.memory.tobytes() == expected().tobytes()
    assert not np.isnan(relaxed.memory).any()


def test_without_checks_a_wrong_start_row_gives_wrong_data() -> None:
    """The same calls that strict mode refuses shift the rows by one, in silence."""
    run = Launch(strict=False)
    row_for_both(run)
    wrong = run.memory[:16 * 16].reshape(2, 8, 16)
    right = expected()[:16 * 16].reshape(2, 8, 16)
    assert not np.array_equal(wrong, right)
    assert np.array_equal(wrong[0], right[1])  # row 1 was computed where row 0 belongs


def test_without_checks_a_forgotten_flag_goes_on_with_stale_counters() -> None:
    run = Launch(strict=False)
    run.finish(run.begin())
    run.set(run.piece(d=1))
    assert not run.op.Iterate()  # the counters stand behind the last block of the finished piece
    run = Launch(strict=False)
    run.finish(run.begin())
    run.set(run.piece(d=1), singleShapeN=40)
    assert run.op.Iterate()  # a piece with one more block of channels is entered there, not at (0, 0)
    assert run.op.block is not None
    assert (run.op.block.m, run.op.block.n) == (1, 2)


def test_without_checks_a_lost_block_is_lost() -> None:
    run = Launch(strict=False)
    piece = run.begin()
    run.op.Iterate()
    run.op.Iterate()
    run.op.GetTensorC(run.output[piece.offsetC])
    assert np.isnan(run.memory[:16 * 16]).all()
    assert not np.isnan(run.memory[16 * 16:16 * 16 + 8 * 16]).any()


def test_accesses_outside_memory_are_refused_in_both_modes() -> None:
    run = Launch(strict=False)
    run.begin(run.piece(d=3))
    run.op.Iterate()
    with pytest.raises(ascendc.OutOfBounds, match=r"n=0 of depth 3 writes dX elements 13824\.\..* of a buffer"):
        run.op.GetTensorC(run.output[3 * 3 * 6 * 8 * 16])  # the depth a second time
    with pytest.raises(ascendc.OutOfBounds, match="offset 9217 lies outside its 9216 elements"):
        run.output[9217]
    with pytest.raises(ascendc.OutOfBounds, match="offset -1 lies outside"):
        run.output[-1]


def test_atomic_writes_add_in_output_precision() -> None:
    run = Launch(tiling=small_tiling(initOutputFlag=1))
    run.memory[...] = 0
    run.op.Init(run.tiling)
    for _ in range(2):
        piece = run.set(run.piece())
        while run.op.Iterate():
            run.op.GetTensorC(run.output[piece.offsetC], enAtomic=1)
        run.op.ctx.isFirstIter_ = True
    once = expected()[:24 * 16]
    assert np.array_equal(run.memory[:24 * 16], once + once)


def test_reserved_arguments_are_refused() -> None:
    run = Launch()
    piece = run.begin()
    with pytest.raises(Unsupported, match="enPartialSum is reserved"):
        run.op.Iterate(enPartialSum=True)
    run.op.Iterate()
    with pytest.raises(Unsupported, match="enSequentialWrite writes nothing for dX"):
        run.op.GetTensorC(run.output[piece.offsetC], enSequentialWrite=True)


def test_with_statement_ends_the_object_but_hides_no_error() -> None:
    run = Launch()
    with run.op:
        run.finish(run.begin())
    with pytest.raises(ascendc.Misuse, match="Iterate after End"):
        run.op.Iterate()
    run = Launch()
    with pytest.raises(KeyError), run.op:
        run.begin()
        run.op.Iterate()
        raise KeyError("the caller's own")


def test_filter_sequential_write_packs_the_block() -> None:
    tiling = ascendc.find_filter_tiling((1, 20, 1, 4, 4), (1, 24, 1, 4, 4), (1, 1, 1), ascendc.half)
    tiling.dwTiling = tiling.dwTiling.with_(baseM=16, baseN=16)
    op = ascendc.Conv3DBackpropFilter(*ascendc.filter_types(ascendc.half))
    rng = np.random.default_rng(0)
    dy, x = (rng.integers(-2, 3, (1, c, 1, 4, 4)).astype(np.float16) for c in (20, 24))
    op.Init(tiling)
    op.SetSingleShape(20, 24, 16)
    op.SetStartPosition(0)
    op.SetGradOutput(ascendc.GlobalTensor(ascendc.pack_ndc1hwc0(dy)))
    op.SetInput(ascendc.GlobalTensor(ascendc.pack_ndc1hwc0(x)))
    exact = np.einsum("ohw,ihw->oi", dy[0, :, 0].astype(float), x[0, :, 0].astype(float))
    op.Iterate()
    memory = np.zeros(16 * 16, np.float32)
    op.GetTensorC(ascendc.GlobalTensor(memory), enAtomic=0, enSequentialWrite=True)
    assert np.array_equal(memory.reshape(16, 16), exact[:16, :16])


def test_filter_adds_unless_told_otherwise() -> None:
    op = ascendc.Conv3DBackpropFilter(*ascendc.filter_types(ascendc.half))
    tiling = ascendc.find_filter_tiling((1, 16, 1, 2, 2), (1, 16, 1, 2, 2), (1, 1, 1), ascendc.half)
    ones = ascendc.GlobalTensor(np.ones(2 * 2 * 16, np.float16))
    memory = np.zeros(256, np.float32)
    output = ascendc.GlobalTensor(memory)
    op.Init(tiling)
    for _ in range(3):
        op.SetSingleShape(16, 16, 4)
        op.SetStartPosition(0)
        op.SetInput(ones)
        op.SetGradOutput(ones)
        op.IterateAll(output)
    op.End()
    assert (memory == 12).all()
