"""What the six operators share: immutable attributes, shape inference, compile, execute."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

from .. import kind_of
from .attributes import REQUIRED, checked, int_list, tensor_shape
from .compiled import Compiled, Settings, described, shape_input
from .errors import InvalidArguments, InvalidGraphOp, InvalidShape, OutputPaddingWarning
from .geometry import (
    Geometry,
    Shape,
    check_rank,
    check_result_rank,
    from_canonical,
    settle_pads,
    solve,
    to_canonical,
)
from .padding import Axis, Pads, library_pads

PLANS_PER_OPERATOR = 256  # compiled descriptors that one operator object keeps
# ConvTranspose is the transposed convolution: its I axis is the O axis of the convolution, and the reverse.
CONVOLUTION_FORMAT = {"XIO": "XIO", "OIX": "OIX", "XOI": "XIO", "IOX": "OIX"}


class Operator:
    """What the six operators share: attributes checked once, shapes solved on demand, plans kept per descriptor."""

    inputs: ClassVar[tuple[str, str]]  # the required inputs, in order
    optional_input: ClassVar[str]  # dst_shape, weights_shape, bias or nothing
    result: ClassVar[str]
    names: ClassVar[dict[str, str]]  # role (small, large, weights) -> this operator's name for the tensor
    wrt: ClassVar[str]  # the question, in the terms of convgrad.Problem
    defaults: ClassVar[dict[str, Any]]
    weights_formats: ClassVar[tuple[str, ...]] = ("XIO", "OIX")
    channel_error: ClassVar[type[InvalidArguments | InvalidShape]] = InvalidArguments  # the library's status

    strides: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]
    dilations: tuple[int, ...]
    auto_pad: str
    groups: int
    data_format: str
    weights_format: str
    _compiled: dict[Any, Compiled]
    _warned: set[str]  # what this object has said already

    def __init_subclass__(cls) -> None:
        keyword = inspect.Parameter.KEYWORD_ONLY
        required = [inspect.Parameter(name, keyword) for name in REQUIRED]
        optional = [inspect.Parameter(name, keyword, default=value) for name, value in cls.defaults.items()]
        cls.__signature__ = inspect.Signature([*required, *optional])  # type: ignore[attr-defined]

    def __init__(self, /, **given: Any) -> None:
        for name, value in checked(self.kind, given, self.defaults, self.weights_formats).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_compiled", {})
        object.__setattr__(self, "_warned", set())

    @property
    def kind(self) -> str:
        """The operator's name in oneDNN Graph."""
        return type(self).__name__

    @property
    def attributes(self) -> dict[str, Any]:
        """Every attribute in its normal form."""
        return {name: getattr(self, name) for name in (*REQUIRED, *self.defaults)}

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self.kind} is immutable: make a new operator to change {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{self.kind} is immutable: {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.attributes == self.attributes

    def __hash__(self) -> int:
        return hash((self.kind, *self.attributes.items()))

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value!r}' for name, value in self.attributes.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (type(self), self.attributes)

    # The four things one may ask. Inputs are positional in oneDNN's order, or named.

    def infer_shape(self, *shapes: Any, **named: Any) -> Shape:
        """Return the shape of the result, in data_format (or weights_format) order, from the shapes of the inputs.

        Parameters
        ----------
        *shapes, **named
            The shapes of the inputs in order, or as `<input>_shape`; the optional dst_shape or weights_shape is the
            value itself.
        """
        geometry = self._geometry(*self._bind(shapes, named, "_shape"))
        return from_canonical(geometry.shapes[self.role_of(self.result)], self.layout_of(self.result))

    def pads(self, *shapes: Any, **named: Any) -> tuple[Shape, Shape]:
        """Return (pads_begin, pads_end) as the attributes and auto_pad settle them; takes what infer_shape takes.

        This is the answer of the rule alone: whether the extents then fit is what infer_shape and compile say.
        """
        first, second, extra = self._bind(shapes, named, "_shape")
        _, pads = settle_pads(self, self._shapes(first, second, None if self.optional_input == "bias" else extra))
        return tuple(begin for begin, _ in pads), tuple(end for _, end in pads)

    def compile(self, *descriptors: Any, backend: str | None = None, num_threads: int | None = None,
                max_scratchpad_bytes: int | None = None, device: str | None = None, **named: Any) -> Compiled:
        """Choose how to execute the operator for given descriptors.

        Parameters
        ----------
        *descriptors, **named
            A LogicalTensor, an array, or a pair (shape, dtype) per input, in order or as `<input>_desc`; the optional
            dst_shape or weights_shape is the value itself.
        backend, num_threads, max_scratchpad_bytes
            As `backend`, `num_threads`, `max_workspace_bytes` of `convgrad.plan`.
        device
            "cpu" or "cuda"; the default is the device of the arrays, or "cpu" for other descriptors.
        """
        first, second, extra = self._bind(descriptors, named, "_desc")
        return self._prepared(first, second, extra, Settings(backend, num_threads, max_scratchpad_bytes,
                                                             device or device_of(first)))

    def __call__(self, *inputs: Any, out: Any = None, **named: Any) -> Any:
        """Execute the operator; the plan is chosen on the first call with these descriptors and reused after.

        Parameters
        ----------
        *inputs, **named
            The input tensors in oneDNN's order, or by name.
        out
            Where to write the result; allocated when absent.
        """
        first, second, extra = self._bind(inputs, named, "") if named or len(inputs) != 2 else (*inputs, None)
        wanted, bias = (None, extra) if self.optional_input == "bias" else (shape_input(self.optional_input, extra),
                                                                            None)
        try:
            key = (first.shape, first.dtype, second.shape, second.dtype, wanted,
                   None if bias is None else (bias.shape, bias.dtype), getattr(first, "device", None))
            compiled = self._compiled.get(key)
        except AttributeError:
            raise InvalidGraphOp(f"{self.kind} takes arrays for {', '.join(self.inputs)}, got "
                                 f"{type(first).__name__} and {type(second).__name__}") from None
        if compiled is None:
            compiled = self._prepared(first, second, wanted if bias is None else bias,
                                      Settings(device=device_of(first)))
            if len(self._compiled) >= PLANS_PER_OPERATOR:
                self._compiled.clear()
            self._compiled[key] = compiled
        return compiled.execute((first, second) if bias is None else (first, second, bias), None, out)

    # How they are answered.

    def _bind(self, given: tuple[Any, ...], named: dict[str, Any], suffix: str) -> tuple[Any, Any, Any]:
        """Return (first, second, optional or None) from positional and named inputs."""
        names = [name + suffix for name in self.inputs]
        if self.optional_input:
            names.append("bias" + suffix if self.optional_input == "bias" else self.optional_input)
        values = dict(zip(names, given))
        for name, value in named.items():
            if name not in names or name in values:
                fault = "given twice" if name in values else "unknown"
                raise InvalidGraphOp(f"{self.kind}: input {name!r} is {fault}; its inputs are {', '.join(names)}")
            values[name] = value
        if len(given) > len(names) or any(values.get(name) is None for name in names[:2]):
            raise InvalidGraphOp(f"{self.kind} takes the inputs {', '.join(names[:2])}"
                                 f"{f' and optionally {names[2]}' if len(names) > 2 else ''}; got "
                                 f"{len(given) + len(named)}")
        return values[names[0]], values[names[1]], values.get(names[2]) if len(names) > 2 else None

    def role_of(self, name: str) -> str:
        return next(role for role, tensor in self.names.items() if tensor == name)

    def layout_of(self, name: str) -> str:
        """The axis order of one tensor, in the terms of a convolution."""
        return CONVOLUTION_FORMAT[self.weights_format] if self.role_of(name) == "weights" else self.data_format

    def _shapes(self, first: Any, second: Any, wanted: Any) -> dict[str, Shape]:
        """The canonical shapes by role, of both inputs and of the result where dst_shape or weights_shape says it."""
        shapes: dict[str, Shape] = {}
        for name, given in zip(self.inputs, (first, second)):
            shape = tensor_shape(f"shape of {name}", given)
            check_rank(name, shape, self.strides)
            shapes[self.role_of(name)] = to_canonical(shape, self.layout_of(name))
        if self.optional_input.endswith("_shape"):
            result = shape_input(self.optional_input, wanted) or getattr(self, self.optional_input)
            if result is not None:
                check_result_rank(self.optional_input, result, self.strides)
                shapes[self.role_of(self.result)] = to_canonical(result, self.layout_of(self.result))
        if "weights" not in shapes:
            raise InvalidShape(f"{self.kind} needs weights_shape, as input or as attribute: strides and pads do not "
                               "determine the extents of the kernel")
        return shapes

    def _geometry(self, first: Any, second: Any, extra: Any) -> Geometry:
        """Solve for the shapes of both inputs and the value of the shape input (or the shape of the bias)."""
        has_bias = self.optional_input == "bias"
        geometry = solve(self, self._shapes(first, second, None if has_bias else extra))
        if has_bias and extra is not None:
            bias = int_list("shape of bias", extra)
            channels = geometry.shapes[self.role_of(self.result)][1]
            if bias != (channels,):
                raise InvalidArguments(f"bias has shape {bias} but {self.result} has {channels} channels")
        return geometry

    def axis_pads(self, index: int, axis: Axis, large: int | None, small: int | None) -> Pads:
        """The pads of one spatial axis; the large extent is known for every operator that does not override this."""
        if self.auto_pad == "none":
            return (self.pads_begin[index], self.pads_end[index])
        assert large is not None
        return library_pads(self.auto_pad, axis, large)

    def _prepared(self, first: Any, second: Any, extra: Any, settings: Settings) -> Compiled:
        """Compile for two tensors and the optional input: a bias, or the value of a shape."""
        tensors = [described(name, tensor) for name, tensor in zip(self.inputs, (first, second))]
        if self.optional_input == "bias" and extra is not None:
            tensors.append(described("bias", extra))
            extra = tensors[2].shape
        geometry = self._geometry(tensors[0].shape, tensors[1].shape, extra)
        compiled = Compiled(self, tensors, geometry, settings)
        self.warn(geometry)
        return compiled

    def warn(self, geometry: Geometry) -> None:
        """Say what a user of this geometry should know; called at every compilation, says it once."""
        for text, category in self.remarks(geometry):
            if text not in self._warned:
                self._warned.add(text)
                warnings.warn(text, category, stacklevel=4)

    def remarks(self, geometry: Geometry) -> Iterator[tuple[str, type[Warning]]]:
        extra = getattr(self, "output_padding", ())
        if any(more >= step for more, step in zip(extra, self.strides)):
            yield (f"output_padding={extra} is not below strides={self.strides}: oneDNN infers the shape and then "
                   "refuses to compute it; here what no tap reaches is 0"), OutputPaddingWarning


def device_of(tensor: Any) -> str:
    """The device of an array, in the planner's words; "cpu" for a descriptor."""
    if isinstance(tensor, tuple):  # a LogicalTensor, or (shape, dtype)
        return "cpu"
    arrays = {"the tensor": tensor}
    try:
        return kind_of(arrays, {}).home(arrays)[0]
    except TypeError as error:
        raise InvalidGraphOp(str(error)) from None


def restored(operator: type[Operator], values: dict[str, Any]) -> Operator:
    return operator(**values)
