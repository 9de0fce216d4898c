"""Depthwise weight gradient by sliding strips (see slide.py), alone or with the input gradient in one pass."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# ruff: noqa: RUF005
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .slide import (
    add_line,
    any_of,
    as_sums,
    below,
    load_row,
    masked_input,
    place_of,
    read_taps,
    rows_reached,
    steps_of,
    store_row,
    strip_layout,
    tap_between,
    window_low,
    window_width,
)
from .slide_taps import get_row, held_taps, put_row, row_table, store_sums


@gluon.jit
def weigh_line(sums, window, grads, U: gl.constexpr, T: gl.constexpr, D: gl.constexpr, K: gl.constexpr):
    """Add the products of U columns of dy with the columns of x that tap k reaches to the sum of tap k."""
    for u in gl.static_range(U):
        for k in gl.static_range(K):
            sums = sums[:k] + (sums[k] + window[u * T + k * D] * grads[u],) + sums[k + 1:]
    return sums


@gluon.jit
def weigh_line_of(sums, window, grads, FIRST: gl.constexpr, U: gl.constexpr, T: gl.constexpr, D: gl.constexpr,
                  K: gl.constexpr):
    """weigh_line on the sums FIRST.. of all taps."""
    return sums[:FIRST] + weigh_line(sums[FIRST:FIRST + K], window, grads, U, T, D, K) + sums[FIRST + K:]


@gluon.jit
def masked_weight(dy, x, out, taps, c, k0, begin, end, strips, segments, steps, planes, extents, y_steps, x_steps, zero,
                  base, pad1, OWN_X: gl.constexpr, Q2: gl.constexpr, X2: gl.constexpr, Y2: gl.constexpr,
                  XS2: gl.constexpr, C: gl.constexpr, KERNEL: gl.constexpr, STRIDE: gl.constexpr,
                  DILATION: gl.constexpr, PAD: gl.constexpr, NEAR: gl.constexpr, U: gl.constexpr, S: gl.constexpr,
                  LAYOUT: gl.constexpr):
    """The sums of a run again with every product masked: a zero of the padding may have met an infinite operand.

    A run owns rows of x, from row `base` on, and columns of x (OWN_X) or of dy; `pad1` is the padding of its first tap.
    """
    y_n, y_0, y_1 = y_steps
    x_n, x_0, x_1 = x_steps
    N, Q1, X0, X1 = extents
    c_tile, c_out = c
    for tap in range(0, taps):
        tap1 = tap // KERNEL[2]
        tap2 = tap % KERNEL[2]
        again = zero
        for tile in range(begin, end):
            n, plane, segment, residue, strip = place_of(tile, strips, segments, planes, DILATION[1], NEAR, S, LAYOUT)
            i_0 = plane + k0 * DILATION[0] - PAD[0]
            for e in range(0, steps * STRIDE[1] * U):
                i_1 = base + residue + (segment * steps + e // (STRIDE[1] * U)) * (STRIDE[1] * DILATION[1]) \
                    + (e // U) % STRIDE[1]
                s_1 = i_1 + pad1 - tap1 * DILATION[1]
                if OWN_X:
                    i_2 = strip * U + e % U
                    s_2 = i_2 + PAD[2] - tap2 * DILATION[2]
                else:
                    s_2 = (strip * U + e % U) * STRIDE[2]
                    i_2 = s_2 + tap2 * DILATION[2] - PAD[2]
                ok = (n < N) & below(i_0, X0) & below(i_1, X1) & below(s_1, Q1 * STRIDE[1]) & (s_1 % STRIDE[1] == 0) \
                    & below(i_2, X2) & below(s_2, Q2 * STRIDE[2]) & (s_2 % STRIDE[2] == 0)
                ok = ok & (c_tile < C)
                value = gl.load(x + (n.to(gl.int64) * x_n + i_0.to(gl.int64) * x_0 + i_1.to(gl.int64) * x_1 + i_2 * XS2)
                                + c_tile, mask=ok, other=0.0).to(gl.float32)
                grad = gl.load(dy + (n.to(gl.int64) * y_n + plane.to(gl.int64) * y_0
                                     + (s_1 // STRIDE[1]).to(gl.int64) * y_1 + (s_2 // STRIDE[2]) * Y2) + c_tile,
                               mask=ok, other=0.0).to(gl.float32)
                again += value * grad
        gl.store(out + tap * C + c_out, gl.sum(again, 0), mask=c_out < C)


@gluon.jit
def slide_weight_kernel(
        dy, x, partial, N, Q0, Q1, X0, X1, strips, segments, steps, turns, tiles, run, channel_tiles,
        yn, y0, y1, xn, x0, x1,
        YALIGN: gl.constexpr, XALIGN: gl.constexpr, C: gl.constexpr, Q2: gl.constexpr, X2: gl.constexpr,
        Y2: gl.constexpr, XS2: gl.constexpr,
        K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        T1: gl.constexpr, T2: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr,
        P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, BIAS: gl.constexpr,
        DEEP: gl.constexpr, LINES: gl.constexpr, SHARED: gl.constexpr,
        U: gl.constexpr, V: gl.constexpr, UNROLL: gl.constexpr, AHEAD: gl.constexpr, S: gl.constexpr,
        BC: gl.constexpr, WARPS: gl.constexpr):
    """dw of LINES lines of taps over a run of tiles: a row of x meets the rows of dy that reach it, kept in registers.

    DEEP planes of taps at once: all, where LINES is all lines, or one.

    Step e loads row e of dy and the rows e*stride - pad + (0..stride-1) of x, where pad is that of the first line.
    """
    y_n, y_0, y_1 = steps_of((yn, y0, y1), YALIGN)
    x_n, x_0, x_1 = steps_of((xn, x0, x1), XALIGN)
    LAYOUT: gl.constexpr = strip_layout(V, BC, WARPS)
    WIDTH: gl.constexpr = (U - 1) * T2 + (K2 - 1) * D2 + 1
    REACH: gl.constexpr = rows_reached(LINES, T1)
    GROUPS: gl.constexpr = (K1 + LINES - 1) // LINES
    pid = gl.program_id(0)
    c_tile = (pid % channel_tiles) * BC
    c = c_tile + gl.arange(0, BC, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    pid = pid // channel_tiles
    k0 = pid % (K0 // DEEP)
    pid = pid // (K0 // DEEP)
    group = pid % GROUPS
    split = pid // GROUPS
    pad1 = P1 - group * (LINES * D1)
    first = gl.maximum(pad1, 0) // T1 if D1 == 1 else pad1 * 0  # the first step with a row of x
    begin = split * run
    end = gl.minimum(begin + run, tiles)
    zero = gl.full([S, BC], 0.0, gl.float32, LAYOUT)
    acc = (zero,) * (DEEP * LINES * K2)
    bias = zero
    if SHARED == 2:
        table = row_table(REACH, U, S, BC)
    for tile in range(begin, end):
        n, plane, segment, residue, strip = place_of(tile, strips, segments, Q0, D1, DEEP > 1, S, LAYOUT)
        i_0 = plane + (k0 * D0 - P0)
        y_there = (n < N) & (c < C)
        step = first + segment * steps
        last = step + steps
        o = residue + step * D1
        i = o * T1 - pad1
        y_at = dy + (n.to(gl.int64) * y_n + plane.to(gl.int64) * y_0 + o.to(gl.int64) * y_1 + strip * (U * Y2)) + c
        x_at = x + (n.to(gl.int64) * x_n + i_0.to(gl.int64) * x_0 + i.to(gl.int64) * x_1
                    + (strip * (U * T2) - P2) * XS2) + c
        ring = ()  # rows of dy, the oldest first
        newest = tile * 0 + (REACH - 1)  # SHARED: where the next row goes
        for m in gl.static_range(REACH - 1):
            row = as_sums(load_row(y_at - (REACH - 1 - m) * D1 * y_1, strip * U,
                                   y_there & below(o - (REACH - 1 - m) * D1, Q1), Q2, Y2, U), U)
            if SHARED == 2:
                put_row(table, m, row, U)
            else:
                ring = ring + row
            if BIAS:
                for u in gl.static_range(U):
                    bias += gl.where(segment == 0, row[u], 0.0)
        ahead = ()
        for a in gl.static_range(AHEAD):
            ahead = ahead + load_row(y_at + a * D1 * y_1, strip * U,
                                     y_there & ((step + a < last) & below(o + a * D1, Q1)), Q2, Y2, U)
            for t in gl.static_range(T1 * DEEP):
                there = y_there & below(i_0 + (t // T1) * D0, X0)
                ahead = ahead + load_row(x_at + (t // T1) * D0 * x_0 + (a * D1 * T1 + t % T1) * x_1,
                                         strip * (U * T2) - P2,
                                         there & ((step + a < last) & below(i + (a * D1 * T1 + t % T1), X1)), X2, XS2,
                                         WIDTH)
        for _ in range(0, turns):
            for _ in gl.static_range(UNROLL):
                current = ahead[:U + DEEP * T1 * WIDTH]
                step += 1
                o += D1
                i += D1 * T1
                y_at += D1 * y_1
                x_at += D1 * T1 * x_1
                more = step + (AHEAD - 1) < last
                ahead = ahead[U + DEEP * T1 * WIDTH:] + load_row(
                    y_at + (AHEAD - 1) * D1 * y_1, strip * U, y_there & (more & below(o + (AHEAD - 1) * D1, Q1)), Q2,
                    Y2, U)
                for t in gl.static_range(T1 * DEEP):
                    there = y_there & below(i_0 + (t // T1) * D0, X0)
                    ahead = ahead + load_row(
                        x_at + (t // T1) * D0 * x_0 + ((AHEAD - 1) * D1 * T1 + t % T1) * x_1, strip * (U * T2) - P2,
                        there & (more & below(i + ((AHEAD - 1) * D1 * T1 + t % T1), X1)), X2, XS2, WIDTH)
                row = as_sums(current[:U], U)
                if BIAS:
                    for u in gl.static_range(U):
                        bias += row[u]
                if SHARED == 2:
                    put_row(table, newest, row, U)
                else:
                    ring = ring + row
                for t in gl.static_range(T1 * DEEP):
                    window = as_sums(current[U + t * WIDTH:U + t * WIDTH + WIDTH], WIDTH)
                    for age in gl.static_range(REACH):  # a row of dy that came `age` steps ago meets tap t + age*stride
                        if t % T1 + age * T1 < LINES:
                            if age == 0:
                                old = row
                            elif SHARED == 2:
                                place = gl.where(newest >= age, newest - age, newest - age + REACH)
                                old = get_row(table, place, U, LAYOUT)
                            else:
                                old = ring[(REACH - 1 - age) * U:(REACH - age) * U]
                            acc = weigh_line_of(acc, window, old, ((t // T1) * LINES + t % T1 + age * T1) * K2, U, T2,
                                                D2, K2)
                if SHARED == 2:
                    newest = gl.where(newest == REACH - 1, 0, newest + 1)
                else:
                    ring = ring[U:]

    c_out = c_tile + gl.arange(0, BC, layout=gl.SliceLayout(0, LAYOUT))
    out = partial + split.to(gl.int64) * ((K0 * K1 * K2 + BIAS) * C) + (k0 * K1 + group * LINES) * (K2 * C)
    taps = gl.minimum(LINES, K1 - group * LINES) * K2
    suspect = zero
    for e in gl.static_range(DEEP * LINES * K2):
        suspect += acc[e] * 0.0
    if any_of(suspect != suspect) != 0:
        for deep in range(0, DEEP):
            masked_weight(dy, x, out + deep * (K1 * K2 * C), taps, (c, c_out), k0 + deep, begin, end, strips, segments,
                          steps, Q0, (N, Q1, X0, X1), (y_n, y_0, y_1), (x_n, x_0, x_1), zero, first * T1 - pad1, pad1,
                          False, Q2, X2, Y2, XS2, C, (K0, K1, K2), (1, T1, T2), (D0, D1, D2), (P0, P1, P2), DEEP > 1,
                          U, S, LAYOUT)
    elif SHARED > 0:
        store_sums(out, acc, c_tile, DEEP * taps, C, DEEP * LINES * K2, S, BC, WARPS)
    else:
        for e in gl.static_range(DEEP * LINES * K2):
            gl.store(out + e * C + c_out, gl.sum(acc[e], 0), mask=(c_out < C) & (e < DEEP * taps))
    if BIAS:
        gl.store(out + K0 * K1 * K2 * C + c_out, gl.sum(bias, 0), mask=(c_out < C) & (k0 == 0) & (group == 0))


@gluon.jit
def weigh_window(sums, window, inputs, FIRST: gl.constexpr, U: gl.constexpr, WIDTH: gl.constexpr, T: gl.constexpr,
                 D: gl.constexpr, P: gl.constexpr, K: gl.constexpr):
    """Add the products of U columns of x with the columns of dy that reach them to the sums FIRST.. of a line."""
    line = sums[FIRST:FIRST + K]
    for w in gl.static_range(WIDTH):
        for c in gl.static_range(U):
            if tap_between(c, w, U, T, D, P, K) >= 0:
                line = line[:tap_between(c, w, U, T, D, P, K)] \
                    + (line[tap_between(c, w, U, T, D, P, K)] + window[w] * inputs[c],) \
                    + line[tap_between(c, w, U, T, D, P, K) + 1:]
    return sums[:FIRST] + line + sums[FIRST + K:]


@gluon.jit
def slide_both_kernel(
        dy, x, weight, dx, partial, N, planes, Q1, X1, strips, segments, steps, turns, tiles, run, channel_tiles,
        yn, y0, y1, xn, x0, x1, rn, r0, r1, w_c, w_1,
        YALIGN: gl.constexpr, XALIGN: gl.constexpr, RALIGN: gl.constexpr, C: gl.constexpr, Q2: gl.constexpr,
        X2: gl.constexpr, Y2: gl.constexpr, XS2: gl.constexpr, R2: gl.constexpr, W2: gl.constexpr,
        K1: gl.constexpr, K2: gl.constexpr, T1: gl.constexpr, T2: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr,
        P1: gl.constexpr, P2: gl.constexpr, BIAS: gl.constexpr, SHARED: gl.constexpr, U: gl.constexpr,
        V: gl.constexpr, UNROLL: gl.constexpr, AHEAD: gl.constexpr, S: gl.constexpr, BC: gl.constexpr,
        WARPS: gl.constexpr):
    """dx, dw and db from one read of dy and x: a strip of x and dx, and the windows of dy that reach it.

    Axis 0 has one tap, which links each of the `planes` of x with the same plane of dy.
    """
    y_n, y_0, y_1 = steps_of((yn, y0, y1), YALIGN)
    x_n, x_0, x_1 = steps_of((xn, x0, x1), XALIGN)
    r_n, r_0, r_1 = steps_of((rn, r0, r1), RALIGN)
    LAYOUT: gl.constexpr = strip_layout(V, BC, WARPS)
    WIDTH: gl.constexpr = window_width(U, T2, D2, P2, K2)
    LOW: gl.constexpr = window_low(U, T2, D2, P2, K2)
    REACH: gl.constexpr = rows_reached(K1, T1)
    FIRST: gl.constexpr = P1 // T1 if D1 == 1 else P1  # row of dy of step 0
    pid = gl.program_id(0)
    c_tile = (pid % channel_tiles) * BC
    c = c_tile + gl.arange(0, BC, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    split = pid // channel_tiles
    begin = split * run
    end = gl.minimum(begin + run, tiles)
    zero = gl.full([S, BC], 0.0, gl.float32, LAYOUT)
    w_at = weight + gl.full([S, 1], 0, gl.int32, LAYOUT) + c * w_c
    if SHARED > 0:
        taps, bad_taps = held_taps(weight, c_tile, w_c, 0, w_1, C, W2, 1, K1, K2, BC, WARPS, LAYOUT)
    else:
        taps, bad_taps = read_taps(w_at, 0, w_1, c < C, zero, W2, 1, K1, K2)
    acc = (zero,) * (K1 * K2)
    bias = zero
    for tile in range(begin, end):
        n, plane, segment, residue, strip = place_of(tile, strips, segments, planes, D1, False, S, LAYOUT)
        there = (n < N) & (c < C)
        step = segment * steps
        last = step + steps
        o = FIRST + residue + step * D1
        i = T1 * FIRST - P1 + residue + step * (T1 * D1)
        column = strip * (U // T2) + LOW
        y_at = dy + (n.to(gl.int64) * y_n + plane.to(gl.int64) * y_0 + o.to(gl.int64) * y_1 + column * Y2) + c
        x_at = x + (n.to(gl.int64) * x_n + plane.to(gl.int64) * x_0 + i.to(gl.int64) * x_1 + strip * (U * XS2)) + c
        r_at = dx + (n.to(gl.int64) * r_n + plane.to(gl.int64) * r_0 + i.to(gl.int64) * r_1 + strip * (U * R2)) + c
        ring = ()  # rows of dy, the oldest first
        for m in gl.static_range(REACH - 1):
            row = as_sums(load_row(y_at - (REACH - 1 - m) * D1 * y_1, column,
                                   there & below(o - (REACH - 1 - m) * D1, Q1), Q2, Y2, WIDTH), WIDTH)
            ring = ring + row
            if BIAS:
                for q in gl.static_range(U // T2):
                    bias += gl.where(segment == 0, row[q - LOW], 0.0)
        ahead = ()
        for a in gl.static_range(AHEAD):
            ahead = ahead + load_row(y_at + a * D1 * y_1, column,
                                     there & ((step + a < last) & below(o + a * D1, Q1)), Q2, Y2, WIDTH)
            for t in gl.static_range(T1):
                ahead = ahead + load_row(x_at + (a * D1 * T1 + t) * x_1, strip * U,
                                         there & ((step + a < last) & below(i + (a * D1 * T1 + t), X1)), X2, XS2, U)
        for _ in range(0, turns):
            for _ in gl.static_range(UNROLL):
                current = ahead[:WIDTH + T1 * U]
                y_at += D1 * y_1
                x_at += D1 * T1 * x_1
                more = step + AHEAD < last
                ahead = ahead[WIDTH + T1 * U:] + load_row(
                    y_at + (AHEAD - 1) * D1 * y_1, column, there & (more & below(o + AHEAD * D1, Q1)), Q2, Y2, WIDTH)
                for t in gl.static_range(T1):
                    ahead = ahead + load_row(x_at + ((AHEAD - 1) * D1 * T1 + t) * x_1, strip * U,
                                             there & (more & below(i + (AHEAD * D1 * T1 + t), X1)), X2, XS2, U)
                row = as_sums(current[:WIDTH], WIDTH)
                if BIAS:
                    for q in gl.static_range(U // T2):
                        bias += row[q - LOW]
                ring = ring + row
                for t in gl.static_range(T1):
                    inputs = as_sums(current[WIDTH + t * U:WIDTH + t * U + U], U)
                    sums = (zero,) * U
                    for age in gl.static_range(REACH):  # a row of dy that came `age` steps ago: tap t + age*stride
                        if t + age * T1 < K1:
                            old = ring[(REACH - 1 - age) * WIDTH:(REACH - age) * WIDTH]
                            line = taps[(t + age * T1) * K2:(t + age * T1) * K2 + K2]
                            sums = add_line(sums, old, line, U, WIDTH, T2, D2, P2, K2)
                            acc = weigh_window(acc, old, inputs, (t + age * T1) * K2, U, WIDTH, T2, D2, P2, K2)
                    store_row(r_at + t * r_1, strip * U, there & (below(i + t, X1) & (step < last)), sums, X2, R2, U,
                              (Q2 + U // T2 - 1) // (U // T2) > (X2 + U - 1) // U)
                ring = ring[WIDTH:]
                step += 1
                o += D1
                i += T1 * D1
                r_at += T1 * D1 * r_1

    c_out = c_tile + gl.arange(0, BC, layout=gl.SliceLayout(0, LAYOUT))
    out = partial + split.to(gl.int64) * ((K1 * K2 + BIAS) * C)
    suspect = zero
    for e in gl.static_range(K1 * K2):
        suspect += acc[e] * 0.0
    if bad_taps != 0:
        for tile in range(begin, end):
            n, plane, segment, residue, strip = place_of(tile, strips, segments, planes, D1, False, S, LAYOUT)
            masked_input(dy, w_at, dx, (n < N) & (c < C), n, plane,
                         T1 * FIRST - P1 + residue + segment * steps * (T1 * D1), strip, c, steps * T1, planes, Q1,
                         X1, (y_n, y_0, y_1), (r_n, r_0, r_1), 0, w_1, Q2, X2, Y2, R2, W2, (1, K1, K2), (1, T1, T2),
                         (1, D1, D2), (0, P1, P2), U, zero)
    if any_of(suspect != suspect) != 0:
        masked_weight(dy, x, out, K1 * K2, (c, c_out), 0, begin, end, strips, segments, steps, planes,
                      (N, Q1, planes, X1), (y_n, y_0, y_1), (x_n, x_0, x_1), zero, T1 * FIRST - P1, P1, True, Q2, X2,
                      Y2, XS2, C, (1, K1, K2), (1, T1, T2), (1, D1, D2), (0, P1, P2), False, U, S, LAYOUT)
    elif SHARED > 0:
        store_sums(out, acc, c_tile, K1 * K2, C, K1 * K2, S, BC, WARPS)
    else:
        for e in gl.static_range(K1 * K2):
            gl.store(out + e * C + c_out, gl.sum(acc[e], 0), mask=c_out < C)
    if BIAS:
        gl.store(out + K1 * K2 * C + c_out, gl.sum(bias, 0), mask=c_out < C)
