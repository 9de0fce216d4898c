"""Depthwise input gradients of 16-bit tensors on the tensor cores, in Gluon (see bands.py).

For one channel, a row of dx is a row of dy times a matrix that has the taps of a line on its diagonals: 16 strips x 16
columns of dy by 16 x 8 columns of dx. The matrices of all lines stay in registers; a row of dy is added to the rows of
dx that it reaches, and the row that is finished leaves through shared memory.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# ruff: noqa: RUF005
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .bands import bits, next_slot, next_step, place_of, release


@triton.constexpr_function
def rows_layout(V, WARPS, BB):
    """How threads hold 16/BB x 1 row x 8 columns x BB strips x V*WARPS channels of dy: strips are rows of a product."""
    def strip(bit):
        return [0, 0, 0, 1 << bit, 0] if bit < bits(BB) else [1 << (bit - bits(BB)), 0, 0, 0, 0]

    registers = [[0, 0, 0, 0, 1 << b] for b in range(bits(V))] + [[0, 0, 4, 0, 0], strip(3)]
    lanes = [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0], strip(0), strip(1), strip(2)]
    warps = [[0, 0, 0, 0, V << b] for b in range(bits(WARPS))]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16 // BB, 1, 8, BB, V * WARPS])


@triton.constexpr_function
def taps_layout(V, WARPS):
    """How threads hold 16 columns of dy x 8 of dx x V*WARPS channels: as right operands."""
    registers = [[0, 0, 1 << b] for b in range(bits(V))] + [[1, 0, 0], [8, 0, 0]]
    lanes = [[2, 0, 0], [4, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, 0, V << b] for b in range(bits(WARPS))]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16, 8, V * WARPS])


@triton.constexpr_function
def store_layout(V, WARPS, BB):
    """How threads store 16/BB x 1 x 8 columns x BB strips x V*WARPS channels: 16 bytes each, neighbours together."""
    bases = [[0, 0, 0, 0, 1 << b] for b in range(bits(V * WARPS))] + [[0, 0, 0, 1 << b, 0] for b in range(bits(BB))]
    bases += [[0, 0, 1 << b, 0, 0] for b in range(3)] + [[1 << b, 0, 0, 0, 0] for b in range(bits(16 // BB))]
    last = 8 + bits(WARPS)
    return gl.DistributedLinearLayout(bases[:3] + bases[last:], bases[3:8], bases[8:last], [],
                                      [16 // BB, 1, 8, BB, V * WARPS])


@gluon.jit
def load_rows(slots, first, COUNT: gl.constexpr, LAYOUT: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr):
    """COUNT groups of columns as (strip, column by bits, warp, channel of the warp)."""
    groups = ()
    for g in gl.static_range(COUNT):
        values = gl.permute(slots.index(first + g).load(LAYOUT), (0, 1, 3, 2, 4))
        groups = groups + (gl.reshape(values, (16, 2, 2, 2, WARPS, V)),)
    return groups


@gluon.jit
def load_step(slots, full, slot, round, nil, GROUPS: gl.constexpr, LAYOUT: gl.constexpr, V: gl.constexpr,
              WARPS: gl.constexpr, plane=0, PLANES: gl.constexpr = 1):
    """The groups of a row of dy as pairs that start at even groups and at odd ones, each loaded twice: see bands.py."""
    mbarrier.wait(full.index(slot), round)
    first = (slot * PLANES + plane) * GROUPS
    evens = load_rows(slots, first, GROUPS // 2 * 2, LAYOUT, V, WARPS)
    odds = load_rows(slots, first + nil + 1, (GROUPS - 1) // 2 * 2, LAYOUT, V, WARPS)
    return evens, odds


@gluon.jit
def as_rows(low, high, V: gl.constexpr, WARPS: gl.constexpr, MMA: gl.constexpr):
    """Two neighbouring groups as left operand: channel x 16 strips x 16 columns, in the order of `column_of`."""
    both = gl.permute(gl.join(low, high), (5, 4, 0, 6, 2, 3, 1))
    return gl.convert_layout(gl.reshape(both, (V * WARPS, 16, 16)), gl.DotOperandLayout(0, MMA, 2),
                             assert_trivial=True)


@gluon.jit
def column_of(k):
    """Which of 16 columns is the k-th of a product: threads hold columns 0..3 and 4 away, not pairs."""
    return (k >> 3) * 8 + (k & 1) * 4 + ((k >> 1) & 3)


@gluon.jit
def line_matrices(weight, c_tile, k1, w_steps: gl.constexpr, C: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
                  COUNT: gl.constexpr, FIRST: gl.constexpr, APART: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr,
                  MMA: gl.constexpr):
    """The taps of line k1 on the diagonals of COUNT matrices of 16 columns of dy x 8 of dx; zeros where there is none.

    The columns of dy begin FIRST columns after the first that reaches the columns of dx, and APART from each other.
    """
    LAYOUT: gl.constexpr = taps_layout(V, WARPS)
    source = column_of(gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))[:, None, None]
    target = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    c = c_tile + gl.arange(0, V * WARPS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    matrices = ()
    for t in gl.static_range(COUNT):
        k2 = target - source + (K2 - 1 - FIRST - APART * t) + c * 0
        there = (k2 >= 0) & (k2 < K2) & (c < C) & ((k1 >= 0) & (k1 < K1))
        values = gl.load(weight + c * w_steps[0] + k1 * w_steps[1] + k2 * w_steps[2], mask=there, other=0.0)
        values = gl.permute(gl.reshape(values, (16, 8, WARPS, V)), (3, 2, 0, 1))
        matrices = matrices + (gl.convert_layout(gl.reshape(values, (V * WARPS, 16, 8)),
                                                 gl.DotOperandLayout(1, MMA, 2), assert_trivial=True),)
    return matrices


@gluon.jit
def copy_grads(dy_box, slots, barriers, walk, c_tile, N, LOW: gl.constexpr, J: gl.constexpr, GROUPS: gl.constexpr,
               BA: gl.constexpr, BB: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr, K0: gl.constexpr,
               P0: gl.constexpr):
    """The copying warp: row after row of dy, tile after tile, of all planes that reach it; past the last step zeros."""
    full, empty = barriers
    begin, end, column_tiles, b_tiles, steps, start, total = walk
    tile = start // steps
    step = start % steps
    slot = begin * 0
    round = begin * 0
    for at in range(start, start + total):
        a, b, column = place_of(tile, column_tiles, b_tiles, BA, BB, J * 8)
        a = gl.where(at < end, a, N)
        mbarrier.wait(empty.index(slot), round ^ 1)
        mbarrier.expect(full.index(slot), BYTES * GROUPS * K0)
        for g in gl.static_range(K0 * GROUPS):
            tma.async_copy_global_to_shared(
                dy_box, [a, step, column + (8 * (g % GROUPS) + LOW), b + (P0 - g // GROUPS), c_tile], full.index(slot),
                slots.index(slot * (K0 * GROUPS) + g))
        tile, step = next_step(tile, step, steps)
        slot, round = next_slot(slot, round, STAGES)


@gluon.jit
def masked_rows(dy, weight, dx, c_tile, begin, end, steps, column_tiles, b_tiles, extents, y_steps, r_steps,
                w_steps: gl.constexpr, SPLIT: gl.constexpr, COLUMNS: gl.constexpr, C: gl.constexpr, K1: gl.constexpr,
                K2: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, BACK: gl.constexpr, BB: gl.constexpr,
                CB: gl.constexpr, WARPS: gl.constexpr, Q0=1, K0: gl.constexpr = 1, P0: gl.constexpr = 0,
                W0: gl.constexpr = 0):
    """A run again with a mask on every product: a zero may have met an infinite operand.

    Columns of dx lie BACK columns before those of the tile. With K0 taps on axis 0, dy has Q0 planes.
    """
    N, X0, Q1, Q2, X1, X2 = extents
    y_n, y_0, y_1, y_2 = y_steps
    r_n, r_0, r_1, r_2 = r_steps
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    c = (c_tile + gl.arange(0, CB, layout=gl.SliceLayout(0, LAYOUT)))[None, :]
    strip = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    for at in range(begin, end):
        a, b, column = place_of(at // steps, column_tiles, b_tiles, 16 // BB, BB, COLUMNS)
        n = a + strip // BB
        plane = b + strip % BB
        if SPLIT:  # strips are images
            n = n * BB + plane
            plane = plane * 0
        i_1 = at % steps - P1
        for e in range(0, COLUMNS):
            i_2 = column + e - BACK
            again = gl.full([16, CB], 0.0, gl.float32, LAYOUT)
            there = (c < C) & (n < N) & (plane < X0) & (i_1 >= 0) & (i_1 < X1) & (i_2 >= 0) \
                & (i_2 < X2)
            for tap in range(0, K0 * K1 * K2):
                tap0 = tap // (K1 * K2)
                tap1 = tap // K2 % K1
                o_0 = plane + (P0 - tap0)
                o_1 = i_1 + P1 - tap1
                o_2 = i_2 + P2 - tap % K2
                ok = there & (o_1 >= 0) & (o_1 < Q1) & (o_2 >= 0) & (o_2 < Q2)
                if K0 > 1:
                    ok = ok & (o_0 >= 0) & (o_0 < Q0)
                from_y = n.to(gl.int64) * y_n + o_0.to(gl.int64) * y_0 + o_1.to(gl.int64) * y_1 \
                    + o_2.to(gl.int64) * y_2
                value = gl.load(dy + from_y + c, mask=ok, other=0.0).to(gl.float32)
                factor = gl.load(weight + c * w_steps[0] + tap0 * W0 + tap1 * w_steps[1] + (tap % K2) * w_steps[2],
                                 mask=c < C, other=0.0)
                again += gl.where(ok, value * factor.to(gl.float32), 0.0)
            to_x = n.to(gl.int64) * r_n + plane.to(gl.int64) * r_0 + i_1.to(gl.int64) * r_1 + i_2.to(gl.int64) * r_2
            gl.store(dx + to_x + c, again.to(dx.dtype.element_ty), mask=there)


@gluon.jit
def along(AXIS: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """0, 1, … along one of five axes."""
    if AXIS == 0:
        return gl.arange(0, COUNT, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(
            4, LAYOUT)))))[:, None, None, None, None]
    elif AXIS == 2:
        return gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(
            4, LAYOUT)))))[None, None, :, None, None]
    elif AXIS == 3:
        return gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(
            4, LAYOUT)))))[None, None, None, :, None]
    else:
        return gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(
            3, LAYOUT)))))[None, None, None, None, :]


@gluon.jit
def in_thread_sum(sums, V: gl.constexpr, WARPS: gl.constexpr):
    """What a thread holds, added up."""
    apart = gl.reshape(sums, (V, WARPS, 2, 8, 4, 2))
    return gl.sum(gl.sum(gl.sum(apart, 0), 1), 3)


@gluon.jit
def add_rows(slots, out_slots, barriers, walk, pointers, extents, y_steps, r_steps, w_steps: gl.constexpr, c_tile,
             turns, Q0, W0: gl.constexpr, C: gl.constexpr, K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
             P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, J: gl.constexpr, GROUPS: gl.constexpr,
             MT: gl.constexpr, SPLIT: gl.constexpr, BB: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
             UNROLL: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr):
    """The multiplying warps: a row of dy a step, a finished row of dx a step."""
    full, empty = barriers
    begin, end, column_tiles, b_tiles, steps, start, _ = walk
    dy, weight, dx = pointers
    N, X0, _, _, X1, X2 = extents
    r_n, r_0, r_1, r_2 = r_steps
    BA: gl.constexpr = 16 // BB
    CB: gl.constexpr = V * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LAYOUT: gl.constexpr = rows_layout(V, WARPS, BB)
    zero = gl.full([CB, 16, 8], 0.0, gl.float32, MMA)
    taps = ()
    for k in gl.static_range(K0 * K1):
        taps = taps + line_matrices(weight + (k // K1) * W0, c_tile, gl.to_tensor(k % K1), w_steps, C, K1, K2, MT, 0,
                                    16, V, WARPS, MMA)
    STORE: gl.constexpr = store_layout(V, WARPS, BB)
    a_off = along(0, BA, STORE)
    b_off = along(3, BB, STORE)
    column_off = along(2, 8, STORE)
    c_off = along(4, CB, STORE)
    there = c_tile + c_off < C
    if SPLIT:  # strips are images
        n_off = a_off * BB + b_off
        offset = n_off.to(gl.int64) * r_n + column_off.to(gl.int64) * r_2 + c_off
        b_off = b_off * 0
    else:
        n_off = a_off
        offset = a_off.to(gl.int64) * r_n + b_off.to(gl.int64) * r_0 + column_off.to(gl.int64) * r_2 + c_off
    acc = (zero,) * (K1 * J)  # rows of dx, the one that is finished next first
    suspect = in_thread_sum(zero, V, WARPS)
    tile = start // steps
    step = start % steps
    a, b, column = place_of(tile, column_tiles, b_tiles, BA, BB, J * 8)
    at = start
    slot = begin * 0
    round = begin * 0
    out_slot = begin * 0
    nil = (column_tiles < 0).to(gl.int32)
    if AHEAD:
        more = load_step(slots, full, slot, round, nil, GROUPS, LAYOUT, V, WARPS)
        slot, round = release(empty, slot, round, STAGES)
    for _ in range(0, turns):
        for _ in gl.static_range(UNROLL):
            for k0 in gl.static_range(K0):
                if AHEAD:  # the next step is loaded while products are summed
                    evens, odds = more
                    more = load_step(slots, full, slot, round, nil, GROUPS, LAYOUT, V, WARPS)
                else:
                    evens, odds = load_step(slots, full, slot, round, nil, GROUPS, LAYOUT, V, WARPS, k0, K0)
                for j in gl.static_range(J):
                    for t in gl.static_range(MT):
                        if j % 2 == 0:
                            left = as_rows(evens[j + 2 * t], evens[j + 2 * t + 1], V, WARPS, MMA)
                        else:
                            left = as_rows(odds[j - 1 + 2 * t], odds[j + 2 * t], V, WARPS, MMA)
                        for k1 in gl.static_range(K1):
                            acc = acc[:k1 * J + j] \
                                + (mma_v2(left, taps[(k0 * K1 + k1) * MT + t], acc[k1 * J + j]),) \
                                + acc[k1 * J + j + 1:]
            for j in gl.static_range(J):
                suspect += in_thread_sum(acc[j], V, WARPS) * 0.0
                value = gl.permute(gl.reshape(acc[j].to(dx.dtype.element_ty), (V, WARPS, BA, BB, 8)), (2, 4, 3, 1, 0))
                out_slots.index(out_slot * J + j).store(gl.reshape(value, (BA, 1, 8, BB, CB)))
            slot, round = release(empty, slot, round, STAGES)
            gl.thread_barrier()
            i = step - P1
            n = a * BB + b if SPLIT else a
            plane = b * 0 if SPLIT else b
            row = dx + (n.to(gl.int64) * r_n + plane.to(gl.int64) * r_0 + i.to(gl.int64) * r_1
                        + column.to(gl.int64) * r_2 + c_tile)
            row_there = there & (n_off < N - n) & (b_off < X0 - plane) \
                & ((at >= begin) & (at < end) & (i >= 0) & (i < X1))
            for j in gl.static_range(J):
                gl.store(row + 8 * j * r_2 + offset, out_slots.index(out_slot * J + j).load(STORE),
                         mask=row_there & (column_off < X2 - column - 8 * j))
            out_slot = out_slot ^ 1
            acc = acc[J:] + (zero,) * J
            at += 1
            step += 1
            over = step == steps
            step = gl.where(over, 0, step)
            if over:
                tile += 1
                a, b, column = place_of(tile, column_tiles, b_tiles, BA, BB, J * 8)
    if gl.max(gl.max(gl.max((suspect != suspect).to(gl.int32), 2), 1), 0) != 0:
        gl.thread_barrier()  # a row may be stored by other threads
        masked_rows(dy, weight, dx, c_tile, begin, end, steps, column_tiles, b_tiles, extents, y_steps, r_steps,
                    w_steps, SPLIT, J * 8, C, K1, K2, P1, P2, 0, BB, CB, WARPS, Q0, K0, P0, W0)


@gluon.jit
def run_of(split, run, long_runs, short_run, all_steps):
    """Begin and end of a run: `long_runs` of `run` steps come before those of `short_run` steps."""
    begin = gl.minimum(split, long_runs) * run + gl.maximum(split - long_runs, 0) * short_run
    return begin, gl.minimum(begin + gl.where(split < long_runs, run, short_run), all_steps)


@gluon.jit
def band_input_kernel(
        dy_box, dy, weight, dx, N, X0, Q0, Q1, Q2, X1, X2, column_tiles, b_tiles, steps, all_steps, run,
        long_runs, short_run, channel_tiles, y_n, y_0, y_1, y_2, r_n, r_0, r_1, r_2,
        WC: gl.constexpr, W0: gl.constexpr, W1: gl.constexpr, W2: gl.constexpr, C: gl.constexpr,
        K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
        J: gl.constexpr, SPLIT: gl.constexpr, BB: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
        UNROLL: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr):
    """dx of a run of steps (see band_weight_kernel); a row of dx needs the K1 - 1 steps before its own."""
    CB: gl.constexpr = V * WARPS
    BA: gl.constexpr = 16 // BB
    MT: gl.constexpr = (K2 + 22) // 16
    GROUPS: gl.constexpr = J - 1 + 2 * MT
    dtype: gl.constexpr = dy.dtype.element_ty
    pid = gl.program_id(0)
    c_tile = (pid % channel_tiles) * CB
    begin, end = run_of(pid // channel_tiles, run, long_runs, short_run, all_steps)
    start = begin - gl.minimum(begin % steps, K1 - 1)
    turns = (end - start + UNROLL - 1) // UNROLL
    slots = gl.allocate_shared_memory(dtype, [STAGES * K0 * GROUPS, BA, 1, 8, BB, CB], dy_box.layout)
    out_slots = gl.allocate_shared_memory(dx.dtype.element_ty, [2 * J, BA, 1, 8, BB, CB], dy_box.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    walk = (begin, end, column_tiles, b_tiles, steps, start, turns * UNROLL + AHEAD)
    gl.warp_specialize(
        [(add_rows, (slots, out_slots, (full, empty), walk, (dy, weight, dx), (N, X0, Q1, Q2, X1, X2),
                     (y_n, y_0, y_1, y_2), (r_n, r_0, r_1, r_2), (WC, W1, W2), c_tile, turns, Q0, W0, C, K0, K1, K2,
                     P0, P1, P2, J, GROUPS, MT, SPLIT, BB, STAGES, AHEAD, UNROLL, V, WARPS)),
         (copy_grads, (dy_box, slots, (full, empty), walk, c_tile, N, P2 - K2 + 1, J, GROUPS, BA, BB, STAGES,
                       16 * 8 * CB * 2, K0, P0))],
        [1], [24])
