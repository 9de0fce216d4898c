"""Every operator against the sums written down tap by tap, bitwise on integers, in all layouts."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from onednn_definition import Case, compute, integers
from onednn_geometries import LISTED, cases

from convgrad import Problem, onednn
from convgrad.numbers import storage_dtype
from convgrad.verify import geometry_sets

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
FORMATS = list(itertools.product(("NXC", "NCX"), ("XIO", "OIX")))
TRANSPOSED = {"XIO": "XOI", "OIX": "IOX"}
# operator -> (roles of its two inputs, role of its result)
ROLES = {
    "Convolution": (("large", "weights"), "small"),
    "ConvolutionBackwardData": (("small", "weights"), "large"),
    "ConvolutionBackwardWeights": (("large", "small"), "weights"),
    "ConvTranspose": (("small", "weights"), "large"),
    "ConvTransposeBackwardData": (("large", "weights"), "small"),
    "ConvTransposeBackwardWeights": (("small", "large"), "weights"),
}
KIND_OF_RESULT = {"output": "Convolution", "input": "ConvolutionBackwardData", "weight": "ConvolutionBackwardWeights",
                  "bias": "ConvolutionBackwardWeights"}


def laid_out(array: Any, role: str, data_format: str, weights_format: str) -> Any:
    """From canonical axis order to the format's."""
    if role == "weights":
        return np.ascontiguousarray(array if weights_format == "OIX" else np.moveaxis(array, (1, 0), (-2, -1)))
    return np.ascontiguousarray(array if data_format == "NCX" else np.moveaxis(array, 1, -1))


def rest(case: Case) -> tuple[int, ...]:
    """What ConvTranspose must add at the end to reach the large extent: its output_padding."""
    return tuple(large - (s * (small - 1) + (k - 1) * d + 1 - begin - end) for large, small, s, k, d, begin, end
                 in zip(case.large, case.small, case.strides, case.kernel, case.dilations, case.pads_begin,
                        case.pads_end))


def check(kind: str, case: Case, data_format: str, weights_format: str, dtype: str = "f32") -> None:
    """Run one operator and compare every bit with the definition."""
    roles, result = ROLES[kind]
    seed = zlib.crc32(repr(case).encode())
    tensors = {role: integers(case, role, seed) for role in roles}
    expected = laid_out(compute(case, result, tensors), result, data_format, weights_format)
    stored = storage_dtype(DTYPES[dtype])
    attributes = dict(case.attributes, data_format=data_format,
                      weights_format=TRANSPOSED[weights_format] if "Transpose" in kind else weights_format)
    extra = []
    if kind == "ConvTranspose":
        attributes["output_padding"] = rest(case)
    elif kind == "ConvolutionBackwardData" or result == "weights":
        extra = [np.array(expected.shape, np.int32)]
    operator = onednn.OPERATORS[kind](**attributes)
    inputs = [laid_out(tensors[role], role, data_format, weights_format).astype(stored) for role in roles]
    found = operator(*inputs, *extra)
    assert found.dtype == stored
    assert found.shape == expected.shape
    assert found.tobytes() == (expected + 0.0).astype(np.float32).astype(stored).tobytes()


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("kind", ROLES)
def test_listed_geometries(kind: str, name: str, formats: tuple[str, str], engine: str) -> None:
    check(kind, LISTED[name], *formats)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["1d_strided", "2d_grouped", "2d_dilated", "3d_strided_grouped"])
