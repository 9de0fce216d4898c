"""Depthwise weight gradients of 16-bit tensors on the tensor cores, in Gluon.

For one channel, the products of a row of x with a row of dy are a matrix x[i]*dy[j]; its diagonal i - j = k holds the
products of tap k. Summed over 16 *strips* (images or planes, same rows and columns) this is one tensor-core product: 16
columns of x by 16 strips, times 16 strips by 8 columns of dy. Half of the matrix is not on a diagonal that is wanted,
and still the tensor cores are several times faster than one multiplication after the other.

A program owns V*WARPS channels, V a warp. The copy engine brings groups of 8 columns of a row, zeros outside the image;
a step takes the next row of dy and of x, and the rows of dy that still reach a row of x wait in registers as operands.
`slide_weight.py` has the same sums without tensor cores, `depthwise.py` in plain Triton.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# ruff: noqa: RUF005
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@triton.constexpr_function
def bits(count):
    return count.bit_length() - 1


@triton.constexpr_function
def group_layout(V, WARPS, BB):
    """How threads hold 16/BB x 1 row x 8 columns x BB strips x V*WARPS channels: as operands of a product.

    Lanes lie along two bits of the strips and the columns, so that eight neighbours read different banks.
    """
    def strip(bit):
        return [0, 0, 0, 1 << bit, 0] if bit < bits(BB) else [1 << (bit - bits(BB)), 0, 0, 0, 0]

    registers = [[0, 0, 0, 0, 1 << b] for b in range(bits(V))] + [strip(2), strip(3)]
    lanes = [strip(0), strip(1), [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    warps = [[0, 0, 0, 0, V << b] for b in range(bits(WARPS))]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16 // BB, 1, 8, BB, V * WARPS])


@gluon.jit
def load_groups(slots, first, COUNT: gl.constexpr, LAYOUT: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr):
    """COUNT groups of columns as (strips by bits, column, warp, channel of the warp)."""
    groups = ()
    for g in gl.static_range(COUNT):
        values = gl.permute(slots.index(first + g).load(LAYOUT), (0, 1, 3, 2, 4))
        groups = groups + (gl.reshape(values, (2, 2, 2, 2, 8, WARPS, V)),)
    return groups


@gluon.jit
def as_left(low, high, V: gl.constexpr, WARPS: gl.constexpr, MMA: gl.constexpr):
    """Two neighbouring groups as left operand: channel x 16 columns x 16 strips."""
    both = gl.permute(gl.join(low, high), (6, 5, 7, 4, 0, 2, 3, 1))
    return gl.convert_layout(gl.reshape(both, (V * WARPS, 16, 16)), gl.DotOperandLayout(0, MMA, 2),
                             assert_trivial=True)


@gluon.jit
def as_right(group, V: gl.constexpr, WARPS: gl.constexpr, MMA: gl.constexpr):
    """A group as right operand: channel x 16 strips x 8 columns."""
    turned = gl.permute(group, (6, 5, 0, 2, 3, 1, 4))
    return gl.convert_layout(gl.reshape(turned, (V * WARPS, 16, 8)), gl.DotOperandLayout(1, MMA, 2),
                             assert_trivial=True)


@gluon.jit
def in_thread_total(right, V: gl.constexpr, WARPS: gl.constexpr):
    """What a thread holds of a right operand, added up for each of its channels."""
    apart = gl.reshape(right.to(gl.float32), (V, WARPS, 2, 4, 2, 8))
    return gl.sum(gl.sum(apart, 4), 2)


@gluon.jit
def store_bias(out, totals, c_tile, wanted, C: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr):
    """Add up what `in_thread_total` found and store it."""
    sums = gl.sum(gl.sum(totals, 3), 2)
    LAYOUT: gl.constexpr = sums.type.layout
    c = c_tile + gl.arange(0, V, layout=gl.SliceLayout(1, LAYOUT))[:, None] \
        + gl.arange(0, WARPS, layout=gl.SliceLayout(0, LAYOUT))[None, :] * V
    gl.store(out + c, sums, mask=(c < C) & wanted)


@gluon.jit
def place_of(tile, column_tiles, b_tiles, BA: gl.constexpr, BB: gl.constexpr, COLUMNS: gl.constexpr):
    """First strip (a, b) and first column of a tile."""
    column = (tile % column_tiles) * COLUMNS
    rest = tile // column_tiles
    return (rest // b_tiles) * BA, (rest % b_tiles) * BB, column


@gluon.jit
def masked_sums(dy, x, out, taps, c_tile, k0, ky, begin, end, steps, column_tiles, b_tiles, extents, y_steps,
                x_steps, OWN_X: gl.constexpr, SPLIT: gl.constexpr, COLUMNS: gl.constexpr, C: gl.constexpr,
                K2: gl.constexpr,
                P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, BB: gl.constexpr, CB: gl.constexpr,
                WARPS: gl.constexpr, STRIPS: gl.constexpr = 16, T1: gl.constexpr = 1, T2: gl.constexpr = 1):
    """The sums of a run again, every product masked: a zero of the padding may have met an infinite operand.

    A run owns columns of x, from the first that a tap reaches on (OWN_X), or of dy. T1 and T2 are strides.
    """
    N, Q0, Q1, Q2, X0, X1, X2 = extents
    y_n, y_0, y_1, y_2 = y_steps
    x_n, x_0, x_1, x_2 = x_steps
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    c_out = c_tile + gl.arange(0, CB, layout=gl.SliceLayout(0, LAYOUT))
    c = c_out[None, :]
    strip = gl.arange(0, STRIPS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    for tap in range(0, taps):
        line = tap // K2
        tap2 = tap % K2
        again = gl.full([STRIPS, CB], 0.0, gl.float32, LAYOUT)
        for at in range(begin, end):
            a, b, column = place_of(at // steps, column_tiles, b_tiles, STRIPS // BB, BB, COLUMNS)
            n = a + strip // BB
            o_0 = b + strip % BB
            if SPLIT:  # strips are images
                n = n * BB + o_0
                o_0 = o_0 * 0
            i_0 = o_0 + k0 - P0
            i_1 = at % steps * T1 - (P1 - ky) + line % T1
            o_1 = at % steps - line // T1
            for e in range(0, COLUMNS):
                o_2 = column + e - tap2 if OWN_X else column + e
                i_2 = o_2 * T2 + tap2 - P2
                ok = (c < C) & (n < N) & (o_0 < Q0) & (i_0 >= 0) & (i_0 < X0) & (o_2 >= 0) & (o_2 < Q2) & (i_2 >= 0) \
                    & (i_2 < X2) & (i_1 >= 0) & (i_1 < X1) & (o_1 >= 0) & (o_1 < Q1)
                from_x = n.to(gl.int64) * x_n + i_0.to(gl.int64) * x_0 + i_1.to(gl.int64) * x_1 \
                    + i_2.to(gl.int64) * x_2
                from_y = n.to(gl.int64) * y_n + o_0.to(gl.int64) * y_0 + o_1.to(gl.int64) * y_1 \
                    + o_2.to(gl.int64) * y_2
                value = gl.load(x + from_x + c, mask=ok, other=0.0).to(gl.float32)
                again += value * gl.load(dy + from_y + c, mask=ok, other=0.0).to(gl.float32)
        gl.store(out + tap * C + c_out, gl.sum(again, 0), mask=c_out < C)


@gluon.jit
def copy_rows(x_box, dy_box, slots, barriers, walk, c_tile, plane, N, X1, pad1, P2: gl.constexpr, J: gl.constexpr,
              XG: gl.constexpr, BA: gl.constexpr, BB: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr):
    """The copying warp: per step a row of dy and the row of x that it meets through the first line of taps.

    Before `begin` only rows of dy are wanted, which later steps need, and past `end` nothing: there it asks for what
    lies outside the tensors, which comes as zeros.
    """
    x_slots, dy_slots = slots
    full, empty = barriers
    begin, end, column_tiles, b_tiles, steps, start, total = walk
    tile = start // steps
    step = start % steps
    slot = begin * 0
    round = begin * 0
    for at in range(start, start + total):
        a, b, column = place_of(tile, column_tiles, b_tiles, BA, BB, J * 8)
        a = gl.where(at < end, a, N)
        i = gl.where(at < begin, X1, step - pad1)
        mbarrier.wait(empty.index(slot), round ^ 1)
        mbarrier.expect(full.index(slot), BYTES * (XG + J))
        for j in gl.static_range(J):
            tma.async_copy_global_to_shared(dy_box, [a, step, column + 8 * j, b, c_tile], full.index(slot),
                                            dy_slots.index(slot * J + j))
        for g in gl.static_range(XG):
            tma.async_copy_global_to_shared(x_box, [a, i, column + (8 * g - P2), b + plane, c_tile],
                                            full.index(slot), x_slots.index(slot * XG + g))
        tile, step = next_step(tile, step, steps)
        slot, round = next_slot(slot, round, STAGES)


@gluon.jit
def next_step(tile, step, steps):
    """The step after this one; after a tile's last one the first of the next tile."""
    step += 1
    over = step == steps
    return tile + over.to(gl.int32), gl.where(over, 0, step)


