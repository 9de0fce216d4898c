"""aclnnConvolutionBackward on descriptors alone: every rule, every product difference, the order of the checks."""

from __future__ import annotations

import itertools

import pytest

from convgrad import cann
from convgrad.plan import BACKENDS

OK, NULL, INVALID, INNER = 0, 161001, 161002, 561103
PRODUCTS = ("A2", "A3", "ASCEND_950", "ATLAS_TRAINING", "ATLAS_INFERENCE")
FORMAT = {1: "ND", 2: "ND", 3: "NCL", 4: "NCHW", 5: "NCDHW", 6: "ND"}
NAMES = ("gradOutput", "input", "weight", "biasSizes", "stride", "padding", "dilation", "transposed", "outputPadding",
         "groups", "outputMask", "cubeMathType", "gradInput", "gradWeight", "gradBias")


def valid(shape_dy, shape_x, shape_w, stride, padding, dilation=None, transposed=False, groups=1, dtype="FLOAT"):
    """A call that every rule accepts, tensors as (shape, dtype, format)."""
    axes = len(shape_w) - 2
    bias = (shape_dy[1],)

    def tensor(shape):
        return shape, dtype, FORMAT[len(shape)]

    return {
        "gradOutput": tensor(shape_dy), "input": tensor(shape_x), "weight": tensor(shape_w), "biasSizes": bias,
        "stride": stride, "padding": padding, "dilation": dilation or (1,) * axes, "transposed": transposed,
        "outputPadding": (0,) * axes, "groups": groups, "outputMask": (True, True, True), "cubeMathType": 0,
        "gradInput": tensor(shape_x), "gradWeight": tensor(shape_w), "gradBias": tensor(bias), "product": "A2"}


BASES = {
    "1d": valid((4, 2, 3), (4, 2, 9), (2, 2, 3), (3,), (0,)),
    "2d": valid((2, 8, 5, 5), (2, 4, 9, 9), (8, 4, 3, 3), (2, 2), (1, 1)),
    "3d": valid((1, 4, 3, 4, 4), (1, 6, 5, 8, 8), (4, 6, 3, 3, 3), (2, 2, 2), (1, 1, 1)),
    "2d-groups": valid((2, 8, 5, 5), (2, 4, 9, 9), (8, 2, 3, 3), (2, 2), (1, 1), groups=2),
    "3d-groups": valid((1, 4, 3, 4, 4), (1, 6, 5, 8, 8), (4, 3, 3, 3, 3), (2, 2, 2), (1, 1, 1), groups=2),
    "2d-depthwise": valid((2, 8, 5, 5), (2, 4, 9, 9), (8, 1, 3, 3), (2, 2), (1, 1), groups=4),
    "1d-transposed": valid((4, 6, 9), (4, 2, 3), (2, 6, 3), (3,), (0,), transposed=True),
    "2d-transposed": valid((2, 8, 9, 10), (2, 4, 5, 5), (4, 8, 3, 3), (2, 2), (1, 1), transposed=True),
    "3d-transposed": valid((1, 6, 5, 8, 8), (1, 4, 3, 4, 4), (4, 6, 3, 3, 3), (2, 2, 2), (1, 1, 1), transposed=True),
    "2d-transposed-groups": valid((2, 8, 9, 9), (2, 4, 5, 5), (4, 4, 3, 3), (2, 2), (1, 1), transposed=True, groups=2),
    "2d-empty-batch": valid((0, 8, 5, 5), (0, 4, 9, 9), (8, 4, 3, 3), (2, 2), (1, 1)),
    "2d-empty-channels": valid((2, 8, 5, 5), (2, 0, 9, 9), (8, 0, 3, 3), (2, 2), (1, 1)),
    "2d-transposed-empty-batch": valid((0, 8, 9, 10), (0, 4, 5, 5), (4, 8, 3, 3), (2, 2), (1, 1), transposed=True),
}
TENSOR_PARTS = {"shape": 0, "dtype": 1, "format": 2}


