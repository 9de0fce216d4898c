"""MkDocs hooks: pages that are made from data or from files elsewhere in the repository, while the site is built."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "src")]

import deviations  # noqa: E402
import drawings  # noqa: E402
import gallery  # noqa: E402
import performance  # noqa: E402

# Documents that live beside what they describe: file in the repository -> page of the site.
ELSEWHERE = {"bench/cpu.md": "bench/cpu.md", "bench/h200.md": "bench/h200.md", "bench/README.md": "bench/README.md",
             "CHANGELOG.md": "changelog.md", "native/README.md": "native.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages and pictures."""
    made: dict[str, str] = {page: (ROOT / source).read_text(encoding="utf-8") for source, page in ELSEWHERE.items()}
    made |= performance.pages(ROOT / "bench" / "results")
    made |= drawings.pictures()
    made["deviations.md"] = deviations.page(ROOT / "tests" / "deviations")
    made |= gallery.pages(ROOT / "examples")
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of repository documents lead to pages of the site; those to source files become plain text."""
    depth = page.file.src_uri.count("/")

    def moved(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if re.match(r"(https?:|#|mailto:)", target):
            return match[0]
        path, hash_, anchor = target.partition("#")
        source = next((s for s, p in ELSEWHERE.items() if p == page.file.src_uri), f"docs/{page.file.src_uri}")
        found = (ROOT / source).parent.joinpath(path).resolve()
        name = found.relative_to(ROOT).as_posix() if found.is_relative_to(ROOT) else path
        inside = ELSEWHERE.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)
        if inside is None:
            return f"{text} (`{name}`)" if not text.startswith("`") else text
        return f"[{text}]({'../' * depth}{inside}{hash_}{anchor})"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", moved, markdown)
