"""What must hold for any problem on every backend, whatever kernel runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import geometries, layouts, problems, weight_layouts

from convgrad import Conv, Problem
from convgrad.numbers import decode
from convgrad.problem import WRT
from convgrad.verify import integer_operands, real_operands

BACKENDS = pytest.mark.parametrize("backend", oracle.available_backends())
STYLES = st.sampled_from(oracle.STYLES)


def for_all(backend: str, count: int, **strategies: Any) -> Callable[[Callable[..., None]], None]:
    """Run the decorated property at once on `count` examples, or on a few for an interpreted backend and a GPU."""
    few = {"max_examples": 3 if oracle.interpreted(backend) else max(3, count // oracle.one_in(backend)),
           "deadline": None, "suppress_health_check": list(HealthCheck)}

    def run(check: Callable[..., None]) -> None:
        settings(**few)(given(**strategies)(check))()

    return run


def solved(problem: Problem, backend: str, operands: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """Results in float64, canonical axis order."""
    results = oracle.run_guarded(problem, backend, {name: operands[name] for name in problem.operands}, **options)
    assert results is not None, f"{backend} refused '{problem}'"
    return tuple(decode(result, problem.out_dtype) for result in results)


def all_operands(conv: Conv, dtype: str, seed: int = 0) -> dict[str, Any]:
    """Integer input, weight and grad_output of one convolution, all exact in f32 sums."""
    backward = integer_operands(Problem(conv, "input+weight", dtype, "float32"), seed, thin=False)
    return {name: backward[name] for name in ("grad_output", "input", "weight")}


@BACKENDS
def test_any_problem_is_exact_in_any_view(backend: str) -> None:
    @for_all(backend, 300, problem=problems(), style=STYLES, thin=st.booleans(), seed=st.integers(0, 99))
    def _(problem: Problem, style: str, thin: bool, seed: int) -> None:
        oracle.check_exact(problem, backend, style=style, thin=thin, seed=seed)


@BACKENDS
def test_any_problem_is_within_the_bound(backend: str) -> None:
    @for_all(backend, 200, problem=problems(), style=STYLES, positive=st.booleans(), seed=st.integers(0, 99))
    def _(problem: Problem, style: str, positive: bool, seed: int) -> None:
        oracle.check_bound(problem, backend, style=style, positive=positive, seed=seed)


@BACKENDS
def test_sizes_of_zero_give_defined_results(backend: str) -> None:
    @for_all(backend, 150, problem=problems(empty=True), style=STYLES)
    def _(problem: Problem, style: str) -> None:
        oracle.check_exact(problem, backend, style=style)


@BACKENDS
def test_inf_and_nan_reach_exactly_their_sums(backend: str) -> None:
    @for_all(backend, 150, problem=problems(modes=False), style=STYLES, seed=st.integers(0, 99))
    def _(problem: Problem, style: str, seed: int) -> None:
        oracle.check_nonfinite(problem.with_(out_dtype="float32"), backend, seed=seed, style=style)


@BACKENDS
def test_adjoint_identity(backend: str) -> None:
    """<conv(x, w), dy> = <x, dx> = <w, dw>: exact, because every sum of these integers is."""

    @for_all(backend, 60, conv=geometries(), dtype=st.sampled_from(["float32", "bfloat16", "float16", "hifloat8"]))
    def _(conv: Conv, dtype: str) -> None:
        operands = all_operands(conv, dtype)
        exact = {name: decode(array, dtype) for name, array in operands.items()}
        scalars = [np.vdot(solved(Problem(conv, wrt, dtype, "float32"), backend, operands)[0], exact[name])
                   for wrt, name in (("output", "grad_output"), ("input", "input"), ("weight", "weight"))]
        assert scalars[0] == scalars[1] == scalars[2]


@BACKENDS
def test_weight_gradient_adds_up_over_the_batch(backend: str) -> None:
    @for_all(backend, 40, conv=geometries().filter(lambda conv: conv.batch > 1), data=st.data())
    def _(conv: Conv, data: st.DataObject) -> None:
        cut = data.draw(st.integers(1, conv.batch - 1))
        operands = all_operands(conv, "float32")
        total = np.zeros(conv.weight_shape)
        for part in (slice(0, cut), slice(cut, None)):
            some = {name: operands[name][part] for name in ("grad_output", "input")}
            piece = Conv(**{**vars_of(conv), "batch": len(some["input"])})
            total += solved(Problem(piece, "weight"), backend, some)[0]
        assert np.array_equal(total, solved(Problem(conv, "weight"), backend, operands)[0])


def vars_of(conv: Conv) -> dict[str, Any]:
    return {name: getattr(conv, name) for name in conv.__dataclass_fields__}


@BACKENDS
def test_groups_are_the_concatenation_of_their_problems(backend: str) -> None:
    @for_all(backend, 60, conv=geometries().filter(lambda conv: conv.groups > 1), wrt=st.sampled_from(WRT[:3]))
    def _(conv: Conv, wrt: str) -> None:
        operands = all_operands(conv, "float32")
        one = Conv(**{**vars_of(conv), "groups": 1, "in_channels": conv.group_in, "out_channels": conv.group_out})
        parts = []
        for group in range(conv.groups):
            into = slice(group * conv.group_in, (group + 1) * conv.group_in)
            out = slice(group * conv.group_out, (group + 1) * conv.group_out)
            some = {"grad_output": operands["grad_output"][:, out], "input": operands["input"][:, into],
                    "weight": operands["weight"][out]}
            parts.append(solved(Problem(one, wrt), backend, some)[0])
        whole = solved(Problem(conv, wrt), backend, operands)[0]
        assert np.array_equal(np.concatenate(parts, axis=0 if wrt == "weight" else 1), whole)


@BACKENDS
def test_all_layouts_agree(backend: str) -> None:
    @for_all(backend, 80, conv=geometries(), wrt=st.sampled_from(WRT[:3]), data=st.data(),
             dtype=st.sampled_from(["float32", "bfloat16"]))
    def _(conv: Conv, wrt: str, data: st.DataObject, dtype: str) -> None:
        operands = all_operands(conv, dtype)
        plain = Problem(conv, wrt, dtype)
        ordered = plain.with_(layout=data.draw(layouts(conv.axes)), weight_layout=data.draw(weight_layouts(conv.axes)))
        assert np.array_equal(solved(plain, backend, operands)[0], solved(ordered, backend, operands)[0])


@BACKENDS
def test_any_number_of_threads_gives_the_same_bits(backend: str) -> None:
    """Real numbers: the order of summation is fixed by the problem alone."""

    @for_all(backend, 60, problem=problems(), seed=st.integers(0, 99))
    def _(problem: Problem, seed: int) -> None:
        operands = real_operands(problem, seed)
        results = [oracle.run_guarded(problem, backend, operands, num_threads=threads) for threads in (1, 2, 3, 2)]
        if results[0] is not None:
            assert len({tuple(result.tobytes() for result in some) for some in results if some is not None}) == 1


@BACKENDS
def test_many_threads_on_a_larger_problem(backend: str) -> None:
    """Long sums that a backend may split: the bits and the bound hold for every thread count."""
    if oracle.interpreted(backend):
        pytest.skip("too large for the Triton interpreter")
    for text in ("weight_grad f32 n4 c24 k40 i30x31 w3x3 p1x1", "weight_grad bf16 n3 c17 k33 i29x31 w3x3 s2x2 p1x1",
                 "input_grad f32 n4 c40 k24 i30x31 w3x3 s2x2 p1x1", "bias_grad bf16>f32 n4 c1 k40 i64x65 w1x1",
                 "weight_grad f32 n2 c32 k32 i64x65 w3x3 p1x1 g32 NHWC", "conv f32 n3 c33 k40 i30x31 w3x3 p1x1"):
        problem = Problem.parse(text)
        for positive in (False, True):
            assert oracle.check_bound(problem, backend, positive=positive)
        operands = real_operands(problem)
        results = [oracle.run_guarded(problem, backend, operands, num_threads=threads) for threads in (1, 2, 4, 7)]
        assert len({some[0].tobytes() for some in results if some is not None}) == 1, text


@BACKENDS
def test_a_workspace_limit_is_kept(backend: str) -> None:
    """With no scratch memory allowed a backend runs without, or says why it cannot."""

    @for_all(backend, 40, problem=problems(), seed=st.integers(0, 9))
    def _(problem: Problem, seed: int) -> None:
        problem = oracle.as_problem(problem, backend)
        try:
            chosen = oracle.plan(problem, backend=backend, max_workspace_bytes=0)
        except oracle.Unsupported as error:
            assert "max_workspace_bytes=0" in str(error) or oracle.expected_refusal(backend, problem), str(error)
            return
        assert chosen.workspace_bytes == 0
        oracle.check_exact(problem, backend, seed=seed, max_workspace_bytes=0)


@BACKENDS
def test_unreached_positions_are_positive_zero(backend: str) -> None:
    for text in ("input_grad f32 n1 c3 k4 i17 w2 s7", "input_grad bf16 n1 c4 k4 i9x9 w1x1 s4x4",
                 "conv f16 n1 c3 k4 i6 w2 p5", "weight_grad f32 n1 c3 k4 i1x2 w5x3 p2x1",
                 "input_grad f32 n1 c4 k8 i9x9 w1x1 s4x4 g4 NHWC"):
        problem = Problem.parse(text)
        results = oracle.run_guarded(problem, backend, {  # negative operands: their zero products are negative zeros
            name: -np.abs(array) for name, array in real_operands(problem).items()})
        if results is None:
            continue
        terms = oracle.exact_results(Problem.parse(text).with_(dtype="float64", compute="f64"), {
            name: np.ones(problem.shape_of_operand(name)) for name in problem.operands})[0]
        untouched = decode(results[0], problem.out_dtype)[terms == 0]
        assert untouched.size and np.all(untouched == 0) and not np.signbit(untouched).any(), text