def changed(base, changes):
    """A base with arguments replaced; `weight.dtype` replaces one part of a tensor, `all.dtype` of all tensors."""
    call = dict(BASES[base])
    for key, value in changes.items():
        name, _, part = key.partition(".")
        names = [n for n in NAMES if isinstance(call[n], tuple) and len(call[n]) == 3 and isinstance(call[n][1], str)] \
            if name == "all" else [name]
        for each in names:
            if part:
                tensor = list(call[each])
                tensor[TENSOR_PARTS[part]] = value
                call[each] = tuple(tensor)
            else:
                call[each] = value
    return call


def phase_one(call, backend="reference", **options):
    arguments = []
    for name in NAMES:
        value = call[name]
        if isinstance(value, tuple) and len(value) == 3 and isinstance(value[1], str):
            value = cann.aclTensor(shape=value[0], dtype=value[1], format=value[2])
        arguments.append(value)
    return cann.aclnnConvolutionBackwardGetWorkspaceSize(*arguments, product=call["product"], backend=backend,
                                                         **options)


# --- one rule, one row: (base, changes, status, words of the message) ---------------------------------------------
ROWS = [
    # 1: pointers
    *[("2d", {name: None}, NULL, name) for name in ("gradOutput", "input", "weight", "stride", "padding", "dilation",
                                                    "outputPadding", "outputMask")],
    *[("2d", {name: None}, NULL, name) for name in ("gradInput", "gradWeight", "gradBias")],
    ("2d", {"outputMask": (True, True)}, NULL, "3 entries"),
    ("2d", {"outputMask": (True, True, True, True)}, NULL, "3 entries"),
    ("2d", {"outputMask": ()}, NULL, "3 entries"),
    ("2d", {"biasSizes": None}, OK, ""),
    ("2d", {"biasSizes": (1,)}, OK, ""),
    ("2d", {"biasSizes": (1, 2, 3)}, OK, ""),
    ("2d", {"gradInput": None, "outputMask": (False, True, True)}, OK, ""),
    ("2d", {"gradWeight": None, "outputMask": (True, False, True)}, OK, ""),
    ("2d", {"gradBias": None, "outputMask": (True, True, False)}, OK, ""),
    ("2d", {"gradInput": None, "gradWeight": None, "gradBias": None, "outputMask": (False,) * 3}, OK, ""),
    *[("2d", {"outputMask": mask}, OK, "") for mask in itertools.product((False, True), repeat=3)],
    *[("3d-transposed", {"outputMask": mask}, OK, "") for mask in itertools.product((False, True), repeat=3)],
    # 2: number formats, also of results that the mask leaves out
    *[("2d", {f"{name}.dtype": dtype}, INVALID, name)
      for name in ("gradOutput", "input", "weight", "gradInput", "gradWeight", "gradBias")
      for dtype in ("INT32", "DOUBLE", "HIFLOAT8")],
    ("2d", {"gradInput.dtype": "INT8", "outputMask": (False, True, True)}, INVALID, "gradInput"),
    ("2d", {"gradWeight.dtype": "INT8", "outputMask": (True, False, True)}, INVALID, "gradWeight"),
    ("2d", {"gradBias.dtype": "INT8", "outputMask": (True, True, False)}, INVALID, "gradBias"),
    *[("2d", {f"{name}.dtype": dtype}, OK, "")
      for name in ("gradOutput", "input", "weight", "gradInput", "gradWeight", "gradBias")
      for dtype in ("FLOAT16", "BFLOAT16")],
    # 4: ranks and storage formats
    *[("2d", {f"{name}.format": form}, INVALID, name)
      for name in ("gradOutput", "input", "weight", "gradInput", "gradWeight") for form in ("NHWC", "ND", "NCDHW")],
    *[("3d", {f"{name}.format": form}, INVALID, name)
      for name in ("gradOutput", "input", "weight", "gradInput", "gradWeight") for form in ("NDHWC", "ND")],
    *[("1d", {f"{name}.format": "NCHW"}, INVALID, name) for name in ("gradOutput", "input", "weight")],
    *[("1d", {f"{name}.format": "ND"}, OK, "")
      for name in ("gradOutput", "input", "weight", "gradInput", "gradWeight")],
    ("2d", {"gradBias.format": "NCL"}, INVALID, "gradBias"),
    ("2d", {"gradBias.format": "NCHW"}, INVALID, "gradBias"),
    ("2d-transposed", {"gradBias.format": "NCL"}, OK, ""),
    ("2d", {"input": ((4, 9), "FLOAT", "ND")}, INVALID, "axes"),
    ("2d", {"weight": ((8, 4, 1, 3, 3, 1), "FLOAT", "ND")}, INVALID, "axes"),
    ("2d", {"gradWeight": ((8, 4), "FLOAT", "ND"), "outputMask": (True, False, True)}, INVALID, "axes"),
    # 5: values
    *[("2d", {"stride": value}, INVALID, "stride") for value in ((0, 1), (1, -1))],
    *[("2d", {"padding": value}, INVALID, "padding") for value in ((-1, 1), (1, 1, 1, -1))],
    *[("2d", {"dilation": value}, INVALID, "dilation") for value in ((0, 1), (1, -3))],
    *[("2d", {"outputPadding": value}, INVALID, "outputPadding") for value in ((1, 0), (0, -1))],
    ("2d-transposed", {"outputPadding": (-1, 0)}, INVALID, "outputPadding"),
    ("2d-transposed", {"outputPadding": (0, 1)}, OK, ""),
    ("2d-transposed", {"outputPadding": (5, 7)}, OK, ""),  # the upper bound is enforced in 3-D only
    ("2d-transposed", {"outputPadding": (0, 0, 0, 0)}, OK, ""),
    ("3d-transposed", {"outputPadding": (1, 1, 1)}, OK, ""),
    ("3d-transposed", {"outputPadding": (0, 0, 2)}, INVALID, "outputPadding"),
    *[("2d", {"groups": groups}, INVALID, "groups") for groups in (0, -2)],
    # 6: cubeMathType
    *[("2d", {"cubeMathType": value}, INVALID, "cubeMathType") for value in (-1, 4, 17)],
    # 8: shapes
    ("2d", {"gradOutput": ((2, 8, 25), "FLOAT", "NCL")}, INVALID, "same number of axes"),
    ("2d", {"input": ((2, 4, 1, 9, 9), "FLOAT", "NCDHW"), "gradInput": ((2, 4, 1, 9, 9), "FLOAT", "NCDHW")}, INVALID,
     "same number of axes"),
    ("2d", {"gradOutput.shape": (2, 8, 0, 5)}, INVALID, "gradOutput"),
    ("2d", {"gradOutput.shape": (0, 8, 5, 5)}, INVALID, "gradOutput"),
    ("2d", {"gradInput.shape": (2, 4, 9, 8)}, INVALID, "gradInput"),
    ("2d", {"gradInput.shape": (2, 4, 9, 8), "outputMask": (False, True, True)}, INVALID, "gradInput"),
    ("2d", {"gradWeight.shape": (8, 4, 3, 4)}, INVALID, "gradWeight"),
    ("2d", {"gradWeight.shape": (8, 4, 3, 4), "outputMask": (True, False, True)}, INVALID, "gradWeight"),
    ("2d", {"gradBias.shape": (7,)}, INVALID, "gradBias"),
    ("2d", {"gradBias.shape": (1, 8)}, INVALID, "gradBias"),
    ("2d", {"gradBias.shape": (7,), "outputMask": (True, True, False)}, INVALID, "gradBias"),
    ("2d-transposed", {"gradBias.shape": (4,)}, INVALID, "gradBias"),
    *[("2d", {name: (1,)}, INVALID, name) for name in ("stride", "padding", "dilation")],
    ("2d", {"outputPadding": (0,)}, INVALID, "outputPadding"),
    *[("2d", {name: (1, 1, 1)}, INVALID, name) for name in ("stride", "padding", "dilation")],
    ("2d", {"stride": (2, 2, 2, 2)}, INVALID, "stride"),
    ("2d", {"dilation": (1, 1, 1, 1)}, INVALID, "dilation"),
    ("2d", {"padding": (1, 1, 1, 1)}, OK, ""),
    ("2d", {"padding": (0, 2, 2, 0)}, OK, ""),
    ("3d", {"padding": (1, 1, 1, 1)}, INVALID, "padding"),
    ("3d", {"padding": (1, 1, 1, 1, 1, 1)}, INVALID, "padding"),
    ("1d", {"padding": (0, 0)}, INVALID, "padding"),
    ("1d", {"stride": (3, 3)}, INVALID, "stride"),
    # 9: channels, groups, batch
    ("2d", {"weight.shape": (6, 4, 3, 3), "gradWeight.shape": (6, 4, 3, 3)}, INVALID, "channels"),
    ("2d", {"weight.shape": (8, 3, 3, 3), "gradWeight.shape": (8, 3, 3, 3)}, INVALID, "channels"),
    ("2d", {"groups": 2}, INVALID, "groups"),
    ("2d-groups", {"groups": 1}, INVALID, "groups"),
    ("2d-groups", {}, OK, ""),
    ("2d-depthwise", {}, OK, ""),
    ("2d-transposed-groups", {}, OK, ""),
    ("2d-transposed-groups", {"groups": 4}, INVALID, "groups"),
    ("2d-groups", {"gradOutput.shape": (2, 7, 5, 5), "weight.shape": (7, 2, 3, 3), "gradWeight.shape": (7, 2, 3, 3),
                   "gradBias.shape": (7,)}, INVALID, "groups=2"),
    ("2d", {"gradOutput.shape": (1, 8, 5, 5)}, INVALID, "batch"),
    ("2d-transposed", {"gradOutput.shape": (1, 8, 9, 10)}, INVALID, "batch"),
    # 10: extents, in every rank
    ("1d", {"gradOutput.shape": (4, 2, 4)}, INVALID, "extent 3"),
    ("2d", {"gradOutput.shape": (2, 8, 5, 6)}, INVALID, "extent 5"),
    ("2d", {"padding": (1, 1, 0, 0)}, INVALID, "W"),
    ("2d", {"dilation": (4, 1)}, INVALID, "H"),
    ("2d", {"dilation": (9, 9)}, INVALID, "smaller"),
    ("3d", {"gradOutput.shape": (1, 4, 3, 4, 5)}, INVALID, "extent 4"),
    ("3d-transposed", {"gradOutput.shape": (1, 6, 7, 8, 8)}, INVALID, "extent 4"),
    ("1d-transposed", {"gradOutput.shape": (4, 6, 12)}, INVALID, "extent 4"),
    # The empty-tensor route
    ("2d-empty-batch", {}, OK, ""),
    ("2d-empty-channels", {}, OK, ""),
    ("2d-transposed-empty-batch", {}, OK, ""),
    ("2d-empty-batch", {"biasSizes": None}, INVALID, "biasSizes"),
    ("2d-empty-batch", {"biasSizes": (7,)}, INVALID, "biasSizes"),
    ("2d-empty-batch", {"biasSizes": (8, 8)}, INVALID, "biasSizes"),
    ("2d-empty-batch", {"biasSizes": None, "outputMask": (True, True, False)}, OK, ""),
    ("2d-empty-batch", {"input.shape": (2, 4, 0, 9)}, INVALID, "batch or its channels"),
    ("2d-empty-batch", {"input.shape": (2, 4, 0, 9), "padding": (2, 2), "outputMask": (False, True, True)}, OK, ""),
    ("2d-empty-batch", {"gradInput.shape": (3, 3, 3, 3)}, INNER, "gradInput"),
    ("2d-empty-batch", {"gradWeight.shape": (8, 4, 3, 1)}, INNER, "gradWeight"),
    ("2d-empty-batch", {"gradBias.shape": (7,)}, INNER, "gradBias"),
    ("2d-empty-batch", {"gradBias.shape": (8, 1)}, INNER, "gradBias"),
    ("2d-transposed-empty-batch", {"gradInput.shape": (0, 4, 5, 6)}, INNER, "gradInput"),
    ("2d-empty-batch", {"gradInput.shape": (3, 3, 3, 3), "outputMask": (False, True, True)}, OK, ""),
    ("2d-empty-batch", {"stride": (2,)}, INVALID, "stride"),
    ("2d", {"gradInput.shape": (2, 4, -9, 9)}, INVALID, "negative extent"),
    ("2d", {"weight.shape": (8, 4, -3, 3), "gradWeight.shape": (8, 4, -3, 3)}, INVALID, "negative extent"),
    ("2d-empty-batch", {"padding": (1, 1, 1, 1)}, OK, ""),
    ("2d-empty-batch", {"padding": (1, 1, 1)}, INVALID, "padding"),
    ("2d-empty-batch", {"groups": 3}, INVALID, "groups=3"),
    ("2d-empty-batch", {"groups": 2}, INVALID, "channels"),
    ("2d-empty-batch", {"dilation": (6, 1)}, INVALID, "smaller"),
    ("2d-empty-batch", {"gradOutput.shape": (100, 8, 0, 1)}, OK, ""),  # gradOutput is not compared with the rest
    ("2d-empty-channels", {"weight.shape": (8, 4, 3, 3)}, INVALID, "channels"),
    ("2d-transposed-empty-batch", {"weight.shape": (5, 8, 3, 3)}, INVALID, "weight.shape[0]"),
    ("2d-transposed-empty-batch", {"biasSizes": (4,)}, INVALID, "biasSizes"),
    ("2d", {"weight.shape": (0, 4, 3, 3), "gradWeight.shape": (0, 4, 3, 3), "gradOutput.shape": (2, 0, 5, 5),
            "gradBias.shape": (0,), "biasSizes": (0,)}, INVALID, "input"),
    ("2d", {"weight.shape": (0, 4, 3, 3), "gradWeight.shape": (0, 4, 3, 3), "gradOutput.shape": (2, 0, 5, 5),
            "gradBias.shape": (0,), "biasSizes": (0,), "outputMask": (False, True, True)}, OK, ""),
    # 11: ranges of A2 are met in kernels
    ("2d", {"weight.shape": (8, 4, 256, 3), "gradWeight.shape": (8, 4, 256, 3), "input.shape": (2, 4, 262, 9),
            "gradInput.shape": (2, 4, 262, 9)}, INNER, "[1, 255]"),
    ("1d", {"weight.shape": (2, 2, 256), "gradWeight.shape": (2, 2, 256), "input.shape": (4, 2, 262),
            "gradInput.shape": (4, 2, 262)}, INNER, "[1, 255]"),
    ("2d", {"padding": (256, 1), "gradOutput.shape": (2, 8, 260, 5)}, INNER, "[0, 255]"),
    ("2d", {"padding": (0, 256, 1, 1), "gradOutput.shape": (2, 8, 132, 5)}, INNER, "(0, 256)"),
    ("2d", {"padding": (0, 255, 1, 1), "gradOutput.shape": (2, 8, 131, 5)}, OK, ""),
    ("2d", {"dilation": (256, 1), "input.shape": (2, 4, 519, 9), "gradInput.shape": (2, 4, 519, 9)}, INNER, "[1, 255]"),
    ("2d", {"stride": (100, 2), "gradOutput.shape": (2, 8, 1, 5)}, OK, ""),
    ("3d", {"stride": (2, 64, 2), "gradOutput.shape": (1, 4, 3, 1, 4)}, INNER, "[1, 63]"),
    ("3d", {"stride": (64, 2, 2), "gradOutput.shape": (1, 4, 1, 4, 4)}, OK, ""),
    ("3d", {"padding": (300, 1, 1), "gradOutput.shape": (1, 4, 302, 4, 4)}, OK, ""),
    # FLOAT gradWeight of 16-bit groups
    ("3d-groups", {"gradOutput.dtype": "FLOAT16", "input.dtype": "FLOAT16", "weight.dtype": "FLOAT16"}, INVALID,
     "groups=2"),
    ("3d-groups", {"gradOutput.dtype": "BFLOAT16", "input.dtype": "BFLOAT16", "weight.dtype": "BFLOAT16"}, INVALID,
     "groups=2"),
    ("3d-groups", {"cubeMathType": 2}, INVALID, "groups=2"),
    ("3d-groups", {"cubeMathType": 1}, OK, ""),
    ("3d-groups", {"all.dtype": "FLOAT16"}, OK, ""),
    ("3d-groups", {"cubeMathType": 2, "outputMask": (True, False, True)}, OK, ""),
    ("2d-groups", {"gradOutput.dtype": "FLOAT16", "input.dtype": "FLOAT16", "weight.dtype": "FLOAT16"}, OK, ""),
]


