"""Kernels for the weight gradient and the bias gradient: sums over all output pixels, split among programs.

A tile holds output channels times (tap, input channel) columns. Every program sums its own run of pixels; with more
than one run the float32 partial sums go to the workspace and `part_sums.py` adds them in the order of the runs.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102, SIM108
import triton
import triton.language as tl

from .elements import as_operand, as_result, block_steps, has_nan, in_box, only, position, wide
from .gather import inside


@triton.jit
def weight_kernel(
        dy, x, result, table,
        N, Q0, Q1, Q2, X0, X1, X2, boxes_0, boxes_1, boxes_2, boxes, run,
        yn, yc, y0, y1, y2, xn, xc, x0, x1, x2, r_split, r_o, r_i, r_0, r_1, r_2,
        YALIGN: tl.constexpr, XALIGN: tl.constexpr,
        K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
        T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
        D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
        P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
        KG: tl.constexpr, CG: tl.constexpr, GP: tl.constexpr,  # output and input channels of a group; groups in a tile
        SPLITS: tl.constexpr, WIDE: tl.constexpr, ROUND: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
        BY_PIXEL: tl.constexpr, SWAP: tl.constexpr, FLAT: tl.constexpr, SEG: tl.constexpr,
        TS: tl.constexpr, CB: tl.constexpr, BK: tl.constexpr,
        PN: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr):
    y_n, y_c, y_0, y_1, y_2 = yn * YALIGN, yc, y0 * YALIGN, y1 * YALIGN, y2 * YALIGN
    x_n, x_c, x_0, x_1, x_2 = xn * XALIGN, xc, x0 * XALIGN, x1 * XALIGN, x2 if SEG else x2 * XALIGN
    BP: tl.constexpr = PN * B0 * B1 * B2
    TAPS: tl.constexpr = K0 * K1 * K2
    CHANNELS: tl.constexpr = CG * GP
    SEGMENTS: tl.constexpr = (K2 * CG + CB - 1) // CB  # SEG: runs of CB elements in one line of taps
    ROWS: tl.constexpr = KG * GP
    TAP_TILES: tl.constexpr = (1 if FLAT else (K0 * K1 * SEGMENTS + TS - 1) // TS if SEG else (TAPS + TS - 1) // TS)
    CHANNEL_TILES: tl.constexpr = ((TAPS * CHANNELS + TS * CB - 1) // (TS * CB) if FLAT
                                   else 1 if SEG else (CHANNELS + CB - 1) // CB)
    ROW_TILES: tl.constexpr = (ROWS + BK - 1) // BK

    pid = tl.program_id(0)
    channel_tile = pid % CHANNEL_TILES
    pid = pid // CHANNEL_TILES
    tap_tile = pid % TAP_TILES
    pid = pid // TAP_TILES
    row_tile = pid % ROW_TILES
    pid = pid // ROW_TILES
    split = pid % SPLITS
    super_group = pid // SPLITS

    k = row_tile * BK + tl.arange(0, BK)
    k_there = k < ROWS
    c = channel_tile * CB + tl.arange(0, CB)
    c_there = c < CHANNELS
    dy_base = dy + wide(super_group * ROWS, WIDE) * y_c
    x_base = x + wide(super_group * CHANNELS, WIDE) * x_c
    if FLAT:  # columns are (tap, channel) pairs counted through, so that few channels leave no gaps
        pair = channel_tile * (TS * CB) + tl.arange(0, TS * CB)
        tap = pair // CHANNELS
        pair_tap = tap
        pair_c = pair % CHANNELS
        pair_there = tap < TAPS
    elif SEG:  # columns are runs of CB neighbours in memory, (tap of the last axis, channel) counted through
        segment = tap_tile * TS + tl.arange(0, TS)
        tap = (segment // SEGMENTS) * K2  # first tap of the line
        inner = (segment % SEGMENTS)[:, None] * CB + tl.arange(0, CB)[None, :]
        pair_tap = tl.reshape(tap[:, None] + inner // CG, [TS * CB])
        pair_c = tl.reshape(inner % CG, [TS * CB])
        pair_there = (pair_tap < TAPS) & (tl.reshape(inner, [TS * CB]) < K2 * CG)
    else:
        tap = tap_tile * TS + tl.arange(0, TS)
        pair_tap = tl.reshape(tl.broadcast_to(tap[:, None], [TS, CB]), [TS * CB])
        pair_c = tl.reshape(tl.broadcast_to(c[None, :], [TS, CB]), [TS * CB])
        pair_there = (pair_tap < TAPS) & (pair_c < CHANNELS)
    shift0 = (tap // (K2 * K1)) * D0 - P0
    shift1 = ((tap // K2) % K1) * D1 - P1
    shift2 = (tap % K2) * D2 - P2
    one0 = (tap_tile // (K2 * K1)) * D0 - P0  # the same of the only tap of a tile with TS == 1
    one1 = ((tap_tile // K2) % K1) * D1 - P1
    one2 = (tap_tile % K2) * D2 - P2
    tap_move = wide(shift0, WIDE) * x_0 + wide(shift1, WIDE) * x_1 + wide(shift2, WIDE) * x_2

    if SWAP:
        acc = tl.zeros([TS * CB, BK], dtype=ACC)
    else:
        acc = tl.zeros([BK, TS * CB], dtype=ACC)
    total = acc  # float64: of whole blocks of terms
    DOUBLE: tl.constexpr = tl.float64 == ACC
    BLOCK: tl.constexpr = block_steps(BP)
    begin = split * run
    end = tl.minimum(begin + run, boxes)
    for box in range(begin, end):
        rest = box // boxes_2
        n, q0, q1, q2 = in_box((rest // (boxes_1 * boxes_0)) * PN, ((rest // boxes_1) % boxes_0) * B0,
                               (rest % boxes_1) * B1, (box % boxes_2) * B2, tl.arange(0, BP), B0, B1, B2)
        there = (n < N) & (q0 < Q0) & (q1 < Q1) & (q2 < Q2)
        dy_row = wide(n, WIDE) * y_n + wide(q0, WIDE) * y_0 + wide(q1, WIDE) * y_1 + wide(q2, WIDE) * y_2
        i0 = q0 * T0
        i1 = q1 * T1
        i2 = q2 * T2
        x_row = wide(n, WIDE) * x_n + wide(i0, WIDE) * x_0 + wide(i1, WIDE) * x_1 + wide(i2, WIDE) * x_2
        if TS == 1 and not FLAT and not SEG:
            there = there & inside(i0 + one0, X0) & inside(i1 + one1, X1) & inside(i2 + one2, X2)
            move = wide(one0, WIDE) * x_0 + wide(one1, WIDE) * x_1 + wide(one2, WIDE) * x_2
            b = tl.load(x_base + (x_row + move)[:, None] + (c * x_c)[None, :],
                        mask=there[:, None] & c_there[None, :], other=0.0)
        elif SEG:
            i0s = i0[:, None] + shift0[None, :]
            i1s = i1[:, None] + shift1[None, :]
            valid = there[:, None] & (tap < TAPS)[None, :] & inside(i0s, X0) & inside(i1s, X1)
            line = wide(n, WIDE)[:, None] * x_n + wide(i0s, WIDE) * x_0 + wide(i1s, WIDE) * x_1
            # a place in the line of X2*CG neighbours; a line that is not there starts far below zero
            place = (i2 - P2)[:, None] * CG + ((segment % SEGMENTS) * CB)[None, :]
            place = tl.where(valid, place, -(1 << 30))[:, :, None] + tl.arange(0, CB)[None, None, :]
            b3 = tl.load(x_base + line[:, :, None] + place, mask=place.to(tl.uint32) < tl.cast(X2 * CG, tl.uint32),
                         other=0.0)
            b = only(tl.reshape(b3, [BP, TS * CB]), pair_there[None, :])
        else:
            valid = (there[:, None] & (tap < TAPS)[None, :] & inside(i0[:, None] + shift0[None, :], X0)
                     & inside(i1[:, None] + shift1[None, :], X1) & inside(i2[:, None] + shift2[None, :], X2))
            if FLAT:
                b = tl.load(x_base + x_row[:, None] + (tap_move + pair_c * x_c)[None, :], mask=valid, other=0.0)
            else:
                b3 = tl.load(x_base + (x_row[:, None] + tap_move[None, :])[:, :, None] + (c * x_c)[None, None, :],
                             mask=valid[:, :, None] & c_there[None, None, :], other=0.0)
                b = only(tl.reshape(b3, [BP, TS * CB]), pair_there[None, :])
        a = tl.load(dy_base + dy_row[:, None] + (k * y_c)[None, :], mask=there[:, None] & k_there[None, :], other=0.0)
        a = as_operand(a, table, ROUND)
        b = as_operand(b, table, ROUND)
        if SWAP:
            acc = tl.dot(tl.trans(b), a, acc, input_precision=PRECISION, out_dtype=ACC)
        else:
            acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION, out_dtype=ACC)
        if DOUBLE:
            if (box - begin) % BLOCK == BLOCK - 1:
                total += acc
                acc = tl.zeros(acc.shape, dtype=ACC)
    if DOUBLE:
        acc += total

    # A zero that stands for padding times an infinite dy gives NaN: then sum again tap by tap with dy masked as well.
    # With one tap in the tile both operands are masked already; split precision leaves NaN where Inf meets a zero rest.
    if TS > 1 or SEG or FLAT or PRECISION == "tf32x3" or PRECISION == "bf16x3":
        if has_nan(acc):
            acc = acc * 0
            acc = tl.where(acc == acc, acc, 0)
            # By pixel: products of tiles would take registers from the loop above. (The interpreter has no registers.)
            STEPS: tl.constexpr = BP if BY_PIXEL else 1
            first_tap = tl.min(pair_tap, 0)
            last_tap = tl.minimum(tl.max(pair_tap, 0), TAPS - 1)
            for t in range(first_tap, last_tap + 1):
                one0 = (t // (K2 * K1)) * D0 - P0
                one1 = ((t // K2) % K1) * D1 - P1
                one2 = (t % K2) * D2 - P2
                mine = (pair_tap == t) & pair_there
                for step in tl.range(begin * STEPS, end * STEPS, num_stages=1):
                    box = step // STEPS
                    rest = box // boxes_2
                    pixel = step % STEPS if BY_PIXEL else tl.arange(0, BP)
                    n, q0, q1, q2 = in_box((rest // (boxes_1 * boxes_0)) * PN, ((rest // boxes_1) % boxes_0) * B0,
                                           (rest % boxes_1) * B1, (box % boxes_2) * B2, pixel, B0, B1, B2)
                    i0 = q0 * T0 + one0
                    i1 = q1 * T1 + one1
                    i2 = q2 * T2 + one2
                    there = ((n < N) & (q0 < Q0) & (q1 < Q1) & (q2 < Q2) & inside(i0, X0) & inside(i1, X1)
                             & inside(i2, X2))
                    dy_row = (wide(n, WIDE) * y_n + wide(q0, WIDE) * y_0 + wide(q1, WIDE) * y_1
                              + wide(q2, WIDE) * y_2)
                    x_row = (wide(n, WIDE) * x_n + wide(i0, WIDE) * x_0 + wide(i1, WIDE) * x_1
                             + wide(i2, WIDE) * x_2)
                    if BY_PIXEL:
                        a = tl.load(dy_base + dy_row + k * y_c, mask=there & k_there, other=0.0)
                        b = tl.load(x_base + x_row + pair_c * x_c, mask=there & mine, other=0.0)
                        a = as_operand(a, table, ROUND).to(ACC)
                        b = as_operand(b, table, ROUND).to(ACC)
                        product = b[:, None] * a[None, :] if SWAP else a[:, None] * b[None, :]
                    else:
                        a = tl.load(dy_base + dy_row[:, None] + (k * y_c)[None, :],
                                    mask=there[:, None] & k_there[None, :], other=0.0)
                        b = tl.load(x_base + x_row[:, None] + (pair_c * x_c)[None, :],
                                    mask=there[:, None] & mine[None, :], other=0.0)
                        a = as_operand(a, table, ROUND)
                        b = as_operand(b, table, ROUND)
                        if SWAP:
                            product = tl.dot(tl.trans(b), a, input_precision="ieee", out_dtype=ACC)
                        else:
                            product = tl.dot(tl.trans(a), b, input_precision="ieee", out_dtype=ACC)
                    acc += tl.where(mine[:, None] if SWAP else mine[None, :], product, 0)

    # columns are (tap, channel); a tile of several groups keeps the products within a group
    column_at = (wide(pair_tap // (K2 * K1), WIDE) * r_0 + wide((pair_tap // K2) % K1, WIDE) * r_1
                 + wide(pair_tap % K2, WIDE) * r_2 + wide(pair_c % CG, WIDE) * r_i)
    column_group = pair_c // CG
    row_at = wide(super_group * ROWS + k, WIDE) * r_o + wide(split, WIDE) * r_split
    if SWAP:
        where = column_at[:, None] + row_at[None, :]
        keep = pair_there[:, None] & k_there[None, :]
        if GP > 1:
            keep = keep & (column_group[:, None] == (k // KG)[None, :])
    else:
        where = row_at[:, None] + column_at[None, :]
        keep = k_there[:, None] & pair_there[None, :]
        if GP > 1:
            keep = keep & ((k // KG)[:, None] == column_group[None, :])
    tl.store(result + where, as_result(acc, result), mask=keep)


@triton.jit
def bias_kernel(dy, result, table, pixels, run, Q0, Q1, Q2, yn, yc, y0, y1, y2, r_split, r_k,
                K, YALIGN: tl.constexpr, WIDE: tl.constexpr, ROUND: tl.constexpr, ACC: tl.constexpr,
                BP: tl.constexpr, BK: tl.constexpr):
    """Sum of dy over its pixels, one run of pixels per program; never rounded before the sum."""
    y_n, y_c, y_0, y_1, y_2 = yn * YALIGN, yc, y0 * YALIGN, y1 * YALIGN, y2 * YALIGN
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    split = tl.program_id(1)
    begin = wide(split, WIDE) * run
    end = tl.minimum(begin + run, pixels)
    acc = tl.zeros([BP, BK], dtype=ACC)
    for start in range(begin, end, BP):
        pixel = start + tl.arange(0, BP)
        n, q0, q1, q2 = position(pixel, Q0, Q1, Q2)
        row = wide(n, WIDE) * y_n + wide(q0, WIDE) * y_0 + wide(q1, WIDE) * y_1 + wide(q2, WIDE) * y_2
        value = tl.load(dy + row[:, None] + (wide(k, WIDE) * y_c)[None, :],
                        mask=(pixel < end)[:, None] & (k < K)[None, :], other=0.0)
        acc += as_operand(value, table, ROUND).to(ACC)
    tl.store(result + split * r_split + k * r_k, as_result(tl.sum(acc, 0), result), mask=k < K)
