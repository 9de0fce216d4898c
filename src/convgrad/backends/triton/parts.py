"""Splitting float32 into parts that tensor cores multiply exactly: x = high + middle + low, each a bfloat16.

Two parts hold 16 to 17 bits of a number, three all 24. The products of parts are exact in float32, so a sum over a few
products of parts is as accurate as one over float32 products, at a multiple of its speed.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from .elements import position, wide


@triton.jit
def rounded_part(value):
    """The nearest bfloat16, but never Inf for a finite number, and never zero for another number."""
    part = value.to(tl.bfloat16)
    bits = value.to(tl.uint32, bitcast=True)
    cut = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    near = part.to(tl.float32)
    over = (tl.abs(near) == float("inf")) & (tl.abs(value) != float("inf"))
    tiny = ((bits & 0x80000000) | 0x00010000).to(tl.float32, bitcast=True)
    under = (near == 0.0) & (value != 0.0)
    return tl.where(under, tiny, tl.where(over, cut, near))


@triton.jit(do_not_specialize=["images", "first0", "first1", "first2"])
def split_kernel(source, parts, images, padded, channels, Q0, Q1, Q2, first0, first1, first2, E0, E1, E2,
                 s_n, s_c, s_0, s_1, s_2, PARTS: tl.constexpr, STACK: tl.constexpr, FIRST: tl.constexpr,
                 WIDE: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """Write the parts of a block of Q0 x Q1 x Q2 pixels of all images, channels last, one part after the other.

    The block begins at pixel (first0, first1, first2) of images of E0 x E1 x E2 pixels. What lies outside of them is
    zero, as are images beyond `images`. What is not finite goes into the first part alone. FIRST: neighbours in the
    source are pixels, not channels.
    STACK: the parts of a sum's "first" or "second" operands in PARTS products, the smallest first: (middle,) middle,
    high, high or (middle,) high, middle, high. Only the last have what is not finite, which times a part that is zero
    would be NaN.
    """
    pixel = wide(tl.program_id(0), WIDE) * BP + tl.arange(0, BP)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    n, q0, q1, q2 = position(pixel, Q0, Q1, Q2)
    i0 = q0 + first0
    i1 = q1 + first1
    i2 = q2 + first2
    inside = (n < images) & (i0 >= 0) & (i0 < E0) & (i1 >= 0) & (i1 < E1) & (i2 >= 0) & (i2 < E2)
    row = wide(n, WIDE) * s_n + wide(i0, WIDE) * s_0 + wide(i1, WIDE) * s_1 + wide(i2, WIDE) * s_2
    if FIRST:
        rest = tl.trans(tl.load(source + (wide(channel, WIDE) * s_c)[:, None] + row[None, :],
                                mask=(channel < channels)[:, None] & inside[None, :], other=0.0))
    else:
        rest = tl.load(source + row[:, None] + (wide(channel, WIDE) * s_c)[None, :],
                       mask=inside[:, None] & (channel < channels)[None, :], other=0.0)
    keep = (n < padded)[:, None] & (channel < channels)[None, :]
    target = parts + pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    size = tl.full([], 1, tl.int64) * padded * Q0 * Q1 * Q2 * channels
    if STACK != "":
        high = rounded_part(rest)
        finite = tl.abs(high) < float("inf")
        middle = tl.where(finite, rest - high, 0.0).to(tl.bfloat16)
        kept = tl.where(finite, high, 0.0).to(tl.bfloat16)
        if PARTS == 4:
            tl.store(target, middle, mask=keep)
            target += size
        tl.store(target, middle if STACK == "first" else kept, mask=keep)
        tl.store(target + size, kept if STACK == "first" else middle, mask=keep)
        tl.store(target + 2 * size, high.to(tl.bfloat16), mask=keep)
        return
    for part in tl.static_range(PARTS):
        high = rounded_part(rest) if part == 0 else rest.to(tl.bfloat16).to(tl.float32)
        tl.store(target + part * size, high.to(tl.bfloat16), mask=keep)
        rest = tl.where(tl.abs(high) == float("inf"), 0.0, rest - high)
        rest = tl.where(rest != rest, 0.0, rest)
