"""The graph operators Conv3DBackpropInputV2, Conv3DBackpropFilterV2 and Conv3DTransposeV2 on 5-D tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, NamedTuple, ParamSpec

import numpy as np
import numpy.typing as npt

from ...numbers import decode, encode, storage_dtype
from ...plan import plan as find_plan
from ...problem import Plan, Problem
from .conv3d_checks import (
    Attributes,
    check_8bit_formats,
    check_back_pads,
    check_dtypes,
    check_extents,
    check_ranges,
    conv_of,
    effective_dilations,
    placeholder_pads,
    read_attributes,
    same_padding,
    wants_same,
    with_groups,
)
from .conv3d_shapes import (
    ACTIVATION_FORMATS,
    FILTER_FORMATS,
    INTEGERS,
    Tensor,
    check_storage,
    five,
    format_name,
    infer_filter,
    infer_input,
    infer_transpose,
    read_size,
    read_tensor,
)
from .descriptors import BYTE_FORMATS, ENGINE_NAMES, aclDataType, aclTensor, type_name
from .formats import canonical_order, from_canonical_order, packed, reordered, unpacked
from .gradients import HF32_MODES
from .products import FILTER_V2, INPUT_V2, TRANSPOSE_V2, as_product
from .status import GraphError

Array = npt.NDArray[Any]
P = ParamSpec("P")


class Prepared(NamedTuple):
    """A checked call: its plan, its operands in the order of the plan, and what y is."""

    plan: Plan
    operands: tuple[Tensor, ...]
    shape: tuple[int, ...]  # of y, N C D H W
    dtype: str
    format: str
    storage: str
    groups: int
    like: Any  # y is an aclTensor when this operand is
    bias: Array | None = None


class Operator(Generic[P]):
    """A graph operator: call it to compute y, `infer_shape` for the shape alone, `plan` to check without data."""

    def __init__(self, prepare: Callable[P, Prepared], infer_shape: Callable[..., tuple[int, ...]]) -> None:
        functools.update_wrapper(self, prepare)
        self._prepare = prepare
        self.infer_shape = infer_shape

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        return execute(self._prepare(*args, **kwargs))

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Check a call and return the plan that would run it; descriptors without data will do."""
        return self._prepare(*args, **kwargs).plan


def operator(infer_shape: Callable[..., tuple[int, ...]]) -> Callable[[Callable[P, Prepared]], Operator[P]]:
    return lambda prepare: Operator(prepare, infer_shape)