def row_id(row):
    base, changes, status, _ = row
    return f"{base}-{'-'.join(f'{key}={value}' for key, value in changes.items())}-{status}".replace(" ", "")


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_rule(row):
    base, changes, status, words = row
    found, size, executor = phase_one(changed(base, changes))
    assert found == status, cann.aclGetRecentErrMsg()
    assert isinstance(found, cann.aclnnStatus)
    assert (executor is None) == (status != OK)
    assert words in cann.aclGetRecentErrMsg()
    assert bool(cann.aclGetRecentErrMsg()) == (status != OK)
    if status != OK:
        assert size == 0


# --- what differs between products: status for A2, A3, 950, training, inference ------------------------------------
ALL = {"all.dtype": "FLOAT16"}
BY_PRODUCT = [
    ("2d", {}, (OK, OK, OK, INVALID, INVALID)),  # cubeMathType 0 with FLOAT
    ("2d", {"cubeMathType": 1}, (OK,) * 5),
    ("2d", {"cubeMathType": 2}, (OK,) * 5),
    ("2d", {"cubeMathType": 3}, (OK, OK, OK, INVALID, INVALID)),
    ("2d", {"cubeMathType": 4}, (INVALID,) * 5),
    *[("2d", {**ALL, "cubeMathType": cube}, (OK,) * 5) for cube in range(4)],
    *[("2d", {"all.dtype": "BFLOAT16", "cubeMathType": cube}, (OK, OK, OK, INVALID, INVALID)) for cube in range(4)],
    ("1d", ALL, (OK,) * 5),
    ("3d", ALL, (OK, OK, OK, INVALID, INVALID)),
    ("3d-transposed", ALL, (OK, OK, OK, INVALID, INVALID)),
    ("2d-transposed", ALL, (OK,) * 5),
    ("2d", {**ALL, "gradInput.dtype": "FLOAT"}, (OK, OK, INVALID, OK, OK)),
    ("2d", {**ALL, "gradWeight.dtype": "FLOAT"}, (OK, OK, INVALID, OK, OK)),
    ("2d", {**ALL, "gradBias.dtype": "FLOAT"}, (OK, OK, INVALID, OK, OK)),
    ("2d", {"cubeMathType": 1, "input.dtype": "FLOAT16", "gradInput.dtype": "FLOAT16"}, (OK,) * 5),
    ("2d", {"cubeMathType": 1, "input.dtype": "BFLOAT16", "gradInput.dtype": "BFLOAT16"},
     (OK, OK, OK, INVALID, INVALID)),
    ("2d", {"all.dtype": "FLOAT8_E4M3FN"}, (INVALID,) * 5),
    ("2d-transposed", {"all.dtype": "FLOAT8_E4M3FN"}, (INVALID,) * 5),
    ("2d", {**ALL, "gradBias.format": "NCL"}, (INVALID, INVALID, INVALID, OK, OK)),
    ("2d-empty-batch", ALL, (OK, OK, OK, INVALID, INVALID)),
    ("2d-empty-channels", ALL, (OK, OK, OK, INVALID, INVALID)),
    ("2d", {**ALL, "weight.shape": (8, 4, 256, 3), "gradWeight.shape": (8, 4, 256, 3), "input.shape": (2, 4, 262, 9),
            "gradInput.shape": (2, 4, 262, 9)}, (INNER, INNER, OK, OK, OK)),
    ("2d", {**ALL, "padding": (256, 1), "gradOutput.shape": (2, 8, 260, 5)}, (INNER, INNER, OK, OK, OK)),
    ("2d", {**ALL, "dilation": (256, 1), "input.shape": (2, 4, 519, 9), "gradInput.shape": (2, 4, 519, 9)},
     (INNER, INNER, OK, OK, OK)),
    ("3d", {**ALL, "stride": (2, 64, 2), "gradOutput.shape": (1, 4, 3, 1, 4)}, (INNER, INNER, OK, INVALID, INVALID)),
    ("2d-transposed", {**ALL, "weight.shape": (4, 8, 256, 3), "gradWeight.shape": (4, 8, 256, 3),
                       "gradOutput.shape": (2, 8, 262, 10)}, (INNER, INNER, INNER, OK, OK)),
    ("2d-transposed", {**ALL, "stride": (100, 2), "gradOutput.shape": (2, 8, 401, 10)}, (OK,) * 5),
    ("2d-groups", {**ALL, "gradWeight.dtype": "FLOAT"}, (OK, OK, INVALID, OK, OK)),
    ("3d-groups", {**ALL, "gradWeight.dtype": "FLOAT"}, (INVALID,) * 5),
]


