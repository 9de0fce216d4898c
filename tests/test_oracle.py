"""The oracle must catch what it is there for: one wrong bit, one stray byte, one element left unwritten."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import refusals

from convgrad import Plan, Problem, Unsupported, guarded
from convgrad.backends import reference
from convgrad.numbers import decode, encode
from convgrad.problem import DTYPES
from convgrad.verify import POISON

PROBLEM = "input_grad f32 n2 c4 k6 i7x5 w3x2 s2x1 p1:2x0 d1x2 g2 NHWC HWIO"


def spoil(monkeypatch: pytest.MonkeyPatch, harm: Any) -> None:
    """Make the reference wrong: `harm(operands, results, workspace)` runs after it."""

    def plan_with_harm(problem: Problem, backend: str | None = None, **options: Any) -> Plan:
        honest = reference.plan(problem)

        def run(operands: Any, results: Any, workspace: Any) -> None:
            honest.run(operands, results, workspace)
            harm(operands, results, workspace)

        return honest._replace(run=run, workspace_bytes=64)

    monkeypatch.setattr(oracle, "plan", plan_with_harm)


def harm_result(operands: Any, results: Any, workspace: Any) -> None:
    results[0][0, 0, 0, 0] += 1


def harm_last_bit(operands: Any, results: Any, workspace: Any) -> None:
    results[0][1, 3, 6, 4] = np.nextafter(results[0][1, 3, 6, 4], np.float32(9))


def harm_operand(operands: Any, results: Any, workspace: Any) -> None:
    operands[1][0, 0, 0, 0] += 1


def harm_gap(operands: Any, results: Any, workspace: Any) -> None:
    flat = np.ndarray(1, results[0].dtype, results[0].base, results[0].base.nbytes - guarded.GUARD_BYTES)
    flat[0] = 0


def harm_workspace(operands: Any, results: Any, workspace: Any) -> None:
    np.ndarray(1, np.uint8, workspace.base, workspace.base.nbytes - guarded.GUARD_BYTES)[0] = 0


@pytest.mark.parametrize("harm", [harm_result, harm_last_bit, harm_operand, harm_gap, harm_workspace])
def test_a_harm_is_seen(monkeypatch: pytest.MonkeyPatch, harm: Any) -> None:
    assert oracle.check_exact(PROBLEM, "reference")
    spoil(monkeypatch, harm)
    with pytest.raises(AssertionError):
        oracle.check_exact(PROBLEM, "reference")


def test_an_unwritten_element_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda operands, results, workspace: results[0].fill(POISON["float32"]))
    for check in (oracle.check_exact, oracle.check_bound, oracle.check_nonfinite):
        with pytest.raises(AssertionError):
            check(PROBLEM, "reference")


def test_the_bound_is_tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of 2^-16 of the result's size, as from a bf16 partial sum, is far outside the bound."""
    spoil(monkeypatch, lambda operands, results, workspace: np.multiply(results[0], 1 + 2.0**-16, out=results[0]))
    with pytest.raises(AssertionError):
        oracle.check_bound(PROBLEM, "reference")


def test_a_stray_nan_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def harm(operands: Any, results: Any, workspace: Any) -> None:
        place = tuple(np.argwhere(np.isfinite(results[0]))[0])
        results[0][place] = np.nan

    spoil(monkeypatch, harm)
    with pytest.raises(AssertionError, match="must not be reached"):
        oracle.check_nonfinite(PROBLEM, "reference")


def test_an_unexpected_refusal_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Plan:
        raise Unsupported("no reason")

    monkeypatch.setattr(oracle, "plan", refuse)
    with pytest.raises(AssertionError, match="unexpected refusal"):
        oracle.check_exact(PROBLEM, "native")
    monkeypatch.setitem(refusals.EXPECTED, "native", [("no f64", lambda problem: problem.dtype == "float64")])
    assert not oracle.check_exact(PROBLEM.replace("f32", "f64"), "native")
    assert oracle.refused.pop(("native", "no f64")) == 1 and not oracle.refused


@pytest.mark.parametrize("name", DTYPES)
def test_poison_is_exact_and_integers_are_kept(name: str) -> None:
    poison = POISON[name]
    assert decode(encode(np.array([poison]), name), name)[0] == poison
    integers = np.arange(-2.0, 3.0)
    assert np.array_equal(decode(encode(integers, name), name), integers)
