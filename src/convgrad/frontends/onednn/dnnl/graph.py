"""The namespace dnnl::graph: logical tensors with ids, operators with attributes, graphs, partitions, tensors.

Every convolution is a partition of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum
from typing import Any

import numpy as np

from ....numbers import storage_dtype
from ..attributes import UNKNOWN_DIM
from ..compiled import DTYPES, Compiled, LogicalTensor, Settings
from ..errors import GraphError, InvalidArguments, InvalidGraph, InvalidGraphOp, InvalidShape, Unimplemented
from ..graph import GraphOp, GraphTensor, operator_of
from ..operator import Operator
from ..operators import OPERATORS
from .engine import engine, stream

ATTRIBUTES = ("strides", "pads_begin", "pads_end", "dilations", "auto_pad", "groups", "data_format", "weights_format",
              "output_padding", "dst_shape", "weights_shape", "auto_pad_rule")


class status(Enum):
    """What a call without exceptions returns."""

    success = "success"
    invalid_arguments = "invalid_arguments"
    invalid_graph = "invalid_graph"
    invalid_graph_op = "invalid_graph_op"
    invalid_shape = "invalid_shape"
    unimplemented = "unimplemented"


class logical_tensor:
    """A tensor by its id: data type, extents (-1 or UNKNOWN_DIM where not known yet), strides or a layout type.

    `dims` is a list of extents, a number of axes, or a layout type in the short form; `layout` is a layout type or a
    list of strides.
    """

    class data_type(Enum):
        undef = ""
        f32 = "f32"
        bf16 = "bf16"
        f16 = "f16"
        s32 = "s32"
        s8 = "s8"
        u8 = "u8"

    class layout_type(IntEnum):
        undef = 0
        any = 1
        strided = 2
        opaque = 3

    class property_type(IntEnum):
        undef = 0
        variable = 1
        constant = 2

    def __init__(self, tid: int, dtype: data_type | str, dims: Sequence[int] | int | layout_type | None = None,
                 layout: layout_type | Sequence[int] | None = None,
                 ptype: property_type = property_type.undef) -> None:
        self.id = tid
        self.dtype = logical_tensor.data_type(dtype)
        if isinstance(dims, logical_tensor.layout_type):
            dims, layout = None, dims
        rank_only = isinstance(dims, int)
        self.dims = None if dims is None else (UNKNOWN_DIM,) * dims if isinstance(dims, int) else tuple(dims)
        self.strides: tuple[int, ...] | None = None
        self.layout = logical_tensor.layout_type.undef
        if isinstance(layout, logical_tensor.layout_type):
            self.layout = layout
        elif layout is not None:
            self.strides, self.layout = tuple(layout), logical_tensor.layout_type.strided
        self.property = ptype
        if not rank_only and self.strides is not None and self.dims is not None \
                and len(self.strides) != len(self.dims):
            raise InvalidArguments(f"logical tensor {tid} has {len(self.dims)} extents and {len(self.strides)} strides")

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The extents, or None where one of them is unknown."""
        return None if self.dims is None or any(extent < 0 for extent in self.dims) else self.dims

    def get_id(self) -> int:
        return self.id

    def get_data_type(self) -> data_type:
        return self.dtype

    def get_dims(self) -> tuple[int, ...]:
        if self.dims is None:
            raise InvalidArguments(f"logical tensor {self.id} has no extents yet")
        return self.dims

    def get_strides(self) -> tuple[int, ...]:
        if self.strides is not None:
            return self.strides
        return tuple(math.prod(self.get_dims()[axis + 1:]) for axis in range(len(self.get_dims())))

    def get_layout_type(self) -> layout_type:
        return self.layout

    def get_mem_size(self) -> int:
        if self.shape is None:
            raise InvalidArguments(f"logical tensor {self.id} has unknown extents {self.dims}")
        size = 4 if self.dtype.value == "s32" else storage_dtype(DTYPES[self.dtype.value]).itemsize
        if 0 in self.shape:
            return 0
        return size * (1 + sum((extent - 1) * step for extent, step in zip(self.shape, self.get_strides())))

    def has_same_shape_dtype(self, other: logical_tensor) -> bool:
        return self.shape == other.shape and self.dtype is other.dtype

    def __repr__(self) -> str:
        return f"logical_tensor({self.id}, {self.dtype.value}, {self.dims}, {self.strides or self.layout})"


def names(title: str, words: Sequence[str]) -> Any:
    return Enum(title, [(word, word) for word in words], type=str)


