"""What this machine offers: processor, instruction sets, graphics cards, and which backends run on it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from .plan import BACKENDS, ORDER, load
from .problem import Conv, Problem, Unsupported

# The instruction sets that decide how fast a convolution can be, by their names in /proc/cpuinfo.
INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
                    "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "sve")


def processor() -> tuple[str, tuple[str, ...]]:
    """Name of the processor and those of its instruction sets that matter here."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, tuple(flag for flag in INSTRUCTION_SETS if flag in flags)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def graphics_cards() -> tuple[str, ...]:
    """NVIDIA cards by name and memory; empty where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def device_of(backend: str) -> str:
    """Where the arrays of a backend lie."""
    return next((device for device, names in ORDER.items() if backend in names), "cpu")


def cuda_missing() -> str | None:
    """Why nothing can be computed on CUDA tensors here, or None; Triton's interpreter computes on the CPU."""
    if interpreted():
        return None
    try:
        from .frontends.torch.tensors import has_cuda
    except ImportError as error:
        return f"not available: {error}"
    return None if has_cuda() else "there is no CUDA device here"


def backend_states() -> dict[str, str | None]:
    """For every backend None when it runs here, or the reason why not."""
    return {name: backend_state(name) for name in BACKENDS}


def backend_state(name: str) -> str | None:
    """None when a backend runs here, or the reason why not."""
    return planner_state(name) or (cuda_missing() if device_of(name) == "cuda" else None)


def planner_state(name: str) -> str | None:
    """None when a backend makes plans here, which needs no GPU, or the reason why not."""
    tiny = Problem(Conv(1, 1, 1, (3,), (2,)), "input", device=device_of(name))
    try:
        load(name).plan(tiny)
        return None
    except (Unsupported, ImportError) as error:
        return str(error)
