"""Depthwise kernels: one input and one output channel per group, bound by memory, so every load is used many times.

A tile is some rows of positions times some channels; a row is `UW` neighbours along the last axis (the plan turns the
axes so that this is the image's height, and rows next to each other are neighbours in memory). A source column is
loaded once and meets every tap of the last axis while it is in registers. Sums are kept apart per neighbour (input
gradient, output) or per tap (weight gradient), as tuples that the compiler unrolls.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005
import triton
import triton.language as tl

from .elements import as_operand, as_result, position, wide
from .gather import inside, phase_of_axis


@triton.constexpr_function
def first_tap(phase, stride, dilation, pad, kernel):
    """First tap of a phase of one axis (`kernel` when it has none); the phase's taps are stride/gcd apart."""
    return next((k for k in range(kernel) if (phase + pad - k * dilation) % stride == 0), kernel)


@triton.constexpr_function
def tap_step(stride, dilation):
    return next(step for step in range(1, stride + 1) if step * dilation % stride == 0)


@triton.constexpr_function
def slot_count(phase, stride, dilation, pad, kernel):
    return sum((phase + pad - k * dilation) % stride == 0 for k in range(kernel))


@triton.constexpr_function
def source_shift(phase, stride, dilation, pad, kernel):
    first = next((k for k in range(kernel) if (phase + pad - k * dilation) % stride == 0), 0)
    return (phase + pad - first * dilation) // stride


@triton.constexpr_function
def slot_at(column, neighbour, step, move, slots):
    """Which slot links a source column with a neighbour: column = neighbour*step + slot*move; -1 for none."""
    return next((m for m in range(slots) if neighbour * step + m * move == column), -1)


