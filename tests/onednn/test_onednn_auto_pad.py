"""Both auto_pad rules on hand-computed numbers, the warning where they differ, and the results they lead to."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest

from convgrad import onednn
from convgrad.frontends.onednn.padding import Axis, document_pads, library_pads, transpose_pads


class Row(NamedTuple):
    """One axis, and the pads by hand for (same_upper, same_lower) in each rule."""

    kernel: int
    stride: int
    dilation: int
    output_padding: int
    large: int
    small: int
    document: tuple[tuple[int, int], tuple[int, int]]
    library: tuple[tuple[int, int], tuple[int, int]]


ROWS = {
    # total 1*(6-1) + 4 - 6 = 3 in the document; 4 - 1 = 3 in the library
    "odd": Row(4, 1, 1, 0, 6, 6, ((2, 1), (1, 2)), ((1, 2), (2, 1))),
    # 5 + 3 - 6 = 2
    "even": Row(3, 1, 1, 0, 6, 6, ((1, 1), (1, 1)), ((1, 1), (1, 1))),
    # 2*3 + 3 - 8 = 1; 8 % 2 = 0, so 3 - 2 = 1
    "strided_odd": Row(3, 2, 1, 0, 8, 4, ((1, 0), (0, 1)), ((0, 1), (1, 0))),
    # 2*3 + 3 - 7 = 2; 7 % 2 = 1, so 3 - 1 = 2
    "strided_even": Row(3, 2, 1, 0, 7, 4, ((1, 1), (1, 1)), ((1, 1), (1, 1))),
    # span (2-1)*3 + 1 = 4: 5 + 4 - 6 = 3
    "dilated_odd": Row(2, 1, 3, 0, 6, 6, ((2, 1), (1, 2)), ((1, 2), (2, 1))),
    # span (3-1)*2 + 1 = 5: 5 + 5 - 6 = 4
    "dilated_even": Row(3, 1, 2, 0, 6, 6, ((2, 2), (2, 2)), ((2, 2), (2, 2))),
    # span 7, 3*3 + 7 - 11 = 5; 11 % 3 = 2, so 7 - 2 = 5
    "strided_dilated": Row(4, 3, 2, 0, 11, 4, ((3, 2), (2, 3)), ((2, 3), (3, 2))),
    # 2*3 + 3 - 8 + 1 = 2; the library does not look at output_padding and stays at 1
    "output_padding_even": Row(3, 2, 1, 1, 8, 4, ((1, 1), (1, 1)), ((0, 1), (1, 0))),
    # 3*3 + 4 - 11 + 1 = 3; 4 - 2 = 2
    "output_padding_odd": Row(4, 3, 1, 1, 11, 4, ((2, 1), (1, 2)), ((1, 1), (1, 1))),
    # 2*13 + 1 - 28 = -1 counts as 0; 1 - 2 < 0 is 0
    "negative": Row(1, 2, 1, 0, 28, 14, ((0, 0), (0, 0)), ((0, 0), (0, 0))),
    # small is not ceil(large / stride): 1*4 + 4 - 6 = 2; the library still says 3
    "free_small": Row(4, 1, 1, 0, 6, 5, ((1, 1), (1, 1)), ((1, 2), (2, 1))),
}
WITH_BOTH_LEGAL = [name for name in ROWS if name not in ("output_padding_even", "output_padding_odd", "free_small")]
# Another axis beside the one under test, for which both rules give (1, 1).
NEIGHBOUR = ROWS["even"]


@pytest.mark.parametrize("name", ROWS)
def test_rules_by_hand(name: str) -> None:
    row = ROWS[name]
    axis = Axis(*row[:4])
    for place, auto_pad in enumerate(("same_upper", "same_lower")):
        assert document_pads(auto_pad, axis, row.large, row.small) == row.document[place]
        assert library_pads(auto_pad, axis, row.large) == row.library[place]
    assert document_pads("valid", axis, row.large, row.small) == (0, 0) == library_pads("valid", axis, row.large)


def operator_for(rows: list[Row], auto_pad: str, rule: str) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """An operator over the given axes, with the shapes of diff_dst and weights."""
    axes = len(rows)
    operator = onednn.ConvolutionBackwardData(
        strides=[row.stride for row in rows], dilations=[row.dilation for row in rows], pads_begin=[9] * axes,
        pads_end=[9] * axes, output_padding=[row.output_padding for row in rows], auto_pad=auto_pad,
        auto_pad_rule=rule, dst_shape=[2, *(row.large for row in rows), 3])
    return operator, (2, *(row.small for row in rows), 4), (*(row.kernel for row in rows), 3, 4)


@pytest.mark.parametrize("auto_pad", ["same_upper", "SAME_LOWER"])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("axes, place", [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_document_rule_on_every_axis(axes: int, place: int, name: str, auto_pad: str) -> None:
    rows = [ROWS[name] if axis == place else NEIGHBOUR for axis in range(axes)]
    operator, diff_dst, weights = operator_for(rows, auto_pad, "document")
    pick = ("same_upper", "same_lower").index(auto_pad.lower())
    expected = [row.document[pick] for row in rows]
    assert operator.pads(diff_dst, weights) == tuple(zip(*expected))
    assert operator.infer_shape(diff_dst, weights) == operator.dst_shape


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "same_lower"])
@pytest.mark.parametrize("name", WITH_BOTH_LEGAL)
@pytest.mark.parametrize("axes, place", [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_library_rule_on_every_axis(axes: int, place: int, name: str, auto_pad: str) -> None:
    rows = [ROWS[name] if axis == place else NEIGHBOUR for axis in range(axes)]
    operator, diff_dst, weights = operator_for(rows, auto_pad, "library")
    pick = ("same_upper", "same_lower").index(auto_pad.lower())
    assert operator.pads(diff_dst, weights) == tuple(zip(*[row.library[pick] for row in rows]))


@pytest.mark.parametrize("name", ["output_padding_even", "output_padding_odd", "free_small"])
def test_library_rule_refuses_what_it_cannot_pad(name: str) -> None:
    """Its pads can be asked for, and do not fit the extents."""
    operator, diff_dst, weights = operator_for([ROWS[name]], "same_upper", "library")
    assert operator.pads(diff_dst, weights) == tuple((pad,) for pad in ROWS[name].library[0])
    for ask in (operator.infer_shape, lambda *shapes: operator.compile(*((shape, "f32") for shape in shapes))):
        with pytest.raises(onednn.InvalidArguments):
            ask(diff_dst, weights)


def test_library_unit_evidence() -> None:
    """The pads that the library's own shape tests state: extent 6, kernel 4, stride 1."""
    for auto_pad, dst, expected in (("SAME_UPPER", 6, (1, 2)), ("SAME_LOWER", 6, (2, 1)), ("VALID", 9, (0, 0)),
                                    ("None", 6, (1, 2))):
        operator = onednn.ConvolutionBackwardData(strides=[1], pads_begin=[1], pads_end=[2], dilations=[1],
                                                  auto_pad=auto_pad, dst_shape=[1, dst, 1], auto_pad_rule="library")
        assert operator.pads((1, 6, 1), (4, 1, 1)) == ((expected[0],), (expected[1],))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("rule", ["document", "library"])
