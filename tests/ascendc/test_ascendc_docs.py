"""The examples of docs/ascendc.md run, and its picture is what the model draws."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from test_ascendc_examples import strided

from convgrad import ascendc

DOCS = Path(__file__).parents[2] / "docs"


def test_examples_of_the_page_run() -> None:
    page = (DOCS / "ascendc.md").read_text(encoding="utf-8")
    parts = [textwrap.dedent(part) for part in re.findall(r"^ *```python\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)]
    assert len(parts) >= 12
    exec(compile("\n".join(parts), "docs/ascendc.md", "exec"), {})


def test_picture_of_the_page_is_current() -> None:
    assert (DOCS / "images" / "ascendc_strided.svg").read_text(encoding="utf-8") == ascendc.draw(strided()).to_svg()
