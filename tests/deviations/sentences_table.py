"""Writes docs/sentences.md from sentences.toml: `python tests/deviations/sentences_table.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "sentences.md"
HEAD = """# The documents, sentence by sentence

The dialects follow five documents of their vendors. Every sentence of them is held by a test, or is listed where the
document, the vendor's code and this library do not say the same: the tables of [CANN](cann.md),
[oneDNN Graph](onednn.md) and [Ascend C](ascendc.md). The sentences are given by their section and a few words of our
own. This page is generated from `tests/deviations/sentences.toml`.
"""


def load(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))


def documents() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = load("sentences")["document"]
    return found


def deviations() -> dict[str, set[str]]:
    """The names of the listed deviations of each dialect."""
    return {"cann": set(load("cann")), "onednn": {entry["what"] for entry in load("onednn")["deviation"]},
            "ascendc": {entry["id"] for entry in load("ascendc")["deviation"]}}


def shown(holder: str) -> str:
    if holder.startswith("deviation "):
        name = holder.partition(": ")[2]
        return f"deviation: {name if '`' in name else f'`{name}`'}"
    return f"`{holder.partition('/')[2]}`"


def page() -> str:
    lines = [HEAD]
    for document in documents():
        lines += [f"## {document['title']}", "", "| section | sentence | held by |", "|---|---|---|"]
        lines += [f"| {section} | {words} | {', '.join(map(shown, holders))} |"
                  for section, words, *holders in document["sentences"]]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