@operator(infer_input)
def Conv3DBackpropInputV2(input_size: Any, filter: Any, out_backprop: Any, *, strides: Any, pads: Any,
                          dilations: Any = (1,) * 5, groups: int = 1, data_format: object = "NDHWC",
                          enable_hf32: bool = False, padding: str | None = "", filter_format: object = None,
                          y_format: object = None, product: object = None, strict: bool = True,
                          backend: str | None = None, num_threads: int | None = None) -> Prepared:
    """Gradient of a 3-D convolution with respect to its input.

    Parameters
    ----------
    input_size : INT32 or INT64 values
        Shape of y in the axis order of data_format; four values leave out D, which is then 1.
    filter : array or aclTensor
        (Cout, Cin/groups, kD, kH, kW) in the order of its format: NCDHW, NDHWC, DHWCN, or stored as FRACTAL_Z_3D.
    out_backprop : array or aclTensor
        Gradient of the output, NCDHW or NDHWC, or stored as NDC1HWC0. A blocked aclTensor has its logical shape as
        `shape` and its blocks as data.
    strides, dilations : 5 ints in the axis order of data_format; 1 on N and C
    pads : 6 ints [front, back, top, bottom, left, right]
    groups : int
        1 means: as many as the channels say.
    data_format : "NDHWC" or "NCDHW"
        Axis order of out_backprop and y.
    enable_hf32 : bool
        Round FLOAT operands to HF32 before they are multiplied, with the mantissa bits of the product.
    padding : str
        Starting with "S" (SAME): pads are recomputed from the extents of y.
    filter_format : optional
        Axis order of a filter that is a plain array, ND or FRACTAL_Z_3D; data_format unless given.
    y_format : optional
        Storage of y: its axis order or NDC1HWC0; the storage of out_backprop unless given.
    product, strict, backend, num_threads
        As in `aclnnConvolutionBackwardGetWorkspaceSize`.

    Returns
    -------
    y, an array, or an aclTensor when out_backprop is one. Raises `GraphError` when the operator would be refused.

    Examples
    --------
    >>> import numpy as np
    >>> from convgrad import cann
    >>> dy, w = np.ones((1, 1, 2, 2, 2), np.float32), np.ones((1, 1, 1, 2, 2), np.float32)
    >>> dx = cann.Conv3DBackpropInputV2([1, 1, 2, 3, 3], w, dy, strides=[1] * 5, pads=[0] * 6, data_format="NCDHW",
    ...                                 backend="reference")
    >>> dx[0, 0, 0].tolist()
    [[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]
    """
    attributes = read_attributes(INPUT_V2, strides, pads, dilations, groups, data_format, as_product(product), strict)
    shape = known_shape(infer_input(input_size, data_format=attributes.form), attributes, "input_size")
    weight, dy = filter_and_activation(filter, "out_backprop", out_backprop, filter_format, attributes)
    attributes = fit_input_gradient(attributes, weight, dy, shape, padding)
    problem = problem_for(attributes, shape, weight, dy, enable_hf32)
    plan = find_plan(problem, backend=backend, num_threads=num_threads)
    return Prepared(plan, (dy, weight), shape, problem.out_dtype, attributes.form,
                    y_storage(y_format, dy, attributes.form), attributes.groups, out_backprop)


@operator(infer_filter)
def Conv3DBackpropFilterV2(x: Any, filter_size: Any, out_backprop: Any, *, strides: Any, pads: Any,
                           dilations: Any = (1,) * 5, groups: int = 1, data_format: object = "NDHWC",
                           enable_hf32: bool = False, padding: str | None = "", from_depthwise: bool = False,
                           y_format: object = None, product: object = None, strict: bool = True,
                           backend: str | None = None, num_threads: int | None = None) -> Prepared:
    """Gradient of a 3-D convolution with respect to its filter; y is FLOAT always.

    Parameters
    ----------
    x, out_backprop : array or aclTensor
        Input and gradient of the output, NCDHW or NDHWC, or stored as NDC1HWC0.
    filter_size : INT32 values (950 also INT64)
        Shape of y in the axis order of y_format; four values leave out D, which is then 1.
    padding : str
        Starting with "S" (SAME) with the four H/W pads all -1: pads are recomputed from the extents of x.
    from_depthwise : bool
        Four values of filter_size are those of a depthwise filter: N*C output channels of one input channel each.
    y_format : optional
        Axis order of y (NCDHW, NDHWC, DHWCN); or FRACTAL_Z_3D, with filter_size in the order of data_format.
    strides, pads, dilations, groups, data_format, enable_hf32, product, strict, backend, num_threads
        As in `Conv3DBackpropInputV2`.

    Returns
    -------
    y, an array, or an aclTensor when out_backprop is one. Raises `GraphError` when the operator would be refused.
    """
    chosen = as_product(product)
    attributes = read_attributes(FILTER_V2, strides, pads, dilations, groups, data_format, chosen, strict)
    read_size(filter_size, "filter_size", INTEGERS[:1] if attributes.old_chip and strict else INTEGERS)
    storage = attributes.form if y_format is None else format_name(y_format, "y_format")
    form = attributes.form if storage == "FRACTAL_Z_3D" else storage
    if form not in FILTER_FORMATS:
        raise GraphError(f"y_format must be one of {', '.join(FILTER_FORMATS)} or FRACTAL_Z_3D, got {storage}")
    inferred = infer_filter(None, filter_size, y_format=form, from_depthwise=from_depthwise)
    if -1 in inferred:
        raise GraphError("filter_size must be known to compute y")
    shape = reordered(inferred, canonical_order(form))
    large = read_tensor(x, "x", attributes.form, ACTIVATION_FORMATS)
    dy = read_tensor(out_backprop, "out_backprop", attributes.form, ACTIVATION_FORMATS)
    check_formats_agree(attributes, large, dy)
    check_dtypes(attributes, large, dy)
    kernel = shape[2:]
    attributes = with_groups(effective_dilations(attributes, kernel), large.shape[1], shape[1], dy.shape[1])
    check_8bit_formats(attributes, dy.dtype, attributes.form, form)
    if wants_same(padding) and placeholder_pads(attributes, every=True):
        attributes = same_padding(attributes, large.shape[2:], kernel)
    check_ranges(attributes, kernel, {"x": large.shape, "out_backprop": dy.shape, "filter_size": shape})
    check_channels(shape[0], dy, large.shape[0])
    check_extents(attributes, kernel, large.shape[2:], dy.shape[2:], ("x", "out_backprop"))
    for tensor in (large, dy):
        check_storage(tensor, attributes.groups)
    conv = conv_of(attributes, large.shape, dy.shape[1], kernel)
    compute = compute_mode(attributes, dy.dtype, enable_hf32)
    problem = Problem(conv, "weight", ENGINE_NAMES[dy.dtype], "float32", compute, attributes.form, weight_layout(form))
    plan = find_plan(problem, backend=backend, num_threads=num_threads)
    return Prepared(plan, (dy, large), shape, "float32", form, storage, attributes.groups,
                    out_backprop)


