"""Depthwise weight gradients with one line of taps on the tensor cores, in Gluon (see bands.py).

Here bands slide along the line: a step takes the next 16 columns of x, counted from the first that a tap reaches, and
the next two groups of 8 columns of dy. The groups of dy that still reach the columns of x wait in registers, so that
everything is copied and loaded once. A group that lies g groups before the columns of x holds the products of tap
i - j + 8g at (i, j) of its matrix.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# ruff: noqa: RUF005
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .bands import (
    as_left,
    as_right,
    group_layout,
    in_thread_total,
    load_groups,
    masked_sums,
    next_slot,
    next_step,
    release,
    store_bias,
)


@gluon.jit
def copy_columns(x_box, dy_box, slots, barriers, walk, c_tile, N, X2, P2: gl.constexpr, BA: gl.constexpr,
                 STAGES: gl.constexpr, BYTES: gl.constexpr):
    """The copying warp; before `begin` only dy is wanted, which later steps need, and past `end` nothing."""
    x_slots, dy_slots = slots
    full, empty = barriers
    begin, end, steps, start, total = walk
    tile = start // steps
    step = start % steps
    slot = begin * 0
    round = begin * 0
    for at in range(start, start + total):
        a = gl.where(at < end, tile * BA, N)
        column = gl.where(at < begin, X2 + P2, 16 * step)
        mbarrier.wait(empty.index(slot), round ^ 1)
        mbarrier.expect(full.index(slot), BYTES * 4)
        for g in gl.static_range(2):
            tma.async_copy_global_to_shared(dy_box, [a, 0, 16 * step + 8 * g, 0, c_tile], full.index(slot),
                                            dy_slots.index(slot * 2 + g))
        for g in gl.static_range(2):
            tma.async_copy_global_to_shared(x_box, [a, 0, column + (8 * g - P2), 0, c_tile], full.index(slot),
                                            x_slots.index(slot * 2 + g))
        tile, step = next_step(tile, step, steps)
        slot, round = next_slot(slot, round, STAGES)


@gluon.jit
def sum_columns(slots, barriers, walk, pointers, extents, y_steps, x_steps, c_tile, split, turns, C: gl.constexpr,
                K2: gl.constexpr, P2: gl.constexpr, BIAS: gl.constexpr, BACK: gl.constexpr, SPLIT: gl.constexpr,
                BB: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr):
    """The multiplying warps; columns of x meet groups of dy up to BACK groups before their own two."""
    x_slots, dy_slots = slots
    full, empty = barriers
    begin, end, steps, start, _ = walk
    dy, x, partial = pointers
    CB: gl.constexpr = V * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LAYOUT: gl.constexpr = group_layout(V, WARPS, BB)
    dtype: gl.constexpr = dy.dtype.element_ty
    zero = gl.full([CB, 16, 8], 0.0, gl.float32, MMA)
    nothing = gl.full([CB, 16, 8], 0.0, dtype, gl.DotOperandLayout(1, MMA, 2))
    acc = (zero,) * (BACK + 2)
    bias = in_thread_total(nothing, V, WARPS)
    ring = (nothing,) * BACK  # groups of dy, the oldest first
    slot = begin * 0
    round = begin * 0
    at = start
    for _ in range(0, turns):
        for _ in gl.static_range(UNROLL):
            mbarrier.wait(full.index(slot), round)
            grads = load_groups(dy_slots, slot * 2, 2, LAYOUT, V, WARPS)
            columns = load_groups(x_slots, slot * 2, 2, LAYOUT, V, WARPS)
            for g in gl.static_range(2):
                ring = ring + (as_right(grads[g], V, WARPS, MMA),)
            if BIAS:
                both = in_thread_total(ring[BACK], V, WARPS) + in_thread_total(ring[BACK + 1], V, WARPS)
                bias += gl.where(at >= begin, both, 0.0)
            left = as_left(columns[0], columns[1], V, WARPS, MMA)
            for r in gl.static_range(BACK + 2):
                acc = acc[:r] + (mma_v2(left, ring[r], acc[r]),) + acc[r + 1:]
            ring = ring[2:]
            at += 1
            slot, round = release(empty, slot, round, STAGES)

    channel = gl.arange(0, CB, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    c_out = c_tile + (channel % WARPS) * V + channel // WARPS  # numbered (channel of the warp, warp) in the products
    diagonal = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    row = diagonal[None, :, None]
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    where = row + column + gl.full([CB, 1, 1], 0, gl.int32, MMA)
    out = partial + split.to(gl.int64) * ((K2 + BIAS) * C)
    lines = ()
    suspect = gl.full([CB, 16], 0.0, gl.float32, gl.SliceLayout(2, MMA))
    for t in gl.static_range((K2 + 15) // 16):
        line = gl.full([CB, 16], 0.0, gl.float32, gl.SliceLayout(2, MMA))
        for r in gl.static_range(BACK + 2):
            if 16 * t - 8 * (BACK - r) > -23 and 16 * t - 8 * (BACK - r) < 16:
                place = where + (16 * t - 8 * (BACK - r))
                line += gl.sum(gl.where((place >= 0) & (place < 16), gl.gather(acc[r], place & 15, 1), 0.0), 2)
        lines = lines + (line,)
        suspect += gl.where((diagonal + 16 * t < K2)[None, :], line * 0.0, 0.0)
    if gl.max(gl.max((suspect != suspect).to(gl.int32), 1), 0) != 0:
        masked_sums(dy, x, out, K2, c_tile, 0, 0, begin, end, 1, steps, 1, extents, y_steps, x_steps, True, SPLIT, 16,
                    C, K2, 0, 0, P2, BB, CB, WARPS)
    else:
        for t in gl.static_range((K2 + 15) // 16):
            tap = diagonal + 16 * t
            gl.store(out + tap[None, :] * C + c_out[:, None], lines[t],
                     mask=(c_out < C)[:, None] & (tap < K2)[None, :])
    if BIAS:
        store_bias(out + K2 * C, bias, c_tile, True, C, V, WARPS)


@gluon.jit
def band_line_kernel(
        x_box, dy_box, dy, x, partial, N, Q2, X2, steps, all_steps, run, channel_tiles, y_n, y_2, x_n, x_2,
        C: gl.constexpr, K2: gl.constexpr, P2: gl.constexpr, BIAS: gl.constexpr, SPLIT: gl.constexpr,
        BB: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr):
    """dw of a line of taps; partial sums (tap, channel) of every run.

    A tile takes `steps` steps of 16 columns; a run is `run` steps of all tiles after each other.
    """
    CB: gl.constexpr = V * WARPS
    BA: gl.constexpr = 16 // BB
    BACK: gl.constexpr = (K2 + 6) // 8
    dtype: gl.constexpr = dy.dtype.element_ty
    pid = gl.program_id(0)
    c_tile = (pid % channel_tiles) * CB
    split = pid // channel_tiles
    begin = split * run
    end = gl.minimum(begin + run, all_steps)
    start = begin - gl.minimum(begin % steps, (BACK + 1) // 2)
    turns = (end - start + UNROLL - 1) // UNROLL
    slots = (gl.allocate_shared_memory(dtype, [STAGES * 2, BA, 1, 8, BB, CB], x_box.layout),
             gl.allocate_shared_memory(dtype, [STAGES * 2, BA, 1, 8, BB, CB], dy_box.layout))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    walk = (begin, end, steps, start, turns * UNROLL)
    gl.warp_specialize(
        [(sum_columns, (slots, (full, empty), walk, (dy, x, partial), (N, 1, 1, Q2, 1, 1, X2), (y_n, 0, 0, y_2),
                        (x_n, 0, 0, x_2), c_tile, split, turns, C, K2, P2, BIAS, BACK, SPLIT, BB, STAGES, UNROLL, V,
                        WARPS)),
         (copy_columns, (x_box, dy_box, slots, (full, empty), walk, c_tile, N, X2, P2, BA, STAGES,
                         16 * 8 * CB * 2))],
        [1], [24])
