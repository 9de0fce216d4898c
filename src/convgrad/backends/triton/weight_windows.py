"""The weight gradient of few input channels by windows of x in registers; written in Gluon.

Rows of the sum are (tap, input channel) pairs, columns output channels, and it runs over pixels. dy is copied to shared
memory box by box; every thread loads its elements of x straight into the registers of the first operand, where they
need no alignment: windows of few channels are too narrow for the copy engine. `weight.py` has the same sums in plain
Triton.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

ROWS = gl.constexpr(64)  # of one product


@gluon.jit
def first_box(box, boxes):
    """Place (image, three axes) of a box."""
    boxes_0, boxes_1, boxes_2 = boxes
    rest = box // boxes_2
    return rest // (boxes_1 * boxes_0), (rest // boxes_1) % boxes_0, rest % boxes_1, box % boxes_2


@gluon.jit
def next_box(place, boxes):
    """The box after a box, without divisions."""
    image, box_0, box_1, box_2 = place
    boxes_0, boxes_1, boxes_2 = boxes
    box_2 += 1
    over = (box_2 == boxes_2).to(gl.int32)
    box_2 -= over * boxes_2
    box_1 += over
    over = (box_1 == boxes_1).to(gl.int32)
    box_1 -= over * boxes_1
    box_0 += over
    over = (box_0 == boxes_0).to(gl.int32)
    box_0 -= over * boxes_0
    return image + over, box_0, box_1, box_2


@gluon.jit
def window_rows(row, steps, GEOMETRY: gl.constexpr, CG: gl.constexpr):
    """Shifts of the rows' taps on three axes, and where they lie in x; rows that are not there repeat the last one."""
    K: gl.constexpr = GEOMETRY[0]
    D: gl.constexpr = GEOMETRY[2]
    P: gl.constexpr = GEOMETRY[3]
    _, x_0, x_1, x_2, x_c = steps
    LAST: gl.constexpr = K[0] * K[1] * K[2] * CG - 1
    row = gl.minimum(row, LAST)
    tap = row // CG
    shift_0 = (tap // (K[1] * K[2])) * D[0] - P[0]
    shift_1 = ((tap // K[2]) % K[1]) * D[1] - P[1]
    shift_2 = (tap % K[2]) * D[2] - P[2]
    return shift_0, shift_1, shift_2, shift_0 * x_0 + shift_1 * x_1 + shift_2 * x_2 + (row % CG) * x_c


@gluon.jit
def any_nan(value):
    return gl.max(gl.max((value != value).to(gl.int32), 1), 0)


@gluon.jit
def exact_sums(dy, x, row, column, zero, begin, end, boxes, extents, y_steps, x_steps, GEOMETRY: gl.constexpr,
               BOX: gl.constexpr, KG: gl.constexpr, CG: gl.constexpr, ONES: gl.constexpr):
    """The sums of a run again, pixel by pixel with a mask on every product: a zero may have met Inf or NaN."""
    T: gl.constexpr = GEOMETRY[1]
    BP: gl.constexpr = BOX[0] * BOX[1] * BOX[2] * BOX[3]
    N, Q0, Q1, Q2, X0, X1, X2 = extents
    y_n, y_0, y_1, y_2, y_c = y_steps
    x_n, x_0, x_1, x_2, _ = x_steps
    shift_0, shift_1, shift_2, row_at = window_rows(row, x_steps, GEOMETRY, CG)
    acc = zero
    for pixel in range(begin * BP, end * BP):
        image, box_0, box_1, box_2 = first_box(pixel // BP, boxes)
        index = pixel % BP
        n = image * BOX[0] + index // (BOX[1] * BOX[2] * BOX[3])
        q0 = box_0 * BOX[1] + (index // (BOX[2] * BOX[3])) % BOX[1]
        q1 = box_1 * BOX[2] + (index // BOX[3]) % BOX[2]
        q2 = box_2 * BOX[3] + index % BOX[3]
        i0 = q0 * T[0] + shift_0
        i1 = q1 * T[1] + shift_1
        i2 = q2 * T[2] + shift_2
        inside = (n < N) & (q0 < Q0) & (q1 < Q1) & (q2 < Q2)
        there = inside & (i0 >= 0) & (i0 < X0) & (i1 >= 0) & (i1 < X1) & (i2 >= 0) & (i2 < X2)
        at = (n.to(gl.int64) * x_n + (q0 * T[0]).to(gl.int64) * x_0 + (q1 * T[1]).to(gl.int64) * x_1
              + (q2 * T[2]).to(gl.int64) * x_2)
        a = gl.load(x + at + row_at, mask=there & (row != ONES), other=0.0).to(gl.float32)
        a = gl.where(row == ONES, 1.0, a)
        there = there | (inside & (row == ONES))
        at = n.to(gl.int64) * y_n + q0.to(gl.int64) * y_0 + q1.to(gl.int64) * y_1 + q2.to(gl.int64) * y_2
        b = gl.load(dy + at + column * y_c, mask=(column < KG) & inside, other=0.0).to(gl.float32)
        acc += gl.where(there[:, None], a[:, None] * b[None, :], 0.0)
    return acc


# NOTE: an axis with one box makes Triton 3.6 fail ("idx < size()") when it knows the 1 in advance
@gluon.jit(do_not_specialize=["boxes_0", "boxes_1", "boxes_2"])
def window_weight_kernel(
        dy_box, dy, x, result, bias,
        N, Q0, Q1, Q2, X0, X1, X2, boxes_0, boxes_1, boxes_2, box_count, run,
        y_n, y_0, y_1, y_2, y_c, x_n, r_split, r_k,
        x_0: gl.constexpr, x_1: gl.constexpr, x_2: gl.constexpr, x_c: gl.constexpr,  # so that they become fixed offsets
        K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        T0: gl.constexpr, T1: gl.constexpr, T2: gl.constexpr,
        D0: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr,
        P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
        KG: gl.constexpr, CG: gl.constexpr, GROUPS: gl.constexpr, WIDE: gl.constexpr,
        PN: gl.constexpr, B0: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr, BN: gl.constexpr,
        RT: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, BIAS: gl.constexpr):
    """RT x 64 rows x BN columns a program. Partial sums of a run go to result[run, output channel, row].

    BIAS: the first row behind the pairs is one of ones, whose sums are those of dy and go to bias[run, output channel].
    """
    GEOMETRY: gl.constexpr = ((K0, K1, K2), (T0, T1, T2), (D0, D1, D2), (P0, P1, P2))
    BOX: gl.constexpr = (PN, B0, B1, B2)
    BP: gl.constexpr = PN * B0 * B1 * B2
    PAIRS: gl.constexpr = K0 * K1 * K2 * CG
    ONES: gl.constexpr = PAIRS if BIAS else -1  # number of the row of ones, and which 64 rows of a tile have it
    ONES_AT: gl.constexpr = PAIRS % (ROWS * RT) // ROWS
    ROW_TILES: gl.constexpr = (PAIRS + ROWS * RT - 1) // (ROWS * RT)
    COLUMN_TILES: gl.constexpr = (KG + BN - 1) // BN
    dtype: gl.constexpr = dy.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)

    pid = gl.program_id(0)
    first_row = (pid % ROW_TILES) * (ROWS * RT)
    pid = pid // ROW_TILES
    first_column = (pid % COLUMN_TILES) * BN
    pid = pid // COLUMN_TILES
    group = pid % GROUPS
    split = pid // GROUPS
    first_channel = group * KG + first_column
    dy += group * KG * y_c
    x += group * CG * x_c
    result += (group * KG).to(gl.int64) * r_k
    begin = split * run
    end = gl.minimum(begin + run, box_count)
    boxes = (boxes_0, boxes_1, boxes_2)
    extents = (N, Q0, Q1, Q2, X0, X1, X2)
    x_steps = (x_n, x_0, x_1, x_2, x_c)

    slots = gl.allocate_shared_memory(dtype, [STAGES, PN, B0, B1, B2, BN], dy_box.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    gl.thread_barrier()
    ahead = first_box(begin, boxes)
    for i in gl.static_range(STAGES - 1):
        here = begin + i < end
        mbarrier.expect(full.index(i), BP * BN * 2, pred=here)
        tma.async_copy_global_to_shared(
            dy_box, [ahead[0] * PN, ahead[1] * B0, ahead[2] * B1, ahead[3] * B2, first_channel], full.index(i),
            slots.index(i), pred=here)
        ahead = next_box(ahead, boxes)

    # rows, and the pixels of a box
    row_0 = ()
    row_1 = ()
    row_2 = ()
    row_at = ()
    given = ()
    else_one = ()
    for t in gl.static_range(RT):
        row = first_row + t * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, operand))
        shift_0, shift_1, shift_2, at = window_rows(row, x_steps, GEOMETRY, CG)
        row_0 += (shift_0[:, None],)
        row_1 += (shift_1[:, None],)
        row_2 += (shift_2[:, None],)
        row_at += (at.to(gl.int64)[:, None],)
        given += ((row != ONES)[:, None],)
        else_one += (gl.where(row == ONES, 1.0, 0.0).to(dtype)[:, None],)
    index = gl.arange(0, BP, layout=gl.SliceLayout(0, operand))
    in_n = index // (B0 * B1 * B2)
    in_0 = (index // (B1 * B2)) % B0
    in_1 = (index // B2) % B1
    in_2 = index % B2
    # NOTE: 64-bit arithmetic lets the compiler move what is known of an offset into the load instruction
    pixel_at = (in_n.to(gl.int64) * x_n + in_0.to(gl.int64) * (T0 * x_0) + in_1.to(gl.int64) * (T1 * x_1)
                + in_2.to(gl.int64) * (T2 * x_2))

    sums = (gl.full([ROWS, BN], 0.0, gl.float32, layout),) * RT
    place = first_box(begin, boxes)
    slot = begin * 0
    phase = begin * 0
    free = begin * 0 + (STAGES - 1)
    for box in range(begin, end):
        gl.thread_barrier()  # all have used the slot that is filled now
        here = box + (STAGES - 1) < end
        mbarrier.expect(full.index(free), BP * BN * 2, pred=here)
        tma.async_copy_global_to_shared(
            dy_box, [ahead[0] * PN, ahead[1] * B0, ahead[2] * B1, ahead[3] * B2, first_channel], full.index(free),
            slots.index(free), pred=here)
        ahead = next_box(ahead, boxes)
        free = slot

        n = place[0] * PN
        q0 = place[1] * B0
        q1 = place[2] * B1
        q2 = place[3] * B2
        start = ((n.to(gl.int64) * x_n + (q0 * T0).to(gl.int64) * x_0 + (q1 * T1).to(gl.int64) * x_1
                  + (q2 * T2).to(gl.int64) * x_2) if WIDE else
                 n * x_n + (q0 * T0) * x_0 + (q1 * T1) * x_1 + (q2 * T2) * x_2)
        within = ((n + PN <= N) & (q0 + B0 <= Q0) & (q1 + B1 <= Q1) & (q2 + B2 <= Q2)
                  & (q0 * T0 >= P0) & (q1 * T1 >= P1) & (q2 * T2 >= P2)
                  & ((q0 + B0 - 1) * T0 + ((K0 - 1) * D0 - P0) < X0)
                  & ((q1 + B1 - 1) * T1 + ((K1 - 1) * D1 - P1) < X1)
                  & ((q2 + B2 - 1) * T2 + ((K2 - 1) * D2 - P2) < X2))
        # NOTE: only the loads are in branches: with the products in them too, sums of long runs were wrong on an H200
        windows = (gl.full([ROWS, BP], 0.0, dtype, operand),) * RT
        if within:
            loaded = ()
            for t in gl.static_range(RT):
                if BIAS and t == ONES_AT:
                    loaded += (gl.load((x + start + row_at[t]) + pixel_at[None, :], mask=given[t], other=else_one[t]),)
                else:
                    loaded += (gl.load((x + start + row_at[t]) + pixel_at[None, :]),)
            windows = loaded
        else:
            there = (n + in_n < N) & (q0 + in_0 < Q0) & (q1 + in_1 < Q1) & (q2 + in_2 < Q2)
            i0 = ((q0 + in_0) * T0)[None, :]
            i1 = ((q1 + in_1) * T1)[None, :]
            i2 = ((q2 + in_2) * T2)[None, :]
            masked = ()
            for t in gl.static_range(RT):
                valid = (there[None, :] & (i0 + row_0[t] >= 0) & (i0 + row_0[t] < X0) & (i1 + row_1[t] >= 0)
                         & (i1 + row_1[t] < X1) & (i2 + row_2[t] >= 0) & (i2 + row_2[t] < X2))
                if BIAS and t == ONES_AT:
                    masked += (gl.load((x + start + row_at[t]) + pixel_at[None, :], mask=valid & given[t],
                                       other=else_one[t]),)
                else:
                    masked += (gl.load((x + start + row_at[t]) + pixel_at[None, :], mask=valid, other=0.0),)
            windows = masked
        mbarrier.wait(full.index(slot), phase)
        pixels = slots.index(slot).reshape([BP, BN])
        more = ()
        for t in gl.static_range(RT):
            more += (warpgroup_mma(windows[t], pixels, sums[t]),)
        sums = more
        place = next_box(place, boxes)
        slot += 1
        over = (slot == STAGES).to(gl.int32)
        slot -= over * STAGES
        phase ^= over

    column = first_column + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    for t in gl.static_range(RT):
        acc = sums[t]
        row = first_row + t * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        if any_nan(acc):
            acc = exact_sums(dy, x, row, column, gl.full([ROWS, BN], 0.0, gl.float32, layout), begin, end, boxes,
                             extents, (y_n, y_0, y_1, y_2, y_c), x_steps, GEOMETRY, BOX, KG, CG, ONES)
        gl.store(result + split.to(gl.int64) * r_split + (column * r_k)[None, :] + row[:, None], acc,
                 mask=(row < PAIRS)[:, None] & (column < KG)[None, :])
        if BIAS and t == ONES_AT:
            at = bias + split.to(gl.int64) * (GROUPS * KG) + group * KG
            gl.store(at + column[None, :] + (row - ONES)[:, None], acc,
                     mask=(row == ONES)[:, None] & (column < KG)[None, :])
