"""aclnnConvolutionBackward computed: bitwise against float64 loops and the dtype steps, and against PyTorch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cann_oracle import STORED, backward, expected, hf32, small_integers

from convgrad import cann

FORMAT = {1: "ND", 3: "NCL", 4: "NCHW", 5: "NCDHW"}
F, H, B = "FLOAT", "FLOAT16", "BFLOAT16"

# name: (batch, channels in, channels out, input extents, kernel, stride, padding as passed, dilation, groups,
# transposed, outputPadding). For a transposed convolution the extents are those of its input.
GEOMETRY = {
    "1d": (2, 3, 4, (9,), (3,), (1,), (1,), (1,), 1, False, (0,)),
    "1d-stride-over-kernel": (2, 3, 4, (11,), (2,), (4,), (0,), (1,), 1, False, (0,)),
    "1d-dilated-groups": (2, 4, 6, (12,), (3,), (2,), (2,), (3,), 2, False, (0,)),
    "2d": (2, 3, 5, (6, 7), (3, 3), (1, 1), (1, 1), (1, 1), 1, False, (0, 0)),
    "2d-strided": (2, 3, 5, (9, 8), (3, 2), (2, 3), (1, 0), (1, 1), 1, False, (0, 0)),
    "2d-dilated": (1, 4, 4, (10, 9), (3, 3), (1, 2), (2, 3), (2, 3), 1, False, (0, 0)),
    "2d-four-pads": (2, 3, 4, (6, 7), (3, 3), (2, 1), (0, 2, 1, 3), (1, 1), 1, False, (0, 0)),
    "2d-four-pads-groups": (2, 4, 4, (6, 7), (2, 3), (1, 2), (3, 0, 0, 1), (1, 2), 2, False, (0, 0)),
    "2d-groups": (2, 6, 9, (6, 5), (3, 3), (2, 2), (1, 1), (1, 1), 3, False, (0, 0)),
    "2d-depthwise": (2, 6, 6, (7, 7), (3, 3), (1, 1), (1, 1), (1, 1), 6, False, (0, 0)),
    "2d-1x1": (3, 5, 4, (5, 6), (1, 1), (1, 1), (0, 0), (1, 1), 1, False, (0, 0)),
    "2d-unreached": (1, 2, 2, (8, 8), (1, 1), (3, 3), (0, 0), (1, 1), 1, False, (0, 0)),
    "3d": (1, 2, 3, (4, 5, 4), (2, 3, 2), (1, 1, 1), (1, 1, 0), (1, 1, 1), 1, False, (0, 0, 0)),
    "3d-strided-groups": (1, 4, 4, (5, 6, 5), (3, 2, 3), (2, 1, 2), (1, 0, 1), (1, 2, 1), 2, False, (0, 0, 0)),
    "1d-transposed": (2, 3, 4, (5,), (3,), (2,), (1,), (1,), 1, True, (1,)),
    "2d-transposed": (2, 3, 4, (4, 5), (3, 3), (2, 2), (1, 1), (1, 1), 1, True, (0, 1)),
    "2d-transposed-groups": (2, 4, 6, (4, 4), (3, 2), (2, 3), (1, 0), (1, 2), 2, True, (1, 2)),
    "2d-transposed-four-pads": (1, 3, 2, (5, 4), (3, 3), (2, 1), (1, 0, 2, 1), (1, 1), 1, True, (0, 0)),
    "3d-transposed": (1, 3, 2, (3, 3, 3), (2, 3, 2), (2, 1, 2), (0, 1, 1), (1, 1, 1), 1, True, (1, 0, 0)),
}


class Case:
    """Shapes, random small integers and results of one geometry."""

    def __init__(self, name, dtypes=(F, F, F), outputs=(F, F, F), seed=0, largest=2):
        n, c_in, c_out, size, kernel, self.stride, self.padding, self.dilation, self.groups, self.transposed, \
            self.extra = GEOMETRY[name]
        axes = len(size)
        four = len(self.padding) == 4
        self.pads = ((self.padding[:2], self.padding[2:]) if four else tuple((p, p) for p in self.padding))
        self.dtypes, self.outputs = dtypes, outputs
        spans = [self.dilation[a] * (kernel[a] - 1) + 1 for a in range(axes)]
        if self.transposed:
            out = tuple((size[a] - 1) * self.stride[a] - sum(self.pads[a]) + spans[a] + self.extra[a]
                        for a in range(axes))
            w_shape = (c_in, c_out // self.groups, *kernel)
        else:
            out = tuple((size[a] + sum(self.pads[a]) - spans[a]) // self.stride[a] + 1 for a in range(axes))
            w_shape = (c_out, c_in // self.groups, *kernel)
        rng = np.random.default_rng(seed)
        self.dy, self.dy_values = small_integers(rng, (n, c_out, *out), dtypes[0], largest)
        self.x, self.x_values = small_integers(rng, (n, c_in, *size), dtypes[1], largest)
        self.w, self.w_values = small_integers(rng, w_shape, dtypes[2], largest)
        self.results = [np.full(shape, 77).astype(np.uint8 if dtype == "HIFLOAT8" else STORED[dtype])
                        for shape, dtype in zip((self.x.shape, self.w.shape, (c_out,)), outputs)]

    def run(self, backend, mask=(True, True, True), cube=0, **options):
        """Both phases; returns the results."""
        def tensor(array, dtype):
            return cann.aclTensor(array, dtype=dtype, format=FORMAT[array.ndim])

        operands = [tensor(array, dtype) for array, dtype in zip((self.dy, self.x, self.w), self.dtypes)]
        results = [tensor(array, dtype) if array is not None else None
                   for array, dtype in zip(self.results, self.outputs)]
        status, size, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
            *operands, [self.dy.shape[1]], self.stride, self.padding, self.dilation, self.transposed, self.extra,
            self.groups, mask, cube, *results, backend=backend, **options)
        assert status == 0, cann.aclGetRecentErrMsg()
        workspace = np.full(size, 0xA5, np.uint8) if size else None
        assert cann.aclnnConvolutionBackward(workspace, size, executor, None) == 0, cann.aclGetRecentErrMsg()
        return self.results

    def expected(self, cube=0, bits=11):
        return expected(self.dy_values, self.x_values, self.w_values, self.dtypes, self.outputs, stride=self.stride,
                        pads=self.pads, dilation=self.dilation, groups=self.groups, transposed=self.transposed,
                        cube=cube, bits=bits)


def assert_same_bits(found, wanted):
    for name, a, b in zip(("gradInput", "gradWeight", "gradBias"), found, wanted):
        assert a.shape == b.shape
        # -0 and +0 are one result; all else must agree in every bit.
        different = (a.view(np.uint8) != b.view(np.uint8)) if a.dtype == np.uint8 else \
            (a.astype(np.float64) != b.astype(np.float64))
        assert not different.any(), (name, a[different][:4], b[different][:4])


@pytest.mark.parametrize("dtype", [F, H, B])
@pytest.mark.parametrize("name", GEOMETRY)
def test_integers_are_exact(name, dtype, backend):
    case = Case(name, (dtype,) * 3, (dtype,) * 3, largest=1 if dtype == B else 2)
    assert_same_bits(case.run(backend), case.expected())


@pytest.mark.parametrize("mask", list(itertools.product((False, True), repeat=3)))
@pytest.mark.parametrize("name", ["1d", "2d-four-pads", "2d-groups", "2d-transposed-groups", "3d"])
def test_masks(name, mask, backend):
    case = Case(name, seed=1)
    found = case.run(backend, mask=mask)
    for asked, result, wanted in zip(mask, found, case.expected()):
        assert np.array_equal(result, wanted if asked else np.full_like(result, 77))


MIXED = [
    # gradOutput, input, weight -> gradInput, gradWeight, gradBias
    ((H, B, H), (F, F, F)), ((H, H, B), (H, B, H)), ((F, H, H), (F, H, F)), ((H, F, H), (H, H, H)),
    ((B, B, F), (B, F, B)), ((H, H, H), (F, F, F)), ((H, H, H), (B, B, B)), ((B, B, B), (F, F, F)),
    ((B, B, B), (H, H, H)), ((F, F, F), (H, B, H)), ((F, F, F), (B, H, B)),
]


@pytest.mark.parametrize("dtypes, outputs", MIXED, ids=lambda value: "-".join(value))
@pytest.mark.parametrize("name", ["2d-strided", "2d-transposed-groups"])
def test_promotion_and_casts(name, dtypes, outputs, backend):
    case = Case(name, dtypes, outputs, seed=2, largest=3)
    assert_same_bits(case.run(backend), case.expected())


def test_results_pass_through_the_compute_type(backend):
    """f16 operands: gradInput and gradBias are rounded to f16 before they become FLOAT, gradWeight is not."""
    ones = {"dy": (1, 1, 3), "x": (1, 1, 3), "w": (1, 1, 1)}
    dy, x, w = (np.ones(shape, np.float16) for shape in ones.values())
    dy[...] = [[[2048, 1, 0]]]
    w[...] = 1
    x[...] = [[[1, 1, 1]]]
    results = [np.zeros((1, 1, 3), np.float32), np.zeros((1, 1, 1), np.float32), np.zeros(1, np.float32)]
    tensors = [cann.aclTensor(array) for array in (dy, x, w, *results)]
    status, size, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
        *tensors[:3], [1], [1], [0], [1], False, [0], 1, [True] * 3, 0, *tensors[3:], backend=backend)
    assert status == 0
    assert size > 0  # the f16 results before they are cast
    assert cann.aclnnConvolutionBackward(np.empty(size, np.uint8), size, executor) == 0
    assert results[1].item() == 2049  # summed and kept in FLOAT
    assert results[2].item() == 2048  # 2049 is no f16 number


# --- cubeMathType ---------------------------------------------------------------------------------------------------
MODES = [(product, bits, cube)
         for product, bits in (("A2", 11), ("A3", 11), ("ASCEND_950", 10)) for cube in range(4)] + \
    [(product, 0, cube) for product in ("ATLAS_TRAINING", "ATLAS_INFERENCE") for cube in (1, 2)]


def exact_products(seed, shape):
    """f32 values with full mantissas around 1: every rounding mode changes most of them."""
    rng = np.random.default_rng(seed)
    return (rng.integers(2**23, 2**24, shape) * 2.0**-23 * rng.choice([-1.0, 1.0], shape)).astype(np.float32)


@pytest.mark.parametrize("product, bits, cube", MODES)
@pytest.mark.parametrize("transposed", [False, True])
def test_cube_math_type_rounds_operands(product, bits, cube, transposed, backend):
    """One product per result: rounded operands have at most 12 bits, so that their product is exact in f32."""
    dy, x, w = exact_products(1, (1, 64, 1)), exact_products(2, (1, 64, 1)), exact_products(3, (64, 1, 1))
    results = [np.empty_like(dy), np.empty_like(w), np.empty(64, np.float32)]
    tensors = [cann.aclTensor(array) for array in (dy, x, w, *results)]
    status, size, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
        *tensors[:3], [64], [1], [0], [1], transposed, [0], 64, [True] * 3, cube, *tensors[3:], product=product,
        backend=backend)
    assert status == 0, cann.aclGetRecentErrMsg()
    assert cann.aclnnConvolutionBackward(np.empty(size, np.uint8) if size else None, size, executor) == 0
    fp16 = cube == 2 or (cube == 1 and not bits)
    rounded = [a.astype(np.float16).astype(np.float64) if fp16 else a.astype(np.float64) if cube == 0 else hf32(a, bits)
               for a in (dy, x, w)]
    dx = (rounded[0] * rounded[2].reshape(1, 64, 1)).astype(np.float32)
    dx = dx.astype(np.float16).astype(np.float32) if fp16 else dx
    dw = (rounded[0] * rounded[1]).astype(np.float32).reshape(64, 1, 1)
    assert np.array_equal(results[0], dx)
    assert np.array_equal(results[1], dw)
    assert np.array_equal(results[2], dy[0, :, 0])  # the bias sum is never rounded


HF32_VECTORS = [  # f32 bits -> HF32 bits with 11 and with 10 mantissa bits, ties away from zero
    (0x3F800800, 0x3F801000, 0x3F800000), (0x3F801800, 0x3F802000, 0x3F802000), (0x3F800400, 0x3F800000, 0x3F800000),
    (0xBF800800, 0xBF801000, 0xBF800000), (0x7F7FFFFF, 0x7F800000, 0x7F800000), (0x00000001, 0x00000000, 0x00000000),
    (0x3F801000, 0x3F801000, 0x3F802000), (0x3F800000, 0x3F800000, 0x3F800000),
]


@pytest.mark.parametrize("vector", HF32_VECTORS, ids=lambda vector: f"{vector[0]:08X}")
@pytest.mark.parametrize("product, column", [("A2", 1), ("A3", 1), ("ASCEND_950", 2)])
def test_hf32_vectors(vector, product, column, backend):
    x = np.array([[[vector[0]]]], np.uint32).view(np.float32)
    one, dw = np.ones((1, 1, 1), np.float32), np.empty((1, 1, 1), np.float32)
    tensors = [cann.aclTensor(array) for array in (one, x, one)]
    status, size, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
        *tensors, None, [1], [0], [1], False, [0], 1, [False, True, False], 3, None, cann.aclTensor(dw), None,
        product=product, backend=backend)
    assert status == 0
    assert cann.aclnnConvolutionBackward(np.empty(size, np.uint8) if size else None, size, executor) == 0
    assert f"{dw.view(np.uint32).item():08X}" == f"{vector[column]:08X}"


@pytest.mark.parametrize("cube", [0, 1, 3])
@pytest.mark.parametrize("dtype", [H, B])
def test_cube_math_type_leaves_16_bit_formats(dtype, cube, backend):
    case = Case("2d", (dtype,) * 3, (dtype,) * 3, seed=4)
    assert_same_bits(case.run(backend, cube=cube), case.expected())


@pytest.mark.parametrize("name", ["2d", "3d", "2d-transposed"])
def test_bf16_with_use_fp16_is_cast_to_f16(name, backend):
    case = Case(name, (B,) * 3, (B,) * 3, seed=5)
    case.w[...] = np.float32(2.0**-26)  # a bf16 number, but 0 in f16
    found = case.run(backend, cube=2)
    assert not found[0].astype(np.float32).any()
    assert np.array_equal(found[1], case.expected(cube=2)[1])


# --- 8-bit formats --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["1d-transposed", "2d-transposed", "2d-transposed-groups", "2d-transposed-four-pads",
                                  "3d-transposed"])
def test_hifloat8_gradient_of_a_transposed_convolution(name, backend):
    pytest.importorskip("en_dtypes")
    case = Case(name, ("HIFLOAT8",) * 3, ("HIFLOAT8",) * 3, seed=6, largest=3)
    found = case.run(backend, mask=(True, False, False), product="ASCEND_950")
    assert np.array_equal(found[0], case.expected()[0].view(np.uint8))


@pytest.mark.parametrize("name", ["1d", "2d", "2d-strided", "3d"])
def test_hifloat8_weight_gradient_is_float(name, backend):
    pytest.importorskip("en_dtypes")
    case = Case(name, ("HIFLOAT8",) * 3, ("HIFLOAT8", F, "HIFLOAT8"), seed=7)
    case.results[0] = None
    found = case.run(backend, mask=(False, True, False), product="ASCEND_950")
    assert np.array_equal(found[1], case.expected()[1])


@pytest.mark.parametrize("dtype", ["HIFLOAT8", "FLOAT8_E4M3FN", "DOUBLE"])
@pytest.mark.parametrize("name", ["2d", "2d-transposed-groups"])
def test_formats_that_only_strict_refuses(name, dtype, backend):
    if dtype == "HIFLOAT8":
        pytest.importorskip("en_dtypes")
    case = Case(name, (dtype,) * 3, (F, F, F) if dtype != "DOUBLE" else ("DOUBLE",) * 3, seed=8)
    wanted = backward(case.dy_values, case.x_values, case.w_values, case.stride, case.pads, case.dilation, case.groups,
                      case.transposed)
    found = case.run(backend, mask=(False, True, False), strict=False)
    assert np.array_equal(found[1], wanted[1])


# --- analytic vectors -----------------------------------------------------------------------------------------------
def all_ones(shape_dy, shape_x, shape_w, stride, padding, backend):
    arrays = [np.ones(shape, np.float32) for shape in (shape_dy, shape_x, shape_w)]
    results = [np.empty(shape, np.float32) for shape in (shape_x, shape_w, (shape_dy[1],))]
    tensors = [cann.aclTensor(array, format=FORMAT[array.ndim]) for array in (*arrays, *results)]
    axes = len(stride)
    status, size, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
        *tensors[:3], [shape_dy[1]], stride, padding, [1] * axes, False, [0] * axes, 1, [True] * 3, 0, *tensors[3:],
        backend=backend)
    assert status == 0
    assert cann.aclnnConvolutionBackward(np.empty(size, np.uint8) if size else None, size, executor) == 0
    return results


@pytest.mark.parametrize("shapes, stride, wanted", [
    (((2, 2, 7, 7), (2, 2, 7, 7), (2, 2, 1, 1)), (1, 1), (2, 98, 98)),
    (((4, 2, 3), (4, 2, 9), (2, 2, 3)), (3,), (2, 12, 12)),
    (((2, 2, 7, 7, 7), (2, 2, 7, 7, 7), (2, 2, 1, 1, 1)), (1, 1, 1), (2, 686, 686)),
])
def test_all_ones(shapes, stride, wanted, backend):
    for result, value in zip(all_ones(*shapes, stride, [0] * len(stride), backend), wanted):
        assert (result == value).all()


def test_all_ones_with_edges(backend):
    dx, dw, db = all_ones((4, 320, 80, 80), (4, 30, 80, 80), (320, 30, 3, 3), (1, 1), (1, 1), backend)
    assert (dx[:, :, 1:-1, 1:-1] == 2880).all()
    assert (dx[:, :, 0, 1:-1] == 1920).all() and (dx[:, :, 1:-1, -1] == 1920).all()
    assert (dx[:, :, ::79, ::79] == 1280).all()
    assert (dw[:, :, 1, 1] == 25600).all()
    assert (dw[:, :, 0, 1] == 25280).all() and (dw[:, :, 1, 2] == 25280).all()
    assert (dw[:, :, ::2, ::2] == 24964).all()
    assert (db == 25600).all()


# --- PyTorch --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [name for name in GEOMETRY if "four-pads" not in name])
def test_agrees_with_torch(name, backend):
    torch = pytest.importorskip("torch")
    case = Case(name, seed=9)
    operands = [torch.from_numpy(array) for array in (case.dy, case.x, case.w)]
    wanted = torch.ops.aten.convolution_backward(
        *operands, [case.dy.shape[1]], case.stride, case.padding, case.dilation, case.transposed, case.extra,
        case.groups, [True] * 3)
    for found, other in zip(case.run(backend), wanted):
        assert np.array_equal(found, other.numpy())


@pytest.mark.parametrize("name", ["2d-strided", "3d-strided-groups", "2d-transposed", "1d-dilated-groups"])
def test_real_data_is_as_close_as_torch(name, backend):
    torch = pytest.importorskip("torch")
    case = Case(name)
    rng = np.random.default_rng(10)
    for array in (case.dy, case.x, case.w):
        array[...] = rng.standard_normal(array.shape)
    exact = backward(*(a.astype(np.float64) for a in (case.dy, case.x, case.w)), case.stride, case.pads, case.dilation,
                     case.groups, case.transposed)
    wanted = torch.ops.aten.convolution_backward(
        *(torch.from_numpy(a) for a in (case.dy, case.x, case.w)), [case.dy.shape[1]], case.stride, case.padding,
        case.dilation, case.transposed, case.extra, case.groups, [True] * 3)
    for found, other, reference in zip(case.run(backend), wanted, exact):
        scale = np.abs(reference).max()
        assert np.abs(found - reference).max() <= 1e-6 * scale + np.abs(other.numpy() - reference).max()


# --- views and empty tensors ----------------------------------------------------------------------------------------
def test_strided_views_in_and_out(backend):
    case = Case("2d-strided", seed=11)
    wanted = case.expected()

    def scattered(array):
        """The same values in every second element of a channels-last storage, with guards between."""
        order = (0, *range(2, array.ndim), 1) if array.ndim > 1 else (0,)
        storage = np.full((*(array.transpose(order).shape), 2), 55, array.dtype)
        view = storage[..., 0].transpose(np.argsort(order))
        view[...] = array
        return storage, view

    pairs = [scattered(array) for array in (case.dy, case.x, case.w, *case.results)]
    case.dy, case.x, case.w = (view for _, view in pairs[:3])
    case.results = [view for _, view in pairs[3:]]
    assert_same_bits(case.run(backend), wanted)
    assert all((storage[..., 1] == 55).all() for storage, _ in pairs)


@pytest.mark.parametrize("name", ["batch", "channels"])
def test_empty_tensors_give_zeros(name, backend):
    shape_x = (0, 4, 9, 9) if name == "batch" else (2, 0, 9, 9)
    shape_w = (8, 4, 3, 3) if name == "batch" else (8, 0, 3, 3)
    dy = np.ones((shape_x[0], 8, 5, 5), np.float32)
    dw, db = np.full(shape_w, 7, np.float32), np.full(8, 7, np.float32)

    def tensor(array):
        return cann.aclTensor(array, format=FORMAT[array.ndim])

    status, size, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
        tensor(dy), tensor(np.ones(shape_x, np.float32)), tensor(np.ones(shape_w, np.float32)), [8], [2, 2], [1, 1],
        [1, 1], False, [0, 0], 1, [True] * 3, 0, tensor(np.ones(shape_x, np.float32)), tensor(dw), tensor(db),
        backend=backend)
    assert (status, size) == (0, 0)
    assert cann.aclnnConvolutionBackward(None, 0, executor) == 0
    assert not dw.any() and not db.any()
