"""aclnnConvTbcBackward: its rules on descriptors, its numbers against float64 and against PyTorch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cann_oracle import STORED, cast, expected, small_integers

from convgrad import cann

OK, NULL, INVALID, INNER = 0, 161001, 161002, 561103
PRODUCTS = ("A2", "A3", "ASCEND_950", "ATLAS_TRAINING", "ATLAS_INFERENCE")
NAMES = ("self", "input", "weight", "bias", "pad", "cubeMathType", "gradInput", "gradWeight", "gradBias")
TENSORS = tuple(name for name in NAMES if name not in ("pad", "cubeMathType"))
F, H, B = "FLOAT", "FLOAT16", "BFLOAT16"


def valid(time=7, batch=2, c_in=3, c_out=4, taps=3, pad=1, dtype=F):
    shapes = {"self": (time + 2 * pad + 1 - taps, batch, c_out), "input": (time, batch, c_in),
              "weight": (taps, c_in, c_out), "bias": (c_out,), "gradInput": (time, batch, c_in),
              "gradWeight": (taps, c_in, c_out), "gradBias": (c_out,)}
    call = {name: {"shape": shape, "dtype": dtype, "format": "ND"} for name, shape in shapes.items()}
    return call | {"pad": pad, "cubeMathType": 0, "product": "A2"}


def changed(changes, **base):
    call = {name: dict(value) if isinstance(value, dict) else value for name, value in valid(**base).items()}
    for key, value in changes.items():
        name, _, part = key.partition(".")
        for each in TENSORS if name == "all" else (name,):
            if part:
                call[each][part] = value
            else:
                call[each] = value
    return call


def phase_one(call, **options):
    arguments = [cann.aclTensor(**call[name]) if isinstance(call[name], dict) else call[name] for name in NAMES]
    return cann.aclnnConvTbcBackwardGetWorkspaceSize(*arguments, product=call["product"], backend="reference",
                                                     **options)


ROWS = [
    ({}, OK, ""),
    *[({name: None}, NULL, name) for name in TENSORS],
    *[({f"{name}.dtype": dtype}, INVALID, name)
      for name in TENSORS for dtype in ("INT32", "HIFLOAT8", "FLOAT8_E4M3FN")],
    *[({f"{name}.dtype": dtype}, INNER, f"must have the format of {name.removeprefix('grad').lower()}")
      for name in ("gradInput", "gradWeight", "gradBias") for dtype in (H, B)],
    *[({f"{name}.dtype": dtype, f"grad{name.title()}.dtype": dtype}, OK, "")
      for name in ("input", "weight", "bias") for dtype in (H, B)],
    *[({"self.dtype": dtype}, OK, "") for dtype in (H, B)],
    *[({f"{name}.format": "NCL"}, INVALID, name) for name in ("bias", "gradBias")],
    *[({f"{name}.format": "NCL"}, OK, "") for name in TENSORS if not name.lower().endswith("bias")],
    *[({f"{name}.format": "NCHW"}, INVALID, name) for name in TENSORS],
    ({"self.shape": (0, 2, 4)}, INVALID, "empty"),
    ({"self.shape": (7, 0, 4)}, INVALID, "empty"),
    *[({f"{name}.shape": (2, 3)}, INVALID, name) for name in TENSORS],
    *[({f"{name}.shape": (1, 2, 3, 4)}, INVALID, name) for name in TENSORS],
    ({"input.shape": (7, 2, 5), "gradInput.shape": (7, 2, 5)}, INVALID, "weight.shape[1]"),
    ({"bias.shape": (5,), "gradBias.shape": (5,)}, INVALID, "weight.shape[2]"),
    ({"bias.shape": (3,), "gradBias.shape": (3,)}, INVALID, "weight.shape[2]"),  # the first axis of weight is its taps
    ({"pad": -1}, INVALID, "pad"),
    *[({"pad": value}, INVALID, "pad must be an integer") for value in (None, 0.5, 1.0, "1", [1])],
    *[({"cubeMathType": value}, INVALID, "cubeMathType must be an integer") for value in (None, [0], 0.0, "0")],
    *[({f"{name}.shape": shape}, INVALID, "negative extent") for name, shape in (
        ("gradInput", (7, -2, 3)), ("gradWeight", (-3, 3, 4)), ("gradBias", (-4,)), ("input", (-7, 2, 3)))],
    ({"weight.shape": (11, 3, 4), "gradWeight.shape": (11, 3, 4)}, INVALID, "negative length"),
    ({"self.shape": (8, 2, 4)}, INVALID, "self"),
    ({"self.shape": (7, 3, 4)}, INVALID, "self"),
    ({"self.shape": (7, 2, 5)}, INVALID, "self"),
    ({"pad": 0}, INVALID, "self"),
    ({"gradInput.shape": (7, 2, 4)}, INVALID, "gradInput"),
    ({"gradWeight.shape": (3, 4, 3)}, INVALID, "gradWeight"),
    ({"gradBias.shape": (3,)}, INVALID, "gradBias"),
    *[({"cubeMathType": value}, INVALID, "cubeMathType") for value in (-1, 4)],
    *[({"cubeMathType": value}, OK, "") for value in range(4)],
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}".replace(" ", ""))
def test_rule(row):
    changes, status, words = row
    found, _, executor = phase_one(changed(changes))
    assert found == status, cann.aclGetRecentErrMsg()
    assert words in cann.aclGetRecentErrMsg()
    assert (executor is None) == (status != OK)


BY_PRODUCT = [
    ({}, {}, (OK, OK, OK, INVALID, INVALID)),
    ({"cubeMathType": 1}, {}, (OK, OK, OK, OK, INVALID)),
    ({"cubeMathType": 2}, {}, (OK, OK, OK, OK, INVALID)),
    ({"cubeMathType": 3}, {}, (OK, OK, OK, INVALID, INVALID)),
    ({"all.dtype": H}, {}, (OK, OK, OK, OK, INVALID)),
    ({"all.dtype": B}, {}, (OK, OK, OK, INVALID, INVALID)),
    ({"all.dtype": H, "bias.dtype": B}, {}, (INNER, INNER, INVALID, INNER, INVALID)),
    ({"all.dtype": H, "gradBias.dtype": B}, {}, (INNER, INNER, INVALID, INVALID, INVALID)),
    ({"all.dtype": H, "gradInput.dtype": F}, {}, (INNER, INNER, INVALID, INNER, INVALID)),
    ({"all.dtype": H, "gradWeight.dtype": F}, {}, (INNER, INNER, INVALID, INNER, INVALID)),
    ({"all.dtype": H, "bias.dtype": B, "gradBias.dtype": B}, {}, (OK, OK, OK, INVALID, INVALID)),
    ({"all.dtype": H}, {"pad": 255}, (OK, OK, OK, OK, INVALID)),
    ({"all.dtype": H}, {"pad": 256}, (INVALID,) * 5),
    ({"all.dtype": H}, {"taps": 255, "time": 300}, (OK, OK, OK, OK, INVALID)),
    ({"all.dtype": H}, {"taps": 256, "time": 300}, (OK, OK, INNER, OK, INVALID)),
]


@pytest.mark.parametrize("row", BY_PRODUCT, ids=lambda row: f"{row[0]}-{row[1]}".replace(" ", ""))
@pytest.mark.parametrize("place", range(5), ids=PRODUCTS)
def test_product(row, place):
    changes, base, statuses = row
    found, _, _ = phase_one(changed(changes | {"product": PRODUCTS[place]}, **base))
    assert found == statuses[place], cann.aclGetRecentErrMsg()


ORDER = [
    ({"bias": None}, NULL, "bias is None"),
    ({"weight.dtype": "INT32"}, INVALID, "weight is INT32"),
    ({"gradInput.format": "NCHW"}, INVALID, "NCHW"),
    ({"self.shape": (0, 2, 4)}, INVALID, "empty"),
    ({"gradWeight.shape": (3, 3, 5)}, INVALID, "gradWeight has shape"),
    ({"cubeMathType": 7}, INVALID, "cubeMathType=7"),
    ({"pad": 300, "self.shape": (605, 2, 4)}, INVALID, "pad=300"),
]


@pytest.mark.parametrize("first, second", [*itertools.combinations(range(len(ORDER)), 2),
                                           *((step, step) for step in range(len(ORDER)))])
def test_the_earlier_check_answers(first, second):
    changes, status, words = ORDER[first]
    merged = ORDER[second][0] | changes
    found, _, _ = phase_one(changed(merged | {"product": "ASCEND_950"}))
    assert (found, words in cann.aclGetRecentErrMsg()) == (status, True), cann.aclGetRecentErrMsg()


@pytest.mark.parametrize("changes, base", [({}, {"pad": 300}), ({"all.dtype": "DOUBLE"}, {}),
                                           ({"product": "ATLAS_INFERENCE"}, {})])
def test_without_product_limits(changes, base):
    assert phase_one(changed(changes, **base))[0] != OK
    assert phase_one(changed(changes, **base), strict=False)[0] == OK


# --- numbers --------------------------------------------------------------------------------------------------------
def run(arrays, pad, cube, backend, dtypes=None, **options):
    """Both phases on (self, input, weight, bias, gradInput, gradWeight, gradBias)."""
    tensors = [cann.aclTensor(array) for array in arrays]
    status, size, executor = cann.aclnnConvTbcBackwardGetWorkspaceSize(*tensors[:4], pad, cube, *tensors[4:],
                                                                       backend=backend, **options)
    assert status == 0, cann.aclGetRecentErrMsg()
    assert cann.aclnnConvTbcBackward(np.empty(size, np.uint8) if size else None, size, executor, None) == 0


def problem(time, batch, c_in, c_out, taps, pad, dtypes=(F, F, F), outputs=(F, F, F), seed=0, largest=2):
    rng = np.random.default_rng(seed)
    dy, dy_values = small_integers(rng, (time + 2 * pad + 1 - taps, batch, c_out), dtypes[0], largest)
    x, x_values = small_integers(rng, (time, batch, c_in), dtypes[1], largest)
    w, w_values = small_integers(rng, (taps, c_in, c_out), dtypes[2], largest)
    results = [np.full(shape, 77).astype(STORED[dtype]) for shape, dtype in zip((x.shape, w.shape, (c_out,)), outputs)]
    return [dy, x, w, np.zeros(c_out, STORED[dtypes[0]]), *results], (dy_values, x_values, w_values)


def wanted(values, pad, dtypes, outputs, **options):
    dy, x, w = values
    dx, dw, db = expected(dy.transpose(1, 2, 0), x.transpose(1, 2, 0), w.transpose(2, 1, 0), dtypes, outputs,
                          stride=(1,), pads=((pad, pad),), dilation=(1,), **options)
    return dx.transpose(2, 0, 1), dw.transpose(2, 1, 0), db


SIZES = [(5, 1, 2, 2, 1, 0), (7, 2, 3, 4, 3, 0), (7, 2, 3, 4, 3, 1), (9, 3, 5, 2, 4, 3), (4, 2, 3, 3, 6, 2),
         (1, 4, 2, 5, 1, 2), (12, 1, 1, 1, 5, 4)]


@pytest.mark.parametrize("dtype", [F, H, B])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_integers_are_exact(size, dtype, backend):
    arrays, values = problem(*size, (dtype,) * 3, (dtype,) * 3)
    run(arrays, size[-1], 0, backend)
    for found, other in zip(arrays[4:], wanted(values, size[-1], (dtype,) * 3, (dtype,) * 3)):
        assert np.array_equal(found, other)


@pytest.mark.parametrize("dtypes, outputs", [((H, F, H), (H, F, H)), ((H, B, B), (F, F, F)), ((B, B, B), (F, H, F)),
                                             ((F, F, F), (B, H, B))], ids=lambda value: "-".join(value))
def test_promotion_and_casts(dtypes, outputs, backend):
    arrays, values = problem(9, 2, 4, 3, 3, 1, dtypes, outputs, seed=1, largest=3)
    run(arrays, 1, 0, backend, strict=False)  # the product wants each gradient in the format of its tensor
    for found, other in zip(arrays[4:], wanted(values, 1, dtypes, outputs)):
        assert np.array_equal(found, other)


@pytest.mark.parametrize("product, bits", [("A2", 11), ("A3", 11), ("ASCEND_950", 10), ("ATLAS_TRAINING", 0)])
@pytest.mark.parametrize("cube", [1, 2])
def test_cube_math_type(product, bits, cube, backend):
    """One tap, one channel, one step of time per batch: every product is exact after the operands are rounded."""
    rng = np.random.default_rng(2)
    dy, x, w = ((rng.integers(2**23, 2**24, shape) * 2.0**-23).astype(np.float32)
                for shape in ((1, 1, 1), (1, 1, 1), (1, 1, 1)))
    arrays = [dy, x, w, np.zeros(1, np.float32), np.empty_like(x), np.empty_like(w), np.empty(1, np.float32)]
    run(arrays, 0, cube, backend, product=product)
    values = [a.astype(np.float64) for a in (dy, x, w)]
    for found, other in zip(arrays[4:], wanted(values, 0, (F,) * 3, (F,) * 3, cube=cube, bits=bits)):
        assert np.array_equal(found, other)


def test_the_vendors_example(backend):
    shapes = ((5, 1, 2), (5, 1, 2), (1, 2, 2), (2,), (5, 1, 2), (1, 2, 2), (2,))
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    run(arrays, 0, 1, backend)
    assert (arrays[4] == 2).all() and (arrays[5] == 5).all() and (arrays[6] == 5).all()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_agrees_with_torch(size, backend):
    torch = pytest.importorskip("torch")
    arrays, _ = problem(*size, seed=3)
    run(arrays, size[-1], 0, backend)
    others = torch.ops.aten.conv_tbc_backward(*(torch.from_numpy(array) for array in arrays[:4]), size[-1])
    for found, other in zip(arrays[4:], others):
        assert np.array_equal(found, other.numpy())


@pytest.mark.parametrize("shapes, pad", [
    (((5, 2, 3), (5, 2, 0), (1, 0, 3)), 0),  # no input channels
    (((4, 2, 3), (3, 2, 4), (0, 4, 3)), 0),  # no taps
    (((2, 2, 3), (0, 2, 4), (3, 4, 3)), 2),  # no time, only padding
], ids=["channels", "taps", "time"])
@pytest.mark.parametrize("dtype", [F, H])
def test_empty_tensors(shapes, pad, dtype, backend):
    rng = np.random.default_rng(4)
    dy, values = small_integers(rng, shapes[0], dtype)
    x, w = np.ones(shapes[1], STORED[dtype]), np.ones(shapes[2], STORED[dtype])
    results = [np.full_like(x, 7), np.full_like(w, 7), np.full(3, 7, STORED[dtype])]
    arrays = [dy, x, w, np.zeros(3, STORED[dtype]), *results]
    run(arrays, pad, 0, backend)
    assert not arrays[4].any() and not arrays[5].any()
    assert np.array_equal(arrays[6], cast(values.sum(axis=(0, 1)), dtype))


def test_views_are_read_and_written_in_place(backend):
    arrays, values = problem(7, 2, 3, 4, 3, 1, seed=5)
    views = []
    for array in arrays:
        storage = np.full((*array.shape, 3), 55, array.dtype)
        storage[..., 1] = array
        views.append(storage[..., 1])
    run(views, 1, 0, backend)
    for found, other in zip(views[4:], wanted(values, 1, (F,) * 3, (F,) * 3)):
        assert np.array_equal(found, other)
        assert (found.base[..., 0] == 55).all() and (found.base[..., 2] == 55).all()
