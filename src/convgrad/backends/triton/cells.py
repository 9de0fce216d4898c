"""Convolutions of few channels or small groups seen as dense ones: kernels that spread weights and gather gradients.

`fold` neighbouring positions of the last axis (of dy; stride x fold of x) and the groups of a tile become channels of
one wider convolution, whose weight is the given one spread over a larger block with zeros elsewhere.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108
import triton
import triton.language as tl

from .part_sums import add_bias


@triton.jit
def spread_kernel(
        weight, spread, size, wo, wi, w0, w1, w2,
        K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
        T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
        D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
        P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
        L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr,
        U0: tl.constexpr, U1: tl.constexpr, U2: tl.constexpr,
        KG: tl.constexpr, CG: tl.constexpr, GP: tl.constexpr,
        FOLD: tl.constexpr, CHUNKS: tl.constexpr, PER_CELL: tl.constexpr,
        CB: tl.constexpr, BN: tl.constexpr, COLUMN_TILES: tl.constexpr, BE: tl.constexpr):
    """The weights of the input gradient as (group tile, column tile, shift 0, cell, chunk, shift 1, column, element).

    See cell_gather.py: an element of a chunk is (position of the cell, output channel), a column (phases, channel).
    """
    at = tl.program_id(0) * BE + tl.arange(0, BE)
    element = at % CB
    rest = at // CB
    column = rest % BN
    rest = rest // BN
    s1 = rest % U1
    rest = rest // U1
    element += (rest % CHUNKS) * CB
    rest = rest // CHUNKS
    cell = rest % U2
    rest = rest // U2
    s0 = rest % U0
    rest = rest // U0
    column += (rest % COLUMN_TILES) * BN
    super_group = rest // COLUMN_TILES
    k = element % (KG * GP)
    place = element // (KG * GP)
    c = column % (CG * GP)
    phase = column // (CG * GP)
    phase_2 = phase % (T2 * FOLD)
    phase_1 = (phase // (T2 * FOLD)) % T1
    phase_0 = phase // (T2 * FOLD * T1)
    reach_0 = phase_0 + P0 - (s0 + L0) * T0
    reach_1 = phase_1 + P1 - (s1 + L1) * T1
    reach_2 = phase_2 + P2 - ((cell + L2) * PER_CELL + place) * T2
    tap_0 = reach_0 // D0
    tap_1 = reach_1 // D1
    tap_2 = reach_2 // D2
    there = ((at < size) & (place < PER_CELL) & (phase_0 < T0) & (k // KG == c // CG)
             & (reach_0 >= 0) & (reach_1 >= 0) & (reach_2 >= 0)
             & (tap_0 * D0 == reach_0) & (tap_1 * D1 == reach_1) & (tap_2 * D2 == reach_2)
             & (tap_0 < K0) & (tap_1 < K1) & (tap_2 < K2))
    where = ((super_group * (KG * GP) + k).to(tl.int64) * wo + (c % CG).to(tl.int64) * wi + tap_0.to(tl.int64) * w0
             + tap_1.to(tl.int64) * w1 + tap_2.to(tl.int64) * w2)
    tl.store(spread + at, tl.load(weight + where, mask=there, other=0.0), mask=at < size)


@triton.jit
def collect(
        partial, result, size, SPLITS, r_split, p_o, p_i, p_0, p_1, p_2, ro, ri, r0, r1, r2,
        K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
        T2: tl.constexpr, D2: tl.constexpr, P2: tl.constexpr,
        L2: tl.constexpr, KG: tl.constexpr, CG: tl.constexpr, GP: tl.constexpr, FOLD: tl.constexpr,
        SWAPPED: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr):
    """Add the partial sums of the wider weight gradient that belong to one weight, in a fixed order.

    The wider gradient has output channels (position of dy, group, k) and input channels (position of x, group, c); a
    tap of the last axis is found at `FOLD` places, one for each position of dy.
    SWAPPED: dy and x changed places, which turns the kernel around.
    """
    element = tl.program_id(0).to(tl.int64) * BE + tl.arange(0, BE)
    there = element < size
    c = element % CG
    rest = element // CG
    t2 = rest % K2
    rest = rest // K2
    t1 = rest % K1
    rest = rest // K1
    t0 = rest % K0
    o = rest // K0
    group = o // KG
    k = o % KG
    super_group = group // GP
    acc = tl.zeros([BE], dtype=partial.dtype.element_ty)
    for first in range(0, SPLITS * FOLD, BS):
        term = first + tl.arange(0, BS)
        place = (term % FOLD)[:, None]
        split = (term // FOLD).to(tl.int64)[:, None]
        if SWAPPED:  # dw[k, c, t] = sum of x[i, c] dy[i - t, k]: x takes the place of dy, K2 - 1 - t that of t
            reach = place + (K2 - 1 - t2)[None, :] - (K2 - 1 - P2)
        else:
            reach = place * T2 + (t2 * D2)[None, :] - P2
        cell = reach // (T2 * FOLD)
        cell = tl.where(cell * (T2 * FOLD) > reach, cell - 1, cell)  # rounded down
        position = reach - cell * (T2 * FOLD)
        if SWAPPED:
            output = place * CG + c[None, :]
            inner = position * KG + k[None, :]
            at_0 = K0 - 1 - t0
            at_1 = K1 - 1 - t1
        else:
            output = (super_group * (GP * KG) + (group % GP) * KG + k)[None, :] + place * (GP * KG)
            inner = position * (GP * CG) + ((group % GP) * CG + c)[None, :]
            at_0 = t0
            at_1 = t1
        where = (split * r_split + output * p_o + inner * p_i + (at_0 * p_0 + at_1 * p_1)[None, :] + (cell - L2) * p_2)
        part = tl.load(partial + where, mask=(term < SPLITS * FOLD)[:, None] & there[None, :], other=0.0)
        acc += tl.sum(part, 0)
    tl.store(result + o * ro + c * ri + t0 * r0 + t1 * r1 + t2 * r2, acc.to(result.dtype.element_ty), mask=there)


@triton.jit
def collect_kernel(
        partial, result, bias_partial, bias, size, SPLITS, r_split, p_o, p_i, p_0, p_1, p_2, ro, ri, r0, r1, r2,
        programs, channels, bias_parts, r_k,
        K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
        T2: tl.constexpr, D2: tl.constexpr, P2: tl.constexpr,
        L2: tl.constexpr, KG: tl.constexpr, CG: tl.constexpr, GP: tl.constexpr, FOLD: tl.constexpr,
        SWAPPED: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr, BIAS: tl.constexpr, BBS: tl.constexpr,
        BBE: tl.constexpr):
    """`programs` collect; with BIAS the programs behind them add the parts of a bias gradient."""
    if BIAS:
        if tl.program_id(0) < programs:
            collect(partial, result, size, SPLITS, r_split, p_o, p_i, p_0, p_1, p_2, ro, ri, r0, r1, r2, K0, K1, K2,
                    T2, D2, P2, L2, KG, CG, GP, FOLD, SWAPPED, BS, BE)
        else:
            add_bias(bias_partial, bias, tl.program_id(0) - programs, channels, bias_parts, r_k, BBS, BBE)
    else:
        collect(partial, result, size, SPLITS, r_split, p_o, p_i, p_0, p_1, p_2, ro, ri, r0, r1, r2, K0, K1, K2,
                T2, D2, P2, L2, KG, CG, GP, FOLD, SWAPPED, BS, BE)
