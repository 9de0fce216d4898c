"""Every backend on the list of geometries: all results, all number formats, every way an array can lie in memory."""

from __future__ import annotations

import oracle
import pytest

from convgrad import Problem
from convgrad.problem import COMPUTE_MODES, WRT
from convgrad.verify import geometry_sets

GEOMETRIES = [problem for problems in geometry_sets().values() for problem in problems]
FORMATS = [("float64", "float64"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"),
           ("float16", "float16"), ("float16", "float32"), ("float8_e4m3fn", "float32"),
           ("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "bfloat16"), ("hifloat8", "hifloat8"),
           ("hifloat8", "float32")]
COMBINED = ("input+weight", "weight+bias", "input+weight+bias")
INTERPRETED_LIMIT = 3000  # multiply-adds: about half a second in the Triton interpreter


def chosen_geometries(backend: str, every: int = 1, start: int = 0) -> list[Problem]:
    """All geometries, some of them for a GPU, or the few small ones that an interpreted backend can run."""
    if oracle.interpreted(backend):
        small = [problem for problem in GEOMETRIES if oracle.elements(problem) <= INTERPRETED_LIMIT]
        return small[start % 80::80 * every]
    if backend == "reference":  # judged by itself here, by the index formula in test_reference.py
        every *= 4
    every *= oracle.one_in(backend)
    return GEOMETRIES[start % every::every]


def test_the_list_is_long_and_readable() -> None:
    assert len(GEOMETRIES) == len({str(problem) for problem in GEOMETRIES}) >= 400
    assert {problem.conv.axes for problem in GEOMETRIES} == {1, 2, 3}
    assert all(Problem.parse(str(problem)) == problem for problem in GEOMETRIES)
    assert len(geometry_sets()) >= 12


@pytest.mark.parametrize("wrt", WRT)
@pytest.mark.parametrize("formats", FORMATS, ids=">".join)
@pytest.mark.parametrize("backend", oracle.available_backends())
def test_integers_bit_by_bit(backend: str, formats: tuple[str, str], wrt: str, seed: int) -> None:
    for place, problem in enumerate(chosen_geometries(backend, start=FORMATS.index(formats) + 7 * WRT.index(wrt))):
        asked = problem.with_(wrt=wrt, dtype=formats[0], out_dtype=formats[1], compute="")
        oracle.check_exact(asked, backend, seed=seed, thin=place % 3 > 0, style=oracle.STYLES[place % 4])


@pytest.mark.parametrize("wrt", WRT)
@pytest.mark.parametrize("formats", FORMATS, ids=">".join)
@pytest.mark.parametrize("backend", oracle.available_backends())
def test_real_numbers_within_the_bound(backend: str, formats: tuple[str, str], wrt: str, seed: int) -> None:
    for place, problem in enumerate(chosen_geometries(backend, 2, FORMATS.index(formats))):
        asked = problem.with_(wrt=wrt, dtype=formats[0], out_dtype=formats[1], compute="")
        oracle.check_bound(asked, backend, seed=seed, positive=place % 4 == 0, style=oracle.STYLES[place // 2 % 4])


@pytest.mark.parametrize("compute", COMPUTE_MODES[2:])
@pytest.mark.parametrize("backend", oracle.available_backends())
def test_compute_modes(backend: str, compute: str, seed: int) -> None:
    for place, problem in enumerate(chosen_geometries(backend, 5, COMPUTE_MODES.index(compute))):
        dtype = ("float32", "float32", "bfloat16", "float16", "hifloat8")[place % 5]
        if compute == "fp8":
            dtype = ("float8_e4m3fn", "float8_e5m2")[place % 2]
        asked = problem.with_(wrt=WRT[place % 3], dtype=dtype, out_dtype="", compute=compute)
        oracle.check_exact(asked, backend, seed=seed, style=oracle.STYLES[place % 4])
        oracle.check_bound(asked, backend, seed=seed, style=oracle.STYLES[place % 4])


@pytest.mark.parametrize("wrt", COMBINED)
@pytest.mark.parametrize("backend", oracle.available_backends())
def test_several_results_in_one_call(backend: str, wrt: str, seed: int) -> None:
    for place, problem in enumerate(chosen_geometries(backend, 3, COMBINED.index(wrt))):
        dtype = ("float32", "bfloat16", "float16", "float64")[place % 4]
        oracle.check_exact(problem.with_(wrt=wrt, dtype=dtype, out_dtype="", compute=""), backend, seed=seed,
                           style=oracle.STYLES[place % 4])


@pytest.mark.parametrize("wrt", WRT)
@pytest.mark.parametrize("backend", oracle.available_backends())
def test_inf_and_nan_reach_exactly_their_sums(backend: str, wrt: str, seed: int) -> None:
    for place, problem in enumerate(chosen_geometries(backend, 2, WRT.index(wrt))):
        dtype, out_dtype = (("float32", ""), ("bfloat16", ""), ("float16", ""), ("float64", ""),
                            ("hifloat8", ""), ("float8_e5m2", "float32"), ("float8_e4m3fn", "float32"))[place % 7]
        asked = problem.with_(wrt=wrt, dtype=dtype, out_dtype=out_dtype, compute="")
        oracle.check_nonfinite(asked, backend, seed=seed + place, spots=1 + place % 2, style=oracle.STYLES[place % 4])
