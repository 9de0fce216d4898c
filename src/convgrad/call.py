"""From the arguments of a public function to a prepared call: checks, geometry, plan, axis orders."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

from .frontends import Again, Kind, kind_of
from .plan import checked_request, plan
from .problem import SPATIAL_LETTERS, Conv, Plan, Problem, axis_order, checked_int, checked_ints, checked_padding
from .scaled import as_float32

Scales = Mapping[str, Any]
Ints = int | Sequence[int]
Padding = int | str | Sequence[int] | Sequence[tuple[int, int]]


class Options(NamedTuple):
    """The keyword arguments that all public functions share."""

    layout: str | None = None
    weight_layout: str | None = None
    compute: str | None = None
    dtype: str | None = None
    out_dtype: str | None = None
    backend: str | None = None
    num_threads: int | None = None
    max_workspace_bytes: int | None = None
    scaled: bool | None = None  # True: which values the scales have is no part of a plan


@dataclass(slots=True)
class Call:
    """A prepared call: the plan, and how operands and results of the caller map to canonical axis order."""

    kind: Kind
    plan: Plan
    formats: tuple[str, ...]  # of the operands
    operand_orders: tuple[tuple[int, ...] | None, ...]
    result_shapes: tuple[tuple[int, ...], ...]  # in the caller's layout
    result_orders: tuple[tuple[int, ...] | None, ...]
    backend: str | None = None  # the one that was asked for
    again: Again | Literal[False] | None = False  # what `Kind.again` said of it when it had run


CACHE_LIMIT = 4096
DEFAULTS = Options()
OUT_LABELS = ("out (gradient of input)", "out (gradient of weight)", "out (gradient of bias)")
ALL_THREE = (True, True, True)
NO_OUTS: dict[str, Any] = dict.fromkeys(OUT_LABELS)
SAME_NAMES: dict[str, str] = {}  # operands whose public name is not their own; transposed calls exchange two
NOTHING: dict[str, Any] = {}
prepared_calls: dict[Any, Call] = {}


def call_key(function: str, arrays: dict[str, Any], parameters: tuple[Any, ...], options: Options,
             names: dict[str, str] = SAME_NAMES) -> tuple[Kind, Any]:
    """The array kind, and a key that determines everything but the data."""
    kind = kind_of(arrays, names)
    # a default equals nothing but itself, so it needs no exact stand-in
    return kind, (function, kind, kind.signature(arrays), _exact(parameters),
                  None if options == DEFAULTS else _exact(options))


PLAIN = frozenset({int, str, type(None)})
SEQUENCES = frozenset({tuple, list, Options})


def _exact(value: Any) -> Any:
    """A hashable stand-in, equal only for values that mean the same: True == 1.0 == 1, but only 1 is a stride."""
    kind = type(value)
    if kind in SEQUENCES:
        if PLAIN.issuperset(map(type, value)):
            return value if kind is tuple else tuple(value)
        return tuple([item if type(item) in PLAIN else _exact(item) for item in value])
    if kind in PLAIN:
        return value
    if hasattr(value, "tolist") and not isinstance(value, (type, memoryview)):
        return _exact(value.tolist())
    if hasattr(value, "__index__") and not isinstance(value, type):
        return kind, operator.index(value)
    if isinstance(value, Sequence):
        return kind, tuple([_exact(item) for item in value])
    # NOTE: not its repr: two objects at the same address, one after the other, may have the same.
    return object()


def _checked_words(options: Options) -> None:
    """Refuse options that must be strings and are not."""
    for name in ("compute", "dtype", "out_dtype", "backend"):
        value = getattr(options, name)
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} must be a string, got {value!r}")


def _axes(arrays: dict[str, Any], names: dict[str, str]) -> int:
    """Number of spatial axes; all arrays must have the same rank, 3 to 5."""
    ranks = {names.get(name, name): len(array.shape) for name, array in arrays.items()}
    if len(set(ranks.values())) > 1:
        raise ValueError("all arrays must have the same rank: " + ", ".join(f"{n} has {r}" for n, r in ranks.items()))
    name, rank = next(iter(ranks.items()))
    if rank - 2 not in SPATIAL_LETTERS:
        raise ValueError(f"{name} must have 3, 4 or 5 axes (batch, channels, 1 to 3 spatial), got shape "
                         f"{tuple(next(iter(arrays.values())).shape)}")
    return rank - 2


def order_of(name: str, axes: int, options: Options) -> tuple[int, ...]:
    """Position of each canonical axis in the caller's layout of an operand or result."""
    weights = name == "weight"
    layout = options.weight_layout if weights else options.layout
    return axis_order("" if layout is None else layout, axes, weights)


