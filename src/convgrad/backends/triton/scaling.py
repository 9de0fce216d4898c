"""Sums times the factor of a scaled problem, which is read where the GPU has computed it, rounded once."""

# mypy: ignore-errors
import triton
import triton.language as tl

from .elements import as_result, position, wide


@triton.jit(do_not_specialize_on_alignment=["first", "second", "own"])
def scale_kernel(sums, result, first, second, own, size, E1, E2, E3, E4, f_0, f_1, f_2, f_3, f_4, t_0, t_1, t_2, t_3,
                 t_4, DENSE: tl.constexpr, WIDE: tl.constexpr, BE: tl.constexpr):
    """Element (i0, i1, i2, i3, i4), the last axis fastest, from its place by strides f_ to its place by strides t_.

    The factor is the product of the operands' scales, `first` and `second`, over the result's `own`, as a float32; the
    last two may be None. DENSE: both arrays lie without a gap.
    """
    factor = tl.load(first).to(tl.float64)
    if second is not None:
        factor *= tl.load(second).to(tl.float64)
    if own is not None:
        factor /= tl.load(own).to(tl.float64)
    element = wide(tl.program_id(0), WIDE) * BE + tl.arange(0, BE)
    there = element < size
    if DENSE:
        source = element
        target = element
    else:
        i4 = element % E4
        i0, i1, i2, i3 = position(element // E4, E1, E2, E3)
        source = i0 * f_0 + i1 * f_1 + i2 * f_2 + i3 * f_3 + i4 * f_4
        target = i0 * t_0 + i1 * t_1 + i2 * t_2 + i3 * t_3 + i4 * t_4
    value = tl.load(sums + source, mask=there, other=0.0)
    factor = factor.to(tl.float32)
    if result.dtype.element_ty == tl.float32 and sums.dtype.element_ty == tl.float32:
        value *= factor
    else:  # exact, to be rounded once
        value = value.to(tl.float64) * factor.to(tl.float64)
    tl.store(result + target, as_result(value, result), mask=there)
