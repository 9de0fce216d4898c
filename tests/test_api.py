"""The public functions with NumPy arrays: every way to say the same thing gives the same result."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import geometries, layouts, problems, weight_layouts

import convgrad
from convgrad import Conv, Problem
from convgrad.numbers import decode, encode
from convgrad.problem import axis_order
from convgrad.verify import integer_operands

CPU_BACKENDS = [name for name in oracle.available_backends() if name != "triton"]
BACKENDS = pytest.mark.parametrize("backend", CPU_BACKENDS)


def integers(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype)


def case(dtype: Any = np.float32) -> dict[str, Any]:
    """A grouped, strided convolution with its operands and exact results."""
    conv = Conv(2, 6, 9, (7, 8), (3, 2), (2, 1), (1, 2), ((1, 0), (2, 1)), 3)
    operands = {"grad_output": integers(conv.output_shape, dtype, 1), "input": integers(conv.input_shape, dtype, 2),
                "weight": integers(conv.weight_shape, dtype, 3)}
    exact = {wrt: oracle.exact_results(Problem(conv, wrt, "float64"), {
        name: array.astype(np.float64) for name, array in operands.items()})[0] for wrt in convgrad.problem.WRT}
    parameters = dict(stride=conv.stride, dilation=conv.dilation, padding=conv.padding, groups=conv.groups)
    return {"conv": conv, **operands, "exact": exact, "parameters": parameters}


@BACKENDS
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_function(backend: str, dtype: Any) -> None:
    c = case(dtype)
    x, w, dy, exact = c["input"], c["weight"], c["grad_output"], c["exact"]
    how = {**c["parameters"], "backend": backend}
    dx, dw, db = convgrad.conv_backward(dy, x, w, **how)
    for got, wrt in ((convgrad.conv(x, w, **how), "output"), (convgrad.input_grad(dy, w, (7, 8), **how), "input"),
                     (convgrad.weight_grad(dy, x, (3, 2), **how), "weight"),
                     (convgrad.bias_grad(dy, backend=backend), "bias"), (dx, "input"), (dw, "weight"), (db, "bias")):
        assert got.dtype == dtype and got.flags.c_contiguous
        assert np.array_equal(got.astype(np.float64), exact[wrt].astype(dtype).astype(np.float64)), wrt


@BACKENDS
@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_large_results_start_at_a_cache_line(backend: str, dtype: Any) -> None:
    x, w = integers((1, 8, 30, 30), dtype), integers((16, 8, 1, 1), dtype)
    results = [convgrad.conv(x, w, backend=backend) for _ in range(5)]  # all held: each has another place
    assert all(result.ctypes.data % 64 == 0 and result.flags.writeable for result in results)


@BACKENDS
@pytest.mark.parametrize("mask", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_masks(backend: str, mask: tuple[int, ...]) -> None:
    c = case()
    results = convgrad.conv_backward(c["grad_output"], c["input"], c["weight"], output_mask=mask, backend=backend,
                                     **c["parameters"])
    for got, wanted, wrt in zip(results, mask, ("input", "weight", "bias"), strict=True):
        assert (got is not None) == bool(wanted)
        if got is not None:
            assert np.array_equal(got, c["exact"][wrt])


@BACKENDS
def test_outputs_and_workspace_of_the_caller(backend: str) -> None:
    c = case()
    outs = tuple(np.full(array.shape, np.nan, np.float32) for array in (c["input"], c["weight"], np.empty(9)))
    results = convgrad.conv_backward(c["grad_output"], c["input"], c["weight"], out=outs, backend=backend,
                                     workspace=np.empty(1 << 22, np.uint8), **c["parameters"])
    for got, out, wrt in zip(results, outs, ("input", "weight", "bias"), strict=True):
        assert got is out and np.array_equal(out, c["exact"][wrt])
    wide = np.full((*c["conv"].output_shape[:3], 2 * c["conv"].output_shape[3]), np.nan, np.float32)
    view = wide[..., ::-2]
    assert convgrad.conv(c["input"], c["weight"], out=view, backend=backend, **c["parameters"]) is view
    assert np.array_equal(view, c["exact"]["output"]) and np.isnan(wide[..., ::2]).all()


@BACKENDS
def test_views_read_only_and_broadcast_operands(backend: str) -> None:
    c = case()
    dy, w = c["grad_output"][:, :, ::-1][:, :, ::-1], c["weight"].copy()
    w.flags.writeable = False
    padded = np.zeros((2, 9, 4, 14), np.float32)
    view = padded[:, :, 1:, 3:3 + dy.shape[3]]
    view[...] = dy
    expected = c["exact"]["input"]
    for some in (dy, view, np.asfortranarray(dy)):
        assert np.array_equal(convgrad.input_grad(some, w, (7, 8), backend=backend, **c["parameters"]), expected)
    ones = np.broadcast_to(np.float32(1), dy.shape)
    assert np.array_equal(convgrad.bias_grad(ones, backend=backend), np.full(9, 2 * dy[0, 0].size))


@BACKENDS
def test_padding_words(backend: str) -> None:
    for size in range(1, 12):
        for kernel, stride, dilation in ((1, 1, 1), (2, 1, 1), (3, 2, 1), (4, 3, 2), (5, 4, 1)):
            x, w = integers((1, 2, size)), integers((3, 2, kernel))
            how = dict(stride=stride, dilation=dilation, backend=backend)
            upper = convgrad.conv(x, w, padding="same_upper", **how)
            assert upper.shape[2] == -(-size // stride)
            total = max(0, (upper.shape[2] - 1) * stride + dilation * (kernel - 1) + 1 - size)
            assert np.array_equal(upper, convgrad.conv(x, w, padding=((total // 2, total - total // 2),), **how))
            lower = convgrad.conv(x, w, padding="same_lower", **how)
            assert np.array_equal(lower, convgrad.conv(x, w, padding=((total - total // 2, total // 2),), **how))
            if dilation * (kernel - 1) < size:
                assert np.array_equal(convgrad.conv(x, w, padding="valid", **how), convgrad.conv(x, w, **how))


@BACKENDS
def test_the_same_numbers_in_any_type(backend: str) -> None:
    x, w = integers((1, 2, 7, 8)), integers((4, 2, 3, 3))
    expected = convgrad.conv(x, w, stride=(2, 2), padding=((1, 1), (1, 1)), backend=backend)
    for stride in (2, [2, 2], np.int64(2), np.array([2, 2]), (np.int32(2), 2)):
        for padding in (1, [1, 1], (1, (1, 1)), np.array([[1, 1], [1, 1]])):
            assert np.array_equal(convgrad.conv(x, w, stride=stride, padding=padding, backend=backend), expected)


def test_equal_keys_of_different_types_are_different_calls() -> None:
    """1, True and 1.0 are equal, but only 1 is a stride, also after a good call was remembered."""
    x, w = integers((1, 1, 5)), integers((1, 1, 2))
    convgrad.conv(x, w, stride=1, groups=1, backend="reference")
    for wrong in (True, 1.0):
        with pytest.raises(TypeError):
            convgrad.conv(x, w, stride=wrong, backend="reference")
        with pytest.raises(TypeError):
            convgrad.conv(x, w, groups=wrong, backend="reference")


@BACKENDS
@pytest.mark.parametrize("name", ["hifloat8", "float8_e4m3fn", "float8_e5m2"])
def test_eight_bits_as_uint8_storage(backend: str, name: str) -> None:
    c = case(np.float64)
    codes = {key: encode(c[key], name).view(np.uint8) for key in ("grad_output", "input", "weight")}
    how = {**c["parameters"], "backend": backend, "dtype": name}
    got = convgrad.input_grad(codes["grad_output"], codes["weight"], (7, 8), **how)
    assert got.dtype == np.float32 and np.array_equal(got, c["exact"]["input"])
    narrow = convgrad.input_grad(codes["grad_output"], codes["weight"], (7, 8), out_dtype=name, **how)
    assert np.array_equal(decode(narrow, name), decode(encode(c["exact"]["input"], name), name))
    out = np.empty(c["conv"].input_shape, np.uint8)
    convgrad.input_grad(codes["grad_output"], codes["weight"], (7, 8), out_dtype=name, out=out, **how)
    assert np.array_equal(out, narrow.view(np.uint8))


@BACKENDS
def test_hifloat8_arrays_of_en_dtypes(backend: str) -> None:
    en_dtypes = pytest.importorskip("en_dtypes")
    c = case(np.float64)
    dy, w = (encode(c[key], "hifloat8").view(en_dtypes.hifloat8) for key in ("grad_output", "weight"))
    got = convgrad.input_grad(dy, w, (7, 8), backend=backend, out_dtype="hifloat8", **c["parameters"])
    assert got.dtype == en_dtypes.hifloat8
    assert np.array_equal(got.view(np.uint8), encode(c["exact"]["input"], "hifloat8"))


@given(conv=geometries(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_layouts_of_the_public_functions(conv: Conv, data: st.DataObject) -> None:
    """Arrays in any axis order give results in that axis order."""
    layout, weight_layout = data.draw(layouts(conv.axes)), data.draw(weight_layouts(conv.axes))
    operands = integer_operands(Problem(conv, "input+weight+bias", "float64"), thin=False)
    how = dict(stride=conv.stride, padding=conv.padding, dilation=conv.dilation, groups=conv.groups,
               backend=CPU_BACKENDS[0])
    order, weight_order = axis_order(layout, conv.axes), axis_order(weight_layout, conv.axes, weights=True)

    def told(array: np.ndarray, places: tuple[int, ...]) -> np.ndarray:
        return array.transpose(np.argsort(places))

    dy, x, w = (operands[name] for name in ("grad_output", "input", "weight"))
    plain = convgrad.conv_backward(dy, x, w, **how)
    dx, dw, db = convgrad.conv_backward(told(dy, order), told(x, order), told(w, weight_order), layout=layout,
                                        weight_layout=weight_layout.lower(), **how)
    assert np.array_equal(dx, told(plain[0], order))
    assert np.array_equal(dw, told(plain[1], weight_order))
    assert np.array_equal(db, plain[2])


@BACKENDS
def test_time_first_layout(backend: str) -> None:
    x, w = integers((2, 3, 9)), integers((4, 3, 3))
    expected = convgrad.conv(x, w, padding=1, backend=backend)
    got = convgrad.conv(x.transpose(2, 0, 1), w.transpose(2, 1, 0), padding=1, layout="TBC", weight_layout="TIO",
                        backend=backend)
    assert np.array_equal(got, expected.transpose(2, 0, 1))


@BACKENDS
def test_transposed_weight_layout_and_words(backend: str) -> None:
    x, w = integers((2, 4, 5, 6)), integers((4, 3, 3, 2))
    expected = convgrad.conv_transpose(x, w, stride=2, padding=1, output_padding=1, backend=backend)
    got = convgrad.conv_transpose(x.transpose(0, 2, 3, 1), w.transpose(2, 3, 0, 1), stride=2, padding=1,
                                  output_padding=1, layout="NHWC", weight_layout="HWIO", backend=backend)
    assert np.array_equal(got, expected.transpose(0, 2, 3, 1))
    for word in ("same_upper", "same_lower"):
        assert convgrad.conv_transpose(x, w, stride=3, padding=word, backend=backend).shape == (2, 3, 15, 18)
    gradients = convgrad.conv_transpose_backward(np.ones_like(expected), x, w, stride=2, padding=1, output_padding=1,
                                                 output_mask=(False, True, False), backend=backend)
    assert gradients[0] is None and gradients[2] is None and gradients[1].shape == w.shape


@BACKENDS
def test_transposed_outputs(backend: str) -> None:
    dy, x, w = integers((1, 3, 9)), integers((1, 2, 4)), integers((2, 3, 3))
    outs = tuple(np.full(shape, np.nan, np.float32) for shape in (x.shape, w.shape, (3,)))
    results = convgrad.conv_transpose_backward(dy, x, w, stride=2, out=outs, backend=backend)
    plain = convgrad.conv_transpose_backward(dy, x, w, stride=2, backend=backend)
    for got, out, value in zip(results, outs, plain, strict=True):
        assert got is out and np.array_equal(got, value)


@given(problem=problems(empty=True))
@settings(max_examples=300, deadline=None)
def test_problem_strings_round_trip(problem: Problem) -> None:
    assert Problem.parse(str(problem)) == problem
    assert hash(Problem.parse(str(problem))) == hash(problem)
    assert pickle.loads(pickle.dumps(problem)) == problem
    on_gpu = problem.with_(device="cuda")
    assert Problem.parse(str(on_gpu)) == on_gpu != problem


def test_huge_extents_are_exact() -> None:
    conv = Conv(3, 2**20, 2**20, (2**21, 2**10), (3, 3), (2, 1), (1, 1), ((1, 1), (1, 1)))
    assert conv.output_shape == (3, 2**20, 2**20, 2**10)
    assert conv.flops("input") > 2**75 and Problem(conv).min_bytes > 2**50


def test_plans_are_remembered_and_composed() -> None:
    text = "input_grad+weight_grad+bias_grad f32 n1 c2 k3 i5x5 w3x3"
    chosen = convgrad.plan(text, backend="reference")
    assert convgrad.plan(text, backend="reference") is chosen
    assert chosen.problem.results == ("input", "weight", "bias")


@pytest.mark.parametrize("conv, axis, expected", [
    ("i5 w3 s2 p1", 0, [".-----.", "***", "  ***", "    ***"]),
    ("i4x6 w2x2 d1x3 p0x0", 1, ["------", "*  *", " *  *", "  *  *"]),
])
def test_sketches(conv: str, axis: int, expected: list[str]) -> None:
    lines = str(convgrad.explain(f"conv f32 n1 c1 k1 {conv}", backend="reference", axis=axis)).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("axis"))
    assert [line[10:].split("   input")[0].rstrip() for line in lines[start + 1:]] == expected


def test_a_long_sketch_is_cut() -> None:
    text = str(convgrad.explain("conv f32 n1 c1 k1 i5000 w3 s7 d900", backend="reference"))
    assert max(map(len, text.splitlines())) < 120 and "…" in text and "..." in text


class Pair(Sequence[int]):
    """A sequence whose repr says nothing about what it holds."""

    def __init__(self, *values: int) -> None:
        self.values = values

    def __repr__(self) -> str:
        return "a pair"

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: Any) -> Any:
        return self.values[place]


def test_sequences_of_any_type_are_told_apart_by_their_values() -> None:
    """They were told apart by their repr: the second call was prepared with the first one's stride."""
    x, w = np.ones((1, 1, 9, 9), np.float32), np.ones((1, 1, 3, 3), np.float32)
    shapes = [convgrad.conv(x, w, stride=Pair(*stride), backend="reference").shape for stride in ((1, 2), (2, 1))]
    assert shapes == [(1, 1, 7, 4), (1, 1, 4, 7)]
