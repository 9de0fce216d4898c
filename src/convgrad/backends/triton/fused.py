"""Depthwise input gradient, weight gradient and bias gradient from one read of dy and x.

Seen from the input, dx[i] = sum of dy[o]*w[k] and dw[k] += x[i]*dy[o] use the same elements of dy. The phases of a
strided layer split inputs and taps alike, so each phase of a tile feeds its own taps.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005
import triton
import triton.language as tl

from .depthwise import (
    as_sum,
    column_used,
    first_tap,
    highest_column,
    load_taps,
    lowest_column,
    slot_at,
    slot_count,
    source_shift,
    tap_step,
)
from .elements import as_result, position, wide
from .gather import inside, phase_of_axis


# NOTE: one function per line of taps, as in depthwise.py, to keep compilation short.
@triton.jit
def fused_line(dx, dw, bias, line, taps, inputs, valid, a2, Q2, y_2, table, SHIFT: tl.constexpr, UW: tl.constexpr,
               MOVE: tl.constexpr, SLOTS: tl.constexpr, BIAS_SLOT: tl.constexpr, WIDE: tl.constexpr,
               ROUND: tl.constexpr, BIAS_ROUND: tl.constexpr, ACC: tl.constexpr):
    """Load every column of a line of dy once and add it to dx, to dw and, if the line has the slot for it, to db."""
    for column in tl.static_range(lowest_column(MOVE, SLOTS), highest_column(UW, 1, MOVE, SLOTS) + 1):
        if column_used(column, UW, 1, MOVE, SLOTS):
            place = a2 + (SHIFT + column)
            stored = tl.load(line + (wide(place, WIDE) * y_2)[:, None],
                             mask=valid & ((place >= 0) & (place < Q2))[:, None], other=0.0)
            grad = as_sum(stored, table, ROUND, ACC)
            for u in tl.static_range(UW):
                if slot_at(column, u, 1, MOVE, SLOTS) >= 0:
                    dx = dx[:u] + (dx[u] + grad * taps[slot_at(column, u, 1, MOVE, SLOTS)],) + dx[u + 1:]
                    dw = dw[:slot_at(column, u, 1, MOVE, SLOTS)] \
                        + (dw[slot_at(column, u, 1, MOVE, SLOTS)] + inputs[u] * grad,) \
                        + dw[slot_at(column, u, 1, MOVE, SLOTS) + 1:]
            if BIAS_SLOT >= 0 and column >= BIAS_SLOT * MOVE and column < BIAS_SLOT * MOVE + UW:
                bias += as_sum(stored, table, BIAS_ROUND, ACC)
    return dx, dw, bias


@triton.jit
def fused_line_of(dx, dw, bias, line, taps, inputs, valid, a2, Q2, y_2, table, FIRST: tl.constexpr, SHIFT: tl.constexpr,
                  UW: tl.constexpr, MOVE: tl.constexpr, SLOTS: tl.constexpr, BIAS_SLOT: tl.constexpr,
                  WIDE: tl.constexpr, ROUND: tl.constexpr, BIAS_ROUND: tl.constexpr, ACC: tl.constexpr):
    """fused_line on the sums FIRST.. of dw, the same code for every line."""
    dx, sums, bias = fused_line(dx, dw[FIRST:FIRST + SLOTS], bias, line, taps, inputs, valid, a2, Q2, y_2, table, SHIFT,
                                UW, MOVE, SLOTS, BIAS_SLOT, WIDE, ROUND, BIAS_ROUND, ACC)
    return dx, dw[:FIRST] + sums + dw[FIRST + SLOTS:], bias


@triton.constexpr_function
def first_sum(slot0, slot1, ph0, ph1, ph2, T0, T1, T2, D0, D1, D2, P0, P1, P2, K0, K1, K2):
    """Where the sums of a line of taps start: lines are stored phase by phase, so that each is one run of the tuple."""
    before = 0
    for a in range(T0):
        for b in range(T1):
            for c in range(T2):
                counts = [sum((p + pad - k * d) % t == 0 for k in range(kernel))
                          for p, pad, d, t, kernel in ((a, P0, D0, T0, K0), (b, P1, D1, T1, K1), (c, P2, D2, T2, K2))]
                if (a, b, c) == (ph0, ph1, ph2):
                    return before + (slot0 * counts[1] + slot1) * counts[2]
                before += counts[0] * counts[1] * counts[2]


@triton.constexpr_function
def tap_of_sum(index, T0, T1, T2, D0, D1, D2, P0, P1, P2, K0, K1, K2):
    """Flat tap whose sum is stored at `index` (see first_sum)."""
    order = [(k0 * K1 + k1) * K2 + k2
             for a in range(T0) for b in range(T1) for c in range(T2)
             for k0 in range(K0) if (a + P0 - k0 * D0) % T0 == 0
             for k1 in range(K1) if (b + P1 - k1 * D1) % T1 == 0
             for k2 in range(K2) if (c + P2 - k2 * D2) % T2 == 0]
    return order[index]


@triton.constexpr_function
def bias_slot(wanted, tap0, tap1, b0, b1, b2, first, step, slots):
    """Slot of a line that holds the tap (b0, b1, b2), through which every output is seen once; -1 for none."""
    if not wanted or tap0 != b0 or tap1 != b1:
        return -1
    return next((m for m in range(slots) if first + m * step == b2), -1)


@triton.constexpr_function
def tap_at(slot, phase, stride, dilation, pad, kernel):
    """Tap of a slot of a phase."""
    taps = [k for k in range(kernel) if (phase + pad - k * dilation) % stride == 0]
    return taps[slot]


@triton.jit
def fused_kernel(
        dy, x, taps, dx, partial, bias_partial, table,
        N, Q0, Q1, Q2, X0, X1, X2, J0, J1, JB, C, row_tiles, run,
        yn, yc, y0, y1, y2, xn, xc, x0, x1, x2, rn, rc, r0, r1, r2, p_split, p_tap, p_c,
        YALIGN: tl.constexpr, XALIGN: tl.constexpr, RALIGN: tl.constexpr,
        K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
        T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
        D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
        P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
        G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr,
        V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
        BIAS: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr,  # tap that links o with i = o*stride
        WIDE: tl.constexpr, ROUND: tl.constexpr, BIAS_ROUND: tl.constexpr, ACC: tl.constexpr,
        UW: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    y_n, y_0, y_1, y_2 = yn * YALIGN, y0 * YALIGN, y1 * YALIGN, y2 * YALIGN
    x_n, x_0, x_1, x_2 = xn * XALIGN, x0 * XALIGN, x1 * XALIGN, x2 * XALIGN
    r_n, r_0, r_1, r_2 = rn * RALIGN, r0 * RALIGN, r1 * RALIGN, r2 * RALIGN
    MOVE2: tl.constexpr = -(D2 // G2)
    channel_tiles = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    c = (pid % channel_tiles) * BC + tl.arange(0, BC)
    c_there = (c < C)[None, :]
    split = pid // channel_tiles
    begin = split * run
    end = tl.minimum(begin + run, row_tiles)
    dw = (tl.zeros([BR, BC], dtype=ACC),) * (K0 * K1 * K2)
    bias = tl.zeros([BR, BC], dtype=ACC)
    suspect = tl.zeros([BR, BC], dtype=ACC)
    dy_c = (wide(c, WIDE) * yc)[None, :]
    x_c = (wide(c, WIDE) * xc)[None, :]
    dx_c = (wide(c, WIDE) * rc)[None, :]
    for tile in range(begin, end):
        n, j0, jb, j1 = position(tile * BR + tl.arange(0, BR), J0, JB, J1)
        for ph0 in tl.static_range(T0):
            for ph1 in tl.static_range(T1):
                i0 = j0 * T0 + ph0
                i1 = j1 * T1 + ph1
                row_there = (n < N) & (i0 < X0) & (i1 < X1)
                x_row = x + (wide(n, WIDE) * x_n + wide(i0, WIDE) * x_0 + wide(i1, WIDE) * x_1)[:, None] + x_c
                dx_row = dx + (wide(n, WIDE) * r_n + wide(i0, WIDE) * r_0 + wide(i1, WIDE) * r_1)[:, None] + dx_c
                for ph2 in tl.static_range(T2):
                    sums = (tl.zeros([BR, BC], dtype=ACC),) * UW
                    inputs = ()
                    for u in tl.static_range(UW):
                        i2 = (jb * UW + u) * T2 + ph2
                        value = tl.load(x_row + (wide(i2, WIDE) * x_2)[:, None],
                                        mask=(row_there & (i2 < X2))[:, None] & c_there, other=0.0)
                        inputs = inputs + (as_sum(value, table, ROUND, ACC),)
                    for m0 in tl.static_range(slot_count(ph0, T0, D0, P0, K0)):
                        for m1 in tl.static_range(slot_count(ph1, T1, D1, P1, K1)):
                            o0 = j0 + (source_shift(ph0, T0, D0, P0, K0) - m0 * (D0 // G0))
                            o1 = j1 + (source_shift(ph1, T1, D1, P1, K1) - m1 * (D1 // G1))
                            valid = ((n < N) & inside(o0, Q0) & inside(o1, Q1))[:, None] & c_there
                            line = dy + (wide(n, WIDE) * y_n + wide(o0, WIDE) * y_0
                                         + wide(o1, WIDE) * y_1)[:, None] + dy_c
                            if slot_count(ph2, T2, D2, P2, K2) > 0:
                                line_tap = (tap_at(m0, ph0, T0, D0, P0, K0) * K1 + tap_at(m1, ph1, T1, D1, P1, K1)) * K2
                                by = load_taps(taps + line_tap * C + c, C, c < C, first_tap(ph2, T2, D2, P2, K2),
                                               tap_step(T2, D2), slot_count(ph2, T2, D2, P2, K2))
                                sums, dw, bias = fused_line_of(
                                    sums, dw, bias, line, by, inputs, valid, jb * UW, Q2, y_2, table,
                                    first_sum(m0, m1, ph0, ph1, ph2, T0, T1, T2, D0, D1, D2, P0, P1, P2, K0, K1, K2),
                                    source_shift(ph2, T2, D2, P2, K2), UW, MOVE2, slot_count(ph2, T2, D2, P2, K2),
                                    bias_slot(BIAS, tap_at(m0, ph0, T0, D0, P0, K0), tap_at(m1, ph1, T1, D1, P1, K1),
                                              B0, B1, B2, first_tap(ph2, T2, D2, P2, K2), tap_step(T2, D2),
                                              slot_count(ph2, T2, D2, P2, K2)), WIDE, ROUND, BIAS_ROUND, ACC)
                    for u in tl.static_range(UW):
                        i2 = (jb * UW + u) * T2 + ph2
                        suspect += sums[u] * 0
                        tl.store(dx_row + (wide(i2, WIDE) * r_2)[:, None], as_result(sums[u], dx),
                                 mask=(row_there & (i2 < X2))[:, None] & c_there)

    # A zero that stands for padding times an infinite operand gives NaN: then do the run again, masking every product.
    out = partial + split.to(tl.int64) * p_split + c * p_c
    for e in tl.static_range(K0 * K1 * K2):
        suspect += dw[e] * 0
    if tl.max(tl.max((suspect != suspect).to(tl.int32), 1), 0) == 0:
        for e in tl.static_range(K0 * K1 * K2):
            tl.store(out + tap_of_sum(e, T0, T1, T2, D0, D1, D2, P0, P1, P2, K0, K1, K2) * p_tap,
                     as_result(tl.sum(dw[e], 0), partial), mask=c < C)
    else:
        for tile in range(begin * (T0 * T1 * T2 * UW), end * (T0 * T1 * T2 * UW)):
            f_n, f_j0, f_jb, f_j1 = position((tile // (T0 * T1 * T2 * UW)) * BR + tl.arange(0, BR), J0, JB, J1)
            phase = (tile // UW) % (T0 * T1 * T2)
            f_j2 = f_jb * UW + tile % UW
            first0, slots0, shift0 = phase_of_axis(phase // (T1 * T2), T0, D0, P0, K0, G0, V0)
            first1, slots1, shift1 = phase_of_axis((phase // T2) % T1, T1, D1, P1, K1, G1, V1)
            first2, slots2, shift2 = phase_of_axis(phase % T2, T2, D2, P2, K2, G2, V2)
            again = tl.zeros([BR, BC], dtype=ACC)
            for step in range(0, slots0 * slots1 * slots2):
                e0 = step // (slots2 * slots1)
                e1 = (step // slots2) % slots1
                e2 = step % slots2
                f_o0 = f_j0 + shift0 - e0 * (D0 // G0)
                f_o1 = f_j1 + shift1 - e1 * (D1 // G1)
                f_o2 = f_j2 + shift2 - e2 * (D2 // G2)
                ok = ((f_n < N) & inside(f_o0, Q0) & inside(f_o1, Q1) & inside(f_o2, Q2))[:, None] & c_there
                at = (wide(f_n, WIDE) * y_n + wide(f_o0, WIDE) * y_0 + wide(f_o1, WIDE) * y_1
                      + wide(f_o2, WIDE) * y_2)[:, None] + dy_c
                at_tap = ((first0 + e0 * (T0 // G0)) * K1 + first1 + e1 * (T1 // G1)) * K2 + first2 + e2 * (T2 // G2)
                factor = tl.load(taps + at_tap * C + c, mask=c < C, other=0.0)
                one = as_sum(tl.load(dy + at, mask=ok, other=0.0), table, ROUND, ACC)
                again += tl.where(ok, one * factor[None, :], 0)
            f_i0 = f_j0 * T0 + phase // (T1 * T2)
            f_i1 = f_j1 * T1 + (phase // T2) % T1
            f_i2 = f_j2 * T2 + phase % T2
            to = (wide(f_n, WIDE) * r_n + wide(f_i0, WIDE) * r_0 + wide(f_i1, WIDE) * r_1
                  + wide(f_i2, WIDE) * r_2)[:, None] + dx_c
            tl.store(dx + to, as_result(again, dx),
                     mask=((f_n < N) & (f_i0 < X0) & (f_i1 < X1) & (f_i2 < X2))[:, None] & c_there)
        for tap in range(0, K0 * K1 * K2):
            reach0 = (tap // (K2 * K1)) * D0 - P0
            reach1 = ((tap // K2) % K1) * D1 - P1
            reach2 = (tap % K2) * D2 - P2
            phase0 = ((reach0 % T0) + T0) % T0
            phase1 = ((reach1 % T1) + T1) % T1
            phase2 = ((reach2 % T2) + T2) % T2
            again = tl.zeros([BR, BC], dtype=ACC)
            for tile in range(begin * UW, end * UW):
                f_n, f_j0, f_jb, f_j1 = position((tile // UW) * BR + tl.arange(0, BR), J0, JB, J1)
                f_i0 = f_j0 * T0 + phase0
                f_i1 = f_j1 * T1 + phase1
                f_i2 = (f_jb * UW + tile % UW) * T2 + phase2
                # o*stride = i - reach, and both sides are multiples of the stride here
                f_o0 = f_j0 + (phase0 - reach0) // T0
                f_o1 = f_j1 + (phase1 - reach1) // T1
                f_o2 = f_jb * UW + tile % UW + (phase2 - reach2) // T2
                ok = ((f_n < N) & (f_i0 < X0) & (f_i1 < X1) & (f_i2 < X2) & inside(f_o0, Q0) & inside(f_o1, Q1)
                      & inside(f_o2, Q2))[:, None] & c_there
                from_x = (wide(f_n, WIDE) * x_n + wide(f_i0, WIDE) * x_0 + wide(f_i1, WIDE) * x_1
                          + wide(f_i2, WIDE) * x_2)[:, None] + x_c
                from_y = (wide(f_n, WIDE) * y_n + wide(f_o0, WIDE) * y_0 + wide(f_o1, WIDE) * y_1
                          + wide(f_o2, WIDE) * y_2)[:, None] + dy_c
                one = as_sum(tl.load(dy + from_y, mask=ok, other=0.0), table, ROUND, ACC)
                again += one * as_sum(tl.load(x + from_x, mask=ok, other=0.0), table, ROUND, ACC)
            tl.store(out + tap * p_tap, as_result(tl.sum(again, 0), partial), mask=c < C)
    if BIAS:
        tl.store(bias_partial + split.to(tl.int64) * C + c, as_result(tl.sum(bias, 0), bias_partial),
                 mask=c < C)
