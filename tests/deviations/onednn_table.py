"""Writes the table of deviations in docs/onednn.md from onednn.toml: `python tests/deviations/onednn_table.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DATA = Path(__file__).with_name("onednn.toml")
PAGE = Path(__file__).parents[2] / "docs" / "onednn.md"
BEGIN, END = "<!-- deviations: begin (generated from tests/deviations/onednn.toml) -->", "<!-- deviations: end -->"


def load() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(DATA.read_text(encoding="utf-8"))["deviation"]
    return found


def table() -> str:
    rows = ["| what | the document | the library | here |", "|---|---|---|---|"]
    rows += ["| " + " | ".join(entry[key] for key in ("what", "document", "library", "here")) + " |"
             for entry in load()]
    return "\n".join(rows)


def page_with_table(page: str) -> str:
    """The page with the text between the two marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
