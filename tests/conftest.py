"""Test set-up: the Triton interpreter where there is no GPU, and a summary of what every backend ran and refused."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# The same examples every time, in every clone, however busy the machine is.
settings.register_profile("the same every time", derandomize=True, deadline=None, database=None)
settings.load_profile("the same every time")


def _gpu_is_here() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


# Before anything imports triton: without a GPU its kernels run in the interpreter, on CPU tensors.
if "TRITON_INTERPRET" not in os.environ and not _gpu_is_here():
    os.environ["TRITON_INTERPRET"] = "1"

import oracle  # noqa: E402

broken_by: list[str] = []
ran: Counter[str] = Counter()
refused: Counter[tuple[str, str]] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require", default="native", help="backends and packages, comma-separated, without which the "
                     "run fails instead of leaving their tests out (default: %(default)s)")
    parser.addoption("--seed", type=int, default=0, help="seed of the random operands; printed by failing tests")


def pytest_configure(config: pytest.Config) -> None:
    """A backend that does not load must not look like a green run: its tests would all be skipped."""
    if hasattr(config, "workerinput"):  # of pytest-xdist, whose first process has asked already
        return
    for name in filter(None, config.getoption("--require").split(",")):
        why = oracle.states().get(name) if name in oracle.states() else \
            None if importlib.util.find_spec(name) is not None else "it is not installed"
        if why is not None:
            raise pytest.UsageError(f"{name} is required (--require), but {why}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--seed"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Remember who broke the GPU for this process: every later kernel would fail with the same words."""
    yield
    if call.excinfo is not None and "CUDA error" in str(call.excinfo.value):
        broken_by.append(item.nodeid)


@pytest.fixture(autouse=True)
def _count_backends(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hand this test's counts to the report, which also travels from the workers of a parallel run."""
    if broken_by:
        pytest.skip(f"this process lost its GPU in {broken_by[0]}")
    oracle.passed.clear()
    oracle.refused.clear()
    yield
    request.node.user_properties.append(("ran", dict(oracle.passed)))
    request.node.user_properties.append(("refused", [(*key, count) for key, count in oracle.refused.items()]))


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "teardown":
        for key, value in report.user_properties:
            if key == "ran":
                ran.update(value)
            elif key == "refused":
                refused.update({(backend, why): count for backend, why, count in value})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("backends")
    for backend, why in oracle.missing_backends().items():
        terminalreporter.write_line(f"{backend}: not tested, {why}")
    for backend, count in sorted(ran.items()):
        terminalreporter.write_line(f"{backend}: {count} problems ran and were judged by the oracle")
    for (backend, why), count in sorted(refused.items()):
        terminalreporter.write_line(f"{backend}: {count} problems refused as expected ({why})")
