"""Descriptors whose box is not the block that the kernel is compiled for.

A block of a Triton kernel has powers of two as extents; a box of the copy engine need not. The kernel counts its bytes
itself and knows the rows that a box fills.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@dataclass
class BoxDescriptor(TensorDescriptor):  # type: ignore[misc]
    """A descriptor of a tensor; `box`, where given, is what one copy brings."""

    box: tuple[int, ...] | None = None


def teach_driver() -> None:
    """Make Triton's launcher use the box of a descriptor where it has one."""
    from triton.backends.nvidia import driver

    plain = driver.make_tensordesc_arg

    def make_tensordesc_arg(arg: Any, metadata: Any) -> Any:
        box = getattr(arg, "box", None)
        return plain(arg, metadata if box is None else {**metadata, "block_size": list(box)})

    driver.make_tensordesc_arg = make_tensordesc_arg


teach_driver()
