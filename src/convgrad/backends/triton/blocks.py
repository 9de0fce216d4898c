"""Gradients of small groups on the tensor cores, in Gluon: blocks of 16 channels, each by one warp.

A block holds 16 // CG groups of CG channels; products between different groups of a block are zeros of the weights, or
are left out of the weight gradient. The rows of a product are 16 images at the same position, so that a tap is another
column or row in shared memory and a column is copied there once: the copy engine brings a column of 16 images x 64
channels at a time, zeros outside the image. The last K1 rows stay in shared memory; a step takes the next one.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# ruff: noqa: RUF005
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .bands import next_slot


@triton.constexpr_function
def right_layout():
    """How threads hold 4 blocks of 16 x 16 weights: as right operands."""
    return gl.DistributedLinearLayout([[0, 1, 0], [0, 8, 0], [0, 0, 8]],
                                      [[0, 2, 0], [0, 4, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
                                      [[1, 0, 0], [2, 0, 0]], [], [4, 16, 16])


@gluon.jit
def block_weights(weight, c_tile, w_steps, K1: gl.constexpr, K2: gl.constexpr, CG: gl.constexpr, MMA: gl.constexpr):
    """For every tap the weights of 4 blocks as right operands, zeros between different groups."""
    w_o, w_i, w_1, w_2 = w_steps
    LAYOUT: gl.constexpr = right_layout()
    block = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    out = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    inner = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    at = weight + (c_tile + block * 16 + out).to(gl.int64) * w_o + (inner % CG) * w_i
    matrices = ()
    for tap in gl.static_range(K1 * K2):
        values = gl.load(at + (tap // K2) * w_1 + (tap % K2) * w_2, mask=out // CG == inner // CG, other=0.0)
        matrices = matrices + (gl.convert_layout(values, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True),)
    return matrices


@gluon.jit
def place_of(at, steps, column_tiles, N, all_steps, WT: gl.constexpr):
    """First image, first column and step of a tile; images outside the tensor for steps that do not exist."""
    tile = at // steps
    there = (at >= 0) & (at < all_steps)
    return gl.where(there, (tile // column_tiles) * 16, N), (tile % column_tiles) * WT, at - tile * steps


@gluon.jit
def slot_before(slot, age: gl.constexpr, SLOTS: gl.constexpr):
    """The slot of the row that came `age` steps before the one in `slot`."""
    return gl.where(slot >= age, slot - age, slot - age + SLOTS)


@gluon.jit
def block_of(slots, place):
    """A column: block x image x channel."""
    return slots.index(place).reshape([16, 4, 16]).permute([1, 0, 2])


@gluon.jit
def copy_columns(box, slots, slot, barrier, row, column, a, c_tile, COLUMNS: gl.constexpr):
    for col in gl.static_range(COLUMNS):
        tma.async_copy_global_to_shared(box, [row, column + col, a, c_tile], barrier, slots.index(slot * COLUMNS + col))


@gluon.jit
def copy_grads(dy_box, slots, barriers, walk, c_tile, N, LOW: gl.constexpr, K1: gl.constexpr, WT: gl.constexpr,
               COLUMNS: gl.constexpr, SLOTS: gl.constexpr):
    """The copying warp of the input gradient: the rows of dy of a run, and the K1 - 1 before."""
    full, empty = barriers
    begin, end, steps, column_tiles, all_steps = walk
    slot = begin * 0
    round = begin * 0
    for i in range(0, end - begin + (K1 - 1)):
        a, column, step = place_of(begin + i - (K1 - 1), steps, column_tiles, N, all_steps, WT)
        mbarrier.wait(empty.index(slot), round ^ 1)
        mbarrier.expect(full.index(slot), COLUMNS * 2048)
        copy_columns(dy_box, slots, slot, full.index(slot), step, column + LOW, a, c_tile, COLUMNS)
        slot, round = next_slot(slot, round, SLOTS)


@gluon.jit
def masked_rows(dy, weight, dx, c_tile, walk, extents, y_steps, r_steps, w_steps, K1: gl.constexpr, K2: gl.constexpr,
                P1: gl.constexpr, P2: gl.constexpr, CG: gl.constexpr, WT: gl.constexpr, WARPS: gl.constexpr):
    """A run again with a mask on every product: a zero may have met an infinite operand."""
    begin, end, steps, column_tiles, all_steps = walk
    N, Q1, Q2, X1, X2 = extents
    y_n, y_1, y_2 = y_steps
    r_n, r_1, r_2 = r_steps
    w_o, w_i, w_1, w_2 = w_steps
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    c = (c_tile + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT)))[None, :]
    image = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    for at in range(begin, end):
        a, column, step = place_of(at, steps, column_tiles, N, all_steps, WT)
        n = a + image
        i_1 = step - P1
        for e in range(0, WT):
            i_2 = column + e
            there = (n < N) & (i_1 >= 0) & (i_1 < X1) & (i_2 < X2) & (c >= 0)
            again = gl.full([16, 64], 0.0, gl.float32, LAYOUT)
            for term in range(0, K1 * K2 * CG):
                tap = term // CG
                k = (c // CG) * CG + term % CG
                o_1 = i_1 + P1 - tap // K2
                o_2 = i_2 + P2 - tap % K2
                ok = there & (o_1 >= 0) & (o_1 < Q1) & (o_2 >= 0) & (o_2 < Q2)
                from_y = n.to(gl.int64) * y_n + o_1.to(gl.int64) * y_1 + o_2.to(gl.int64) * y_2 + k
                value = gl.load(dy + from_y, mask=ok, other=0.0).to(gl.float32)
                factor = gl.load(weight + k.to(gl.int64) * w_o + (c % CG) * w_i + (tap // K2) * w_1 + (tap % K2) * w_2)
                again += gl.where(ok, value * factor.to(gl.float32), 0.0)
            to_x = n.to(gl.int64) * r_n + i_1.to(gl.int64) * r_1 + i_2.to(gl.int64) * r_2 + c
            gl.store(dx + to_x, again.to(dx.dtype.element_ty), mask=there)


@gluon.jit
def add_rows(slots, out_slots, barriers, walk, pointers, extents, y_steps, r_steps, w_steps, c_tile,
             K1: gl.constexpr, K2: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, CG: gl.constexpr,
             WT: gl.constexpr, COLUMNS: gl.constexpr, SLOTS: gl.constexpr):
    """The multiplying warps of the input gradient: a row of dx a step."""
    full, empty = barriers
    begin, end, steps, column_tiles, all_steps = walk
    dy, weight, dx = pointers
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    N, _, _, X1, X2 = extents
    r_n, r_1, r_2 = r_steps
    image = gl.arange(0, 16, layout=gl.SliceLayout(1, STORE))[:, None]
    offset = image.to(gl.int64) * r_n + gl.arange(0, 64, layout=gl.SliceLayout(0, STORE))[None, :]
    taps = block_weights(weight, c_tile, w_steps, K1, K2, CG, MMA)
    slot = begin * 0
    round = begin * 0
    for _ in gl.static_range(K1 - 1):  # rows that the first one needs
        mbarrier.wait(full.index(slot), round)
        slot, round = next_slot(slot, round, SLOTS)
    suspect = gl.full([4, 16, 16], 0.0, gl.float32, MMA)
    out_slot = begin * 0
    for at in range(begin, end):
        a, column, step = place_of(at, steps, column_tiles, extents[0], all_steps, WT)
        mbarrier.wait(full.index(slot), round)
        window = ()  # the last K2 columns of K1 rows
        for col in gl.static_range(COLUMNS):
            for k1 in gl.static_range(K1):
                window = window + (block_of(slots, slot_before(slot, k1, SLOTS) * COLUMNS + col).load(
                    gl.DotOperandLayout(0, MMA, 2)),)
            if col >= K2 - 1:
                acc = gl.full([4, 16, 16], 0.0, gl.float32, MMA)
                for k1 in gl.static_range(K1):  # a sum for every row: products of one sum wait for each other
                    line = gl.full([4, 16, 16], 0.0, gl.float32, MMA)
                    for k2 in gl.static_range(K2):
                        line = mma_v2(window[(K2 - 1 - k2) * K1 + k1], taps[k1 * K2 + k2], line)
                    acc += line
                suspect += acc * 0.0
                block_of(out_slots, out_slot * WT + (col - (K2 - 1))).store(acc.to(dx.dtype.element_ty))
                window = window[K1:]
        fence_async_shared()  # loads that are under way are not ordered with what the copy engine writes
        mbarrier.arrive(empty.index(slot_before(slot, K1 - 1, SLOTS)))
        slot, round = next_slot(slot, round, SLOTS)
        gl.thread_barrier()
        i = step - P1
        row = dx + (a.to(gl.int64) * r_n + i.to(gl.int64) * r_1 + column.to(gl.int64) * r_2 + c_tile)
        there = (image < N - a) & ((i >= 0) & (i < X1))
        for col in gl.static_range(WT):
            value = out_slots.index(out_slot * WT + col).reshape([16, 64]).load(STORE)
            gl.store(row + col * r_2 + offset, value, mask=there & (column + col < X2))
        out_slot = out_slot ^ 1
    if gl.max(gl.max(gl.max((suspect != suspect).to(gl.int32), 2), 1), 0) != 0:
        gl.thread_barrier()  # a row may be stored by other threads
        masked_rows(dy, weight, dx, c_tile, walk, extents, y_steps, r_steps, w_steps, K1, K2, P1, P2, CG, WT, 4)


@gluon.jit
def block_input_kernel(
        dy_box, dy, weight, dx, N, Q1, Q2, X1, X2, column_tiles, steps, all_steps, run, channel_tiles,
        y_n, y_1, y_2, r_n, r_1, r_2, w_o, w_i, w_1, w_2,
        K1: gl.constexpr, K2: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, CG: gl.constexpr, WT: gl.constexpr,
        SLOTS: gl.constexpr):
    """dx of a run of steps: `steps` rows a tile of WT columns x 16 images, tile after tile, for 64 channels."""
    COLUMNS: gl.constexpr = WT + K2 - 1
    pid = gl.program_id(0)
    c_tile = (pid % channel_tiles) * 64
    begin = (pid // channel_tiles) * run
    end = gl.minimum(begin + run, all_steps)
    slots = gl.allocate_shared_memory(dy.dtype.element_ty, [SLOTS * COLUMNS, 1, 1, 16, 64], dy_box.layout)
    out_slots = gl.allocate_shared_memory(dx.dtype.element_ty, [2 * WT, 1, 1, 16, 64], dy_box.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    walk = (begin, end, steps, column_tiles, all_steps)
    gl.warp_specialize(
        [(add_rows, (slots, out_slots, (full, empty), walk, (dy, weight, dx), (N, Q1, Q2, X1, X2),
                     (y_n, y_1, y_2), (r_n, r_1, r_2), (w_o, w_i, w_1, w_2), c_tile, K1, K2, P1, P2, CG, WT, COLUMNS,
                     SLOTS)),
         (copy_grads, (dy_box, slots, (full, empty), walk, c_tile, N, P2 - K2 + 1, K1, WT, COLUMNS, SLOTS))],
        [1], [24])


@gluon.jit
def copy_both(x_box, dy_box, slots, barriers, walk, c_tile, N, P1: gl.constexpr, P2: gl.constexpr, K1: gl.constexpr,
              WT: gl.constexpr, COLUMNS: gl.constexpr, SLOTS: gl.constexpr, DY_SLOTS: gl.constexpr):
    """The copying warp of the weight gradient: rows of x, and the row of dy whose last row of x has come."""
    x_slots, dy_slots = slots
    full, empty, dy_full, dy_empty = barriers
    begin, end, steps, column_tiles, all_steps = walk
    slot = begin * 0
    round = begin * 0
    dy_slot = begin * 0
    dy_round = begin * 0
    for i in range(0, end - begin + (K1 - 1)):
        at = begin + i - (K1 - 1)
        a, column, step = place_of(at, steps, column_tiles, N, all_steps, WT)
        mbarrier.wait(empty.index(slot), round ^ 1)
        mbarrier.expect(full.index(slot), COLUMNS * 2048)
        copy_columns(x_box, x_slots, slot, full.index(slot), step - P1, column - P2, a, c_tile, COLUMNS)
        slot, round = next_slot(slot, round, SLOTS)
        if at >= begin:
            mbarrier.wait(dy_empty.index(dy_slot), dy_round ^ 1)
            mbarrier.expect(dy_full.index(dy_slot), WT * 2048)
            copy_columns(dy_box, dy_slots, dy_slot, dy_full.index(dy_slot), step - (K1 - 1), column, a, c_tile, WT)
            dy_slot, dy_round = next_slot(dy_slot, dy_round, DY_SLOTS)


@gluon.jit
def masked_sums(dy, x, out, c_tile, walk, extents, y_steps, x_steps, K1: gl.constexpr, K2: gl.constexpr,
                P1: gl.constexpr, P2: gl.constexpr, CG: gl.constexpr, WT: gl.constexpr):
    """The sums of a run again with a mask on every product."""
    begin, end, steps, column_tiles, all_steps = walk
    N, Q1, Q2, X1, X2 = extents
    y_n, y_1, y_2 = y_steps
    x_n, x_1, x_2 = x_steps
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    c_out = c_tile + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    c = c_out[None, :]
    image = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    for term in range(0, K1 * K2 * CG):
        tap = term // CG
        again = gl.full([16, 64], 0.0, gl.float32, LAYOUT)
        for at in range(begin, end):
            a, column, step = place_of(at, steps, column_tiles, N, all_steps, WT)
            n = a + image
            o_1 = step - (K1 - 1)
            i_1 = o_1 + tap // K2 - P1
            for e in range(0, WT):
                o_2 = column + e
                i_2 = o_2 + tap % K2 - P2
                ok = (c >= 0) & (n < N) & (o_1 >= 0) & (o_1 < Q1) & (o_2 < Q2) & (i_1 >= 0) & (i_1 < X1) \
                    & (i_2 >= 0) & (i_2 < X2)
                from_y = n.to(gl.int64) * y_n + o_1.to(gl.int64) * y_1 + o_2.to(gl.int64) * y_2 + c
                from_x = n.to(gl.int64) * x_n + i_1.to(gl.int64) * x_1 + i_2.to(gl.int64) * x_2 + (c // CG) * CG \
                    + term % CG
                again += gl.load(dy + from_y, mask=ok, other=0.0).to(gl.float32) \
                    * gl.load(x + from_x, mask=ok, other=0.0).to(gl.float32)
        gl.store(out + (c_out * (K1 * K2) + tap) * CG + term % CG, gl.sum(again, 0))


@gluon.jit
def sum_rows(slots, barriers, walk, pointers, extents, y_steps, x_steps, c_tile, split, channels,
             BIAS: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
             CG: gl.constexpr, WT: gl.constexpr, COLUMNS: gl.constexpr, SLOTS: gl.constexpr, DY_SLOTS: gl.constexpr):
    """The multiplying warps of the weight gradient, and with BIAS of the bias gradient: a row of dy a step."""
    x_slots, dy_slots = slots
    full, empty, dy_full, dy_empty = barriers
    begin, end, _, _, _ = walk
    dy, x, partial, bias = pointers
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    zero = gl.full([4, 16, 16], 0.0, gl.float32, MMA)
    bias_sum = gl.full([4, 16, 8], 0.0, gl.float32, MMA)
    ones = gl.full([4, 16, 8], 1.0, dy.dtype.element_ty, gl.DotOperandLayout(1, MMA, 2))
    acc = (zero,) * (K1 * K2)
    slot = begin * 0
    round = begin * 0
    dy_slot = begin * 0
    dy_round = begin * 0
    for _ in gl.static_range(K1 - 1):  # rows of x that the first row of dy needs
        mbarrier.wait(full.index(slot), round)
        slot, round = next_slot(slot, round, SLOTS)
    for _ in range(begin, end):
        mbarrier.wait(full.index(slot), round)
        mbarrier.wait(dy_full.index(dy_slot), dy_round)
        window = ()  # the last K2 columns of K1 rows of x
        for col in gl.static_range(COLUMNS):
            for k1 in gl.static_range(K1):
                window = window + (block_of(x_slots, slot_before(slot, K1 - 1 - k1, SLOTS) * COLUMNS + col).load(
                    gl.DotOperandLayout(1, MMA, 2)),)
            if col >= K2 - 1:
                left = block_of(dy_slots, dy_slot * WT + (col - (K2 - 1))).permute([0, 2, 1]).load(
                    gl.DotOperandLayout(0, MMA, 2))
                if BIAS:
                    bias_sum = mma_v2(left, ones, bias_sum)
                for k2 in gl.static_range(K2):
                    for k1 in gl.static_range(K1):
                        acc = acc[:k1 * K2 + k2] + (mma_v2(left, window[k2 * K1 + k1], acc[k1 * K2 + k2]),) \
                            + acc[k1 * K2 + k2 + 1:]
                window = window[K1:]
        fence_async_shared()  # loads that are under way are not ordered with what the copy engine writes
        mbarrier.arrive(empty.index(slot_before(slot, K1 - 1, SLOTS)))
        mbarrier.arrive(dy_empty.index(dy_slot))
        slot, round = next_slot(slot, round, SLOTS)
        dy_slot, dy_round = next_slot(dy_slot, dy_round, DY_SLOTS)

    block = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
    out_channel = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]
    inner = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    mine = (out_channel // CG == inner // CG) & (block >= 0)
    if BIAS:
        column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
        row = bias + split.to(gl.int64) * channels + c_tile
        gl.store(row + block * 16 + out_channel + column, bias_sum, mask=(column == 0) & (block + out_channel >= 0))
    suspect = zero
    for tap in gl.static_range(K1 * K2):
        suspect += gl.where(mine, acc[tap] * 0.0, 0.0)
    out = partial + split.to(gl.int64) * channels * (K1 * K2 * CG)
    if gl.max(gl.max(gl.max((suspect != suspect).to(gl.int32), 2), 1), 0) != 0:
        masked_sums(dy, x, out, c_tile, walk, extents, y_steps, x_steps, K1, K2, P1, P2, CG, WT)
    else:
        at = out + (c_tile + block * 16 + out_channel) * (K1 * K2 * CG) + inner % CG
        for tap in gl.static_range(K1 * K2):
            gl.store(at + tap * CG, acc[tap], mask=mine)


@gluon.jit
def block_weight_kernel(
        x_box, dy_box, dy, x, partial, bias, N, Q1, Q2, X1, X2, column_tiles, steps, all_steps, run, channel_tiles,
        channels, y_n, y_1, y_2, x_n, x_1, x_2,
        BIAS: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, CG: gl.constexpr,
        WT: gl.constexpr, SLOTS: gl.constexpr, DY_SLOTS: gl.constexpr):
    """Partial dw (channel, tap, channel of the group) and with BIAS db of every run of steps, for 64 channels."""
    COLUMNS: gl.constexpr = WT + K2 - 1
    dtype: gl.constexpr = dy.dtype.element_ty
    pid = gl.program_id(0)
    c_tile = (pid % channel_tiles) * 64
    split = pid // channel_tiles
    begin = split * run
    end = gl.minimum(begin + run, all_steps)
    # the first K1 - 1 steps of a tile bring rows of x and no row of dy: copied before a run, they are no steps of it
    begin = gl.minimum(begin + gl.maximum(K1 - 1 - begin % steps, 0), end)
    slots = (gl.allocate_shared_memory(dtype, [SLOTS * COLUMNS, 1, 1, 16, 64], x_box.layout),
             gl.allocate_shared_memory(dtype, [DY_SLOTS * WT, 1, 1, 16, 64], dy_box.layout))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    dy_full = gl.allocate_shared_memory(gl.int64, [DY_SLOTS, 1], mbarrier.MBarrierLayout())
    dy_empty = gl.allocate_shared_memory(gl.int64, [DY_SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    for s in gl.static_range(DY_SLOTS):
        mbarrier.init(dy_full.index(s), count=1)
        mbarrier.init(dy_empty.index(s), count=1)
    barriers = (full, empty, dy_full, dy_empty)
    walk = (begin, end, steps, column_tiles, all_steps)
    gl.warp_specialize(
        [(sum_rows, (slots, barriers, walk, (dy, x, partial, bias), (N, Q1, Q2, X1, X2), (y_n, y_1, y_2),
                     (x_n, x_1, x_2), c_tile, split, channels, BIAS, K1, K2, P1, P2, CG, WT, COLUMNS, SLOTS, DY_SLOTS)),
         (copy_both, (x_box, dy_box, slots, barriers, walk, c_tile, N, P1, P2, K1, WT, COLUMNS, SLOTS, DY_SLOTS))],
        [1], [24])
