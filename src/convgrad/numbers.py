"""The number formats: limits, exact decode, single-rounding encode, and the rounding of operands before products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .problem import DTYPES, Problem

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: `mantissa_bits` stored, smallest normal 2**min_exponent, largest finite `max`."""

    name: str
    mantissa_bits: int
    min_exponent: int
    max: float
    overflow: float = math.inf  # what a rounded value beyond max becomes
    ties: str = "even"

    @property
    def itemsize(self) -> int:
        return DTYPES[self.name][1]

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of one rounding in the normal range."""
        return float(2.0 ** -(self.mantissa_bits + 1))

    @property
    def subnormal_step(self) -> float:
        """Largest distance of neighbouring values below the smallest normal one."""
        return float(2.0 ** (self.min_exponent - self.mantissa_bits))


FORMATS = {f.name: f for f in (
    Format("float64", 52, -1022, float(np.finfo(np.float64).max)),
    Format("float32", 23, -126, float(np.finfo(np.float32).max)),
    Format("bfloat16", 7, -126, float(2.0**127 * (2 - 2.0**-7))),
    Format("float16", 10, -14, 65504.0),
    Format("float8_e4m3fn", 3, -6, 448.0, overflow=math.nan),
    Format("float8_e5m2", 2, -14, 57344.0),
    # HiFloat8 has 3, 2 or 1 mantissa bits by magnitude; mantissa_bits is the guaranteed one, below 2^-15 there is none.
    Format("hifloat8", 1, -15, 32768.0, ties="away"),
)}


@cache
def storage_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype in which values of the format are stored (uint8 for hifloat8)."""
    if name == "hifloat8":
        return np.dtype(np.uint8)
    if name in ("float64", "float32", "float16"):
        return np.dtype(name)
    import ml_dtypes

    stored: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return stored


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Our name for a NumPy dtype (en_dtypes' hifloat8 included), or None; byte-swapped dtypes have none."""
    name = dtype.name
    return name if name in DTYPES and dtype.isnative else None


def hifloat8_value(code: int) -> float:
    """The value of one HiFloat8 code, from its fields: sign, dot prefix, exponent with its sign first, mantissa."""
    if code in (0x00, 0x80, 0x6F, 0xEF):
        return {0x00: 0.0, 0x80: math.nan, 0x6F: math.inf, 0xEF: -math.inf}[code]
    sign = -1.0 if code & 0x80 else 1.0
    fields = ((3, 2, 4), (2, 2, 3), (1, 2, 2), (1, 3, 1), (1, 4, 0), (0, 4, -1))  # dot prefix, its bits, exponent bits
    prefix_bits, exponent_bits = next(
        (bits, exponent) for prefix, bits, exponent in fields if (code & 0x7F) >> (7 - bits) == prefix)
    if exponent_bits < 0:  # denormal: 2^(M-23), no fraction
        return sign * 2.0 ** ((code & 7) - 23)
    mantissa_bits = 7 - prefix_bits - exponent_bits
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    exponent = 0
    if exponent_bits:
        field = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        low_bits = exponent_bits - 1
        exponent = (1 << low_bits) | (field & ((1 << low_bits) - 1))  # the leading 1 of |E| is not stored
        exponent = -exponent if field >> low_bits else exponent
    return float(sign * (1 + mantissa) * 2.0**exponent)


@cache
def hifloat8_tables() -> tuple[Array, Array, Array]:
    """All 256 values by code; the positive finite values in rising order; their codes."""
    values = np.array([hifloat8_value(code) for code in range(256)])
    codes = np.array([c for c in range(128) if 0 < values[c] < math.inf], dtype=np.uint8)
    codes = codes[np.argsort(values[codes])]
    return values, values[codes], codes


def decode(array: Array, name: str) -> Array:
    """Exact values of an array stored in format `name`, as float64."""
    if array.dtype != storage_dtype(name):  # uint8 storage of a float8, or en_dtypes' hifloat8
        array = array.view(storage_dtype(name))
    if name == "hifloat8":
        values: Array = hifloat8_tables()[0][array]
        return values
    with np.errstate(invalid="ignore"):  # signalling NaNs become quiet
        return array.astype(np.float64)


def encode(values: npt.ArrayLike, name: str) -> Array:
    """Round float64 values once to format `name` and return them in its storage dtype."""
    x = np.asarray(values, dtype=np.float64)
    if name == "float64":
        return x
    if name in ("float32", "float16"):
        with np.errstate(over="ignore"):
            return np.asarray(x.astype(name))
    rounded = round_to(x, name)
    if name != "hifloat8":
        # NOTE: ml_dtypes converts float64 through float32, two roundings; after round_to the conversion is exact.
        with np.errstate(over="ignore", invalid="ignore"):
            stored: Array = rounded.astype(np.float32).astype(storage_dtype(name))
            return stored
    _, positive, positive_codes = hifloat8_tables()
    place = np.searchsorted(positive, np.abs(rounded)).clip(max=len(positive) - 1)
    sign = np.where(rounded < 0, 0x80, 0x00)
    codes = np.select([rounded == 0, np.isnan(rounded), np.isinf(rounded)], [0x00, 0x80, sign | 0x6F],
                      sign | positive_codes[place])
    return np.asarray(codes.astype(np.uint8))


def round_to(values: npt.ArrayLike, name: str) -> Array:
    """Float64 values rounded once to the nearest value of format `name`, still as float64."""
    form = FORMATS[name]
    x = np.asarray(values, dtype=np.float64)
    if name == "float64":
        return x
    exponent = np.frexp(x)[1].astype(np.int64) - 1
    if name == "hifloat8":
        size = np.abs(exponent)
        bits = np.select([exponent < -15, size >= 8, size >= 4], [0, 1, 2], 3)
        step = np.maximum(exponent, -22) - bits
    else:
        step = np.maximum(exponent, form.min_exponent) - form.mantissa_bits
    finite = np.isfinite(x)
    scaled = np.ldexp(np.where(finite, x, 0.0), -step)
    if form.ties == "even":
        whole = np.rint(scaled)
    else:
        floor = np.floor(np.abs(scaled))
        whole = np.copysign(floor + (np.abs(scaled) - floor >= 0.5), scaled)
    with np.errstate(over="ignore"):
        rounded = np.where(finite, np.ldexp(whole, step), x)
    beyond = np.abs(rounded) > form.max
    result: Array = np.where(beyond, np.copysign(form.overflow, rounded), rounded)
    return result


# Compute modes that keep the f32 exponent range and some mantissa bits: mode -> (stored mantissa bits, ties).
MANTISSA_MODES = {"tf32": (10, "away"), "hf32": (11, "away"), "hf32_even": (11, "even"),
                  "hf32_10": (10, "away"), "hf32_10_even": (10, "even"), "bf16": (7, "even")}


def round_operand(values: Array, compute: str) -> Array:
    """Round operands (exact values as float64) as the compute mode does before products; NaN and Inf stay."""
    if compute in ("f64", "f32", "fp8"):
        return values
    if compute == "f16":
        return encode(values, "float16").astype(np.float64)
    mantissa_bits, ties = MANTISSA_MODES[compute]
    dropped = 23 - mantissa_bits
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    half = np.uint32(1 << (dropped - 1))
    if ties == "even":
        half = half - np.uint32(1) + ((bits >> np.uint32(dropped)) & np.uint32(1))
    kept = ((bits + half) >> np.uint32(dropped)) << np.uint32(dropped)  # a carry past max finite gives Inf
    rounded: Array = np.where(np.isfinite(values), kept.view(np.float32), values).astype(np.float64)
    return rounded


def sum_error_factor(length: int) -> float:
    """f(L) of the numerical contract: how many unit roundoffs of sum|a*b| a sum of L products may be off.

    It counts the roundings that a term may pass through: in blocks of at most 512 terms, where at most 2*sqrt(L) sums
    of blocks are added in a row, and a few beside these. So it holds for any data.
    """
    return 8.0 + min(length, 512) + 2.0 * math.sqrt(length)


# What sums of FP8 products on tensor cores may lose, of the sum of |a*b|. An instruction adds 32 products to a sum: it
# cuts each of these 33 terms off 13 bits below the largest, and the new sum to 13 bits. Four instructions follow each
# other before their sum is added in float32.
FP8_SUM_ERROR = 4 * 34 * 2.0**-13


def sum_error(problem: Problem, wrt: str, magnitude: Array) -> Array:
    """How far a computed sum may be from the exact one, before the result is rounded to the output format.

    `f(L)*2^-24*magnitude` (2^-53 for float64), plus one smallest normal number of the arithmetic, because the bf16
    instructions of processors flush smaller products to zero. `magnitude` is the sum of |a*b| over the same terms.
    With compute mode fp8 all but the bias gradient may lose FP8_SUM_ERROR more of it.
    """
    wide = problem.dtype == "float64"
    factor = sum_error_factor(problem.conv.reduction_length(wrt)) * (2.0**-53 if wide else 2.0**-24)
    if problem.compute == "fp8" and wrt != "bias":
        factor += FP8_SUM_ERROR
    error: Array = factor * magnitude + np.where(
        magnitude > 0, 2.0**-1022 if wide else 2.0**-126, 0.0)
    return error


def error_bound(problem: Problem, wrt: str, exact: Array, magnitude: Array) -> Array:
    """Largest allowed |result - exact| per element: `u_out*|exact| + f(L)*2^-24*magnitude`, and room for underflow."""
    form = FORMATS[problem.out_dtype]
    bound: Array = (form.unit_roundoff * np.abs(exact)
                    + (1 + form.unit_roundoff) * sum_error(problem, wrt, magnitude) + form.subnormal_step / 2)
    return bound


def allowed_range(problem: Problem, wrt: str, exact: Array, magnitude: Array) -> tuple[Array, Array]:
    """The smallest and largest allowed result: sums within `sum_error` of the exact one, rounded once.

    Every value in this range is within `error_bound`; the range also knows overflow and the formats' finer steps.
    """
    error = sum_error(problem, wrt, magnitude)
    low, high = (round_to(side, problem.out_dtype) for side in (exact - error, exact + error))
    # Beyond the largest value lies NaN in a format without Inf; for comparisons it is Inf again.
    low = np.where(np.isnan(low) & ~np.isnan(exact), np.copysign(np.inf, exact - error), low)
    high = np.where(np.isnan(high) & ~np.isnan(exact), np.copysign(np.inf, exact + error), high)
    return low, high
