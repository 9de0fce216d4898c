"""The page of deviations: where a dialect differs from the vendor's document or library, from the tests' own data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TITLES = {"onednn": "oneDNN Graph", "cann": "CANN", "ascendc": "Ascend C"}
SHOWN = ("what", "operator", "document", "documents", "library", "vendor", "theirs", "here", "ours")


def page(folder: Path) -> str:
    """One table a dialect. Every row is held by a test, so that it stays true."""
    parts = ["# Deviations", "",
             "Where a dialect knowingly differs from its vendor's document or library, or where the two disagree and "
             "one is followed. Each line is held by a test.", ""]
    for name, title in TITLES.items():
        parts += [f"## {title}", "", *table(entries(folder / f"{name}.toml")), ""]
    return "\n".join(parts)


def entries(path: Path) -> list[dict[str, Any]]:
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    if "deviation" in found:
        listed: list[dict[str, Any]] = found["deviation"]
        return listed
    return [{"what": name, **entry} for name, entry in found.items()]


def table(rows: list[dict[str, Any]]) -> list[str]:
    rows = [{"what": row.get("id", "").replace("_", " "), **row} for row in rows]
    columns = [name for name in SHOWN if any(row.get(name) for row in rows)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(str(row.get(name, "")).replace("|", "\\|") for name in columns) + " |")
    return lines
