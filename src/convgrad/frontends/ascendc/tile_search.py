"""Our own tile search: the tile that moves the fewest bytes from global memory, within the capacities of L1 and L0.

A block of baseM pixels and baseN channels loads, for every valid kernel depth, its window of dY rows (all channels)
and its baseN columns of the weights. So dY is read once per block of channels and the weights once per block of
pixels; large blocks read less, L0C and L1 bound them. A queue with one buffer cannot load while it is being read: its
bytes count twice. Weights that stay in L1 for a whole piece are read once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...blocked import BLOCK_OUT
from ...problem import checked_int
from .conv_types import IterateOrder
from .platform import PlatformInfo
from .tiling_struct import ACCUMULATOR_BYTES, TConv3DBackpropInputTiling, ceil_div, window_rows

SAMPLED_BLOCKS = 1 << 16  # planes with more blocks are counted on their first blocks and scaled


class Buffers(NamedTuple):
    """Buffers of the two L1 queues, and whether the weights stay."""

    al1: int
    bl1: int
    resident: bool


class Candidate(NamedTuple):
    """One block size with its cost in weighted bytes."""

    cost: float
    blocks: int
    base_m: int
    base_n: int
    buffers: Buffers


class KSteps(NamedTuple):
    """How K is cut: slices of base_k, and how many of them one load to L1 brings."""

    base_k: int
    step_a: int
    step_b: int


def real_rows(tiling: TConv3DBackpropInputTiling, base_m: int, start_row: int, rows: int) -> tuple[np.ndarray, float]:
    """Return for each block of a piece the dY rows it loads (sampled if there are very many), and the scale."""
    blocks = ceil_div(rows * tiling.wi, base_m)
    sampled = min(blocks, SAMPLED_BLOCKS)
    top = start_row + (np.arange(sampled, dtype=np.int64) * base_m) // tiling.wi
    bottom = np.minimum(top + window_rows(base_m, tiling.wi, tiling.hk, tiling.dilationH), tiling.stretched_rows)
    first = -(-np.maximum(top, 0) // tiling.strideH)
    last = (bottom - 1) // tiling.strideH
    return np.maximum(last - first + 1, 0), blocks / sampled


def candidates(tiling: TConv3DBackpropInputTiling, platform: PlatformInfo) -> list[Candidate]:
    """Return every block size that L0 can hold, cheapest first."""
    t, e, c0 = tiling, tiling.element_bytes, tiling.c0
    kernel_depths = [len(t.kernel_depths(d)) for d in range(t.di)]
    passes, depths = t.batch * sum(kernel_depths), t.batch * sum(1 for count in kernel_depths if count)
    channels = t.cin1 * c0
    largest = platform.l0ASize // 2 // (c0 * e) // BLOCK_OUT * BLOCK_OUT
    found = []
    for base_m in range(BLOCK_OUT, min(largest, ceil_div(t.hi * t.wi, BLOCK_OUT) * BLOCK_OUT) + 1, BLOCK_OUT):
        rows, scale = real_rows(t, base_m, -t.backpropPadUp, t.hi)
        m_blocks = ceil_div(t.hi * t.wi, base_m)
        a_once = float(rows.sum()) * scale * t.wo * t.cout1 * c0 * e * passes
        b_once = float(t.inner_k * channels * e)
        widest = min(platform.l0CSize // (ACCUMULATOR_BYTES * base_m), platform.l0BSize // 2 // (c0 * e), channels)
        for base_n in range(c0, widest // c0 * c0 + 1, c0):
            n_blocks = ceil_div(channels, base_n)
            for buffers in (Buffers(2, 2, False), Buffers(2, 1, True), Buffers(1, 1, True), Buffers(2, 1, False),
                            Buffers(1, 2, False), Buffers(1, 1, False)):
                if buffers.resident and t.dk > 1:
                    continue
                a_bytes = a_once * n_blocks * (1 if buffers.al1 == 2 else 2)
                b_bytes = (b_once * depths if buffers.resident else
                           b_once * passes * m_blocks * (1 if buffers.bl1 == 2 else 2))
                found.append(Candidate(a_bytes + b_bytes, m_blocks * n_blocks, base_m, base_n, buffers))
    return sorted(found)


def k_steps(tiling: TConv3DBackpropInputTiling, candidate: Candidate, platform: PlatformInfo) -> KSteps | None:
    """Return the cut of K with the fewest products, then the fewest loads, that fits L0 and L1; None if none does."""
    t, e = tiling, tiling.element_bytes
    taps, groups = t.hk * t.wk, t.cout1
    rows = min(window_rows(candidate.base_m, t.wi, t.hk, t.dilationH), t.stretched_rows)
    a_group = candidate.buffers.al1 * e * rows * t.wo * t.strideW * t.c0
    b_group = candidate.buffers.bl1 * e * candidate.base_n * t.kernel_column
    best: tuple[tuple[int, int, int], KSteps] | None = None
    for base_k in base_ks(t, candidate, platform):
        unit = max(1, base_k // t.kernel_column)  # groups of channels that a whole number of slices covers
        counts = range(unit, ceil_div(groups, unit) * unit + 1, unit)
        for b_groups in counts[-1:] if candidate.buffers.resident else counts:
            if b_groups * b_group > platform.usable_l1:
                break
            for a_groups in dividing(counts, b_groups):
                used = a_groups * a_group + b_groups * b_group
                if used > platform.usable_l1:
                    break
                score = (ceil_div(t.inner_k, base_k), ceil_div(groups, a_groups) + ceil_div(groups, b_groups), used)
                if best is None or score < best[0]:
                    slices = taps * t.c0  # elements of K per group
                    best = score, KSteps(base_k, a_groups * slices // base_k, b_groups * slices // base_k)
    return best[1] if best else None


def base_ks(tiling: TConv3DBackpropInputTiling, candidate: Candidate, platform: PlatformInfo) -> list[int]:
    """Return the slice lengths that L0A and L0B hold: divisors and multiples of the kernel window times c0."""
    t = tiling
    widest = min(platform.l0ASize // 2 // (candidate.base_m * t.element_bytes),
                 platform.l0BSize // 2 // (candidate.base_n * t.element_bytes), t.inner_k) // t.c0
    taps = t.hk * t.wk
    parts = {b for b in range(1, math.isqrt(taps) + 1) if taps % b == 0}
    parts |= {taps // b for b in parts} | set(range(taps, widest + 1, taps))
    return sorted((b * t.c0 for b in parts if b <= widest), reverse=True)


def dividing(counts: range, other: int) -> Iterator[int]:
    """Yield the counts that divide `other` or are multiples of it, in ascending order."""
    return (count for count in counts if count % other == 0 or other % count == 0)


def search(tiling: TConv3DBackpropInputTiling, platform: PlatformInfo) -> TConv3DBackpropInputTiling | None:
    """Return `tiling` (extents, strides and pads filled) with the cheapest tile that fits, or None."""
    for candidate in candidates(tiling, platform):
        steps = k_steps(tiling, candidate, platform)
        if steps:
            return tiling.with_(
                baseM=candidate.base_m, baseN=candidate.base_n, baseK=steps.base_k, stepKa=steps.step_a,
                stepKb=steps.step_b, al1Pbuffer=candidate.buffers.al1, bl1Pbuffer=candidate.buffers.bl1,
                al0Pbuffer=2, bl0Pbuffer=2, cl0Pbuffer=1, stepM=1, stepN=1, iterateOrder=int(IterateOrder.ORDER_N),
                singleCoreM=tiling.hi * tiling.wi)
    return None


def smallest_l1(tiling: TConv3DBackpropInputTiling) -> tuple[int, int]:
    """Return the bytes of L1 that the smallest tile needs for A and for B."""
    t, e = tiling, tiling.element_bytes
    rows = min(window_rows(BLOCK_OUT, t.wi, t.hk, t.dilationH), t.stretched_rows)
    return e * rows * t.wo * t.strideW * t.c0, e * t.c0 * t.kernel_column


def fit_cores(tiling: TConv3DBackpropInputTiling, cores: int) -> TConv3DBackpropInputTiling:
    """Return the tiling with singleCoreM (whole dX rows) cut so that the busiest of `cores` moves the fewest bytes.

    Where a piece is smaller than a block, baseM becomes smaller too: the rows of dY that a block loads follow from it.
    """
    t, e, cores = tiling, tiling.element_bytes, checked_int(cores, "cores", 1)
    if cores == 1:
        return t.with_(singleCoreM=t.hi * t.wi)
    channels = min(t.singleCoreCin, t.cin1 * t.c0)
    beside = t.batch * t.di * ceil_div(t.cin1 * t.c0, t.singleCoreCin)  # pieces for each cut along the rows
    best, cut = (math.inf, math.inf), (t.hi, t.baseM)
    for rows in sorted({ceil_div(t.hi, pieces) for pieces in range(1, t.hi + 1)}, reverse=True):
        pieces = ceil_div(t.hi, rows)
        base_m = min(t.baseM, ceil_div(rows * t.wi, BLOCK_OUT) * BLOCK_OUT)
        loaded, scale = real_rows(t, base_m, pieces // 2 * rows - t.backpropPadUp, rows)
        a_bytes = float(loaded.sum()) * scale * t.wo * t.cout1 * t.c0 * e * ceil_div(channels, t.baseN)
        b_bytes = t.inner_k * channels * e * (1 if t.weights_resident else ceil_div(rows * t.wi, base_m))
        of_one_core = ceil_div(beside * pieces, cores)
        busiest = (of_one_core * (a_bytes + b_bytes), of_one_core * rows)  # bytes first, then arithmetic
        if busiest < best:
            best, cut = busiest, (rows, base_m)
    return t.with_(singleCoreM=cut[0] * t.wi, baseM=cut[1])
