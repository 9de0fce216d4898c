"""The CUDA driver of `fake_cuda.cpp`: built once per test run, it notes launches instead of making them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


class FakeDriver:
    """A library in the place of libcuda.so.1, and what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "libfakecuda.so")
        source = Path(__file__).with_name("fake_cuda.cpp")
        subprocess.run([str(COMPILER), "-std=c++17", "-shared", "-fPIC", "-O0", "-o", self.path, str(source)],
                       check=True, timeout=120)
        self.library = ctypes.CDLL(self.path)
        self.library.fake_lines.restype = ctypes.c_char_p

    def lines(self) -> list[str]:
        """What was asked since the last time, a line each."""
        found = self.library.fake_lines().decode().splitlines()
        self.library.fake_forget()
        return found

    def launches(self) -> list[str]:
        return [line for line in self.lines() if line.startswith("launch")]

    def kernel_parameters(self, name: str, count: int) -> None:
        """Say how many parameters a kernel has, which a driver reads in its machine code."""
        self.library.fake_parameters(name.encode(), count)

    def fail(self, function: str, status: int, after: int = 0) -> None:
        """Let one call of a function fail, after some that do not."""
        self.library.fake_failure(function.encode(), status, after)

    def call(self, slots: int, device: int = 0, problem: str = "the problem") -> Any:
        from convgrad import _native

        return _native.GpuCall(problem, slots, device, self.path)
