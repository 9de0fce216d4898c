"""Copies of tensors as rows of channels, padded with zeros to a multiple of 16 bytes, for the copy engine to read."""

# mypy: ignore-errors
import triton
import triton.language as tl

from .elements import position

PAD_ELEMENTS = 4096  # elements that a program copies


@triton.jit
def shuffled(index):
    """Each 16 indices in the order 0 1 4 5 8 9 12 13 2 3 6 7 10 11 14 15."""
    return (index & ~14) | ((index & 6) << 1) | ((index & 8) >> 2)


@triton.jit
def pad_kernel(source, target, rows, channels, J0, J1, J2, s_n, s_c, s_0, s_1, s_2, CHANNELS: tl.constexpr,
               WIDTH: tl.constexpr, ROWS: tl.constexpr, SHUFFLED: tl.constexpr):
    """Rows (n, j0, j1, j2) of `channels` elements, from any strides to rows of CHANNELS elements.

    SHUFFLED: "rows" or "channels" take each 16 values of n or of the channel in the order in which products take them
    (see `decoded` in fp8_products.py).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n, j0, j1, j2 = position(row, J0, J1, J2)
    if SHUFFLED == "rows":
        n = shuffled(n)
    where = n * s_n + j0 * s_0 + j1 * s_1 + j2 * s_2
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    from_channel = shuffled(c) if SHUFFLED == "channels" else c
    value = tl.load(source + where[:, None] + (from_channel * s_c)[None, :],
                    mask=(row < rows)[:, None] & (c < channels)[None, :], other=0.0)
    tl.store(target + row[:, None] * CHANNELS + c[None, :], value,
             mask=(row < rows)[:, None] & (c < CHANNELS)[None, :])


@triton.jit
def turn_kernel(weight, target, outs, ins, A1, A2, w_o, w_i, w_0, w_1, w_2, TAPS: tl.constexpr, FEW: tl.constexpr):
    """A weight of any strides as rows (input channel, tap) of output channels, for products that sum over those."""
    tap = tl.program_id(0)
    first = weight + (tap // (A1 * A2)) * w_0 + (tap // A2 % A1) * w_1 + (tap % A2) * w_2
    o = tl.program_id(1) * FEW + tl.arange(0, FEW)
    i = tl.program_id(2) * FEW + tl.arange(0, FEW)
    value = tl.load(first + o.to(tl.int64)[:, None] * w_o + (i * w_i)[None, :],
                    mask=(o < outs)[:, None] & (i < ins)[None, :], other=0.0)
    tl.store(target + (i.to(tl.int64) * TAPS + tap)[:, None] * outs + o[None, :], tl.trans(value),
             mask=(i < ins)[:, None] & (o < outs)[None, :])


@triton.jit
def join_kernel(weight, target, size, w_o, w_i, KG: tl.constexpr, CG: tl.constexpr, CHANNELS: tl.constexpr,
                BE: tl.constexpr):
    """Weights (O, CG) of one tap as rows of all CHANNELS input channels, zeros between different groups."""
    at = tl.program_id(0) * BE + tl.arange(0, BE)
    o = at // CHANNELS
    c = at % CHANNELS
    mine = (at < size) & (o // KG == c // CG)
    value = tl.load(weight + o.to(tl.int64) * w_o + (c % CG) * w_i, mask=mine, other=0.0)
    tl.store(target + at, value, mask=at < size)


@triton.jit
def space_kernel(weight, target, size, A1, A2, w_o, w_i, w_0, w_1, w_2, KG: tl.constexpr, CG: tl.constexpr,
                 OUTS: tl.constexpr, INS: tl.constexpr, TAPS: tl.constexpr, BE: tl.constexpr):
    """Weights as rows (group, one of OUTS, tap) of INS: zeros where a group has but KG outputs of CG inputs."""
    at = tl.program_id(0) * BE + tl.arange(0, BE)
    i = at % INS
    tap = at // INS % TAPS
    row = at // (INS * TAPS)
    o = row % OUTS
    there = (at < size) & (i < CG) & (o < KG)
    where = ((row // OUTS * KG + o).to(tl.int64) * w_o + i * w_i + (tap // (A1 * A2)) * w_0 + (tap // A2 % A1) * w_1
             + (tap % A2) * w_2)
    tl.store(target + at, tl.load(weight + where, mask=there, other=0.0), mask=at < size)