def _canonical_shape(arrays: dict[str, Any], name: str, options: Options) -> tuple[int, ...]:
    shape = arrays[name].shape
    return tuple(shape[place] for place in order_of(name, len(shape) - 2, options))


def _same_padding(padding: str, in_size: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...],
                  dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Pads that give ceil(in/stride) outputs; the odd element goes to the high end for same and same_upper."""
    if padding not in ("valid", "same", "same_upper", "same_lower"):
        raise ValueError(f"padding={padding!r} is none of 'valid', 'same', 'same_upper', 'same_lower'")
    if padding == "same" and any(step != 1 for step in stride):
        raise ValueError(f"padding='same' goes with stride 1, got {stride}: say 'same_upper' or 'same_lower'")
    pairs = []
    for size, k, s, d in zip(in_size, kernel, stride, dilation):
        total = max(0, (-(-size // s) - 1) * s + d * (k - 1) + 1 - size) if padding != "valid" else 0
        low = total - total // 2 if padding == "same_lower" else total // 2
        pairs.append((low, total - low))
    return tuple(pairs)


def geometry_of(arrays: dict[str, Any], options: Options, stride: Ints, padding: Padding, dilation: Ints, groups: int,
              input_size: Ints | None = None, kernel_size: Ints | None = None) -> Conv:
    """The Conv that a call's arrays and parameters describe; checks the arrays against each other."""
    _checked_words(options)
    axes = _axes(arrays, {})
    shapes = {name: _canonical_shape(arrays, name, options) for name in arrays}
    in_size = shapes["input"][2:] if "input" in shapes else checked_ints(input_size, "input_size", axes, 0)
    kernel = shapes["weight"][2:] if "weight" in shapes else checked_ints(kernel_size, "kernel_size", axes, 1)
    strides, dilations = checked_ints(stride, "stride", axes, 1), checked_ints(dilation, "dilation", axes, 1)
    pads = _same_padding(padding, in_size, kernel, strides, dilations) if isinstance(padding, str) \
        else checked_padding(padding, axes)
    groups = checked_int(groups, "groups", 1)
    batch = shapes["input" if "input" in shapes else "grad_output"][0]
    out_channels = shapes["weight" if "weight" in shapes else "grad_output"][int("weight" not in shapes)]
    in_channels = shapes["input"][1] if "input" in shapes else shapes["weight"][1] * groups
    geometry = Conv(batch, in_channels, out_channels, in_size, kernel, strides, dilations, pads, groups)
    for name, shape in shapes.items():
        _check_shape(name, shape, Problem(geometry).shape_of_operand(name), geometry)
    return geometry


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], geometry: Conv) -> None:
    """Name the first axis where an operand does not fit the geometry that the others give."""
    if shape == expected:
        return
    if name == "weight":
        if shape[1] != expected[1]:
            raise ValueError(f"weight has {shape[1]} input channels per group, but in_channels={geometry.in_channels} "
                             f"and groups={geometry.groups} give {expected[1]}")
        raise ValueError(f"weight has shape {shape}, but {expected} is expected")
    if shape[0] != expected[0]:
        raise ValueError(f"{name} has batch {shape[0]}, but the input has batch {expected[0]}")
    if shape[1] != expected[1]:
        raise ValueError(f"{name} has {shape[1]} channels, but the weight has {expected[1]} output channels")
    raise ValueError(
        f"{name} has spatial size {shape[2:]}, but input {geometry.in_size}, kernel {geometry.kernel_size}, "
        f"stride {geometry.stride}, padding {geometry.padding}, dilation {geometry.dilation} give {expected[2:]}")


