"""tests/deviations/cann.toml, entry by entry: what `here` says is what happens. An entry without its test fails."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import test_cann_conv3d as conv3d
import test_cann_status as backward
import test_cann_tbc as tbc
from cann_oracle import hf32

from convgrad import cann
from convgrad.cann import GraphError, aclTensor

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENTRIES = tomllib.loads((Path(__file__).parent.parent / "deviations" / "cann.toml").read_text(encoding="utf-8"))
OK, NULL, INVALID, INNER = 0, 161001, 161002, 561103
SHOWN = {}


def shows(entry):
    def remember(function):
        assert entry not in SHOWN
        SHOWN[entry] = function
        return function

    return remember


def normal(base, changes, **options):
    return int(backward.phase_one(backward.changed(base, changes), **options)[0])


def time_first(changes, strict=True, **base):
    return int(tbc.phase_one(tbc.changed(changes, **base), strict=strict)[0])


@shows("tbc-axis-order")
def _():
    assert time_first({}, time=7, batch=2, c_in=3, c_out=4, taps=3, pad=1) == OK
    ncl = {"self.shape": (2, 4, 7), "input.shape": (2, 3, 7), "gradInput.shape": (2, 3, 7), "weight.shape": (4, 3, 3),
           "gradWeight.shape": (4, 3, 3)}
    assert time_first(ncl) == INVALID


@shows("tbc-bias-length")
def _():
    assert time_first({"bias.shape": (3,), "gradBias.shape": (3,)}, taps=3, c_out=4) == INVALID
    assert time_first({}, taps=3, c_out=4) == OK


@shows("tbc-bias-format")
def _():
    assert time_first({"bias.format": "NCL"}) == time_first({"gradBias.format": "NCL"}) == INVALID


@shows("tbc-empty-self")
def _():
    assert time_first({}, batch=0) == INVALID


@shows("tbc-empty-bias-sum")
def _():
    shapes = ((5, 2, 3), (5, 2, 0), (1, 0, 3), (3,), (5, 2, 0), (1, 0, 3), (3,))
    arrays = [np.full(shape, 4, np.float32) for shape in shapes]
    tbc.run(arrays, 0, 0, "reference")
    assert (arrays[6] == 40).all()  # the sum; B*T would be 10


@shows("tbc-float-cube-math-type")
def _():
    for cube in (0, 3):
        statuses = [time_first({"cubeMathType": cube, "product": product}) for product in backward.PRODUCTS]
        assert statuses == [OK, OK, OK, INVALID, INVALID]


@shows("tbc-8bit-grad-weight")
def _():
    for dtype in ("HIFLOAT8", "FLOAT8_E4M3FN"):
        assert time_first({"gradWeight.dtype": dtype, "product": "ASCEND_950"}) == INVALID


@shows("tbc-mixed-formats")
def _():
    mixed = {"self.dtype": "FLOAT16", "weight.dtype": "BFLOAT16", "gradWeight.dtype": "BFLOAT16"}
    assert [time_first(mixed | {"product": product}) for product in backward.PRODUCTS[:3]] == [OK] * 3


@shows("tbc-gradient-formats")
def _():
    statuses = [time_first({"gradInput.dtype": "FLOAT16", "product": product}) for product in backward.PRODUCTS[:3]]
    assert statuses == [INNER, INNER, INVALID]


@shows("tbc-kernel-length")
def _():
    half = {"all.dtype": "FLOAT16"}
    statuses = [time_first(half | {"product": product}, taps=256, time=300) for product in backward.PRODUCTS[:4]]
    assert statuses == [OK, OK, INNER, OK]


@shows("batch")
def _():
    assert normal("2d", {"gradOutput.shape": (1, 8, 5, 5)}) == INVALID
    assert normal("2d-transposed", {"gradOutput.shape": (1, 8, 9, 10)}) == INVALID


@shows("gradient-formats")
def _():
    half = {"gradOutput.dtype": "FLOAT16", "input.dtype": "FLOAT16", "weight.dtype": "FLOAT16",
            "gradWeight.dtype": "FLOAT16"}  # gradInput and gradBias stay FLOAT
    assert [normal("2d", half | {"product": product}) for product in backward.PRODUCTS[:3]] == [OK, OK, INVALID]


@shows("empty-results")
def _():
    assert normal("2d-empty-batch", {"gradInput.shape": (3, 3, 3, 3)}) == INNER


@shows("8bit-both-gradients")
def _():
    call = {"all.dtype": "HIFLOAT8", "product": "ASCEND_950", "gradWeight.dtype": "FLOAT"}
    masks = [(False, True, False), (False, False, False), (False, False, True)]
    assert [normal("2d-transposed", call | {"outputMask": mask}) for mask in masks] == [INVALID, OK, INNER]
    assert [normal("2d", call | {"outputMask": mask}) for mask in masks] == [INVALID, OK, INNER]


@shows("conv3d-stride-d-and-reversed-pads")
def _():
    with pytest.raises(GraphError, match="on D, more than the kernel's 2"):
        conv3d.plan_input(stride=(3, 1, 1), dy=(1, 6, 1, 4, 4), product="A2")
    assert conv3d.plan_input(stride=(3, 1, 1), dy=(1, 6, 1, 4, 4), product="ASCEND_950").problem.wrt == "input"
    wide = {"filter": (6, 4, 2, 3, 300), "shape": (1, 4, 4, 6, 303), "dy": (1, 6, 3, 4, 4)}
    with pytest.raises(GraphError, match="at most 255"):
        conv3d.plan_input(**wide, product="A2")
    assert conv3d.plan_input(**wide, product="ASCEND_950").problem.wrt == "input"


@shows("conv3d-groups-of-1")
def _():
    assert conv3d.plan_input(filter=(6, 2, 2, 3, 3), groups=1).problem.conv.groups == 2
    assert conv3d.plan_filter(filter=(6, 2, 2, 3, 3), groups=1).problem.conv.groups == 2


@shows("conv3d-8bit-filter-gradient")
def _():
    call = {"dtype": "HIFLOAT8", "product": "ASCEND_950"}
    assert conv3d.plan_filter(**call).problem.out_dtype == "float32"
    for refused in ({"dtype": "FLOAT8_E4M3FN"}, {"groups": 2, "filter": (6, 2, 2, 3, 3)}):
        with pytest.raises(GraphError):
            conv3d.plan_filter(**{**call, **refused})


@shows("conv3d-filter-strides")
def _():
    with pytest.raises(GraphError, match="63"):
        conv3d.plan_filter(stride=(1, 64, 1), dy=(1, 6, 3, 1, 4), product="A2")


@shows("tbc-pad-range")
def _():
    half = {"all.dtype": "FLOAT16"}
    statuses = [time_first(half | {"product": product}, pad=256) for product in backward.PRODUCTS[:4]]
    assert statuses == [INVALID] * 4


@shows("bf16-use-fp16")
def _():
    assert normal("2d", {"all.dtype": "BFLOAT16", "cubeMathType": 2}) == OK
    executor = backward.phase_one(backward.changed("2d", {"all.dtype": "BFLOAT16", "cubeMathType": 2}))[2]
    assert all(plan.problem.compute == "f16" for plan in executor.plans if plan.problem.wrt != "bias")


def sums_to_2049(dtype, cube):
    """Gradients whose exact value is 2049, which is no FLOAT16 number; results are FLOAT."""
    dy, x, w = np.array([[[2048], [1]]], dtype), np.ones((1, 1, 1), dtype), np.ones((2, 1, 1), dtype)
    results = [np.empty((1, 1, 1), np.float32), np.empty((2, 1, 1), np.float32), np.empty(2, np.float32)]
    status, size, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
        *map(aclTensor, (dy, x, w)), None, [1], [0], [1], False, [0], 1, [True] * 3, cube, *map(aclTensor, results),
        backend="reference")
    assert status == cann.aclnnConvolutionBackward(np.empty(size, np.uint8), size, executor) == OK
    return results


@shows("fp16-results")
def _():
    assert sums_to_2049(np.float32, 0)[0].item() == 2049
    assert sums_to_2049(np.float32, 2)[0].item() == sums_to_2049(np.float16, 0)[0].item() == 2048


@shows("bias-sum-format")
def _():
    dy = np.array([[[2048, 1]]], np.float16)
    db = np.empty(1, np.float32)
    one = np.ones((1, 1, 2), np.float16)
    status, size, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
        aclTensor(dy), aclTensor(one), aclTensor(one[:, :, :1]), None, [1], [0], [1], False, [0], 1,
        [False, False, True], 0, None, None, aclTensor(db), backend="reference")
    assert status == cann.aclnnConvolutionBackward(np.empty(size, np.uint8), size, executor) == OK
    assert db.item() == 2048


@shows("extents-in-1d-and-2d")
def _():
    assert normal("1d", {"gradOutput.shape": (4, 2, 4)}) == normal("2d", {"gradOutput.shape": (2, 8, 5, 6)}) == INVALID


@shows("groups-divide-output-channels")
def _():
    assert normal("2d-groups", {"gradOutput.shape": (2, 7, 5, 5), "weight.shape": (7, 2, 3, 3), "gradBias.shape": (7,),
                                "gradWeight.shape": (7, 2, 3, 3)}) == INVALID


@shows("output-padding-range")
def _():
    assert normal("2d-transposed", {"outputPadding": (2, 2)}) == OK
    assert normal("3d-transposed", {"outputPadding": (2, 0, 0)}) == INVALID


@shows("mask-length")
def _():
    assert normal("2d", {"outputMask": (True,) * 4}) == NULL


@shows("bias-sizes")
def _():
    assert normal("2d", {"biasSizes": (999,)}) == OK
    assert normal("2d-empty-batch", {"biasSizes": (999,)}) == INVALID


@shows("groups-of-transposed")
def _():
    assert normal("2d-transposed-groups", {}) == OK  # input 4 channels, weight (4, 4, ...), groups 2, gradOutput 8


@shows("transposed-fp8")
def _():
    call = {"all.dtype": "FLOAT8_E4M3FN", "product": "ASCEND_950", "outputMask": (True, False, False)}
    assert normal("2d-transposed", call) == INVALID
    assert normal("2d-transposed", call, strict=False) == OK


@shows("hifloat8-grad-weight")
def _():
    call = {"all.dtype": "HIFLOAT8", "product": "ASCEND_950", "outputMask": (False, True, False), "gradInput": None}
    assert normal("2d-transposed", call) == INVALID
    assert normal("2d-transposed", call | {"gradWeight.dtype": "FLOAT"}) == OK


@shows("normal-8bit-grad-input")
def _():
    call = {"all.dtype": "HIFLOAT8", "product": "ASCEND_950", "outputMask": (True, False, False), "gradWeight": None}
    assert normal("2d", call) == INNER
    assert normal("2d", call, strict=False) == OK


@shows("ranges")
def _():
    far = {"padding": (256, 1), "gradOutput.shape": (2, 8, 260, 5)}
    assert (normal("2d", far), normal("2d", far, strict=False)) == (INNER, OK)


@shows("ranges-of-transposed-950")
def _():
    long = {"product": "ASCEND_950", "stride": (64, 2, 2), "gradOutput.shape": (1, 6, 129, 8, 8)}
    assert normal("3d-transposed", long) == OK


@shows("empty-four-pads")
def _():
    # 5 taps over 0 + 2 + 3 positions fit; twice the first value would not.
    call = {"input.shape": (2, 4, 0, 9), "weight.shape": (8, 4, 5, 3), "gradWeight.shape": (8, 4, 5, 3),
            "padding": (2, 3, 1, 1),
            "outputMask": (False, True, False)}
    assert normal("2d-empty-batch", call) == OK


@shows("formulas")
def _():
    dy, w = np.array([[[1, 2]]], np.float32), np.array([[[1, 10, 100]]], np.float32)
    x, dx = np.zeros((1, 1, 3), np.float32), np.empty((1, 1, 3), np.float32)
    status, _, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
        aclTensor(dy), aclTensor(x), aclTensor(w), None, [2], [1], [1], False, [0], 1, [True, False, False], 0,
        aclTensor(dx), None, None, backend="reference")
    assert status == cann.aclnnConvolutionBackward(None, 0, executor) == OK
    assert dx.tolist() == [[[10, 102, 20]]]


@shows("determinism")
def _():
    assert not cann.Product.A2.facts.deterministic and cann.Product.ASCEND_950.facts.deterministic
    assert cann.aclrtCtxSetSysParamOpt(cann.aclSysParamOpt.ACL_OPT_DETERMINISTIC, 1) == 0
    assert normal("2d", {}) == OK


@shows("padding-and-nan")
def _():
    dy, x = np.full((1, 1, 3), np.nan, np.float32), np.ones((1, 1, 3), np.float32)
    dy[0, 0, 1:] = 1
    dw = np.empty((1, 1, 3), np.float32)
    status, _, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
        aclTensor(dy), aclTensor(x), aclTensor(np.ones((1, 1, 3), np.float32)), None, [1], [1], [1], False, [0], 1,
        [False, True, False], 0, None, aclTensor(dw), None, backend="reference")
    assert status == cann.aclnnConvolutionBackward(None, 0, executor) == OK
    assert dw[0, 0, 0] == 2  # its only term with the NaN lies in the padding
    assert np.isnan(dw[0, 0, 1:]).all()


@shows("strided-results")
def _():
    storage = np.zeros((7, 2, 6), np.float32)
    arrays, _ = tbc.problem(7, 2, 3, 4, 3, 1)
    plain = [array.copy() for array in arrays]
    tbc.run(plain, 1, 0, "reference")
    arrays[4] = storage[:, :, ::2]
    tbc.run(arrays, 1, 0, "reference")
    assert np.array_equal(storage[:, :, ::2], plain[4]) and not storage[:, :, 1::2].any()


@shows("executor-runs-once")
def _():
    arrays, _ = tbc.problem(7, 2, 3, 4, 3, 1)
    tensors = [aclTensor(array) for array in arrays]
    _, size, executor = cann.aclnnConvTbcBackwardGetWorkspaceSize(*tensors[:4], 1, 0, *tensors[4:], backend="reference")
    assert cann.aclnnConvTbcBackward(None, size, executor) == OK
    assert cann.aclnnConvTbcBackward(None, size, executor) == INVALID


def one_product(product, x, enable=True):
    """x * 1 as the weight gradient of one element, in HF32."""
    one = np.ones((1, 1, 1, 1, 1), np.float32)
    y = cann.Conv3DBackpropFilterV2(np.full_like(one, x), [1] * 5, one, strides=[1] * 5, pads=[0] * 6,
                                    data_format="NCDHW", enable_hf32=enable, product=product, backend="reference")
    return y.item()


@shows("hf32-bits-of-a3")
def _():
    x = 1 + 2.0**-11
    assert [one_product(product, x) for product in ("A2", "A3", "ASCEND_950")] == [x, x, 1 + 2.0**-10]


@shows("hf32-ties")
def _():
    assert one_product("A2", 1 + 2.0**-12) == 1 + 2.0**-11
    assert one_product("A2", -1 - 2.0**-12) == -1 - 2.0**-11


@shows("hf32-results")
def _():
    x, w = np.float32(1 + 2.0**-11), np.float32(1 + 2.0**-11)
    one = np.ones((1, 1, 1, 1, 1), np.float32)
    y = cann.Conv3DBackpropInputV2([1] * 5, w * one, x * one, strides=[1] * 5, pads=[0] * 6, enable_hf32=True,
                                   data_format="NCDHW", backend="reference").item()
    exact = float(x) * float(w)
    assert y == exact and hf32(np.float32(exact), 11) != exact


@shows("fp8-overflow")
def _():
    import ml_dtypes

    def product(value):
        dy = np.full((1, 1, 1, 1, 1), value, ml_dtypes.float8_e4m3fn)
        w = np.full((1, 1, 1, 1, 1), 2, ml_dtypes.float8_e4m3fn)
        y = cann.Conv3DBackpropInputV2([1] * 5, w, dy, strides=[1] * 5, pads=[0] * 6, data_format="NCDHW",
                                       product="ASCEND_950", backend="reference")
        return float(y.item())

    assert product(224) == 448
    assert np.isnan(product(240))


@shows("conv3d-8bit")
def _():
    for dtype in ("HIFLOAT8", "FLOAT8_E4M3FN"):
        for form in ("NCDHW", "NDHWC"):
            assert conv3d.plan_input(dtype=dtype, form=form, product="ASCEND_950").problem.wrt == "input"
            with pytest.raises(GraphError, match=dtype):
                conv3d.plan_input(dtype=dtype, form=form, product="A2")


@shows("conv3d-ndhwc-groups")
def _():
    plan = conv3d.plan_input(form="NDHWC", groups=2, filter=(6, 2, 2, 3, 3), product="ASCEND_950")
    assert plan.problem.conv.groups == 2


@shows("conv3d-limits-of-950")
def _():
    wide = {"stride": (1, 64, 1), "dy": (1, 6, 3, 1, 4)}
    assert conv3d.plan_input(product="ASCEND_950", **wide).problem.conv.stride == (1, 64, 1)
    with pytest.raises(GraphError, match="63"):
        conv3d.plan_input(product="A2", **wide)


@shows("conv3d-four-values")
def _():
    assert cann.Conv3DBackpropInputV2.infer_shape([8, 24, 32, 5]) == (8, 1, 24, 32, 5)


@shows("conv3d-hardware-limits")
def _():
    plan = conv3d.plan_input(shape=(1, 4, 4, 6, 5002), dy=(1, 6, 3, 4, 5000))
    assert plan.problem.conv.out_size == (3, 4, 5000)


@shows("conv3d-filter-consistency")
def _():
    for call, words in (({"filter": (5, 4, 2, 3, 3)}, "output channels"), ({"dy": (2, 6, 3, 4, 4)}, "batch")):
        with pytest.raises(GraphError, match=words):
            conv3d.plan_filter(**call)


@shows("conv3d-failures")
def _():
    with pytest.raises(GraphError, match="groups must be in"):
        conv3d.plan_input(groups=0)
    assert issubclass(GraphError, ValueError)


@shows("transpose-bias-format")
def _():
    call = {"dtype": "HIFLOAT8", "product": "ASCEND_950"}
    assert conv3d.plan_transpose(bias=np.zeros(4, np.float32), **call).problem.wrt == "input"
    with pytest.raises(GraphError, match="bias must be FLOAT"):
        conv3d.plan_transpose(bias=aclTensor(np.zeros(4, np.uint8), dtype="HIFLOAT8"), **call)


@pytest.mark.parametrize("entry", ENTRIES)
def test_entry(entry):
    assert entry in SHOWN, f"{entry} is in cann.toml, but nothing shows it"
    assert set(ENTRIES[entry]) == {"operator", "kind", "documents", "vendor", "here"}
    assert ENTRIES[entry]["kind"] in ("reading", "deviation")
    SHOWN[entry]()


def test_nothing_is_shown_that_is_not_written_down():
    assert sorted(SHOWN) == sorted(ENTRIES)
