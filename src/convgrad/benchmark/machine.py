"""On what was it measured: machine, versions and commit, as plain data for the JSON results."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

# The instruction sets that decide how fast a convolution can be, by their names in /proc/cpuinfo.
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
         "amx_tile", "amx_bf16", "amx_int8")


def cpu_info() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo; empty where there is none."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, colon, value = line.partition(":")
            if not colon:
                break
            fields[key.strip()] = value.strip()
    except OSError:
        pass
    return fields


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine() -> dict[str, Any]:
    """Return the processor, its useful instruction sets, cores and memory."""
    info = cpu_info()
    flags = set(info.get("flags", "").split())
    name = info.get("model name") or platform.processor() or platform.machine()
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        memory = 0
    return {"cpu": name, "family": info.get("cpu family", ""), "model": info.get("model", ""),
            "instructions": [flag for flag in FLAGS if flag in flags], "cores": cores(),
            "memory_bytes": memory, "system": f"{platform.system()} {platform.release()}"}


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
