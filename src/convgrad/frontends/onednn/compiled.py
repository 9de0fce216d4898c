"""An operator compiled for fixed descriptors: the second step of oneDNN's life cycle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...plan import plan
from ...problem import SPATIAL_LETTERS, Plan, Problem, Unsupported
from .. import kind_of
from .attributes import shape, tensor_shape
from .errors import GraphError, InvalidArguments, InvalidGraphOp, InvalidShape, Unimplemented
from .geometry import Geometry, Shape, canonical_axes, from_canonical

if TYPE_CHECKING:
    from .operator import Operator

# oneDNN's name of a data type -> the engine's name. All tensors of one operator have the same.
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
SHORT_NAMES = {name: short for short, name in DTYPES.items()} | {short: short for short in DTYPES}
# Tensor of a problem -> role in the operators' geometry.
ROLES = {"grad_output": "small", "output": "small", "input": "large", "weight": "weights"}


class LogicalTensor(NamedTuple):
    """The description of a tensor: shape in the operator's format order, data type, strides in elements.

    Strides only have to be known: the engine reads and writes any strided view where it lies.
    """

    shape: Shape
    dtype: str = "f32"
    strides: Shape | None = None


class Settings(NamedTuple):
    """What `compile` hands on to the planner."""

    backend: str | None = None
    num_threads: int | None = None
    max_scratchpad_bytes: int | None = None
    device: str = "cpu"


def dtype_name(name: str, dtype: Any) -> str:
    """Return f32, bf16 or f16 for oneDNN's or NumPy's name, or for a dtype of NumPy or torch."""
    text = str(dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", dtype)))
    found = SHORT_NAMES.get(text.removeprefix("torch.").lower())
    if found is None:
        raise InvalidGraphOp(f"{name} has data type {text}; the operator takes {', '.join(DTYPES)}")
    return found


def described(name: str, tensor: Any) -> LogicalTensor:
    """Return the checked descriptor of a LogicalTensor, an array, or a pair (shape, dtype)."""
    if isinstance(tensor, tuple) and not isinstance(tensor, LogicalTensor) and len(tensor) in (2, 3):
        tensor = LogicalTensor(*tensor)
    if not (hasattr(tensor, "shape") and hasattr(tensor, "dtype")):
        raise InvalidGraphOp(f"{name} must be an array, a LogicalTensor or a pair (shape, dtype), got {tensor!r}")
    extents = tensor_shape(f"shape of {name}", tuple(tensor.shape))
    strides = tensor.strides if isinstance(tensor, LogicalTensor) else None
    if strides is not None:
        strides = tensor_shape(f"strides of {name}", strides)
    return LogicalTensor(extents, dtype_name(name, tensor.dtype), strides)


def shape_input(name: str, value: Any) -> Shape | None:
    """Return the value of a dst_shape or weights_shape input: an s32 tensor of shape (rank,) or (1, rank), or a list.

    None is no input. An input says a shape: zeros, which stand for an absent attribute, are none.
    """
    if value is None:
        return None
    dtype = getattr(value, "dtype", None)
    if dtype is not None and str(dtype).removeprefix("torch.") != "int32":
        raise InvalidGraphOp(f"{name} has data type {dtype}; it must be s32")
    extents = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(extents, list) and len(extents) == 1 and isinstance(extents[0], list):
        extents = extents[0]
    found = shape(name, extents)
    if found is None:
        raise InvalidShape(f"{name} is given as an input, but holds only zeros: {extents}")
    return found


class Compiled:
    """One operator, one set of descriptors, one plan.

    Attributes
    ----------
    scratchpad_size : int
        Bytes of scratch memory that a call may be given (1-D uint8); a call without one allocates it.
    inputs, output : LogicalTensor
        What a call takes and returns.
    pads_begin, pads_end : tuple of int
        The pads as the attributes and auto_pad settled them.
    problem, plan
        The same question in the engine's terms, and how it will be answered.
    """

    def __init__(self, operator: Operator, tensors: list[LogicalTensor], geometry: Geometry,
                 settings: Settings) -> None:
        self.operator = operator
        self.geometry = geometry
        self.pads_begin, self.pads_end = geometry.pads_begin, geometry.pads_end
        self.inputs = tuple(tensors)
        self._names = (*operator.inputs, "bias")[:len(tensors)]
        dtype = one_dtype(operator.kind, self._names, self.inputs)
        axes = len(operator.strides)
        result_role = operator.role_of(operator.result)
        self.output = LogicalTensor(from_canonical(geometry.shapes[result_role], operator.layout_of(operator.result)),
                                    dtype)
        letters = SPATIAL_LETTERS[axes]
        self.problem = Problem(
            geometry.conv, operator.wrt, DTYPES[dtype], "float32" if len(tensors) == 3 else DTYPES[dtype],
            layout=operator.data_format.replace("X", letters),
            weight_layout=operator.layout_of(operator.names["weights"]).replace("X", letters), device=settings.device)
        self.plan = planned(self.problem, settings)
        self.scratchpad_size = self.plan.workspace_bytes
        # How the inputs become the operands of the plan: (place among the inputs, name, order of the axes).
        self._operands = []
        for operand in self.problem.operands:
            name = operator.names[ROLES[operand]]
            self._operands.append((operator.inputs.index(name), name,
                                   canonical_axes(operator.layout_of(name), axes)))
        self._result_order = canonical_axes(operator.layout_of(operator.result), axes)
        self._signature = [(name, tensor.shape, tensor.dtype) for name, tensor in zip(self._names, self.inputs)]

    def __repr__(self) -> str:
        return f"Compiled({self.operator.kind}: {self.problem}; {self.plan.backend} {self.plan.kernel})"

    def __call__(self, *inputs: Any, scratchpad: Any = None, out: Any = None, **named: Any) -> Any:
        """Execute with tensors that match the descriptors.

        Parameters
        ----------
        *inputs, **named
            The input tensors in oneDNN's order, or by name.
        scratchpad
            1-D uint8 memory of at least `scratchpad_size` bytes; allocated when absent.
        out
            Where to write the result; allocated when absent.
        """
        values = dict(zip(self._names, inputs), **named)
        if len(inputs) > len(self._names) or len(values) != len(inputs) + len(named) or set(values) != set(self._names):
            raise InvalidGraphOp(f"{self.operator.kind} was compiled for the inputs {', '.join(self._names)}, got "
                                 f"{len(inputs)} by position{''.join(f', {name}' for name in named)}")
        ordered = tuple(values[name] for name in self._names)
        for (name, extents, dtype), tensor in zip(self._signature, ordered):
            if getattr(tensor, "shape", None) == extents and dtype_name(name, tensor.dtype) == dtype:
                continue
            found = described(name, tensor)
            if found.shape != extents or found.dtype != dtype:
                raise InvalidArguments(f"{name} is {found.dtype} of shape {found.shape}, but the operator was compiled "
                                       f"for {dtype} of shape {extents}")
        return self.execute(ordered, scratchpad, out)

    def execute(self, inputs: tuple[Any, ...], scratchpad: Any, out: Any) -> Any:
        """Execute with tensors that are known to match the descriptors, in order."""
        dtype, sum_dtype = self.problem.dtype, self.problem.out_dtype
        arrays = dict(zip(self._names, inputs))
        try:
            kind = kind_of(arrays, {})
            device, _ = kind.home(arrays)
            if device != self.problem.device:
                raise InvalidArguments(f"the tensors are on {device}, but the operator was compiled for "
                                       f"{self.problem.device}")
            operands = tuple([kind.operand(inputs[place], name, order, dtype)
                              for place, name, order in self._operands])
            if out is None:
                out = kind.empty(self.output.shape, dtype, inputs[0])
            else:
                kind.check_out(out, self.output.shape, dtype, "out", arrays)
            target = kind.operand(out, "out", self._result_order, dtype)
            if scratchpad is not None:
                kind.check_workspace(scratchpad, self.scratchpad_size, {**arrays, "out": out})
                scratchpad = kind.workspace_view(scratchpad)
        except (TypeError, ValueError) as error:
            if isinstance(error, GraphError):
                raise
            raise InvalidArguments(str(error).replace("workspace", "scratchpad")) from None
        if len(inputs) == 2:
            self.plan.run(operands, (self._reached(target),), scratchpad)
        else:
            # The sum stays in f32 until the bias is added, so that there is one rounding.
            total = kind.operand(kind.empty(self.output.shape, sum_dtype, inputs[0]), "out", self._result_order,
                                 sum_dtype)
            self.plan.run(operands, (self._reached(total),), scratchpad)
            total += kind.operand(inputs[2], "bias", None, dtype).reshape(-1, *(1,) * (total.ndim - 2))
            target[...] = total
        return kind.returned(out, inputs[0])


    def _reached(self, target: Any) -> Any:
        """The part of the result that taps reach; what output_padding adds beyond it is set to 0."""
        size = self.problem.conv.shape_of(self.problem.wrt)
        if size == tuple(target.shape):
            return target
        target[...] = 0
        return target[tuple(slice(extent) for extent in size)]


def one_dtype(kind: str, names: tuple[str, ...], tensors: tuple[LogicalTensor, ...]) -> str:
    found = {tensor.dtype for tensor in tensors}
    if len(found) > 1:
        raise InvalidGraphOp(f"all tensors of {kind} must have one data type: "
                             + ", ".join(f"{name} is {tensor.dtype}" for name, tensor in zip(names, tensors)))
    return found.pop()


def planned(problem: Problem, settings: Settings) -> Plan:
    try:
        return plan(problem, backend=settings.backend, num_threads=settings.num_threads,
                    max_workspace_bytes=settings.max_scratchpad_bytes)
    except Unsupported as error:
        raise Unimplemented(str(error), error.reasons) from error
