"""Depthwise input gradients with many lines of taps on the tensor cores, in Gluon (see band_input.py).

The matrices of all lines do not fit into registers: a program owns ROWS rows of dx and meets one row of dy after the
other. Row r of dx meets it through line k + r, so that a step needs the matrices of one more line, read from the
weight, and the others move on.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# ruff: noqa: RUF005
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .band_input import (
    along,
    as_rows,
    copy_grads,
    in_thread_sum,
    line_matrices,
    load_step,
    masked_rows,
    rows_layout,
    store_layout,
)
from .bands import place_of, release


@gluon.jit
def add_block(slots, out_slots, barriers, walk, pointers, extents, y_steps, r_steps, w_steps: gl.constexpr, place,
              k_first, turns, C: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, P1: gl.constexpr,
              P2: gl.constexpr, ROWS: gl.constexpr, J: gl.constexpr, GROUPS: gl.constexpr, MT: gl.constexpr,
              SPLIT: gl.constexpr, BB: gl.constexpr, STAGES: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr):
    """The multiplying warps: the first row of dy meets the first row of dx through line `k_first`."""
    full, empty = barriers
    _, _, column_tiles, b_tiles, _, _, _ = walk
    dy, weight, dx = pointers
    N, X0, _, _, X1, X2 = extents
    r_n, r_0, r_1, r_2 = r_steps
    c_tile, tile, i = place
    BA: gl.constexpr = 16 // BB
    CB: gl.constexpr = V * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LAYOUT: gl.constexpr = rows_layout(V, WARPS, BB)
    STORE: gl.constexpr = store_layout(V, WARPS, BB)
    zero = gl.full([CB, 16, 8], 0.0, gl.float32, MMA)
    acc = (zero,) * (ROWS * J)
    taps = ()  # of the rows of dx, the first first
    for r in gl.static_range(ROWS - 1):
        taps = taps + line_matrices(weight, c_tile, k_first + 1 + r, w_steps, C, K1, K2, MT, 0, 16, V, WARPS, MMA)
    slot = i * 0
    round = i * 0
    nil = (column_tiles < 0).to(gl.int32)
    k1 = k_first
    for _ in range(0, turns):
        for _ in gl.static_range(ROWS):
            taps = line_matrices(weight, c_tile, k1, w_steps, C, K1, K2, MT, 0, 16, V, WARPS, MMA) + taps
            evens, odds = load_step(slots, full, slot, round, nil, GROUPS, LAYOUT, V, WARPS)
            for j in gl.static_range(J):
                for t in gl.static_range(MT):
                    if j % 2 == 0:
                        left = as_rows(evens[j + 2 * t], evens[j + 2 * t + 1], V, WARPS, MMA)
                    else:
                        left = as_rows(odds[j - 1 + 2 * t], odds[j + 2 * t], V, WARPS, MMA)
                    for r in gl.static_range(ROWS):
                        acc = acc[:r * J + j] + (mma_v2(left, taps[r * MT + t], acc[r * J + j]),) + acc[r * J + j + 1:]
            taps = taps[:(ROWS - 1) * MT]
            k1 -= 1
            slot, round = release(empty, slot, round, STAGES)

    a, b, column = place_of(tile, column_tiles, b_tiles, BA, BB, J * 8)
    a_off = along(0, BA, STORE)
    b_off = along(3, BB, STORE)
    column_off = along(2, 8, STORE)
    c_off = along(4, CB, STORE)
    n = a * BB + b if SPLIT else a
    plane = b * 0 if SPLIT else b
    if SPLIT:  # strips are images
        there = (n + a_off * BB + b_off < N) & (c_tile + c_off < C)
        offset = (a_off * BB + b_off).to(gl.int64) * r_n + column_off.to(gl.int64) * r_2 + c_off
    else:
        there = (n + a_off < N) & (plane + b_off < X0) & (c_tile + c_off < C)
        offset = a_off.to(gl.int64) * r_n + b_off.to(gl.int64) * r_0 + column_off.to(gl.int64) * r_2 + c_off
    suspect = in_thread_sum(zero, V, WARPS)
    for r in gl.static_range(ROWS):
        for j in gl.static_range(J):
            sums = acc[r * J + j]
            suspect += in_thread_sum(sums, V, WARPS) * 0.0
            value = gl.permute(gl.reshape(sums.to(dx.dtype.element_ty), (V, WARPS, BA, BB, 8)), (2, 4, 3, 1, 0))
            out_slots.index(j).store(gl.reshape(value, (BA, 1, 8, BB, CB)))
        gl.thread_barrier()
        row = dx + (n.to(gl.int64) * r_n + plane.to(gl.int64) * r_0 + (i + r).to(gl.int64) * r_1
                    + column.to(gl.int64) * r_2 + c_tile)
        for j in gl.static_range(J):
            gl.store(row + 8 * j * r_2 + offset, out_slots.index(j).load(STORE),
                     mask=there & (i + r < X1) & (column_off < X2 - column - 8 * j))
        gl.thread_barrier()
    if gl.max(gl.max(gl.max((suspect != suspect).to(gl.int32), 2), 1), 0) != 0:
        first = tile * (X1 + P1) + P1 + i  # as masked_rows counts rows
        masked_rows(dy, weight, dx, c_tile, first, first + gl.minimum(ROWS, X1 - i), X1 + P1, column_tiles, b_tiles,
                    extents, y_steps, r_steps, w_steps, SPLIT, J * 8, C, K1, K2, P1, P2, 0, BB, CB, WARPS)


@gluon.jit
def band_tall_kernel(
        dy_box, dy, weight, dx, N, X0, Q1, Q2, X1, X2, column_tiles, b_tiles, blocks, channel_tiles,
        y_n, y_0, y_1, y_2, r_n, r_0, r_1, r_2,
        WC: gl.constexpr, W1: gl.constexpr, W2: gl.constexpr, C: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        P1: gl.constexpr, P2: gl.constexpr, ROWS: gl.constexpr, J: gl.constexpr, SPLIT: gl.constexpr, BB: gl.constexpr,
        STAGES: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr):
    """dx of ROWS rows of a tile."""
    CB: gl.constexpr = V * WARPS
    BA: gl.constexpr = 16 // BB
    MT: gl.constexpr = (K2 + 22) // 16
    GROUPS: gl.constexpr = J - 1 + 2 * MT
    dtype: gl.constexpr = dy.dtype.element_ty
    pid = gl.program_id(0)
    c_tile = (pid % channel_tiles) * CB
    pid = pid // channel_tiles
    i = (pid % blocks) * ROWS
    tile = pid // blocks
    # rows of dy that reach a row of the block; row r meets row o through line i + r + P1 - o
    low = gl.minimum(gl.maximum(i + (P1 - K1 + 1), 0), Q1)
    high = gl.maximum(gl.minimum(i + (P1 + ROWS), Q1), low)
    turns = (high - low + ROWS - 1) // ROWS
    start = tile * Q1 + low
    walk = (start, start + high - low, column_tiles, b_tiles, Q1, start, turns * ROWS)
    slots = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, BA, 1, 8, BB, CB], dy_box.layout)
    out_slots = gl.allocate_shared_memory(dx.dtype.element_ty, [J, BA, 1, 8, BB, CB], dy_box.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [(add_block, (slots, out_slots, (full, empty), walk, (dy, weight, dx), (N, X0, Q1, Q2, X1, X2),
                      (y_n, y_0, y_1, y_2), (r_n, r_0, r_1, r_2), (WC, W1, W2), (c_tile, tile, i), i + P1 - low,
                      turns, C, K1, K2, P1, P2, ROWS, J, GROUPS, MT, SPLIT, BB, STAGES, V, WARPS)),
         (copy_grads, (dy_box, slots, (full, empty), walk, c_tile, N, P2 - K2 + 1, J, GROUPS, BA, BB, STAGES,
                       16 * 8 * CB * 2, 1, 0))],
        [1], [24])
