"""What benchdnn's graph driver changes in a graph before it runs it: --in-shapes, --op-attrs, --op-kind, --dt, --mb."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .graph import Graph, GraphOp, GraphTensor
from .operators import OPERATORS

LISTS = ("strides", "pads_begin", "pads_end", "dilations", "output_padding", "dst_shape", "weights_shape")
NUMBERS = ("groups",)


class Layout(NamedTuple):
    """A shape, an axis order (a tag such as acdb), or both, of one graph input."""

    shape: tuple[int, ...] | None
    tag: str


class Overrides(NamedTuple):
    """One combination of the options; `by_id` in each is empty where the option is."""

    in_shapes: Mapping[int, Layout]
    op_attrs: Mapping[int, Mapping[str, Any]]
    op_kinds: Mapping[int, str]
    dtype: str  # of all tensors; "" leaves them
    dtypes: Mapping[int, str]
    batch: int  # 0 leaves it

    @property
    def empty(self) -> bool:
        return not (self.in_shapes or self.op_attrs or self.op_kinds or self.dtype or self.dtypes or self.batch)


def combinations(in_shapes: str, op_attrs: str, op_kind: str, dt: str, mb: str) -> Iterator[Overrides]:
    """Every combination of the comma-separated values of the options."""
    for shapes, attrs, kinds, types, batch in itertools.product(*(text.split(",") for text in
                                                                  (in_shapes, op_attrs, op_kind, dt, mb))):
        by_id = types if ":" in types else ""
        yield Overrides(parse_in_shapes(shapes), parse_op_attrs(attrs),
                        dict(pairs("--op-kind", kinds)), "" if by_id else types, dict(pairs("--dt", by_id)),
                        number_of("--mb", batch or "0"))


def number_of(option: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{option}={text}: {text!r} is no number")
    return int(text)


def pairs(option: str, text: str) -> Iterator[tuple[int, str]]:
    """ID:VALUE+ID:VALUE as numbers and texts."""
    for part in filter(None, text.split("+")):
        number, colon, value = part.partition(":")
        if not colon or not value:
            raise ValueError(f"{option}={text}: {part!r} is not ID:VALUE")
        yield number_of(option, number), value


def extents(option: str, text: str) -> tuple[int, ...]:
    """2x64x112x112 as a tuple; - is a scalar."""
    return () if text == "-" else tuple(number_of(option, extent) for extent in text.split("x"))


def parse_in_shapes(text: str) -> dict[int, Layout]:
    found = {}
    for number, value in pairs("--in-shapes", text):
        first, _, second = value.partition("*")
        is_tag = re.fullmatch("[a-l]+", first) is not None
        shape = None if is_tag else extents("--in-shapes", first)
        tag = first if is_tag else second
        if tag and sorted(tag) != [chr(97 + axis) for axis in range(len(tag))]:
            raise ValueError(f"--in-shapes={text}: {tag!r} is no order of the axes {'abcdefghijkl'[:len(tag)]}")
        found[number] = Layout(shape, tag)
    return found


def parse_op_attrs(text: str) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for number, value in pairs("--op-attrs", text):
        attributes = found.setdefault(number, {})
        for part in value.split("*"):
            name, colon, content = part.partition(":")
            if not colon:
                raise ValueError(f"--op-attrs={text}: {part!r} is not NAME:VALUE")
            attributes[name] = list(extents("--op-attrs", content)) if name in LISTS else \
                number_of("--op-attrs", content) if name in NUMBERS else content
    return found


def changed(graph: Graph, new: Overrides) -> Graph:
    """The graph with the overrides applied. Shapes that follow from others are unknown then, and inferred."""
    if new.empty:
        return graph
    inputs = {tensor.id for op in graph.ops for tensor in op.inputs}
    produced = {tensor.id for op in graph.ops for tensor in op.outputs}
    for option, given, known in (("--in-shapes", new.in_shapes, inputs - produced), ("--dt", new.dtypes,
                                 inputs | produced), ("--op-attrs", new.op_attrs, {op.id for op in graph.ops}),
                                 ("--op-kind", new.op_kinds, {op.id for op in graph.ops})):
        for number in given:
            if number not in known:
                raise ValueError(f"{option}: the graph has no {'operator' if 'op' in option else 'input tensor'} "
                                 f"{number}; it has {', '.join(map(str, sorted(known)))}")
    reshaped = bool(new.in_shapes or new.batch)
    computed = {tensor.id for op in graph.ops if new.op_kinds.get(op.id, op.kind) in OPERATORS for tensor in op.outputs}
    return graph._replace(ops=tuple(changed_op(op, new, computed, reshaped) for op in graph.ops))


def changed_op(op: GraphOp, new: Overrides, computed: set[int], reshaped: bool) -> GraphOp:
    attributes = {**op.attributes, **new.op_attrs.get(op.id, {})}
    kind = new.op_kinds.get(op.id, op.kind)
    if new.batch and attributes.get("dst_shape"):
        attributes["dst_shape"] = [new.batch, *attributes["dst_shape"][1:]]
    weights = OPERATORS[kind].inputs.index("weights") if kind in OPERATORS and "weights" in OPERATORS[kind].inputs \
        else None
    inputs = tuple(changed_tensor(tensor, new, tensor.id in computed and reshaped, place < 2 and place != weights)
                   for place, tensor in enumerate(op.inputs))
    outputs = tuple(changed_tensor(tensor, new, reshaped or op.id in new.op_attrs, False) for tensor in op.outputs)
    return op._replace(kind=kind, attributes=attributes, inputs=inputs, outputs=outputs)


def changed_tensor(tensor: GraphTensor, new: Overrides, unknown: bool, has_batch: bool) -> GraphTensor:
    dtype = tensor.dtype if tensor.dtype == "s32" else new.dtypes.get(tensor.id, new.dtype or tensor.dtype)
    if unknown:
        return tensor._replace(dtype=dtype, shape=None, strides=None)
    shape, tag = new.in_shapes.get(tensor.id, Layout(None, ""))
    strides = tensor.strides if shape is None and not tag else None
    shape = tensor.shape if shape is None else shape
    if new.batch and has_batch and shape:
        shape, strides = (new.batch, *shape[1:]), None
    if tag and shape is not None:
        strides = strides_of(shape, tag)
    return tensor._replace(dtype=dtype, shape=shape, strides=strides)


def strides_of(shape: tuple[int, ...], tag: str) -> tuple[int, ...]:
    """Dense strides with the axes in memory in the order of the tag, the last one fastest."""
    if len(tag) != len(shape):
        raise ValueError(f"--in-shapes: the tag {tag} has {len(tag)} axes, the shape {shape} has {len(shape)}")
    strides, step = [0] * len(shape), 1
    for letter in reversed(tag):
        axis = ord(letter) - 97
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)
