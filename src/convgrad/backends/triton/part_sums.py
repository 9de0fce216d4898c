"""Adding the parts of a weight gradient that several programs summed, in a fixed order."""

# mypy: ignore-errors
import triton
import triton.language as tl

from .elements import wide


@triton.jit
def add_parts_kernel(partial, result, size, splits, r_o, r_i, r_0, r_1, r_2, INNER: tl.constexpr, A0: tl.constexpr,
                     A1: tl.constexpr, A2: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr, BS: tl.constexpr,
                     BE: tl.constexpr):
    """Add `splits` arrays of `size` sums; element (o, t0, t1, t2, i), i fastest, goes to its place by strides.

    FEW is the number of parts where it is small, or 0. The extents are constants: divisions by numbers that the
    compiler does not know took longer than the additions.
    """
    element = wide(tl.program_id(0), WIDE) * BE + tl.arange(0, BE)
    there = element < size
    acc = tl.zeros([BE], dtype=partial.dtype.element_ty)
    if FEW > 0:
        for split in tl.static_range(FEW):
            acc += tl.load(partial + tl.full([], split, tl.int64) * size + element, mask=there, other=0.0)
    else:
        for first in range(0, splits, BS):
            split = first + tl.arange(0, BS)
            part = tl.load(partial + split.to(tl.int64)[:, None] * size + element[None, :],
                           mask=(split < splits)[:, None] & there[None, :], other=0.0)
            acc += tl.sum(part, 0)
    i = element % INNER
    rest = element // INNER
    t2 = rest % A2
    rest = rest // A2
    t1 = rest % A1
    rest = rest // A1
    t0 = rest % A0
    o = rest // A0
    tl.store(result + o.to(tl.int64) * r_o + i * r_i + t0 * r_0 + t1 * r_1 + t2 * r_2,
             acc.to(result.dtype.element_ty), mask=there)
