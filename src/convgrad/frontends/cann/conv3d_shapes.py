"""Shapes of the 3-D graph operators: sizes given as tensors, shape inference, SAME padding, tensors in any format."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...blocked import block_channels, fractal_z_3d_shape, ndc1hwc0_shape
from .descriptors import FORMAT_NAMES, NUMBERS, aclDataType, aclTensor, as_format, int_tuple, numpy_dtype, type_name
from .formats import canonical_order, reordered
from .status import GraphError

Array = npt.NDArray[Any]
INTEGERS = (aclDataType.ACL_INT32, aclDataType.ACL_INT64)
ACTIVATION_FORMATS, FILTER_FORMATS = ("NCDHW", "NDHWC"), ("NCDHW", "NDHWC", "DHWCN")
UNKNOWN = (-1,) * 5


@dataclass(frozen=True)
class Tensor:
    """An operand of a graph operator: where its axes are, how it is stored, and its data or none."""

    name: str
    shape: tuple[int, ...]  # N C D H W
    dtype: aclDataType
    format: str  # plain axis order of the logical tensor
    storage: str  # the same, or a blocked format
    array: Array | None
    storage_shape: tuple[int, ...] | None  # of a blocked tensor, where it is known

    @property
    def blocked(self) -> bool:
        return self.storage != self.format


def read_tensor(given: Any, name: str, default_format: str, formats: tuple[str, ...]) -> Tensor:
    """Describe an array or aclTensor; a plain array and an ND tensor have the default format."""
    tensor = given if isinstance(given, aclTensor) else aclTensor(np.asarray(given))
    storage = FORMAT_NAMES[tensor.format]
    form = default_format if storage in ("ND", "NDC1HWC0", "FRACTAL_Z_3D") else storage
    storage = form if storage == "ND" else storage
    if form not in formats or (storage != form and storage != ("FRACTAL_Z_3D" if name == "filter" else "NDC1HWC0")):
        raise GraphError(f"{name} has the format {storage}, but must be one of {', '.join(formats)}")
    if len(tensor.shape) != 5:
        hint = f"; a {storage} tensor needs shape=, its logical {form} shape" if storage != form else ""
        raise GraphError(f"{name} must have 5 axes ({form}), got shape {tensor.shape}{hint}")
    shape = reordered(tensor.shape, canonical_order(form))
    said = tensor.array is not None or tensor.storage_shape != tensor.shape
    return Tensor(name, shape, tensor.dtype, form, storage, tensor.array, tensor.storage_shape if said else None)


def check_storage(tensor: Tensor, groups: int) -> None:
    """The storage of a blocked tensor has the shape that its logical shape asks for."""
    if not tensor.blocked or tensor.storage_shape is None:
        return
    c0 = block_channels(numpy_dtype(tensor.dtype).itemsize)
    expected = ndc1hwc0_shape(tensor.shape, c0) if tensor.storage == "NDC1HWC0" else \
        fractal_z_3d_shape(tensor.shape, groups, c0)
    if tensor.storage_shape != expected:
        raise GraphError(f"{tensor.name} in {tensor.storage} must have the storage shape {expected} for "
                         f"{tensor.shape} (NCDHW) with groups={groups}, got {tensor.storage_shape}")


def read_size(size: Any, name: str, dtypes: tuple[aclDataType, ...] = INTEGERS) -> tuple[int, ...] | None:
    """The values of a constant 1-D integer tensor; None when the value is not known yet."""
    if size is None or (isinstance(size, aclTensor) and size.array is None):
        return None
    if isinstance(size, (aclTensor, np.ndarray)):
        tensor = size if isinstance(size, aclTensor) else aclTensor(size)
        if tensor.dtype not in dtypes:
            raise GraphError(f"{name} must be {' or '.join(map(type_name, dtypes))}, got {type_name(tensor.dtype)}")
        if len(tensor.shape) != 1:
            raise GraphError(f"{name} must have one axis, got shape {tensor.shape}")
        size = np.asarray(tensor).tolist()
    try:
        return tuple(operator.index(value) for value in size)
    except TypeError:
        raise GraphError(f"{name} must hold integers, got {size!r}") from None


def shape_from_size(values: tuple[int, ...], name: str, form: str) -> tuple[int, ...]:
    """Five values are the shape; four are the shape without D, which is then 1 at its place in the format."""
    if len(values) == 5:
        return values
    if len(values) != 4:
        raise GraphError(f"{name} must have 5 values, or 4 without D, got {len(values)}: {values}")
    if form not in FILTER_FORMATS:
        raise GraphError(f"{name} with 4 values wants one of the formats {', '.join(FILTER_FORMATS)}, got {form}")
    place = form.index("D")
    return (*values[:place], 1, *values[place:])


def shape_argument(given: Any) -> tuple[int, ...] | None:
    """The shape of a tensor, or a shape itself (in which -1 is unknown); None when nothing is known."""
    if given is None:
        return None
    if isinstance(given, (tuple, list)) and all(isinstance(extent, NUMBERS) for extent in given):
        return int_tuple(given, "shape")
    return tuple(given.shape if isinstance(given, aclTensor) else np.asarray(given).shape)


def infer_input(input_size: Any, filter: Any = None, out_backprop: Any = None, *, data_format: object = "NDHWC",
                **attributes: Any) -> tuple[int, ...]:
    """Shape of y of Conv3DBackpropInputV2, in the axis order of data_format; -1 where input_size is not known.

    `filter` may be a tensor or its shape. Other attributes are accepted and do not matter here.
    """
    values = read_size(input_size, "input_size")
    if values is None or -1 in (shape_argument(filter) or ()):
        return UNKNOWN
    return shape_from_size(values, "input_size", format_name(data_format, "data_format"))


def infer_filter(x: Any, filter_size: Any, out_backprop: Any = None, *, data_format: object = "NDHWC",
                 y_format: object = None, from_depthwise: bool = False, **attributes: Any) -> tuple[int, ...]:
    """Shape of y of Conv3DBackpropFilterV2, in the axis order of y_format; -1 where filter_size is not known."""
    values = read_size(filter_size, "filter_size")
    if values is None or -1 in (shape_argument(x) or ()):
        return UNKNOWN
    form = format_name(data_format, "data_format") if y_format is None else format_name(y_format, "y_format")
    if from_depthwise and len(values) == 4 and form == "NCDHW":
        n, c, h, w = values
        return n * c, 1, 1, h, w
    if from_depthwise and len(values) == 4 and form == "DHWCN":
        h, w, c, n = values
        return 1, h, w, 1, c * n
    return shape_from_size(values, "filter_size", form)


def infer_transpose(input_size: Any, x: Any, filter: Any, bias: Any = None, offset_w: Any = None, *, strides: Any,
                    pads: Any, dilations: Any = (1,) * 5, groups: int = 1, data_format: object = "NDHWC",
                    output_padding: Any = (0,) * 5, padding: str | None = "", filter_format: object = None,
                    **attributes: Any) -> tuple[int, ...]:
    """Shape of y of Conv3DTransposeV2: input_size, or computed from x when input_size is all zero."""
    values = read_size(input_size, "input_size")
    form = format_name(data_format, "data_format")
    shape, weight = shape_argument(x), shape_argument(filter)
    if values is None or shape is None or weight is None or -1 in shape or -1 in weight:
        return UNKNOWN
    if any(values):
        return shape_from_size(values, "input_size", form)
    filter_form = form if filter_format is None else format_name(filter_format, "filter_format")
    if isinstance(filter, aclTensor) and FORMAT_NAMES[filter.format] in FILTER_FORMATS:
        filter_form = FORMAT_NAMES[filter.format]
    order = canonical_order(form)
    n, _, *size = reordered(shape, order)
    _, c, *kernel = reordered(weight, canonical_order(filter_form))
    steps = reordered(five(strides, "strides"), order)[2:]
    spread = reordered(five(dilations, "dilations"), order)[2:]
    extra = reordered(five(output_padding, "output_padding"), order)[2:]
    if min(steps) < 1:
        raise GraphError(f"strides must be at least 1, got {tuple(strides)} ({form})")
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, spread)]
    if padding == "SAME":
        both = [sum(same_pads(extent, span, step)) for extent, span, step in zip(size, spans, steps)]
    else:
        both = [before + after for before, after in pad_pairs(pads)]
    result = (n, c * groups, *(step * (extent - 1) + more + span - total for step, extent, more, span, total
                               in zip(steps, size, extra, spans, both)))
    return reordered(result, tuple(int("NCDHW".index(letter)) for letter in form))


def same_pads(extent: int, span: int, stride: int) -> tuple[int, int]:
    """(before, after) so that the output has ceil(extent / stride) positions; the odd one comes after."""
    total = max(-(-extent // stride) * stride - stride + span - extent, 0)
    return total >> 1, total - (total >> 1)


def pad_pairs(pads: Any, lengths: tuple[int, ...] = (1, 3, 6)) -> list[tuple[int, int]]:
    """(before, after) of D, H, W from a list of 1, 3 or 6 values."""
    values = integers(pads, "pads")
    if len(values) not in lengths:
        raise GraphError(f"pads must have 6 values [front, back, top, bottom, left, right], got {values}")
    if len(values) == 1:
        return [(values[0], values[0])] * 3
    if len(values) == 3:
        return [(pad, pad) for pad in values]
    return list(zip(values[0::2], values[1::2]))


def five(values: Any, name: str) -> tuple[int, ...]:
    found = integers(values, name)
    if len(found) != 5:
        raise GraphError(f"{name} must have 5 values in the axis order of data_format, got {found}")
    return found


def integers(values: Any, name: str) -> tuple[int, ...]:
    try:
        return int_tuple(values, name)
    except TypeError as error:
        raise GraphError(str(error)) from None


def format_name(form: object, name: str) -> str:
    """The name of a format argument of an operator."""
    try:
        return FORMAT_NAMES[as_format(form)]
    except ValueError as error:
        raise GraphError(str(error).replace("format", name, 1)) from None
