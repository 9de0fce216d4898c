"""The blocked formats against their index formulas, element by element, and against published storage shapes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from convgrad import blocked

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16),
          "bfloat16": np.dtype(ml_dtypes.bfloat16), "hifloat8": np.dtype(np.uint8)}
C0 = {"float32": 8, "float16": 16, "bfloat16": 16, "hifloat8": 32}


def counted(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array whose neighbouring elements differ; no element is 0, so that padding shows."""
    return (np.arange(math.prod(shape)) % 125 + 1).astype(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 7, 8, 16, 17, 33, 64])
def test_ndc1hwc0_places_every_element(dtype, channels):
    x = counted((2, channels, 2, 3, 2), DTYPES[dtype])
    packed = blocked.pack_ndc1hwc0(x)
    c0 = C0[dtype]
    assert packed.shape == (2, 2, -(-channels // c0), 3, 2, c0)
    assert packed.flags.c_contiguous
    expected = np.zeros(packed.shape, x.dtype)
    for n, c, d, h, w in np.ndindex(*x.shape):
        expected[n, d, c // c0, h, w, c % c0] = x[n, c, d, h, w]
    assert packed.tobytes() == expected.tobytes()
    assert blocked.unpack_ndc1hwc0(packed, channels).tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c_out, group_in, groups", [
    (15, 17, 1), (16, 16, 1), (32, 8, 2), (6, 5, 2), (9, 4, 3), (8, 2, 4), (10, 3, 5), (16, 1, 16), (24, 1, 24),
    (48, 2, 24), (40, 16, 5), (34, 33, 17)])
def test_fractal_z_3d_places_every_element(dtype, c_out, group_in, groups):
    w = counted((c_out, group_in, 2, 1, 3), DTYPES[dtype])
    c0, group_out = C0[dtype], c_out // groups
    packed = blocked.pack_fractal_z_3d(w, groups)
    a = math.lcm(group_in, c0) // group_in
    b = math.lcm(group_out, 16) // group_out
    m = min(math.lcm(a, b), groups)
    view = (-(-groups // m), 2, -(-m * group_in // c0), 1, 3, -(-m * group_out // 16), 16, c0)
    expected = np.zeros(view, w.dtype)
    for row, i, d, h, k in np.ndindex(*w.shape):
        g, o = divmod(row, group_out)
        c, n = g % m * group_in + i, g % m * group_out + o
        expected[g // m, d, c // c0, h, k, n // 16, n % 16, c % c0] = w[row, i, d, h, k]
    assert packed.shape == (math.prod(view[:5]), *view[5:])
    assert packed.tobytes() == expected.tobytes()
    assert blocked.unpack_fractal_z_3d(packed, w.shape, groups).tobytes() == w.tobytes()


@pytest.mark.parametrize("shape, groups, c0, storage", [
    ((512, 512, 3, 3, 3), 1, 16, (864, 32, 16, 16)),
    ((15, 17, 2, 2, 2), 1, 16, (16, 1, 16, 16)),
    ((1280, 1280, 3, 1, 1), 1, 16, (240, 80, 16, 16)),
    ((512, 512, 3, 3, 3), 1, 8, (1728, 32, 16, 8)),
])
def test_published_storage_shapes(shape, groups, c0, storage):
    assert blocked.fractal_z_3d_shape(shape, groups, c0) == storage


def test_strided_views_are_packed_where_they_lie():
    x = counted((2, 3, 4, 5, 20), DTYPES["float16"])
    channels_last = np.moveaxis(x, 4, 1)  # (2, 20, 3, 4, 5) view
    assert np.array_equal(blocked.pack_ndc1hwc0(channels_last), blocked.pack_ndc1hwc0(channels_last.copy()))
    w = np.moveaxis(counted((2, 3, 3, 4, 12), DTYPES["float32"]), (4, 3), (0, 1))
    assert np.array_equal(blocked.pack_fractal_z_3d(w, 3), blocked.pack_fractal_z_3d(w.copy(), 3))


@pytest.mark.parametrize("call, words", [
    (lambda: blocked.pack_ndc1hwc0(np.zeros((2, 3, 4, 5), np.float32)), "5 axes"),
    (lambda: blocked.unpack_ndc1hwc0(np.zeros((1, 1, 2, 1, 1, 8), np.float32), 17), "17 channels"),
    (lambda: blocked.unpack_ndc1hwc0(np.zeros((1, 1, 2, 1, 1, 8), np.float32), 8), "8 channels"),
    (lambda: blocked.pack_fractal_z_3d(np.zeros((4, 3, 1, 1, 1), np.float32), 3), "groups=3"),
    (lambda: blocked.pack_fractal_z_3d(np.zeros((4, 3, 1, 1, 1), np.float64)), "8"),
    (lambda: blocked.unpack_fractal_z_3d(np.zeros((3, 1, 16, 8), np.float32), (4, 3, 1, 1, 2)), r"\(2, 1, 16, 8\)"),
])
def test_refusals_name_the_numbers(call, words):
    with pytest.raises(ValueError, match=words):
        call()
