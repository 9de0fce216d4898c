"""What to compute: Conv (geometry), Problem (geometry + question + number formats), Plan (a chosen way).

Standard library only. Per axis, output o, tap k and input i are linked by `i = o*stride + k*dilation - pad_low`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

SPATIAL_LETTERS = {1: "L", 2: "HW", 3: "DHW"}
# Letters that mean the same axis in a 1-D layout: time is length, B is batch ("TBC").
SYNONYMS = {"T": "L", "B": "N"}

# What may be asked for, in the order in which results of one call are returned.
WRT = ("output", "input", "weight", "bias")
RESULT_NAMES = {"output": "conv", "input": "input_grad", "weight": "weight_grad", "bias": "bias_grad"}
SCALED_RESULTS = {**RESULT_NAMES, "output": "output"}  # what scales call the results
WRT_OF_RESULT = {name: wrt for wrt, name in RESULT_NAMES.items()}
OPERANDS = {"output": ("input", "weight"), "input": ("grad_output", "weight"),
            "weight": ("grad_output", "input"), "bias": ("grad_output",)}

# Number formats: full name -> (short name, bytes). numbers.py holds their arithmetic.
DTYPES = {
    "float64": ("f64", 8), "float32": ("f32", 4), "bfloat16": ("bf16", 2), "float16": ("f16", 2),
    "float8_e4m3fn": ("e4m3", 1), "float8_e5m2": ("e5m2", 1), "hifloat8": ("hif8", 1),
}
LONG_DTYPE = {short: name for name, (short, _) in DTYPES.items()} | {name: name for name in DTYPES}
# Rounding of the operands before they are multiplied; numbers.round_operand defines each. `fp8` rounds nothing: it
# allows sums of FP8 products a wider error (numbers.sum_error), as the tensor cores of GPUs make it.
COMPUTE_MODES = ("f64", "f32", "tf32", "hf32", "hf32_even", "hf32_10", "hf32_10_even", "bf16", "f16", "fp8")

NO_NUMBERS = (str, bytes, bytearray, memoryview, type)  # though they look like sequences or have an __index__
LIMIT = 2**62  # extents and offsets are signed 64-bit; this leaves room for products with a stride


class Unsupported(Exception):
    """A valid problem that no backend (or not the one asked for) can run; `reasons` maps backend to why."""

    def __init__(self, message: str, reasons: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = reasons or {}


def checked_int(value: object, name: str, minimum: int) -> int:
    """Return `value` as an int >= minimum, or raise an error that names the argument."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r} (bool)")
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if number > LIMIT:
        raise ValueError(f"{name} must be at most 2^62, got {number}")
    return number


def checked_ints(values: object, name: str, axes: int, minimum: int) -> tuple[int, ...]:
    """Return one int per spatial axis from an int or a sequence."""
    if isinstance(values, NO_NUMBERS) or not (hasattr(values, "__index__") or isinstance(values, Sequence)
                                                or hasattr(values, "tolist")):
        raise TypeError(f"{name} must be an integer or one integer per axis, got {values!r}")
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence):
        return (checked_int(values, name, minimum),) * axes
    if len(values) != axes:
        raise ValueError(f"{name} must have one value per spatial axis ({axes}), got {len(values)}: {tuple(values)}")
    return tuple(checked_int(value, f"{name}[{axis}]", minimum) for axis, value in enumerate(values))


def axis_order(layout: str, axes: int, weights: bool = False) -> tuple[int, ...]:
    """Return for each canonical axis (N C spatial, or O I spatial) its position in `layout` ("" is canonical)."""
    what = "weight_layout" if weights else "layout"
    canonical = ("OI" if weights else "NC") + SPATIAL_LETTERS[axes]
    if not isinstance(layout, str):
        raise TypeError(f"{what} must be a string such as {canonical!r}, got {layout!r}")
    letters = layout.upper() or canonical
    if axes == 1:
        letters = "".join(SYNONYMS.get(letter, letter) for letter in letters)
    if sorted(letters) != sorted(canonical):
        raise ValueError(f"{what}={layout!r} is not an order of the axes {canonical!r} ({axes} spatial)")
    return tuple(letters.index(letter) for letter in canonical)


