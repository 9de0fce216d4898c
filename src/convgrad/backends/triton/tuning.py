"""Tuned tiles: entries found by measuring (`convgrad tune`), kept as JSON, looked up when a plan is made.

An entry is the problem's string and a choice, such as {"kernel": "box", "box": [8, 1, 4, 4], "BN": 128, …}. The file
shipped with the package was measured on one NVIDIA H200; a user's own file (CONVGRAD_TUNING, by default
~/.cache/convgrad/triton.json) goes first.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...problem import Problem

Choice = dict[str, Any]
SEPARATE: Choice = {"kernel": "separate"}  # several results by one kernel each
SHIPPED = Path(__file__).with_name("h200.json")


def left_out(kernel: str) -> bool:
    """Whether CONVGRAD_GPU_WITHOUT, words as in "cells,lines", names the beginning of a kernel's name."""
    return any(kernel.startswith(f"{word}_") for word in os.environ.get("CONVGRAD_GPU_WITHOUT", "").split(",") if word)


def user_file() -> Path:
    """Where `convgrad tune` writes and plans look first."""
    return Path(os.environ.get("CONVGRAD_TUNING") or Path.home() / ".cache" / "convgrad" / "triton.json")


@lru_cache(maxsize=8)
def _entries(path: Path, stamp: float) -> dict[str, Choice]:
    with path.open(encoding="utf-8") as file:
        found = json.load(file)
    entries: dict[str, Choice] = found["entries"]
    return entries


def entries(path: Path) -> dict[str, Choice]:
    """The entries of a file, read again when it changed; none where it does not exist."""
    try:
        return _entries(path, path.stat().st_mtime)
    except OSError:
        return {}


def key(problem: Problem) -> str:
    """The problem's string; bfloat16 and float16 share their tiles."""
    if problem.dtype == "float16":
        problem = problem.with_(dtype="bfloat16", out_dtype="bfloat16" if problem.out_dtype == "float16" else
                                problem.out_dtype)
    return str(problem.with_(device="cuda"))


def tuned(problem: Problem) -> tuple[Choice | None, str]:
    """The measured choice for a problem and where it comes from, or None and the name of the model."""
    name = key(problem)
    for path in (user_file(), SHIPPED):
        found = entries(path).get(name)
        if found is not None:
            return found, f"measured, entry '{name}' of {path.name}"
    return None, "cost model (no measured entry)"


def fields_of(choice: Choice) -> dict[str, Any]:
    """The tile's fields of a choice (lists become tuples)."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in choice.items()
            if name != "kernel"}
