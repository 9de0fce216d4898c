"""What the dialect costs beyond the engine: calls in the two phases with plans that do nothing, and no copies."""

from __future__ import annotations

import numpy as np
import pytest
from counting import calls_in

from convgrad import cann
from convgrad.frontends.cann import execution

MOST_CALLS = 300


@pytest.fixture
def silent_engine(monkeypatch):
    """Plans whose run only notes what it was given."""
    seen, cache, find_plan = [], {}, execution.find_plan

    def find_silent_plan(problem, **options):
        plan = find_plan(problem, **options)
        if id(plan) not in cache:
            cache[id(plan)] = plan._replace(run=lambda operands, results, workspace: seen.append((operands, results)))
        return cache[id(plan)]

    monkeypatch.setattr(execution, "find_plan", find_silent_plan)
    return seen


def convolution(transposed):
    dy, x, w = (np.zeros(shape, np.float32) for shape in ((2, 8, 5, 5), (2, 4, 9, 9), (8, 4, 3, 3)))
    if transposed:
        dy, x = x, dy
    results = [np.zeros_like(x), np.zeros_like(w), np.zeros(dy.shape[1], np.float32)]
    tensors = [cann.aclTensor(array, format="NCHW" if array.ndim == 4 else "ND") for array in (dy, x, w, *results)]

    def call():
        status, size, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
            *tensors[:3], [dy.shape[1]], [2, 2], [1, 1], [1, 1], transposed, [0, 0], 1, [True, True, True], 0,
            *tensors[3:], backend="reference")
        assert status == 0
        assert cann.aclnnConvolutionBackward(None, size, executor, None) == 0

    return call, [dy, x, w, *results]


def time_first():
    shapes = ((7, 2, 4), (7, 2, 3), (3, 3, 4), (4,), (7, 2, 3), (3, 3, 4), (4,))
    arrays = [np.zeros(shape, np.float32) for shape in shapes]
    tensors = [cann.aclTensor(array) for array in arrays]

    def call():
        status, size, executor = cann.aclnnConvTbcBackwardGetWorkspaceSize(*tensors[:4], 1, 0, *tensors[4:],
                                                                           backend="reference")
        assert status == 0
        assert cann.aclnnConvTbcBackward(None, size, executor, None) == 0

    return call, arrays


CALLS = {"normal": lambda: convolution(False), "transposed": lambda: convolution(True), "tbc": time_first}


@pytest.mark.parametrize("name", CALLS)
def test_two_phases_are_quick(name, silent_engine):
    call, _ = CALLS[name]()
    call()
    calls = calls_in(call)
    assert calls < MOST_CALLS, f"two phases make {calls} calls"


@pytest.mark.parametrize("name", CALLS)
def test_the_engine_gets_the_callers_memory(name, silent_engine):
    call, arrays = CALLS[name]()
    call()
    assert silent_engine
    for operands, results in silent_engine:
        for array in (*operands, *results):
            assert any(np.shares_memory(array, other) for other in arrays)
