"""The dense weight gradient line by line: two warps copy boxes of pixels, the others multiply; written in Gluon.

A program sums BK output channels x CB input channels x NT neighbouring taps of one axis over a run of *lines*. A line
is a box of pixels. Lines that follow each other on the axis of the taps make a chain: the taps t of its dy line q read
the x lines q*stride + t, so an x line is copied once and multiplied by several dy lines. A chain of length 1 shares
only the dy line. The copies' zero fill is the padding. `weight.py` has the same sums in plain Triton.

SHARED: where images are the last axis of a line, the taps of the axis before them are whole units of 8 pixels apart,
and one copy of x serves all of a program's taps.

On an axis with a stride the copies of x take every stride-th element.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment, attr-defined"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from .line_places import (
    first_line,
    next_line,
    number_in_row,
    pixel_of,
    segment,
    stored_images,
    tap_tiles,
    wrapped,
)
from .line_products import multiply_run, product_of_line, x_line


@gluon.jit
def copy_dy(dy_box, slots, full, empty, table, shape, extents, images, PRODUCTS: gl.constexpr, TILING: gl.constexpr,
            SEGMENTS: gl.constexpr, PARTS: gl.constexpr, AXIS: gl.constexpr, CHAIN: gl.constexpr,
            GEOMETRY: gl.constexpr, BOX: gl.constexpr, STEP: gl.constexpr, SLOTS: gl.constexpr, BYTES: gl.constexpr):
    """The warp that copies dy: fills free slots in the order in which `multiply_lines` empties them."""
    slot = gl.program_id(0) * 0
    round = gl.program_id(0) * 0  # how often all slots were filled, modulo 2
    for number in range(SEGMENTS):
        tile, first, seen, run = segment(table, number, shape, extents, images * PRODUCTS, TILING, SEGMENTS, PARTS,
                                         AXIS, CHAIN, GEOMETRY, BOX)
        k_tile, _, _, _, _, group = tile
        _, begin, end, _ = run
        row = group * TILING[3] + k_tile
        place = first_line(begin, seen)
        for _ in range(begin, end):
            box, q0, q1, q2 = pixel_of(place, first, AXIS, BOX, STEP)
            n = stored_images(box, images, 0, PRODUCTS, BOX[0])
            mbarrier.wait(empty.index(slot), round ^ 1)
            mbarrier.expect(full.index(slot), BYTES)
            tma.async_copy_global_to_shared(dy_box, [n, q0, q1, q2, row], full.index(slot), slots.index(slot))
            slot, carry = wrapped(slot, 1, SLOTS)
            round ^= carry
            place = next_line(place, seen)


@gluon.jit
def copy_x(x_box, slots, full, empty, table, shape, extents, images, PRODUCTS: gl.constexpr, TILING: gl.constexpr,
           SEGMENTS: gl.constexpr, PARTS: gl.constexpr, AXIS: gl.constexpr, NT: gl.constexpr, CHAIN: gl.constexpr,
           ADVANCE: gl.constexpr, D: gl.constexpr, UNITS: gl.constexpr, GEOMETRY: gl.constexpr, BOX: gl.constexpr,
           STEP: gl.constexpr, SLOTS: gl.constexpr, BYTES: gl.constexpr):
    """The warp that copies x: NT lines at the start of a chain, then those that the taps meet for the first time.

    With UNITS one copy brings the pixels of all taps.
    """
    slot = gl.program_id(0) * 0
    round = gl.program_id(0) * 0
    for number in range(SEGMENTS):
        tile, first, seen, run = segment(table, number, shape, extents, images * PRODUCTS, TILING, SEGMENTS, PARTS,
                                         AXIS, CHAIN, GEOMETRY, BOX)
        _, c_tile, tap0, tap1, tap2, group = tile
        _, begin, end, _ = run
        column = group * TILING[4] + c_tile
        # where the first tap of pixel 0 reads x
        reach0 = tap0 * GEOMETRY[1][0] - GEOMETRY[2][0]
        reach1 = tap1 * GEOMETRY[1][1] - GEOMETRY[2][1]
        reach2 = tap2 * GEOMETRY[1][2] - GEOMETRY[2][2]
        place = first_line(begin, seen)
        fresh = begin * 0 + 1
        for _ in range(begin, end):
            box, q0, q1, q2 = pixel_of(place, first, AXIS, BOX, STEP)
            n = stored_images(box, images, 1, PRODUCTS, BOX[0])
            for t in gl.static_range(NT if UNITS[0] == 0 else 1):
                if (t >= NT - ADVANCE) | (fresh != 0):
                    mbarrier.wait(empty.index(slot), round ^ 1)
                    mbarrier.expect(full.index(slot), BYTES)
                    i0 = q0 * GEOMETRY[0][0] + reach0
                    i1 = q1 * GEOMETRY[0][1] + reach1
                    i2 = q2 * GEOMETRY[0][2] + reach2
                    if AXIS == 0:
                        i0 += t * D
                    if AXIS == 1:
                        i1 += t * D
                    if AXIS == 2:
                        i2 += t * D
                    if UNITS[0] == 0:
                        target = slots.index(slot)
                    else:
                        target = slots.index(slot * UNITS[0])._reinterpret(slots.dtype, x_box.block_shape, x_box.layout)
                    tma.async_copy_global_to_shared(x_box, [n, i0, i1, i2, column], full.index(slot), target)
                    slot, carry = wrapped(slot, 1, SLOTS)
                    round ^= carry
            place = next_line(place, seen)
            fresh = (place[0] == 0).to(gl.int32)


@gluon.jit
def masked_lines(slots, pointers, places, first, shape, extents, steps, images, tap, offset, zero,
                 PRODUCTS: gl.constexpr, TURNED: gl.constexpr, AXIS: gl.constexpr,
                 BOX: gl.constexpr, STEP: gl.constexpr, GEOMETRY: gl.constexpr, BP: gl.constexpr, BK: gl.constexpr,
                 CB: gl.constexpr, KG: gl.constexpr, CG: gl.constexpr, UNITS: gl.constexpr, WARPS: gl.constexpr):
    """The sum of one tap again, with both operands masked: a zero of the padding may have met an infinite operand."""
    y_slots, x_slots = slots
    dy, x = pointers
    begin, end = places
    N, Q0, Q1, Q2, X0, X1, X2 = extents
    y_n, y_0, y_1, y_2, x_n, x_0, x_1, x_2 = steps
    k_tile, c_tile, dy_base, x_base = offset
    tap0, tap1, tap2 = tap
    y_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // min(BK, 256), min(BK, 256) // 8], [WARPS, 1], [1, 0])
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // min(CB, 256), min(CB, 256) // 8], [WARPS, 1], [1, 0])
    y_index = gl.arange(0, BP, layout=gl.SliceLayout(1, y_layout))
    x_index = gl.arange(0, BP, layout=gl.SliceLayout(1, x_layout))
    k = k_tile + gl.arange(0, BK, layout=gl.SliceLayout(0, y_layout))
    c = c_tile + gl.arange(0, CB, layout=gl.SliceLayout(0, x_layout))
    acc = zero
    for line in range(begin, end):
        box, q0, q1, q2 = pixel_of(first_line(line, shape), first, AXIS, BOX, STEP)
        for which in gl.static_range(2):
            index = y_index if which == 0 else x_index
            in_box = index // (BOX[1] * BOX[2] * BOX[3])
            at_n = stored_images(box, images, which, PRODUCTS, BOX[0]) + in_box
            image = (box % images) * BOX[0] + in_box
            at_0 = q0 + (index // (BOX[2] * BOX[3])) % BOX[1]
            at_1 = q1 + (index // BOX[3]) % BOX[2]
            at_2 = q2 + index % BOX[3]
            i0 = at_0 * GEOMETRY[0][0] + tap0 * GEOMETRY[1][0] - GEOMETRY[2][0]
            i1 = at_1 * GEOMETRY[0][1] + tap1 * GEOMETRY[1][1] - GEOMETRY[2][1]
            i2 = at_2 * GEOMETRY[0][2] + tap2 * GEOMETRY[1][2] - GEOMETRY[2][2]
            there = ((image < N) & (at_0 < Q0) & (at_1 < Q1) & (at_2 < Q2) & (i0 >= 0) & (i0 < X0) & (i1 >= 0)
                     & (i1 < X1) & (i2 >= 0) & (i2 < X2))
            if which == 0:
                row = (at_n.to(gl.int64) * y_n + at_0.to(gl.int64) * y_0 + at_1.to(gl.int64) * y_1
                       + at_2.to(gl.int64) * y_2)
                value = gl.load(dy + row[:, None] + (dy_base + k)[None, :], mask=there[:, None] & (k < KG)[None, :],
                                other=0.0)
                # what is not finite is so in the first part: in products before the last it would meet zeros
                value = gl.where((box < (PRODUCTS - 1) * images) & (value - value != 0.0), 0.0, value)
                y_slots.index(0).reshape([BP, BK]).store(value)
            else:
                row = (at_n.to(gl.int64) * x_n + i0.to(gl.int64) * x_0 + i1.to(gl.int64) * x_1 + i2.to(gl.int64) * x_2)
                value = gl.load(x + row[:, None] + (x_base + c)[None, :], mask=there[:, None] & (c < CG)[None, :],
                                other=0.0)
                value = gl.where((box < (PRODUCTS - 1) * images) & (value - value != 0.0), 0.0, value)
                x_line(x_slots, 0, 0, BP, CB, UNITS).store(value)
        fence_async_shared()
        gl.thread_barrier()
        acc = product_of_line(y_slots.index(0), x_line(x_slots, 0, 0, BP, CB, UNITS), acc, TURNED, BP, BK)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        gl.thread_barrier()
    return acc


@gluon.jit
def any_to_mask(value, PRODUCTS: gl.constexpr):
    """Whether sums must be summed again with masks: where a zero of the padding met Inf they are NaN.

    Of several products of parts, those before the last may meet Inf, too, and with the wrong sign.
    """
    if PRODUCTS > 1:
        value = value - value
    return gl.max(gl.max((value != value).to(gl.int32), 1), 0)


@gluon.constexpr_function
def stored_layout(product, ROWS, COLUMNS, WARPS, BITS):
    """Sums as they are stored: a thread 16 bytes of a row instead of 4; each warp has the rows of its products."""
    if BITS > 16:  # four threads store 32 bytes of a row as it is
        return product

    def doubled(first, end):
        return [first << i for i in range((end // first).bit_length() - 1)]

    per = 128 // BITS
    across = [[0, step] for step in doubled(per, min(COLUMNS, 4 * per))]
    down = [[step, 0] for step in doubled(1, 16)]
    return gl.DistributedLinearLayout(
        [[0, step] for step in doubled(1, per)] + down[5 - len(across):]
        + [[0, step] for step in doubled(4 * per, COLUMNS)] + [[step, 0] for step in doubled(16 * WARPS, ROWS)],
        across + down[:5 - len(across)], [[step, 0] for step in doubled(16, 16 * WARPS)], [], [ROWS, COLUMNS])


@gluon.jit
def store_tap(acc, result, tap, channels, result_steps, ADD: gl.constexpr, TURNED: gl.constexpr,
              layout: gl.constexpr, WARPS: gl.constexpr, KERNEL: gl.constexpr, BK: gl.constexpr, CB: gl.constexpr,
              KG: gl.constexpr, CG: gl.constexpr):
    """The sums of one tap to their place; `result` is that of the part and group."""
    tap0, tap1, tap2 = tap
    k_tile, c_tile = channels
    r_k, r_c, r_0, r_1, r_2 = result_steps
    stored: gl.constexpr = stored_layout(layout, acc.shape[0], acc.shape[1], WARPS,
                                         result.dtype.element_ty.primitive_bitwidth)
    along: gl.constexpr = 1 if TURNED else 0  # axis of the sums on which output channels lie
    k = k_tile + gl.arange(0, BK, layout=gl.SliceLayout(1 - along, stored))
    c = c_tile + gl.arange(0, CB, layout=gl.SliceLayout(along, stored))
    there = gl.expand_dims(k < KG, 1 - along) & gl.expand_dims(c < CG, along)
    where = gl.expand_dims(k.to(gl.int64) * r_k, 1 - along) + gl.expand_dims(c.to(gl.int64) * r_c, along)
    in_kernel = (tap0 < KERNEL[0]) & (tap1 < KERNEL[1]) & (tap2 < KERNEL[2])
    target = result + (tap0.to(gl.int64) * r_0 + tap1.to(gl.int64) * r_1 + tap2.to(gl.int64) * r_2) + where
    value = gl.convert_layout(acc.to(result.dtype.element_ty), stored)
    if ADD:
        value += gl.load(target, mask=there & in_kernel, other=0.0)
    gl.store(target, value, mask=there & in_kernel)


@gluon.jit
def next_tap(tap, AXIS: gl.constexpr):
    tap0, tap1, tap2 = tap
    if AXIS == 0:
        tap0 += 1
    if AXIS == 1:
        tap1 += 1
    if AXIS == 2:
        tap2 += 1
    return tap0, tap1, tap2


@gluon.jit
def sum_and_store(slots, barriers, ones, pointers, result, bias, table, shape, extents, steps, result_steps, images,
                  BIAS: gl.constexpr, PRODUCTS: gl.constexpr, ADD: gl.constexpr, FILL: gl.constexpr,
                  TURNED: gl.constexpr, TILING: gl.constexpr, SEGMENTS: gl.constexpr, PARTS: gl.constexpr,
                  AXIS: gl.constexpr, NT: gl.constexpr, CHAIN: gl.constexpr, ADVANCE: gl.constexpr,
                  UNITS: gl.constexpr, BOX: gl.constexpr, STEP: gl.constexpr, GEOMETRY: gl.constexpr,
                  BP: gl.constexpr, YS: gl.constexpr, XS: gl.constexpr, WARPS: gl.constexpr):
    """The multiplying warps: the lines of each segment, then the sums of each tap to the result."""
    KERNEL, BK, CB, KG, CG = TILING
    ROWS: gl.constexpr = CB if TURNED else BK
    COLUMNS: gl.constexpr = BK if TURNED else CB
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 8, 16])
    SHARES: gl.constexpr = tap_tiles(KERNEL, AXIS, NT) * ((CG + CB - 1) // CB)
    zero = gl.program_id(0) * 0
    state = (zero, zero, zero, zero)
    bad = zero.to(gl.int64)  # one bit for each segment
    r_split, r_k, r_c, r_0, r_1, r_2, b_split = result_steps
    in_part = (r_k, r_c, r_0, r_1, r_2)
    for number in range(SEGMENTS):
        tile, _first, _seen, run = segment(table, number, shape, extents, images * PRODUCTS, TILING, SEGMENTS, PARTS,
                                           AXIS, CHAIN, GEOMETRY, BOX)
        k_tile, c_tile, tap0, tap1, tap2, group = tile
        part, begin, end, fill = run
        nothing = gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout)
        share = number_in_row(TILING, AXIS, NT, PARTS) if BIAS else zero
        sums, added, state = multiply_run(slots, barriers, (begin, end), shape[0], state, (nothing,) * NT,
                                          gl.full([BK, 8], 0.0, gl.float32, narrow) if BIAS else zero, ones, share,
                                          BIAS, SHARES, TURNED, NT, ADVANCE, UNITS, BP, BK, CB, YS, XS)
        if BIAS:
            k = k_tile + gl.arange(0, BK, layout=gl.SliceLayout(1, narrow))
            column = gl.arange(0, 8, layout=gl.SliceLayout(0, narrow))
            row = bias + (part * SHARES + share).to(gl.int64) * b_split + group * KG
            gl.store(row + k[:, None] + column[None, :], added, mask=(k < KG)[:, None] & (column == 0)[None, :])
        at = result + part.to(gl.int64) * r_split + (group * KG).to(gl.int64) * r_k
        bad_now = zero
        for t in gl.static_range(NT):
            bad_now |= any_to_mask(sums[t], PRODUCTS)
        bad |= bad_now.to(gl.int64) << gl.minimum(number, 62)
        # a program with fewer segments stores nothing, and what is summed again is not added twice
        tap = (gl.where((part < 0) | (ADD & (bad_now != 0)), KERNEL[0], tap0), tap1, tap2)
        for t in gl.static_range(NT):
            store_tap(sums[t], at, tap, (k_tile, c_tile), in_part, ADD, TURNED, layout, WARPS, KERNEL, BK, CB, KG, CG)
            if FILL:  # addresses of a second store may not fit the registers: it is there only where it is needed
                for rest in range(fill):  # a tile with fewer parts than others has zeros in the rest
                    store_tap(gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout), at + (rest + 1).to(gl.int64) * r_split,
                              tap, (k_tile, c_tile), in_part, ADD, TURNED, layout, WARPS, KERNEL, BK, CB, KG, CG)
            tap = next_tap(tap, AXIS)
    if bad != 0:  # all copies have come, so that slots are free for other data
        for number in range(SEGMENTS):
            again = ((bad >> gl.minimum(number, 62)) & 1) != 0
            tile, first, seen, run = segment(table, number, shape, extents, images * PRODUCTS, TILING, SEGMENTS,
                                             PARTS, AXIS, CHAIN, GEOMETRY, BOX)
            k_tile, c_tile, tap0, tap1, tap2, group = tile
            part, begin, end, fill = run
            at = result + part.to(gl.int64) * r_split + (group * KG).to(gl.int64) * r_k
            end = gl.where(again, end, begin)
            tap = (gl.where((part >= 0) & again, tap0, KERNEL[0]), tap1, tap2)
            for _tap in gl.static_range(NT):
                acc = masked_lines(slots, pointers, (begin, end), first, seen, extents, steps, images, tap,
                                   (k_tile, c_tile, group * KG, group * CG),
                                   gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout), PRODUCTS, TURNED, AXIS, BOX, STEP,
                                   GEOMETRY, BP, BK, CB, KG, CG, UNITS, WARPS)
                store_tap(acc, at, tap, (k_tile, c_tile), in_part, ADD, TURNED, layout, WARPS, KERNEL, BK, CB, KG, CG)
                tap = next_tap(tap, AXIS)


@gluon.jit
def line_weight_kernel(
        dy_box, x_box, dy, x, result, bias, table,
        N, Q0, Q1, Q2, X0, X1, X2, length, spread, boxes_0, boxes_1, boxes_2, images,
        y_n, y_0, y_1, y_2, x_n, x_0, x_1, x_2, r_split, r_k, r_c, r_0, r_1, r_2, b_split,
        K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        T0: gl.constexpr, T1: gl.constexpr, T2: gl.constexpr,
        D0: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr,
        P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
        KG: gl.constexpr, CG: gl.constexpr, BIAS: gl.constexpr, PRODUCTS: gl.constexpr, ADD: gl.constexpr,
        FILL: gl.constexpr, TURNED: gl.constexpr, SEGMENTS: gl.constexpr, PARTS: gl.constexpr, AXIS: gl.constexpr,
        NT: gl.constexpr, CHAIN: gl.constexpr, SHARED: gl.constexpr,
        PN: gl.constexpr, B0: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr, BK: gl.constexpr, CB: gl.constexpr,
        YS: gl.constexpr, XS: gl.constexpr, WARPS: gl.constexpr):
    """With BIAS the tiles of a part and group add up dy, too: each its share of the lines, to rows of `bias`."""
    BP: gl.constexpr = PN * B0 * B1 * B2
    BOX: gl.constexpr = (PN, B0, B1, B2)
    TILING: gl.constexpr = ((K0, K1, K2), BK, CB, KG, CG)
    GEOMETRY: gl.constexpr = ((T0, T1, T2), (D0, D1, D2), (P0, P1, P2), NT)
    D: gl.constexpr = D0 if AXIS == 0 else D1 if AXIS == 1 else D2
    T: gl.constexpr = T0 if AXIS == 0 else T1 if AXIS == 1 else T2
    STEP: gl.constexpr = D if CHAIN and T == 1 else 1
    ADVANCE: gl.constexpr = T if CHAIN else NT
    # SHARED: units of 8 pixels in a slot of x, and from one tap's first pixel to the next one's
    UNITS: gl.constexpr = ((B1 + (NT - 1) * D) * B2 // 8, D * B2 // 8) if SHARED else (0, 0)
    dtype: gl.constexpr = dy.dtype.element_ty

    y_slots = gl.allocate_shared_memory(dtype, [YS, PN, B0, B1, B2, BK], dy_box.layout)
    if SHARED:
        gl.static_assert(PN * B0 == 1 and AXIS == 1 and T == 1 and D * B2 % 8 == 0)
        x_slots = gl.allocate_shared_memory(dtype, [XS * UNITS[0], 8, CB], gl.NVMMASharedLayout(
            x_box.layout.swizzle_byte_width, 16, rank=2))
    else:
        x_slots = gl.allocate_shared_memory(dtype, [XS, PN, B0, B1, B2, CB], x_box.layout)
    y_full = gl.allocate_shared_memory(gl.int64, [YS, 1], mbarrier.MBarrierLayout())
    y_empty = gl.allocate_shared_memory(gl.int64, [YS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(YS):
        mbarrier.init(y_full.index(i), count=1 if NT > 1 and not SHARED else 2)
        mbarrier.init(y_empty.index(i), count=1)
    if NT > 1 and not SHARED:
        x_full = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
        x_empty = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(XS):
            mbarrier.init(x_full.index(i), count=1)
            mbarrier.init(x_empty.index(i), count=1)
    else:  # slots of both are filled and emptied together: two waits took longer than the products of a small tile
        gl.static_assert(YS == XS)
        x_full = y_full
        x_empty = y_empty
    if BIAS:
        ones = gl.allocate_shared_memory(dtype, [8, BP], gl.NVMMASharedLayout(128, 16, rank=2))
        ones.store(gl.full([8, BP], 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])))
        fence_async_shared()
        gl.thread_barrier()
    else:
        ones = y_slots
    slots = (y_slots, x_slots)
    barriers = (y_full, y_empty, x_full, x_empty)
    shape = (length, spread, boxes_0, boxes_1, boxes_2)
    extents = (N, Q0, Q1, Q2, X0, X1, X2)
    gl.warp_specialize(
        [(sum_and_store, (slots, barriers, ones, (dy, x), result, bias, table, shape, extents,
                          (y_n, y_0, y_1, y_2, x_n, x_0, x_1, x_2), (r_split, r_k, r_c, r_0, r_1, r_2, b_split), images,
                          BIAS, PRODUCTS, ADD, FILL, TURNED, TILING, SEGMENTS, PARTS, AXIS, NT, CHAIN, ADVANCE,
                          UNITS, BOX, STEP, GEOMETRY, BP, YS, XS, WARPS)),
         (copy_dy, (dy_box, y_slots, y_full, y_empty, table, shape, extents, images, PRODUCTS, TILING, SEGMENTS, PARTS,
                    AXIS, CHAIN, GEOMETRY, BOX, STEP, YS, BP * BK * 2)),
         (copy_x, (x_box, x_slots, x_full, x_empty, table, shape, extents, images, PRODUCTS, TILING, SEGMENTS, PARTS,
                   AXIS, NT, CHAIN, ADVANCE, D, UNITS, GEOMETRY, BOX, STEP, XS,
                   (UNITS[0] * 8 if SHARED else BP) * CB * 2))],
        [1, 1], [24, 24])