@pytest.mark.parametrize("row", BY_PRODUCT, ids=lambda row: row_id((*row[:2], "", "")))
@pytest.mark.parametrize("place", range(5), ids=PRODUCTS)
def test_product(row, place):
    base, changes, statuses = row
    found, _, _ = phase_one(changed(base, changes | {"product": PRODUCTS[place]}))
    assert found == statuses[place], cann.aclGetRecentErrMsg()


# --- the order of the checks: of two broken rules the earlier one answers --------------------------------------------
ORDER = [
    ({"gradOutput": None}, NULL, "gradOutput is None"),
    ({"weight.dtype": "INT32"}, INVALID, "weight is INT32"),
    ({"input.format": "NHWC"}, INVALID, "NHWC"),
    ({"stride": (0, 2)}, INVALID, "stride must be at least"),
    ({"cubeMathType": 9}, INVALID, "cubeMathType=9"),
    ({"gradInput.shape": (2, 4, 9, 1)}, INVALID, "gradInput has shape"),
    ({"groups": 4}, INVALID, "groups=4"),
    ({"gradOutput.shape": (2, 8, 5, 6)}, INVALID, "extent"),
    ({"dilation": (4, 4), "padding": (900, 900), "gradOutput.shape": (2, 8, 901, 901)}, INNER, "[0, 255]"),
]


