"""Transposed convolutions whose output_padding is at or above the stride, against the definition."""

from __future__ import annotations

import numpy as np
import pytest

import convgrad

CASES = [
    dict(stride=1, dilation=2, padding=0, output_padding=1),  # torch's rule: below the dilation
    dict(stride=(2, 1), dilation=(1, 3), padding=((1, 0), (0, 2)), output_padding=(3, 2)),
    dict(stride=(1, 2), dilation=1, padding=(1, 1), output_padding=(1, 5)),
    dict(stride=3, dilation=1, padding=((0, 4), (1, 1)), output_padding=(4, 3)),
    dict(stride=2, dilation=1, padding="valid", output_padding=(2, 0)),
]


def pairs(value, twice=False):
    value = (value, value) if isinstance(value, int) else value
    return tuple((v, v) if twice and isinstance(v, int) else v for v in value)


def definition(x, w, stride, dilation, padding, output_padding):
    """Sums over all taps into a plane without padding, then the window that padding and output_padding leave."""
    stride, dilation, extra = pairs(stride), pairs(dilation), pairs(output_padding)
    pads = ((0, 0), (0, 0)) if padding == "valid" else pairs(padding, twice=True)
    n, _, *size = x.shape
    sizes = [s * (o - 1) + (k - 1) * d + 1 for s, o, k, d in zip(stride, size, w.shape[2:], dilation)]
    plane = np.zeros((n, w.shape[1], *(extent + 20 for extent in sizes)))
    for place in np.ndindex(*size, *w.shape[2:]):
        y = [o * s + k * d for o, k, s, d in zip(place[:2], place[2:], stride, dilation)]
        plane[:, :, y[0], y[1]] += np.einsum("nc,ck->nk", x[:, :, place[0], place[1]], w[:, :, place[2], place[3]])
    ends = [low + extent - low - high + more for extent, (low, high), more in zip(sizes, pads, extra)]
    return plane[:, :, pads[0][0]:ends[0], pads[1][0]:ends[1]]


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    return tuple(rng.integers(-3, 4, shape).astype(np.float32) for shape in ((2, 3, 4, 5), (3, 2, 3, 2)))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["reference", None])
def test_output(case, operands, backend):
    expected = definition(*operands, **case)
    for _ in range(2):  # the second call is a repeated one
        np.testing.assert_array_equal(convgrad.conv_transpose(*operands, **case, backend=backend), expected)
    out = np.full(expected.shape, 77, np.float32)
    assert convgrad.conv_transpose(*operands, **case, out=out, backend=backend) is out
    np.testing.assert_array_equal(out, expected)
    x, w = np.moveaxis(operands[0], 1, -1), operands[1].transpose(2, 3, 1, 0)
    last = convgrad.conv_transpose(x, w, **case, layout="NHWC", weight_layout="HWOI", backend=backend)
    np.testing.assert_array_equal(np.moveaxis(last, -1, 1), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["reference", None])
def test_gradients(case, operands, backend):
    """The gradients of sum(g * output) by the definition, exact on whole numbers."""
    x, w = operands
    g = np.random.default_rng(1).integers(-3, 4, definition(x, w, **case).shape).astype(np.float32)
    dx, dw, db = convgrad.conv_transpose_backward(g, x, w, **case, backend=backend)
    np.testing.assert_array_equal(db, g.sum((0, 2, 3)))
    for place in ((0, 0, 0, 0), (1, 2, 3, 4), (0, 1, 2, 3)):
        one = np.zeros_like(x)
        one[place] = 1
        assert dx[place] == (g * definition(one, w, **case)).sum()
    for place in ((0, 0, 0, 0), (2, 1, 2, 1), (1, 0, 1, 1)):
        one = np.zeros_like(w)
        one[place] = 1
        assert dw[place] == (g * definition(x, one, **case)).sum()


def test_agrees_with_torch(operands):
    torch = pytest.importorskip("torch")
    x, w = operands
    case = dict(stride=1, dilation=3, padding=1, output_padding=2)
    expected = torch.nn.functional.conv_transpose2d(torch.from_numpy(x), torch.from_numpy(w), **case)
    np.testing.assert_array_equal(convgrad.conv_transpose(x, w, **case), expected.numpy())
    np.testing.assert_array_equal(convgrad.conv_transpose(torch.from_numpy(x), torch.from_numpy(w), **case), expected)


def test_an_out_of_another_shape_stays_untouched(operands):
    out = np.full((2, 2, 6, 9), 77, np.float32)
    with pytest.raises(ValueError, match=r"out has shape \(2, 2, 6, 9\)"):
        convgrad.conv_transpose(*operands, output_padding=3, out=out)
    assert (out == 77).all()
    with pytest.raises(ValueError, match="does not go with padding='same_upper'"):
        convgrad.conv_transpose(*operands, padding="same_upper", output_padding=3)
