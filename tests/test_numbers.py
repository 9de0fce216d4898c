"""Number formats: every HiFloat8 code, every rounding probe, HF32 vectors, overflow, and single rounding everywhere."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import problems

from convgrad import Problem
from convgrad.numbers import (
    FORMATS,
    MANTISSA_MODES,
    allowed_range,
    decode,
    dtype_name,
    encode,
    error_bound,
    hifloat8_value,
    round_operand,
    round_to,
    storage_dtype,
    sum_error,
)
from convgrad.problem import DTYPES
from convgrad.verify import exact_results, magnitudes, real_operands

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open() as file:
        return list(csv.DictReader(file))


def bits_of(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# --- HiFloat8 -------------------------------------------------------------------------------------------------------

def test_all_256_hifloat8_codes() -> None:
    table = rows("hifloat8_values.csv")
    assert len(table) == 256
    for row in table:
        assert np.array_equal(hifloat8_value(int(row["code"])), float(row["value"]), equal_nan=True), row


def test_all_513_hifloat8_roundings() -> None:
    probes = rows("hifloat8_rounding.csv")
    assert len(probes) == 513
    values = np.array([int(row["f32_bits"], 16) for row in probes], np.uint32).view(np.float32)
    assert encode(values.astype(np.float64), "hifloat8").tolist() == [int(row["code"]) for row in probes]


def test_hifloat8_codes_round_trip() -> None:
    codes = np.arange(256, dtype=np.uint8)
    assert np.array_equal(encode(decode(codes, "hifloat8"), "hifloat8"), codes)


def test_hifloat8_of_en_dtypes_is_the_same_format() -> None:
    en_dtypes = pytest.importorskip("en_dtypes")
    theirs = np.dtype(en_dtypes.hifloat8)
    assert dtype_name(theirs) == "hifloat8"
    codes = np.arange(256, dtype=np.uint8)
    assert np.array_equal(decode(codes.view(theirs), "hifloat8"), codes.view(theirs).astype(np.float64), equal_nan=True)
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * 2.0 ** np.arange(-24, 40).repeat(64)
    assert np.array_equal(encode(values, "hifloat8"), values.astype(np.float32).astype(theirs).view(np.uint8))


@pytest.mark.parametrize("value, code", [(0.0, 0x00), (-0.0, 0x00), (math.inf, 0x6F), (-math.inf, 0xEF),
                                         (math.nan, 0x80), (40960.0, 0x6F), (40959.9, 0x6E), (2.0**-23, 0x01),
                                         (-(2.0**-23), 0x81), (2.0**-23 * 0.999, 0x00), (-1e-30, 0x00), (1e300, 0x6F)])
def test_hifloat8_edges(value: float, code: int) -> None:
    assert int(encode(value, "hifloat8")) == code


# --- HF32, TF32, bf16 and f16 operands --------------------------------------------------------------------------------

HF32_VECTORS = [  # mode, f32 bits before, f32 bits after
    ("hf32", 0x3F800800, 0x3F801000), ("hf32", 0x3F801800, 0x3F802000), ("hf32", 0x3F800400, 0x3F800000),
    ("hf32", 0xBF800800, 0xBF801000), ("hf32", 0x7F7FFFFF, 0x7F800000), ("hf32", 0x00000001, 0x00000000),
    ("hf32_10", 0x3F800800, 0x3F800000), ("hf32_10", 0x3F801000, 0x3F802000),
    ("hf32_even", 0x3F800800, 0x3F800000), ("hf32_even", 0x3F801800, 0x3F802000),
    ("hf32_10_even", 0x3F801000, 0x3F800000), ("hf32_10_even", 0x3F803000, 0x3F804000),
    ("tf32", 0x3F801000, 0x3F802000), ("bf16", 0x3F808000, 0x3F800000), ("bf16", 0x3F818000, 0x3F820000),
    ("hf32", 0x7F800000, 0x7F800000), ("hf32", 0xFF800000, 0xFF800000), ("bf16", 0x80000000, 0x80000000),
]


@pytest.mark.parametrize("mode, before, after", HF32_VECTORS)
def test_operand_rounding_vectors(mode: str, before: int, after: int) -> None:
    value = np.array([before], np.uint32).view(np.float32).astype(np.float64)
    assert round_operand(value, mode).astype(np.float32).view(np.uint32)[0] == after


@pytest.mark.parametrize("mode", [*MANTISSA_MODES, "f16", "f32"])
def test_nan_stays_nan_in_every_mode(mode: str) -> None:
    nans = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32).astype(np.float64)
    assert np.isnan(round_operand(nans, mode)).all()


def test_bf16_and_f16_operands_are_those_of_the_storage_formats() -> None:
    values = np.random.default_rng(1).standard_normal(5000).astype(np.float32) * 2.0 ** np.arange(-25, 25).repeat(100)
    values = values.astype(np.float32)
    assert np.array_equal(round_operand(values.astype(np.float64), "bf16"),
                          values.astype(ml_dtypes.bfloat16).astype(np.float64))
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16).astype(np.float64)
    assert np.array_equal(round_operand(values.astype(np.float64), "f16"), halves)


# --- storage formats --------------------------------------------------------------------------------------------------

def test_the_table_of_formats_agrees_with_ml_dtypes() -> None:
    for name, form in FORMATS.items():
        if name != "hifloat8":
            info = ml_dtypes.finfo(storage_dtype(name))
            assert (form.mantissa_bits, form.max, 2.0**form.min_exponent) == (
                info.nmant, float(info.max), float(info.smallest_normal)), name
            assert form.subnormal_step == float(info.smallest_subnormal)
        assert form.itemsize == storage_dtype(name).itemsize == DTYPES[name][1]


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_every_code_round_trips_and_every_midpoint_rounds_to_even(name: str) -> None:
    dtype = storage_dtype(name)
    codes = np.arange(2 ** (8 * dtype.itemsize), dtype=np.uint8 if dtype.itemsize == 1 else np.uint16)
    values = decode(codes.view(dtype), name)
    finite = np.isfinite(values)
    assert np.array_equal(encode(values[finite], name).view(codes.dtype), codes[finite])
    positive = codes[finite & (values >= 0) & (codes < codes.size // 2)]
    rising = decode(positive.view(dtype), name)
    middle = (rising[:-1] + rising[1:]) / 2  # exact in float64
    even = np.where(positive[:-1] % 2 == 0, positive[:-1], positive[1:])
    # A hair above or below the midpoint: float32 cannot hold it, so a double rounding would go wrong here.
    hair = middle * 2.0**-45
    for shift, expected in ((0.0, even), (-1.0, positive[:-1]), (1.0, positive[1:])):
        assert np.array_equal(encode(middle + shift * hair, name).view(codes.dtype), expected)


OVERFLOWS = [("float8_e4m3fn", 464.0, 448.0), ("float8_e4m3fn", 465.0, math.nan), ("float8_e4m3fn", 1e9, math.nan),
             ("float8_e4m3fn", -math.inf, math.nan), ("float8_e5m2", 61439.0, 57344.0),
             ("float8_e5m2", 61440.0, math.inf), ("float8_e5m2", -1e9, -math.inf), ("float16", 65519.0, 65504.0),
             ("float16", 65520.0, math.inf), ("bfloat16", 3.3962e38, math.inf), ("hifloat8", -5e4, -math.inf),
             ("float32", 1e39, math.inf), ("float32", math.nan, math.nan)]


@pytest.mark.parametrize("name, value, expected", OVERFLOWS)
def test_overflow(name: str, value: float, expected: float) -> None:
    assert np.array_equal(decode(encode([value], name), name)[0], expected, equal_nan=True)
    assert np.array_equal(round_to(value, name), expected, equal_nan=True)


@given(values=st.lists(st.floats(allow_nan=False), min_size=1, max_size=40), name=st.sampled_from(list(FORMATS)))
@settings(max_examples=300, deadline=None)
def test_rounding_is_nearest_and_monotone(values: list[float], name: str) -> None:
    rising = np.sort(np.array(values))
    rounded = round_to(rising, name)
    assert np.array_equal(decode(encode(rising, name), name), rounded, equal_nan=True)
    order = rounded[~np.isnan(rounded)]
    assert np.all(order[1:] >= order[:-1])
    form = FORMATS[name]
    inside = np.isfinite(rounded) & np.isfinite(rising)
    error = np.abs(rounded[inside] - rising[inside])
    assert np.all(error <= form.unit_roundoff * np.abs(rising[inside]) + form.subnormal_step / 2)


# --- the bound --------------------------------------------------------------------------------------------------------

@given(problem=problems(modes=False))
@settings(max_examples=60, deadline=None)
def test_the_allowed_range_lies_within_the_stated_bound(problem: Problem) -> None:
    operands = real_operands(problem)
    for wrt, exact, size in zip(problem.results, exact_results(problem, operands), magnitudes(problem, operands),
                                strict=True):
        low, high = allowed_range(problem, wrt, exact, size)
        bound = error_bound(problem, wrt, exact, size)
        assert np.all(low <= high)
        assert np.all((exact - low <= bound) | ~np.isfinite(low))
        assert np.all((high - exact <= bound) | ~np.isfinite(high))
        assert np.all(low[size == 0] == 0) and np.all(high[size == 0] == 0)


def sums_of_tensor_cores(products: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows of FP8 products summed as Hopper's tensor cores do: 32 at a time beside the sum so far, with 13 bits."""
    total = np.zeros(len(products))
    for part in np.split(products, products.shape[1] // 128, axis=1):
        acc = np.zeros(len(products))
        for few in np.split(part, 4, axis=1):
            acc = cut(np.concatenate([acc[:, None], few], axis=1)).sum(axis=1)
            acc = cut(acc[:, None])[:, 0]
        total = (total + acc).astype(np.float32).astype(np.float64)
    return total


def cut(terms: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Terms of a row cut off 13 bits below its largest one."""
    step = np.exp2(np.floor(np.log2(np.abs(terms).max(axis=1, keepdims=True, initial=1e-300))) - 13)
    return np.asarray(np.trunc(terms / step) * step)


@pytest.mark.parametrize("data", ["normal", "positive", "one large"])
def test_sums_of_tensor_cores_are_within_the_error_of_fp8_but_not_of_f32(data: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    a, b = random.standard_normal((2, 500, 1024))
    if data != "normal":
        a, b = np.abs(a), np.abs(b)
    if data == "one large":  # of each 128, which cuts off the most of the others
        a, b = 1 + a / 4, 1 + b / 4
        a[:, ::128] = b[:, ::128] = 64
    a, b = (decode(encode(values, "float8_e4m3fn"), "float8_e4m3fn") for values in (a, b))
    exact, magnitude = (a * b).sum(axis=1), np.abs(a * b).sum(axis=1)
    lost = np.abs(sums_of_tensor_cores(a * b) - exact)
    text = "conv e4m3>f32 n1 c1024 k1 i500 w1"
    assert (lost <= sum_error(Problem.parse(f"{text} fp8"), "output", magnitude)).all()
    assert (lost > sum_error(Problem.parse(text), "output", magnitude)).any()


def test_all_but_the_bias_gradient_may_lose_more_with_fp8() -> None:
    loose, strict = (Problem.parse(f"conv e4m3>f32 n2 c4 k6 i9 w3{mode}") for mode in (" fp8", ""))
    one = np.ones(1)
    for wrt in ("output", "input", "weight"):
        assert sum_error(loose, wrt, one) == pytest.approx(sum_error(strict, wrt, one) + 136 * 2.0**-13)
    assert sum_error(loose, "bias", one) == sum_error(strict, "bias", one)
