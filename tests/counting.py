"""How much Python a call is, as a number that no busy machine changes: the functions called in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_in(function: Callable[[], Any]) -> int:
    """Functions that one call calls, those in C included; about 0.1 microseconds each."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
