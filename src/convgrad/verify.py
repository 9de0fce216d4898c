"""How to know that a result is right: test operands, what the contract allows, and the first element outside it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .machine import cuda_missing
from .numbers import FORMATS, allowed_range, decode, encode
from .plan import plan
from .problem import Problem, Unsupported, axis_order

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Wrong:
    """The first element of a result that breaks the contract."""

    problem: Problem
    wrt: str
    index: tuple[int, ...]
    got: float
    low: float
    high: float
    count: int  # wrong elements in all

    def __str__(self) -> str:
        allowed = f"{self.low!r}" if self.low == self.high else f"{self.low!r} to {self.high!r}"
        return (f"'{self.problem}': {self.wrt} result at {self.index} is {self.got!r}, allowed is {allowed} "
                f"({self.count} elements wrong)")


def generator(problem: Problem, seed: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(str(problem.conv).encode()), seed])


def integer_operands(problem: Problem, seed: int = 0, thin: bool = True) -> dict[str, Array]:
    """Small integers, exact in every format and compute mode, for which every order of summation gives the same bits.

    Sums stay below 2^24, so f32 partial sums are exact and the result is one rounding of the exact value. Thinned
    operands have so many zeros that nearly all results are also exact in the output format; without thinning the
    last rounding is tested too.
    """
    random = generator(problem, seed)
    form = FORMATS[problem.out_dtype]
    exact_up_to = min(2.0 ** (form.mantissa_bits + 1), 2.0**22) if form.name != "hifloat8" else 16.0
    length = max(problem.conv.reduction_length(wrt) for wrt in problem.results)
    # A product of two values of mean size 1.5 each; the share of non-zero products is density squared.
    density = min(1.0, (exact_up_to / (2.25 * length)) ** 0.5) if thin else 1.0
    operands = {}
    for name in problem.operands:
        shape = problem.shape_of_operand(name)
        values = random.integers(1, 3, shape) * random.choice([-1, 1], shape)
        operands[name] = encode(np.where(random.random(shape) < density, values, 0).astype(np.float64), problem.dtype)
    return operands | random_scales(problem, random)


def real_operands(problem: Problem, seed: int = 0, positive: bool = False) -> dict[str, Array]:
    """Normally distributed operands; their products have a spread of magnitudes, as real data have."""
    random = generator(problem, seed)
    operands = {}
    for name in problem.operands:
        values = random.standard_normal(problem.shape_of_operand(name))
        operands[name] = encode(np.abs(values) if positive else values, problem.dtype)
    return operands | random_scales(problem, random)


def special_operands(problem: Problem, seed: int = 0, spots: int = 2) -> dict[str, Array]:
    """Whole numbers with a few Inf and NaN among them (NaN alone in a format without Inf)."""
    random = generator(problem, seed)
    operands = integer_operands(problem, seed, thin=False)
    for name in problem.operands:
        values = decode(operands[name], problem.dtype)
        if values.size:
            places = random.choice(values.size, min(spots, values.size), replace=False)
            values.flat[places] = random.choice([np.inf, -np.inf, np.nan], len(places))
        operands[name] = encode(values, problem.dtype)
    return operands


def even_operands(problem: Problem, seed: int = 0, ramp: bool = False) -> dict[str, Array]:
    """Constants, or evenly rising numbers: data whose roundings all go one way."""
    random = generator(problem, seed)
    operands = {}
    for name in problem.operands:
        shape = problem.shape_of_operand(name)
        first, last = random.uniform(0.05, 1.0, 2) * random.choice([-1, 1])
        values = np.linspace(first, last if ramp else first, math.prod(shape)).reshape(shape)
        operands[name] = encode(values, problem.dtype)
    return operands | random_scales(problem, random)


# Kinds of test data. Results of the first are judged bit by bit, of the others by the error bound.
EXACT_DATA: dict[str, Callable[[Problem, int], dict[str, Array]]] = {
    "whole": integer_operands,
    "dense": partial(integer_operands, thin=False),
    "special": special_operands,
}
REAL_DATA: dict[str, Callable[[Problem, int], dict[str, Array]]] = {
    "normal": real_operands,
    "positive": partial(real_operands, positive=True),
    "constant": even_operands,
    "ramp": partial(even_operands, ramp=True),
}


def random_scales(problem: Problem, random: np.random.Generator) -> dict[str, Array]:
    """Scales between 1/2 and 2, no powers of two: the factor of a result shows in all of its bits."""
    return {name: np.array(2.0 ** random.uniform(-1, 1), np.float32) for name in problem.scales}


def in_order(problem: Problem, operands: dict[str, Array]) -> tuple[Any, ...]:
    """Operands, laid out as the problem says, and scales, as `Plan.run` takes them on the CPU."""
    return (*(laid_out(problem, name, operands[name]) for name in problem.operands),
            *(float(operands[name]) for name in problem.scales))


def exact_results(problem: Problem, operands: dict[str, Array]) -> tuple[Array, ...]:
    """The results in float64, before the rounding to the output format."""
    wide = problem.with_(out_dtype="float64", device="cpu")
    results = tuple(np.empty(problem.conv.shape_of(wrt)) for wrt in problem.results)
    plan(wide, backend="reference").run(in_order(problem, operands), results, None)
    return results


def magnitudes(problem: Problem, operands: dict[str, Array]) -> tuple[Array, ...]:
    """Sum of |a*b| for every element of the results."""
    sizes = {name: encode(np.abs(decode(operands[name], problem.dtype)), problem.dtype) for name in problem.operands}
    return exact_results(problem, operands | sizes)


def wrong_bits(problem: Problem, wrt: str, got: Array, exact: Array) -> Wrong | None:
    """The first element that is not the exact value rounded once: bit by bit, except that all NaNs are one."""
    expected = encode(exact, problem.out_dtype)
    values, wanted = decode(got, problem.out_dtype), decode(expected, problem.out_dtype)
    same = (got.view(np.uint8) == expected) if problem.out_dtype == "hifloat8" else (
        (values == wanted) & (np.signbit(values) == np.signbit(wanted)))
    return first_wrong(problem, wrt, values, wanted, wanted, same | (np.isnan(values) & np.isnan(wanted)))


def wrong_bound(problem: Problem, wrt: str, got: Array, exact: Array, magnitude: Array) -> Wrong | None:
    """The first element that is further from the exact value than the numerical contract allows."""
    low, high = allowed_range(problem, wrt, exact, magnitude)
    values = decode(got, problem.out_dtype)
    if np.isnan(FORMATS[problem.out_dtype].overflow):  # e4m3: NaN is what lies beyond the largest value
        inside = np.where(np.isnan(values), ~np.isfinite(low) | ~np.isfinite(high), (values >= low) & (values <= high))
    else:
        inside = (values >= low) & (values <= high)
    return first_wrong(problem, wrt, values, low, high, inside)


def first_wrong(problem: Problem, wrt: str, values: Array, low: Array, high: Array, right: Array) -> Wrong | None:
    if right.all():
        return None
    index = tuple(int(place) for place in np.argwhere(~right)[0])
    return Wrong(problem, wrt, index, float(values[index]), float(low[index]), float(high[index]),
                 int(right.size - np.count_nonzero(right)))


def run_problem(problem: Problem, operands: dict[str, Array], backend: str | None = None,
                num_threads: int | None = None) -> tuple[Array, ...]:
    """Run a problem on NumPy operands, wherever it computes, and return NumPy results in canonical axis order."""
    chosen = plan(problem, backend=backend, num_threads=num_threads)
    results = tuple(laid_out(problem, wrt, poisoned(problem.conv.shape_of(wrt), problem.out_dtype))
                    for wrt in problem.results)
    stored = in_order(problem, operands)
    if problem.device == "cpu":
        chosen.run(stored, results, None)
        return results
    missing = cuda_missing()
    if missing is not None:
        raise Unsupported(f"'{problem}' cannot run: {missing}")
    from .frontends.torch import tensors

    on_device = (*(tensors.from_numpy(array, problem.dtype) for array in stored[:len(problem.operands)]),
                 *(tensors.from_numpy(operands[name], "float32") for name in problem.scales))
    targets = tuple(tensors.from_numpy(array, problem.out_dtype) for array in results)
    chosen.run(on_device, targets, None)
    return tuple(tensors.to_numpy(tensor, problem.out_dtype) for tensor in targets)


def check_problem(problem: Problem, backend: str | None = None, num_threads: int | None = None,
                  seed: int = 0) -> Wrong | None:
    """Run a problem on exact integers and on real data; return the first wrong element, or None.

    Raises `Unsupported` when the backend refuses the problem.
    """
    integers, reals = integer_operands(problem, seed), real_operands(problem, seed)
    for wrt, got, exact in zip(problem.results, run_problem(problem, integers, backend, num_threads),
                               exact_results(problem, integers)):
        wrong = wrong_bits(problem, wrt, got, exact)
        if wrong is not None:
            return wrong
    for wrt, got, exact, size in zip(problem.results, run_problem(problem, reals, backend, num_threads),
                                     exact_results(problem, reals), magnitudes(problem, reals)):
        wrong = wrong_bound(problem, wrt, got, exact, size)
        if wrong is not None:
            return wrong
    return None


def laid_out(problem: Problem, name: str, array: Array) -> Array:
    """The same canonical view of an operand or result over memory in the problem's layout."""
    if name == "bias":
        return array
    weights = name == "weight"
    order = axis_order(problem.weight_layout if weights else problem.layout, problem.conv.axes, weights)
    placed: Array = np.ascontiguousarray(array.transpose(np.argsort(order))).transpose(order)
    return placed


def poisoned(shape: tuple[int, ...], format_name: str) -> Array:
    """A result array full of a value that no test produces, so that an element left unwritten is noticed."""
    return encode(np.full(shape, POISON[format_name]), format_name)


# Large and odd enough that sums of test operands do not hit it, and exact in its format.
POISON = {"float64": -9.5e299, "float32": -1.5 * 2.0**120, "bfloat16": -1.5 * 2.0**120, "float16": -49152.0,
          "float8_e4m3fn": -416.0, "float8_e5m2": -49152.0, "hifloat8": -24576.0}


@cache
def geometry_sets() -> dict[str, tuple[Problem, ...]]:
    """The named sets of the package's own list of geometries, `data/geometries.txt`."""
    sets: dict[str, list[Problem]] = {}
    name = ""
    for line in (Path(__file__).parent / "data" / "geometries.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name = line.strip("[]")
        elif line and not line.startswith("#"):
            sets.setdefault(name, []).append(Problem.parse(line))
    return {name: tuple(problems) for name, problems in sets.items()}