@gluon.jit
def next_slot(slot, round, STAGES: gl.constexpr):
    slot += 1
    wrap = (slot == STAGES).to(gl.int32)
    return slot - wrap * STAGES, round ^ wrap


@gluon.jit
def release(empty, slot, round, STAGES: gl.constexpr):
    """Give a slot back to the copies once all has been read from it; returns the next one.

    Loads that are still under way are not ordered with what the copy engine writes, and zeros outside a tensor it
    writes at once: without the fence some warps read the next rows.
    """
    fence_async_shared()
    mbarrier.arrive(empty.index(slot))
    return next_slot(slot, round, STAGES)


@gluon.jit
def add_row(acc, ring, bias, own, dy_slots, x_slots, slot, nil, BIAS: gl.constexpr, LINES: gl.constexpr,
            J: gl.constexpr, XG: gl.constexpr, MT: gl.constexpr, BB: gl.constexpr, V: gl.constexpr,
            WARPS: gl.constexpr):
    """The products of one row; a function, because Triton reads what is in a loop twice, and once a repetition."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LAYOUT: gl.constexpr = group_layout(V, WARPS, BB)
    grads = load_groups(dy_slots, slot * J, J, LAYOUT, V, WARPS)
    # NOTE: a group of x is loaded once for each of the two operands that it is a part of, from an address that
    # the compiler cannot see to be the same: operands that share registers make it copy them for every product
    evens = load_groups(x_slots, slot * XG, XG // 2 * 2, LAYOUT, V, WARPS)
    odds = load_groups(x_slots, slot * XG + nil + 1, (XG - 1) // 2 * 2, LAYOUT, V, WARPS)
    for j in gl.static_range(J):
        ring = ring + (as_right(grads[j], V, WARPS, MMA),)
        if BIAS:
            bias += gl.where(own, in_thread_total(ring[(LINES - 1) * J + j], V, WARPS), 0.0)
    for j in gl.static_range(J):
        for t in gl.static_range(MT):
            if j % 2 == 0:
                left = as_left(evens[j + 2 * t], evens[j + 2 * t + 1], V, WARPS, MMA)
            else:
                left = as_left(odds[j - 1 + 2 * t], odds[j + 2 * t], V, WARPS, MMA)
            for age in gl.static_range(LINES):  # a row of dy that came `age` steps ago meets line `age`
                acc = acc[:age * MT + t] \
                    + (mma_v2(left, ring[(LINES - 1 - age) * J + j], acc[age * MT + t]),) \
                    + acc[age * MT + t + 1:]
    return acc, ring[J:], bias


@gluon.jit
def sum_rows(slots, barriers, walk, pointers, extents, y_steps, x_steps, place, turns,
             C: gl.constexpr, K: gl.constexpr, P: gl.constexpr, BIAS: gl.constexpr, LINES: gl.constexpr,
             J: gl.constexpr, XG: gl.constexpr, MT: gl.constexpr, SPLIT: gl.constexpr, BB: gl.constexpr,
             STAGES: gl.constexpr, UNROLL: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr):
    """The multiplying warps."""
    x_slots, dy_slots = slots
    full, empty = barriers
    begin, end, column_tiles, b_tiles, steps, at, _ = walk
    dy, x, partial = pointers
    c_tile, k0, group, split = place
    CB: gl.constexpr = V * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    dtype: gl.constexpr = dy.dtype.element_ty
    zero = gl.full([CB, 16, 8], 0.0, gl.float32, MMA)
    nothing = gl.full([CB, 16, 8], 0.0, dtype, gl.DotOperandLayout(1, MMA, 2))
    acc = (zero,) * (LINES * MT)
    bias = in_thread_total(nothing, V, WARPS)
    ring = (nothing,) * ((LINES - 1) * J)  # rows of dy, the oldest first
    slot = begin * 0
    round = begin * 0
    nil = (column_tiles < 0).to(gl.int32)
    for _ in range(0, turns):
        for _ in gl.static_range(UNROLL):
            mbarrier.wait(full.index(slot), round)
            acc, ring, bias = add_row(acc, ring, bias, at >= begin, dy_slots, x_slots, slot, nil, BIAS, LINES, J, XG,
                                      MT, BB, V, WARPS)
            at += 1
            slot, round = release(empty, slot, round, STAGES)

    # channels are numbered (channel of the warp, warp) in the products
    at = gl.arange(0, CB, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    c_out = c_tile + (at % WARPS) * V + at // WARPS
    diagonal = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]
    step = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    where = row + step + gl.full([CB, 1, 1], 0, gl.int32, MMA)
    out = partial + split.to(gl.int64) * ((K[0] * K[1] * K[2] + BIAS) * C) + (k0 * K[1] + group * LINES) * (K[2] * C)
    lines = ()
    suspect = gl.full([CB, 16], 0.0, gl.float32, gl.SliceLayout(2, MMA))
    for age in gl.static_range(LINES):
        for t in gl.static_range(MT):
            band = gl.where(where < 16, gl.gather(acc[age * MT + t], where & 15, 1), 0.0)
            if t + 1 < MT:
                band = gl.where(where < 16, band, gl.gather(acc[age * MT + t + 1], where & 15, 1))
            line = gl.sum(band, 2)
            lines = lines + (line,)
            suspect += gl.where((diagonal + 16 * t < K[2])[None, :], line * 0.0, 0.0)
    if gl.max(gl.max((suspect != suspect).to(gl.int32), 1), 0) != 0:
        masked_sums(dy, x, out, gl.minimum(LINES, K[1] - group * LINES) * K[2], c_tile, k0, group * LINES, begin, end,
                    steps, column_tiles, b_tiles, extents, y_steps, x_steps, False, SPLIT, J * 8, C, K[2], P[0], P[1],
                    P[2], BB, CB, WARPS)
    else:
        for age in gl.static_range(LINES):
            for t in gl.static_range(MT):
                tap = diagonal + 16 * t
                there = (c_out < C)[:, None] & (tap < K[2])[None, :]
                gl.store(out + (age * K[2] + tap)[None, :] * C + c_out[:, None], lines[age * MT + t],
                         mask=there & (group * LINES + age < K[1]))
    if BIAS:
        store_bias(out + K[0] * K[1] * K[2] * C, bias, c_tile, (k0 == 0) & (group == 0), C, V, WARPS)


@gluon.jit
def band_weight_kernel(
        x_box, dy_box, dy, x, partial, N, Q0, Q1, Q2, X0, X1, X2, column_tiles, b_tiles, steps, all_steps, run,
        channel_tiles, y_n, y_0, y_1, y_2, x_n, x_0, x_1, x_2,
        C: gl.constexpr, K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, BIAS: gl.constexpr, LINES: gl.constexpr,
        J: gl.constexpr, SPLIT: gl.constexpr, BB: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr,
        V: gl.constexpr, WARPS: gl.constexpr):
    """dw of LINES lines of taps; partial sums (tap, channel) of every run.

    A tile takes `steps` rows; a run is `run` steps of all tiles after each other, and may begin within a tile.
    """
    CB: gl.constexpr = V * WARPS
    BA: gl.constexpr = 16 // BB
    MT: gl.constexpr = (K2 + 22) // 16  # products of 16 columns that hold all diagonals
    XG: gl.constexpr = J - 1 + 2 * MT
    GROUPS: gl.constexpr = (K1 + LINES - 1) // LINES
    dtype: gl.constexpr = dy.dtype.element_ty
    pid = gl.program_id(0)
    c_tile = (pid % channel_tiles) * CB
    pid = pid // channel_tiles
    k0 = pid % K0
    pid = pid // K0
    group = pid % GROUPS
    split = pid // GROUPS
    begin = split * run
    end = gl.minimum(begin + run, all_steps)
    start = begin - gl.minimum(begin % steps, LINES - 1)
    turns = (end - start + UNROLL - 1) // UNROLL
    slots = (gl.allocate_shared_memory(dtype, [STAGES * XG, BA, 1, 8, BB, CB], x_box.layout),
             gl.allocate_shared_memory(dtype, [STAGES * J, BA, 1, 8, BB, CB], dy_box.layout))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    walk = (begin, end, column_tiles, b_tiles, steps, start, turns * UNROLL)
    gl.warp_specialize(
        [(sum_rows, (slots, (full, empty), walk, (dy, x, partial), (N, Q0, Q1, Q2, X0, X1, X2), (y_n, y_0, y_1, y_2),
                     (x_n, x_0, x_1, x_2), (c_tile, k0, group, split), turns, C, (K0, K1, K2), (P0, P1, P2), BIAS,
                     LINES, J, XG, MT, SPLIT, BB, STAGES, UNROLL, V, WARPS)),
         (copy_rows, (x_box, dy_box, slots, (full, empty), walk, c_tile, k0 - P0, N, X1, P1 - group * LINES, P2, J, XG,
                      BA, BB, STAGES, 16 * 8 * CB * 2))],
        [1], [24])
