"""A Problem as the kernels see it: three spatial axes, phases of the input gradient, strides of the tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ...problem import Conv

Three = tuple[int, int, int]


def three(values: Any, fill: Any) -> Any:
    """Values per spatial axis with leading axes of extent 1 added."""
    return (fill,) * (3 - len(values)) + tuple(values)


@dataclass(frozen=True)
class Geometry:
    """The extents of a Conv on three axes, and per axis what the phases of its input gradient need."""

    batch: int
    groups: int
    group_in: int
    group_out: int
    x: Three
    y: Three
    kernel: Three
    stride: Three
    dilation: Three
    pad: Three
    common: Three  # gcd(stride, dilation)
    inverse: Three  # of dilation/common modulo stride/common
    lowest: Three  # smallest source shift over all phases and taps
    span: Three  # number of source shifts, all phases together
    phase_positions: Three  # input positions per phase (of phase 0, the longest)

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def flops(self) -> float:
        """Of one result, those of padding too."""
        return 2.0 * self.groups * self.group_out * self.group_in * self.taps * self.pixels

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.group_in == self.group_out == 1

    @property
    def phases(self) -> int:
        return math.prod(self.stride)

    @property
    def pixels(self) -> int:
        return self.batch * math.prod(self.y)

    def constants(self) -> dict[str, int]:
        """The geometry under the kernels' names."""
        names = (("K", self.kernel), ("T", self.stride), ("D", self.dilation), ("P", self.pad))
        return {f"{letter}{axis}": values[axis] for letter, values in names for axis in range(3)}

    def phase_constants(self, letters: str = "GVL") -> dict[str, int]:
        names = (("G", self.common), ("V", self.inverse), ("L", self.lowest))
        return {f"{letter}{axis}": values[axis] for letter, values in names for axis in range(3) if letter in letters}


def turned(geo: Geometry) -> Geometry:
    """The same problem with its last two axes exchanged."""
    def swap(values: Three) -> Three:
        return values[0], values[2], values[1]

    names = ("x", "y", "kernel", "stride", "dilation", "pad", "common", "inverse", "lowest", "span", "phase_positions")
    changes: dict[str, Any] = {name: swap(getattr(geo, name)) for name in names}
    return replace(geo, **changes)


@lru_cache(maxsize=1024)
def geometry(conv: Conv) -> Geometry:
    """Describe a Conv for the kernels."""
    kernel, stride = three(conv.kernel_size, 1), three(conv.stride, 1)
    dilation, pads = three(conv.dilation, 1), three(conv.padding, (0, 0))
    pad = tuple(low for low, _ in pads)
    # An axis with one tap has no use for its dilation; an axis with one output none for its stride, but then the
    # phases would still have to cover the input, so the stride stays.
    dilation = tuple(1 if k == 1 else d for k, d in zip(kernel, dilation))
    common: Any = tuple(math.gcd(s, d) for s, d in zip(stride, dilation))
    inverse: Any = tuple(pow(d // g, -1, s // g) if s > g else 0 for s, d, g in zip(stride, dilation, common))
    x = three(conv.in_size, 1)
    # dx: source o = (i + pad - k*dilation) / stride = j + shift with i = phase + stride*j
    lowest, highest = [], []
    for s, d, p, k in zip(stride, dilation, pad, kernel):
        shifts = [(phase + p - t * d) // s for phase in range(s) for t in range(k) if (phase + p - t * d) % s == 0] \
            if s * k <= 4096 else [(p - (k - 1) * d) // s, (s - 1 + p) // s]
        lowest.append(min(shifts))
        highest.append(max(shifts))
    return Geometry(
        conv.batch, conv.groups, conv.group_in, conv.group_out, x, three(conv.out_size, 1), kernel, stride, dilation,
        pad, common, inverse, tuple(lowest), tuple(h - l + 1 for l, h in zip(lowest, highest)),
        tuple(-(-size // s) for size, s in zip(x, stride)))  # type: ignore[arg-type]


def outer_axis(extents: tuple[int, int, int]) -> int:
    """The axis that is cut into rows: the first of many rows, for chunks share the rows at their border."""
    return max(range(3), key=lambda axis: (min(extents[axis], 64), -axis))


def strides_of(tensor: Any) -> tuple[int, ...]:
    """Strides (outer, channel, three spatial) of a canonical view; an axis of extent 1 has stride 0."""
    steps = [step if extent > 1 else 0 for step, extent in zip(tensor.stride(), tensor.shape)]
    # a single channel counts as contiguous: its stride is never used
    channel = steps[1] if tensor.shape[1] > 1 else 1
    return (steps[0], channel, *three(steps[2:], 0))


def channels_last(tensor: Any) -> bool:
    """Whether channels are neighbours, and every other axis takes steps of 16 bytes: no copy is needed."""
    return (tensor.shape[1] == 1 or tensor.stride(1) == 1) and tensor.data_ptr() % 16 == 0 and not any(
        step * tensor.element_size() % 16
        for axis, step in enumerate(tensor.stride()) if axis != 1 and tensor.shape[axis] > 1)


def runs_of(tensor: Any) -> list[tuple[int, int]]:
    """The spatial axes as few as they are in memory: (extent, stride), the last one fastest."""
    found: list[tuple[int, int]] = []
    for extent, step in zip(tensor.shape[2:], tensor.stride()[2:]):
        if extent == 1:
            continue
        if found and found[-1][1] == extent * step:
            found[-1] = (found[-1][0] * extent, step)
        else:
            found.append((extent, step))
    return found or [(1, 1)]


def needs_wide(*tensors: Any) -> bool:
    """Whether any element of the tensors lies 2^31 elements or more from the first."""
    return any(sum((extent - 1) * abs(step) for extent, step in zip(t.shape, t.stride())) >= 2**31 - 2**24
               for t in tensors)
