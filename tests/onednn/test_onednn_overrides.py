"""The options of benchdnn's graph driver: shapes, orders, attributes, kinds, types and batch of a graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_onednn_graph import KERNEL, LARGE, SMALL, TRAINING_STEP, backward_data, command

from convgrad.frontends.onednn.graph import parse_graph
from convgrad.frontends.onednn.overrides import Layout, changed, combinations, parse_in_shapes, parse_op_attrs

NOTHING = {"in_shapes": "", "op_attrs": "", "op_kind": "", "dt": "", "mb": "0"}


def overridden(document: Any, **options: str) -> Any:
    new, = combinations(**{**NOTHING, **options})
    return changed(parse_graph(document), new).ops[0]


def test_shapes_and_orders() -> None:
    assert parse_in_shapes("0:2x64x3x3*acdb+1:dcba+7:-+8:0") == {
        0: Layout((2, 64, 3, 3), "acdb"), 1: Layout(None, "dcba"), 7: Layout((), ""), 8: Layout((0,), "")}
    op = overridden(backward_data([SMALL, KERNEL], [LARGE]), in_shapes="0:1x8x5x5*acdb+1:dcba")
    assert (op.inputs[0].shape, op.inputs[0].strides) == ((1, 8, 5, 5), (200, 1, 40, 8))
    assert (op.inputs[1].shape, op.inputs[1].strides) == ((8, 3, 3, 3), (1, 8, 24, 72))
    assert op.outputs[0].shape is None  # inferred


def test_attributes_and_kinds() -> None:
    assert parse_op_attrs("0:strides:4x4*auto_pad:SAME_UPPER+3:groups:2") == {
        0: {"strides": [4, 4], "auto_pad": "SAME_UPPER"}, 3: {"groups": 2}}
    op = overridden(backward_data([SMALL, KERNEL], [LARGE]), op_attrs="7:strides:1x1", op_kind="7:Convolution")
    assert op.kind == "Convolution" and op.attributes["strides"] == [1, 1] and op.attributes["groups"] == 1


def test_types_and_batch() -> None:
    third = dict(SMALL, id=9, dtype="s32", shape=[4])
    document = backward_data([SMALL, KERNEL, third], [LARGE], dst_shape=[1, 3, 9, 9])
    op = overridden(document, dt="bf16", mb="6")
    assert [tensor.dtype for tensor in (*op.inputs, *op.outputs)] == ["bf16", "bf16", "s32", "bf16"]
    assert [tensor.shape for tensor in op.inputs] == [(6, 8, 4, 4), (8, 3, 3, 3), (4,)]
    assert op.attributes["dst_shape"] == [6, 3, 9, 9]
    assert [tensor.dtype for tensor in overridden(document, dt="0:f16+1:f16").inputs] == ["f16", "f16", "s32"]


def test_lists_run_in_turn() -> None:
    found = list(combinations(in_shapes="", op_attrs=",0:groups:2", op_kind="", dt="f32,bf16", mb="1,2,3"))
    assert len(found) == 12 and found[0].op_attrs == {} and found[-1].batch == 3


@pytest.mark.parametrize("options, words", [
    ({"in_shapes": "0"}, "'0' is not ID:VALUE"), ({"in_shapes": "x:1x2"}, "'x' is no number"),
    ({"in_shapes": "0:1x-2"}, "'-2' is no number"), ({"in_shapes": "0:1x2x3x4*abcc"}, "no order of the axes abcd"),
    ({"in_shapes": "0:1x2x3*acdb"}, "the tag acdb has 4 axes"), ({"op_attrs": "7:strides"}, "is not NAME:VALUE"),
    ({"mb": "-3"}, "--mb=-3"), ({"in_shapes": "2:1x2"}, "no input tensor 2")])
def test_what_cannot_be_read(options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        overridden(backward_data([SMALL, KERNEL], [LARGE]), **options)


def test_a_row_of_benchdnn_runs_as_written(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = ("--reset --mode=C --dt=f32,bf16 --mb=3 --in-shapes=0:4x12x12x3*adbc --op-attrs=0:strides:1x2*pads_end:0x1 "
           f"--expected-n-partitions=0 --case={Path(TRAINING_STEP)}")
    assert command(*row.split(), "--op", "Convolution", "--repeat", "1", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["operators"]
    assert [(row["dtype"], row["output"], row["verdict"][:5]) for row in rows] == [
        ("f32", [3, 11, 6, 8], "right"), ("bf16", [3, 11, 6, 8], "right")]
