"""Sums as a result stores them: times the factor of a scaled problem, rounded once; written in Gluon."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def as_stored(sums, result, scales):
    """Float32 sums in the format that `result` points to (float32, 16 bits or FP8).

    `scales` point to those of the operands and the result's own, None where there is none (see scaling.py).
    """
    stored: gl.constexpr = result.dtype.element_ty
    first, second, own = scales
    if first is None:
        narrowed = sums
    else:
        factor = gl.load(first).to(gl.float64)
        if second is not None:
            factor *= gl.load(second).to(gl.float64)
        if own is not None:
            factor /= gl.load(own).to(gl.float64)
        times = gl.full(sums.shape, 0.0, gl.float32, sums.type.layout) + factor.to(gl.float32)
        narrowed = sums * times
        if stored.primitive_bitwidth < 32:
            # Towards zero, and the last bit 1 where anything was cut off: then the next rounding is as one of both.
            error = gl.fma(sums, times, -narrowed)  # exact; NaN where the sum is Inf or NaN
            inexact = (error < 0) | (error > 0)
            beyond = inexact & ((error < 0) != (narrowed < 0))
            bits = narrowed.to(gl.uint32, bitcast=True) - beyond.to(gl.uint32)
            narrowed = (bits | inexact.to(gl.uint32)).to(gl.float32, bitcast=True)
    # NOTE: the conversion to FP8 gives the largest finite value for all beyond
    if stored == gl.float8e4nv:
        return gl.where(gl.abs(narrowed) > 464.0, float("nan"), narrowed).to(stored)
    elif stored == gl.float8e5:
        code = narrowed.to(stored).to(gl.uint8, bitcast=True)
        sign = (narrowed.to(gl.uint32, bitcast=True) >> 24).to(gl.uint8) & 0x80
        return gl.where(gl.abs(narrowed) >= 61440.0, sign | 0x7C, code).to(stored, bitcast=True)
    else:
        return narrowed.to(stored)