@triton.constexpr_function
def column_used(column, neighbours, step, move, slots):
    return any((column - u * step) % move == 0 and 0 <= (column - u * step) // move < slots for u in range(neighbours))


@triton.constexpr_function
def lowest_column(move, slots):
    return min(0, (slots - 1) * move)


@triton.constexpr_function
def highest_column(neighbours, step, move, slots):
    return (neighbours - 1) * step + max(0, (slots - 1) * move)


@triton.jit
def as_sum(value, table, ROUND: tl.constexpr, ACC: tl.constexpr):
    return as_operand(value, table, ROUND).to(ACC)


@triton.jit
def tap_major_kernel(weight, taps, table, C, w_c, w_0, w_1, w_2, A1, A2, ROUND: tl.constexpr, BC: tl.constexpr):
    """Copy a depthwise weight to (tap, channel) order, rounded as an operand, in the type of the sums.

    A channel's taps lie together in memory; read as they are, every channel of a vector would be a load of its own.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    tap = tl.program_id(1)
    where = (tap // (A1 * A2)) * w_0 + ((tap // A2) % A1) * w_1 + (tap % A2) * w_2
    value = tl.load(weight + c * w_c + where, mask=c < C, other=0.0)
    tl.store(taps + tap * C + c, as_operand(value, table, ROUND).to(taps.dtype.element_ty), mask=c < C)


@triton.jit
def load_taps(taps, C, mask, FIRST: tl.constexpr, STEP: tl.constexpr, SLOTS: tl.constexpr):
    """The weights of the slots of one line, each a row of channels, from (tap, channel) order."""
    values = ()
    for m in tl.static_range(SLOTS):
        values = values + (tl.load(taps + (FIRST + m * STEP) * C, mask=mask, other=0.0)[None, :],)
    return values


# NOTE: a line of taps is one function, the same for all lines, so that the compiler's front end reads it once:
# unrolling all taps of a 7x7 kernel in place took 20 s to compile.
@triton.jit
def gather_line(sums, line, taps, valid, a2, S2, s_2, table, SHIFT: tl.constexpr, UW: tl.constexpr, STEP: tl.constexpr,
                MOVE: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, ROUND: tl.constexpr, ACC: tl.constexpr):
    """Load every column of a source line that some neighbour needs and add it, times its tap, to their sums."""
    for column in tl.static_range(lowest_column(MOVE, SLOTS), highest_column(UW, STEP, MOVE, SLOTS) + 1):
        if column_used(column, UW, STEP, MOVE, SLOTS):
            place = a2 + (SHIFT + column)
            value = tl.load(line + (wide(place, WIDE) * s_2)[:, None],
                            mask=valid & ((place >= 0) & (place < S2))[:, None], other=0.0)
            value = as_sum(value, table, ROUND, ACC)
            for u in tl.static_range(UW):
                if slot_at(column, u, STEP, MOVE, SLOTS) >= 0:
                    sums = sums[:u] + (sums[u] + value * taps[slot_at(column, u, STEP, MOVE, SLOTS)],) + sums[u + 1:]
    return sums


@triton.jit
def weight_line(sums, line, grads, valid, a2, X2, x_2, table, UW: tl.constexpr, STEP: tl.constexpr, MOVE: tl.constexpr,
                SLOTS: tl.constexpr, PAD: tl.constexpr, WIDE: tl.constexpr, ROUND: tl.constexpr, ACC: tl.constexpr):
    """Load every column of a line of x once and add it, times the neighbours' dy, to the sums of the line's taps."""
    for column in tl.static_range(highest_column(UW, STEP, MOVE, SLOTS) + 1):
        if column_used(column, UW, STEP, MOVE, SLOTS):
            place = a2 + (column - PAD)
            value = tl.load(line + (wide(place, WIDE) * x_2)[:, None],
                            mask=valid & ((place >= 0) & (place < X2))[:, None], other=0.0)
            value = as_sum(value, table, ROUND, ACC)
            for u in tl.static_range(UW):
                if slot_at(column, u, STEP, MOVE, SLOTS) >= 0:
                    sums = sums[:slot_at(column, u, STEP, MOVE, SLOTS)] \
                        + (sums[slot_at(column, u, STEP, MOVE, SLOTS)] + grads[u] * value,) \
                        + sums[slot_at(column, u, STEP, MOVE, SLOTS) + 1:]
    return sums


@triton.jit
def depthwise_gather_kernel(
        source, taps, result, table,
        N, S0, S1, S2, R0, R1, R2, J0, J1, JB, C, row_tiles,
        sn, sc, s0, s1, s2, rn, rc, r0, r1, r2,
        SALIGN: tl.constexpr, RALIGN: tl.constexpr,
        K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
        T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
        D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
        P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
        G0: tl.constexpr, G1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
        G2: tl.constexpr, V2: tl.constexpr,
        INPUT: tl.constexpr, WIDE: tl.constexpr, ROUND: tl.constexpr, ACC: tl.constexpr,
        UW: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """The output, or the input gradient (by phases, those of the last axis in one program)."""
    s_n, s_0, s_1, s_2 = sn * SALIGN, s0 * SALIGN, s1 * SALIGN, s2 * SALIGN
    r_n, r_0, r_1, r_2 = rn * RALIGN, r0 * RALIGN, r1 * RALIGN, r2 * RALIGN
    LAST_PHASES: tl.constexpr = T2 if INPUT else 1
    STEP2: tl.constexpr = 1 if INPUT else T2  # source positions from neighbour to neighbour
    MOVE2: tl.constexpr = -(D2 // G2) if INPUT else D2
    MOVE0: tl.constexpr = -(D0 // G0) if INPUT else D0
    MOVE1: tl.constexpr = -(D1 // G1) if INPUT else D1
    channel_tiles = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    c = (pid % channel_tiles) * BC + tl.arange(0, BC)
    c_there = (c < C)[None, :]
    pid = pid // channel_tiles
    row_tile = pid % row_tiles
    phase = pid // row_tiles
    if INPUT:
        ph0 = phase // T1
        ph1 = phase % T1
        first0, slots0, shift0 = phase_of_axis(ph0, T0, D0, P0, K0, G0, V0)
        first1, slots1, shift1 = phase_of_axis(ph1, T1, D1, P1, K1, G1, V1)
    else:
        ph0, ph1, first0, first1, slots0, slots1, shift0, shift1 = 0, 0, 0, 0, K0, K1, -P0, -P1
    row = row_tile * BR + tl.arange(0, BR)
    n, j0, jb, j1 = position(row, J0, JB, J1)
    a0 = (j0 if INPUT else j0 * T0) + shift0
    a1 = (j1 if INPUT else j1 * T1) + shift1
    a2 = jb * (UW * STEP2)
    base = (wide(n, WIDE) * s_n)[:, None] + (wide(c, WIDE) * sc)[None, :]
    i0 = j0 * T0 + ph0 if INPUT else j0
    i1 = j1 * T1 + ph1 if INPUT else j1
    there = (n < N) & (i0 < R0) & (i1 < R1)
    result_base = result + (wide(n, WIDE) * r_n + wide(i0, WIDE) * r_0 + wide(i1, WIDE) * r_1)[:, None] \
        + (wide(c, WIDE) * rc)[None, :]

    acc = (tl.zeros([BR, BC], dtype=ACC),) * (LAST_PHASES * UW)
    for outer in range(0, slots0 * slots1):
        m0 = outer // slots1
        m1 = outer % slots1
        o0 = a0 + m0 * MOVE0
        o1 = a1 + m1 * MOVE1
        valid = ((n < N) & inside(o0, S0) & inside(o1, S1))[:, None] & c_there
        line = source + base + (wide(o0, WIDE) * s_0 + wide(o1, WIDE) * s_1)[:, None]
        tap0 = first0 + m0 * (T0 // G0) if INPUT else m0
        tap1 = first1 + m1 * (T1 // G1) if INPUT else m1
        line_taps = taps + (tap0 * K1 + tap1) * K2 * C + c
        if INPUT:
            for ph2 in tl.static_range(T2):
                if slot_count(ph2, T2, D2, P2, K2) > 0:
                    by = load_taps(line_taps, C, c < C, first_tap(ph2, T2, D2, P2, K2), tap_step(T2, D2),
                                   slot_count(ph2, T2, D2, P2, K2))
                    acc = acc[:ph2 * UW] + gather_line(
                        acc[ph2 * UW:ph2 * UW + UW], line, by, valid, a2, S2, s_2, table,
                        source_shift(ph2, T2, D2, P2, K2), UW, 1, MOVE2, slot_count(ph2, T2, D2, P2, K2), WIDE, ROUND,
                        ACC) + acc[ph2 * UW + UW:]
        else:
            by = load_taps(line_taps, C, c < C, 0, 1, K2)
            acc = gather_line(acc, line, by, valid, a2, S2, s_2, table, -P2, UW, T2, MOVE2, K2, WIDE, ROUND, ACC)

    # A zero that stands for padding times an infinite weight gives NaN: then sum again, masking every product.
    suspect = acc[0] * 0
    for other in tl.static_range(1, LAST_PHASES * UW):
        suspect += acc[other] * 0
    if tl.max(tl.max((suspect != suspect).to(tl.int32), 1), 0) == 0:
        for ph2 in tl.static_range(LAST_PHASES):
            for u in tl.static_range(UW):
                i2 = (jb * UW + u) * LAST_PHASES + ph2
                tl.store(result_base + (wide(i2, WIDE) * r_2)[:, None],
                         as_result(acc[ph2 * UW + u], result), mask=(there & (i2 < R2))[:, None] & c_there)
    else:
        for e in range(0, LAST_PHASES * UW):
            if INPUT:
                first2, slots2, shift2 = phase_of_axis(e // UW, T2, D2, P2, K2, G2, V2)
            else:
                first2, slots2, shift2 = 0, K2, -P2
            again = tl.zeros([BR, BC], dtype=ACC)
            for step in range(0, slots0 * slots1 * slots2):
                x2 = step % slots2
                x1 = (step // slots2) % slots1
                x0 = step // (slots2 * slots1)
                e0 = a0 + x0 * MOVE0
                e1 = a1 + x1 * MOVE1
                e2 = a2 + (e % UW) * STEP2 + shift2 + x2 * MOVE2
                ok = ((n < N) & inside(e0, S0) & inside(e1, S1) & inside(e2, S2))[:, None] & c_there
                at = (wide(e0, WIDE) * s_0 + wide(e1, WIDE) * s_1 + wide(e2, WIDE) * s_2)[:, None]
                one = as_sum(tl.load(source + base + at, mask=ok, other=0.0), table, ROUND, ACC)
                t0 = first0 + x0 * (T0 // G0) if INPUT else x0
                t1 = first1 + x1 * (T1 // G1) if INPUT else x1
                t2 = first2 + x2 * (T2 // G2) if INPUT else x2
                factor = tl.load(taps + ((t0 * K1 + t1) * K2 + t2) * C + c, mask=c < C, other=0.0)
                again += tl.where(ok, one * factor[None, :], 0)
            i2_ = (jb * UW + e % UW) * LAST_PHASES + e // UW
            tl.store(result_base + (wide(i2_, WIDE) * r_2)[:, None], as_result(again, result),
                     mask=(there & (i2_ < R2))[:, None] & c_there)


@triton.jit
def depthwise_weight_kernel(
        dy, x, partial, bias_partial, table,
        N, Q0, Q1, Q2, QB, X0, X1, X2, C, row_tiles, run,
        yn, yc, y0, y1, y2, xn, xc, x0, x1, x2, p_split, p_tap, p_c,
        YALIGN: tl.constexpr, XALIGN: tl.constexpr,
        K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
        T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
        D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
        P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
        BIAS: tl.constexpr, WIDE: tl.constexpr, ROUND: tl.constexpr, BIAS_ROUND: tl.constexpr, ACC: tl.constexpr,
        LINES: tl.constexpr, UW: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """The weight gradient of LINES lines of taps (a line is all taps of the last axis), over one run of row tiles."""
    y_n, y_0, y_1, y_2 = yn * YALIGN, y0 * YALIGN, y1 * YALIGN, y2 * YALIGN
    x_n, x_0, x_1, x_2 = xn * XALIGN, x0 * XALIGN, x1 * XALIGN, x2 * XALIGN
    LINE_TILES: tl.constexpr = (K0 * K1 + LINES - 1) // LINES
    channel_tiles = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    c = (pid % channel_tiles) * BC + tl.arange(0, BC)
    c_there = (c < C)[None, :]
    pid = pid // channel_tiles
    line_tile = pid % LINE_TILES
    split = pid // LINE_TILES
    begin = split * run
    end = tl.minimum(begin + run, row_tiles)
    acc = (tl.zeros([BR, BC], dtype=ACC),) * (LINES * K2)
    bias = tl.zeros([BR, BC], dtype=ACC)
    for tile in range(begin, end):
        row = tile * BR + tl.arange(0, BR)
        n, q0, qb, q1 = position(row, Q0, QB, Q1)
        there = n < N
        grads = ()
        for u in tl.static_range(UW):
            q2 = qb * UW + u
            at = (wide(n, WIDE) * y_n + wide(q0, WIDE) * y_0 + wide(q1, WIDE) * y_1 + wide(q2, WIDE) * y_2)[:, None]
            stored = tl.load(dy + at + (wide(c, WIDE) * yc)[None, :], mask=(there & (q2 < Q2))[:, None] & c_there,
                             other=0.0)
            if BIAS:
                bias += as_sum(stored, table, BIAS_ROUND, ACC)
            grads = grads + (as_sum(stored, table, ROUND, ACC),)
        for r in tl.static_range(LINES):
            line = line_tile * LINES + r
            i0 = q0 * T0 + (line // K1) * D0 - P0
            i1 = q1 * T1 + (line % K1) * D1 - P1
            valid = (there & inside(i0, X0) & inside(i1, X1) & (line < K0 * K1))[:, None] & c_there
            base = x + (wide(n, WIDE) * x_n + wide(i0, WIDE) * x_0 + wide(i1, WIDE) * x_1)[:, None] \
                + (wide(c, WIDE) * xc)[None, :]
            acc = acc[:r * K2] + weight_line(acc[r * K2:r * K2 + K2], base, grads, valid, qb * (UW * T2), X2, x_2,
                                             table, UW, T2, D2, K2, P2, WIDE, ROUND, ACC) + acc[r * K2 + K2:]

    # A zero that stands for padding times an infinite operand gives NaN: then sum again, masking every product.
    out = partial + split.to(tl.int64) * p_split + c * p_c
    suspect = acc[0] * 0
    for other in tl.static_range(1, LINES * K2):
        suspect += acc[other] * 0
    if tl.max(tl.max((suspect != suspect).to(tl.int32), 1), 0) == 0:
        for r in tl.static_range(LINES):
            for m in tl.static_range(K2):
                tap = (line_tile * LINES + r) * K2 + m
                tl.store(out + tap * p_tap, as_result(tl.sum(acc[r * K2 + m], 0), partial),
                         mask=(c < C) & (tap < K0 * K1 * K2))
    else:
        last = tl.minimum((line_tile + 1) * LINES, K0 * K1) * K2
        for tap in range(line_tile * LINES * K2, last):
            again = tl.zeros([BR, BC], dtype=ACC)
            for tile in range(begin * UW, end * UW):
                f_n, f_q0, f_qb, f_q1 = position((tile // UW) * BR + tl.arange(0, BR), Q0, QB, Q1)
                f_q2 = f_qb * UW + tile % UW
                f_i0 = f_q0 * T0 + (tap // (K2 * K1)) * D0 - P0
                f_i1 = f_q1 * T1 + ((tap // K2) % K1) * D1 - P1
                f_i2 = f_q2 * T2 + (tap % K2) * D2 - P2
                ok = ((f_n < N) & (f_q2 < Q2) & inside(f_i0, X0) & inside(f_i1, X1)
                      & inside(f_i2, X2))[:, None] & c_there
                f_y = (wide(f_n, WIDE) * y_n + wide(f_q0, WIDE) * y_0 + wide(f_q1, WIDE) * y_1
                       + wide(f_q2, WIDE) * y_2)[:, None] + (wide(c, WIDE) * yc)[None, :]
                f_x = (wide(f_n, WIDE) * x_n + wide(f_i0, WIDE) * x_0 + wide(f_i1, WIDE) * x_1
                       + wide(f_i2, WIDE) * x_2)[:, None] + (wide(c, WIDE) * xc)[None, :]
                one = as_sum(tl.load(dy + f_y, mask=ok, other=0.0), table, ROUND, ACC)
                again += one * as_sum(tl.load(x + f_x, mask=ok, other=0.0), table, ROUND, ACC)
            tl.store(out + tap * p_tap, as_result(tl.sum(again, 0), partial), mask=c < C)
    if BIAS:
        tl.store(bias_partial + split.to(tl.int64) * C + c, as_result(tl.sum(bias, 0), bias_partial),
                 mask=(c < C) & (line_tile == 0))
