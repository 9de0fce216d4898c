"""Implicit-GEMM kernel for the output and for the input gradient: every result position gathers its source positions.

Rows of a tile are positions, columns are channels, the sum runs over taps and channels. Per axis a result position j
reads the source at `j*step + slot*move + shift`; for the input gradient the results are split into phases (residues
modulo the stride), each dense, and a phase fixes its first tap, its number of slots and its shift. With PACK all phases
are columns of one tile instead, so that layers with few input channels still fill it.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102
import triton
import triton.language as tl

from .elements import as_operand, as_result, block_steps, has_nan, only, position, wide


@triton.jit
def phase_of_axis(phase, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr, KERNEL: tl.constexpr,
                  COMMON: tl.constexpr, INVERSE: tl.constexpr):
    """First tap, number of slots and source shift of one phase: taps k with k*dilation = phase + pad (mod stride).

    COMMON is gcd(stride, dilation), INVERSE the inverse of dilation/COMMON modulo stride/COMMON.
    """
    STEP: tl.constexpr = STRIDE // COMMON
    reach = phase + PAD
    first = ((reach // COMMON) * INVERSE) % STEP
    slots = (KERNEL - first + STEP - 1) // STEP
    slots = tl.where((reach % COMMON == 0) & (first < KERNEL), slots, 0)
    return first, slots, (reach - first * DILATION) // STRIDE


@triton.jit
def slot_of_axis(slot, phase, first, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
                 KERNEL: tl.constexpr, COMMON: tl.constexpr, LOWEST: tl.constexpr, INPUT: tl.constexpr,
                 PACK: tl.constexpr):
    """Tap of a slot and whether there is one (a packed column has no tap where its phase skips the slot)."""
    if PACK:
        reach = phase + PAD - (slot + LOWEST) * STRIDE
        tap = reach // DILATION
        there = (reach >= 0) & (tap * DILATION == reach) & (tap < KERNEL)
    else:
        tap = first + slot * (STRIDE // COMMON) if INPUT else slot
        there = tap < KERNEL
    return tap, there


@triton.jit
def inside(place, EXTENT):
    return (place >= 0) & (place < EXTENT)


@triton.jit
def result_rows(n, j0, j1, j2, c0, c1, c2, N, R0, R1, R2, r_n, r_0, r_1, r_2, T0: tl.constexpr, T1: tl.constexpr,
                T2: tl.constexpr, INPUT: tl.constexpr, PACK: tl.constexpr, WIDE: tl.constexpr):
    """Offset and presence of result rows; results of one phase (c0, c1, c2) lie a stride apart."""
    i0 = j0 * T0 if INPUT else j0
    i1 = j1 * T1 if INPUT else j1
    i2 = j2 * T2 if INPUT else j2
    if PACK:
        there = ((n < N)[:, None] & (i0[:, None] + c0[None, :] < R0) & (i1[:, None] + c1[None, :] < R1)
                 & (i2[:, None] + c2[None, :] < R2))
    else:
        i0 += c0
        i1 += c1
        i2 += c2
        there = ((n < N) & (i0 < R0) & (i1 < R1) & (i2 < R2))[:, None]
    where = wide(n, WIDE) * r_n + wide(i0, WIDE) * r_0 + wide(i1, WIDE) * r_1 + wide(i2, WIDE) * r_2
    return where[:, None], there


@triton.jit
def exact_rows(source, weight, result, table, n, j0, j1, j2, group, column_there, c0, c1, c2, first0, first1, first2,
               slots0, slots1, slots2, shift0, shift1, shift2, N, S0, S1, S2, R0, R1, R2, s_n, s_c, s_0, s_1, s_2,
               w_sum, w_0, w_1, w_2, r_n, r_0, r_1, r_2,
               K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr,
               T2: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, P0: tl.constexpr,
               P1: tl.constexpr, P2: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr,
               L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr, MOVE0: tl.constexpr, MOVE1: tl.constexpr,
               MOVE2: tl.constexpr, RED: tl.constexpr, INPUT: tl.constexpr, PACK: tl.constexpr, WIDE: tl.constexpr,
               ROUND: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum a few rows term by term, with a mask on every product, and write them.

    `weight` and `result` are pointers per column; the columns belong to `group` of the tile's groups.
    """
    a0 = (j0 if INPUT else j0 * T0) + shift0
    a1 = (j1 if INPUT else j1 * T1) + shift1
    a2 = (j2 if INPUT else j2 * T2) + shift2
    row = wide(n, WIDE) * s_n + wide(a0, WIDE) * s_0 + wide(a1, WIDE) * s_1 + wide(a2, WIDE) * s_2
    acc = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    for step in range(0, slots0 * slots1 * slots2 * RED):
        at = step % RED
        slot = step // RED
        m2 = slot % slots2
        m1 = (slot // slots2) % slots1
        m0 = slot // (slots2 * slots1)
        valid = ((n < N) & inside(a0 + m0 * MOVE0, S0) & inside(a1 + m1 * MOVE1, S1) & inside(a2 + m2 * MOVE2, S2))
        tap0, there0 = slot_of_axis(m0, c0, first0, T0, D0, P0, K0, G0, L0, INPUT, PACK)
        tap1, there1 = slot_of_axis(m1, c1, first1, T1, D1, P1, K1, G1, L1, INPUT, PACK)
        tap2, there2 = slot_of_axis(m2, c2, first2, T2, D2, P2, K2, G2, L2, INPUT, PACK)
        there = column_there & there0 & there1 & there2
        both = valid[:, None] & there[None, :]
        move = wide(m0 * MOVE0, WIDE) * s_0 + wide(m1 * MOVE1, WIDE) * s_1 + wide(m2 * MOVE2, WIDE) * s_2
        a = tl.load(source + (row + move)[:, None] + ((group * RED + at) * s_c)[None, :], mask=both, other=0.0)
        c = group * RED + at if INPUT else group * 0 + at
        b = tl.load(weight + tap0 * w_0 + tap1 * w_1 + tap2 * w_2 + wide(c, WIDE) * w_sum, mask=there, other=0.0)
        product = as_operand(a, table, ROUND).to(ACC) * as_operand(b, table, ROUND).to(ACC)[None, :]
        acc += tl.where(both, product, 0)
    where, there = result_rows(n, j0, j1, j2, c0, c1, c2, N, R0, R1, R2, r_n, r_0, r_1, r_2, T0, T1, T2, INPUT, PACK,
                               WIDE)
    tl.store(result[None, :] + where, as_result(acc, result), mask=there & column_there[None, :])


FEW = tl.constexpr(16)  # rows at a time of a tile that is summed again


@triton.jit
def gather_kernel(
        source, weight, result, table,
        N, S0, S1, S2, R0, R1, R2, J0, J1, J2, row_tiles,
        sn, sc, s0, s1, s2, wo, wi, w0, w1, w2, rn, rc, r0, r1, r2,
        SALIGN: tl.constexpr, WALIGN: tl.constexpr, RALIGN: tl.constexpr,
        K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
        T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,  # stride
        D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,  # dilation
        P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,  # low pad
        G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr,  # gcd(stride, dilation)
        V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,  # inverse, see phase_of_axis
        L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr,  # PACK: lowest source shift
        U0: tl.constexpr, U1: tl.constexpr, U2: tl.constexpr,  # slots per axis where they do not depend on the phase
        RED: tl.constexpr, COL: tl.constexpr, GP: tl.constexpr,  # channels of a group summed and written; groups a tile
        INPUT: tl.constexpr, PACK: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, ROUND: tl.constexpr,
        PRECISION: tl.constexpr, ACC: tl.constexpr,
        TS: tl.constexpr, CB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    s_n, s_c, s_0, s_1, s_2 = sn * SALIGN, sc, s0 * SALIGN, s1 * SALIGN, s2 * SALIGN
    w_o, w_i, w_0, w_1, w_2 = wo * WALIGN, wi, w0 * WALIGN, w1 * WALIGN, w2 * WALIGN
    r_n, r_c, r_0, r_1, r_2 = rn * RALIGN, rc, r0 * RALIGN, r1 * RALIGN, r2 * RALIGN
    PHASES: tl.constexpr = T0 * T1 * T2
    COLUMNS: tl.constexpr = COL * GP * PHASES if PACK else COL * GP
    COLUMN_TILES: tl.constexpr = (COLUMNS + BN - 1) // BN
    SUM: tl.constexpr = RED * GP
    SUM_TILES: tl.constexpr = (SUM + CB - 1) // CB

    # which tile: column tiles next to each other, so that they find the same source in the cache
    pid = tl.program_id(0)
    column_tile = pid % COLUMN_TILES
    pid = pid // COLUMN_TILES
    row_tile = pid % row_tiles
    pid = pid // row_tiles
    if INPUT and not PACK:
        phase = pid % PHASES
        super_group = pid // PHASES
        ph2 = phase % T2
        ph1 = (phase // T2) % T1
        ph0 = phase // (T2 * T1)
        first0, slots0, shift0 = phase_of_axis(ph0, T0, D0, P0, K0, G0, V0)
        first1, slots1, shift1 = phase_of_axis(ph1, T1, D1, P1, K1, G1, V1)
        first2, slots2, shift2 = phase_of_axis(ph2, T2, D2, P2, K2, G2, V2)
        MOVE0: tl.constexpr = -(D0 // G0)
        MOVE1: tl.constexpr = -(D1 // G1)
        MOVE2: tl.constexpr = -(D2 // G2)
    else:
        super_group = pid
        ph0, ph1, ph2, first0, first1, first2 = 0, 0, 0, 0, 0, 0
        slots0, slots1, slots2 = U0, U1, U2
        shift0 = L0 if PACK else -P0
        shift1 = L1 if PACK else -P1
        shift2 = L2 if PACK else -P2
        MOVE0: tl.constexpr = 1 if PACK else D0
        MOVE1: tl.constexpr = 1 if PACK else D1
        MOVE2: tl.constexpr = 1 if PACK else D2

    # rows: result positions and the source position of their slot 0
    row = row_tile.to(tl.int64) * BM + tl.arange(0, BM) if WIDE else row_tile * BM + tl.arange(0, BM)
    n, j0, j1, j2 = position(row, J0, J1, J2)
    row_there = n < N
    a0 = (j0 if INPUT else j0 * T0) + shift0
    a1 = (j1 if INPUT else j1 * T1) + shift1
    a2 = (j2 if INPUT else j2 * T2) + shift2
    source_row = wide(n, WIDE) * s_n + wide(a0, WIDE) * s_0 + wide(a1, WIDE) * s_1 + wide(a2, WIDE) * s_2
    source_base = source + wide(super_group * SUM, WIDE) * s_c

    # columns: result channel (and phase when packed), and where its weights lie
    column = column_tile * BN + tl.arange(0, BN)
    column_there = column < COLUMNS
    if PACK:
        channel = column % (COL * GP)
        column_phase = column // (COL * GP)
        c2 = column_phase % T2
        c1 = (column_phase // T2) % T1
        c0 = column_phase // (T2 * T1)
    else:
        channel = column
        c0, c1, c2 = ph0, ph1, ph2
    global_channel = super_group * (COL * GP) + channel
    if INPUT:  # columns are input channels: the I axis of the weight; the sum runs over O
        weight_column = (channel % COL if GP > 1 else channel) * w_i
        w_sum = w_o
        weight_base = weight + wide(super_group * SUM, WIDE) * w_o
    else:
        weight_column = global_channel * w_o
        w_sum = w_i
        weight_base = weight
    weight_column = wide(weight_column, WIDE)

    acc = tl.zeros([BM, BN], dtype=ACC)
    total = acc  # float64: of whole blocks of terms
    DOUBLE: tl.constexpr = tl.float64 == ACC
    BLOCK: tl.constexpr = block_steps(TS * CB)
    slots = slots0 * slots1 * slots2
    steps = tl.cdiv(slots * SUM, TS * CB) if FLAT else tl.cdiv(slots, TS) * SUM_TILES
    for step in range(0, steps):
        sum_tile = step % SUM_TILES
        c = sum_tile * CB + tl.arange(0, CB)
        c_there = c < SUM
        if TS == 1 and not FLAT:
            slot = step // SUM_TILES
            m2 = slot % slots2
            m1 = (slot // slots2) % slots1
            m0 = slot // (slots2 * slots1)
            valid = (row_there & inside(a0 + m0 * MOVE0, S0) & inside(a1 + m1 * MOVE1, S1)
                     & inside(a2 + m2 * MOVE2, S2))
            move = wide(m0 * MOVE0, WIDE) * s_0 + wide(m1 * MOVE1, WIDE) * s_1 + wide(m2 * MOVE2, WIDE) * s_2
            a = tl.load(source_base + (source_row + move)[:, None] + (c * s_c)[None, :],
                        mask=valid[:, None] & c_there[None, :], other=0.0)
            tap0, there0 = slot_of_axis(m0, c0, first0, T0, D0, P0, K0, G0, L0, INPUT, PACK)
            tap1, there1 = slot_of_axis(m1, c1, first1, T1, D1, P1, K1, G1, L1, INPUT, PACK)
            tap2, there2 = slot_of_axis(m2, c2, first2, T2, D2, P2, K2, G2, L2, INPUT, PACK)
            b_column = weight_column + tap0 * w_0 + tap1 * w_1 + tap2 * w_2
            b_there = c_there[:, None] & (column_there & there0 & there1 & there2)[None, :]
            if GP > 1:
                b_there = b_there & ((c // RED)[:, None] == (channel // COL)[None, :])
            c_weight = c if INPUT or GP == 1 else c % RED
            b = tl.load(weight_base + b_column[None, :] + (wide(c_weight, WIDE) * w_sum)[:, None],
                        mask=b_there, other=0.0)
        else:
            if FLAT:  # pairs (slot, channel) counted through, so that few channels leave no gaps
                pair = step * (TS * CB) + tl.arange(0, TS * CB)
                slot = pair // SUM
                cf = pair % SUM
                pair_there = slot < slots
            else:
                slot = (step // SUM_TILES) * TS + tl.arange(0, TS)
                cf = tl.reshape(tl.broadcast_to(c[None, :], [TS, CB]), [TS * CB])
                pair_there = tl.reshape((slot < slots)[:, None] & c_there[None, :], [TS * CB])
            m2 = slot % slots2
            m1 = (slot // slots2) % slots1
            m0 = slot // (slots2 * slots1)
            valid = (row_there[:, None] & (slot < slots)[None, :]
                     & inside(a0[:, None] + (m0 * MOVE0)[None, :], S0)
                     & inside(a1[:, None] + (m1 * MOVE1)[None, :], S1)
                     & inside(a2[:, None] + (m2 * MOVE2)[None, :], S2))
            move = wide(m0 * MOVE0, WIDE) * s_0 + wide(m1 * MOVE1, WIDE) * s_1 + wide(m2 * MOVE2, WIDE) * s_2
            if FLAT:
                a = tl.load(source_base + source_row[:, None] + (move + cf * s_c)[None, :], mask=valid, other=0.0)
                m0f, m1f, m2f = m0, m1, m2
            else:
                a3 = tl.load(source_base + (source_row[:, None] + move[None, :])[:, :, None] + (c * s_c)[None, None, :],
                             mask=valid[:, :, None] & c_there[None, None, :], other=0.0)
                a = only(tl.reshape(a3, [BM, TS * CB]), pair_there[None, :])
                m0f = tl.reshape(tl.broadcast_to(m0[:, None], [TS, CB]), [TS * CB])
                m1f = tl.reshape(tl.broadcast_to(m1[:, None], [TS, CB]), [TS * CB])
                m2f = tl.reshape(tl.broadcast_to(m2[:, None], [TS, CB]), [TS * CB])
            # weights of the same (slot, channel) pairs
            if PACK:
                tap0, there0 = slot_of_axis(m0f[:, None], c0[None, :], first0, T0, D0, P0, K0, G0, L0, INPUT, PACK)
                tap1, there1 = slot_of_axis(m1f[:, None], c1[None, :], first1, T1, D1, P1, K1, G1, L1, INPUT, PACK)
                tap2, there2 = slot_of_axis(m2f[:, None], c2[None, :], first2, T2, D2, P2, K2, G2, L2, INPUT, PACK)
            else:
                tap0, there0 = slot_of_axis(m0f[:, None], c0, first0, T0, D0, P0, K0, G0, L0, INPUT, PACK)
                tap1, there1 = slot_of_axis(m1f[:, None], c1, first1, T1, D1, P1, K1, G1, L1, INPUT, PACK)
                tap2, there2 = slot_of_axis(m2f[:, None], c2, first2, T2, D2, P2, K2, G2, L2, INPUT, PACK)
            b_there = pair_there[:, None] & column_there[None, :] & there0 & there1 & there2
            if GP > 1:
                b_there = b_there & ((cf // RED)[:, None] == (channel // COL)[None, :])
            c_weight = cf if INPUT or GP == 1 else cf % RED
            b = tl.load(weight_base + weight_column[None, :] + (wide(c_weight, WIDE) * w_sum)[:, None]
                        + tap0 * w_0 + tap1 * w_1 + tap2 * w_2, mask=b_there, other=0.0)
        acc = tl.dot(as_operand(a, table, ROUND), as_operand(b, table, ROUND), acc, input_precision=PRECISION,
                     out_dtype=ACC)
        if DOUBLE:
            if step % BLOCK == BLOCK - 1:
                total += acc
                acc = tl.zeros([BM, BN], dtype=ACC)
    if DOUBLE:
        acc += total

    # Zeros stand for padding, for taps a phase does not have and for other groups; times Inf or NaN they give NaN, and
    # a NaN stays in its sum. So a tile without NaN is right, and one with NaN is summed again term by term under masks,
    # a few rows at a time to spare registers.
    if PACK:
        result_column = wide(global_channel, WIDE) * r_c + c0 * r_0 + c1 * r_1 + c2 * r_2
    else:
        result_column = wide(global_channel, WIDE) * r_c
    if has_nan(acc) == 0:
        where, there = result_rows(n, j0, j1, j2, c0, c1, c2, N, R0, R1, R2, r_n, r_0, r_1, r_2, T0, T1, T2, INPUT,
                                   PACK, WIDE)
        tl.store(result + where + result_column[None, :], as_result(acc, result),
                 mask=there & column_there[None, :])
    else:
        for chunk in range(0, BM // FEW):
            few = row_tile * BM + chunk * FEW + tl.arange(0, FEW)
            if WIDE:
                few = row_tile.to(tl.int64) * BM + chunk * FEW + tl.arange(0, FEW)
            few_n, few_0, few_1, few_2 = position(few, J0, J1, J2)
            exact_rows(source_base, weight_base + weight_column, result + result_column, table, few_n, few_0, few_1,
                       few_2, channel // COL, column_there, c0, c1, c2, first0, first1, first2, slots0, slots1, slots2,
                       shift0, shift1, shift2, N, S0, S1, S2, R0, R1, R2, s_n, s_c, s_0, s_1, s_2, w_sum, w_0, w_1, w_2,
                       r_n, r_0, r_1, r_2, K0, K1, K2, T0, T1, T2, D0, D1, D2, P0, P1, P2, G0, G1, G2, L0, L1, L2,
                       MOVE0, MOVE1, MOVE2, RED, INPUT, PACK, WIDE, ROUND, ACC, FEW, BN)
