"""Conv3DBackpropInputV2, Conv3DBackpropFilterV2, Conv3DTransposeV2 on descriptors: shapes and rules."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from convgrad import cann
from convgrad.cann import Conv3DBackpropFilterV2 as FilterV2
from convgrad.cann import Conv3DBackpropInputV2 as InputV2
from convgrad.cann import Conv3DTransposeV2 as TransposeV2
from convgrad.cann import GraphError, aclTensor

F, H, B, H8, F8 = "FLOAT", "FLOAT16", "BFLOAT16", "HIFLOAT8", "FLOAT8_E4M3FN"
ACTIVATIONS, FILTERS = ("NCDHW", "NDHWC"), ("NCDHW", "NDHWC", "DHWCN")


def placed(shape, form):
    """A shape given as N C D H W in the axis order of a format."""
    return tuple(shape["NCDHW".index(letter)] for letter in form)


def spatial(values, form, fill=1):
    """Attributes of D H W as five values in the axis order of a format."""
    return placed((fill, fill, *values), form)


def tensor(shape, dtype, form):
    return aclTensor(shape=placed(shape, form), dtype=dtype, format=form)


# --- shape inference ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size, form, wanted", [
    ((32, 16, 8, 8, 24), "NDHWC", (32, 16, 8, 8, 24)),
    ((32, 24, 16, 8, 8), "NCDHW", (32, 24, 16, 8, 8)),
    ((8, 8, 24, 32), "DHWCN", (1, 8, 8, 24, 32)),
    ((8, 24, 32, 5), "NDHWC", (8, 1, 24, 32, 5)),
    ((8, 5, 24, 32), "NCDHW", (8, 5, 1, 24, 32)),
    ((0, 0, 0, 0, 0), "NDHWC", (0, 0, 0, 0, 0)),  # all zero is not special here
    (None, "NDHWC", (-1,) * 5),
])
def test_infer_input(size, form, wanted):
    assert InputV2.infer_shape(size, data_format=form) == wanted
    assert cann.infer_shape("Conv3DBackpropInputV2", size, data_format=form) == wanted
    if size is not None:
        for dtype in (np.int32, np.int64):
            assert cann.infer_shape(InputV2, np.array(size, dtype), data_format=form) == wanted


def test_infer_input_with_an_unknown_filter():
    assert InputV2.infer_shape([1, 2, 3, 4, 5], (-1, 2, 3, 3, 3)) == (-1,) * 5


@pytest.mark.parametrize("size", [(1, 2, 3), (1, 2, 3, 4, 5, 6), (), np.array([1.0, 2, 3, 4, 5]),
                                  np.array([[1, 2, 3, 4, 5]], np.int32), np.array([1, 2, 3, 4, 5], np.int16)])
def test_sizes_that_fail(size):
    for infer in (lambda: InputV2.infer_shape(size), lambda: FilterV2.infer_shape(None, size)):
        with pytest.raises(GraphError, match="size"):
            infer()


@pytest.mark.parametrize("size, form, depthwise, wanted", [
    ((8, 4, 3, 3, 3), "NCDHW", False, (8, 4, 3, 3, 3)),
    ((3, 3, 3, 4, 8), "DHWCN", False, (3, 3, 3, 4, 8)),
    ((3, 3, 4, 8), "DHWCN", False, (1, 3, 3, 4, 8)),
    ((8, 4, 3, 3), "NCDHW", False, (8, 4, 1, 3, 3)),
    ((8, 4, 3, 3), "NCDHW", True, (32, 1, 1, 3, 3)),
    ((3, 3, 4, 8), "DHWCN", True, (1, 3, 3, 1, 32)),
    (None, "NCDHW", False, (-1,) * 5),
])
def test_infer_filter(size, form, depthwise, wanted):
    assert FilterV2.infer_shape(None, size, y_format=form, from_depthwise=depthwise) == wanted


@pytest.mark.parametrize("x, filter, attributes, wanted", [
    ((8, 512, 24, 13, 7), (512, 28, 3, 5, 2), {"groups": 4, "strides": (1, 1, 2, 1, 2), "padding": "SAME"},
     (8, 112, 48, 13, 13)),
    ((1, 2, 3, 3, 3), (2, 4, 2, 2, 2), {"strides": (1, 1, 2, 2, 2)}, (1, 4, 6, 6, 6)),
    ((1, 2, 3, 3, 3), (2, 4, 2, 2, 2), {"strides": (1, 1, 2, 2, 2), "output_padding": (0, 0, 1, 0, 1)},
     (1, 4, 7, 6, 7)),
    ((1, 2, 3, 3, 3), (2, 4, 3, 3, 3), {"strides": (1, 1, 2, 2, 2), "pads": (0, 1, 1, 1, 0, 0)}, (1, 4, 6, 5, 7)),
    ((1, 2, 3, 3, 3), (2, 4, 3, 3, 3), {"strides": (1, 1, 2, 2, 2), "pads": (1,)}, (1, 4, 5, 5, 5)),
    ((1, 2, 3, 3, 3), (2, 4, 3, 3, 3), {"strides": (1, 1, 2, 2, 2), "pads": (0, 1, 2)}, (1, 4, 7, 5, 3)),
    ((1, 2, 3, 3, 3), (2, 4, 2, 2, 2), {"strides": (1,) * 5, "dilations": (1, 1, 1, 2, 3)}, (1, 4, 4, 5, 6)),
])
def test_infer_transpose_from_x(x, filter, attributes, wanted):
    attributes = {"pads": (0,) * 6} | attributes
    assert TransposeV2.infer_shape([0] * 5, x, filter, data_format="NCDHW", **attributes) == wanted


def test_infer_transpose_in_other_formats():
    wanted = TransposeV2.infer_shape([0] * 5, (9, 8, 7, 7, 128), (5, 1, 1, 22, 128), strides=(1, 1, 2, 2, 1),
                                     pads=[0] * 6, padding="SAME", data_format="NDHWC", filter_format="DHWCN")
    assert wanted == (9, 8, 13, 13, 22)
    assert TransposeV2.infer_shape([1, 2, 3, 4, 5], (1, 2, 2, 2, 7), (3, 3, 3, 5, 7), strides=[1] * 5,
                                   pads=[0] * 6) == (1, 2, 3, 4, 5)
    assert TransposeV2.infer_shape(None, (1, 2, 2, 2, 7), (3, 3, 3, 5, 7), strides=[1] * 5, pads=[0] * 6) == (-1,) * 5


# --- rules on descriptors -------------------------------------------------------------------------------------------
def plan_input(shape=(1, 4, 4, 6, 6), filter=(6, 4, 2, 3, 3), dy=(1, 6, 3, 4, 4), dtype=H, form="NCDHW",
               filter_form="NCDHW", stride=(1, 1, 1), dilation=(1, 1, 1), pads=(0,) * 6, dtypes=None, **options):
    dtypes = dtypes or (dtype, dtype)
    attributes = {"strides": spatial(stride, form), "dilations": spatial(dilation, form), "pads": pads,
                  "data_format": form, "product": "A2", "backend": "reference"} | options
    return InputV2.plan(placed(shape, form), tensor(filter, dtypes[0], filter_form), tensor(dy, dtypes[1], form),
                        **attributes)


# groups, format and storage rows: which combinations exist on 950
ROWS = [(groups, dtype, form, filter_form)
        for groups, dtype, form, filter_form in itertools.product((1, 2), (F, H, B, H8, F8), ACTIVATIONS, FILTERS)]
REFUSED_8_BIT = {(g, form, filter_form) for g, form, filter_form in itertools.product((1, 2), ACTIVATIONS, FILTERS)
                 if filter_form != "NCDHW" or (g > 1 and form == "NDHWC")}


@pytest.mark.parametrize("groups, dtype, form, filter_form", ROWS)
def test_groups_and_formats_of_the_input_gradient(groups, dtype, form, filter_form):
    call = {"filter": (6, 4 // groups, 2, 3, 3), "groups": groups, "dtype": dtype, "form": form,
            "filter_form": filter_form}
    refused = dtype in (H8, F8) and (groups, form, filter_form) in REFUSED_8_BIT
    for product in ("A2", "A3", "ASCEND_950"):
        if refused or (dtype in (H8, F8) and product != "ASCEND_950"):
            with pytest.raises(GraphError, match=dtype):
                plan_input(product=product, **call)
        else:
            assert plan_input(product=product, **call).problem.conv.groups == groups
    assert plan_input(strict=False, **call).problem.wrt == "input"
    for product in ("ATLAS_TRAINING", "ATLAS_INFERENCE"):
        with pytest.raises(GraphError, match="has no Conv3DBackpropInputV2"):
            plan_input(product=product, **call)


INPUT_REFUSALS = [
    ({"dtypes": (H, B)}, "one number format"),
    ({"dtypes": ("INT32", "INT32")}, "INT32"),
    ({"form": "NDHWC", "data_format": "NCDHW"}, "data_format"),
    ({"data_format": "DHWCN"}, "data_format"),
    ({"strides": (1, 1, 1, 1)}, "5 values"),
    ({"strides": (2, 1, 1, 1, 1)}, "N and C"),
    ({"strides": (1, 2, 1, 1, 1)}, "N and C"),
    ({"strides": (1, 1, 0, 1, 1)}, "at least 1"),
    ({"dilations": (1, 3, 1, 1, 1)}, "N and C"),
    ({"dilations": (1, 1, 1)}, "5 values"),
    ({"pads": (0,) * 5}, "6 values"),
    ({"pads": (-2, 0, 0, 0, 0, 0)}, r"\[0, 255\]"),
    ({"pads": (0, 0, -1, -1, 0, 0)}, "at least 0"),
    ({"groups": 0}, "65535"),
    ({"groups": 65536}, "65535"),
    ({"groups": 2}, "make 1"),
    ({"groups": 3, "filter": (6, 2, 2, 3, 3)}, "make 2"),
    ({"filter": (6, 3, 2, 3, 3)}, "multiple"),
    ({"filter": (5, 4, 2, 3, 3)}, "5 output channels"),
    ({"filter": (7, 2, 2, 3, 3), "dy": (1, 7, 3, 4, 4)}, "does not divide"),
    ({"dy": (2, 6, 3, 4, 4)}, "batch"),
    ({"dy": (1, 6, 3, 4, 5)}, "extent 4"),
    ({"dy": (1, 6, 4, 4, 4)}, "extent 3"),
    ({"shape": (1, 4, 4, 2, 6), "dy": (1, 6, 3, 0, 4)}, "extents"),
    ({"shape": (1, 4, 4, 2, 6), "dy": (1, 6, 3, 1, 4)}, "smaller"),
    ({"filter": (6, 4, 2, 512, 3), "shape": (1, 4, 4, 515, 6)}, r"\[1, 511\]"),
    ({"stride": (1, 64, 1), "dy": (1, 6, 3, 1, 4)}, r"\[1, 63\]"),
    ({"stride": (256, 1, 1), "dy": (1, 6, 1, 4, 4)}, r"\[1, 255\]"),
    ({"stride": (3, 1, 1), "dy": (1, 6, 1, 4, 4)}, "more than the kernel"),
    ({"pads": (256, 0, 0, 0, 0, 0), "dy": (1, 6, 259, 4, 4)}, r"\[0, 255\]"),
    ({"dilation": (256, 1, 1), "shape": (1, 4, 259, 6, 6)}, r"\[1, 255\]"),
    ({"filter": (6, 4, 2, 300, 3), "shape": (1, 4, 4, 303, 6)}, "at most 255"),
    ({"dilation": (1, 200, 1), "shape": (1, 4, 4, 404, 6)}, "at most 255"),
    ({"stride": (1, 63, 1), "filter": (6, 4, 2, 1, 3), "shape": (1, 4, 4, 63, 6), "dy": (1, 6, 3, 1, 4)}, ""),
]


@pytest.mark.parametrize("changes, words", INPUT_REFUSALS, ids=lambda value: str(value).replace(" ", ""))
def test_input_gradient_rules_on_a2(changes, words):
    if not words:
        assert plan_input(**changes).problem.wrt == "input"
        return
    with pytest.raises(GraphError, match=words):
        plan_input(**changes)


LIMITS_OF_A2 = [changes for changes, words in INPUT_REFUSALS if words.startswith(r"\[1") or words in
                ("more than the kernel", "at most 255")] + \
    [{"pads": (256, 0, 0, 0, 0, 0), "dy": (1, 6, 259, 4, 4)}]


@pytest.mark.parametrize("changes", LIMITS_OF_A2, ids=lambda value: str(value).replace(" ", ""))
def test_950_has_not_the_limits_of_a2(changes):
    assert plan_input(product="ASCEND_950", **changes).problem.wrt == "input"
    assert plan_input(strict=False, **changes).problem.wrt == "input"


def test_groups_are_inferred_when_the_attribute_is_1():
    assert plan_input(filter=(6, 2, 2, 3, 3)).problem.conv.groups == 2
    assert plan_input(filter=(6, 2, 2, 3, 3), groups=2).problem.conv.groups == 2


def test_dilation_of_a_single_tap_is_1():
    plan = plan_input(filter=(6, 4, 1, 3, 3), dilation=(7, 1, 1), dy=(1, 6, 4, 4, 4))
    assert plan.problem.conv.dilation == (1, 1, 1)


def test_same_padding_of_the_input_gradient():
    """Recomputed whatever pads say; -1 is only a placeholder."""
    for pads in ((0,) * 6, (-1,) * 6, (9, 9, 9, 9, 9, 9), (0, 0, -1, -1, -1, -1)):
        plan = plan_input(stride=(2, 2, 1), dy=(1, 6, 2, 3, 6), pads=pads, padding="SAME")
        assert plan.problem.conv.padding == ((0, 0), (0, 1), (1, 1))
    with pytest.raises(GraphError, match="extent"):
        plan_input(stride=(2, 2, 1), dy=(1, 6, 2, 3, 6), padding="VALID")


def plan_filter(x=(1, 4, 4, 6, 6), filter=(6, 4, 2, 3, 3), dy=(1, 6, 3, 4, 4), dtype=H, form="NCDHW", y_form="NCDHW",
                stride=(1, 1, 1), dilation=(1, 1, 1), pads=(0,) * 6, dtypes=None, size_type=np.int32, **options):
    dtypes = dtypes or (dtype, dtype)
    attributes = {"strides": spatial(stride, form), "dilations": spatial(dilation, form), "pads": pads,
                  "data_format": form, "y_format": y_form, "product": "A2", "backend": "reference"} | options
    return FilterV2.plan(tensor(x, dtypes[0], form), np.array(placed(filter, y_form), size_type),
                         tensor(dy, dtypes[1], form), **attributes)


@pytest.mark.parametrize("groups, dtype, form, y_form", ROWS)
def test_groups_and_formats_of_the_filter_gradient(groups, dtype, form, y_form):
    call = {"filter": (6, 4 // groups, 2, 3, 3), "groups": groups, "dtype": dtype, "form": form, "y_form": y_form}
    legal_8_bit = dtype == H8 and groups == 1 and form == y_form == "NCDHW"
    for product in ("A2", "A3", "ASCEND_950"):
        if dtype in (H8, F8) and not (product == "ASCEND_950" and legal_8_bit):
            with pytest.raises(GraphError, match=dtype):
                plan_filter(product=product, **call)
        else:
            assert plan_filter(product=product, **call).problem.out_dtype == "float32"


FILTER_REFUSALS = [
    ({"size_type": np.int64}, "INT32"),
    ({"dtypes": (H, F)}, "one number format"),
    ({"groups": 65536}, "65535"),
    ({"groups": 2}, "make 1"),
    ({"filter": (6, 3, 2, 3, 3)}, "multiple"),
    ({"filter": (5, 4, 2, 3, 3)}, "5 output channels"),
    ({"filter": (7, 2, 2, 3, 3), "dy": (1, 7, 3, 4, 4)}, "does not divide"),
    ({"dy": (2, 6, 3, 4, 4)}, "batch"),
    ({"dy": (1, 6, 3, 5, 4)}, "extent 4"),
    ({"dy": (1, 6, 3, 4, 3)}, "extent 4"),
    ({"dy": (1, 6, 2, 4, 4)}, "extent 3"),
    ({"pads": (0, 0, 256, 0, 0, 0), "dy": (1, 6, 3, 260, 4)}, r"\[0, 255\]"),
    ({"dilation": (1, 256, 1), "x": (1, 4, 4, 516, 6)}, r"\[1, 255\]"),
    ({"pads": (0, 0, -1, -1, -1, -1)}, r"\[0, 255\]"),
    ({"pads": (0, 0, -1, -1, -1, 0), "padding": "SAME"}, r"\[0, 255\]"),
    ({"strides": (1, 1, 1)}, "5 values"),
]


@pytest.mark.parametrize("changes, words", FILTER_REFUSALS, ids=lambda value: str(value).replace(" ", ""))
def test_filter_gradient_rules_on_a2(changes, words):
    with pytest.raises(GraphError, match=words):
        plan_filter(**changes)


@pytest.mark.parametrize("changes", [
    {"stride": (3, 1, 1), "dy": (1, 6, 1, 4, 4)},
    {"pads": (300, 0, 0, 0, 0, 0), "dy": (1, 6, 303, 4, 4)}, {"dilation": (300, 1, 1), "x": (1, 4, 303, 6, 6)},
], ids=lambda value: str(value).replace(" ", ""))
def test_filter_gradient_has_wider_limits_than_the_input_gradient(changes):
    assert plan_filter(**changes).problem.wrt == "weight"


@pytest.mark.parametrize("changes, product", [
    ({"stride": (1, 64, 1), "dy": (1, 6, 3, 1, 4)}, "A2"), ({"stride": (1, 1, 64), "dy": (1, 6, 3, 4, 1)}, "A3"),
    ({"stride": (256, 1, 1), "dy": (1, 6, 1, 4, 4)}, "A2"),
    ({"filter": (6, 4, 1, 3, 3), "dy": (1, 6, 4, 4, 4), "dilation": (2**31 - 1, 1, 1)}, "ASCEND_950"),
], ids=lambda value: str(value).replace(" ", ""))
def test_documented_ranges_of_the_filter_gradient(changes, product):
    with pytest.raises(GraphError, match=r"takes \[1, "):
        plan_filter(**changes, product=product)
    assert plan_filter(**changes, product=product, strict=False).problem.wrt == "weight"


@pytest.mark.parametrize("dilation", [(256, 1, 1), (2**31, 1, 1)])
def test_a_dilation_out_of_range_is_refused_where_the_kernel_is_1(dilation):
    call = {"filter": (6, 4, 1, 3, 3), "dy": (1, 6, 4, 4, 4)}
    with pytest.raises(GraphError, match=r"dilations has .* \[1, 255\]"):
        plan_input(**call, dilation=dilation, product="A2")
    assert plan_input(**call, dilation=(255, 1, 1), product="A2").problem.conv.dilation == (1, 1, 1)


@pytest.mark.parametrize("groups", [None, "1", 1.5, 1.0])
def test_groups_that_are_no_integer(groups):
    with pytest.raises(GraphError, match="groups must be a sequence of integers"):
        plan_input(groups=groups)


def test_filter_size_may_be_int64_on_950():
    assert plan_filter(size_type=np.int64, product="ASCEND_950").problem.wrt == "weight"


def test_same_padding_of_the_filter_gradient_needs_the_placeholder():
    plan = plan_filter(stride=(2, 2, 1), dy=(1, 6, 2, 3, 6), pads=(-1,) * 6, padding="SAME")
    assert plan.problem.conv.padding == ((0, 0), (0, 1), (1, 1))
    with pytest.raises(GraphError, match="extent"):
        plan_filter(stride=(2, 2, 1), dy=(1, 6, 2, 3, 6), pads=(0,) * 6, padding="SAME")


TRANSPOSE_REFUSALS = [
    ({"output_padding": (0, 0, 0, 0)}, "5 values"),
    ({"output_padding": (1, 0, 0, 0, 0)}, "N and C"),
    ({"output_padding": (0, 1, 0, 0, 0)}, "N and C"),
    ({"output_padding": (0, 0, 2, 0, 0)}, "below the stride"),
    ({"output_padding": (0, 0, -1, 0, 0)}, "at least 0"),
    ({"offset_x": 1}, "offset_x"),
    ({"offset_w": np.zeros(1, np.int8)}, "offset_w"),
    ({"bias": np.zeros(4, np.float32)}, "bias must be absent"),
    ({"input_size": (1, 4, 6, 6, 9)}, "extent 4"),
    ({"groups": 2}, "does not divide"),
]


def plan_transpose(input_size=(0,) * 5, dtype=H, **options):
    attributes = {"strides": (1, 1, 2, 2, 2), "pads": (0,) * 6, "data_format": "NCDHW", "product": "A2",
                  "backend": "reference"} | options
    x, filter = tensor((1, 5, 3, 3, 3), dtype, "NCDHW"), tensor((5, 4, 2, 2, 2), dtype, "NCDHW")
    return TransposeV2.plan(input_size, x, filter, **attributes)


@pytest.mark.parametrize("changes, words", TRANSPOSE_REFUSALS, ids=lambda value: str(value).replace(" ", ""))
def test_transpose_rules(changes, words):
    with pytest.raises(GraphError, match=words):
        plan_transpose(**changes)


def test_transpose_on_950():
    assert plan_transpose(product="ASCEND_950", bias=np.zeros(4, np.float32)).problem.wrt == "input"
    for bias in (np.zeros(3, np.float32), np.zeros(4, np.float16), np.zeros((1, 4), np.float32)):
        with pytest.raises(GraphError, match="bias must be FLOAT"):
            plan_transpose(product="ASCEND_950", bias=bias)
    assert plan_transpose(product="ASCEND_950", dtype=H8).problem.out_dtype == "hifloat8"
    with pytest.raises(GraphError, match="output_padding must be 0 with HIFLOAT8"):
        plan_transpose(product="ASCEND_950", dtype=H8, output_padding=(0, 0, 1, 0, 0))


@pytest.mark.parametrize("options, words", [
    ({"data_format": "NCX"}, "data_format='NCX' is none of"),
    ({"filter_format": "OIDHW"}, "filter_format='OIDHW' is none of"),
    ({"y_format": "FRACTAL"}, "y_format='FRACTAL' is none of"),
    ({"pads": 1}, "pads must be a sequence of integers"),
    ({"pads": [0.5] * 6}, "pads must be a sequence of integers"),
    ({"strides": 1}, "strides must be a sequence of integers"),
    ({"strides": [1, 1, 1.0, 1, 1]}, "strides must be a sequence of integers"),
])
def test_attributes_of_the_wrong_kind_fail_the_graph(options, words):
    with pytest.raises(GraphError, match=words):
        plan_input(**options)


def test_a_stride_of_zero_in_shape_inference():
    with pytest.raises(GraphError, match="strides must be at least 1"):
        TransposeV2.infer_shape([0] * 5, (1, 2, 3, 3, 3), (2, 4, 2, 2, 2), strides=[1, 1, 0, 1, 1], pads=[0] * 6,
                                padding="SAME", data_format="NCDHW")


def test_absent_padding_means_pads_as_given():
    assert plan_input(padding=None).problem == plan_input().problem == plan_input(padding="VALID").problem


def test_shapes_of_numpy_integers():
    x, filter = (tuple(np.array(shape)) for shape in ((1, 2, 3, 3, 3), (2, 4, 2, 2, 2)))
    assert TransposeV2.infer_shape([0] * 5, x, filter, strides=[1] * 5, pads=[0] * 6,
                                   data_format="NCDHW") == (1, 4, 4, 4, 4)


@pytest.mark.parametrize("groups, filter, blocks, right", [
    (1, (512, 512, 3, 3, 3), (864, 32, 16, 16), True), (1, (512, 512, 3, 3, 3), (864, 16, 16, 16), False),
    (2, (30, 17, 2, 2, 2), (32, 1, 16, 16), False), (2, (30, 17, 2, 2, 2), (24, 2, 16, 16), True),
])
def test_storage_shapes_of_descriptors(groups, filter, blocks, right):
    """Blocks are checked without data as well; a descriptor that does not tell them is taken as it is."""
    size, dy = (1, filter[1] * groups, 4, 4, 4), (1, filter[0], *(5 - extent for extent in filter[2:]))
    weight, plain = (aclTensor(shape=filter, dtype=B, format="FRACTAL_Z_3D", **storage)
                     for storage in ({"storage_shape": blocks}, {}))
    call = {"strides": [1] * 5, "pads": [0] * 6, "groups": groups, "data_format": "NCDHW", "backend": "reference"}
    assert InputV2.plan(size, plain, tensor(dy, B, "NCDHW"), **call)
    if right:
        assert InputV2.plan(size, weight, tensor(dy, B, "NCDHW"), **call)
    else:
        with pytest.raises(GraphError, match=r"filter in FRACTAL_Z_3D must have the storage shape"):
            InputV2.plan(size, weight, tensor(dy, B, "NCDHW"), **call)
