"""Windows of one point (1x1 kernels, stride 1) with channels first: an image is a matrix (channel, position).

Its positions are neighbours in memory and stay so: results are products of such matrices, and nothing is copied.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def point_gather_kernel(source, weight, result, run, s_n, s_c, w_red, w_col, r_n, r_c, S_ALIGN: tl.constexpr,
                        R_ALIGN: tl.constexpr, RUN_ALIGN: tl.constexpr, RED: tl.constexpr, COL: tl.constexpr,
                        BN: tl.constexpr, BP: tl.constexpr, CB: tl.constexpr):
    """BN channels of the result at BP positions: the output, or the input gradient."""
    run = run * RUN_ALIGN
    column_tiles: tl.constexpr = (COL + BN - 1) // BN
    program = tl.program_id(0)
    column = (program % column_tiles) * BN + tl.arange(0, BN)
    program = program // column_tiles
    run_tiles = tl.cdiv(run, BP)
    p = (program % run_tiles) * BP + tl.arange(0, BP)
    n = (program // run_tiles).to(tl.int64)
    source += n * (s_n * S_ALIGN)
    result += n * (r_n * R_ALIGN)
    acc = tl.zeros([BN, BP], tl.float32)
    for first in range(0, RED, CB):
        c = first + tl.arange(0, CB)
        a = tl.load(weight + column[:, None] * w_col + c[None, :] * w_red,
                    mask=(column < COL)[:, None] & (c < RED)[None, :], other=0.0)
        b = tl.load(source + c.to(tl.int64)[:, None] * (s_c * S_ALIGN) + p[None, :],
                    mask=(c < RED)[:, None] & (p < run)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(result + column.to(tl.int64)[:, None] * (r_c * R_ALIGN) + p[None, :], acc.to(result.dtype.element_ty),
             mask=(column < COL)[:, None] & (p < run)[None, :])


@triton.jit
def point_weight_kernel(dy, x, result, run, run_tiles, steps, steps_each, y_n, y_c, x_n, x_c, r_split, r_o, r_i,
                        Y_ALIGN: tl.constexpr, X_ALIGN: tl.constexpr, RUN_ALIGN: tl.constexpr, KG: tl.constexpr,
                        CG: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr):
    """The sums of BK x BC channels over a run of steps; a step is BP positions of one image."""
    run = run * RUN_ALIGN
    c_tiles: tl.constexpr = (CG + BC - 1) // BC
    k_tiles: tl.constexpr = (KG + BK - 1) // BK
    program = tl.program_id(0)
    c = (program % c_tiles) * BC + tl.arange(0, BC)
    program = program // c_tiles
    k = (program % k_tiles) * BK + tl.arange(0, BK)
    split = program // k_tiles
    begin = split * steps_each
    acc = tl.zeros([BK, BC], tl.float32)
    for step in range(begin, tl.minimum(begin + steps_each, steps)):
        n = (step // run_tiles).to(tl.int64)
        p = (step % run_tiles) * BP + tl.arange(0, BP)
        a = tl.load(dy + n * (y_n * Y_ALIGN) + k.to(tl.int64)[:, None] * (y_c * Y_ALIGN) + p[None, :],
                    mask=(k < KG)[:, None] & (p < run)[None, :], other=0.0)
        b = tl.load(x + n * (x_n * X_ALIGN) + c.to(tl.int64)[:, None] * (x_c * X_ALIGN) + p[None, :],
                    mask=(c < CG)[:, None] & (p < run)[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(b), acc)
    tl.store(result + split.to(tl.int64) * r_split + k.to(tl.int64)[:, None] * r_o + c[None, :] * r_i,
             acc.to(result.dtype.element_ty), mask=(k < KG)[:, None] & (c < CG)[None, :])
