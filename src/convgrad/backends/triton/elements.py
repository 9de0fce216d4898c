"""Device functions shared by the kernels: operands as they enter a product, and positions from flat indices."""

# mypy: ignore-errors
# ruff: noqa: SIM108
import triton
import triton.language as tl


@triton.jit
def as_operand(value, table, ROUND: tl.constexpr):
    """Return stored elements as the compute mode wants them, in a type that `tl.dot` multiplies exactly.

    ROUND: "" keep; "table" decode 8-bit codes by a table of bfloat16; "bf16"/"f16" convert; "even:<n>" and "away:<n>"
    round a float32 to n mantissa bits, ties to even or away from zero.
    """
    if ROUND == "table":
        result = tl.load(table + value.to(tl.int32))
    elif ROUND == "bf16":
        result = value.to(tl.float32).to(tl.bfloat16)
    elif ROUND == "f16":
        result = value.to(tl.float32).to(tl.float16)
    elif ROUND == "exact_f16":
        result = value.to(tl.float16)
    elif ROUND == "away:10":
        result = round_mantissa(value, 13, False)
    elif ROUND == "even:10":
        result = round_mantissa(value, 13, True)
    elif ROUND == "away:11":
        result = round_mantissa(value, 12, False)
    elif ROUND == "even:11":
        result = round_mantissa(value, 12, True)
    else:
        result = value
    return result


@triton.jit
def round_mantissa(value, DROP: tl.constexpr, EVEN: tl.constexpr):
    """Round a float32 so that its DROP lowest mantissa bits are zero; Inf and NaN pass unchanged."""
    bits = value.to(tl.uint32, bitcast=True)
    half: tl.constexpr = 1 << (DROP - 1)
    if EVEN:
        rounded = bits + (half - 1) + ((bits >> DROP) & 1)
    else:
        rounded = bits + half
    rounded = (rounded >> DROP) << DROP
    special = (bits & 0x7F800000) == 0x7F800000
    return tl.where(special, bits, rounded).to(tl.float32, bitcast=True)


@triton.jit
def position(flat, J0, J1, J2):
    """Split a flat index into (n, j0, j1, j2), the last axis fastest."""
    j2 = flat % J2
    flat = flat // J2
    j1 = flat % J1
    flat = flat // J1
    return flat // J0, flat % J0, j1, j2


@triton.jit
def in_box(start_n, start_0, start_1, start_2, index, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr):
    """Position (n, j0, j1, j2) of a flat index within a box."""
    return (start_n + index // (B0 * B1 * B2), start_0 + (index // (B1 * B2)) % B0, start_1 + (index // B2) % B1,
            start_2 + index % B2)


@triton.jit
def wide(value, WIDE: tl.constexpr):
    """Return an index as 64-bit where an operand has 2^31 elements or more."""
    if WIDE:
        return value.to(tl.int64)
    else:
        return value


@triton.jit
def settled(acc):
    """The sums, after all products added to them are finished.

    NOTE: where the first operand was computed (decoded, rounded, reshaped), Triton 3.6 makes code that loads the next
    one into registers with products in flight. That is the suspected, not confirmed, cause of wrong sums seen on an
    H200. A use of the sums in every step makes it wait.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def has_nan(value):
    """Return 1 where any element of a tile is NaN: the sign that a product with a filled-in zero may have met Inf."""
    return tl.max(tl.max((value != value).to(tl.int32), 1), 0)


@triton.jit
def only(value, there):
    """Zero where not `there`.

    NOTE: also keeps Triton 3.6 from turning load-reshape-dot into a reshaped view of shared memory, which does not
    compile for runs of fewer than 8 elements. One problem with runs of 8 was wrong on an H200 without this and right
    with it.
    """
    return tl.where(there, value, tl.zeros(value.shape, value.dtype))
