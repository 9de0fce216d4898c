"""Depthwise input gradients with one line of taps on the tensor cores, in Gluon: see band_line.py.

A step takes the next 16 columns of dy, counted from the first that reaches dx, and adds them to the groups of 8 columns
of dx that they reach, up to BACK groups before their own two; the two oldest groups are finished then.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# ruff: noqa: RUF005
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .band_input import (
    along,
    as_rows,
    in_thread_sum,
    line_matrices,
    load_rows,
    masked_rows,
    rows_layout,
    store_layout,
)
from .bands import next_slot, next_step, release


@gluon.jit
def copy_columns(dy_box, slots, barriers, walk, c_tile, N, LOW: gl.constexpr, BA: gl.constexpr, STAGES: gl.constexpr,
                 BYTES: gl.constexpr):
    """The copying warp; past the last step zeros."""
    full, empty = barriers
    _, end, steps, start, total = walk
    tile = start // steps
    step = start % steps
    slot = start * 0
    round = start * 0
    for at in range(start, start + total):
        a = gl.where(at < end, tile * BA, N)
        mbarrier.wait(empty.index(slot), round ^ 1)
        mbarrier.expect(full.index(slot), BYTES * 2)
        for g in gl.static_range(2):
            tma.async_copy_global_to_shared(dy_box, [a, 0, 16 * step + (8 * g + LOW), 0, c_tile], full.index(slot),
                                            slots.index(slot * 2 + g))
        tile, step = next_step(tile, step, steps)
        slot, round = next_slot(slot, round, STAGES)


@gluon.jit
def add_columns(slots, out_slots, barriers, walk, pointers, extents, y_steps, r_steps, w_steps: gl.constexpr, c_tile,
                turns, C: gl.constexpr, K2: gl.constexpr, P2: gl.constexpr, BACK: gl.constexpr, SPLIT: gl.constexpr,
                BB: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr):
    """The multiplying warps."""
    full, empty = barriers
    begin, end, steps, start, _ = walk
    dy, weight, dx = pointers
    N, _, _, _, _, X2 = extents
    r_n, _, _, r_2 = r_steps
    BA: gl.constexpr = 16 // BB
    CB: gl.constexpr = V * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LAYOUT: gl.constexpr = rows_layout(V, WARPS, BB)
    STORE: gl.constexpr = store_layout(V, WARPS, BB)
    zero = gl.full([CB, 16, 8], 0.0, gl.float32, MMA)
    taps = line_matrices(weight, c_tile, gl.to_tensor(0), w_steps, C, 1, K2, BACK + 2, 8 * BACK, -8, V, WARPS, MMA)
    n_off = along(0, BA, STORE) * BB + along(3, BB, STORE)
    column_off = along(2, 8, STORE)
    c_off = along(4, CB, STORE)
    offset = n_off.to(gl.int64) * r_n + column_off.to(gl.int64) * r_2 + c_off
    acc = (zero,) * (BACK + 2)  # groups of dx, the oldest first
    suspect = in_thread_sum(zero, V, WARPS)
    n = (start // steps) * 16
    step = start % steps
    at = start
    slot = begin * 0
    round = begin * 0
    out_slot = begin * 0
    for _ in range(0, turns):
        for _ in gl.static_range(UNROLL):
            mbarrier.wait(full.index(slot), round)
            columns = load_rows(slots, slot * 2, 2, LAYOUT, V, WARPS)
            left = as_rows(columns[0], columns[1], V, WARPS, MMA)
            for r in gl.static_range(BACK + 2):
                acc = acc[:r] + (mma_v2(left, taps[r], acc[r]),) + acc[r + 1:]
            for g in gl.static_range(2):
                suspect += in_thread_sum(acc[g], V, WARPS) * 0.0
                value = gl.permute(gl.reshape(acc[g].to(dx.dtype.element_ty), (V, WARPS, BA, BB, 8)), (2, 4, 3, 1, 0))
                out_slots.index(out_slot * 2 + g).store(gl.reshape(value, (BA, 1, 8, BB, CB)))
            slot, round = release(empty, slot, round, STAGES)
            gl.thread_barrier()
            first = 16 * step - 8 * BACK
            there = (c_tile + c_off < C) & (n_off < N - n) & ((at >= begin) & (at < end))
            row = dx + (n.to(gl.int64) * r_n + first.to(gl.int64) * r_2 + c_tile)
            for g in gl.static_range(2):
                gl.store(row + 8 * g * r_2 + offset, out_slots.index(out_slot * 2 + g).load(STORE),
                         mask=there & (column_off >= -first - 8 * g) & (column_off < X2 - first - 8 * g))
            out_slot = out_slot ^ 1
            acc = acc[2:] + (zero,) * 2
            at += 1
            step += 1
            over = step == steps
            step = gl.where(over, 0, step)
            n += gl.where(over, 16, 0)
    if gl.max(gl.max(gl.max((suspect != suspect).to(gl.int32), 2), 1), 0) != 0:
        gl.thread_barrier()  # a row may be stored by other threads
        masked_rows(dy, weight, dx, c_tile, begin, end, 1, steps, 1, extents, y_steps, r_steps, w_steps, SPLIT, 16, C,
                    1, K2, 0, P2, 8 * BACK, BB, CB, WARPS)


@gluon.jit
def band_line_input_kernel(
        dy_box, dy, weight, dx, N, Q2, X2, steps, all_steps, run, channel_tiles, y_n, y_2, r_n, r_2,
        WC: gl.constexpr, W2: gl.constexpr, C: gl.constexpr, K2: gl.constexpr, P2: gl.constexpr, SPLIT: gl.constexpr,
        BB: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr):
    """dx of a run of steps; a group of dx needs the (BACK + 1) // 2 steps before the one that finishes it."""
    CB: gl.constexpr = V * WARPS
    BA: gl.constexpr = 16 // BB
    BACK: gl.constexpr = (K2 + 6) // 8
    dtype: gl.constexpr = dy.dtype.element_ty
    pid = gl.program_id(0)
    c_tile = (pid % channel_tiles) * CB
    begin = (pid // channel_tiles) * run
    end = gl.minimum(begin + run, all_steps)
    start = begin - gl.minimum(begin % steps, (BACK + 1) // 2)
    turns = (end - start + UNROLL - 1) // UNROLL
    slots = gl.allocate_shared_memory(dtype, [STAGES * 2, BA, 1, 8, BB, CB], dy_box.layout)
    out_slots = gl.allocate_shared_memory(dx.dtype.element_ty, [4, BA, 1, 8, BB, CB], dy_box.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    walk = (begin, end, steps, start, turns * UNROLL)
    gl.warp_specialize(
        [(add_columns, (slots, out_slots, (full, empty), walk, (dy, weight, dx), (N, 1, 1, Q2, 1, X2), (y_n, 0, 0, y_2),
                        (r_n, 0, 0, r_2), (WC, 0, W2), c_tile, turns, C, K2, P2, BACK, SPLIT, BB, STAGES, UNROLL, V,
                        WARPS)),
         (copy_columns, (dy_box, slots, (full, empty), walk, c_tile, N, P2 - K2 + 1, BA, STAGES, 16 * 8 * CB * 2))],
        [1], [24])
