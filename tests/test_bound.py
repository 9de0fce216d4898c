"""The error bound for data whose roundings all go one way: constants, ramps and numbers of one sign, in long sums."""

from __future__ import annotations

import numpy as np
import oracle
import pytest

import convgrad
from convgrad import Problem
from convgrad.numbers import FORMATS, sum_error, sum_error_factor
from convgrad.verify import REAL_DATA, exact_results, magnitudes, run_problem, wrong_bound

# Long sums in every family of the CPU's kernels, without their dtype.
LONG = [
    "conv n1 c512 k24 i7x7 w3x3 p1x1", "input_grad n1 c24 k600 i6x7 w3x3 p1x1 NHWC",
    "weight_grad n2 c16 k24 i56x56 w3x3 p1x1", "weight_grad n2 c24 k20 i70x40 w3x1 s2x1 p1x0 NHWC",
    "weight_grad n1 c16 k16 i128x128 w2x2 s2x2", "conv n1 c600 k16 i12x12 w1x1 NHWC", "conv n5 c64 k24 i6x5 w6x5",
    "conv n1 c16 k16 i20x20 w31x31 p15x15 g16", "input_grad n1 c16 k16 i20x20 w31x31 p15x15 g16 NHWC",
    "weight_grad n2 c16 k16 i70x60 w3x3 p1x1 g16", "weight_grad n2 c16 k16 i70x60 w3x3 p1x1 g16 NHWC",
    "conv n1 c64 k64 i9x9 w5x5 p2x2 NHWC", "input_grad n1 c128 k128 i7x7 w5x5 p2x2 g2 NHWC",
    "weight_grad n2 c32 k32 i40x40 w3x3 p1x1 g2 NHWC", "conv n1 c16 k16 i600 w1024 p512 g16",
    "weight_grad n1 c16 k16 i30000 w2 g16", "weight_grad n600 c16 k16 i20 w3 g16",
    "weight_grad n2 c3 k16 i90x90 w3x3 p1x1", "input_grad n1 c3 k600 i9x9 w3x3 p1x1",
    "weight_grad n1 c24 k3 i90x90 w3x3 p1x1 NHWC",
    "bias_grad n20 c1 k5 i40x50 w1x1", "bias_grad n20 c1 k5 i40x50 w1x1 NHWC", "bias_grad n9000 c1 k3 i1 w1",
    "weight_grad+bias_grad n20 c5 k16 i30x30 w3x3 p1x1", "conv n1 c1 k2 i40000 w40000",
]
# Those that an interpreter of GPU kernels can run.
SHORT = ["conv n1 c64 k8 i3x3 w3x3", "weight_grad n2 c4 k4 i18x17 w3x3 p1x1", "bias_grad n2 c1 k3 i30x20 w1x1"]


def problems(backend: str, dtype: str) -> list[Problem]:
    texts = SHORT if oracle.interpreted(backend) else [*LONG, *SHORT] if backend == "native" else [*LONG[::8], *SHORT]
    device = " cuda" if backend == "triton" else ""
    return [Problem.parse(f"{text.partition(' ')[0]} {dtype} {text.partition(' ')[2]}{device}") for text in texts]


@pytest.mark.parametrize("data", ["constant", "ramp", "positive"])
@pytest.mark.parametrize("dtype", ["f32", "bf16>f32"])
@pytest.mark.parametrize("backend", oracle.available_backends())
def test_sums_of_correlated_terms(backend: str, dtype: str, data: str) -> None:
    for problem in problems(backend, dtype)[::1 if data == "constant" else 3]:
        operands = REAL_DATA[data](problem, 1)
        judged = zip(problem.results, run_problem(problem, operands, backend), exact_results(problem, operands),
                     magnitudes(problem, operands), strict=True)
        for wrt, got, exact, size in judged:
            wrong = wrong_bound(problem, wrt, got, exact, size)
            assert wrong is None, str(wrong)


@pytest.mark.parametrize("value", [0.1, 0.7])
@pytest.mark.parametrize("backend", oracle.available_backends())
def test_float64_sums_of_a_constant(backend: str, value: float) -> None:
    """Sums of equal terms are their number times the term, which a wider format holds."""
    for problem in problems(backend, "f64"):
        ones = {name: np.ones(problem.shape_of_operand(name)) for name in problem.operands}
        operands = ones | {problem.operands[0]: np.full(problem.shape_of_operand(problem.operands[0]), value)}
        for wrt, got, count in zip(problem.results, run_problem(problem, operands, backend),
                                   exact_results(problem, ones), strict=True):
            exact = count.astype(np.longdouble) * np.longdouble(value)
            allowed = (sum_error_factor(problem.conv.reduction_length(wrt)) + 1) * np.longdouble(2.0**-53) * exact
            assert (np.abs(got.astype(np.longdouble) - exact) <= allowed).all(), str(problem)


def test_dense_sums_are_as_exact_as_those_of_others() -> None:
    """In units of 2^-24 of the sum of magnitudes; 688 and 2757 before sums were cut into blocks, torch has 26."""
    for channels in (512, 2048):
        x, w = np.full((1, channels, 14, 14), 0.1, np.float32), np.ones((64, channels, 3, 3), np.float32)
        exact = np.float64(np.float32(0.1)) * channels * 9
        error = np.abs(convgrad.conv(x, w, backend="native").astype(np.float64) - exact).max()
        assert error <= 26 * FORMATS["float32"].unit_roundoff * exact


@pytest.mark.parametrize("text", ["conv n2 c24 k20 i6x5 w3x3 p1x1", "weight_grad n2 c3 k24 i9x9 w3x3 p1x1",
                                  "input_grad n1 c32 k32 i7x7 w3x3 p1x1 g32 NHWC"])
@pytest.mark.parametrize("backend", oracle.available_backends())
def test_bf16_operands_below_the_normal_range_count_or_count_as_zero(backend: str, text: str) -> None:
    """The bf16 instructions of processors take them as zero; nothing else may be lost."""
    name, _, sizes = text.partition(" ")
    problem = Problem.parse(f"{name} bf16>f32 {sizes}{' cuda' if backend == 'triton' else ''}")
    operands = REAL_DATA["normal"](problem, 3)
    tiny = np.arange(operands[problem.operands[0]].size).reshape(operands[problem.operands[0]].shape) % 3 == 0
    stored = operands[problem.operands[0]].copy()
    stored[tiny] = 2.0**-130
    large = operands[problem.operands[1]].astype(np.float32) * np.float32(2.0**120)
    operands |= {problem.operands[0]: stored, problem.operands[1]: large.astype(stored.dtype)}
    only_tiny = operands | {problem.operands[0]: np.where(tiny, stored, 0).astype(stored.dtype)}
    [got], [exact], [size] = (run_problem(problem, operands, backend), exact_results(problem, operands),
                              magnitudes(problem, operands))
    [lost] = magnitudes(problem, only_tiny)
    allowed = sum_error(problem, problem.wrt, size) + lost + FORMATS["float32"].unit_roundoff * np.abs(exact)
    assert (np.abs(got.astype(np.float64) - exact) <= allowed).all()
