"""Adding the parts of a weight or bias gradient that several programs summed, in a fixed order."""

# mypy: ignore-errors
import triton
import triton.language as tl

from .elements import as_result, position, wide


@triton.jit
def sum_of_parts(partial, element, there, size, splits, BS: tl.constexpr, BE: tl.constexpr):
    """Elements of `splits` arrays of `size`, which lie one after the other, added in order, BS arrays at a time."""
    acc = tl.zeros([BE], dtype=partial.dtype.element_ty)
    for first in range(0, splits, BS):
        split = first + tl.arange(0, BS)
        part = tl.load(partial + split.to(tl.int64)[:, None] * size + element[None, :],
                       mask=(split < splits)[:, None] & there[None, :], other=0.0)
        acc += tl.sum(part, 0)
    return acc


@triton.jit
def add_bias(partial, result, program, channels, parts, r_k, BS: tl.constexpr, BE: tl.constexpr):
    """BE channels of `parts` partial bias gradients, added in order."""
    k = program * BE + tl.arange(0, BE)
    acc = sum_of_parts(partial, k, k < channels, channels, parts, BS, BE)
    tl.store(result + k * r_k, as_result(acc, result), mask=k < channels)


@triton.jit
def add_weights(partial, result, size, splits, r_o, r_i, r_0, r_1, r_2, INNER: tl.constexpr, A0: tl.constexpr,
                A1: tl.constexpr, A2: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr, BS: tl.constexpr,
                BE: tl.constexpr):
    """Add `splits` arrays of `size` sums; element (o, t0, t1, t2, i), i fastest, goes to its place by strides.

    FEW is the number of parts where it is small, or 0. The extents are constants: divisions by numbers that the
    compiler does not know took longer than the additions.
    """
    element = wide(tl.program_id(0), WIDE) * BE + tl.arange(0, BE)
    there = element < size
    if FEW > 0:
        acc = tl.zeros([BE], dtype=partial.dtype.element_ty)
        for split in tl.static_range(FEW):
            acc += tl.load(partial + tl.full([], split, tl.int64) * size + element, mask=there, other=0.0)
    else:
        acc = sum_of_parts(partial, element, there, size, splits, BS, BE)
    i = element % INNER
    o, t0, t1, t2 = position(element // INNER, A0, A1, A2)
    tl.store(result + o.to(tl.int64) * r_o + i * r_i + t0 * r_0 + t1 * r_1 + t2 * r_2,
             as_result(acc, result), mask=there)


@triton.jit
def add_parts_kernel(partial, result, bias_partial, bias, size, splits, r_o, r_i, r_0, r_1, r_2, programs, channels,
                     bias_parts, r_k, INNER: tl.constexpr, A0: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr,
                     WIDE: tl.constexpr, FEW: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr, BIAS: tl.constexpr,
                     BBS: tl.constexpr, BBE: tl.constexpr):
    """A weight gradient's parts, by `programs`; with BIAS the programs behind them add those of a bias gradient."""
    if BIAS:
        if tl.program_id(0) < programs:
            add_weights(partial, result, size, splits, r_o, r_i, r_0, r_1, r_2, INNER, A0, A1, A2, WIDE, FEW, BS, BE)
        else:
            add_bias(bias_partial, bias, tl.program_id(0) - programs, channels, bias_parts, r_k, BBS, BBE)
    else:
        add_weights(partial, result, size, splits, r_o, r_i, r_0, r_1, r_2, INNER, A0, A1, A2, WIDE, FEW, BS, BE)


@triton.jit
def reduce_kernel(partial, result, size, SPLITS, INNER, A1, A2, A3, r_o, r_i, r_0, r_1, r_2,
                  BS: tl.constexpr, BE: tl.constexpr):
    """Add SPLITS partial arrays of `size` float32 in order; element (o, t0, t1, t2, i), i fastest, goes by strides."""
    element = tl.program_id(0).to(tl.int64) * BE + tl.arange(0, BE)
    there = element < size
    acc = sum_of_parts(partial, element, there, size, SPLITS, BS, BE)
    i = element % INNER
    o, t0, t1, t2 = position(element // INNER, A1, A2, A3)
    tl.store(result + o * r_o + i * r_i + t0 * r_0 + t1 * r_1 + t2 * r_2, as_result(acc, result), mask=there)


@triton.jit
def reduce_taps_kernel(partial, dw, db, size, SPLITS, C, A1, A2, A3, w_c, w_0, w_1, w_2, b_c, BIAS: tl.constexpr,
                       BS: tl.constexpr, BE: tl.constexpr):
    """Add SPLITS partial arrays (tap, channel) in order; after the last tap comes, with BIAS, the bias gradient."""
    element = tl.program_id(0) * BE + tl.arange(0, BE)
    there = element < size
    acc = sum_of_parts(partial, element, there, size, SPLITS, BS, BE)
    c = element % C
    tap = element // C
    is_tap = tap < A1 * A2 * A3
    at = c * w_c + (tap // (A2 * A3)) * w_0 + ((tap // A3) % A2) * w_1 + (tap % A3) * w_2
    tl.store(dw + at, as_result(acc, dw), mask=there & is_tap)
    if BIAS:
        tl.store(db + c * b_c, as_result(acc, db), mask=there & ~is_tap)
