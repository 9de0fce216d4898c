"""Float32 rows as sums of three bfloat16 parts on their way to the products (see parts.py); written in Gluon."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def split_rows(rows, layout: gl.constexpr):
    """Float32 rows from shared memory as three parts, highest first, in the registers of a product's first operand.

    The parts are cut off, not rounded, which is one instruction, and still hold all 24 bits. A number that is not
    finite has parts whose sums are NaN.
    """
    value = rows.load(gl.DotOperandLayout(0, layout, 2))
    high = upper_half(value)
    rest = value - high.to(gl.float32)
    middle = upper_half(rest)
    return high, middle, upper_half(rest - middle.to(gl.float32))


@gluon.jit
def upper_half(value):
    """The bfloat16 with the first 16 bits of a float32."""
    return (value.to(gl.uint32, bitcast=True) >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def begin_products(sums, left, right_high, right_middle, right_low, FRESH: gl.constexpr):
    """Start the products of rows whose size matters in float32, the smallest first; FRESH: as new sums."""
    high, middle, low = left
    sums = warpgroup_mma(middle, right_middle, sums, use_acc=not FRESH, is_async=True)
    sums = warpgroup_mma(high, right_low, sums, is_async=True)
    sums = warpgroup_mma(low, right_high, sums, is_async=True)
    sums = warpgroup_mma(middle, right_high, sums, is_async=True)
    sums = warpgroup_mma(high, right_middle, sums, is_async=True)
    return warpgroup_mma(high, right_high, sums, is_async=True)


@gluon.jit
def end_products(sums, held, ahead):
    """The sums after the end of their products, and the parts of the next rows.

    The parts that are multiplied (`held`) keep their registers until then, and `ahead` is computed before: the compiler
    would do so while nothing is multiplied.
    """
    COUNT: gl.constexpr = len(held)
    ended = warpgroup_mma_wait(num_outstanding=0, deps=(sums,) + held + ahead)  # noqa: RUF005 Triton knows no *
    return ended[0], (ended[COUNT + 1], ended[COUNT + 2], ended[COUNT + 3])
