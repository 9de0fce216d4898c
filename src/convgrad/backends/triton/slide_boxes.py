"""Depthwise weight gradient by sliding strips that the copy engine feeds, in Gluon (see slide.py and bands.py).

Strips are S images at the same columns, so that one box of the copy engine brings all that the threads of a program
read of some rows: columns x S images x BC channels, zeros outside the image. No thread computes an address or a mask,
and what is under way takes no registers. A *stage* is ROWS rows of dy and the rows of x that they meet; a run is a
number of stages of all tiles after each other and may begin within a tile, so that copies never stop and programs end
at the same time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# ruff: noqa: RUF005
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .bands import bits, masked_sums, next_slot, next_step, place_of
from .slide import any_of, as_sums, rows_reached, strip_layout
from .slide_taps import store_sums
from .slide_weight import weigh_line_of


@triton.constexpr_function
def slot_columns(COUNT, S):
    """Columns of a slot for COUNT columns: a power of two, and no less than 8 lines of shared memory."""
    return max(triton.next_power_of_2(COUNT), 8 // S)


@triton.constexpr_function
def row_layout(COLUMNS, V, BC, WARPS):
    """How threads hold COLUMNS x strips x BC channels: all columns of their strip, V channels, as `strip_layout`."""
    lanes = bits(BC) - bits(V)
    registers = [[0, 0, 0, 0, 1 << b] for b in range(bits(V))] + [[0, 0, 1 << b, 0, 0] for b in range(bits(COLUMNS))]
    return gl.DistributedLinearLayout(
        registers, [[0, 0, 0, 0, V << b] for b in range(lanes)] + [[0, 0, 0, 1 << b, 0] for b in range(5 - lanes)],
        [[0, 0, 0, (1 << (5 - lanes)) << b, 0] for b in range(bits(WARPS))], [],
        [1, 1, COLUMNS, (1 << (5 - lanes)) * WARPS, BC])


@gluon.jit
def read_columns(slot, COUNT: gl.constexpr, COLUMNS: gl.constexpr, S: gl.constexpr, V: gl.constexpr, BC: gl.constexpr,
                 WARPS: gl.constexpr):
    """The first COUNT of the COLUMNS columns of a slot, one after the other."""
    parts = (gl.reshape(slot.load(row_layout(COLUMNS, V, BC, WARPS)), (COLUMNS, S, BC)),)
    for level in gl.static_range(bits(COLUMNS)):
        halves = ()
        for part in gl.static_range(1 << level):
            apart = gl.reshape(parts[part], (2, COLUMNS >> (level + 1), S, BC))
            halves = halves + gl.split(gl.permute(apart, (1, 2, 3, 0)))
        parts = halves
    LAYOUT: gl.constexpr = strip_layout(V, BC, WARPS)
    columns = ()
    for j in gl.static_range(COUNT):
        columns = columns + (gl.convert_layout(gl.reshape(parts[j], (S, BC)), LAYOUT, assert_trivial=True),)
    return columns


@gluon.jit
def ask_for(boxes, slots, full, slot, walk, at, tile, stage, c_tile, planes, N, X1, BYTES: gl.constexpr,
            T: gl.constexpr, P: gl.constexpr, U: gl.constexpr, STRIPS: gl.constexpr, S: gl.constexpr,
            ROWS: gl.constexpr):
    """Begin to copy a stage: the next rows of dy and the rows of x that they meet through the first line of taps.

    Before `begin` only rows of dy are wanted, which later stages need, and past `end` nothing: there it asks for what
    lies outside the tensors, which comes as zeros.
    """
    x_box, dy_box = boxes
    x_slots, dy_slots = slots
    begin, end, stages = walk
    image, plane, column = place_of(tile, STRIPS, planes, S, 1, U)
    image = gl.where(at < end, image, N)
    row = gl.where(at < begin, X1, stage * (ROWS * T[0]) - P[1])
    mbarrier.expect(full.index(slot), BYTES)
    tma.async_copy_global_to_shared(dy_box, [plane, stage * ROWS, column, image, c_tile], full.index(slot),
                                    dy_slots.index(slot))
    tma.async_copy_global_to_shared(x_box, [plane - P[0], row, column * T[1] - P[2], image, c_tile], full.index(slot),
                                    x_slots.index(slot))
    tile, stage = next_step(tile, stage, stages)
    return at + 1, tile, stage


@gluon.jit
def slide_box_kernel(
        x_box, dy_box, dy, x, partial, N, Q0, Q1, X0, X1, planes, stages, all_stages, run, channel_tiles,
        y_n, y_0, y_1, y_2, x_n, x_0, x_1, x_2,
        C: gl.constexpr, Q2: gl.constexpr, X2: gl.constexpr, K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        T1: gl.constexpr, T2: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, BIAS: gl.constexpr,
        U: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr, UNROLL: gl.constexpr, STAGES: gl.constexpr,
        S: gl.constexpr, BC: gl.constexpr, WARPS: gl.constexpr):
    """dw of all taps; partial sums (tap, channel) of every run. A tile is U columns of S images, `stages` stages.

    Row e of dy comes with the rows e*stride - pad + (0..stride-1) of x.
    """
    LAYOUT: gl.constexpr = strip_layout(V, BC, WARPS)
    WIDTH: gl.constexpr = (U - 1) * T2 + K2
    X_COUNT: gl.constexpr = K0 * ROWS * T1 * WIDTH  # columns of a box
    Y_COUNT: gl.constexpr = ROWS * U
    X_COLUMNS: gl.constexpr = slot_columns(X_COUNT, S)
    Y_COLUMNS: gl.constexpr = slot_columns(Y_COUNT, S)
    REACH: gl.constexpr = rows_reached(K1, T1)
    BEFORE: gl.constexpr = (REACH - 2 + ROWS) // ROWS  # stages with rows of dy that a run still needs
    STRIPS: gl.constexpr = (Q2 + U - 1) // U
    BYTES: gl.constexpr = (Y_COUNT + X_COUNT) * S * BC * 2
    dtype: gl.constexpr = dy.dtype.element_ty
    pid = gl.program_id(0)
    c_tile = (pid % channel_tiles) * BC
    split = pid // channel_tiles
    begin = split * run
    end = gl.minimum(begin + run, all_stages)
    start = begin - gl.minimum(begin % stages, BEFORE)
    turns = (end - start + UNROLL - 1) // UNROLL
    slots = (gl.allocate_shared_memory(dtype, [STAGES, 1, 1, X_COLUMNS, S, BC], x_box.layout),
             gl.allocate_shared_memory(dtype, [STAGES, 1, 1, Y_COLUMNS, S, BC], dy_box.layout))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    walk = (begin, end, stages)
    at, tile, stage = start, start // stages, start % stages  # of what is asked for next
    for s in gl.static_range(STAGES):
        at, tile, stage = ask_for((x_box, dy_box), slots, full, s, walk, at, tile, stage, c_tile, planes, N, X1, BYTES,
                                  (T1, T2), (P0, P1, P2), U, STRIPS, S, ROWS)
    zero = gl.full([S, BC], 0.0, gl.float32, LAYOUT)
    acc = (zero,) * (K0 * K1 * K2)
    bias = zero
    ring = (zero,) * ((REACH - 1) * U)  # rows of dy, the oldest first
    here = start
    slot = begin * 0
    round = begin * 0
    for _ in range(0, turns):
        for _ in gl.static_range(UNROLL):
            mbarrier.wait(full.index(slot), round)
            grads = read_columns(slots[1].index(slot), Y_COUNT, Y_COLUMNS, S, V, BC, WARPS)
            inputs = read_columns(slots[0].index(slot), X_COUNT, X_COLUMNS, S, V, BC, WARPS)
            # all threads have read the slot, and their reads come before what the copy engine writes
            fence_async_shared()
            gl.thread_barrier()
            at, tile, stage = ask_for((x_box, dy_box), slots, full, slot, walk, at, tile, stage, c_tile, planes, N, X1,
                                      BYTES, (T1, T2), (P0, P1, P2), U, STRIPS, S, ROWS)
            slot, round = next_slot(slot, round, STAGES)
            for r in gl.static_range(ROWS):
                ring = ring + as_sums(grads[r * U:], U)
                if BIAS:
                    for u in gl.static_range(U):
                        bias += gl.where(here >= begin, ring[(REACH - 1) * U + u], 0.0)
                for t in gl.static_range(K0 * T1):
                    window = as_sums(inputs[(((t // T1) * ROWS + r) * T1 + t % T1) * WIDTH:], WIDTH)
                    for age in gl.static_range(REACH):  # a row of dy that came `age` rows ago: tap t + age*stride
                        if t % T1 + age * T1 < K1:
                            acc = weigh_line_of(acc, window, ring[(REACH - 1 - age) * U:(REACH - age) * U],
                                                ((t // T1) * K1 + t % T1 + age * T1) * K2, U, T2, 1, K2)
                ring = ring[U:]
            here += 1
    for _ in gl.static_range(STAGES):  # a program must not end before its copies
        mbarrier.wait(full.index(slot), round)
        slot, round = next_slot(slot, round, STAGES)

    c_out = c_tile + gl.arange(0, BC, layout=gl.SliceLayout(0, LAYOUT))
    out = partial + split.to(gl.int64) * ((K0 * K1 * K2 + BIAS) * C)
    suspect = zero
    for e in gl.static_range(K0 * K1 * K2):
        suspect += acc[e] * 0.0
    if any_of(suspect != suspect) != 0:
        for k0 in range(0, K0):
            masked_sums(dy, x, out + k0 * (K1 * K2 * C), K1 * K2, c_tile, k0, 0, begin * ROWS, end * ROWS,
                        stages * ROWS, STRIPS, planes, (N, Q0, Q1, Q2, X0, X1, X2), (y_n, y_0, y_1, y_2),
                        (x_n, x_0, x_1, x_2), False, False, U, C, K2, P0, P1, P2, 1, BC, WARPS, S, T1, T2)
    else:
        store_sums(out, acc, c_tile, K0 * K1 * K2, C, K0 * K1 * K2, S, BC, WARPS)
    if BIAS:
        gl.store(out + K0 * K1 * K2 * C + c_out, gl.sum(bias, 0), mask=c_out < C)
