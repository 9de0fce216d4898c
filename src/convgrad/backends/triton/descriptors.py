"""Descriptors whose box is not the block that the kernel is compiled for.

A block of a Triton kernel has powers of two as extents; a box of the copy engine need not, and may take every second
element of an axis. The kernel counts its bytes itself and knows the rows that a box fills.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@dataclass
class BoxDescriptor(TensorDescriptor):  # type: ignore[misc]
    """A descriptor of a tensor: `box` elements are copied per axis, `steps` apart, where given."""

    box: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None

    @property
    def span(self) -> tuple[int, ...] | None:
        """Elements per axis from the first to the last one copied, as tensor maps want it."""
        if self.box is None or self.steps is None:
            return self.box
        return tuple((size - 1) * step + 1 for size, step in zip(self.box, self.steps))
