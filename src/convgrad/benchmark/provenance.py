"""On what was it measured: machine, versions and commit, as plain data for the JSON results."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from ..machine import cores, processor


def describe_machine() -> dict[str, Any]:
    """Return the processor, its useful instruction sets, cores and memory."""
    name, instructions = processor()
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        memory = 0
    return {"cpu": name, "instructions": list(instructions), "cores": cores(), "memory_bytes": memory,
            "system": f"{platform.system()} {platform.release()}"}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that take part."""
    found = {"python": platform.python_version()}
    for package in ("convgrad", "numpy", "ml_dtypes", "torch", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit of the source checkout, with "+" for local changes; None outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # An installed package may lie below somebody else's repository: it must be a tracked file of its own.
        git("ls-files", "--error-unmatch", __file__)
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
