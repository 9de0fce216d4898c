"""Plan.run checks the arrays and the workspace that it is given, and leaves all results untouched when it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import convgrad


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


X, W, DY = f32(2, 6, 8, 9), f32(4, 6, 3, 3), f32(2, 4, 6, 7)


def read_only() -> np.ndarray:
    out = np.zeros((2, 4, 6, 7), np.float32)
    out.flags.writeable = False
    return out


def run_plan(problem: str, operands: Any, results: Any, workspace: Any = None, backend: str = "native") -> None:
    convgrad.plan(problem, backend=backend).run(operands, results, workspace)


PLAIN = "conv f32 n2 c6 k4 i8x9 w3x3"
OUT = np.zeros(DY.shape, np.float32)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("error, sentence, operands, results", [
    (TypeError, "input must have dtype float32, got int8", (X.astype(np.int8), W), (OUT,)),
    (TypeError, "weight must have dtype float32, got >f4", (X, W.astype(">f4")), (OUT,)),
    (TypeError, "must have dtype float32, got float16", (X, W), (OUT.astype(np.float16),)),
    (TypeError, "weight must be a numpy.ndarray, got list", (X, [1.0]), (OUT,)),
    (ValueError, "is read-only", (X, W), (read_only(),)),
    (ValueError, "input must have the canonical shape (2, 6, 8, 9), got (2, 4, 6, 7)", (DY, W), (OUT,)),
    (ValueError, "operands must be a tuple of 2", (X, W, DY), (OUT,)),
    (ValueError, "results must be a tuple of 1", (X, W), (OUT, OUT)),
])
def test_a_plan_checks_its_arrays(backend: str, error: type[Exception], sentence: str, operands: Any,
                                  results: Any) -> None:
    with pytest.raises(error) as caught:
        run_plan(PLAIN, operands, results, None, backend)
    assert sentence in str(caught.value)
    assert not OUT.any()


def test_a_plan_checks_its_workspace_and_names_the_whole_need() -> None:
    problem = "input_grad+weight_grad+bias_grad f32 n2 c6 k4 i8x9 w3x3"
    results = tuple(np.full(shape, 7.0, np.float32) for shape in (X.shape, W.shape, (4,)))
    needed = convgrad.plan(problem, backend="native").workspace_bytes
    for workspace, error, sentence in (
            (np.zeros(needed - 1, np.uint8), ValueError,
             f"workspace has {needed - 1} bytes, but the plan needs {needed}"),
            (np.zeros(needed, np.int8), TypeError, "workspace must have dtype uint8, got int8"),
            (np.frombuffer(bytes(needed), np.uint8), ValueError, "workspace is read-only")):
        with pytest.raises(error) as caught:
            run_plan(problem, (DY, X, W), results, workspace)
        assert str(caught.value) == sentence
    assert all((result == 7).all() for result in results)
    run_plan(problem, (DY, X, W), results, np.zeros(needed, np.uint8))
    assert not any((result == 7).all() for result in results)


def test_a_transposed_call_names_the_workspace_of_all_its_plans() -> None:
    needed = max(convgrad.plan(f"{result} f32 n2 c6 k4 i8x9 w3x3", backend="native").workspace_bytes
                 for result in ("conv", "weight_grad"))
    with pytest.raises(ValueError) as caught:
        convgrad.conv_transpose_backward(X, DY, W, workspace=np.zeros(1, np.uint8), backend="native")
    assert str(caught.value) == f"workspace has 1 bytes, but the plan needs {needed}"
