"""Tuned tiles: entries found by measuring (`convgrad tune`), kept as JSON, looked up when a plan is made.

An entry is the problem's string, a kernel and its tile, such as {"kernel": "box_lines", "BM": 128, "BN": 64, …}. The
file shipped with the package was measured on one NVIDIA H200 and counts on such cards only; a user's own file
(CONVGRAD_TUNING, by default ~/.cache/convgrad/triton.json) goes first.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...problem import Problem
from .gpu import H200, INTERPRETER, Gpu

Entry = dict[str, Any]
SEPARATE: Entry = {"kernel": "separate"}  # several results by one kernel each
SHIPPED = Path(__file__).with_name("h200.json")
SHIPPED_FOR = (H200.name, INTERPRETER.name)


def user_file() -> Path:
    """Where `convgrad tune` writes and plans look first."""
    return Path(os.environ.get("CONVGRAD_TUNING") or Path.home() / ".cache" / "convgrad" / "triton.json")


@lru_cache(maxsize=8)
def _entries(path: Path, stamp: float) -> dict[str, Entry]:
    with path.open(encoding="utf-8") as file:
        found = json.load(file)
    entries: dict[str, Entry] = found["entries"]
    return entries


def entries(path: Path) -> dict[str, Entry]:
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


def entry_of(problem: Problem, gpu: Gpu) -> tuple[Entry | None, str]:
    """The measured entry for a problem and where it comes from; None where no tile was measured on such a card."""
    name = key(problem)
    for path in (user_file(), *([SHIPPED] if gpu.name in SHIPPED_FOR else [])):
        found = entries(path).get(name)
        if found is not None:
            return found, f"measured, entry '{name}' of {path.name}"
    return None, ""


def fields_of(choice: Entry) -> dict[str, Any]:
    """The tile's fields of a choice (lists become tuples)."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in choice.items()
            if name != "kernel"}
