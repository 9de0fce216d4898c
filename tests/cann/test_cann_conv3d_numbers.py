"""The 3-D graph operators computed: every format, blocked storage, 8-bit, HF32, output padding, bias."""

from __future__ import annotations

import numpy as np
import pytest
from cann_oracle import STORED, cast, gradients, hf32, small_integers
from test_cann_conv3d import ACTIVATIONS, F8, FILTERS, H8, B, F, H, placed, spatial

from convgrad import cann
from convgrad.cann import Conv3DBackpropFilterV2 as FilterV2
from convgrad.cann import Conv3DBackpropInputV2 as InputV2
from convgrad.cann import Conv3DTransposeV2 as TransposeV2
from convgrad.cann import GraphError, aclTensor, transdata

CASES = {  # shape of y or x, filter, stride, pads, dilation, groups
    "plain": ((2, 4, 4, 5, 4), (6, 4, 2, 3, 2), (1, 1, 1), (0,) * 6, (1, 1, 1), 1),
    "strided": ((1, 4, 5, 6, 7), (6, 4, 3, 3, 2), (2, 1, 3), (1, 1, 0, 2, 1, 0), (1, 1, 1), 1),
    "dilated": ((1, 2, 5, 7, 6), (3, 2, 2, 3, 2), (1, 2, 1), (1, 0, 2, 1, 0, 1), (2, 3, 1), 1),
    "groups": ((2, 6, 3, 4, 5), (9, 2, 2, 2, 3), (1, 2, 1), (0, 1, 1, 0, 1, 1), (1, 1, 2), 3),
}


