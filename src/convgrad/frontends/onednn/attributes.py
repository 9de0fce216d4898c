"""The attributes of the convolution operators: what each may hold, and the error for what it may not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import InvalidArguments, InvalidGraphOp, InvalidShape, Unimplemented
from .padding import AUTO_PADS, RULES

REQUIRED = ("strides", "pads_begin", "pads_end", "dilations")
DATA_FORMATS = ("NXC", "NCX")
# Operators whose shape inference divides or multiplies by groups, and refuses values below 1 as invalid_shape.
DIVIDES_BY_GROUPS = ("Convolution", "ConvTranspose", "ConvTransposeBackwardData")
UNKNOWN_DIM = -(2**63)  # how the library spells an extent that is not known yet
S64_MAX = 2**63 - 1


def is_default(values: Sequence[int]) -> bool:
    """Whether a list attribute is absent: the library fills in twelve zeros, and writes them into its graph dumps."""
    return not any(values)


def int_list(name: str, value: object) -> tuple[int, ...]:
    """Return an s64 list attribute as a tuple."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidGraphOp(f"{name} must be a list of integers, one per spatial axis, got {value!r}")
    return tuple(integer(f"{name}[{index}]", item) for index, item in enumerate(value))


def integer(name: str, value: object) -> int:
    if isinstance(value, bool):
        raise InvalidGraphOp(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidGraphOp(f"{name} must be an integer, got {value!r} ({type(value).__name__})") from None
    if not -S64_MAX - 1 <= number <= S64_MAX:
        raise InvalidGraphOp(f"{name}={number} does not fit in a signed 64-bit integer")
    return number


def one_of(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return the spelling in `choices` that `value` is in any case."""
    if isinstance(value, str):
        for choice in choices:
            if value.lower() == choice.lower():
                return choice
    raise InvalidGraphOp(f"{name}={value!r} is none of {', '.join(choices)}")


def strides(value: object) -> tuple[int, ...]:
    steps = int_list("strides", value)
    for axis, step in enumerate(steps):
        if step <= 0:
            raise InvalidArguments(f"strides[{axis}]={step} is not positive (strides={steps})")
    return steps


def dilations(value: object) -> tuple[int, ...]:
    spread = int_list("dilations", value)
    for axis, step in enumerate(spread):
        if step <= 0:
            raise InvalidArguments(
                f"dilations[{axis}]={step} is not positive (dilations={spread}): 1 is the dense kernel; oneDNN would "
                "silently compute a dense convolution for the whole vector")
    return spread


def pads(name: str, value: object) -> tuple[int, ...]:
    widths = int_list(name, value)
    for axis, width in enumerate(widths):
        if width < 0:
            raise InvalidGraphOp(f"{name}[{axis}]={width} is negative ({name}={widths})")
    return widths


def output_padding(value: object) -> tuple[int, ...]:
    extra = () if value is None else int_list("output_padding", value)
    for axis, width in enumerate(extra):
        if width < 0:
            raise InvalidArguments(f"output_padding[{axis}]={width} is negative (output_padding={extra}); oneDNN "
                                   "would not look at it")
    return () if is_default(extra) else extra


def groups(kind: str, value: object) -> int:
    count = integer("groups", value)
    if count >= 1:
        return count
    if kind in DIVIDES_BY_GROUPS:
        raise InvalidShape(f"groups={count} is not positive: {kind} has no shape with it")
    raise InvalidArguments(f"groups={count} is not positive; oneDNN would silently compute with groups=1")


def shape(name: str, value: object) -> tuple[int, ...] | None:
    """Return a shape attribute or input; None when it is absent (or the zeros that stand for absent)."""
    if value is None:
        return None
    extents = int_list(name, value)
    return None if is_default(extents) else known_shape(name, extents)


def tensor_shape(name: str, shape: Sequence[int | None]) -> tuple[int, ...]:
    """Return the shape (or strides) of a tensor descriptor; None and -1 also stand for what is not known yet."""
    if isinstance(shape, Sequence):
        shape = [UNKNOWN_DIM if extent in (None, -1) else extent for extent in shape]
    return known_shape(name, int_list(name, shape))


def known_shape(name: str, extents: tuple[int, ...]) -> tuple[int, ...]:
    for axis, extent in enumerate(extents):
        if extent == UNKNOWN_DIM:
            raise Unimplemented(f"{name}[{axis}] is unknown: every extent must be known when the operator is compiled")
        if extent < 0:
            raise InvalidShape(f"{name}[{axis}]={extent} is negative ({name}={extents})")
    return extents


CHECKS: dict[str, Callable[[Any], Any]] = {
    "strides": strides,
    "pads_begin": lambda value: pads("pads_begin", value),
    "pads_end": lambda value: pads("pads_end", value),
    "dilations": dilations,
    "auto_pad": lambda value: one_of("auto_pad", "none" if value is None else value, AUTO_PADS),
    "auto_pad_rule": lambda value: one_of("auto_pad_rule", value, RULES),
    "output_padding": output_padding,
    "data_format": lambda value: one_of("data_format", value, DATA_FORMATS),
    "dst_shape": lambda value: shape("dst_shape", value),
    "weights_shape": lambda value: shape("weights_shape", value),
}


def checked(kind: str, given: Mapping[str, Any], defaults: Mapping[str, Any],
            weights_formats: tuple[str, ...]) -> dict[str, Any]:
    """Return every attribute of operator `kind` in its normal form, in the order of REQUIRED and then `defaults`."""
    names = (*REQUIRED, *defaults)
    for name in given:
        if name not in names:
            raise InvalidGraphOp(f"{kind} has no attribute {name!r}; it has {', '.join(names)}")
    for name in REQUIRED:
        if name not in given:
            raise InvalidGraphOp(f"{kind} needs the attribute {name!r} (required: {', '.join(REQUIRED)})")
    values: dict[str, Any] = {}
    for name in names:
        value = given.get(name, defaults.get(name))
        if name == "weights_format":
            values[name] = one_of(name, value, weights_formats)
        else:
            values[name] = groups(kind, value) if name == "groups" else CHECKS[name](value)
    match_lengths(values)
    return values


def match_lengths(values: dict[str, Any]) -> None:
    """Hold that every per-axis list has as many values as strides; an absent list of pads means zeros."""
    axes = len(values["strides"])
    for name in ("pads_begin", "pads_end", "output_padding"):
        if name in values:
            values[name] = values[name] or (0,) * axes
    for name in ("pads_begin", "pads_end", "dilations", "output_padding"):
        if name in values and len(values[name]) != axes:
            raise InvalidShape(f"{name}={values[name]} has {len(values[name])} values but strides={values['strides']} "
                               f"has {axes}: one value per spatial axis")
    if not 1 <= axes <= 3:
        raise InvalidArguments(f"strides={values['strides']} has {axes} values: 1, 2 or 3 spatial axes are supported")
