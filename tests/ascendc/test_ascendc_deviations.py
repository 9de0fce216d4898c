"""Each known deviation is what the list says it is; the list and these tests cover each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ascendc_deviations import deviations, table
from ascendc_mistakes import Launch, row_for_both, small_tiling

import convgrad
from convgrad import ascendc

DOCS = Path(__file__).parents[2] / "docs" / "ascendc.md"


def host(**changes: Any) -> ascendc.Conv3DBpInputTiling:
    return ascendc.describe((1, 16, 1, 6, 6), (16, 16, 1, 3, 3), ascendc.half, input_size=(1, 8, 8), **changes)


def test_list_and_tests_cover_each_other() -> None:
    ids = {entry["id"] for entry in deviations()}
    tested = {name.removeprefix("test_deviation_") for name in globals() if name.startswith("test_deviation_")}
    assert ids == tested


def test_documentation_shows_the_list() -> None:
    assert table() in DOCS.read_text(encoding="utf-8"), "run tests/ascendc/ascendc_deviations.py and paste its table"


def test_deviation_strict_checks() -> None:
    with pytest.raises(ascendc.Misuse):
        row_for_both(Launch())
    row_for_both(Launch(strict=False))


def test_deviation_accesses_outside_memory() -> None:
    run = Launch(strict=False)
    run.grad_output = ascendc.GlobalTensor(np.ones(100, np.float16))
    run.begin()
    with pytest.raises(ascendc.OutOfBounds, match=r"reads dY elements 0\.\.\d+ of a buffer of 100 elements"):
        run.op.Iterate()


def test_deviation_own_tile_search() -> None:
    published = ascendc.describe((1, 256, 9, 128, 128), (256, 128, 3, 3, 3), ascendc.half, input_size=(11, 128, 128),
                                 padding=(0, 1, 1))
    t = ascendc.find_tiling(published)
    assert (t.baseM, t.baseK, t.baseN) != (256, 48, 128)
    assert t.problems() == [] and t.with_(baseM=256, baseK=48, baseN=128, stepKa=21, stepKb=3).problems() == []


def test_deviation_platform_sizes() -> None:
    small = ascendc.PlatformInfo("Ascend910B", l0CSize=2048)
    t = ascendc.find_tiling(host(platform=small))
    assert t.baseM * t.baseN * 4 <= 2048
    with pytest.raises(convgrad.Unsupported, match="does not exist on Ascend950"):
        ascendc.find_tiling(host(platform=ascendc.PlatformInfo.of("Ascend950")))


def test_deviation_types_on_the_host() -> None:
    mixed = host()
    mixed.SetGradOutputType(ascendc.TPosition.GM, ascendc.ConvFormat.NDC1HWC0, ascendc.ConvDtype.BF16)
    assert mixed.GetTiling(ascendc.TConv3DBackpropInputTiling()) == -1
    assert mixed.explain() == "the types differ: weight FLOAT16, input FLOAT16, grad_output BF16"


def test_deviation_extents_on_the_host() -> None:
    empty = ascendc.Conv3DBpInputTiling()
    assert empty.GetTiling(ascendc.TConv3DBackpropInputTiling()) == -1
    assert "the batch was not given or is not positive: 0" in empty.explain()


def test_deviation_output_padding_and_input_shape() -> None:
    both = ascendc.Conv3DBpInputTiling()
    assert both.SetOutputPadding(0, 0, 0)
    assert both.SetInputShape(1, 16, 1, 8, 8)
    assert both.GetTiling(ascendc.TConv3DBackpropInputTiling()) == -1
    assert "were both called" in both.explain()


def test_deviation_host_object_reuse() -> None:
    reused, t = host(stride=1), ascendc.TConv3DBackpropInputTiling()
    reused.SetStride(1, 4, 1)
    reused.SetGradOutputShape(1, 16, 1, 2, 6)
    assert reused.GetTiling(t) == 0 and t.initOutputFlag == 1
    reused.SetStride(1, 1, 1)
    reused.SetGradOutputShape(1, 16, 1, 6, 6)
    assert reused.GetTiling(t) == 0 and t.initOutputFlag == 0


def test_deviation_hand_made_tiles() -> None:
    run = Launch(tiling=small_tiling(baseM=32, baseN=32))
    run.finish(run.begin())
    with pytest.raises(ascendc.Misuse, match="baseM=33 is not a multiple of 16"):
        Launch(tiling=small_tiling(baseM=33)).begin()


def test_deviation_iterate_all() -> None:
    run = Launch()
    piece = run.begin()
    run.op.IterateAll(run.output[piece.offsetC])
    assert run.op.ctx.isFirstIter_ is True
    assert not np.isnan(run.memory[:24 * 16]).any()


def test_deviation_float32() -> None:
    dy, w = np.ones((1, 9, 1, 2, 2), np.float32), np.full((9, 3, 1, 1, 1), 0.1, np.float32)
    with pytest.raises(TypeError, match="not documented"):
        ascendc.run(dy, w, input_size=(1, 2, 2))
    got = ascendc.run(dy, w, input_size=(1, 2, 2), allow_undocumented=True)
    assert got.dtype == np.float32 and np.allclose(got, 0.9)


def test_deviation_nonfinite_weights() -> None:
    """dX[0] is reached by tap 0 of dY[0] only; the infinite tap 1 meets padding there and makes it NaN."""
    dy, w = np.ones((1, 1, 1, 1, 1), np.float16), np.array([2, np.inf], np.float16).reshape(1, 1, 1, 1, 2)
    assert np.isnan(ascendc.run(dy, w, input_size=(1, 1, 2))[0, 0, 0, 0, 0])
    exact = convgrad.input_grad(dy, w, (1, 1, 2), backend="reference")
    assert exact.reshape(-1).tolist() == [2.0, np.inf]


def test_deviation_overflow_to_half() -> None:
    dy, w = np.full((1, 2, 1, 1, 1), 60000, np.float16), np.ones((2, 1, 1, 1, 1), np.float16)
    assert ascendc.run(dy, w, input_size=1).item() == np.inf


def test_deviation_ncdhw_output() -> None:
    dy, w = np.ones((1, 16, 1, 2, 2), np.float16), np.ones((16, 16, 1, 1, 1), np.float16)
    results = [ascendc.run(dy, w, input_size=(1, 2, 2), output_format=form)
               for form in (ascendc.ConvFormat.NDC1HWC0, ascendc.ConvFormat.NCDHW)]
    assert results[0].tobytes() == results[1].tobytes()
    run = Launch()
    run.op = ascendc.Conv3DBackpropInput(*ascendc.conv_types(ascendc.half, ascendc.ConvFormat.NCDHW))
    run.begin()
    workspace = ascendc.GlobalTensor(np.zeros(256, np.float16))
    with pytest.raises(ascendc.Misuse, match="TransposeBlock moves it first"):
        while run.op.Iterate():
            run.op.GetTensorC(workspace)


def test_deviation_partial_pieces() -> None:
    for strict in (True, False):
        run = Launch(strict=strict)
        piece = run.begin()
        run.op.Iterate()
        run.op.GetTensorC(run.output[piece.offsetC])
        if strict:
            with pytest.raises(ascendc.Misuse, match="End in the middle of a piece"):
                run.op.End()
        else:
            run.op.End()


def test_deviation_setters_that_return_false() -> None:
    described = host()
    assert not described.SetWeightShape(17, 16, 1, 3, 3)
    tiling = ascendc.TConv3DBackpropInputTiling()
    assert described.GetTiling(tiling) == -1
    assert "cout=17 where an earlier call said 16" in described.explain()
    assert described.SetWeightShape(16, 16, 1, 3, 3) and described.GetTiling(tiling) == 0