class Numbers:
    def __init__(self, name, dtype=F, seed=0):
        self.shape, self.kernel, self.stride, self.pads, self.dilation, self.groups = CASES[name]
        self.pairs = list(zip(self.pads[::2], self.pads[1::2]))
        out = tuple((self.shape[2 + a] + sum(self.pairs[a]) - self.dilation[a] * (self.kernel[2 + a] - 1) - 1)
                    // self.stride[a] + 1 for a in range(3))
        rng = np.random.default_rng(seed)
        self.dy, dy = small_integers(rng, (self.shape[0], self.kernel[0], *out), dtype)
        self.x, x = small_integers(rng, self.shape, dtype)
        self.w, w = small_integers(rng, self.kernel, dtype)
        self.dx, self.dw, _ = gradients(dy, x, w, self.stride, self.pairs, self.dilation, self.groups)

    def attributes(self, form):
        return {"strides": spatial(self.stride, form), "dilations": spatial(self.dilation, form), "pads": self.pads,
                "groups": self.groups, "data_format": form}


def moved(array, form):
    return np.ascontiguousarray(array.transpose(["NCDHW".index(letter) for letter in form]))


@pytest.mark.parametrize("form", ACTIVATIONS)
@pytest.mark.parametrize("other", FILTERS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_in_every_format(name, form, other, backend):
    case = Numbers(name)
    y = InputV2(placed(case.shape, form), moved(case.w, other), moved(case.dy, form), filter_format=other,
                backend=backend, **case.attributes(form))
    assert isinstance(y, np.ndarray) and np.array_equal(y, moved(case.dx, form))
    y = FilterV2(moved(case.x, form), placed(case.kernel, other), moved(case.dy, form), y_format=other,
                 backend=backend, **case.attributes(form))
    assert y.dtype == np.float32 and np.array_equal(y, moved(case.dw, other))
    y = TransposeV2(placed(case.shape, form), moved(case.dy, form), moved(case.w, other), filter_format=other,
                    backend=backend, **case.attributes(form))
    assert np.array_equal(y, moved(case.dx, form))


@pytest.mark.parametrize("dtype", [F, H, B])
@pytest.mark.parametrize("name", CASES)
def test_blocked_storage(name, dtype, backend):
    case = Numbers(name, dtype)

    def blocked(array):
        return aclTensor(transdata(array, "NCDHW", "NDC1HWC0"), shape=array.shape, format="NDC1HWC0", dtype=dtype)

    storage = transdata(case.w, "NCDHW", "FRACTAL_Z_3D", case.groups)
    filter = aclTensor(storage, shape=case.w.shape, format="FRACTAL_Z_3D")
    y = InputV2(case.shape, filter, blocked(case.dy), backend=backend, **case.attributes("NCDHW"))
    assert y.format is cann.aclFormat.ACL_FORMAT_NDC1HWC0 and y.shape == case.shape
    wanted = transdata(cast(case.dx, dtype), "NCDHW", "NDC1HWC0")
    assert np.asarray(y).tobytes() == wanted.tobytes()  # and zeros in the channels that are not there
    y = InputV2(case.shape, filter, blocked(case.dy), y_format="NCDHW", backend=backend, **case.attributes("NCDHW"))
    assert np.array_equal(np.asarray(y), cast(case.dx, dtype))
    y = FilterV2(blocked(case.x), case.kernel, blocked(case.dy), y_format="FRACTAL_Z_3D", backend=backend,
                 **case.attributes("NCDHW"))
    assert np.array_equal(np.asarray(y), transdata(case.dw.astype(np.float32), "NCDHW", "FRACTAL_Z_3D", case.groups))


def test_wrong_blocked_storage_is_refused():
    case = Numbers("groups")
    storage = transdata(case.w, "NCDHW", "FRACTAL_Z_3D", case.groups)
    filter = aclTensor(storage[:-1], shape=case.w.shape, format="FRACTAL_Z_3D")
    with pytest.raises(GraphError, match="FRACTAL_Z_3D must have the storage shape"):
        InputV2.plan(case.shape, filter, aclTensor(case.dy, format="NCDHW"), backend="reference",
                     **case.attributes("NCDHW"))
    with pytest.raises(GraphError, match="needs shape="):
        InputV2.plan(case.shape, case.w, aclTensor(transdata(case.dy, "NCDHW", "NDC1HWC0"), format="NDC1HWC0"),
                     backend="reference", **case.attributes("NCDHW"))


@pytest.mark.parametrize("dtype", [H, B])
@pytest.mark.parametrize("name", CASES)
def test_16_bit_results_are_rounded_once(name, dtype, backend):
    case = Numbers(name, dtype)
    y = InputV2(case.shape, case.w, case.dy, backend=backend, **case.attributes("NCDHW"))
    assert y.dtype == STORED[dtype] and np.array_equal(y, cast(case.dx, dtype))
    y = FilterV2(case.x, case.kernel, case.dy, backend=backend, **case.attributes("NCDHW"))
    assert y.dtype == np.float32 and np.array_equal(y, case.dw)


@pytest.mark.parametrize("dtype", [H8, F8])
@pytest.mark.parametrize("name", ["plain", "groups"])
def test_8_bit_input_gradient_on_950(name, dtype, backend):
    if dtype == H8:
        pytest.importorskip("en_dtypes")
    case = Numbers(name, dtype)
    w, dy = (aclTensor(array, dtype=dtype, format="NCDHW") for array in (case.w, case.dy))
    y = InputV2(case.shape, w, dy, product="ASCEND_950", backend=backend, **case.attributes("NCDHW"))
    assert y.dtype is cann.aclDataType[f"ACL_{dtype}"]
    assert np.asarray(y).view(np.uint8).tobytes() == cast(case.dx + 0.0, dtype).view(np.uint8).tobytes()


def test_hifloat8_arrays_of_en_dtypes(backend):
    en_dtypes = pytest.importorskip("en_dtypes")
    case = Numbers("plain", H8)
    w, dy = case.w.view(en_dtypes.hifloat8), case.dy.view(en_dtypes.hifloat8)
    y = InputV2(case.shape, w, dy, product="ASCEND_950", backend=backend, **case.attributes("NCDHW"))
    assert y.dtype == en_dtypes.hifloat8 and np.array_equal(y.view(np.uint8), cast(case.dx, H8).view(np.uint8))


@pytest.mark.parametrize("product, bits", [("A2", 11), ("A3", 11), ("ASCEND_950", 10)])
def test_hf32(product, bits, backend):
    rng = np.random.default_rng(3)
    dy, w = ((rng.integers(2**23, 2**24, shape) * 2.0**-23).astype(np.float32)
             for shape in ((1, 8, 1, 1, 1), (8, 1, 1, 1, 1)))
    call = {"strides": [1] * 5, "pads": [0] * 6, "data_format": "NCDHW", "product": product, "backend": backend}
    y = InputV2((1, 8, 1, 1, 1), w, dy, enable_hf32=True, **call)
    assert np.array_equal(y.ravel(), (hf32(dy, bits).ravel() * hf32(w, bits).ravel()).astype(np.float32))
    y = FilterV2(dy, (8, 1, 1, 1, 1), dy, enable_hf32=True, **call)
    assert np.array_equal(y.ravel(), (hf32(dy, bits).ravel() ** 2).astype(np.float32))
    y = InputV2((1, 8, 1, 1, 1), w, dy, **call)
    assert np.array_equal(y.ravel(), (dy.ravel().astype(np.float64) * w.ravel()).astype(np.float32))


@pytest.mark.parametrize("extra", [(0, 0, 0), (1, 0, 1), (1, 2, 2)])
@pytest.mark.parametrize("pads", [(0,) * 6, (1, 0, 0, 1, 1, 2)])
def test_transpose_with_output_padding(extra, pads, backend):
    """Also output_padding beyond the stride, which the dilation allows: the positions no tap reaches are zero."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    x, _ = small_integers(rng, (2, 4, 3, 3, 3))
    w, _ = small_integers(rng, (4, 3, 2, 3, 2))
    stride, dilation = (2, 1, 2), (1, 3, 3)
    y = TransposeV2([0] * 5, x, w, strides=(1, 1, *stride), dilations=(1, 1, *dilation), pads=pads,
                    output_padding=(0, 0, *extra), data_format="NCDHW", backend=backend)
    full = torch.nn.functional.conv_transpose3d(torch.from_numpy(x), torch.from_numpy(w), stride=stride,
                                                dilation=dilation).numpy()
    size = [full.shape[2 + a] - pads[2 * a] - pads[2 * a + 1] + extra[a] for a in range(3)]
    wanted = np.zeros((2, 3, *size), np.float32)
    part = full[:, :, pads[0]:pads[0] + size[0], pads[2]:pads[2] + size[1], pads[4]:pads[4] + size[2]]
    wanted[:, :, :part.shape[2], :part.shape[3], :part.shape[4]] = part
    assert np.array_equal(y, wanted)


@pytest.mark.parametrize("dtype", [F, H])
def test_transpose_with_bias_on_950(dtype, backend):
    case = Numbers("strided", dtype)
    bias = np.arange(case.shape[1], dtype=np.float32) + np.float32(2.0**-8)
    y = TransposeV2(case.shape, case.dy, case.w, bias, product="ASCEND_950", backend=backend,
                    **case.attributes("NCDHW"))
    assert np.array_equal(y, cast(case.dx + bias[:, None, None, None], dtype))


def test_a_depthwise_filter_size(backend):
    rng = np.random.default_rng(5)
    x, x_values = small_integers(rng, (1, 4, 1, 5, 5))
    dy, dy_values = small_integers(rng, (1, 8, 1, 3, 3))
    y = FilterV2(x, [8, 1, 3, 3], dy, strides=[1] * 5, pads=[0] * 6, data_format="NCDHW", from_depthwise=True,
                 backend=backend)
    _, dw, _ = gradients(dy_values, x_values, np.zeros((8, 1, 1, 3, 3)), (1, 1, 1), [(0, 0)] * 3, (1, 1, 1), 4)
    assert np.array_equal(y, dw)


def test_descriptors_without_data_cannot_run():
    case = Numbers("plain")
    with pytest.raises(GraphError, match="without data"):
        InputV2(case.shape, aclTensor(shape=case.w.shape, dtype=F, format="NCDHW"), case.dy, backend="reference",
                **case.attributes("NCDHW"))
