"""The reader of serialised graphs and its command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convgrad import onednn
from convgrad.frontends.onednn.attributes import UNKNOWN_DIM
from convgrad.frontends.onednn.command import add_commands
from convgrad.frontends.onednn.graph import operator_of, parse_graph, read_graph, run_op
from convgrad.numbers import storage_dtype

TRAINING_STEP = Path(__file__).parent / "training_step.json"


def tensor(number: int, shape: tuple[int, ...], dtype: str = "f32", strides: tuple[int, ...] | None = None) -> Any:
    if strides is None:
        strides = tuple(int(np.prod(shape[axis + 1:], dtype=np.int64)) for axis in range(len(shape)))
    return {"id": number, "dtype": dtype, "shape": list(shape), "stride": list(strides), "layout_type": "strided",
            "property_type": "undef"}


def attribute(value: Any) -> dict[str, Any]:
    kind = "string" if isinstance(value, str) else "s64" if isinstance(value, int) else "s64[]"
    return {"type": kind, "value": value}


def backward_data(inputs: list[Any], outputs: list[Any], kind: str = "ConvolutionBackwardData",
                  **attributes: Any) -> dict[str, Any]:
    values = {"strides": [2, 2], "pads_begin": [0, 0], "pads_end": [0, 0], "dilations": [1, 1], "auto_pad": "None",
              "output_padding": [0] * 12, "groups": 1, "data_format": "NCX", "weights_format": "OIX", **attributes}
    return {"version": "3.14.0", "engine_kind": "cpu", "fpmath_mode": "strict", "graph": [{
        "id": 7, "name": "gradient", "kind": kind, "inputs": inputs, "outputs": outputs,
        "attrs": {name: attribute(value) for name, value in values.items() if value is not None}}]}


SMALL, KERNEL, LARGE = tensor(0, (1, 8, 4, 4)), tensor(1, (8, 3, 3, 3)), tensor(2, (1, 3, 9, 10))


def run(document: Any, tensors: dict[int, Any] | None = None, **options: Any) -> Any:
    graph = parse_graph(document)
    tensors = {} if tensors is None else tensors
    return run_op(graph.convolutions[0], tensors, np.random.default_rng(0), **options)


def test_reads_a_training_step() -> None:
    graph = read_graph(TRAINING_STEP)
    assert (graph.version, graph.engine_kind, graph.fpmath_mode) == ("3.14.0", "cpu", "strict")
    assert [op.kind for op in graph.ops] == ["Convolution", "ReLU", "ReLUBackward", "ConvolutionBackwardWeights",
                                             "ConvolutionBackwardData"]
    assert [op.id for op in graph.convolutions] == [0, 3, 4]
    operator = operator_of(graph.convolutions[2])
    assert isinstance(operator, onednn.ConvolutionBackwardData)
    assert operator.dst_shape == (2, 12, 12, 3) and operator.output_padding == (0, 0)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_runs_with_random_inputs(dtype: str, engine: str) -> None:
    named = [dict(item, dtype=dtype) for item in (SMALL, KERNEL, LARGE)]
    tensors: dict[int, Any] = {}
    done = run(backward_data(named[:2], named[2:], dst_shape=[1, 3, 9, 10]), tensors, repeat=3)
    assert len(done.seconds) == 3 and set(tensors) == {0, 1, 2}
    assert done.output.shape == (1, 3, 9, 10) and done.compiled.output.dtype == dtype
    again = operator_of(done.op)(tensors[0], tensors[1])
    np.testing.assert_array_equal(done.output.astype(np.float32), again.astype(np.float32))
    assert np.abs(done.output.astype(np.float32)).sum() > 0


def test_given_inputs_and_strides(engine: str) -> None:
    """Tensors lie as the graph says: here diff_dst has channels last in memory under an NCX shape."""
    small = tensor(0, (1, 8, 4, 4), strides=(128, 1, 32, 8))
    given = {1: np.ones((8, 3, 3, 3), np.float32)}
    done = run(backward_data([small, KERNEL], [LARGE], dst_shape=[1, 3, 9, 10]), given)
    assert given[0].strides == (512, 4, 128, 32)
    assert given[1] is not None and (given[1] == 1).all()
    np.testing.assert_allclose(done.output[0, 0, 0, 0], given[0][0, :, 0, 0].sum(), rtol=1e-5)


def test_output_shape_stands_in_for_a_missing_dst_shape(engine: str) -> None:
    assert run(backward_data([SMALL, KERNEL], [LARGE])).output.shape == (1, 3, 9, 10)
    assert run(backward_data([SMALL, KERNEL], [LARGE], dst_shape=[0] * 12)).output.shape == (1, 3, 9, 10)
    unknown = dict(LARGE, shape=[UNKNOWN_DIM] * 4)
    assert run(backward_data([SMALL, KERNEL], [unknown])).output.shape == (1, 3, 9, 9)


def test_dst_shape_as_a_tensor(engine: str) -> None:
    third = tensor(9, (4,), "s32")
    document = backward_data([SMALL, KERNEL, third], [dict(LARGE, shape=[UNKNOWN_DIM] * 4)])
    assert run(document, {9: np.array([1, 3, 10, 10], np.int32)}).output.shape == (1, 3, 10, 10)
    with pytest.raises(onednn.InvalidShape, match=r"tensor 9.*its value is not given: --input 9=FILE\.npy"):
        run(document)
    with pytest.raises(onednn.InvalidShape, match="holds only zeros"):
        run(document, {9: np.zeros(4, np.int32)})
    document["graph"][0]["inputs"][2]["dtype"] = "s64"
    with pytest.raises(onednn.InvalidGraphOp, match="data type s64; it must be s32"):
        run(document, {9: np.array([1, 3, 10, 10], np.int32)})


@pytest.mark.parametrize("document, error, words", [
    (backward_data([SMALL, KERNEL], [LARGE], dst_shape=[1, 3, 9, 9]), "InvalidShape",
     r"diff_src has shape \(1, 3, 9, 10\), but the attributes and inputs give \(1, 3, 9, 9\)"),
    (backward_data([SMALL], [LARGE]), "InvalidGraphOp", "takes 2 or 3 inputs .* has 1 and 1"),
    (backward_data([SMALL, KERNEL, LARGE, LARGE], [LARGE]), "InvalidGraphOp", "has 4 and 1"),
    (backward_data([SMALL, KERNEL], [dict(LARGE, dtype="f16")]), "InvalidGraphOp", "is f16, but the inputs are f32"),
    (backward_data([SMALL, dict(KERNEL, dtype="s8")], [LARGE]), "InvalidGraphOp", "weights has data type s8"),
    (backward_data([dict(SMALL, shape=[1, 8, UNKNOWN_DIM, 4]), KERNEL], [LARGE]), "Unimplemented", "unknown extents"),
    (backward_data([SMALL, KERNEL], [LARGE], pads_end=[-1, -1]), "InvalidGraphOp", r"pads_end\[0\]=-1 is negative"),
    (backward_data([SMALL, KERNEL], [LARGE], fused="yes"), "InvalidGraphOp", "has no attribute 'fused'"),
    (backward_data([SMALL, KERNEL], [LARGE], **{"self": 1}), "InvalidGraphOp", "has no attribute 'self'"),
    (backward_data([tensor(0, (2**30, 8, 2**20, 4)), KERNEL], [LARGE]), "Unimplemented", "this machine has"),
    (backward_data([tensor(0, (1, 8, 4, 4), strides=(2**50, 2**40, 4, 1)), KERNEL], [LARGE]), "Unimplemented",
     "diff_dst of shape .* takes"),
    (backward_data([SMALL, KERNEL], [tensor(2, (1, 3, 9, 10), strides=(270, 90, 1, 1))]), "InvalidShape",
     "overlaps itself"),
])
def test_refusals(document: Any, error: str, words: str, engine: str) -> None:
    with pytest.raises(getattr(onednn, error), match=words):
        run(document)


@pytest.mark.parametrize("document, words", [
    ([], "no list of operators"), ({"graph": 3}, "no list of operators"),
    ({"graph": [{"id": 0}]}, "operator 0 of the graph cannot be read: KeyError: 'kind'"),
    ({"graph": [{"id": float("inf"), "kind": "Convolution", "inputs": [], "outputs": []}]}, "inf is no 64-bit"),
    (backward_data([dict(SMALL, stride=[128, 16.5, 4, 1]), KERNEL], [LARGE]), "16.5 is no 64-bit integer"),
    (backward_data([dict(SMALL, shape=[1, 8, 4.0, 4]), KERNEL], [LARGE]), "4.0 is no 64-bit integer"),
    ({"graph": [{"id": "x", "attrs": {}, "inputs": [], "outputs": [], "name": "", "kind": ""}]}, "cannot be read"),
])
def test_malformed_documents(document: Any, words: str) -> None:
    with pytest.raises(onednn.InvalidGraph, match=words):
        parse_graph(document)


def test_partitioning_marks_are_ignored(engine: str) -> None:
    run(backward_data([SMALL, KERNEL], [LARGE], partition_id="3", backend="dnnl_backend"))


def test_names_of_the_technical_preview(engine: str) -> None:
    document = backward_data([SMALL, KERNEL], [LARGE], kind="ConvolutionBackpropData", output_shape=[1, 3, 9, 10],
                             filter_format="OIX", weights_format=None)
    assert isinstance(operator_of(run(document).op), onednn.ConvolutionBackwardData)


def test_auto_pad_rule_and_its_note(engine: str) -> None:
    small, large = tensor(0, (1, 8, 4, 4)), tensor(2, (1, 3, 8, 8))
    document = backward_data([small, KERNEL], [large], auto_pad="SAME_UPPER", dst_shape=[1, 3, 8, 8])
    for rule, begin in (("document", (1, 1)), ("library", (0, 0))):
        done = run(document, auto_pad_rule=rule)
        assert done.compiled.pads_begin == begin
        assert len(done.notes) == 1 and "(1, 0)" in done.notes[0] and "(0, 1)" in done.notes[0]


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    args = parser.parse_args(["onednn", *arguments])
    return int(args.run(args))


def test_command_line(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(TRAINING_STEP), "--repeat", "2", "--json", "--save", str(tmp_path)) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["id"]: row for row in report["operators"]}
    assert [row["output"] for row in rows.values()] == [[2, 6, 6, 8], [3, 3, 3, 8], [2, 12, 12, 3]]
    assert rows[4]["problem"] == "input_grad bf16 n2 c3 k8 i12x12 w3x3 s2x2 p1x1 NHWC HWIO"
    assert all(row["median_seconds"] > 0 and row["status"] == "success" for row in rows.values())
    saved = np.load(tmp_path / "8.npy")
    assert saved.shape == (2, 12, 12, 3)
    # The saved result of the first run, given back as input by tensor id, is what the second run uses.
    np.save(tmp_path / "ones.npy", np.ones((2, 6, 6, 8), np.float32))
    assert command(str(TRAINING_STEP), "--op", "4", "--op", "ConvolutionBackwardWeights", "--input",
                   f"6={tmp_path / 'ones.npy'}", "--save", str(tmp_path / "second"), "--repeat", "1") == 0
    assert "ConvolutionBackwardData" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == ["7.npy", "8.npy"]
    weights_gradient = np.load(tmp_path / "second" / "7.npy").view(storage_dtype("bfloat16")).astype(np.float32)
    np.testing.assert_array_equal(weights_gradient[..., 0], weights_gradient[..., 7])


def test_command_line_reports_refusals(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(backward_data([SMALL, KERNEL], [LARGE], groups=5)))
    assert command(str(path)) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "invalid_arguments" in shown and "groups=5 does not divide the 8 channels" in shown
    path.write_text(json.dumps(backward_data([dict(SMALL, shape=[1, 8, UNKNOWN_DIM, 4]), KERNEL], [LARGE])))
    assert command(str(path)) == 3
    assert "unimplemented: diff_dst (tensor 0) has unknown extents" in capsys.readouterr().out
    assert command(str(TRAINING_STEP), "--backend", "abacus") == 2
    assert "backend='abacus' is none of" in capsys.readouterr().err
    path.write_text("{")
    assert command(str(path)) == 2
    assert "is not JSON" in capsys.readouterr().err
    assert command(str(tmp_path / "absent.json")) == 2
    assert command(str(TRAINING_STEP), "--input", "three=x.npy") == 2
    path.write_text("[" * 200000)
    assert command(str(path)) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_options_that_match_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    for arguments, words in ((["--op", "MatMul"], "--op MatMul matches none of the convolutions: 0, 3, 4, "),
                             (["--input", f"77={tmp_path / 'x.npy'}"], "no convolution reads a tensor 77"),
                             (["--in-shapes=77:1x2"], "--in-shapes: the graph has no input tensor 77"),
                             (["--op-attrs=9:groups:2"], "--op-attrs: the graph has no operator 9"),
                             (["--seed", "-1"], "--seed -1 is negative")):
        assert command(str(TRAINING_STEP), *arguments) == 2
        assert words in capsys.readouterr().err
    assert command("--seed", "0") == 2
    assert "name a graph" in capsys.readouterr().err


def test_operators_without_attributes_load() -> None:
    document = backward_data([SMALL, KERNEL], [LARGE])
    document["graph"].append({"id": 8, "kind": "ReLU", "inputs": [LARGE], "outputs": [LARGE]})
    graph = parse_graph(document)
    assert [(op.name, op.attributes) for op in graph.ops[1:]] == [("ReLU", {})]


def test_a_wrong_result_is_found(engine: str, capsys: pytest.CaptureFixture[str],
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.frontends.onednn import compiled

    right = compiled.Compiled.execute

    def wrong(self: Any, inputs: Any, scratchpad: Any, out: Any) -> Any:
        result = right(self, inputs, scratchpad, out)
        if self.plan.backend != "reference":
            result.reshape(-1)[-1] += 1
        return result

    monkeypatch.setattr(compiled.Compiled, "execute", wrong)
    code = command(str(TRAINING_STEP), "--op", "3", "--repeat", "1")
    assert code == (0 if engine == "reference" else 1)
    assert ("wrong: 1 of" in capsys.readouterr().out) == (code == 1)


def test_the_command_follows_the_library(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = tensor(0, (1, 8, 4, 4)), tensor(2, (1, 3, 8, 8))
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(backward_data([small, KERNEL], [large], auto_pad="SAME_UPPER", dst_shape=[1, 3, 8, 8])))
    for arguments, begin in (([], [0, 0]), (["--auto-pad-rule", "document"], [1, 1])):
        assert command(str(path), "--json", "--repeat", "1", *arguments) == 0
        row, = json.loads(capsys.readouterr().out)["operators"]
        assert row["pads_begin"] == begin and row["verdict"].startswith("right")


def test_fpmath_mode_is_a_permission(engine: str) -> None:
    """A mode that permits rounded products changes no bit: what is computed is what `strict` asks for."""
    results = []
    for mode in ("strict", "bf16", "tf32", "any"):
        document = dict(backward_data([SMALL, KERNEL], [LARGE]), fpmath_mode=mode)
        assert parse_graph(document).fpmath_mode == mode
        results.append(run(document).output.tobytes())
    assert len(set(results)) == 1
