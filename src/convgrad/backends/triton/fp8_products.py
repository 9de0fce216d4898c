"""Products of FP8 numbers on tensor cores: decoded to 16-bit numbers, or as they are; written in Gluon."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def decoded(rows, layout: gl.constexpr):
    """FP8 rows from shared memory as 16-bit numbers in the registers of a product's first operand.

    A thread reads four neighbouring channels at once, but a product wants pairs 8 channels apart from it: each 16
    channels enter in the order (0 1 4 5 8 9 12 13 2 3 6 7 10 11 14 15), and those of the weight (see `padded.py`) too.
    """
    HM: gl.constexpr = rows.shape[0]
    CB: gl.constexpr = rows.shape[1]
    value = rows.load(gl.DotOperandLayout(0, layout, 4)).to(gl.float16)
    value = value.reshape([HM, CB // 16, 4, 2, 2]).permute(0, 1, 3, 2, 4).reshape([HM, CB])
    return gl.convert_layout(value, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def add_narrow(acc, a, b, layout: gl.constexpr):
    """Add the products of FP8 rows with FP8 columns: the tensor cores' sums of a step, added in float32.

    A tile of many sums is done in two pieces, so that both sums fit into a thread's registers.
    """
    ROWS: gl.constexpr = acc.shape[0]
    BN: gl.constexpr = acc.shape[1]
    if ROWS * BN <= 64 * 128:
        return acc + narrow_sums(a, b, layout)
    elif BN > 128:
        HALF: gl.constexpr = BN // 2
        part: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
        left, right = halves(acc, part)
        left += narrow_sums(a, b.slice(0, HALF, dim=0), part)
        right += narrow_sums(a, b.slice(HALF, HALF, dim=0), part)
        return joined(left, right, False, layout)
    else:
        FEW: gl.constexpr = ROWS // 2
        upper, lower = acc.reshape([2, FEW, BN]).permute(1, 2, 0).split()
        upper = gl.convert_layout(upper, layout, assert_trivial=True) + narrow_sums(a.slice(0, FEW, dim=0), b, layout)
        lower = gl.convert_layout(lower, layout, assert_trivial=True) + narrow_sums(a.slice(FEW, FEW, dim=0), b,
                                                                                    layout)
        return joined(upper, lower, True, layout)


@gluon.jit
def narrow_sums(a, b, layout: gl.constexpr):
    none = gl.full([a.shape[0], b.shape[0]], 0.0, gl.float32, layout)
    sums = warpgroup_mma(a, b.permute([1, 0]), none, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(sums,))


@gluon.jit
def joined(first, second, BY_ROWS: gl.constexpr, layout: gl.constexpr):
    """Two pieces of a tile of sums as one; no thread gives anything to another."""
    ROWS: gl.constexpr = first.shape[0]
    WIDTH: gl.constexpr = first.shape[1]
    if BY_ROWS:
        value = gl.join(first, second).permute(2, 0, 1).reshape([2 * ROWS, WIDTH])
    else:
        value = gl.join(first, second).permute(0, 2, 1).reshape([ROWS, 2 * WIDTH])
    return gl.convert_layout(value, layout, assert_trivial=True)


@gluon.jit
def halves(value, layout: gl.constexpr):
    """The left and the right columns of a tile of sums; no thread gives anything to another."""
    ROWS: gl.constexpr = value.shape[0]
    WIDTH: gl.constexpr = value.shape[1] // 2
    left, right = value.reshape([ROWS, 2, WIDTH]).permute(0, 2, 1).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)
