"""Operator objects: immutability, dst_shape precedence, compile and scratchpad, plan reuse, cost of a call."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from counting import calls_in

from convgrad import onednn
from convgrad.numbers import storage_dtype

GOOD: dict[str, Any] = {"strides": [2, 2], "pads_begin": [1, 1], "pads_end": [1, 1], "dilations": [1, 1]}
DIFF_DST, WEIGHTS = (2, 4, 5, 6), (3, 3, 4, 6)


def arrays(seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return (rng.integers(-3, 4, DIFF_DST).astype(np.float32), rng.integers(-3, 4, WEIGHTS).astype(np.float32))


def test_immutable_and_comparable() -> None:
    operator = onednn.ConvolutionBackwardData(**GOOD, auto_pad="NONE", data_format="nxc")
    with pytest.raises(AttributeError, match="immutable"):
        operator.groups = 2  # type: ignore[misc]
    with pytest.raises(AttributeError, match="immutable"):
        del operator.groups
    same = onednn.ConvolutionBackwardData(**GOOD, output_padding=[0] * 12, dst_shape=[0] * 12)
    assert operator == same and hash(operator) == hash(same)
    assert operator != onednn.ConvolutionBackwardData(**GOOD, groups=2)
    assert operator != onednn.Convolution(**GOOD)
    assert pickle.loads(pickle.dumps(operator)) == operator
    assert eval(repr(operator), vars(onednn)) == operator
    assert operator.auto_pad == "none" and operator.data_format == "NXC" and operator.output_padding == (0, 0)


def test_signature_names_the_attributes() -> None:
    import inspect

    names = list(inspect.signature(onednn.ConvolutionBackwardData).parameters)
    assert names == ["strides", "pads_begin", "pads_end", "dilations", "auto_pad", "output_padding", "groups",
                     "data_format", "weights_format", "dst_shape", "auto_pad_rule"]


@pytest.mark.parametrize("text", ["same_upper", "SAME_UPPER", "Same_Upper"])
def test_strings_in_any_case(text: str) -> None:
    assert onednn.Convolution(**GOOD, auto_pad=text, data_format="ncx", weights_format="oIx").auto_pad == "same_upper"


def test_no_auto_pad_has_several_spellings() -> None:
    for text in ("none", "None", "NONE", None):
        assert onednn.ConvolutionBackwardData(**GOOD, auto_pad=text) == onednn.ConvolutionBackwardData(**GOOD)


@pytest.mark.parametrize("dtype", ["f32", "F32", "float32", np.float32, np.dtype("float32")])
def test_data_types_in_any_spelling(dtype: Any) -> None:
    operator = onednn.ConvolutionBackwardData(**GOOD)
    assert operator.compile((DIFF_DST, dtype), onednn.LogicalTensor(WEIGHTS, dtype)).output.dtype == "f32"


def test_dst_shape_precedence(engine: str) -> None:
    """Input over attribute over inference; stride 2 leaves a choice of two extents per axis."""
    diff_dst, weights = arrays()
    inferred = onednn.ConvolutionBackwardData(**GOOD)
    assert inferred.infer_shape(DIFF_DST, WEIGHTS) == (2, 7, 9, 4) == inferred(diff_dst, weights).shape
    padded = onednn.ConvolutionBackwardData(**GOOD, output_padding=[1, 0])
    assert padded.infer_shape(DIFF_DST, WEIGHTS) == (2, 8, 9, 4) == padded(diff_dst, weights).shape
    attribute = onednn.ConvolutionBackwardData(**GOOD, dst_shape=[2, 8, 10, 4])
    assert attribute.infer_shape(DIFF_DST, WEIGHTS) == (2, 8, 10, 4) == attribute(diff_dst, weights).shape
    for given in (np.array([2, 7, 10, 4], np.int32), np.array([[2, 7, 10, 4]], np.int32)):
        assert attribute.infer_shape(DIFF_DST, WEIGHTS, given) == (2, 7, 10, 4)
        assert attribute(diff_dst, weights, given).shape == (2, 7, 10, 4)
    assert attribute(weights=weights, diff_dst=diff_dst, dst_shape=[2, 7, 9, 4]).shape == (2, 7, 9, 4)
    # Elements beyond the last window receive nothing; the others do not depend on the choice.
    full, base = attribute(diff_dst, weights), inferred(diff_dst, weights)
    np.testing.assert_array_equal(full[:, :7, :9], base)


def test_weights_shape_precedence(engine: str) -> None:
    src, gradient = np.ones((1, 8, 3), np.float32), np.ones((1, 4, 2), np.float32)
    operator = onednn.ConvolutionBackwardWeights(strides=[2], pads_begin=[0], pads_end=[0], dilations=[1],
                                                 weights_shape=[2, 3, 2])
    assert operator(src, gradient).shape == (2, 3, 2)
    assert operator(src, gradient, np.array([1, 3, 2], np.int32)).shape == (1, 3, 2)


def test_compile_and_scratchpad(engine: str) -> None:
    operator = onednn.ConvolutionBackwardData(**GOOD)
    diff_dst, weights = arrays()
    expected = operator(diff_dst, weights)
    for descriptors in ([(DIFF_DST, "f32"), (WEIGHTS, "float32")], [diff_dst, weights],
                        [onednn.LogicalTensor(DIFF_DST), onednn.LogicalTensor(WEIGHTS, "f32", (72, 24, 6, 1))]):
        compiled = operator.compile(*descriptors)
        assert compiled.output == onednn.LogicalTensor((2, 7, 9, 4), "f32")
        assert (compiled.pads_begin, compiled.pads_end) == ((1, 1), (1, 1))
        assert isinstance(compiled.scratchpad_size, int) and compiled.scratchpad_size >= 0
        guard = 64
        scratchpad = np.full(compiled.scratchpad_size + guard, 0xA5, np.uint8)
        out = np.full(compiled.output.shape, np.nan, np.float32)
        found = compiled(diff_dst, weights, scratchpad=scratchpad[:compiled.scratchpad_size], out=out)
        assert found is out
        assert (scratchpad[compiled.scratchpad_size:] == 0xA5).all()
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(compiled(weights=weights, diff_dst=diff_dst), expected)
    assert "input_grad f32 n2 c4 k6 i7x9 w3x3 s2x2 p1x1 NHWC HWIO" in repr(compiled)


def test_compiled_holds_its_callers_to_the_descriptors(engine: str) -> None:
    diff_dst, weights = arrays()
    compiled = onednn.ConvolutionBackwardData(**GOOD).compile(diff_dst, weights)
    with pytest.raises(onednn.InvalidArguments, match=r"diff_dst is f32 of shape \(1, 4, 5, 6\), but"):
        compiled(diff_dst[:1], weights)
    with pytest.raises(onednn.InvalidArguments, match=r"weights is f16 .* compiled for f32"):
        compiled(diff_dst, weights.astype(np.float16))
    with pytest.raises(onednn.InvalidGraphOp, match="compiled for the inputs diff_dst, weights"):
        compiled(diff_dst)
    with pytest.raises(onednn.InvalidArguments, match="scratchpad must be a 1-D uint8"):
        compiled(diff_dst, weights, scratchpad=np.empty(10**6, np.float32))
    if compiled.scratchpad_size:
        with pytest.raises(onednn.InvalidArguments, match="scratchpad has 0 bytes, but the plan needs"):
            compiled(diff_dst, weights, scratchpad=np.empty(0, np.uint8))


@pytest.mark.parametrize("unknown", [-(2**63), -1])
def test_unknown_strides_are_unimplemented(unknown: int) -> None:
    descriptor = onednn.LogicalTensor(DIFF_DST, "f32", (unknown,) * 4)
    with pytest.raises(onednn.Unimplemented, match=r"strides of diff_dst\[0\] is unknown"):
        onednn.ConvolutionBackwardData(**GOOD).compile(descriptor, (WEIGHTS, "f32"))


def test_same_descriptors_reuse_the_plan(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.frontends.onednn import compiled as module

    asked = []
    original = module.plan
    monkeypatch.setattr(module, "plan", lambda *args, **options: (asked.append(args), original(*args, **options))[1])
    operator = onednn.ConvolutionBackwardData(**GOOD)
    diff_dst, weights = arrays()
    for seed in range(3):
        operator(*arrays(seed))
    assert len(asked) == 1
    operator(diff_dst, weights, (2, 8, 9, 4))
    assert len(asked) == 2
    operator(diff_dst.astype(np.float16), weights.astype(np.float16))
    assert len(asked) == 3
    operator(diff_dst, weights, np.array([2, 8, 9, 4], np.int32))
    assert len(asked) == 3


def test_views_are_read_and_written_where_they_lie(engine: str) -> None:
    operator = onednn.ConvolutionBackwardData(**GOOD)
    diff_dst, weights = arrays()
    expected = operator(diff_dst, weights)
    wide = np.zeros((2, 4, 5, 12), np.float32)
    wide[..., ::2] = diff_dst
    flipped = np.ascontiguousarray(weights[::-1])[::-1]
    memory = np.full((4, 9, 7, 3), np.nan, np.float32)
    out = memory[..., :2].transpose(3, 2, 1, 0)
    operator(wide[..., ::2], flipped, out=out)
    np.testing.assert_array_equal(out, expected)
    assert np.isnan(memory[..., 2]).all()


def test_torch_tensors_and_numpy_arrays_agree(engine: str) -> None:
    torch = pytest.importorskip("torch")
    operator = onednn.ConvolutionBackwardData(**GOOD)
    diff_dst, weights = arrays()
    expected = operator(diff_dst, weights)
    found = operator(torch.from_numpy(diff_dst), torch.from_numpy(weights))
    assert isinstance(found, torch.Tensor)
    np.testing.assert_array_equal(found.numpy(), expected)
    shape = torch.tensor([2, 8, 9, 4], dtype=torch.int32)
    half = operator(torch.from_numpy(diff_dst).bfloat16(), torch.from_numpy(weights).bfloat16(), shape)
    assert half.dtype == torch.bfloat16 and tuple(half.shape) == (2, 8, 9, 4)
    bf16 = storage_dtype("bfloat16")
    numpy_half = operator(diff_dst.astype(bf16), weights.astype(bf16), (2, 8, 9, 4))
    np.testing.assert_array_equal(half.float().numpy(), numpy_half.astype(np.float32))
    conv = onednn.Convolution(**GOOD)
    src = torch.ones((1, 7, 9, 4), dtype=torch.bfloat16)
    with_bias = conv(src, torch.ones(WEIGHTS, dtype=torch.bfloat16), torch.arange(6).bfloat16())
    np.testing.assert_array_equal(with_bias.float()[0, 1, 1].numpy(), 36 + np.arange(6))


def test_a_call_adds_little_to_the_engine() -> None:
    """Few steps on a cached plan: the engine is replaced by nothing, so that only the dialect is left."""
    operator = onednn.ConvolutionBackwardData(**GOOD)
    diff_dst, weights = arrays()
    shape = np.array([2, 8, 9, 4], np.int32)
    compiled = operator.compile(diff_dst, weights, shape, backend="reference")
    compiled.plan = compiled.plan._replace(run=lambda operands, results, workspace: None)
    operator._compiled[(diff_dst.shape, diff_dst.dtype, weights.shape, weights.dtype, (2, 8, 9, 4), None,
                        getattr(diff_dst, "device", None))] = compiled
    out = np.empty(compiled.output.shape, np.float32)
    operator(diff_dst, weights, shape, out=out)
    calls = calls_in(lambda: operator(diff_dst, weights, shape, out=out))
    assert len(operator._compiled) == 1  # the prepared entry was the one in use
    assert calls < 130, f"a call makes {calls} others beside the engine"
