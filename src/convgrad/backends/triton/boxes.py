"""Dense kernels on tensor-memory-access boxes: a tile is a box of positions, and padding is the copy's zero fill.

The same sums as gather.py for 16-bit operands whose channels are neighbours in memory and aligned to 16
bytes; addresses and bounds are the copy engine's work, which leaves the tensor cores fed. A box has PN x B0 x B1 x B2
positions.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from .elements import has_nan, in_box, wide
from .gather import FEW, exact_rows, phase_of_axis, result_rows


@triton.jit
def box_gather_kernel(
        source_box, weight_box, source, weight, result,
        N, S0, S1, S2, R0, R1, R2, boxes_n, boxes_0, boxes_1, boxes_2,
        s_n, s_c, s_0, s_1, s_2, w_o, w_i, w_0, w_1, w_2, rn, rc, r0, r1, r2,
        RALIGN: tl.constexpr,
        K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
        T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
        D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
        P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
        G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr,
        V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
        RED: tl.constexpr, COL: tl.constexpr, CHANNELS: tl.constexpr, INPUT: tl.constexpr, PATCH: tl.constexpr,
        WIDE: tl.constexpr, PN: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, BN: tl.constexpr,
        CB: tl.constexpr):
    """The output, or the input gradient by phases.

    For the output at a stride, the box has extent 1 on strided axes but the last, and source_box shows the last axis
    with `stride` neighbours folded into its channels.
    PATCH: windows that do not overlap; columns are all (tap, channel) pairs, and every position is read once.
    """
    r_n, r_c, r_0, r_1, r_2 = rn * RALIGN, rc, r0 * RALIGN, r1 * RALIGN, r2 * RALIGN
    BM: tl.constexpr = PN * B0 * B1 * B2
    COLUMNS: tl.constexpr = COL * K0 * K1 * K2 if PATCH else COL
    COLUMN_TILES: tl.constexpr = (COLUMNS + BN - 1) // BN
    SUM_TILES: tl.constexpr = (RED + CB - 1) // CB
    PHASES: tl.constexpr = T0 * T1 * T2 if INPUT and not PATCH else 1
    tile = tl.program_id(0)
    # which tile: column tiles next to each other, so that they find the same source in the cache
    column_tile = tile % COLUMN_TILES
    rest = tile // COLUMN_TILES
    start_2 = (rest % boxes_2) * B2
    rest = rest // boxes_2
    start_1 = (rest % boxes_1) * B1
    rest = rest // boxes_1
    start_0 = (rest % boxes_0) * B0
    rest = rest // boxes_0
    start_n = (rest % boxes_n) * PN
    rest = rest // boxes_n
    phase = rest % PHASES
    group = rest // PHASES
    if PATCH:
        ph0, ph1, ph2, first0, first1, first2, shift0, shift1, shift2 = 0, 0, 0, 0, 0, 0, 0, 0, 0
        slots0, slots1, slots2 = 1, 1, 1
        MOVE0: tl.constexpr = 1
        MOVE1: tl.constexpr = 1
        MOVE2: tl.constexpr = 1
    elif INPUT:
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
        ph0, ph1, ph2, first0, first1, first2 = 0, 0, 0, 0, 0, 0
        slots0, slots1, slots2 = K0, K1, K2
        shift0, shift1, shift2 = -P0, -P1, -P2
        MOVE0: tl.constexpr = D0
        MOVE1: tl.constexpr = D1
        MOVE2: tl.constexpr = D2
    slots = slots0 * slots1 * slots2
    # NOTE: channels are the rows of the product and positions its columns. The other way round gave wrong sums on an
    # H200 (tiles of 256 channels). The code Triton 3.6 made then took the reshaped box through registers and loaded the
    # next one with products in flight, the suspected cause. A second operand always stays in shared memory.
    acc = tl.zeros([BN, BM], dtype=tl.float32)
    row = group * (RED if INPUT else COL)
    for step in range(0, slots * SUM_TILES):
        c = (step % SUM_TILES) * CB
        slot = step // SUM_TILES
        m2 = slot % slots2
        m1 = (slot // slots2) % slots1
        m0 = slot // (slots2 * slots1)
        if INPUT:
            a = source_box.load([start_n, start_0 + shift0 + m0 * MOVE0, start_1 + shift1 + m1 * MOVE1,
                                 start_2 + shift2 + m2 * MOVE2, group * RED + c])
        else:
            reach = m2 * D2 - P2
            fold = ((reach % T2) + T2) % T2
            a = source_box.load([start_n, start_0 * T0 + m0 * D0 - P0, start_1 * T1 + m1 * D1 - P1,
                                 start_2 + (reach - fold) // T2, fold * CHANNELS + group * RED + c])
        a = tl.reshape(a, [BM, CB])
        if INPUT:
            tap = ((first0 + m0 * (T0 // G0)) * K1 + first1 + m1 * (T1 // G1)) * K2 + first2 + m2 * (T2 // G2)
            b = weight_box.load([row + c, tap * COL + column_tile * BN])
            acc = tl.dot(tl.trans(b), tl.trans(a), acc)
        else:
            b = weight_box.load([row + column_tile * BN, slot * RED + c])
            acc = tl.dot(b, tl.trans(a), acc)

    column = column_tile * BN + tl.arange(0, BN)
    column_there = column < COLUMNS
    if PATCH:
        channel = column % COL
        ph0 = column // (COL * K2 * K1)
        ph1 = (column // (COL * K2)) % K1
        ph2 = (column // COL) % K2
        result_column = wide(channel, WIDE) * r_c + ph0 * r_0 + ph1 * r_1 + ph2 * r_2
    else:
        channel = column
        result_column = wide(group * COL + channel, WIDE) * r_c
    if has_nan(acc) == 0:
        n, j0, j1, j2 = in_box(start_n, start_0, start_1, start_2, tl.arange(0, BM), B0, B1, B2)
        where, there = result_rows(n, j0, j1, j2, ph0, ph1, ph2, N, R0, R1, R2, r_n, r_0, r_1, r_2, T0, T1, T2, INPUT,
                                   PATCH, WIDE)
        tl.store(result + tl.trans(where) + result_column[:, None], acc.to(result.dtype.element_ty),
                 mask=tl.trans(there) & column_there[:, None])
    else:  # a zero of the padding may have met Inf: see gather.py
        for chunk in range(0, BM // FEW):
            few_n, few_0, few_1, few_2 = in_box(start_n, start_0, start_1, start_2, chunk * FEW + tl.arange(0, FEW),
                                                B0, B1, B2)
            if INPUT:
                weight_column = weight + wide(group * RED, WIDE) * w_o + channel * w_i
            else:
                weight_column = weight + wide(group * COL + channel, WIDE) * w_o
            exact_rows(source + wide(group * RED, WIDE) * s_c, weight_column, result + result_column, source, few_n,
                       few_0, few_1, few_2, channel * 0, column_there, ph0, ph1, ph2, first0, first1, first2, slots0,
                       slots1, slots2, shift0, shift1, shift2, N, S0, S1, S2, R0, R1, R2, s_n, s_c, s_0, s_1, s_2,
                       w_o if INPUT else w_i, w_0, w_1, w_2, r_n, r_0, r_1, r_2, K0, K1, K2, T0, T1, T2, D0, D1, D2,
                       P0, P1, P2, G0, G1, G2, 0, 0, 0, MOVE0, MOVE1, MOVE2, RED, INPUT, PATCH, WIDE, "", tl.float32,
                       FEW, BN)