def test_warning_where_the_rules_differ(name: str, rule: str, engine: str) -> None:
    row = ROWS[name]
    for place, auto_pad in enumerate(("same_upper", "same_lower")):
        operator, diff_dst, weights = operator_for([row], auto_pad, rule)
        arrays = np.ones(diff_dst, np.float32), np.ones(weights, np.float32)
        if rule == "library" and name not in WITH_BOTH_LEGAL:  # these pads contradict the shapes
            with pytest.raises(onednn.InvalidArguments):
                operator(*arrays)
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            operator(*arrays)
            operator(*arrays)
            operator.compile(*arrays)
        assert all(warning.category is onednn.AutoPadWarning for warning in caught)
        if row.document[place] == row.library[place]:
            assert not caught
        else:
            assert len(caught) == 1  # said once, although called twice and compiled again
            text = str(caught[0].message)
            assert str([row.document[place]]) in text and str([row.library[place]]) in text and repr(rule) in text
            assert caught[0].filename == __file__


def one_axis(kind: str, **attributes: Any) -> Any:
    return onednn.OPERATORS[kind](**{"strides": [1], "pads_begin": [0], "pads_end": [0], "dilations": [1],
                                     **attributes})


def vector(*values: float) -> Any:
    return np.array(values, np.float32).reshape(1, -1, 1)


