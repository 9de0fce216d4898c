"""Each thing that must be refused, with its class and a sentence that names the attribute and the numbers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from convgrad import Unsupported, onednn
from convgrad.frontends.onednn import compiled
from convgrad.frontends.onednn.attributes import UNKNOWN_DIM

GOOD: dict[str, Any] = {"strides": [1, 1], "pads_begin": [0, 0], "pads_end": [0, 0], "dilations": [1, 1]}
DIFF_DST, WEIGHTS, DST = (1, 4, 4, 8), (3, 3, 4, 8), (1, 6, 6, 4)


def make(kind: str = "ConvolutionBackwardData", **changes: Any) -> Any:
    return onednn.OPERATORS[kind](**{**GOOD, **changes})


@pytest.mark.parametrize("changes, error, words", [
    ({"strides": [0, 1]}, "InvalidArguments", r"strides\[0\]=0 is not positive"),
    ({"strides": [1, -2]}, "InvalidArguments", r"strides\[1\]=-2"),
    ({"strides": [1, 1, 1, 1]}, "InvalidShape", r"has 2 values but strides=\(1, 1, 1, 1\) has 4"),
    ({"strides": []}, "InvalidShape", r"has 2 values but strides=\(\) has 0"),
    ({name: [1] * 4 for name in GOOD}, "InvalidArguments", r"strides=\(1, 1, 1, 1\) has 4 values: 1, 2 or 3"),
    ({name: [] for name in GOOD}, "InvalidArguments", r"strides=\(\) has 0 values: 1, 2 or 3"),
    ({"strides": 1}, "InvalidGraphOp", "strides must be a list of integers"),
    ({"strides": "11"}, "InvalidGraphOp", "strides must be a list of integers"),
    ({"strides": [1.0, 1]}, "InvalidGraphOp", r"strides\[0\] must be an integer, got 1\.0"),
    ({"strides": [True, 1]}, "InvalidGraphOp", r"strides\[0\] must be an integer, got True"),
    ({"strides": [2**63, 1]}, "InvalidGraphOp", "does not fit in a signed 64-bit integer"),
    ({"dilations": [1, 0]}, "InvalidArguments", r"dilations\[1\]=0 is not positive.*silently"),
    ({"dilations": [-1, 1]}, "InvalidArguments", r"dilations\[0\]=-1"),
    ({"dilations": [1]}, "InvalidShape", r"dilations=\(1,\) has 1 values but strides=\(1, 1\) has 2"),
    ({"pads_begin": [-1, 0]}, "InvalidGraphOp", r"pads_begin\[0\]=-1 is negative"),
    ({"pads_end": [0, -3]}, "InvalidGraphOp", r"pads_end\[1\]=-3 is negative"),
    ({"pads_begin": [0, 0, 0]}, "InvalidShape", "pads_begin=.* has 3 values"),
    ({"pads_end": [1]}, "InvalidShape", r"pads_end=\(1,\) has 1 values"),
    ({"auto_pad": "same"}, "InvalidGraphOp", "auto_pad='same' is none of none, valid, same_upper, same_lower"),
    ({"auto_pad": 1}, "InvalidGraphOp", "auto_pad=1"),
    ({"auto_pad_rule": "onnx"}, "InvalidGraphOp", "auto_pad_rule='onnx' is none of document, library"),
    ({"data_format": "NHWC"}, "InvalidGraphOp", "data_format='NHWC' is none of NXC, NCX"),
    ({"weights_format": "IOX"}, "InvalidGraphOp", "weights_format='IOX' is none of XIO, OIX"),
    ({"groups": 0}, "InvalidArguments", "groups=0 is not positive"),
    ({"groups": 1.5}, "InvalidGraphOp", "groups must be an integer"),
    ({"output_padding": [0, -1]}, "InvalidArguments", r"output_padding\[1\]=-1 is negative"),
    ({"output_padding": [1, 0, 0]}, "InvalidShape", "output_padding=.* has 3 values"),
    ({"dst_shape": [1, -6, 6, 4]}, "InvalidShape", r"dst_shape\[1\]=-6 is negative"),
    ({"dst_shape": [1, UNKNOWN_DIM, 6, 4]}, "Unimplemented", r"dst_shape\[1\] is unknown"),
    ({"padding": [1, 1]}, "InvalidGraphOp", "ConvolutionBackwardData has no attribute 'padding'; it has strides"),
])
def test_attributes(changes: dict[str, Any], error: str, words: str) -> None:
    with pytest.raises(getattr(onednn, error), match=words):
        make(**changes)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("kind", onednn.OPERATORS)
def test_missing_attribute(kind: str, name: str) -> None:
    with pytest.raises(onednn.InvalidGraphOp, match=f"{kind} needs the attribute '{name}'"):
        onednn.OPERATORS[kind](**{key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize("kind, attribute", [
    ("Convolution", "output_padding"), ("Convolution", "dst_shape"), ("Convolution", "auto_pad_rule"),
    ("ConvolutionBackwardWeights", "output_padding"), ("ConvTransposeBackwardData", "output_padding"),
    ("ConvTransposeBackwardWeights", "output_padding"), ("ConvTranspose", "dst_shape"),
    ("ConvolutionBackwardData", "weights_shape")])
def test_attribute_of_another_operator(kind: str, attribute: str) -> None:
    with pytest.raises(onednn.InvalidGraphOp, match=f"{kind} has no attribute '{attribute}'"):
        make(kind, **{attribute: [0, 0]})


@pytest.mark.parametrize("kind", [kind for kind in onednn.OPERATORS if "Transpose" in kind])
@pytest.mark.parametrize("weights_format", ["OIX", "XIO"])
def test_transposed_operators_take_iox(kind: str, weights_format: str) -> None:
    with pytest.raises(onednn.InvalidGraphOp, match=f"weights_format='{weights_format}' is none of XOI, IOX"):
        make(kind, weights_format=weights_format)


@pytest.mark.parametrize("changes, shapes, error, words", [
    ({}, [(1, 4, 8), (3, 4, 8)], "InvalidShape", r"diff_dst has shape \(1, 4, 8\) with 1 spatial axes"),
    ({}, [(1, 4, 4, 8), (3, 3, 3, 4, 8)], "InvalidShape", "weights has shape .* with 3 spatial axes"),
    ({}, [(4, 8), (3, 3, 4, 8)], "InvalidArguments", "rank 2: ranks 3, 4 and 5 are supported"),
    ({}, [(1, 2, 4, 4, 4, 8), (3, 3, 4, 8)], "InvalidArguments", "rank 6"),
    ({"dst_shape": (6, 6)}, [DIFF_DST, WEIGHTS], "InvalidShape", r"dst_shape=\(6, 6\) has 2 values, but .* 4 axes"),
    ({}, [DIFF_DST, WEIGHTS, (1, 6, 4)], "InvalidShape", r"dst_shape=\(1, 6, 4\) has 3 values, but .* 4 axes"),
    ({}, [DIFF_DST, (3, 3, 4, 9)], "InvalidArguments", "diff_dst has 8 channels but weights .* asks for 9"),
    ({}, [DIFF_DST, WEIGHTS, (1, 6, 6, 5)], "InvalidArguments", r"diff_src has 5 channels .* groups \* 4 = 4"),
    ({}, [DIFF_DST, WEIGHTS, (2, 6, 6, 4)], "InvalidArguments", "diff_dst has batch 1 but diff_src has batch 2"),
    ({"groups": 3}, [DIFF_DST, WEIGHTS], "InvalidArguments", "groups=3 does not divide the 8 channels"),
    ({}, [DIFF_DST, (0, 3, 4, 8)], "InvalidArguments", "weights has no elements"),
    ({}, [(1, 4, 4, 0), (3, 3, 4, 0)], "InvalidArguments", "weights has no elements"),
    ({}, [DIFF_DST, WEIGHTS, (1, 7, 6, 4)], "InvalidArguments",
     r"axis 0: diff_dst has extent 4, but diff_src of extent 7 gives trunc\(\(7 - 3 \+ 0 \+ 0\) / 1\) \+ 1 = 5"),
    ({"pads_begin": [4, 0], "pads_end": [4, 0]}, [DIFF_DST, WEIGHTS], "InvalidShape",
     r"diff_src would have extent -2 on spatial axis 0: 1 \* \(4 - 1\) \+ 3 - 4 - 4 \+ 0"),
    ({"output_padding": [1, 0], "pads_begin": [9, 0]}, [DIFF_DST, WEIGHTS, (1, 0, 6, 4)], "InvalidArguments",
     "diff_dst has extent 4"),
    ({}, [DIFF_DST, WEIGHTS, (0, 0, 0, 0)], "InvalidShape", "dst_shape is given as an input, but holds only zeros"),
    ({"strides": [2, 2], "output_padding": [0, 1]}, [DIFF_DST, WEIGHTS, (1, 10, 9, 4)], "InvalidArguments",
     r"output_padding\[1\]=1 contradicts the shapes: diff_src of extent 9.*would be 0.*oneDNN would ignore it"),
    ({"strides": [2, 2], "output_padding": [3, 3]}, [DIFF_DST, WEIGHTS, (1, 10, 10, 4)], "InvalidArguments",
     r"output_padding\[0\]=3 contradicts the shapes"),
    ({"auto_pad": "same_upper"}, [DIFF_DST, WEIGHTS], "InvalidShape", "computes the pads from dst_shape"),
    ({}, [(1, UNKNOWN_DIM, 4, 8), WEIGHTS], "Unimplemented", r"shape of diff_dst\[1\] is unknown"),
    ({}, [(1, -1, 4, 8), WEIGHTS], "Unimplemented", r"shape of diff_dst\[1\] is unknown"),
    ({}, [(1, None, 4, 8), WEIGHTS], "Unimplemented", r"shape of diff_dst\[1\] is unknown"),
    ({}, [(1, -4, 4, 8), WEIGHTS], "InvalidShape", r"shape of diff_dst\[1\]=-4 is negative"),
    ({}, [DIFF_DST], "InvalidGraphOp", "inputs diff_dst_shape, weights_shape and optionally dst_shape; got 1"),
    ({}, [DIFF_DST, WEIGHTS, DST, DST], "InvalidGraphOp", "got 4"),
    ({"strides": [2**61, 1]}, [DIFF_DST, WEIGHTS], "InvalidArguments", "in_size"),
])
def test_shapes(changes: dict[str, Any], shapes: list[Any], error: str, words: str) -> None:
    with pytest.raises(getattr(onednn, error), match=words):
        make(**changes).infer_shape(*shapes)


@pytest.mark.parametrize("kind, changes, shapes, error, words", [
    ("ConvolutionBackwardWeights", {}, [DST, DIFF_DST], "InvalidShape", "needs weights_shape"),
    ("ConvolutionBackwardWeights", {"weights_shape": [0] * 12}, [DST, DIFF_DST], "InvalidShape", "needs weights_shape"),
    ("ConvolutionBackwardWeights", {}, [DST, DIFF_DST, (3, 3, 5, 8)], "InvalidArguments", "src has 4 channels"),
    ("Convolution", {}, [(1, 1, 1, 4), (9, 9, 4, 8)], "InvalidShape", "src is too small on spatial axis 0"),
    ("Convolution", {}, [DST, WEIGHTS, (7,)], "InvalidArguments", r"bias has shape \(7,\) but dst has 8 channels"),
    ("Convolution", {}, [DST, WEIGHTS, ()], "InvalidArguments", r"bias has shape \(\) but dst has 8 channels"),
    ("Convolution", {"groups": 2}, [DST, WEIGHTS], "InvalidShape", r"src has 4 channels .* groups \* 4 = 8"),
    ("Convolution", {"groups": 3}, [(1, 6, 6, 12), WEIGHTS], "InvalidArguments", "groups=3 does not divide"),
    ("Convolution", {}, [(1, 6, 6, 5), WEIGHTS], "InvalidShape", "src has 5 channels"),
    ("ConvTransposeBackwardData", {}, [(1, 6, 6, 5), WEIGHTS], "InvalidShape", "diff_dst has 5 channels"),
    ("ConvTransposeBackwardData", {"groups": 2}, [DST, WEIGHTS], "InvalidShape", "diff_dst has 4 channels"),
    ("ConvTranspose", {}, [(1, 4, 4, 9), WEIGHTS], "InvalidArguments", "src has 9 channels"),
    ("ConvTranspose", {"output_padding": [12, 0], "pads_begin": [9, 0]}, [DIFF_DST, WEIGHTS], "InvalidArguments",
     "no tap reaches spatial axis 0 of dst"),
    ("ConvTransposeBackwardData", {}, [DIFF_DST, WEIGHTS, DST], "InvalidGraphOp", "got 3"),
])
def test_shapes_of_the_siblings(kind: str, changes: dict[str, Any], shapes: list[Any], error: str, words: str) -> None:
    with pytest.raises(getattr(onednn, error), match=words):
        make(kind, **changes).infer_shape(*shapes)


@pytest.mark.parametrize("groups", [0, -1])
@pytest.mark.parametrize("kind", onednn.OPERATORS)
def test_groups_below_1(kind: str, groups: int) -> None:
    """Three operators have no shape with it, the other three would compute with groups=1."""
    shape = kind in ("Convolution", "ConvTranspose", "ConvTransposeBackwardData")
    error, words = (onednn.InvalidShape, "has no shape") if shape else (onednn.InvalidArguments, "silently")
    with pytest.raises(error, match=f"groups={groups} is not positive.*{words}"):
        make(kind, groups=groups)


def test_an_attribute_named_self() -> None:
    with pytest.raises(onednn.InvalidGraphOp, match="has no attribute 'self'"):
        make(**{"self": 1})


def arrays(dtype: Any = np.float32) -> tuple[Any, Any]:
    return np.ones(DIFF_DST, dtype), np.ones(WEIGHTS, dtype)


@pytest.mark.parametrize("inputs, error, words", [
    ((arrays()[0], arrays(np.float16)[1]), "InvalidGraphOp", "one data type: diff_dst is f32, weights is f16"),
    (arrays(np.float64), "InvalidGraphOp", "diff_dst has data type float64; the operator takes f32, bf16, f16"),
    (arrays(np.int8), "InvalidGraphOp", "diff_dst has data type int8"),
    ((*arrays(), np.array(DST, np.float32)), "InvalidGraphOp", "dst_shape has data type float32; it must be s32"),
    ((*arrays(), np.array(DST, np.int64)), "InvalidGraphOp", "dst_shape has data type int64; it must be s32"),
    ((*arrays(), np.zeros(4, np.int32)), "InvalidShape", "holds only zeros"),
    ((*arrays(), np.array([DST, DST], np.int32)), "InvalidGraphOp", r"dst_shape\[0\] must be an integer"),
    ((*arrays(), DST, DST), "InvalidGraphOp", "got 4"),
    (arrays()[:1], "InvalidGraphOp", "takes the inputs diff_dst, weights and optionally dst_shape; got 1"),
    (([[1.0]], [[1.0]]), "InvalidGraphOp", "takes arrays for diff_dst, weights, got list and list"),
])
def test_tensors(inputs: tuple[Any, ...], error: str, words: str, engine: str) -> None:
    with pytest.raises(getattr(onednn, error), match=words):
        make()(*inputs)


def test_named_inputs(engine: str) -> None:
    diff_dst, weights = arrays()
    operator = make()
    with pytest.raises(onednn.InvalidGraphOp, match="'src' is unknown; its inputs are diff_dst, weights, dst_shape"):
        operator(diff_dst, src=weights)
    with pytest.raises(onednn.InvalidGraphOp, match="input 'diff_dst' is given twice"):
        operator(diff_dst, diff_dst=weights)


def test_out_stays_untouched_when_the_call_fails(engine: str) -> None:
    diff_dst, weights = arrays()
    out = np.full(DST, 7, np.float32)
    with pytest.raises(onednn.InvalidArguments, match="out has shape"):
        make()(diff_dst, weights, out=out[:, 1:])
    with pytest.raises(onednn.InvalidArguments, match="diff_dst has extent 4"):
        make()(diff_dst, weights, (1, 9, 9, 4), out=out)
    with pytest.raises(onednn.InvalidArguments, match="out has dtype float64"):
        make()(diff_dst, weights, out=out.astype(np.float64))
    assert (out == 7).all()


def test_out_that_overlaps_an_input(engine: str) -> None:
    memory = np.ones(1000, np.float32)
    with pytest.raises(onednn.InvalidArguments, match="out overlaps diff_dst"):
        make()(memory[:128].reshape(DIFF_DST), arrays()[1], out=memory[100:244].reshape(DST))


def test_no_backend_is_unimplemented(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(problem: Any, **options: Any) -> Any:
        raise Unsupported("no backend can run it: native: asleep", {"native": "asleep"})

    monkeypatch.setattr(compiled, "plan", refuse)
    with pytest.raises(onednn.Unimplemented, match="asleep") as caught:
        make().compile((DIFF_DST, "f32"), (WEIGHTS, "f32"))
    assert caught.value.reasons == {"native": "asleep"} and caught.value.status == "unimplemented"


def test_statuses_are_the_library_names() -> None:
    names = ("InvalidGraphOp", "InvalidShape", "InvalidArguments", "Unimplemented", "InvalidGraph")
    for name in names:
        assert getattr(onednn, name).status == re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()