@operator(infer_transpose)
def Conv3DTransposeV2(input_size: Any, x: Any, filter: Any, bias: Any = None, offset_w: Any = None, *, strides: Any,
                      pads: Any, dilations: Any = (1,) * 5, groups: int = 1, data_format: object = "NDHWC",
                      output_padding: Any = (0,) * 5, offset_x: int = 0, enable_hf32: bool = False,
                      padding: str | None = "", filter_format: object = None, y_format: object = None,
                      product: object = None, strict: bool = True, backend: str | None = None,
                      num_threads: int | None = None) -> Prepared:
    """A 3-D transposed convolution, computed as the input gradient of the convolution it reverses.

    Parameters
    ----------
    input_size : INT32 or INT64 values
        Shape of y in the axis order of data_format; all zero: computed from x and the attributes.
    x : array or aclTensor, in the role of out_backprop
    filter : array or aclTensor
        (C of x, C of y / groups, kD, kH, kW) in the order of its format.
    bias : FLOAT array of the channels of y, optional; 950 only
    offset_w, offset_x : reserved, None and 0
    output_padding : 5 ints in the axis order of data_format
        Extra extents at the end of y; below the stride or below the dilation of the axis.
    strides, pads, dilations, groups, data_format, enable_hf32, padding, filter_format, y_format, product, strict, \
backend, num_threads
        As in `Conv3DBackpropInputV2`.

    Returns
    -------
    y, an array, or an aclTensor when x is one. Raises `GraphError` when the operator would be refused.
    """
    chosen = as_product(product)
    inferred = infer_transpose(input_size, x, filter, strides=strides, pads=pads, dilations=dilations, groups=groups,
                               data_format=data_format, output_padding=output_padding, padding=padding,
                               filter_format=filter_format)
    attributes = read_attributes(TRANSPOSE_V2, strides, pads, dilations, groups, data_format, chosen, strict)
    shape = known_shape(inferred, attributes, "input_size")
    weight, small = filter_and_activation(filter, "x", x, filter_format, attributes)
    extra = check_output_padding(attributes, output_padding, small.dtype)
    if offset_w is not None or offset_x != 0:
        raise GraphError(f"offset_w and offset_x are reserved and must be None and 0, got offset_x={offset_x}")
    attributes = fit_input_gradient(attributes, weight, small, shape, padding, extra)
    values = check_bias(attributes, bias, shape[1])
    problem = problem_for(attributes, shape, weight, small, enable_hf32)
    plan = find_plan(problem, backend=backend, num_threads=num_threads)
    return Prepared(plan, (small, weight), shape, ENGINE_NAMES[small.dtype],
                    attributes.form, y_storage(y_format, small, attributes.form), attributes.groups, x, values)