def transposed_geometry(arrays: dict[str, Any], options: Options, stride: Ints, padding: Padding, dilation: Ints,
                         groups: int, output_padding: Ints) -> Conv:
    """The Conv whose input gradient is this transposed convolution."""
    _checked_words(options)
    names = {"grad_output": "input", "input": "grad_output"}
    axes = _axes(arrays, names)
    batch, channels, *small = _canonical_shape(arrays, "grad_output", options)
    try:
        weight = _canonical_shape(arrays, "weight", options)
    except ValueError:  # say it in the caller's letters
        given, letters = exchanged(options.weight_layout), "IO" + SPATIAL_LETTERS[axes]
        raise ValueError(f"weight_layout={given!r} is not an order of the axes {letters!r} ({axes} spatial)") from None
    strides, dilations = checked_ints(stride, "stride", axes, 1), checked_ints(dilation, "dilation", axes, 1)
    extra = checked_ints(output_padding, "output_padding", axes, 0)
    groups = checked_int(groups, "groups", 1)
    if weight[0] != channels:
        raise ValueError(f"weight has {weight[0]} input channels, but the input has {channels}")
    if channels % groups:
        raise ValueError(f"groups={groups} does not divide in_channels={channels}")
    kernel = weight[2:]
    if isinstance(padding, str) and padding != "valid":
        large = tuple(size * step for size, step in zip(small, strides))
        pads = _same_padding(padding, large, kernel, strides, dilations)
        if any(extra):
            raise ValueError(f"output_padding={extra} does not go with padding={padding!r}, which fixes the size")
    else:
        pads = _same_padding(padding, tuple(small), kernel, strides, dilations) if isinstance(padding, str) \
            else checked_padding(padding, axes)
        large = tuple((size - 1) * step + d * (k - 1) + 1 + more - low - high for size, step, d, k, more, (low, high)
                      in zip(small, strides, dilations, kernel, extra, pads))
    for axis, (more, step) in enumerate(zip(extra, strides)):
        if more >= step:
            raise ValueError(f"output_padding[{axis}]={more} must be less than stride[{axis}]={step}")
    if any(size < 0 for size in large):
        raise ValueError(f"padding {pads} is larger than the output: input size {tuple(small)}, kernel {kernel}, "
                         f"stride {strides}, dilation {dilations} give {large}")
    geometry = Conv(batch, weight[1] * groups, channels, large, kernel, strides, dilations, pads, groups)
    if geometry.out_size != tuple(small):
        raise ValueError(f"input of spatial size {tuple(small)} has no transposed convolution with kernel {kernel}, "
                         f"stride {strides}, padding {pads}")
    if "input" in arrays:
        shape = _canonical_shape(arrays, "input", options)
        if shape != geometry.input_shape:
            raise ValueError(f"grad_output has shape {shape}, but the output of this transposed convolution has "
                             f"{geometry.input_shape} (batch, channels, spatial)")
    return geometry


def reached_part(arrays: dict[str, Any], options: Options, stride: Ints, padding: Padding,
                 output_padding: Ints) -> tuple[Padding, Ints, tuple[int, ...]]:
    """Padding and output_padding of a transposed convolution with output_padding below the stride, and what is left.

    output_padding first takes the place of the padding at the end. What then goes beyond the last tap by a stride or
    more is reached by nothing: those positions per axis are left to the caller, as zeros at the high end.
    """
    names = {"grad_output": "input", "input": "grad_output"}
    axes = _axes(arrays, names)
    extra, steps = checked_ints(output_padding, "output_padding", axes, 0), checked_ints(stride, "stride", axes, 1)
    if all(more < step for more, step in zip(extra, steps)):
        return padding, output_padding, ()
    if isinstance(padding, str) and padding != "valid":
        return padding, output_padding, ()  # refused: the padding fixes the size
    pairs = ((0, 0),) * axes if isinstance(padding, str) else checked_padding(padding, axes)
    beyond = [max(0, more - high) for more, (_, high) in zip(extra, pairs)]
    left = tuple(more if more >= step else 0 for more, step in zip(beyond, steps))
    return (tuple((low, max(0, high - more)) for more, (low, high) in zip(extra, pairs)),
            tuple(more - rest for more, rest in zip(beyond, left)), left)


