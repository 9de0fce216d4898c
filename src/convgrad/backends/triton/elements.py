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
def as_result(value, result):
    """Sums, rounded once to the format that `result` points to; uint8 holds HiFloat8."""
    stored: tl.constexpr = result.dtype.element_ty
    if stored.primitive_bitwidth < 32 and value.dtype == tl.float64:
        value = as_odd_float32(value)
    if stored == tl.uint8:
        return hifloat8_code(value)
    elif stored == tl.float8e4nv:
        return float8_code(value, 3, 7, 0x7F, 0x7F).to(stored, bitcast=True)
    elif stored == tl.float8e5:
        return float8_code(value, 2, 15, 0x7C, 0x7E).to(stored, bitcast=True)
    else:
        return value.to(stored)


@triton.jit
def as_odd_float32(value):
    """A float64 cut off to float32, its last bit 1 where anything was cut off: a second rounding is as one of both."""
    rounded = value.to(tl.float32)
    exact = rounded.to(tl.float64)
    bits = rounded.to(tl.uint32, bitcast=True) - (tl.abs(exact) > tl.abs(value)).to(tl.uint32)
    return tl.where(exact == value, bits, bits | 1).to(tl.float32, bitcast=True)


@triton.jit
def float8_code(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr, BEYOND: tl.constexpr, NAN: tl.constexpr):
    """The code of the nearest value, ties to even; from code BEYOND on all are BEYOND.

    The conversion of processors would give the largest finite value there.
    """
    bits = value.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    DROP: tl.constexpr = 23 - MANTISSA
    normal = ((size + ((1 << (DROP - 1)) - 1) + ((size >> DROP) & 1)) >> DROP) - ((127 - BIAS) << MANTISSA)
    # below the smallest normal value: a sum whose last place is the smallest difference
    WHOLE: tl.constexpr = (150 + 1 - BIAS - MANTISSA) << 23
    summed = tl.abs(value) + tl.full(value.shape, WHOLE, tl.uint32).to(tl.float32, bitcast=True)
    small = summed.to(tl.uint32, bitcast=True) - WHOLE
    code = tl.where(size < ((128 - BIAS) << 23), small, normal)
    code = tl.where(code >= BEYOND, BEYOND, code)
    code = tl.where(size > 0x7F800000, NAN, code)
    return (code | ((bits >> 31) << 7)).to(tl.uint8)


@triton.jit
def hifloat8_code(value):
    """The code of the nearest value, ties away from zero: 3, 2, 1 or 0 bits of mantissa by the exponent's size."""
    bits = value.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    exponent = (size >> 23).to(tl.int32) - 127
    drop = 23 - hifloat8_mantissa(exponent)
    rounded = ((size + (1 << (drop - 1)).to(tl.uint32)) >> drop.to(tl.uint32)) << drop.to(tl.uint32)
    rounded = tl.where(size < (127 - 22) << 23, tl.where(size < (127 - 23) << 23, 0, (127 - 22) << 23), rounded)
    exponent = (rounded >> 23).to(tl.int32) - 127
    far = tl.abs(exponent)
    # bits of the exponent with its sign first; the leading 1 of its size is not stored
    width = (far >= 1).to(tl.int32) + (far >= 2).to(tl.int32) + (far >= 4).to(tl.int32) + (far >= 8).to(tl.int32)
    low = tl.maximum(width - 1, 0)
    field = ((exponent < 0).to(tl.int32) << low) | (far & ((1 << low) - 1))
    prefix = tl.where(width == 0, 0x08, tl.where(width == 1, 0x10, (width - 1) << 5))
    mantissa_bits = hifloat8_mantissa(exponent)
    mantissa = ((rounded & 0x7FFFFF) >> (23 - mantissa_bits).to(tl.uint32)).to(tl.int32)
    code = tl.where(exponent < -15, exponent + 23, prefix | (field << mantissa_bits) | mantissa)
    code = tl.where(rounded > (127 + 15) << 23, 0x6F, code)
    code |= (bits >> 31).to(tl.int32) << 7
    code = tl.where(rounded == 0, 0, code)
    return tl.where(size > 0x7F800000, 0x80, code).to(tl.uint8)


@triton.jit
def hifloat8_mantissa(exponent):
    """How many bits of mantissa HiFloat8 has at an exponent."""
    far = tl.abs(exponent)
    return tl.where(exponent < -15, 0, tl.where(far >= 8, 1, tl.where(far >= 4, 2, 3)))


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


@triton.constexpr_function
def block_steps(terms):
    """Steps of so many terms whose products are added one after the other, before their sum is added to others.

    512 terms: the error bound counts on it. Tensor cores, which add 16 terms at once, have no blocks.
    """
    return max(1, 512 // terms)


@triton.jit
def has_nan(value):
    """Return 1 where any element of a tile is NaN: the sign that a product with a filled-in zero may have met Inf."""
    return tl.max(tl.max((value != value).to(tl.int32), 1), 0)


@triton.jit
def only(value, there):
    """Zero where not `there`.

    NOTE: also keeps Triton 3.6 from turning load-reshape-dot into a reshaped view of shared memory, which does not
    compile for runs of fewer than 8 elements.
    """
    return tl.where(there, value, tl.zeros(value.shape, value.dtype))