def known_shape(inferred: tuple[int, ...], attributes: Attributes, name: str) -> tuple[int, ...]:
    if min(inferred) < 0:
        raise GraphError(f"{name} must be known to compute y, inferred {inferred} ({attributes.form})")
    return reordered(inferred, canonical_order(attributes.form))


def filter_and_activation(filter: Any, name: str, activation: Any, filter_format: object,
                          attributes: Attributes) -> tuple[Tensor, Tensor]:
    default = attributes.form if filter_format is None else format_name(filter_format, "filter_format")
    weight = read_tensor(filter, "filter", default, FILTER_FORMATS)
    tensor = read_tensor(activation, name, attributes.form, ACTIVATION_FORMATS)
    check_formats_agree(attributes, tensor)
    check_dtypes(attributes, weight, tensor)
    return weight, tensor


def check_formats_agree(attributes: Attributes, *activations: Tensor) -> None:
    for tensor in activations:
        if tensor.format != attributes.form:
            raise GraphError(f"{tensor.name} is {tensor.format}, but data_format={attributes.form}")


def check_channels(filter_out: int, small: Tensor, batch: int) -> None:
    if filter_out != small.shape[1]:
        raise GraphError(f"the filter has {filter_out} output channels, but {small.name} has {small.shape[1]}")
    if small.shape[0] != batch:
        raise GraphError(f"{small.name} has batch {small.shape[0]}, but the feature map has {batch}")


def fit_input_gradient(attributes: Attributes, weight: Tensor, small: Tensor, shape: tuple[int, ...],
                       padding: str | None,
                       extra: tuple[int, ...] = (0, 0, 0)) -> Attributes:
    """Check that filter, out_backprop (or x) and y fit; return the attributes with groups and pads settled."""
    kernel = weight.shape[2:]
    attributes = effective_dilations(attributes, kernel)
    attributes = with_groups(attributes, shape[1], weight.shape[1], small.shape[1])
    check_8bit_formats(attributes, weight.dtype, attributes.form, weight.format)
    skip = placeholder_pads(attributes, every=False)
    if wants_same(padding):
        attributes = same_padding(attributes, shape[2:], kernel)
    check_ranges(attributes, kernel, {"filter": weight.shape, small.name: small.shape, "y": shape}, skip)
    check_channels(weight.shape[0], small, shape[0])
    check_extents(attributes, kernel, shape[2:], small.shape[2:], ("y", small.name), extra)
    check_back_pads(attributes, kernel, shape[2:], small.shape[2:])
    for tensor in (weight, small):
        check_storage(tensor, attributes.groups)
    return attributes


def check_output_padding(attributes: Attributes, output_padding: Any, dtype: aclDataType) -> tuple[int, ...]:
    n, c, *extra = reordered(five(output_padding, "output_padding"), canonical_order(attributes.form))
    if n or c:
        raise GraphError(f"output_padding must be 0 on N and C, got {tuple(output_padding)} ({attributes.form})")
    for letter, more, step, spread in zip("DHW", extra, attributes.strides, attributes.dilations):
        if more < 0 or not (more < step or more < spread):
            raise GraphError(f"output_padding {more} on {letter} must be at least 0 and below the stride {step} or the "
                             f"dilation {spread}")
    if any(extra) and dtype in BYTE_FORMATS and attributes.strict:
        raise GraphError(f"output_padding must be 0 with {type_name(dtype)}, got {tuple(output_padding)}")
    return tuple(extra)


def check_bias(attributes: Attributes, bias: Any, channels: int) -> Array | None:
    if bias is None:
        return None
    if attributes.old_chip and attributes.strict:
        raise GraphError(f"bias must be absent on {attributes.product.facts.title}")
    tensor = bias if isinstance(bias, aclTensor) else aclTensor(np.asarray(bias))
    if tensor.dtype is not aclDataType.ACL_FLOAT or tensor.shape != (channels,):
        raise GraphError(f"bias must be FLOAT of shape ({channels},), got {type_name(tensor.dtype)} of shape "
                         f"{tensor.shape}")
    return tensor.array


