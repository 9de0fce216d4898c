"""Output and input gradient on boxes of positions: two warps copy, the others multiply and store; written in Gluon.

A program takes tile after tile: BM positions (a box) x BN channels, summed over taps and channels. One warp copies
boxes of the source, one warp boxes of the weight, each into its own ring of slots in shared memory; the copies' zero
fill is the padding. The tensor cores read both operands from there, for one or two groups of four warps (HALVES), each
with its rows of the tile: while one stores, the other multiplies, and the next tile is copied.

Taps that follow each other on one axis (`AXIS`) can share one source box with NT - 1 taps' more lines: tap t multiplies
the rows that begin t lines later. `boxes.py` has the same sums in plain Triton.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .box_masked import masked_tile
from .box_places import any_nan, next_slot, result_columns, result_rows, rows_of_tap, slot_of, source_of, work_of
from .fp8_products import add_narrow, decoded, halves
from .line_places import wrapped
from .part_products import begin_products, end_products, split_rows
from .stored import as_stored


@gluon.jit
def copy_source(source_box, slots, full, empty, items, whole, counts, source_extents, GEOMETRY: gl.constexpr,
                SHAPE: gl.constexpr, AXIS: gl.constexpr, NT: gl.constexpr, RED: gl.constexpr, CB: gl.constexpr,
                PARTS: gl.constexpr, UNITS: gl.constexpr, SLOTS: gl.constexpr, BYTES: gl.constexpr):
    """The warp that copies boxes of the source, in the order in which `sum_tiles` reads them."""
    K, T, D, _P, G, INPUT = GEOMETRY
    DEPTH_STEPS: gl.constexpr = (RED + CB - 1) // CB
    LOWEST: gl.constexpr = NT - 1 if INPUT else 0  # slot whose source line is the first of a shared box
    slot = items * 0
    round = items * 0  # how often all slots were filled, modulo 2
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        place, outer, begin, end = work_of(item, whole, counts, source_extents, GEOMETRY, SHAPE, AXIS, DEPTH_STEPS,
                                           PARTS)
        _column, start, group, axis0, axis1, axis2 = place
        m0, m1, m2, depth = slot_of(begin, outer, DEPTH_STEPS)
        for _step in range(begin, end):
            i0 = source_of(start[1], axis0, LOWEST if AXIS == 0 else m0, K[0], T[0], D[0], G[0], INPUT)[0]
            i1 = source_of(start[2], axis1, LOWEST if AXIS == 1 else m1, K[1], T[1], D[1], G[1], INPUT)[0]
            i2 = source_of(start[3], axis2, LOWEST if AXIS == 2 else m2, K[2], T[2], D[2], G[2], INPUT)[0]
            mbarrier.wait(empty.index(slot), round ^ 1)
            mbarrier.expect(full.index(slot), BYTES)
            box = slots.index(slot * UNITS)._reinterpret(slots.dtype, [1, 1, 1, 8, CB], source_box.layout)
            tma.async_copy_global_to_shared(source_box, [start[0], i0, i1, i2, group * RED + depth * CB],
                                            full.index(slot), box)
            slot, carry = wrapped(slot, 1, SLOTS)
            round ^= carry
            m0, m1, m2, depth = next_slot(m0, m1, m2, depth, outer, DEPTH_STEPS)


@gluon.jit
def copy_weight(weight_box, slots, full, empty, items, whole, counts, source_extents, GEOMETRY: gl.constexpr,
                SHAPE: gl.constexpr, AXIS: gl.constexpr, NT: gl.constexpr, RED: gl.constexpr, COL: gl.constexpr,
                WEIGHT_RED: gl.constexpr, WEIGHT_COL: gl.constexpr, TURNED: gl.constexpr, PIECES: gl.constexpr,
                PIECE_ROWS: gl.constexpr, CB: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
                BYTES: gl.constexpr):
    """The warp that copies boxes of the weight: one for every tap and step of channels, of a weight in PIECES each."""
    K, T, D, _P, G, INPUT = GEOMETRY
    DEPTH_STEPS: gl.constexpr = (RED + CB - 1) // CB
    slot = items * 0
    round = items * 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        place, outer, begin, end = work_of(item, whole, counts, source_extents, GEOMETRY, SHAPE, AXIS, DEPTH_STEPS,
                                           PARTS)
        column, _start, group, axis0, axis1, axis2 = place
        m0, m1, m2, depth = slot_of(begin, outer, DEPTH_STEPS)
        for _step in range(begin, end):
            c = depth * CB
            for t in gl.static_range(NT):
                tap0 = source_of(0, axis0, t if AXIS == 0 else m0, K[0], T[0], D[0], G[0], INPUT)[1]
                tap1 = source_of(0, axis1, t if AXIS == 1 else m1, K[1], T[1], D[1], G[1], INPUT)[1]
                tap2 = source_of(0, axis2, t if AXIS == 2 else m2, K[2], T[2], D[2], G[2], INPUT)[1]
                tap = (tap0 * K[1] + tap1) * K[2] + tap2
                mbarrier.wait(empty.index(slot), round ^ 1)
                mbarrier.expect(full.index(slot), BYTES)
                for piece in gl.static_range(PIECES):
                    box = slots.index(slot * PIECES + piece)
                    first = piece * PIECE_ROWS
                    if TURNED:
                        at_input = tap * WEIGHT_COL + column if INPUT else tap * RED + c
                        at_output = group * RED + c if INPUT else group * COL + column
                        tma.async_copy_global_to_shared(weight_box, [at_input, at_output], full.index(slot), box)
                    elif INPUT and not weight_box.dtype.is_fp8():
                        tma.async_copy_global_to_shared(
                            weight_box, [first + group * WEIGHT_RED + c, tap * WEIGHT_COL + column], full.index(slot),
                            box)
                    else:
                        tma.async_copy_global_to_shared(
                            weight_box, [first + group * COL + column, tap * WEIGHT_RED + c], full.index(slot), box)
                slot, carry = wrapped(slot, 1, SLOTS)
                round ^= carry
            m0, m1, m2, depth = next_slot(m0, m1, m2, depth, outer, DEPTH_STEPS)


@gluon.jit
def chunks_of(value, CHUNK: gl.constexpr):
    """The columns of a tile of sums, CHUNK at a time."""
    if value.shape[1] > CHUNK:
        HALF: gl.constexpr = value.shape[1] // 2
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        left, right = halves(value, layout)
        return chunks_of(left, CHUNK) + chunks_of(right, CHUNK)
    else:
        return (value,)


@gluon.jit
def store_tile(acc, out_slots, result_box, pointers, place, extents, result_steps, SHAPE: gl.constexpr,
               STRIDE: gl.constexpr, ROWS: gl.constexpr, INPUT: gl.constexpr, PATCH: gl.constexpr, COL: gl.constexpr,
               HALF: gl.constexpr, BESIDE: gl.constexpr, OS: gl.constexpr, CHUNK: gl.constexpr,
               STORE: gl.constexpr):
    """The sums of a tile's half through shared memory to the result.

    STORE: "box", by copies of boxes; "rows", the channels of a row together; "columns", where positions are neighbours
    in memory, a thread a row and a warp 32 of them. BESIDE: how far the second half's box lies from the first one's.
    """
    column, start, group, axis0, axis1, axis2 = place
    _source, _weight, result, _parts, scales = pointers
    HM: gl.constexpr = acc.shape[0]
    PER: gl.constexpr = 128 // result.dtype.element_ty.primitive_bitwidth  # elements a thread stores at once
    flat: gl.constexpr = gl.BlockedLayout([1, PER], [32, 1], [4, 1], [1, 0]) if STORE == "columns" else \
        gl.BlockedLayout([1, PER], [32 * PER // CHUNK, CHUNK // PER], [4, 1], [1, 0])
    chunks = chunks_of(as_stored(acc, result, scales), CHUNK)
    for i in gl.static_range(len(chunks)):
        out = out_slots.index(HALF * OS + i % OS)
        if STORE == "box":
            tma.store_wait(pendings=OS - 1)  # the box stored from this slot before
        gl.thread_barrier()
        out.store(chunks[i])
        if STORE == "box":
            fence_async_shared()
            gl.thread_barrier()
            i0 = start[1] + HALF * BESIDE[1]
            i1 = start[2] + HALF * BESIDE[2]
            i2 = start[3] + HALF * BESIDE[3]
            if INPUT:
                i0 = i0 * STRIDE[0] + axis0[0]
                i1 = i1 * STRIDE[1] + axis1[0]
                i2 = i2 * STRIDE[2] + axis2[0]
            tma.async_copy_shared_to_global(
                result_box, [start[0] + HALF * BESIDE[0], i0, i1, i2, group * COL + column + i * CHUNK],
                out._reinterpret(out.dtype, [1, 1, 1, 8, CHUNK], result_box.layout))
        else:
            gl.thread_barrier()
            where, there = result_rows(start, HALF * HM, (axis0[0], axis1[0], axis2[0]), extents, result_steps,
                                       SHAPE[0], ROWS, STRIDE, INPUT, HM, gl.SliceLayout(1, flat))
            beside, column_there = result_columns(column + i * CHUNK, group, result_steps, STRIDE, COL, PATCH, CHUNK,
                                                  gl.SliceLayout(0, flat))
            if STORE == "columns":
                beside = beside * result_steps[4]
            gl.store(result + where[:, None] + beside[None, :], out.load(flat),
                     mask=there[:, None] & column_there[None, :])


@gluon.jit
def as_operand(rows, layout: gl.constexpr):
    """Rows from shared memory in registers as products take them: FP8 as 16-bit numbers, float32 in three parts."""
    if rows.dtype == gl.float32:
        return split_rows(rows, layout)
    else:
        return decoded(rows, layout)


@gluon.jit
def sum_tiles(HALF: gl.constexpr, HALVES: gl.constexpr, source_slots, weight_slots, out_slots, barriers, result_box,
              pointers, items, whole, counts, extents, source_extents, source_steps, weight_steps, result_steps,
              GEOMETRY: gl.constexpr, SHAPE: gl.constexpr, STRIDE: gl.constexpr, ROWS: gl.constexpr,
              PATCH: gl.constexpr, AXIS: gl.constexpr, NT: gl.constexpr, RED: gl.constexpr, COL: gl.constexpr,
              TURNED: gl.constexpr, JOINED: gl.constexpr, PARTS: gl.constexpr, UNITS: gl.constexpr,
              LINE_UNITS: gl.constexpr, BESIDE: gl.constexpr, BM: gl.constexpr, CB: gl.constexpr,
              SS: gl.constexpr, WS: gl.constexpr, OS: gl.constexpr, CHUNK: gl.constexpr, STORE: gl.constexpr):
    """Four multiplying warps: the sums of their rows of tile after tile, and their way to the result."""
    source_full, source_empty, weight_full, weight_empty = barriers
    INPUT: gl.constexpr = GEOMETRY[5]
    BN: gl.constexpr = SHAPE[1]
    HM: gl.constexpr = BM // HALVES
    DEPTH_STEPS: gl.constexpr = (RED + CB - 1) // CB
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1],
                                                     [16, BN, 256 // weight_slots.dtype.primitive_bitwidth])
    NARROW: gl.constexpr = weight_slots.dtype.is_fp8()  # products of FP8 numbers, whose sums keep few bits
    DECODE: gl.constexpr = source_slots.dtype != weight_slots.dtype  # numbers become 16-bit ones on their way
    PIECES: gl.constexpr = 3 if source_slots.dtype == gl.float32 else 1  # float32 numbers three of them
    # How many taps have sums of their own before these are added in float32: tensor cores cut off what does not fit
    # beside a large sum. Their rows, in parts, and those of the next one must fit into registers.
    TOGETHER: gl.constexpr = NT if BN <= 64 and NT <= 3 else 1
    UNROLLED: gl.constexpr = 1 if NARROW else NT  # two tiles of sums leave no registers for more
    PLACE: gl.constexpr = (UNITS, LINE_UNITS, HALF, HM, CB, NT - 1 if INPUT else 0)
    source_slot = items * 0
    source_round = items * 0
    weight_slot = items * 0
    weight_round = items * 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        work = work_of(item, whole, counts, source_extents, GEOMETRY, SHAPE, AXIS, DEPTH_STEPS,
                                           PARTS)
        place, _outer, begin, end = work
        acc = gl.full([HM, BN], 0.0, gl.float32, layout)
        # NOTE: two names of one value would not both be carried through the loop
        source_before = source_slot + 0
        weight_before = weight_slot + 0
        if DECODE:
            mbarrier.wait(source_full.index(source_slot), source_round, pred=end > begin)
            left = as_operand(rows_of_tap(source_slots, source_slot, 0, PLACE), layout)
        for step in range(begin, end):
            mbarrier.wait(source_full.index(source_slot), source_round)
            for t_loop in range(NT // UNROLLED):
                for t_static in gl.static_range(UNROLLED):
                    t = t_loop + t_static
                    if NT > 1:  # otherwise one barrier stands for a slot of both
                        mbarrier.wait(weight_full.index(weight_slot), weight_round)
                    a = rows_of_tap(source_slots, source_slot, t, PLACE)
                    b = weight_slots.index(weight_slot * PIECES)
                    if INPUT == TURNED and not NARROW:
                        b = b.permute([1, 0])
                    if NARROW:
                        acc = add_narrow(acc, a, b, layout)
                    elif DECODE:  # the next rows are decoded while the products of these run
                        if PIECES == 3:
                            middle = weight_slots.index(weight_slot * PIECES + 1)
                            low = weight_slots.index(weight_slot * PIECES + 2)
                            if INPUT == TURNED:
                                middle = middle.permute([1, 0])
                                low = low.permute([1, 0])
                            if t_static % TOGETHER == 0:
                                held = left
                                sums = gl.full([HM, BN], 0.0, gl.float32, layout)
                            else:
                                held = held + left
                            sums = begin_products(sums, left, b, middle, low, t_static % TOGETHER == 0)
                        else:
                            acc = warpgroup_mma(left, b, acc, is_async=True)
                        if t_static + 1 < NT:
                            left = as_operand(rows_of_tap(source_slots, source_slot, t_static + 1, PLACE), layout)
                        else:  # after the last step the same rows once more
                            ahead, carry = wrapped(source_slot, (step + 1 < end).to(gl.int32), SS)
                            mbarrier.wait(source_full.index(ahead), source_round ^ carry)
                            left = as_operand(rows_of_tap(source_slots, ahead, 0, PLACE), layout)
                        if PIECES == 1:
                            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                        elif t_static % TOGETHER == TOGETHER - 1:
                            sums, left = end_products(sums, held, left)
                            acc += sums
                    else:
                        acc = warpgroup_mma(a, b, acc, is_async=True)
                        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                    if PIECES == 3 and TOGETHER > 1:
                        if t_static == TOGETHER - 1:
                            for back in gl.static_range(TOGETHER):
                                used = weight_slot - back
                                mbarrier.arrive(weight_empty.index(gl.where(used < 0, used + WS, used)))
                    elif NARROW or DECODE:
                        if NT > 1:
                            mbarrier.arrive(weight_empty.index(weight_slot))
                    else:  # the products before these are finished: their slots are free
                        if NT > 1:
                            mbarrier.arrive(weight_empty.index(weight_before), pred=(step > begin) | (t > 0))
                        if t_static == 0:
                            mbarrier.arrive(source_empty.index(source_before), pred=step > begin)
                        weight_before = weight_slot
                    weight_slot, carry = wrapped(weight_slot, 1, WS)
                    weight_round ^= carry
            if NARROW or DECODE:
                mbarrier.arrive(source_empty.index(source_slot))
            else:
                source_before = source_slot
            source_slot, carry = wrapped(source_slot, 1, SS)
            source_round ^= carry
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        if not (NARROW or DECODE):
            if NT > 1:
                mbarrier.arrive(weight_empty.index(weight_before), pred=end > begin)
            mbarrier.arrive(source_empty.index(source_before), pred=end > begin)
        parts_at = (item - whole) * (BM * BN)
        if any_nan(acc):
            masked_tile(pointers, item >= whole, parts_at, items * 0 + HALF * HM, work, extents, source_extents,
                        source_steps, weight_steps, result_steps, GEOMETRY, SHAPE, STRIDE, ROWS, PATCH, AXIS, NT, RED,
                        COL, JOINED, PARTS, HM, CB)
        elif PARTS == 1:
            store_tile(acc, out_slots, result_box, pointers, place, extents, result_steps, SHAPE, STRIDE, ROWS,
                       INPUT, PATCH, COL, HALF, BESIDE, OS, CHUNK, STORE)
        else:
            if item < whole:
                store_tile(acc, out_slots, result_box, pointers, place, extents, result_steps, SHAPE, STRIDE, ROWS,
                           INPUT, PATCH, COL, HALF, BESIDE, OS, CHUNK, STORE)
            else:
                at_row = parts_at + (HALF * HM + gl.arange(0, HM, layout=gl.SliceLayout(1, layout))) * BN
                at_column = gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
                gl.store(pointers[3] + at_row[:, None] + at_column[None, :], acc)
    if STORE == "box":
        tma.store_wait(pendings=0)


@gluon.jit
def box_lines_kernel(
        source_box, weight_box, result_box, source, weight, result, parts, first, second, own,
        items, whole, N, S0, S1, S2, R0, R1, R2, boxes_n, boxes_0, boxes_1, boxes_2, turn,
        s_n, s_0, s_1, s_2, w_o, w_i, w_0, w_1, w_2, rn, r0, r1, r2, rc,
        RALIGN: gl.constexpr,
        K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        T0: gl.constexpr, T1: gl.constexpr, T2: gl.constexpr,
        D0: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr,
        P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
        G0: gl.constexpr, G1: gl.constexpr, G2: gl.constexpr,
        RED: gl.constexpr, COL: gl.constexpr, WEIGHT_RED: gl.constexpr, WEIGHT_COL: gl.constexpr,
        TURNED: gl.constexpr, PIECE_ROWS: gl.constexpr, JOINED: gl.constexpr, INPUT: gl.constexpr, PATCH: gl.constexpr,
        PN: gl.constexpr, B0: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr,
        AXIS: gl.constexpr, NT: gl.constexpr, PARTS: gl.constexpr, UNITS: gl.constexpr, LINE_UNITS: gl.constexpr,
        SOURCE_BYTES: gl.constexpr, HN: gl.constexpr, H0: gl.constexpr, H1: gl.constexpr, H2: gl.constexpr,
        BM: gl.constexpr, BN: gl.constexpr, CB: gl.constexpr, SS: gl.constexpr, WS: gl.constexpr, OS: gl.constexpr,
        CHUNK: gl.constexpr, STORE: gl.constexpr, HALVES: gl.constexpr):
    """UNITS of 8 rows make a slot of the source, LINE_UNITS the distance of two taps that share a box.

    The weight lies as rows of (tap, input channel), one for each output channel, or TURNED. A group has WEIGHT_RED of
    the channels that are summed over there, zeros behind its own.

    PATCH: windows lie side by side. Columns are all (tap, channel) pairs, and there is one slot, whatever the stride.
    FP8 numbers of the source meet a copy of the weight (`weight_box`): 16-bit numbers, or, for products in FP8, rows of
    the channels summed over; `weight` is as it was given.
    Of float32 the weight is a copy in three parts, PIECE_ROWS rows each (see parts.py).
    JOINED: how many groups' weights are the diagonal of the weight.
    Tiles from `whole` on are summed in PARTS parts, which go to `parts` and are added by `add_box_parts_kernel`.
    `first`, `second` and `own` are the scales of a scaled problem (see stored.py), None otherwise.
    """
    ROWS: gl.constexpr = PN * B0 * B1 * B2
    BESIDE: gl.constexpr = (HN, H0, H1, H2)
    STRIDE: gl.constexpr = (T0, T1, T2)
    dtype: gl.constexpr = source.dtype.element_ty
    out_type: gl.constexpr = result.dtype.element_ty
    ONE: gl.constexpr = (1, 1, 1)
    GEOMETRY: gl.constexpr = (ONE, ONE, ONE, (0, 0, 0), ONE, INPUT) if PATCH else (
        (K0, K1, K2), (T0, T1, T2), (D0, D1, D2), (P0, P1, P2), (G0, G1, G2), INPUT)
    SHAPE: gl.constexpr = ((PN, B0, B1, B2), BN, ((COL * K0 * K1 * K2 if PATCH else COL) + BN - 1) // BN)
    source_layout: gl.constexpr = gl.NVMMASharedLayout(source_box.layout.swizzle_byte_width, dtype.primitive_bitwidth,
                                                       rank=2)
    out_layout: gl.constexpr = gl.NVMMASharedLayout(CHUNK * out_type.primitive_bitwidth // 8,
                                                    out_type.primitive_bitwidth, rank=2)
    source_slots = gl.allocate_shared_memory(dtype, [SS * UNITS, 8, CB], source_layout)
    PIECES: gl.constexpr = 3 if dtype == gl.float32 else 1
    WEIGHT_BYTES: gl.constexpr = PIECES * CB * BN * weight_box.dtype.primitive_bitwidth // 8
    if INPUT == TURNED or weight_box.dtype.is_fp8():
        weight_slots = gl.allocate_shared_memory(weight_box.dtype, [WS * PIECES, BN, CB], weight_box.layout)
    else:
        weight_slots = gl.allocate_shared_memory(weight_box.dtype, [WS * PIECES, CB, BN], weight_box.layout)
    out_slots = gl.allocate_shared_memory(out_type, [HALVES * OS, BM // HALVES, CHUNK], out_layout)
    source_full = gl.allocate_shared_memory(gl.int64, [SS, 1], mbarrier.MBarrierLayout())
    source_empty = gl.allocate_shared_memory(gl.int64, [SS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SS):
        mbarrier.init(source_full.index(i), count=1 if NT > 1 else 2)
        mbarrier.init(source_empty.index(i), count=HALVES)
    if NT > 1:
        weight_full = gl.allocate_shared_memory(gl.int64, [WS, 1], mbarrier.MBarrierLayout())
        weight_empty = gl.allocate_shared_memory(gl.int64, [WS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(WS):
            mbarrier.init(weight_full.index(i), count=1)
            mbarrier.init(weight_empty.index(i), count=HALVES)
    else:  # slots of both are filled and emptied together: two waits took longer than the products of a small tile
        gl.static_assert(SS == WS)
        weight_full = source_full
        weight_empty = source_empty
    if ROWS < BM:  # rows that no copy writes
        fill: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // CB, CB // 8], [1, 4], [1, 0])
        for i in range(0, SS * UNITS):
            source_slots.index(i).store(gl.full([8, CB], 0.0, dtype, fill))
        fence_async_shared()
        gl.thread_barrier()
    counts = (boxes_n, boxes_0, boxes_1, boxes_2, turn)
    barriers = (source_full, source_empty, weight_full, weight_empty)
    tensors = (source, weight, result, parts, (first, second, own))
    extents = (N, R0, R1, R2)
    source_extents = (S0, S1, S2)
    source_steps = (s_n, s_0, s_1, s_2)
    weight_steps = (w_o, w_i, w_0, w_1, w_2)
    result_steps = (rn * RALIGN, r0 * RALIGN, r1 * RALIGN, r2 * RALIGN, rc)
    if HALVES == 2:
        gl.warp_specialize(
            [(sum_tiles, (0, 2, source_slots, weight_slots, out_slots, barriers, result_box, tensors, items, whole,
                          counts, extents, source_extents, source_steps, weight_steps, result_steps, GEOMETRY, SHAPE,
                          STRIDE, ROWS, PATCH, AXIS, NT, RED, COL, TURNED, JOINED, PARTS, UNITS, LINE_UNITS, BESIDE, BM,
                          CB, SS, WS, OS, CHUNK, STORE)),
             (sum_tiles, (1, 2, source_slots, weight_slots, out_slots, barriers, result_box, tensors, items, whole,
                          counts, extents, source_extents, source_steps, weight_steps, result_steps, GEOMETRY, SHAPE,
                          STRIDE, ROWS, PATCH, AXIS, NT, RED, COL, TURNED, JOINED, PARTS, UNITS, LINE_UNITS, BESIDE, BM,
                          CB, SS, WS, OS, CHUNK, STORE)),
             (copy_source, (source_box, source_slots, source_full, source_empty, items, whole, counts, source_extents,
                            GEOMETRY, SHAPE, AXIS, NT, RED, CB, PARTS, UNITS, SS, SOURCE_BYTES)),
             (copy_weight, (weight_box, weight_slots, weight_full, weight_empty, items, whole, counts, source_extents,
                            GEOMETRY, SHAPE, AXIS, NT, RED, COL, WEIGHT_RED, WEIGHT_COL, TURNED, PIECES, PIECE_ROWS,
                            CB, PARTS, WS, WEIGHT_BYTES))],
            [4, 1, 1], [240, 24, 24])
    else:
        gl.warp_specialize(
            [(sum_tiles, (0, 1, source_slots, weight_slots, out_slots, barriers, result_box, tensors, items, whole,
                          counts, extents, source_extents, source_steps, weight_steps, result_steps, GEOMETRY, SHAPE,
                          STRIDE, ROWS, PATCH, AXIS, NT, RED, COL, TURNED, JOINED, PARTS, UNITS, LINE_UNITS, BESIDE, BM,
                          CB, SS, WS, OS, CHUNK, STORE)),
             (copy_source, (source_box, source_slots, source_full, source_empty, items, whole, counts, source_extents,
                            GEOMETRY, SHAPE, AXIS, NT, RED, CB, PARTS, UNITS, SS, SOURCE_BYTES)),
             (copy_weight, (weight_box, weight_slots, weight_full, weight_empty, items, whole, counts, source_extents,
                            GEOMETRY, SHAPE, AXIS, NT, RED, COL, WEIGHT_RED, WEIGHT_COL, TURNED, PIECES, PIECE_ROWS,
                            CB, PARTS, WS, WEIGHT_BYTES))],
            [1, 1], [24, 24])
