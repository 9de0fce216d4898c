"""Runs each test of the dialect on the fast CPU backend where it is built, and on the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from convgrad import Unsupported, plan
from convgrad.plan import clear_plan_cache


def native_refusal() -> str | None:
    try:
        plan("input_grad f32 n1 c1 k1 i4x4 w3x3", backend="native")
    except Unsupported as error:
        return str(error)
    return None


@pytest.fixture(params=["reference", "native"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The backend that operators use in this test."""
    if request.param == "native" and (refusal := native_refusal()):
        pytest.skip(refusal)
    monkeypatch.setenv("CONVGRAD_BACKEND", request.param)
    clear_plan_cache()
    yield request.param
    clear_plan_cache()