@dataclass(frozen=True)
class Conv:
    """The geometry of a convolution: 1, 2 or 3 spatial axes, 64-bit extents, (low, high) padding per axis."""

    batch: int
    in_channels: int
    out_channels: int
    in_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    groups: int = 1

    def __post_init__(self) -> None:
        axes = len(self.in_size) if isinstance(self.in_size, Sequence) else 0
        if axes not in SPATIAL_LETTERS:
            raise ValueError(f"in_size must have 1, 2 or 3 spatial axes, got {self.in_size!r}")
        put = object.__setattr__
        for name in ("batch", "in_channels", "out_channels"):
            put(self, name, checked_int(getattr(self, name), name, 0))
        put(self, "groups", checked_int(self.groups, "groups", 1))
        put(self, "in_size", checked_ints(self.in_size, "in_size", axes, 0))
        put(self, "kernel_size", checked_ints(self.kernel_size, "kernel_size", axes, 1))
        put(self, "stride", checked_ints(1 if self.stride == () else self.stride, "stride", axes, 1))
        put(self, "dilation", checked_ints(1 if self.dilation == () else self.dilation, "dilation", axes, 1))
        put(self, "padding", checked_padding(0 if self.padding == () else self.padding, axes))
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) % self.groups:
                raise ValueError(f"groups={self.groups} does not divide {name}={getattr(self, name)}")
        for shape, what in ((self.input_shape, "input"), (self.weight_shape, "weight"), (self.output_shape, "output")):
            if math.prod(shape) > LIMIT // 8:
                raise ValueError(f"the {what} of shape {shape} has more than 2^59 elements")

    @property
    def axes(self) -> int:
        return len(self.in_size)

    @cached_property
    def out_size(self) -> tuple[int, ...]:
        """Output extents; 0 where the padded input is smaller than the spread kernel."""
        return tuple(
            max(0, (size + low + high - span) // stride + 1)
            for size, (low, high), span, stride in zip(self.in_size, self.padding, self.span, self.stride))

    @property
    def span(self) -> tuple[int, ...]:
        """Extent of the kernel with its dilation: dilation * (kernel - 1) + 1."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel_size, self.dilation))

    @property
    def group_in(self) -> int:
        return self.in_channels // self.groups

    @property
    def group_out(self) -> int:
        return self.out_channels // self.groups

    @property
    def taps(self) -> int:
        return math.prod(self.kernel_size)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.in_channels, *self.in_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.group_in, *self.kernel_size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.batch, self.out_channels, *self.out_size)

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.group_in == 1

    def shape_of(self, wrt: str) -> tuple[int, ...]:
        """Canonical shape of the result with respect to `wrt`."""
        return {"output": self.output_shape, "input": self.input_shape, "weight": self.weight_shape,
                "bias": (self.out_channels,)}[wrt]

    def tap_range(self, axis: int, k: int) -> tuple[int, int]:
        """The half-open range of outputs o of one axis whose input i = o*stride + k*dilation - low lies inside."""
        stride, out = self.stride[axis], self.out_size[axis]
        shift = k * self.dilation[axis] - self.padding[axis][0]
        first = min(max(0, -(shift // stride)), out)
        last = min(max(first, (self.in_size[axis] - 1 - shift) // stride + 1), out)
        return first, last

    def landing_taps(self) -> int:
        """Number of (output, tap) pairs that land inside the input, over all axes."""
        total = 1
        taps, outputs = zip(self.kernel_size, self.dilation), zip(self.out_size, self.stride)
        for size, (low, _), *both in zip(self.in_size, self.padding, taps, outputs):
            (few, step), (many, other) = sorted(both)  # for each of the fewer, the others
            total *= sum(max(0, min(many, -(-(low + size - i * step) // other)) - max(0, -(-(low - i * step) // other)))
                         for i in range(few))
        return total

    def flops(self, wrt: str) -> int:
        """Multiply-adds times two that the result needs; taps that fall in padding are not counted."""
        if wrt == "bias":
            return math.prod(self.output_shape)
        return 2 * self.batch * self.out_channels * self.group_in * self.landing_taps()

    def reduction_length(self, wrt: str) -> int:
        """Largest number of terms in one sum: the L of the error bound."""
        if wrt == "output":
            return max(1, self.group_in * self.taps)
        if wrt == "input":
            reach = math.prod(-(-k // (s // math.gcd(s, d)))
                              for k, s, d in zip(self.kernel_size, self.stride, self.dilation))
            return max(1, self.group_out * reach)
        return max(1, self.batch * math.prod(self.out_size))


def checked_padding(padding: object, axes: int) -> tuple[tuple[int, int], ...]:
    """Return (low, high) per axis from an int, one int per axis, or one pair per axis."""
    if not isinstance(padding, NO_NUMBERS):
        padding = padding.tolist() if hasattr(padding, "tolist") else padding
        if hasattr(padding, "__index__"):
            return tuple((p, p) for p in checked_ints(padding, "padding", axes, 0))
    if not isinstance(padding, Sequence) or isinstance(padding, NO_NUMBERS):
        raise TypeError("padding must be an integer, one integer or one (low, high) pair per axis, or a word, "
                        f"got {padding!r}")
    if len(padding) != axes:
        raise ValueError(f"padding must have one value or one (low, high) pair per spatial axis ({axes}), "
                         f"got {len(padding)}: {tuple(padding)}")
    pairs = []
    for axis, item in enumerate(padding):
        if isinstance(item, Sequence) and not isinstance(item, NO_NUMBERS):
            if len(item) != 2:
                raise ValueError(f"padding[{axis}] must be (low, high), got {tuple(item)}")
            low, high = item
        else:
            low = high = item
        pairs.append((checked_int(low, f"padding[{axis}]", 0), checked_int(high, f"padding[{axis}]", 0)))
    return tuple(pairs)


@dataclass(frozen=True)
class Problem:
    """One question about one Conv: what (`wrt`), in which number formats, compute mode, layouts, on which device.

    `wrt` is one of WRT, or several of input, weight, bias joined by "+" in that order (one pass, several results).
    """

    conv: Conv
    wrt: str = "input"
    dtype: str = "float32"
    out_dtype: str = ""
    compute: str = ""
    layout: str = ""
    weight_layout: str = ""
    device: str = "cpu"
    scaled: bool = False  # every tensor has a scale: the numbers it stands for are those stored times the scale
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        if not isinstance(self.conv, Conv):
            raise TypeError(f"conv must be a Conv, got {type(self.conv).__name__}")
        parts = self.wrt.split("+") if isinstance(self.wrt, str) else [self.wrt]
        if any(part not in WRT for part in parts):
            raise ValueError(f"wrt={self.wrt!r} is none of {', '.join(WRT)} (or input, weight, bias joined by '+')")
        if len(parts) > 1 and ("output" in parts or parts != [w for w in WRT if w in parts]):
            raise ValueError(f"wrt={self.wrt!r}: several results are asked as input+weight+bias, in that order")
        put(self, "dtype", checked_dtype(self.dtype, "dtype"))
        narrow = DTYPES[self.dtype][1] == 1
        put(self, "out_dtype", checked_dtype(self.out_dtype or ("float32" if narrow else self.dtype), "out_dtype"))
        put(self, "compute", checked_compute(self.compute, self.dtype))
        axes = self.conv.axes
        axis_order(self.layout, axes)
        axis_order(self.weight_layout, axes, weights=True)
        put(self, "layout", (self.layout or "NC" + SPATIAL_LETTERS[axes]).upper())
        put(self, "weight_layout", (self.weight_layout or "OI" + SPATIAL_LETTERS[axes]).upper())
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} is neither 'cpu' nor 'cuda'")
        put(self, "_hash", hash(tuple(getattr(self, f.name) for f in fields(self) if f.compare)))

    def __hash__(self) -> int:  # computed once: a Problem is the key of the plan cache
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:  # string hashes differ between processes: a pickle must not keep ours
        return parse_problem, (str(self),)

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The asked results, in the order in which `Plan.run` takes their outputs."""
        return tuple(self.wrt.split("+"))

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands in the order in which `Plan.run` takes them: grad_output, input, weight."""
        needed = {name for wrt in self.results for name in OPERANDS[wrt]}
        return tuple(name for name in ("grad_output", "input", "weight") if name in needed)

    @cached_property
    def scales(self) -> tuple[str, ...]:
        """Names of the scales that follow the operands in `Plan.run`: one for each operand, one for each result."""
        tensors = (*self.operands, *(SCALED_RESULTS[wrt] for wrt in self.results)) if self.scaled else ()
        return tuple(f"{name}_scale" for name in tensors)

    def shape_of_operand(self, name: str) -> tuple[int, ...]:
        return {"grad_output": self.conv.output_shape, "input": self.conv.input_shape,
                "weight": self.conv.weight_shape}[name]

    @property
    def flops(self) -> int:
        return sum(self.conv.flops(wrt) for wrt in self.results)

    @property
    def min_bytes(self) -> int:
        """Fewest bytes to move: every operand read once, every result written once."""
        read = sum(math.prod(self.shape_of_operand(name)) for name in self.operands) * DTYPES[self.dtype][1]
        written = sum(math.prod(self.conv.shape_of(wrt)) for wrt in self.results) * DTYPES[self.out_dtype][1]
        return read + written

    def with_(self, **changes: Any) -> Problem:
        return replace(self, **changes)

    def __str__(self) -> str:
        c = self.conv
        dtype, out = DTYPES[self.dtype][0], DTYPES[self.out_dtype][0]
        words = ["+".join(RESULT_NAMES[wrt] for wrt in self.results), dtype if dtype == out else f"{dtype}>{out}"]
        words += [f"n{c.batch}", f"c{c.in_channels}", f"k{c.out_channels}", "i" + crossed(c.in_size),
                  "w" + crossed(c.kernel_size)]
        words += ["s" + crossed(c.stride)] if set(c.stride) != {1} else []
        words += ["p" + crossed(f"{low}:{high}" if low != high else low for low, high in c.padding)] \
            if any(low or high for low, high in c.padding) else []
        words += ["d" + crossed(c.dilation)] if set(c.dilation) != {1} else []
        words += [f"g{c.groups}"] if c.groups != 1 else []
        words += [self.compute] if self.compute != default_compute(self.dtype) else []
        words += [self.layout] if self.layout != "NC" + SPATIAL_LETTERS[c.axes] else []
        words += [self.weight_layout] if self.weight_layout != "OI" + SPATIAL_LETTERS[c.axes] else []
        words += [self.device] if self.device != "cpu" else []
        words += ["scaled"] if self.scaled else []
        return " ".join(words)

    @staticmethod
    def parse(text: str) -> Problem:
        """Read a problem string such as `input_grad f32 n8 c64 k64 i56x56 w3x3 s2x2 p1x1` (see `str(problem)`).

        One number format means operands and result, two as in `bf16>f32` mean operands and result.
        """
        return parse_problem(text)


def crossed(values: Any) -> str:
    return "x".join(str(value) for value in values)


def default_compute(dtype: str) -> str:
    return "f64" if dtype == "float64" else "f32"


def checked_dtype(dtype: str, name: str) -> str:
    if not isinstance(dtype, str) or dtype not in LONG_DTYPE:
        raise TypeError(f"{name}={dtype!r} is none of {', '.join(DTYPES)}")
    return LONG_DTYPE[dtype]


def checked_compute(compute: str | None, dtype: str) -> str:
    compute = default_compute(dtype) if compute is None or compute == "" else compute
    if not isinstance(compute, str) or compute not in COMPUTE_MODES:
        raise ValueError(f"compute={compute!r} is none of {', '.join(COMPUTE_MODES)}")
    if (compute == "f64") != (dtype == "float64"):
        raise ValueError(f"compute={compute!r} does not go with {dtype} operands: float64 data is computed in f64, "
                         "all other data in f32 or less")
    if compute == "fp8" and not dtype.startswith("float8"):
        raise ValueError(f"compute='fp8' does not go with {dtype} operands: it takes float8_e4m3fn or float8_e5m2 as "
                         "it is and rounds nothing to it")
    return compute


WORD = re.compile(r"(?P<key>[ncg]|[kiwspd])(?P<value>[0-9][0-9x:]*)$")


def parse_problem(text: str) -> Problem:
    if not isinstance(text, str):
        raise TypeError(f"a problem must be a Problem or a problem string, got {type(text).__name__}")
    words = text.split()
    if len(words) < 2:
        raise ValueError(f"problem string {text!r}: expected '<result> <dtype> n… c… k… i… w…'")
    results = words[0].split("+")
    for result in results:
        if result not in WRT_OF_RESULT:
            raise ValueError(f"problem string {text!r}: {result!r} is none of {', '.join(WRT_OF_RESULT)}")
    dtype, arrow, out_dtype = words[1].partition(">")
    for name in (dtype, out_dtype) if arrow else (dtype,):
        if name not in LONG_DTYPE:
            raise ValueError(f"problem string {text!r}: {name!r} is none of {', '.join(s for s, _ in DTYPES.values())}")
    sizes: dict[str, str] = {}
    extra: dict[str, Any] = {}
    for word in words[2:]:
        match = WORD.match(word)
        if match:
            name, value, target = match["key"], match["value"], sizes
        else:
            name = ("device" if word in ("cpu", "cuda") else "compute" if word in COMPUTE_MODES else
                    word if word == "scaled" else "weight_layout" if set(word.upper()) <= set("OILHWDT") else "layout")
            if name == "layout" and not set(word.upper()) <= set("NCLHWDTB"):
                raise ValueError(f"problem string {text!r}: cannot read the word {word!r}")
            value, target = word, extra
        if name in target:
            raise ValueError(f"problem string {text!r}: {name!r} is given twice ({target[name]!r} and {value!r})")
        target[name] = value
    missing = [key for key in "nckiw" if key not in sizes]
    if missing:
        raise ValueError(f"problem string {text!r}: {', '.join(missing)} missing")
    axes = sizes["i"].count("x") + 1

    def ints(key: str) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in sizes[key].split("x")) if key in sizes else ()
        except ValueError:
            raise ValueError(f"problem string {text!r}: {key}{sizes[key]} is not a list of numbers") from None

    def pads() -> tuple[tuple[int, int], ...]:
        if "p" not in sizes:
            return ((0, 0),) * axes
        pairs = [part.split(":") for part in sizes["p"].split("x")]
        if any(len(pair) > 2 or "" in pair for pair in pairs):
            raise ValueError(f"problem string {text!r}: p{sizes['p']} is not a list of pads or low:high pairs")
        return tuple((int(pair[0]), int(pair[-1])) for pair in pairs)

    def one(key: str, default: str) -> int:
        value = sizes.get(key, default)
        if not value.isdecimal():
            raise ValueError(f"problem string {text!r}: {key}{value} is not one number")
        return int(value)

    conv = Conv(one("n", ""), one("c", ""), one("k", ""), ints("i"), ints("w"), ints("s"), ints("d"), pads(),
                one("g", "1"))
    return Problem(conv, "+".join(WRT_OF_RESULT[result] for result in results), dtype, out_dtype or dtype,
                   **{**extra, "scaled": "scaled" in extra})


# Plan.run: (operands, results, workspace). Arrays are views in canonical axis order (N C spatial / O I spatial / K),
# NumPy on the CPU and torch on CUDA; their strides say where the elements lie. After the operands of a scaled problem
# come its scales: Python floats, or float32 tensors of one element on CUDA.
Runner = Callable[[tuple[Any, ...], tuple[Any, ...], Any], None]


class Plan(NamedTuple):
    """A chosen way to solve a Problem. `run(operands, results, workspace)` executes it."""

    problem: Problem
    backend: str
    kernel: str
    run: Runner
    workspace_bytes: int = 0
    notes: tuple[str, ...] = ()  # the printable decision: cost model, tiles, chunks
    refusals: tuple[tuple[str, str], ...] = ()  # (backend, why not) for every backend asked before this one
    # (strides of operands and results in elements and canonical order, GPU) -> a plan.Prepared, or None: there is none.
    prepared: Callable[..., Any] = lambda strides, device=0: None
    numbers: tuple[int, ...] = ()  # of a native plan, for compiled programs: native/plan_numbers.h
