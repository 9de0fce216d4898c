"""The list of deviations as the table of docs/ascendc.md. Run this file to print it."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DATA = Path(__file__).parents[1] / "deviations" / "ascendc.toml"


def deviations() -> list[dict[str, str]]:
    found: list[dict[str, str]] = tomllib.loads(DATA.read_text(encoding="utf-8"))["deviation"]
    return found


def table() -> str:
    lines = ["| | the library | this model |", "|---|---|---|"]
    lines += [f"| `{entry['id']}` | {entry['theirs']} | {entry['ours']} |" for entry in deviations()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