def without_rest(array: Any, left: tuple[int, ...], options: Options) -> Any:
    """A view of an array of the output's shape without the positions at the high end that nothing reaches."""
    order = order_of("input", len(left), options)
    window: list[slice] = [slice(None)] * array.ndim
    for rest, axis in zip(left, order[2:]):
        window[axis] = slice(max(0, array.shape[axis] - rest))
    return array[tuple(window)]


def with_rest(call: Call, arrays: dict[str, Any], out: Any, left: tuple[int, ...], options: Options,
              prepare_run: Callable[[Any], Callable[[], Sequence[Any]]]) -> Any:
    """Run a transposed convolution into the part of its output that taps reach; the rest of the output is 0."""
    like, out_format = next(iter(arrays.values())), call.plan.problem.out_dtype
    shape = list(call.result_shapes[0])
    for rest, axis in zip(left, order_of("input", len(left), options)[2:]):
        shape[axis] += rest
    if out is None:
        whole = call.kind.empty(tuple(shape), out_format, like)
    else:
        whole = out
        call.kind.check_out(out, tuple(shape), out_format, "out", arrays)
    if out is None and call.kind.recorded(arrays):  # a copy is recorded, a result that is written in place is not
        part = prepare_run(None)()[0]
        whole[...] = 0
        without_rest(whole, left, options)[...] = part
        return whole
    run = prepare_run(without_rest(whole, left, options))
    whole[...] = 0
    run()
    return call.kind.returned(whole, like)


def exchanged(weight_layout: str | None) -> str | None:
    """A transposed convolution's weight layout in the letters of the convolution it transposes: I and O exchanged."""
    return weight_layout.upper().translate(str.maketrans("IO", "OI")) if isinstance(weight_layout, str) \
        else weight_layout


def bias_call(grad_output: Any, options: Options) -> tuple[Call, dict[str, Any]]:
    arrays = {"grad_output": grad_output}
    kind, key = call_key("bias", arrays, (), options)
    call = prepared_calls.get(key)
    if call is None:
        _checked_words(options)
        _axes(arrays, {})
        n, k, *size = _canonical_shape(arrays, "grad_output", options)
        call = prepare(key, kind, "bias", Conv(n, 1, k, tuple(size), (1,) * len(size)), arrays, options)
    return call, arrays


def checked_mask(output_mask: Sequence[bool], out: Sequence[Any] | None) -> tuple[tuple[bool, ...], dict[str, Any]]:
    """The mask as three bools, and the outputs that it asks for by their name in messages."""
    if output_mask is ALL_THREE and out is None:
        return ALL_THREE, NO_OUTS
    if not isinstance(output_mask, Sequence):
        raise TypeError(f"output_mask must have three values (input, weight, bias), got {output_mask!r}")
    if len(output_mask) != 3:
        raise ValueError(f"output_mask must have three values (input, weight, bias), got {len(output_mask)}")
    for wanted in output_mask:
        # True, False and what equals them: 1, 0, NumPy's and torch's
        if isinstance(wanted, (str, bytes)) or wanted is None or wanted not in (True, False):
            raise TypeError(f"output_mask must have three bools (input, weight, bias), got {output_mask!r}")
    mask = tuple([bool(wanted) for wanted in output_mask])
    outs = (None, None, None) if out is None else out
    if not isinstance(outs, (tuple, list)) or len(outs) != 3:
        raise TypeError("out must be three arrays or None: (grad_input, grad_weight, grad_bias)")
    return mask, {label: array for label, array, wanted in zip(OUT_LABELS, outs, mask) if wanted}


def problem_of(kind: Kind, wrt: str, geometry: Conv, arrays: dict[str, Any], options: Options,
               names: dict[str, str] = SAME_NAMES) -> tuple[Problem, dict[str, str]]:
    """The problem that a call asks, and the number formats of its operands."""
    formats = {name: kind.format_of(array, names.get(name, name), options.dtype) for name, array in arrays.items()}
    first_name, first = next(iter(formats.items()))
    for name, found in formats.items():
        if found != first:
            raise TypeError(f"all operands must have one dtype: {names.get(first_name, first_name)} is {first}, "
                            f"{names.get(name, name)} is {found}")
    device, memory_order = kind.home(arrays)
    return Problem(geometry, wrt, first, options.out_dtype or "", options.compute or "",
                   options.layout or memory_order or "", options.weight_layout or "", device,
                   bool(options.scaled)), formats


