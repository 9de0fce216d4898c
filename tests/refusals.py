"""What each backend is expected to refuse. A refusal that no line here expects fails the test that meets it."""

from __future__ import annotations

from collections.abc import Callable

from convgrad import Problem

# backend -> (why it is expected, which problems). A new backend starts with no line: it must run everything.
EXPECTED: dict[str, list[tuple[str, Callable[[Problem], bool]]]] = {
    "reference": [],
    "native": [],
    "triton": [],
}


def expected_refusal(backend: str, problem: Problem) -> str | None:
    """Why this backend is expected to refuse the problem, or None."""
    for why, applies in EXPECTED.get(backend, []):
        if applies(problem):
            return why
    return None