def compute_mode(attributes: Attributes, dtype: aclDataType, enable_hf32: bool) -> str:
    if dtype is aclDataType.ACL_FLOAT and enable_hf32:
        return HF32_MODES[attributes.product.facts.hf32_bits or 11]
    return ""


def weight_layout(form: str) -> str:
    return form.replace("N", "O").replace("C", "I")


def problem_for(attributes: Attributes, shape: tuple[int, ...], weight: Tensor, small: Tensor,
                enable_hf32: bool) -> Problem:
    """The input gradient. Where output_padding makes y longer than any tap reaches, the rest is left out (zeros)."""
    kernel = weight.shape[2:]
    conv = conv_of(attributes, shape, small.shape[1], kernel)
    if conv.out_size != small.shape[2:]:
        reach = [(out - 1) * step + span - low
                 for out, step, span, (low, _) in zip(small.shape[2:], conv.stride, conv.span, conv.padding)]
        size = tuple(min(extent, last) for extent, last in zip(shape[2:], reach))
        pads = tuple((low, last - extent) for (low, _), last, extent in zip(conv.padding, reach, size))
        conv = conv_of(replace(attributes, pads=pads), (*shape[:2], *size), small.shape[1], kernel)
    dtype = ENGINE_NAMES[weight.dtype]
    return Problem(conv, "input", dtype, dtype, compute_mode(attributes, weight.dtype, enable_hf32), attributes.form,
                   weight_layout(weight.format))


def y_storage(y_format: object, like: Tensor, form: str) -> str:
    storage = like.storage if y_format is None else format_name(y_format, "y_format")
    if storage not in (form, "NDC1HWC0"):
        raise GraphError(f"y has the axis order of data_format; y_format must be {form} or NDC1HWC0, got {storage}")
    return storage


def execute(prepared: Prepared) -> Any:
    """Run a checked call: unpack blocked operands, solve, add the bias, store y in its format."""
    plan = prepared.plan
    operands = tuple(canonical_view(tensor, prepared.groups) for tensor in prepared.operands)
    order = from_canonical_order(prepared.format)
    y = np.empty(reordered(prepared.shape, order), storage_dtype(prepared.dtype))
    canonical = y.transpose(canonical_order(prepared.format))
    solved = plan.problem.conv.shape_of(plan.problem.wrt)
    if solved != prepared.shape:
        y.fill(0)
    target = canonical[tuple(slice(extent) for extent in solved)]
    if prepared.bias is None:
        plan.run(operands, (target,), None)
    else:
        add_bias(prepared, operands, target, canonical)
    stored = y if prepared.storage == prepared.format else packed(canonical, prepared.storage, prepared.groups)
    if isinstance(prepared.like, aclTensor):
        return aclTensor(stored, shape=y.shape, dtype=prepared.dtype, format=prepared.storage)
    given = np.asarray(prepared.like).dtype
    return stored.view(given) if given.name == "hifloat8" and prepared.dtype == "hifloat8" else stored


def add_bias(prepared: Prepared, operands: tuple[Array, ...], target: Array, canonical: Array) -> None:
    """The bias is added to the f32 sums, before the one rounding to the format of y."""
    problem = prepared.plan.problem
    wide = "float64" if problem.dtype == "float64" else "float32"
    sums = np.zeros(canonical.shape, wide)
    part = sums[tuple(slice(extent) for extent in target.shape)]
    find_plan(problem.with_(out_dtype=wide), backend=prepared.plan.backend).run(operands, (part,), None)
    assert prepared.bias is not None
    sums += prepared.bias[:, None, None, None]
    canonical[...] = encode(decode(sums, wide), prepared.dtype)


def canonical_view(tensor: Tensor, groups: int) -> Array:
    """The data of an operand as an N C D H W view; blocked storage is unpacked (the one copy)."""
    array = tensor.array
    if array is None:
        raise GraphError(f"{tensor.name} is a descriptor without data")
    if tensor.blocked:
        return unpacked(array, tensor.storage, "NCDHW", groups, tensor.shape)
    view: Array = array.transpose(canonical_order(tensor.format))
    return view
