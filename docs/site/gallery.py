"""The gallery: every example is run while the site is built; its text, its output and its pictures are shown."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def pages(folder: Path) -> dict[str, str]:
    """One page for all examples, and the pictures that they drew."""
    made: dict[str, str] = {}
    parts = ["# Gallery", "", "Each program below ran while this page was built. They are the files of `examples/`.", ""]
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        doc = ast.get_docstring(ast.parse(source)) or path.stem
        title = doc.splitlines()[0].rstrip(".").partition(":")[0]
        output, pictures = run(path)
        code = source.split('"""', 2)[2].strip()
        parts += [f"## {title}", "", doc, "", f"`examples/{path.name}`", "", "```python", code, "```", ""]
        if output.strip():
            parts += ["```text", output.rstrip(), "```", ""]
        for name, text in pictures.items():
            made[f"gallery/{path.stem}_{name}"] = text
            parts += [f"![{title}](gallery/{path.stem}_{name})", ""]
    return made | {"gallery.md": "\n".join(parts)}


def run(path: Path) -> tuple[str, dict[str, str]]:
    """Output of an example and the SVG files that it wrote into its working folder; it must end well."""
    package = str(path.parents[1] / "src")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run([sys.executable, str(path)], cwd=folder, env=environment, capture_output=True, text=True,
                              timeout=600)
        if done.returncode:
            raise RuntimeError(f"{path.name} failed:\n{done.stderr}")
        return done.stdout, {found.name: found.read_text(encoding="utf-8") for found in Path(folder).glob("*.svg")}