class op:
    """An operator of a graph: id, kind, logical tensors, attributes."""

    kind: Any = names("kind", [*OPERATORS, "ReLU", "ReLUBackward", "Add", "MatMul", "BiasAdd", "BiasAddBackward", "End",
                               "Wildcard"])
    attr: Any = names("attr", ATTRIBUTES)

    def __init__(self, id: int, akind: Any, inputs: Sequence[logical_tensor] = (),
                 outputs: Sequence[logical_tensor] = (), verbose_name: str = "") -> None:
        self.id, self.name = id, verbose_name
        try:
            self.op_kind: str = op.kind(akind).value
        except ValueError:
            raise InvalidGraphOp(f"operator {id} has the unknown kind {akind!r}") from None
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.attributes: dict[str, Any] = {}

    def set_attr(self, name: Any, value: Any) -> op:
        """Set an attribute; returns the operator, so that calls can be chained."""
        self.attributes[str(getattr(name, "value", name))] = value
        return self

    def add_input(self, tensor: logical_tensor) -> None:
        self.inputs.append(tensor)

    def add_inputs(self, tensors: Sequence[logical_tensor]) -> None:
        self.inputs.extend(tensors)

    def add_output(self, tensor: logical_tensor) -> None:
        self.outputs.append(tensor)

    def add_outputs(self, tensors: Sequence[logical_tensor]) -> None:
        self.outputs.extend(tensors)

    def get_id(self) -> int:
        return self.id

    def get_kind(self) -> str:
        return self.op_kind

    def operator(self) -> Operator:
        """The operator with its attributes checked. The library's auto_pad rule holds unless an attribute says so."""
        tensors = [[GraphTensor(tensor.id, tensor.dtype.value, tensor.shape, tensor.strides) for tensor in side]
                   for side in (self.inputs, self.outputs)]
        found = GraphOp(self.id, self.name, self.op_kind, self.attributes, tuple(tensors[0]), tuple(tensors[1]))
        rule = None if "auto_pad_rule" in self.attributes else "library"
        operator = operator_of(found, rule)
        most = 3 if operator.optional_input else 2
        if not 2 <= len(self.inputs) <= most or len(self.outputs) != 1:
            raise InvalidGraphOp(f"{self.op_kind} takes 2{' or 3' if most == 3 else ''} inputs and gives 1 output, but "
                                 f"operator {self.id} has {len(self.inputs)} and {len(self.outputs)}")
        return operator


class graph:
    """Operators by the ids of their tensors. Add them, finalize, ask for partitions."""

    def __init__(self, engine_kind: engine.kind = engine.kind.cpu, mode: str = "strict") -> None:
        self.engine_kind, self.fpmath_mode = engine.kind(engine_kind), mode
        self.ops: list[op] = []
        self.finalized = False

    def add_op(self, new: op, allow_exception: bool = True) -> status:
        """Check an operator's attributes and number of tensors and add it."""
        try:
            if self.finalized:
                raise InvalidGraph("the graph is finalized: no operator can be added")
            if any(new.id == known.id for known in self.ops):
                raise InvalidGraphOp(f"the graph has an operator {new.id} already")
            if new.op_kind in OPERATORS:
                new.operator()
            producers = {tensor.id: known.id for known in self.ops for tensor in known.outputs}
            for tensor in new.outputs:
                if tensor.id in producers:
                    raise InvalidGraph(f"tensor {tensor.id} is an output of the operators {producers[tensor.id]} and "
                                       f"{new.id}")
        except GraphError as failure:
            if allow_exception:
                raise
            return status(failure.status)
        self.ops.append(new)
        return status.success

    def finalize(self) -> status:
        self.finalized = True
        return status.success

    def is_finalized(self) -> bool:
        return self.finalized

    def get_partitions(self, policy: str = "fusion") -> list[partition]:
        """One partition per operator; `is_supported()` says whether it is a convolution."""
        if not self.finalized:
            raise InvalidGraph("the graph must be finalized before get_partitions")
        return [partition(place, node, self.engine_kind) for place, node in enumerate(self.ops)]


class partition:
    """One operator, ready to be compiled."""

    def __init__(self, number: int, node: op, engine_kind: engine.kind) -> None:
        self.id, self.node, self.engine_kind = number, node, engine_kind

    def is_supported(self) -> bool:
        return self.node.op_kind in OPERATORS

    def get_id(self) -> int:
        return self.id

    def get_ops(self) -> list[int]:
        return [self.node.id]

    def get_ops_num(self) -> int:
        return 1

    def get_input_ports(self) -> list[logical_tensor]:
        return list(self.node.inputs)

    def get_output_ports(self) -> list[logical_tensor]:
        return list(self.node.outputs)

    def get_engine_kind(self) -> engine.kind:
        return self.engine_kind

    def compile(self, inputs: Sequence[logical_tensor], outputs: Sequence[logical_tensor],
                eng: engine) -> compiled_partition:
        """Fix shapes and types. A known shape of the output stands for the shape attribute where that is absent."""
        if not self.is_supported():
            raise Unimplemented(f"operator {self.node.id} is a {self.node.op_kind}; only convolutions are computed "
                                "here", {})
        return compiled_partition(self.node, by_id("inputs", inputs, self.node.inputs),
                                  by_id("outputs", outputs, self.node.outputs), eng)


def by_id(side: str, given: Sequence[Any], wanted: Sequence[logical_tensor]) -> dict[int, Any]:
    """The tensors that a call passes, by id; each one of the operator exactly once."""
    found = {(item.lt if isinstance(item, tensor) else item).id: item for item in given}
    if sorted(found) != sorted(port.id for port in wanted) or len(found) != len(given):
        raise InvalidArguments(f"the {side} must be the tensors {[port.id for port in wanted]}, got "
                               f"{[(item.lt if isinstance(item, tensor) else item).id for item in given]}")
    return found