def nothing_asked(kind: Kind, geometry: Conv, arrays: dict[str, Any], options: Options, workspace: Any,
                  names: dict[str, str] = SAME_NAMES) -> tuple[None, None, None]:
    """The results of a call whose mask asks for none; its arguments are checked all the same."""
    problem_of(kind, "input", geometry, arrays, options, names)
    checked_request(options.backend, options.max_workspace_bytes, options.num_threads)
    if workspace is not None:
        kind.check_workspace(workspace, 0, {names.get(name, name): array for name, array in arrays.items()})
    return None, None, None


def prepare(key: Any, kind: Kind, wrt: str, geometry: Conv, arrays: dict[str, Any], options: Options,
             names: dict[str, str] = SAME_NAMES) -> Call:
    """Plan a call and remember it under `key`."""
    problem, formats = problem_of(kind, wrt, geometry, arrays, options, names)
    threads = kind.threads() if options.num_threads is None and problem.device == "cpu" else options.num_threads
    chosen = plan(problem, backend=options.backend, max_workspace_bytes=options.max_workspace_bytes,
                  num_threads=threads)
    axes = geometry.axes
    orders = [order_of(name, axes, options) for name in problem.operands]
    shapes, result_orders = [], []
    for result in problem.results:
        shape = geometry.shape_of(result)
        order = None if result == "bias" else order_of("weight" if result == "weight" else "input", axes, options)
        shapes.append(shape if order is None else tuple(shape[order.index(place)] for place in range(len(shape))))
        result_orders.append(None if order is None or order == tuple(sorted(order)) else order)
    call = Call(kind, chosen, tuple(formats[name] for name in problem.operands),
                tuple(None if order == tuple(sorted(order)) else order for order in orders),
                tuple(shapes), tuple(result_orders), options.backend)
    if len(prepared_calls) >= CACHE_LIMIT:
        prepared_calls.clear()
    prepared_calls[key] = call
    return call


def checked_scales(scales: Scales | None, tensors: str, kind: Kind, like: Any) -> dict[str, Any]:
    """The scale of every named tensor: a float, 1.0 where none is given, or an array that only a GPU can read."""
    if scales is None:
        return NOTHING
    if not isinstance(scales, Mapping):
        raise TypeError(f"scales must be a dict of numbers by tensor ({tensors}), got {scales!r}")
    found: dict[str, Any] = dict.fromkeys(tensors.split(", "), 1.0)
    arrays = {}
    for name, scale in scales.items():
        if name not in found:
            raise ValueError(f"scales[{name!r}]: the tensors of this call are {tensors}")
        if isinstance(scale, Real) and not isinstance(scale, bool):
            found[name] = _checked_number(scale, name)
            continue
        one = hasattr(scale, "dtype") and str(scale.dtype).endswith("float32") and math.prod(scale.shape) == 1
        if not one:
            shown = f"{scale.dtype} of shape {tuple(scale.shape)}" if hasattr(scale, "dtype") else repr(scale)
            raise TypeError(f"scales[{name!r}] must be a number, or a float32 array of one element where the operands "
                            f"are, got {shown}")
        arrays[name] = scale
    if arrays:
        together = {"the first operand": like, **{f"scales[{name!r}]": scale for name, scale in arrays.items()}}
        kind_of(together, SAME_NAMES)  # one kind
        kind.home(together)  # one device
    for name, scale in arrays.items():
        view = kind.operand(scale, f"scales[{name!r}]", None, "float32")
        # one on a GPU is not read: that would have to wait for what computes it
        found[name] = _checked_number(view.item(), name) if hasattr(view, "ctypes") else view
    return found


def _checked_number(scale: Any, name: str) -> float:
    value = as_float32(scale)
    if not 0 < value < math.inf:
        raise ValueError(f"scales[{name!r}] must be positive and finite as a float32, got {scale!r}")
    return value
