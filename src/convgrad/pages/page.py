"""Fill a page template: style, script and data go inside, so that a page needs no network and no second file."""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any


def asset(name: str) -> str:
    """The text of a file beside this one."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def page(name: str, title: str, data: Any) -> str:
    """The page `name`.html with its script `name`.js, the common style and `data` as JSON inside."""
    # NOTE: "</script>" inside a string would end the element that holds the data, wherever it stands.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    filled = asset(f"{name}.html")
    for key, value in (("title", html.escape(title)), ("style", asset("style.css")), ("script", asset(f"{name}.js")),
                       ("data", text)):
        filled = filled.replace("{{" + key + "}}", value)
    return filled