@pytest.mark.parametrize("kind", ROLES)
def test_half_precision(kind: str, name: str, dtype: str, engine: str) -> None:
    check(kind, LISTED[name], "NXC", "XIO", dtype)


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_random_geometries(formats: tuple[str, str], engine: str) -> None:
    """120 random geometries for each pair of formats: 480 of the operator that this dialect is about."""

    @settings(max_examples=120, deadline=None, derandomize=True,
              suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(case=cases())
    def run(case: Case) -> None:
        check("ConvolutionBackwardData", case, *formats)

    run()


@pytest.mark.parametrize("kind", [kind for kind in ROLES if kind != "ConvolutionBackwardData"])
def test_random_geometries_of_the_siblings(kind: str, engine: str) -> None:

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(case=cases())
    def run(case: Case) -> None:
        for formats in FORMATS[::3]:
            check(kind, case, *formats)

    run()


def test_library_example(engine: str) -> None:
    """The library's own literal example: a 2x2 gradient spread over 4x4 by a checkered kernel."""
    operator = onednn.ConvolutionBackwardData(
        strides=[1, 1], pads_begin=[0, 0], pads_end=[0, 0], dilations=[1, 1], data_format="NCX", weights_format="OIX",
        dst_shape=[1, 1, 4, 4])
    diff_dst = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    weights = np.array([1, 0, 1, 0, 1, 0, 1, 0, 1], np.float32).reshape(1, 1, 3, 3)
    expected = [[0, 1, 0, 1], [2, 3, 3, 3], [0, 3, 3, 1], [2, 3, 2, 3]]
    np.testing.assert_array_equal(operator(diff_dst, weights), np.array(expected, np.float32)[None, None])


def test_one_rounding_with_bias(engine: str) -> None:
    """The bias joins the f32 sum before the single rounding: 256 + 0.75 + 0.75 rounds to 258 in bf16, not to 256."""
    bf16 = storage_dtype("bfloat16")
    operator = onednn.Convolution(strides=[1], pads_begin=[0], pads_end=[0], dilations=[1])
    src = np.array([256, 0.75], bf16).reshape(1, 1, 2)
    found = operator(src, np.ones((1, 2, 1), bf16), np.array([0.75], bf16))
    assert float(found[0, 0, 0]) == 258.0


@pytest.mark.parametrize("data_format", ["NXC", "NCX"])
@pytest.mark.parametrize("kind", ["Convolution", "ConvTranspose"])
def test_bias_of_each_channel(kind: str, data_format: str, engine: str) -> None:
    case = LISTED["2d_grouped"]
    roles, result = ROLES[kind]
    tensors = {role: integers(case, role, 5) for role in roles}
    bias = np.arange(1, case.shapes[result][1] + 1, dtype=np.float32)
    expected = compute(case, result, tensors) + bias[:, None, None]
    extra = {"output_padding": rest(case)} if kind == "ConvTranspose" else {}
    operator = onednn.OPERATORS[kind](**case.attributes, **extra, data_format=data_format,
                                      weights_format="IOX" if kind == "ConvTranspose" else "OIX")
    inputs = [laid_out(tensors[role], role, data_format, "OIX").astype(np.float32) for role in roles]
    np.testing.assert_array_equal(operator(*inputs, bias), laid_out(expected, result, data_format, "OIX"))


def case_of(problem: Problem) -> Case:
    conv = problem.conv
    begins, ends = zip(*conv.padding)
    return Case(conv.batch, conv.in_channels, conv.out_channels, conv.in_size, conv.out_size, conv.kernel_size,
                conv.stride, conv.dilation, begins, ends, conv.groups)


@pytest.mark.parametrize("name", geometry_sets())
def test_geometries_of_the_project(name: str, engine: str) -> None:
    """The package's own list, the four pairs of formats in turn; shapes that oneDNN has no word for are refused."""
    for place, problem in enumerate(geometry_sets()[name]):
        case = case_of(problem)
        kind = KIND_OF_RESULT[problem.results[0]]
        if 0 in case.shapes["weights"]:
            with pytest.raises(onednn.InvalidArguments, match="has no elements"):
                check(kind, case, *FORMATS[place % 4])
        elif all(small > 0 for small in case.small):
            check(kind, case, *FORMATS[place % 4])
            check("ConvolutionBackwardData", case, *FORMATS[(place + 1) % 4])


def test_no_gradient_positions_gives_zeros(engine: str) -> None:
    """diff_dst without elements is legal where the shape law says 0: every element of diff_src is then +0."""
    operator = onednn.ConvolutionBackwardData(strides=[1], pads_begin=[0], pads_end=[0], dilations=[1])
    out = np.full((2, 2, 3), np.nan, np.float32)
    operator(np.empty((2, 0, 8), np.float32), np.ones((3, 3, 8), np.float32), (2, 2, 3), out=out)
    assert out.tobytes() == bytes(out.nbytes)


@pytest.mark.filterwarnings("ignore::convgrad.onednn.OutputPaddingWarning")
@pytest.mark.parametrize("kind", ["ConvolutionBackwardData", "ConvTranspose"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("stride, dilation, pads, extra, bias", [
    ((2, 1), (1, 1), ((0, 0), (0, 0)), (3, 0), False), ((1, 1), (2, 1), ((1, 1), (0, 2)), (1, 2), True),
    ((2, 3), (1, 2), ((1, 0), (2, 3)), (5, 4), True), ((1, 2), (1, 1), ((0, 4), (1, 0)), (2, 9), False)])
def test_output_padding_beyond_the_stride(kind, dtype, stride, dilation, pads, extra, bias, engine):
    """The transposed convolution without pads, shifted into a result that is as long as output_padding makes it."""
    rng = np.random.default_rng(0)
    small, weights = rng.integers(-3, 4, (2, 5, 6, 4)), rng.integers(-3, 4, (3, 2, 3, 4))
    pb, pe = zip(*pads)
    operator = onednn.OPERATORS[kind](strides=stride, pads_begin=pb, pads_end=pe, dilations=dilation,
                                      output_padding=extra, data_format="NXC",
                                      weights_format="XIO" if kind == "ConvolutionBackwardData" else "XOI")
    span = [(k - 1) * d + 1 for k, d in zip((3, 2), dilation)]
    sizes = [s * (o - 1) + e for s, o, e in zip(stride, (5, 6), span)]
    full = np.zeros((2, *(size + 20 for size in sizes), 3))
    for y, x, i, j in np.ndindex(5, 6, 3, 2):
        full[:, y * stride[0] + i * dilation[0], x * stride[1] + j * dilation[1]] += \
            small[:, y, x] @ weights[i, j].T
    extents = [size - b - e + more for size, b, e, more in zip(sizes, pb, pe, extra)]
    expected = full[:, pb[0]:pb[0] + extents[0], pb[1]:pb[1] + extents[1]]
    added = np.array([3, -2, 5], dtype) if bias and kind == "ConvTranspose" else None
    out = np.full((2, *extents, 3), 77, dtype)
    inputs = [small.astype(dtype), weights.astype(dtype)] + ([] if added is None else [added])
    assert operator(*inputs, out=out) is out
    np.testing.assert_array_equal(out, expected + (0 if added is None else added))