class compiled_partition:
    """An operator for fixed shapes; `execute` runs it."""

    def __init__(self, node: op, inputs: Mapping[int, logical_tensor], outputs: Mapping[int, logical_tensor],
                 eng: engine) -> None:
        self.node, self.engine = node, eng
        self.inputs = [inputs[port.id] for port in node.inputs]
        self.output = outputs[node.outputs[0].id]
        self.operator = node.operator()
        self.has_shape_input = len(self.inputs) == 3 and self.operator.optional_input.endswith("_shape")
        self.compiled: Compiled | None = None if self.has_shape_input else self._compile(None)
        if self.compiled is not None:
            self.output = self._settled(self.compiled)

    def _compile(self, shape: Any) -> Compiled:
        described = [LogicalTensor(self._extents(port), port.dtype.value, port.strides) for port in self.inputs]
        name = self.operator.optional_input
        optional: dict[str, Any] = {}
        if name == "bias" and len(described) == 3:
            optional["bias_desc"] = described[2]
        elif name.endswith("_shape"):
            wanted = shape if shape is not None else \
                self.output.shape if getattr(self.operator, name) is None else None
            optional = {} if wanted is None else {name: wanted}
        settings = Settings(device="cuda" if self.engine.engine_kind is engine.kind.gpu else "cpu")
        return self.operator.compile(*described[:2], device=settings.device, **optional)

    def _extents(self, port: logical_tensor) -> tuple[int, ...]:
        if port.shape is None and not (port.dtype.value == "s32" and port.dims is None):
            raise Unimplemented(f"tensor {port.id} has unknown extents {port.dims}: every input must be known when the "
                                "partition is compiled", {})
        return port.shape or ()

    def _settled(self, compiled: Compiled) -> logical_tensor:
        if self.output.shape is not None and self.output.shape != compiled.output.shape:
            raise InvalidShape(f"output tensor {self.output.id} has shape {self.output.shape}, but the attributes and "
                               f"inputs give {compiled.output.shape}")
        if self.output.dtype.value != compiled.output.dtype:
            raise InvalidGraphOp(f"output tensor {self.output.id} is {self.output.dtype.value}, but the inputs are "
                                 f"{compiled.output.dtype}")
        strides = self.output.strides or logical_tensor.layout_type.strided
        return logical_tensor(self.output.id, self.output.dtype, compiled.output.shape, strides)

    def query_logical_tensor(self, tid: int) -> logical_tensor:
        """The tensor of an id with its shape and strides settled."""
        for port in (*self.inputs, self.output):
            if port.id == tid:
                return port
        raise InvalidArguments(f"the partition has no tensor {tid}")

    def execute(self, strm: stream, inputs: Sequence[tensor], outputs: Sequence[tensor]) -> None:
        """Compute the output from the inputs; nothing is written when the call fails."""
        given, targets = by_id("inputs", inputs, self.inputs), by_id("outputs", outputs, [self.output])
        compiled, output = self.compiled, self.output
        count = 2 if self.has_shape_input else len(self.inputs)
        if self.has_shape_input:
            compiled = self._compile(given[self.inputs[2].id].array(self.inputs[2]))
            output = self._settled(compiled)
        assert compiled is not None
        arrays = [given[port.id].array(port) for port in self.inputs[:count]]
        compiled(*arrays, out=targets[output.id].array(output))


class tensor:
    """Memory for a logical tensor: an array of its shape, or flat memory that is read with its strides."""

    def __init__(self, lt: logical_tensor, eng: engine, handle: Any = None) -> None:
        self.lt, self.engine, self.handle = lt, eng, handle
        if handle is None:
            kept = np.dtype(np.int32) if lt.dtype.value == "s32" else storage_dtype(DTYPES[lt.dtype.value])
            self.handle = np.zeros(lt.get_mem_size() // kept.itemsize, kept)

    def get_data_handle(self) -> Any:
        return self.handle

    def set_data_handle(self, handle: Any) -> None:
        self.handle = handle

    def get_logical_tensor(self) -> logical_tensor:
        return self.lt

    def array(self, port: logical_tensor) -> Any:
        """The memory as an array of the shape that the partition was compiled for."""
        shape = port.shape
        if shape is None or tuple(self.handle.shape) == shape:
            return self.handle
        if self.handle.ndim != 1 or not isinstance(self.handle, np.ndarray) or not self.handle.flags.c_contiguous:
            raise InvalidArguments(f"tensor {port.id} holds an array of shape {tuple(self.handle.shape)}, but was "
                                   f"compiled for {shape}")
        reach = 0 if 0 in shape else 1 + sum((extent - 1) * step for extent, step in zip(shape, port.get_strides()))
        if self.handle.size < reach or min(port.get_strides(), default=0) < 0:
            raise InvalidArguments(f"tensor {port.id} of shape {shape} needs {reach} elements, its memory has "
                                   f"{self.handle.size}")
        return np.lib.stride_tricks.as_strided(self.handle, shape,
                                               [step * self.handle.itemsize for step in port.get_strides()])
