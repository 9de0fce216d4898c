"""The reference against the index formula itself, written as loops: i = o*stride + k*dilation - pad_low."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import geometries, problems

import convgrad
from convgrad import Conv, Problem
from convgrad.backends.reference import solve
from convgrad.numbers import decode, encode, round_operand
from convgrad.problem import OPERANDS, WRT
from convgrad.verify import geometry_sets, real_operands

SMALL = [problem.conv for problems_ in geometry_sets().values() for problem in problems_
         if problem.conv.flops("output") <= 6000]


def brute_force(conv: Conv, wrt: str, values: dict[str, np.ndarray]) -> np.ndarray:
    """Add every product of the trilinear form at its place, one scalar at a time."""
    result = np.zeros(conv.shape_of(wrt))
    for n, k in itertools.product(range(conv.batch), range(conv.out_channels)):
        group = k // conv.group_out if conv.group_out else 0
        for out in itertools.product(*map(range, conv.out_size)):
            if wrt == "bias":
                result[k] += values["grad_output"][(n, k, *out)]
                continue
            for c, tap in itertools.product(range(conv.group_in), itertools.product(*map(range, conv.kernel_size))):
                place = tuple(o * s + t * d - low for o, s, t, d, (low, _) in
                              zip(out, conv.stride, tap, conv.dilation, conv.padding, strict=True))
                if any(not 0 <= at < size for at, size in zip(place, conv.in_size, strict=True)):
                    continue
                at = {"output": (n, k, *out), "input": (n, group * conv.group_in + c, *place), "weight": (k, c, *tap)}
                first, second = OPERANDS[wrt]
                name = {"grad_output": "output", "input": "input", "weight": "weight"}
                result[at[wrt]] += values[first][at[name[first]]] * values[second][at[name[second]]]
    return result


def integers(conv: Conv, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = {"grad_output": conv.output_shape, "input": conv.input_shape, "weight": conv.weight_shape}
    return {name: random.integers(-3, 4, shape).astype(np.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize("wrt", WRT)
def test_index_formula_on_the_list(wrt: str) -> None:
    assert len(SMALL) > 150
    for seed, conv in enumerate(SMALL):
        values = integers(conv, seed)
        assert np.array_equal(solve(conv, wrt, values), brute_force(conv, wrt, values)), str(Problem(conv, wrt))


@given(conv=geometries(empty=True, max_channels=3), wrt=st.sampled_from(WRT), seed=st.integers(0, 99))
@settings(max_examples=250, deadline=None)
def test_index_formula_anywhere(conv: Conv, wrt: str, seed: int) -> None:
    if conv.flops("output") > 20_000:
        return
    values = integers(conv, seed)
    assert np.array_equal(solve(conv, wrt, values), brute_force(conv, wrt, values))


@given(conv=geometries())
@settings(max_examples=100, deadline=None)
def test_adjoint_identity(conv: Conv) -> None:
    """<conv(x, w), dy> = <x, dx> = <w, dw>: exact for integers."""
    values = integers(conv, 1)
    scalars = [np.vdot(solve(conv, wrt, values), values[name])
               for wrt, name in (("output", "grad_output"), ("input", "input"), ("weight", "weight"))]
    assert scalars[0] == scalars[1] == scalars[2]


@given(problem=problems(empty=True))
@settings(max_examples=100, deadline=None)
def test_the_plan_rounds_operands_and_results_once(problem: Problem) -> None:
    """Operands are decoded exactly and rounded by the compute mode, the bias gradient's are not; one last rounding."""
    operands = real_operands(problem)
    results = [np.empty(problem.conv.shape_of(wrt), encode(0.0, problem.out_dtype).dtype) for wrt in problem.results]
    convgrad.plan(problem, backend="reference").run(tuple(operands.values()), tuple(results), None)
    for wrt, got in zip(problem.results, results, strict=True):
        values = {name: decode(array, problem.dtype) for name, array in operands.items()}
        if wrt != "bias":
            values = {name: round_operand(array, problem.compute) for name, array in values.items()}
        expected = encode(solve(problem.conv, wrt, values), problem.out_dtype)
        assert got.tobytes() == expected.tobytes()


def test_reach_of_the_longest_sums() -> None:
    """reduction_length counts the terms of the longest sum, and tap_range the pairs that land."""
    for conv in SMALL:
        ones = {name: np.ones(shape) for name, shape in
                (("grad_output", conv.output_shape), ("input", conv.input_shape), ("weight", conv.weight_shape))}
        for wrt in WRT:
            terms = solve(conv, wrt, ones)
            assert terms.max(initial=0) <= conv.reduction_length(wrt), str(Problem(conv, wrt))
            if wrt != "bias":
                assert 2 * terms.sum() == conv.flops(wrt), str(Problem(conv, wrt))
