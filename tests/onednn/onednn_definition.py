"""The three sums of a convolution written down tap by tap, in float64: what every operator must give.

Nothing of convgrad is used here. `small` is the tensor on the output side, `large` on the input side; all arrays are
canonical (N C spatial, O I spatial). Only the pads at the beginning enter: those at the end merely set the extents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np


class Case(NamedTuple):
    """A geometry in the terms of the attributes, with the extents of both sides."""

    batch: int
    large_channels: int
    small_channels: int
    large: tuple[int, ...]
    small: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]
    groups: int = 1

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"small": (self.batch, self.small_channels, *self.small),
                "large": (self.batch, self.large_channels, *self.large),
                "weights": (self.small_channels, self.large_channels // self.groups, *self.kernel)}

    @property
    def attributes(self) -> dict[str, Any]:
        return {"strides": self.strides, "dilations": self.dilations, "pads_begin": self.pads_begin,
                "pads_end": self.pads_end, "groups": self.groups}


def linked(case: Case) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]]:
    """For each tap: its index, and the open meshes of the small and large positions that it links."""
    for tap in itertools.product(*map(range, case.kernel)):
        small, large = [], []
        for axis, k in enumerate(tap):
            pairs = [(q, q * case.strides[axis] - case.pads_begin[axis] + k * case.dilations[axis])
                     for q in range(case.small[axis])]
            pairs = [(q, i) for q, i in pairs if 0 <= i < case.large[axis]]
            small.append([q for q, _ in pairs])
            large.append([i for _, i in pairs])
        if all(small):
            yield tap, np.ix_(*small), np.ix_(*large)


def compute(case: Case, wanted: str, tensors: dict[str, Any]) -> Any:
    """The tensor `wanted` from the other two."""
    result = np.zeros(case.shapes[wanted])
    outer, inner = case.small_channels // case.groups, case.large_channels // case.groups
    summed = (0, *range(2, 2 + len(case.kernel)))  # batch and positions
    for group in range(case.groups):
        parts = {"small": slice(group * outer, (group + 1) * outer), "large": slice(group * inner, (group + 1) * inner)}
        here = {**tensors, wanted: result}
        small, large = ((here[role][:, parts[role]] if role in here else None) for role in ("small", "large"))
        weights = here["weights"][parts["small"]]
        for tap, small_mesh, large_mesh in linked(case):
            at_small, at_large = (..., *small_mesh), (..., *large_mesh)
            at_tap = (slice(None), slice(None), *tap)
            if wanted == "large":
                large[at_large] += np.einsum("no...,oi->ni...", small[at_small], weights[at_tap])
            elif wanted == "small":
                small[at_small] += np.einsum("ni...,oi->no...", large[at_large], weights[at_tap])
            else:
                weights[at_tap] += np.tensordot(small[at_small], large[at_large], (summed, summed))
    return result


def integers(case: Case, role: str, seed: int) -> Any:
    """Small integers, thinned so that every partial sum stays exact in bf16 products and f32 sums."""
    rng = np.random.default_rng([seed, len(role)])
    values = rng.integers(-2, 3, case.shapes[role])
    return np.where(rng.random(case.shapes[role]) < 0.7, values, 0).astype(np.float64)
