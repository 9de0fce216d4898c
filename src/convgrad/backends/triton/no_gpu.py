"""A stand-in for the GPU in processes that only compile."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget


class NoDriver:
    """Stands for the GPU in a process that only compiles."""

    def __init__(self, target: tuple[str, int, int]) -> None:
        self.target = GPUTarget(*target)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target
