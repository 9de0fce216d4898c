"""Reads the JSON that oneDNN Graph dumps (ONEDNN_GRAPH_DUMP=graph) and runs the convolutions in it.

Layout of the file: an object with `version`, `engine_kind`, `fpmath_mode` and `graph`, a list of operators. An operator
has `id`, `name`, `kind`, `attrs` (name -> {type, value}), `inputs` and `outputs`; a tensor has `id`, `dtype`, `shape`,
`stride`, `layout_type`, `property_type`. Extents that are not known yet are -2^63.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...numbers import encode, storage_dtype
from .compiled import DTYPES, Compiled, LogicalTensor, Settings, described
from .errors import InvalidGraph, InvalidGraphOp, InvalidShape, Unimplemented
from .operator import Operator
from .operators import OPERATORS

Array = npt.NDArray[Any]
Draw = Callable[[tuple[int, ...]], Array]

DEFAULT_SETTINGS = Settings()
# Attributes with which the library marks an operator in a dump made after partitioning.
BOOKKEEPING = ("partition_id", "backend", "matched", "op_depth")
# Names of the technical preview (version 0.x) for what is here under its name of today.
PREVIEW_KINDS = {"ConvolutionBackpropData": "ConvolutionBackwardData"}
PREVIEW_ATTRIBUTES = {"output_shape": "dst_shape", "filter_format": "weights_format"}


class GraphTensor(NamedTuple):
    """A logical tensor of the file; shape and strides are None where the file does not know them."""

    id: int
    dtype: str
    shape: tuple[int, ...] | None
    strides: tuple[int, ...] | None


class GraphOp(NamedTuple):
    id: int
    name: str
    kind: str
    attributes: dict[str, Any]
    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]


class Graph(NamedTuple):
    version: str
    engine_kind: str
    fpmath_mode: str
    ops: tuple[GraphOp, ...]

    @property
    def convolutions(self) -> tuple[GraphOp, ...]:
        """The operators that this dialect runs."""
        return tuple(op for op in self.ops if op.kind in OPERATORS)


class OpRun(NamedTuple):
    """One executed operator: what it was, how it was run, and how long each repetition took."""

    op: GraphOp
    compiled: Compiled
    output: Array
    seconds: tuple[float, ...]
    notes: tuple[str, ...]


def read_graph(source: str | Path) -> Graph:
    """Read a serialised graph from a file."""
    try:
        document = json.loads(Path(source).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidGraph(f"{source} is not JSON: {error}") from None
    return parse_graph(document, str(source))


def parse_graph(document: Any, source: str = "the document") -> Graph:
    """Read a serialised graph from its decoded JSON."""
    if not isinstance(document, dict) or not isinstance(document.get("graph"), list):
        raise InvalidGraph(f"{source} has no list of operators under 'graph': is it a dump of oneDNN Graph?")
    ops = []
    for place, item in enumerate(document["graph"]):
        try:
            ops.append(_parse_op(item))
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise InvalidGraph(f"{source}: operator {place} of the graph cannot be read: "
                               f"{type(error).__name__}: {error}") from None
    return Graph(str(document.get("version", "")), str(document.get("engine_kind", "")),
                 str(document.get("fpmath_mode", "")), tuple(ops))


def _parse_op(item: Mapping[str, Any]) -> GraphOp:
    attributes = {PREVIEW_ATTRIBUTES.get(name, name): entry["value"] for name, entry in item.get("attrs", {}).items()
                  if name not in BOOKKEEPING}
    kind = str(item["kind"])
    return GraphOp(whole(item["id"]), str(item.get("name", kind)), PREVIEW_KINDS.get(kind, kind), attributes,
                   tuple(_parse_tensor(tensor) for tensor in item["inputs"]),
                   tuple(_parse_tensor(tensor) for tensor in item["outputs"]))


def whole(number: Any) -> int:
    """A JSON number that must be an integer of 64 bits; an id may also be its text."""
    value = int(number) if isinstance(number, str) else number
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
        raise TypeError(f"{number!r} is no 64-bit integer")
    return value


def _parse_tensor(item: Mapping[str, Any]) -> GraphTensor:
    shape, strides = tuple(map(whole, item["shape"])), tuple(map(whole, item.get("stride", ())))
    known = bool(shape) and min(shape) >= 0
    usable = known and item.get("layout_type") == "strided" and len(strides) == len(shape) and min(strides) >= 0
    return GraphTensor(whole(item["id"]), str(item["dtype"]), shape if known else None, strides if usable else None)


def operator_of(op: GraphOp, auto_pad_rule: str | None = None) -> Operator:
    """The operator object of a graph operator; `auto_pad_rule` is for the kind that has a choice."""
    if op.kind not in OPERATORS:
        raise InvalidGraphOp(f"operator {op.id} is a {op.kind}, which is none of {', '.join(OPERATORS)}")
    kind = OPERATORS[op.kind]
    chosen = {"auto_pad_rule": auto_pad_rule} if auto_pad_rule and "auto_pad_rule" in kind.defaults else {}
    return kind(**op.attributes, **chosen)


def run_op(op: GraphOp, tensors: dict[int, Array], rng: np.random.Generator, *, repeat: int = 1,
           auto_pad_rule: str | None = None, settings: Settings = DEFAULT_SETTINGS, draw: Draw | None = None) -> OpRun:
    """Compile and execute one operator of a graph.

    Parameters
    ----------
    tensors : dict
        Arrays by tensor id. What is missing is drawn at random and added, and so is the result: an operator that
        reads it later gets it.
    repeat : int
        Number of timed executions, after one that is not timed.
    draw : function, optional
        Returns random float64 values of a shape; the default draws normal ones from `rng`.
    """
    draw = draw or rng.standard_normal
    operator = operator_of(op, auto_pad_rule)
    _check_counts(op, operator)
    inputs = [_input(operator.inputs[place] if place < 2 else operator.optional_input, tensor, tensors, draw)
              for place, tensor in enumerate(op.inputs)]
    wanted = _wanted_shape(op, operator, inputs)
    extra = wanted if operator.optional_input.endswith("_shape") else inputs[2] if len(inputs) == 3 else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optional = {} if extra is None else {"bias_desc" if wanted is not extra else operator.optional_input: extra}
        compiled = operator.compile(*inputs[:2], backend=settings.backend, num_threads=settings.num_threads,
                                    max_scratchpad_bytes=settings.max_scratchpad_bytes, **optional)
    target = op.outputs[0]
    if target.shape is not None and target.shape != compiled.output.shape:
        raise InvalidShape(f"the graph says that {operator.result} has shape {target.shape}, but the attributes and "
                           f"inputs give {compiled.output.shape}")
    if target.dtype != compiled.output.dtype:
        raise InvalidGraphOp(f"the graph says that {operator.result} is {target.dtype}, but the inputs are "
                             f"{compiled.output.dtype}")
    output = _strided(operator.result, target, compiled.output, overlap=False)
    arrays = inputs[:len(compiled.inputs)]
    scratchpad = np.empty(compiled.scratchpad_size, np.uint8)
    seconds = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        compiled(*arrays, scratchpad=scratchpad, out=output)
        seconds.append(time.perf_counter() - start)
    tensors[target.id] = output
    return OpRun(op, compiled, output, tuple(seconds[1:] or seconds), tuple(str(note.message) for note in caught))


def _check_counts(op: GraphOp, operator: Operator) -> None:
    most = 3 if operator.optional_input else 2
    if not 2 <= len(op.inputs) <= most or len(op.outputs) != 1:
        raise InvalidGraphOp(f"{op.kind} takes 2{' or 3' if most == 3 else ''} inputs and gives 1 output, but operator "
                             f"{op.id} has {len(op.inputs)} and {len(op.outputs)}")


def _input(name: str, tensor: GraphTensor, tensors: dict[int, Array], draw: Draw) -> Any:
    """The array of an input tensor: given, computed before, or random. A shape must be given."""
    if name.endswith("_shape"):
        if tensor.dtype != "s32":
            raise InvalidGraphOp(f"{name} (tensor {tensor.id}) has data type {tensor.dtype}; it must be s32")
        if tensor.id not in tensors:
            raise InvalidShape(f"{name} (tensor {tensor.id}) is an input of the operator, but its value is not given: "
                               f"--input {tensor.id}=FILE.npy")
        return tensors[tensor.id]
    if tensor.shape is None and tensor.id in tensors:  # computed before, or given
        tensor = tensor._replace(shape=tensors[tensor.id].shape)
    if tensor.shape is None:
        raise Unimplemented(f"{name} (tensor {tensor.id}) has unknown extents: every extent must be known when the "
                            "operator is compiled")
    found = described(name, LogicalTensor(tensor.shape, tensor.dtype))
    if tensor.id in tensors:
        given = _as_dtype(name, tensors[tensor.id], found.dtype)
        if given.shape != tensor.shape:
            raise InvalidShape(f"{name} (tensor {tensor.id}) was given with shape {given.shape}, but the graph says "
                               f"{tensor.shape}")
        return given
    array = _strided(name, tensor, found, overlap=True)
    array[...] = encode(draw(tensor.shape), DTYPES[found.dtype])
    tensors[tensor.id] = array
    return array


def _as_dtype(name: str, array: Array, dtype: str) -> Array:
    """A given array in the data type of the graph; .npy files hold bf16 as two raw bytes."""
    stored = storage_dtype(DTYPES[dtype])
    if array.dtype == stored:
        return array
    if array.dtype.kind == "V" and array.dtype.itemsize == stored.itemsize:
        return array.view(stored)
    if array.dtype.kind not in "fiu":
        raise InvalidGraphOp(f"{name} was given as {array.dtype}, which cannot be converted to {dtype}")
    return encode(array, DTYPES[dtype])


def _strided(name: str, tensor: GraphTensor, found: LogicalTensor, overlap: bool) -> Array:
    """An array with the strides that the graph asks for, or a dense one."""
    dtype = storage_dtype(DTYPES[found.dtype])
    if tensor.strides is None or 0 in found.shape:
        check_room(name, found, math.prod(found.shape) * dtype.itemsize)
        return np.empty(found.shape, dtype)
    extents = sorted((stride, extent) for stride, extent in zip(tensor.strides, found.shape) if extent > 1)
    reach = 0
    for stride, extent in extents:
        if stride <= reach and not overlap:
            raise InvalidShape(f"{name} of shape {found.shape} with strides {tensor.strides} overlaps itself")
        reach += stride * (extent - 1)
    check_room(name, found, (reach + 1) * dtype.itemsize)
    memory = np.zeros(reach + 1, dtype)
    return np.lib.stride_tricks.as_strided(memory, found.shape,
                                           tuple(stride * dtype.itemsize for stride in tensor.strides))


def check_room(name: str, found: LogicalTensor, nbytes: int) -> None:
    """Refuse a tensor that the memory of this machine cannot hold, before anything tries."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**40
    if nbytes > room:
        raise Unimplemented(f"{name} of shape {found.shape} takes {nbytes:,} bytes, and this machine has {room:,}")


def _wanted_shape(op: GraphOp, operator: Operator, inputs: list[Any]) -> Any:
    """The value of dst_shape or weights_shape: given as tensor, or else the known shape of the output."""
    name = operator.optional_input
    if not name.endswith("_shape"):
        return None
    if len(inputs) == 3 and inputs[2] is not None:
        return inputs[2]
    return op.outputs[0].shape if getattr(operator, name) is None else None