@pytest.mark.parametrize("first, second", list(itertools.combinations(range(len(ORDER)), 2)))
def test_the_earlier_check_answers(first, second):
    changes, status, words = ORDER[first]
    call = changed("2d", ORDER[second][0] | changes)
    found, _, _ = phase_one(call)
    assert (found, words in cann.aclGetRecentErrMsg()) == (status, True), cann.aclGetRecentErrMsg()


@pytest.mark.parametrize("step", range(len(ORDER)))
def test_each_check_answers_alone(step):
    changes, status, words = ORDER[step]
    found, _, _ = phase_one(changed("2d", changes))
    assert (found, words in cann.aclGetRecentErrMsg()) == (status, True), cann.aclGetRecentErrMsg()


def test_8_bit_rules_come_after_formats_of_numbers_and_before_storage_formats():
    eight = {"product": "ASCEND_950", "all.dtype": "HIFLOAT8"}
    phase_one(changed("2d", eight | {"gradBias.dtype": "INT8"}))
    assert "gradBias is INT8" in cann.aclGetRecentErrMsg()
    phase_one(changed("2d", eight | {"input.format": "NHWC"}))
    assert "8-bit" in cann.aclGetRecentErrMsg()


# --- strict=False, determinism, the chosen product -------------------------------------------------------------------
LIFTED = [
    ("2d", {"weight.shape": (8, 4, 256, 3), "gradWeight.shape": (8, 4, 256, 3), "input.shape": (2, 4, 262, 9),
            "gradInput.shape": (2, 4, 262, 9)}, OK),
    ("2d", {"all.dtype": "DOUBLE"}, OK),
    ("2d", {"all.dtype": "HIFLOAT8"}, OK),
    ("2d", {"all.dtype": "FLOAT8_E5M2"}, OK),
    ("3d", {"product": "ATLAS_TRAINING"}, OK),
    ("3d-groups", {"cubeMathType": 2}, OK),
    ("2d-empty-batch", {"product": "ATLAS_TRAINING"}, OK),
    ("2d", {"groups": 2}, INVALID),
    ("2d", {"all.dtype": "INT32"}, INVALID),
    ("2d", {"gradOutput.shape": (2, 8, 5, 6)}, INVALID),
    ("2d", {"input.format": "NHWC"}, INVALID),
    ("2d", {"input": None}, NULL),
    ("2d", {"cubeMathType": 4}, INVALID),
]


