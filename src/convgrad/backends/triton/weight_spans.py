"""The weight gradient of few channels by spans of rows: what some windows of x have in a row; written in Gluon.

Rows of a sum are FOLD neighbouring positions of dy x output channels, columns the elements of x that all their windows
have on one row, and it runs over BP places (image, first axis) of a line. A cell is CELL positions, such that copies
from x begin at multiples of 16 bytes; a program sums one part of FOLD positions of every cell. Zeros that the copies
fill in beside rows are the padding.

A program has NT0 x K1 taps of the first two axes. Along the second axis, rows of x are copied once and multiplied by
all lines of dy that they meet. Each position has its own part of the columns: at the end these parts are added up.
`weight.py` has the same sums in plain Triton.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment, attr-defined"
# ruff: noqa: RUF005
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .line_places import slot_after, wrapped


@gluon.jit
def place_of(unit, walk, BOX: gl.constexpr):
    """First image and position of the first axis of a unit, its rows (from, to), its cell of the last axis."""
    cells, boxes_0, boxes_n, rows, Q1 = walk
    rest = unit // cells
    first = rest // (boxes_0 * boxes_n) * rows
    rest = rest % (boxes_0 * boxes_n)
    return rest // boxes_0 * BOX[0], rest % boxes_0 * BOX[1], first, gl.minimum(first + rows, Q1), unit % cells


@gluon.jit
def tile_of(K0: gl.constexpr, NT0: gl.constexpr, TILES: gl.constexpr, CELL: gl.constexpr, BN: gl.constexpr):
    """Of this program: first tap of the first axis, part of a cell, first column, run; its places in cell 0.

    These are its first position of dy, the element of a row of x from which it copies, and how many elements before
    the first window that is.
    """
    POSITIONS, FOLD, SHIFT, STEP, PAD = CELL
    PARTS: gl.constexpr = POSITIONS // FOLD
    COUNT: gl.constexpr = (K0 + NT0 - 1) // NT0 * PARTS * TILES
    tile = gl.program_id(0) % COUNT
    part = tile // TILES % PARTS
    position = part * FOLD - SHIFT
    element = position * STEP - PAD
    return (tile // (TILES * PARTS) * NT0, part, tile % TILES * BN, gl.program_id(0) // COUNT,
            (position, element & -8, element & 7))


@gluon.jit
def copy_lines(boxes, slots, barriers, walk, units, runs, NT0: gl.constexpr, COLUMN_TILES: gl.constexpr,
               GEOMETRY: gl.constexpr, CELL: gl.constexpr, BOX: gl.constexpr, DRAIN: gl.constexpr, KG: gl.constexpr,
               BM: gl.constexpr, BN: gl.constexpr, YS: gl.constexpr, XS: gl.constexpr):
    """The warp that copies: each line of dy, with it the rows of x that it meets for the first time.

    A free slot of dy says that those of x are free, too: there are enough for YS lines, two units among them. DRAIN:
    not for two units, so a unit begins when all lines of the one before were multiplied.
    """
    dy_box, x_box = boxes
    y_slots, x_slots = slots
    full, empty = barriers
    K, T, P = GEOMETRY
    BP: gl.constexpr = BOX[0] * BOX[1]
    tap, _part, column, run, at = tile_of(K[0], NT0, COLUMN_TILES, CELL, BN)
    position, begin, _before = at
    slot = run * 0
    round = run * 0
    last = run * 0
    last_round = run * 0
    x_slot = run * 0
    for unit in range(run, units, runs):
        n, q0, first, end, cell = place_of(unit, walk, BOX)
        if DRAIN:
            mbarrier.wait(empty.index(last), last_round, pred=unit > run)
        for q1 in range(first, end):
            fresh = gl.where(q1 == first, K[1], T[1])
            mbarrier.wait(empty.index(slot), round ^ 1)
            mbarrier.expect(full.index(slot), BP * BM * 2 + T[1] * NT0 * BP * BN * 2, pred=q1 > first)
            mbarrier.expect(full.index(slot), BP * BM * 2 + K[1] * NT0 * BP * BN * 2, pred=q1 == first)
            tma.async_copy_global_to_shared(dy_box, [n, q0, q1, 0, (cell * CELL[0] + position) * KG], full.index(slot),
                                            y_slots.index(slot))
            for t in range(K[1] - fresh, K[1]):
                for p in gl.static_range(NT0):
                    tma.async_copy_global_to_shared(
                        x_box, [n, q0 * T[0] + tap + (p - P[0]), q1 * T[1] + t - P[1], 0,
                                cell * (CELL[0] * CELL[3]) + begin + column],
                        full.index(slot), x_slots.index(x_slot * NT0 + p))
                x_slot, _carry = wrapped(x_slot, 1, XS)
            last = slot + 0
            last_round = round + 0
            slot, carry = wrapped(slot, 1, YS)
            round ^= carry


@gluon.jit
def exact_sums(pointers, zero, tap, elements, walk, units, runs, run, extents, steps, GEOMETRY: gl.constexpr,
               CELL: gl.constexpr, BOX: gl.constexpr, KG: gl.constexpr):
    """The sums of one tap again, place by place with a mask on every product: a zero may have met Inf or NaN."""
    dy, x = pointers
    row, column = elements  # of dy and x, in cell 0
    t0, t1 = tap
    _, T, P = GEOMETRY
    N, Q0, Y_WIDTH, X0, X1, X_WIDTH = extents
    y_n, y_0, y_1, x_n, x_0, x_1 = steps
    acc = zero
    for unit in range(run, units, runs):
        n, q0, first, end, cell = place_of(unit, walk, BOX)
        e = cell * (CELL[0] * CELL[3]) + column
        r = cell * (CELL[0] * KG) + row
        for place in range(first * (BOX[0] * BOX[1]), end * (BOX[0] * BOX[1])):
            q1 = place // (BOX[0] * BOX[1])
            at_n = n + place % (BOX[0] * BOX[1]) // BOX[1]
            at_0 = q0 + place % BOX[1]
            i0 = at_0 * T[0] + t0 - P[0]
            i1 = q1 * T[1] + t1 - P[1]
            inside = (at_n < N) & (at_0 < Q0) & (r >= 0) & (r < Y_WIDTH)
            a = gl.load(dy + (at_n.to(gl.int64) * y_n + at_0.to(gl.int64) * y_0 + q1.to(gl.int64) * y_1) + r,
                        mask=inside, other=0.0)
            there = (at_n < N) & (i0 >= 0) & (i0 < X0) & (i1 >= 0) & (i1 < X1) & (e >= 0) & (e < X_WIDTH)
            b = gl.load(x + (at_n.to(gl.int64) * x_n + i0.to(gl.int64) * x_0 + i1.to(gl.int64) * x_1) + e, mask=there,
                        other=0.0)
            products = a.to(gl.float32)[:, None] * b.to(gl.float32)[None, :]
            acc += gl.where(inside[:, None] & there[None, :], products, 0.0)
    return acc


@gluon.jit
def multiply_lines(slots, barriers, ones, walk, units, runs, run, sums, bias, BIAS: gl.constexpr, NT0: gl.constexpr,
                   GEOMETRY: gl.constexpr, BOX: gl.constexpr, DRAIN: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
                   YS: gl.constexpr, XS: gl.constexpr, operand: gl.constexpr):
    """The sums of all taps over the lines of a run; dy is loaded to registers while the line before is multiplied.

    With DRAIN not from one unit to the next, whose copies begin when all lines were multiplied.
    """
    y_slots, x_slots = slots
    full, empty = barriers
    K, T, _ = GEOMETRY
    BP: gl.constexpr = BOX[0] * BOX[1]
    COUNT: gl.constexpr = NT0 * K[1]
    slot = run * 0
    round = run * 0
    x_slot = run * 0
    mbarrier.wait(full.index(0), 0, pred=run < units)
    pixels = y_slots.index(0).reshape([BP, BM]).permute([1, 0]).load(operand)
    for unit in range(run, units, runs):
        _n, _q0, first, end, _cell = place_of(unit, walk, BOX)
        for q1 in range(first, end):
            more = ()
            if BIAS:
                bias = warpgroup_mma(pixels, ones.permute([1, 0]), bias, is_async=True)
            for t in gl.static_range(K[1]):
                row, _round = slot_after(x_slot, round, t, XS)
                for p in gl.static_range(NT0):
                    more += (warpgroup_mma(pixels, x_slots.index(row * NT0 + p).reshape([BP, BN]), sums[t * NT0 + p],
                                           is_async=True),)
            done = slot + 0
            last = q1 == end - 1
            slot, carry = wrapped(slot, 1, YS)
            round ^= carry
            x_slot += gl.where(last, K[1], T[1])
            x_slot -= (x_slot >= XS).to(gl.int32) * XS
            mbarrier.wait(full.index(slot), round, pred=(q1 + 1 < end) | ((unit + runs < units) & (not DRAIN)))
            coming = y_slots.index(slot).reshape([BP, BM]).permute([1, 0]).load(operand)
            more += (bias,) if BIAS else ()
            more = warpgroup_mma_wait(num_outstanding=0, deps=more + (pixels,))  # products still read these registers
            sums = more[:COUNT]
            if BIAS:
                bias = more[COUNT]
            mbarrier.arrive(empty.index(done))
            pixels = coming
        if DRAIN:
            mbarrier.wait(full.index(slot), round, pred=unit + runs < units)
            pixels = y_slots.index(slot).reshape([BP, BM]).permute([1, 0]).load(operand)
    return sums, bias


@gluon.jit
def sum_and_store(slots, barriers, ones, pointers, result, bias, walk, units, runs, extents, steps, r_run,
                  BIAS: gl.constexpr, NT0: gl.constexpr, COLUMN_TILES: gl.constexpr, GEOMETRY: gl.constexpr,
                  CELL: gl.constexpr, BOX: gl.constexpr, DRAIN: gl.constexpr, KG: gl.constexpr, CG: gl.constexpr,
                  BM: gl.constexpr, BN: gl.constexpr, YS: gl.constexpr, XS: gl.constexpr, WARPS: gl.constexpr):
    """The multiplying warps; sums go to result[run, part and column tile, output channel, taps, input channel]."""
    K, T, _ = GEOMETRY
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 8, 16])
    WINDOW: gl.constexpr = K[2] * CG
    PAIRS: gl.constexpr = K[0] * K[1] * WINDOW
    POSITIONS: gl.constexpr = CELL[0]
    FOLD: gl.constexpr = CELL[1]
    tap, part, column, run, at = tile_of(K[0], NT0, COLUMN_TILES, CELL, BN)
    position, begin, before = at
    zero = gl.full([BM, BN], 0.0, gl.float32, layout)
    sums, added = multiply_lines(
        slots, barriers, ones, walk, units, runs, run, (zero,) * (NT0 * K[1]),
        gl.full([BM, 8], 0.0, gl.float32, narrow) if BIAS else run, BIAS, NT0, GEOMETRY, BOX, DRAIN, BM, BN, YS,
        XS, gl.DotOperandLayout(0, layout, 2))
    row = gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    element = column + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    k = row % KG
    in_window = element[None, :] - (before + row // KG * (T[2] * CG))[:, None]
    used = (in_window >= 0) & (in_window < WINDOW)
    part += run * (POSITIONS // FOLD)
    result += (part * COLUMN_TILES + column // BN).to(gl.int64) * r_run
    COUNT: gl.constexpr = NT0 * K[1]
    AT_ONCE: gl.constexpr = 4 if BN < 64 else 1  # taps whose sums so far are loaded together
    bad = sums[0] != sums[0]
    for t in gl.static_range(1, COUNT):
        bad |= sums[t] != sums[t]
    again = gl.max(gl.max((used & bad).to(gl.int32), 1), 0)
    whole = ()
    for t in gl.static_range(COUNT):
        acc = sums[t]
        if again:
            acc = exact_sums(pointers, zero, (tap + t % NT0, t // NT0), (position * KG + row, begin + element), walk,
                             units, runs, run, extents, steps, GEOMETRY, CELL, BOX, KG)
        whole += (acc,)
    target = result + (k * PAIRS)[:, None] + (tap * K[1] * WINDOW + in_window)
    if COLUMN_TILES > 1:  # the columns here hold some elements of the windows only
        for first in gl.static_range(0, WINDOW, BN):
            here = (first + element - column)[None, :]
            for t in gl.static_range(COUNT):
                place = result + (row * PAIRS)[:, None] + ((tap + t % NT0) * K[1] + t // NT0) * WINDOW + here
                gl.store(place, zero, mask=(row < KG)[:, None] & (here < WINDOW) & (tap + t % NT0 < K[0]))
        gl.thread_barrier()
    for fold in gl.static_range(FOLD):  # one after the other, so that the order of additions is fixed
        mine = used & (row // KG == fold)[:, None]
        for first in gl.static_range(0, COUNT, AT_ONCE):
            more = ()
            for t in gl.static_range(first, min(first + AT_ONCE, COUNT)):  # all loads before they are waited for
                if fold > 0 or COLUMN_TILES > 1:
                    more += (gl.load(target + (t % NT0 * K[1] + t // NT0) * WINDOW,
                                     mask=mine & (tap + t % NT0 < K[0]), other=0.0) + whole[t],)
                else:
                    more += (whole[t],)
            for t in gl.static_range(first, min(first + AT_ONCE, COUNT)):
                gl.store(target + (t % NT0 * K[1] + t // NT0) * WINDOW, more[t - first],
                         mask=mine & (tap + t % NT0 < K[0]))
        if fold + 1 < FOLD:
            gl.thread_barrier()
    if BIAS:
        row = gl.arange(0, BM, layout=gl.SliceLayout(1, narrow))[:, None]
        one = gl.arange(0, 8, layout=gl.SliceLayout(0, narrow))[None, :]
        gl.store(bias + part * BM + row + one, added, mask=(row + one == row) & (tap + column == 0))


@gluon.jit(do_not_specialize=["cells", "boxes_0", "boxes_n", "rows", "units", "runs"])
def span_weight_kernel(
        dy_box, x_box, dy, x, result, bias,
        N, Q0, Q1, Y_WIDTH, X0, X1, X_WIDTH, cells, boxes_0, boxes_n, rows, units, runs,
        y_n, y_0, y_1, x_n, x_0, x_1, r_run,
        K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        T0: gl.constexpr, T1: gl.constexpr, T2: gl.constexpr,
        P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
        KG: gl.constexpr, CG: gl.constexpr, POSITIONS: gl.constexpr, FOLD: gl.constexpr, SHIFT: gl.constexpr,
        NT0: gl.constexpr, COLUMN_TILES: gl.constexpr, PN: gl.constexpr, B0: gl.constexpr, BN: gl.constexpr,
        YS: gl.constexpr, XS: gl.constexpr, DRAIN: gl.constexpr, WARPS: gl.constexpr, BIAS: gl.constexpr):
    """With BIAS the programs of first taps and columns sum dy, too: to bias[run, part, position, output channel]."""
    BM: gl.constexpr = FOLD * KG
    BP: gl.constexpr = PN * B0
    BOX: gl.constexpr = (PN, B0)
    GEOMETRY: gl.constexpr = ((K0, K1, K2), (T0, T1, T2), (P0, P1, P2))
    CELL: gl.constexpr = (POSITIONS, FOLD, SHIFT, T2 * CG, P2 * CG)
    dtype: gl.constexpr = dy.dtype.element_ty
    gl.static_assert(POSITIONS % FOLD == 0 and POSITIONS * T2 * CG % 8 == 0)
    gl.static_assert(T1 <= K1 and XS >= K1 + (YS - 1) * T1)

    y_slots = gl.allocate_shared_memory(dtype, [YS, PN, B0, 1, 1, BM], dy_box.layout)
    x_slots = gl.allocate_shared_memory(dtype, [XS * NT0, PN, B0, 1, 1, BN], x_box.layout)
    full = gl.allocate_shared_memory(gl.int64, [YS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [YS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(YS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    if BIAS:
        ones = gl.allocate_shared_memory(dtype, [8, BP], gl.NVMMASharedLayout(128, 16, rank=2))
        ones.store(gl.full([8, BP], 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])))
        fence_async_shared()
        gl.thread_barrier()
    else:
        ones = y_slots
    slots = (y_slots, x_slots)
    barriers = (full, empty)
    walk = (cells, boxes_0, boxes_n, rows, Q1)
    gl.warp_specialize(
        [(sum_and_store, (slots, barriers, ones, (dy, x), result, bias, walk, units, runs,
                          (N, Q0, Y_WIDTH, X0, X1, X_WIDTH), (y_n, y_0, y_1, x_n, x_0, x_1), r_run, BIAS, NT0,
                          COLUMN_TILES, GEOMETRY, CELL, BOX, DRAIN, KG, CG, BM, BN, YS, XS, WARPS)),
         (copy_lines, ((dy_box, x_box), slots, barriers, walk, units, runs, NT0, COLUMN_TILES, GEOMETRY, CELL, BOX,
                       DRAIN, KG, BM, BN, YS, XS))],
        [1], [24])