@pytest.mark.filterwarnings("ignore::convgrad.frontends.onednn.AutoPadWarning")
@pytest.mark.parametrize("auto_pad, rule, extent, expected", [
    # weights 1, 10; diff_dst 1, 2, 3; full result 1, 12, 23, 30; the pads cut it
    ("valid", "document", 4, [1, 12, 23, 30]),
    ("same_upper", "document", 3, [12, 23, 30]),
    ("same_lower", "document", 3, [1, 12, 23]),
    ("valid", "library", 4, [1, 12, 23, 30]),
    ("same_upper", "library", 3, [1, 12, 23]),
    ("same_lower", "library", 3, [12, 23, 30]),
])
def test_backward_data_by_hand(auto_pad: str, rule: str, extent: int, expected: list[float], engine: str) -> None:
    operator = one_axis("ConvolutionBackwardData", auto_pad=auto_pad, auto_pad_rule=rule, pads_begin=[7],
                        dst_shape=[1, extent, 1])
    found = operator(vector(1, 2, 3), np.array([1, 10], np.float32).reshape(2, 1, 1))
    np.testing.assert_array_equal(found, vector(*expected))


def test_backward_data_with_explicit_pads_by_hand(engine: str) -> None:
    found = one_axis("ConvolutionBackwardData", pads_begin=[1], pads_end=[1])(
        vector(1, 2, 3), np.array([1, 10], np.float32).reshape(2, 1, 1))
    np.testing.assert_array_equal(found, vector(12, 23))


@pytest.mark.parametrize("auto_pad, output_padding, expected", [
    # weights 1, 10, 100; src 1, 2; stride 2; full result 1, 10, 102, 20, 200; span - stride = 1 is cut off
    ("valid", 0, [1, 10, 102, 20, 200]),
    ("same_upper", 0, [1, 10, 102, 20]),
    ("same_lower", 0, [10, 102, 20, 200]),
    ("same_upper", 1, [1, 10, 102, 20, 200]),
    ("same_lower", 1, [10, 102, 20, 200, 0]),
])
def test_conv_transpose_by_hand(auto_pad: str, output_padding: int, expected: list[float], engine: str) -> None:
    operator = one_axis("ConvTranspose", strides=[2], auto_pad=auto_pad, output_padding=[output_padding])
    found = operator(vector(1, 2), np.array([1, 10, 100], np.float32).reshape(3, 1, 1))
    np.testing.assert_array_equal(found, vector(*expected))


@pytest.mark.parametrize("kind", ["Convolution", "ConvTransposeBackwardData"])
@pytest.mark.parametrize("auto_pad, expected", [
    # weights 1, 10, 100; large tensor 1, 2, 3, 4; stride 2; total padding 3 - 2 = 1
    ("valid", [321]), ("same_upper", [321, 43]), ("same_lower", [210, 432])])
def test_forward_direction_by_hand(kind: str, auto_pad: str, expected: list[float], engine: str) -> None:
    found = one_axis(kind, strides=[2], auto_pad=auto_pad)(
        vector(1, 2, 3, 4), np.array([1, 10, 100], np.float32).reshape(3, 1, 1))
    np.testing.assert_array_equal(found, vector(*expected))


@pytest.mark.parametrize("auto_pad, gradient, expected", [
    ("valid", [1], [1, 2, 3]), ("same_upper", [1, 10], [31, 42, 3]), ("same_lower", [1, 10], [20, 31, 42])])
def test_backward_weights_by_hand(auto_pad: str, gradient: list[float], expected: list[float], engine: str) -> None:
    """diff_weights[k] = sum of gradient[q] * large[2q + k - begin], large = 1, 2, 3, 4."""
    large, small = vector(1, 2, 3, 4), vector(*gradient)
    for kind, inputs in (("ConvolutionBackwardWeights", (large, small)),
                         ("ConvTransposeBackwardWeights", (small, large))):
        found = one_axis(kind, strides=[2], auto_pad=auto_pad, weights_shape=[3, 1, 1])(*inputs)
        np.testing.assert_array_equal(found.ravel(), expected)


def test_transpose_pads_by_hand() -> None:
    assert transpose_pads("same_upper", Axis(4, 1, 1)) == (1, 2)
    assert transpose_pads("same_lower", Axis(4, 1, 1)) == (2, 1)
    assert transpose_pads("same_upper", Axis(1, 3, 1)) == (0, 0)