@pytest.mark.parametrize("row", LIFTED, ids=lambda row: row_id((*row, "")))
def test_without_product_limits(row):
    base, changes, status = row
    assert phase_one(changed(base, changes), strict=False)[0] == status, cann.aclGetRecentErrMsg()


def test_deterministic_weight_gradient_goes_through_3d_on_a2():
    call = changed("2d-groups", {"gradOutput.dtype": "FLOAT16", "input.dtype": "FLOAT16", "weight.dtype": "FLOAT16",
                                 "outputMask": (False, True, False)})
    assert phase_one(call)[0] == OK
    assert cann.aclrtCtxSetSysParamOpt(cann.aclSysParamOpt.ACL_OPT_DETERMINISTIC, 1) == 0
    assert cann.aclrtCtxGetSysParamOpt(cann.aclSysParamOpt.ACL_OPT_DETERMINISTIC) == (0, 1)
    assert phase_one(call)[0] == INNER
    assert phase_one(call | {"outputMask": (True, True, False)})[0] == OK


def test_set_product():
    call = changed("2d", {"cubeMathType": 0, "product": None})
    assert cann.get_product() is cann.Product.A2
    assert phase_one(call)[0] == OK
    assert cann.set_product("ATLAS_TRAINING") is cann.Product.A2
    assert phase_one(call)[0] == INVALID
    assert cann.set_product(cann.Product.ASCEND_950) is cann.Product.ATLAS_TRAINING
    assert phase_one(call)[0] == OK
    with pytest.raises(ValueError, match="A2, A3"):
        cann.set_product("A4")


