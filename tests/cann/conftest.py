"""Which backend the numerical tests of the CANN dialect run on: the engine where it is built, else the reference."""

from __future__ import annotations

import pytest

import convgrad


def available() -> str | None:
    try:
        convgrad.plan("input_grad f32 n1 c1 k1 i4x4 w3x3")
        return None
    except convgrad.Unsupported:
        return "reference"


@pytest.fixture(scope="session")
def backend() -> str | None:
    return available()


@pytest.fixture(autouse=True)
def default_product():
    from convgrad import cann

    cann.set_product("A2")
    cann.aclrtCtxSetSysParamOpt(cann.aclSysParamOpt.ACL_OPT_DETERMINISTIC, 0)
    yield
    cann.set_product("A2")
    cann.aclrtCtxSetSysParamOpt(cann.aclSysParamOpt.ACL_OPT_DETERMINISTIC, 0)
