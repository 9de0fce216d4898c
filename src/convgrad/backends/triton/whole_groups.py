"""Weight gradients of groups of channels, in Gluon: a program holds the sums of all taps of a group, or of many.

So dy and x are copied once, or few times, whatever the taps. A product sums over 16 rows: 16 images at one position, or
with GAP = 2 eight images at two neighbouring positions. In shared memory a position of x is these images x CW channels,
and its 64 rows of sums are 64 // CW taps, each GAP positions after the other, from any position on. The copy engine
brings *lines*: S positions of dy with what their windows meet of x, zeros outside the image. Where there are rows, a
line is a row of some columns, and the rows of x that the next line needs as well stay in shared memory; problems with
one axis may be cut into lines that follow each other on it (ALONG), with x in pieces of as many positions. Two groups
of four warps share the taps.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment, attr-defined"
# ruff: noqa: RUF005
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .bands import next_slot
from .line_places import slot_after


@gluon.constexpr_function
def first_tap(tile, CW, GAP):
    """The first of the 64 // CW taps, GAP apart, of a tile."""
    return tile // GAP * (64 // CW) * GAP + tile % GAP


@gluon.constexpr_function
def products_of(line, FIRST, END, S, T2, COUNT, CW, GAP):
    """The products of a line: (first position of x, tile of taps, rows of dy), ordered by positions.

    A line (of channels and of the kernel) has COUNT tiles; those from FIRST to END are wanted.
    """
    return tuple(sorted((first_tap(tile % COUNT, CW, GAP) + q * T2 * GAP, tile - FIRST, q)
                        for tile in range(max(FIRST, line * COUNT), min(END, (line + 1) * COUNT))
                        for q in range(S // GAP)))


@gluon.constexpr_function
def met_by(products):
    """The positions of x that products begin with."""
    return tuple(sorted({unit for unit, _, _ in products}))


@gluon.jit
def place_of(at, steps, column_tiles, S: gl.constexpr, GAP: gl.constexpr):
    """First image, first column and line of a step."""
    tile = at // steps
    return (tile // column_tiles) * (16 // GAP), (tile % column_tiles) * S, at - tile * steps


@gluon.jit
def copy_lines(x_box, dy_box, slots, barriers, walk, group, tap, ALONG: gl.constexpr, T1: gl.constexpr,
               T2: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, ROWS: gl.constexpr, ADVANCE: gl.constexpr,
               UNITS: gl.constexpr, BLOCKS: gl.constexpr, S: gl.constexpr, GAP: gl.constexpr, CW: gl.constexpr,
               KG: gl.constexpr, KN: gl.constexpr, XS: gl.constexpr, DS: gl.constexpr):
    """The copying warp: ROWS rows (or pieces) of x at the start of a tile, then ADVANCE more with each line of dy."""
    x_slots, dy_slots = slots
    full, empty, dy_full, dy_empty = barriers
    begin, end, steps, column_tiles = walk
    slot = begin * 0
    round = begin * 0
    dy_slot = begin * 0
    dy_round = begin * 0
    for at in range(begin, end):
        a, column, line = place_of(at, steps, column_tiles, S, GAP)
        fresh = (at == begin) | (line == 0)
        for r in gl.static_range(ROWS):
            if (r >= ROWS - ADVANCE) | fresh:
                mbarrier.wait(empty.index(slot), round ^ 1)
                mbarrier.expect(full.index(slot), BLOCKS * UNITS * (16 // GAP) * CW * 2)
                for block in gl.static_range(BLOCKS):
                    target = x_slots.index((slot * BLOCKS + block) * UNITS)._reinterpret(
                        x_slots.dtype, x_box.block_shape, x_box.layout)
                    c = (group * BLOCKS + block) * CW
                    if ALONG:
                        tma.async_copy_global_to_shared(x_box, [0, (line + r) * UNITS + tap - P2, a, c],
                                                        full.index(slot), target)
                    else:
                        tma.async_copy_global_to_shared(x_box, [line * T1 + r - P1, column * T2 + tap - P2, a, c],
                                                        full.index(slot), target)
                slot, round = next_slot(slot, round, XS)
        mbarrier.wait(dy_empty.index(dy_slot), dy_round ^ 1)
        mbarrier.expect(dy_full.index(dy_slot), S * (16 // GAP) * KN * 2)
        target = dy_slots.index(dy_slot * S)._reinterpret(dy_slots.dtype, dy_box.block_shape, dy_box.layout)
        if ALONG:
            tma.async_copy_global_to_shared(dy_box, [0, line * S, a, group * KG], dy_full.index(dy_slot), target)
        else:
            tma.async_copy_global_to_shared(dy_box, [line, column, a, group * KG], dy_full.index(dy_slot), target)
        dy_slot, dy_round = next_slot(dy_slot, dy_round, DS)


@gluon.jit
def place_of_tile(tile, tap, row, K1: gl.constexpr, COUNT: gl.constexpr, CW: gl.constexpr, GAP: gl.constexpr):
    """Line of the kernel, tap of the last axis and channel of the rows of a tile (see first_tap)."""
    at = tile % COUNT
    first = at // GAP * (64 // CW * GAP) + at % GAP
    return tile // COUNT % K1, tap + first + row // CW * GAP, tile // (COUNT * K1) * CW + row % CW


@gluon.jit
def store_tile(value, out, place, k, r_steps, K2: gl.constexpr, KG: gl.constexpr):
    k1, tap_2, c = place
    _, _, r_c, r_1, r_2 = r_steps
    at = k1 * r_1 + tap_2.to(gl.int64) * r_2 + c * r_c
    gl.store(out + at[:, None], value.to(out.dtype.element_ty), mask=(tap_2 < K2)[:, None] & (k < KG))


@gluon.jit
def masked_sums(dy, x, walk, extents, y_steps, x_steps, group, place, ALONG: gl.constexpr, T1: gl.constexpr,
                T2: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, S: gl.constexpr, GAP: gl.constexpr,
                CG: gl.constexpr, KG: gl.constexpr, KN: gl.constexpr, layout: gl.constexpr):
    """The sums of a tile of taps again with a mask on every product: a zero may have met an infinite operand."""
    k1, tap_2, c = place
    begin, end, steps, column_tiles = walk
    N, Q1, Q2, X1, X2 = extents
    y_n, y_1, y_2 = y_steps
    x_n, x_1, x_2 = x_steps
    IMAGES: gl.constexpr = 16 // GAP
    k = gl.arange(0, KN, layout=gl.SliceLayout(0, layout))
    again = gl.full([64, KN], 0.0, gl.float32, layout)
    for at in range(begin, end):
        a, column, line = place_of(at, steps, column_tiles, S, GAP)
        for pixel in range(0, IMAGES * S):
            n = a + pixel % IMAGES
            if ALONG:
                o_1 = line * 0
                o_2 = line * S + pixel // IMAGES
            else:
                o_1 = line
                o_2 = column + pixel // IMAGES
            i_1 = o_1 * T1 + k1 - P1
            i_2 = o_2 * T2 + tap_2 - P2
            there = (n < N) & (o_1 < Q1) & (o_2 < Q2) & (i_1 >= 0) & (i_1 < X1)
            ok = there & (i_2 >= 0) & (i_2 < X2)
            from_x = n.to(gl.int64) * x_n + i_1.to(gl.int64) * x_1 + i_2.to(gl.int64) * x_2 + group * CG + c
            from_y = n.to(gl.int64) * y_n + o_1.to(gl.int64) * y_1 + o_2.to(gl.int64) * y_2 + group * KG + k
            left = gl.load(x + from_x, mask=ok, other=0.0).to(gl.float32)
            right = gl.load(dy + from_y, mask=there & (k < KG), other=0.0).to(gl.float32)
            again += gl.where(ok[:, None], left[:, None] * right[None, :], 0.0)
    return again


@gluon.jit
def waited(sums, OUTSTANDING: gl.constexpr):
    if len(sums) == 1:
        return (warpgroup_mma_wait(num_outstanding=OUTSTANDING, deps=sums),)
    else:
        return warpgroup_mma_wait(num_outstanding=OUTSTANDING, deps=sums)


@gluon.jit
def positions_of(x_slots, bases, block, k1: gl.constexpr, MET: gl.constexpr, ALONG: gl.constexpr, UNITS: gl.constexpr,
                 HELD: gl.constexpr, CW: gl.constexpr, layout: gl.constexpr):
    """Some positions of x, each the first of those that are the 64 rows of a product."""
    found = ()
    for n in gl.static_range(len(MET)):
        first = bases[MET[n] // UNITS if ALONG else k1] + block + MET[n] % UNITS
        rows = x_slots.index(first)._reinterpret(x_slots.dtype, [16, 64], gl.NVMMASharedLayout(2 * CW, 16, rank=2))
        rows = rows.permute([1, 0])
        if HELD:
            rows = rows.load(gl.DotOperandLayout(0, layout, 2))
        found = found + (rows,)
    return found


@gluon.jit
def pixels_of(dy_slots, unit, KN: gl.constexpr):
    """16 rows of dy: a position, or two."""
    return dy_slots.index(unit)._reinterpret(dy_slots.dtype, [16, KN], gl.NVMMASharedLayout(2 * KN, 16, rank=2))


@gluon.constexpr_function
def number_of(unit, MET):
    return MET.index(unit)


@gluon.jit
def add_products(sums, positions, dy_slots, first, PRODUCTS: gl.constexpr, MET: gl.constexpr, GAP: gl.constexpr,
                 KN: gl.constexpr):
    """Add the products of positions of x with those of dy that they meet."""
    for n in gl.static_range(len(PRODUCTS)):
        rows = positions[number_of(PRODUCTS[n][0], MET)]
        pixels = pixels_of(dy_slots, first + PRODUCTS[n][2] * GAP, KN)
        sums = sums[:PRODUCTS[n][1]] + (warpgroup_mma(rows, pixels, sums[PRODUCTS[n][1]], is_async=True),) \
            + sums[PRODUCTS[n][1] + 1:]
    return sums


@gluon.jit
def multiply_line(sums, x_slots, bases, block, dy_slots, first, k1: gl.constexpr, PRODUCTS: gl.constexpr,
                  ALONG: gl.constexpr, UNITS: gl.constexpr, HELD: gl.constexpr, GAP: gl.constexpr, CW: gl.constexpr,
                  KN: gl.constexpr, layout: gl.constexpr):
    MET: gl.constexpr = met_by(PRODUCTS)
    # all loads come before the first product: products wait for loads among them
    positions = positions_of(x_slots, bases, block, k1, MET, ALONG, UNITS, HELD, CW, layout)
    sums = add_products(sums, positions, dy_slots, first, PRODUCTS, MET, GAP, KN)
    if HELD:
        sums = waited(sums, 0)
    return sums


@gluon.jit
def sum_lines(slots, barriers, walk, pointers, extents, y_steps, x_steps, r_steps, group, tap, split, groups,
              HELD: gl.constexpr, BIAS: gl.constexpr, ALONG: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
              T1: gl.constexpr, T2: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, ROWS: gl.constexpr,
              ADVANCE: gl.constexpr, UNITS: gl.constexpr, BLOCKS: gl.constexpr, COUNT: gl.constexpr, S: gl.constexpr,
              GAP: gl.constexpr, CW: gl.constexpr, KG: gl.constexpr, KN: gl.constexpr, XS: gl.constexpr,
              DS: gl.constexpr, FIRST: gl.constexpr, END: gl.constexpr):
    """Multiplying warps: the tiles of taps from FIRST to END, and with BIAS the bias gradient.

    HELD: positions of x go to registers and are multiplied from there, so that shared memory is read less.
    """
    x_slots, dy_slots = slots
    full, empty, dy_full, dy_empty = barriers
    begin, end, steps, _ = walk
    dy, x, result, bias = pointers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KN, 16])
    zero = gl.full([64, KN], 0.0, gl.float32, layout)
    ones = gl.full([64, 16], 1.0, x_slots.dtype, gl.DotOperandLayout(0, layout, 2))
    sums = (zero,) * (END - FIRST + (1 if BIAS else 0))
    slot = begin * 0
    round = begin * 0
    dy_slot = begin * 0
    dy_round = begin * 0
    line = begin % steps
    for _ in range(begin, end):
        bases = ()  # of rows or pieces of x
        for r in gl.static_range(ROWS):
            row_slot, row_round = slot_after(slot, round, r, XS)
            mbarrier.wait(full.index(row_slot), row_round)
            bases = bases + (row_slot * (BLOCKS * UNITS),)
        mbarrier.wait(dy_full.index(dy_slot), dy_round)
        for j in gl.static_range(BLOCKS * K1):
            sums = multiply_line(sums, x_slots, bases, j // K1 * UNITS, dy_slots, dy_slot * S, j % K1,
                                 products_of(j, FIRST, END, S, T2, COUNT, CW, GAP), ALONG, UNITS, HELD, GAP, CW, KN,
                                 layout)
        if BIAS:
            for q in gl.static_range(S // GAP):
                sums = sums[:END - FIRST] + (warpgroup_mma(ones, pixels_of(dy_slots, dy_slot * S + q * GAP, KN),
                                                           sums[END - FIRST], is_async=True),)
        sums = waited(sums, 0)
        if HELD:
            fence_async_shared()  # loads that are under way are not ordered with what the copy engine writes
        line = gl.where(line == steps - 1, 0, line + 1)
        for r in gl.static_range(ROWS):
            row_slot, _round = slot_after(slot, round, r, XS)
            mbarrier.arrive(empty.index(row_slot), pred=(r < ADVANCE) | (line == 0))
        mbarrier.arrive(dy_empty.index(dy_slot))
        back = gl.where(line == 0, ROWS, ADVANCE)
        over = (slot + back >= XS).to(gl.int32)
        slot += back - over * XS
        round ^= over
        dy_slot, dy_round = next_slot(dy_slot, dy_round, DS)

    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    k = gl.arange(0, KN, layout=gl.SliceLayout(0, layout))[None, :]
    if BIAS:
        gl.store(bias + split.to(gl.int64) * (groups * KG) + group * KG + k + row[:, None], sums[END - FIRST],
                 mask=(row == 0)[:, None] & (k < KG))
    out = result + split.to(gl.int64) * r_steps[0] + (group * KG + k).to(gl.int64) * r_steps[1]
    bad = begin * 0
    for i in gl.static_range(END - FIRST):
        _, tap_2, _ = place_of_tile(FIRST + i, tap, row, K1, COUNT, CW, GAP)
        bad |= gl.max(gl.max(((tap_2 < K2)[:, None] & (k < KG) & (sums[i] != sums[i])).to(gl.int32), 1), 0)
    if bad != 0:
        for tile in range(FIRST, END):
            place = place_of_tile(tile, tap, row, K1, COUNT, CW, GAP)
            store_tile(masked_sums(dy, x, walk, extents, y_steps, x_steps, group, place, ALONG, T1, T2, P1, P2, S, GAP,
                                   BLOCKS * CW, KG, KN, layout), out, place, k, r_steps, K2, KG)
    else:
        for i in gl.static_range(END - FIRST):
            store_tile(sums[i], out, place_of_tile(FIRST + i, tap, row, K1, COUNT, CW, GAP), k, r_steps, K2, KG)


@gluon.jit
def group_weight_kernel(
        x_box, dy_box, dy, x, result, bias, N, Q1, Q2, X1, X2, column_tiles, steps, all_steps, run, groups,
        y_n, y_1, y_2, x_n, x_1, x_2, r_split, r_k, r_c, r_1, r_2,
        HELD: gl.constexpr, BIAS: gl.constexpr, ALONG: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        T1: gl.constexpr, T2: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, ROWS: gl.constexpr,
        UNITS: gl.constexpr, BLOCKS: gl.constexpr, COUNT: gl.constexpr, TAPS: gl.constexpr, S: gl.constexpr,
        GAP: gl.constexpr, CW: gl.constexpr, KG: gl.constexpr, KN: gl.constexpr, XS: gl.constexpr, DS: gl.constexpr,
        REGISTERS: gl.constexpr):
    """dw of TAPS columns of taps of one group for every run of lines, and with BIAS db."""
    dtype: gl.constexpr = dy.dtype.element_ty
    ADVANCE: gl.constexpr = 1 if ALONG else min(T1, ROWS)
    TILES: gl.constexpr = BLOCKS * K1 * COUNT
    HALF: gl.constexpr = (TILES + 1) // 2
    TAP_TILES: gl.constexpr = (K2 + TAPS - 1) // TAPS
    group = gl.program_id(0) % groups
    tap = gl.program_id(0) // groups % TAP_TILES * TAPS
    split = gl.program_id(0) // groups // TAP_TILES
    begin = split * run
    end = gl.minimum(begin + run, all_steps)
    slots = (gl.allocate_shared_memory(dtype, [XS * BLOCKS * UNITS, 16 // GAP, CW],
                                       gl.NVMMASharedLayout(2 * CW, 16, rank=2)),
             gl.allocate_shared_memory(dtype, [DS * S, 16 // GAP, KN], gl.NVMMASharedLayout(2 * KN, 16, rank=2)))
    full = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
    dy_full = gl.allocate_shared_memory(gl.int64, [DS, 1], mbarrier.MBarrierLayout())
    dy_empty = gl.allocate_shared_memory(gl.int64, [DS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(XS):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    for s in gl.static_range(DS):
        mbarrier.init(dy_full.index(s), count=1)
        mbarrier.init(dy_empty.index(s), count=2)
    barriers = (full, empty, dy_full, dy_empty)
    walk = (begin, end, steps, column_tiles)
    extents = (N, Q1, Q2, X1, X2)
    pointers = (dy, x, result, bias)
    r_steps = (r_split, r_k, r_c, r_1, r_2)
    gl.warp_specialize(
        [(sum_lines, (slots, barriers, walk, pointers, extents, (y_n, y_1, y_2), (x_n, x_1, x_2), r_steps, group, tap,
                      split, groups, HELD, False, ALONG, K1, K2, T1, T2, P1, P2, ROWS, ADVANCE, UNITS, BLOCKS, COUNT, S,
                      GAP, CW, KG, KN, XS, DS, 0, HALF)),
         (sum_lines, (slots, barriers, walk, pointers, extents, (y_n, y_1, y_2), (x_n, x_1, x_2), r_steps, group, tap,
                      split, groups, HELD, BIAS, ALONG, K1, K2, T1, T2, P1, P2, ROWS, ADVANCE, UNITS, BLOCKS, COUNT, S,
                      GAP, CW, KG, KN, XS, DS, HALF, TILES)),
         (copy_lines, (x_box, dy_box, slots, barriers, walk, group, tap, ALONG, T1, T2, P1, P2, ROWS, ADVANCE, UNITS,
                       BLOCKS, S, GAP, CW, KG, KN, XS, DS))],
        [4, 1], [REGISTERS, 24])