@pytest.mark.parametrize("name, product", [
    ("910B", "A2"), ("Ascend910B3", "A2"), ("Ascend 910B", "A2"), ("910b2", "A2"), ("Atlas 800T-A2", "A2"),
    ("910C", "A3"), ("Ascend910_93", "A3"), ("910_95", "ASCEND_950"), ("Ascend 950PR", "ASCEND_950"),
    ("950DT", "ASCEND_950"), ("Ascend910", "ATLAS_TRAINING"), ("310P", "ATLAS_INFERENCE"),
    ("Ascend310P3", "ATLAS_INFERENCE"), ("a3", "A3")])
def test_market_names(name, product):
    cann.set_product(name)
    assert cann.get_product() is cann.Product[product]
    cann.set_product("A2")


def test_no_backend_is_an_inner_error(monkeypatch):
    monkeypatch.setitem(BACKENDS, "absent", "convgrad.backends.absent")
    status, size, executor = phase_one(changed("2d", {}), backend="absent")
    assert (status, size, executor) == (INNER, 0, None)
    assert "absent" in cann.aclGetRecentErrMsg()


def test_a_large_tensor_is_planned_without_memory():
    def tensor(*shape):
        return cann.aclTensor(shape=shape, dtype="BFLOAT16", format=FORMAT[len(shape)])

    x, w, dy = tensor(64, 512, 64, 256, 256), tensor(512, 512, 7, 7, 7), tensor(64, 512, 58, 250, 250)
    status, _, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
        dy, x, w, None, [1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1, [True] * 3, 0, x, w, tensor(512),
        backend="reference")
    assert status == OK
    assert cann.aclnnConvolutionBackward(None, 0, executor, None) == NULL
    assert "without data" in cann.aclGetRecentErrMsg()
