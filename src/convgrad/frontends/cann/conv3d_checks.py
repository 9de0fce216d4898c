"""The checks of the 3-D graph operators: formats and groups, value ranges of the product, geometry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...problem import Conv
from .conv3d_shapes import ACTIVATION_FORMATS, Tensor, five, format_name, integers, pad_pairs, same_pads
from .descriptors import BYTE_FORMATS, ENGINE_NAMES, aclDataType, type_name
from .formats import canonical_order, reordered
from .products import FILTER_V2, INT31, MAX_GROUPS, TRANSPOSE_V2, Limit, Product
from .status import GraphError

Pads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Attributes:
    """The attributes of a call, per spatial axis D H W; pads are (before, after)."""

    operator: str
    strides: tuple[int, ...]
    pads: Pads
    dilations: tuple[int, ...]
    groups: int
    form: str
    product: Product
    strict: bool

    @property
    def limits(self) -> tuple[Limit, ...]:
        facts = self.product.facts
        return facts.filter_limits if self.operator == FILTER_V2 else facts.input_limits

    @property
    def old_chip(self) -> bool:
        """A2 and A3, whose kernels have limits that 950 has not."""
        return self.product.facts.architecture == "DAV_2201"


def read_attributes(operator: str, strides: Any, pads: Any, dilations: Any, groups: int, data_format: object,
                    product: Product, strict: bool) -> Attributes:
    """Read the attributes, in which N and C must be 1, and check that the product has the operator."""
    facts = product.facts
    if strict and operator not in facts.operators:
        raise GraphError(f"{facts.title} has no {operator}")
    form = format_name(data_format, "data_format")
    if form not in ACTIVATION_FORMATS:
        raise GraphError(f"data_format must be NCDHW or NDHWC, got {form}")
    spatial = {}
    for name, values in (("strides", strides), ("dilations", dilations)):
        n, c, *rest = reordered(five(values, name), canonical_order(form))
        if n != 1 or c != 1:
            raise GraphError(f"{name} must be 1 on N and C, got {tuple(values)} ({form})")
        if min(rest) < 1:
            raise GraphError(f"{name} must be at least 1, got {tuple(values)} ({form})")
        spatial[name] = tuple(rest)
    # Shape inference of the transposed convolution also takes one pad for all axes, or one per axis.
    pairs = tuple(pad_pairs(pads, (1, 3, 6) if operator == TRANSPOSE_V2 else (6,)))
    (groups,) = integers([groups], "groups")
    if not 1 <= groups <= MAX_GROUPS:
        raise GraphError(f"groups must be in [1, {MAX_GROUPS}], got {groups}")
    return Attributes(operator, spatial["strides"], pairs, spatial["dilations"], groups, form, product, strict)


def check_dtypes(attributes: Attributes, *tensors: Tensor) -> None:
    """All tensors have one number format, which the product knows."""
    facts = attributes.product.facts
    known = facts.operator_dtypes if attributes.strict else tuple(ENGINE_NAMES)
    for tensor in tensors:
        if tensor.dtype not in known:
            raise GraphError(f"{tensor.name} is {type_name(tensor.dtype)}, but {attributes.operator} on {facts.title} "
                             f"takes {', '.join(map(type_name, known))}")
    if len({tensor.dtype for tensor in tensors}) > 1:
        found = ", ".join(f"{tensor.name} {type_name(tensor.dtype)}" for tensor in tensors)
        raise GraphError(f"all tensors of {attributes.operator} have one number format, got {found}")


def with_groups(attributes: Attributes, channels: int, group_channels: int, out_channels: int) -> Attributes:
    """The attributes with groups inferred from the channels when the attribute is 1; refuses what does not divide."""
    if group_channels == 0 or channels % group_channels:
        raise GraphError(f"the {channels} channels of the feature map must be a multiple of the filter's "
                         f"{group_channels}")
    groups = channels // group_channels
    if attributes.groups not in (1, groups):
        raise GraphError(f"groups={attributes.groups}, but {channels} channels of the feature map and {group_channels} "
                         f"of the filter make {groups}")
    if groups == 0 or groups > MAX_GROUPS:
        raise GraphError(f"{channels} channels of the feature map and {group_channels} of the filter make {groups} "
                         f"groups, but [1, {MAX_GROUPS}] are possible")
    if out_channels % groups:
        raise GraphError(f"groups={groups} does not divide the {out_channels} channels of out_backprop")
    return replace(attributes, groups=groups)


def check_8bit_formats(attributes: Attributes, dtype: aclDataType, activations: str, filter_format: str) -> None:
    """The groups x format rows of 8-bit tensors; 16-bit and 32-bit formats have all rows."""
    if dtype not in BYTE_FORMATS or not attributes.strict:
        return
    name, groups = type_name(dtype), attributes.groups
    if attributes.operator == FILTER_V2:
        if dtype is not aclDataType.ACL_HIFLOAT8:
            raise GraphError(f"{FILTER_V2} takes no {name}, of the 8-bit formats only HIFLOAT8")
        if groups != 1 or activations != "NCDHW" or filter_format != "NCDHW":
            raise GraphError(f"{FILTER_V2} with {name} wants groups=1 and NCDHW tensors, got groups={groups}, "
                             f"{activations} and {filter_format}")
    elif filter_format != "NCDHW" or (activations != "NCDHW" and groups != 1):
        raise GraphError(f"{attributes.operator} with {name} wants an NCDHW filter, and NCDHW activations when "
                         f"groups > 1; got groups={groups}, {activations} activations and a {filter_format} filter")


def effective_dilations(attributes: Attributes, kernel: tuple[int, ...]) -> Attributes:
    """An axis whose kernel is 1 has dilation 1, whatever value in its range the attribute has."""
    check_limits(attributes, "dilations", [(step,) for step in attributes.dilations])
    return replace(attributes, dilations=tuple(1 if k == 1 else d for k, d in zip(kernel, attributes.dilations)))


def wants_same(padding: str | None) -> bool:
    """Whether the attribute `padding` starts with "S"; absent, empty and "VALID" mean: pads as given."""
    return padding is not None and padding.startswith("S")


def same_padding(attributes: Attributes, size: tuple[int, ...], kernel: tuple[int, ...]) -> Attributes:
    """The attributes with pads recomputed so that the output has ceil(size / stride) positions."""
    return replace(attributes, pads=tuple(
        same_pads(extent, (k - 1) * d + 1, step)
        for extent, k, d, step in zip(size, kernel, attributes.dilations, attributes.strides)))


def placeholder_pads(attributes: Attributes, every: bool) -> bool:
    """Whether H/W pads are -1 (all of them, or any), the placeholder for SAME."""
    found = [pad == -1 for pair in attributes.pads[1:] for pad in pair]
    return all(found) if every else any(found)


def check_ranges(attributes: Attributes, kernel: tuple[int, ...], shapes: dict[str, tuple[int, ...]],
                 skip_pads: bool = False) -> None:
    """The value ranges of the product, and extents of at least 1."""
    if not attributes.strict:
        return
    for name, shape in shapes.items():
        if any(not 1 <= extent <= INT31 for extent in shape):
            raise GraphError(f"{name} has the extents {shape} (NCDHW), but [1, {INT31}] are possible")
    check_limits(attributes, "filter", [(k,) for k in kernel])
    check_limits(attributes, "strides", [(step,) for step in attributes.strides])
    if not skip_pads:
        check_limits(attributes, "pads", list(attributes.pads))


def check_limits(attributes: Attributes, argument: str, values: list[tuple[int, ...]]) -> None:
    """The values of one argument, per axis D H W, are in the range of the product."""
    if not attributes.strict:
        return
    for limit in attributes.limits:
        if limit.argument != argument:
            continue
        for letter, found in zip("DHW", values):
            if letter in limit.axes and not all(limit.low <= value <= limit.high for value in found):
                raise GraphError(f"{argument} has {found[0] if len(found) == 1 else found} on {letter}, but "
                                 f"{attributes.product.facts.title} takes [{limit.low}, {limit.high}]")


def check_back_pads(attributes: Attributes, kernel: tuple[int, ...], large: tuple[int, ...],
                    small: tuple[int, ...]) -> None:
    """A2 and A3 turn dx into a convolution of the spread out_backprop: its stride D and its pads are limited."""
    if not attributes.strict or not attributes.old_chip:
        return
    title = attributes.product.facts.title
    if attributes.strides[0] > kernel[0]:
        raise GraphError(f"strides has {attributes.strides[0]} on D, more than the kernel's {kernel[0]}; {title} "
                         "cannot do that")
    for axis, letter in ((1, "H"), (2, "W")):
        before = (kernel[axis] - 1) * attributes.dilations[axis] - attributes.pads[axis][0]
        after = large[axis] - 1 - (small[axis] - 1) * attributes.strides[axis] + attributes.pads[axis][0]
        if max(before, after) > 255:
            raise GraphError(f"the reversed convolution would need the pads {before} and {after} on {letter}, but "
                             f"{title} takes at most 255")


def check_extents(attributes: Attributes, kernel: tuple[int, ...], large: tuple[int, ...], small: tuple[int, ...],
                  names: tuple[str, str], extra: tuple[int, ...] = (0, 0, 0)) -> None:
    """Per axis small == floor((large + pads - extra - span) / stride) + 1."""
    for axis, letter in enumerate("DHW"):
        before, after = attributes.pads[axis]
        span = (kernel[axis] - 1) * attributes.dilations[axis] + 1
        numbers = (f"{letter}: {names[0]} {large[axis]}, pads {before} and {after}, kernel {kernel[axis]}, dilation "
                   f"{attributes.dilations[axis]}, stride {attributes.strides[axis]}")
        if min(before, after) < 0:
            raise GraphError(f"pads must be at least 0, got {before} and {after} on {letter}")
        room = large[axis] + before + after - extra[axis]
        if room < span:
            raise GraphError(f"the padded feature map is smaller than the spread kernel ({room} < {span}) on {numbers}")
        expected = (room - span) // attributes.strides[axis] + 1
        if small[axis] != expected:
            raise GraphError(f"{names[1]} must have the extent {expected}, got {small[axis]}, on {numbers}")


def conv_of(attributes: Attributes, large: tuple[int, ...], out_channels: int, kernel: tuple[int, ...]) -> Conv:
    """The convolution of the feature map `large` (N C D H W)."""
    try:
        return Conv(large[0], large[1], out_channels, large[2:], kernel, attributes.strides, attributes.dilations,
                    attributes.pads, attributes.groups)
    except ValueError as error:
        raise GraphError(str(error)) from error
