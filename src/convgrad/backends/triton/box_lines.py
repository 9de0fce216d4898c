"""Output and input gradient on boxes of positions: two warps copy, the others multiply and store; written in Gluon.

A program takes tile after tile: BM positions (a box) x BN channels, summed over taps and channels. One warp copies boxes
of the source, one warp boxes of the weight, each into its own ring of slots in shared memory; the copies' zero fill is
the padding. The tensor cores read both operands from there. While a tile is stored, the next one is being copied.

Taps that follow each other on one axis (`AXIS`) can share one source box with NT - 1 taps' more lines: tap t multiplies
the rows that begin t lines later. `boxes.py` has the same sums in plain Triton.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .weight_lines import any_nan, wrapped


@gluon.jit
def phase_of(order, K: gl.constexpr, T: gl.constexpr, D: gl.constexpr, P: gl.constexpr, G: gl.constexpr,
             INPUT: gl.constexpr):
    """One phase of an axis, those with the most taps first: its residue, first tap, number of slots, source shift.

    The taps k of a phase have k*D = phase + P (mod T): every (T/G)-th, where there are any.
    """
    if not INPUT:
        return order * 0, order * 0, order * 0 + K, order * 0 - P
    elif T == 1:
        return order * 0, order * 0, order * 0 + K, order * 0 + P
    else:
        STEP: gl.constexpr = T // G
        first = order % STEP
        phase = (first * D + order // STEP + (T - P % T)) % T
        slots = gl.where((order < STEP) & (first < K), (K - first + STEP - 1) // STEP, 0)
        return phase, first, slots, (phase + P - first * D) // T


@gluon.jit
def place_of(tile, counts, GEOMETRY: gl.constexpr, BOX: gl.constexpr, INPUT: gl.constexpr, COLUMN_TILES: gl.constexpr,
             GROUPS: gl.constexpr, BN: gl.constexpr):
    """Where a tile lies: first column, first position of its box, group, and (phase, first tap, slots, shift) per axis.

    Column tiles are neighbours, so that they find the same source in the cache; phases with the most taps come first.
    """
    boxes_n, boxes_0, boxes_1, boxes_2 = counts
    K, T, D, P, G = GEOMETRY
    column = (tile % COLUMN_TILES) * BN
    rest = tile // COLUMN_TILES
    j2 = (rest % boxes_2) * BOX[3]
    rest = rest // boxes_2
    j1 = (rest % boxes_1) * BOX[2]
    rest = rest // boxes_1
    j0 = (rest % boxes_0) * BOX[1]
    rest = rest // boxes_0
    n = (rest % boxes_n) * BOX[0]
    rest = rest // boxes_n
    group = rest % GROUPS
    rest = rest // GROUPS
    axis2 = phase_of(rest % T[2], K[2], T[2], D[2], P[2], G[2], INPUT)
    axis1 = phase_of((rest // T[2]) % T[1], K[1], T[1], D[1], P[1], G[1], INPUT)
    axis0 = phase_of(rest // (T[2] * T[1]), K[0], T[0], D[0], P[0], G[0], INPUT)
    return column, (n, j0, j1, j2), group, axis0, axis1, axis2


@gluon.jit
def outer_slots(axis0, axis1, axis2, AXIS: gl.constexpr):
    """Number of slots per axis, 1 on the axis whose taps share a box."""
    return (1 if AXIS == 0 else axis0[2]), (1 if AXIS == 1 else axis1[2]), (1 if AXIS == 2 else axis2[2])


@gluon.jit
def copy_source(source_box, slots, full, empty, tiles, counts, GEOMETRY: gl.constexpr, BOX: gl.constexpr,
                INPUT: gl.constexpr, COLUMN_TILES: gl.constexpr, GROUPS: gl.constexpr, BN: gl.constexpr,
                RED: gl.constexpr, CB: gl.constexpr, AXIS: gl.constexpr, NT: gl.constexpr, UNITS: gl.constexpr,
                SLOTS: gl.constexpr, BYTES: gl.constexpr):
    """The warp that copies boxes of the source, in the order in which `sum_tiles` reads them."""
    K, T, D, P, G = GEOMETRY
    slot = tiles * 0
    round = tiles * 0  # how often all slots were filled, modulo 2
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        column, start, group, axis0, axis1, axis2 = place_of(tile, counts, GEOMETRY, BOX, INPUT, COLUMN_TILES, GROUPS,
                                                             BN)
        n, j0, j1, j2 = start
        outer0, outer1, outer2 = outer_slots(axis0, axis1, axis2, AXIS)
        for outer in range(0, outer0 * outer1 * outer2):
            m2 = outer % outer2
            m1 = (outer // outer2) % outer1
            m0 = outer // (outer2 * outer1)
            first = group * RED
            if INPUT:  # a shared box begins where its last tap reads
                i0 = j0 + axis0[3] - (NT - 1 if AXIS == 0 else m0) * (D[0] // G[0])
                i1 = j1 + axis1[3] - (NT - 1 if AXIS == 1 else m1) * (D[1] // G[1])
                i2 = j2 + axis2[3] - (NT - 1 if AXIS == 2 else m2) * (D[2] // G[2])
            else:
                reach = m2 * D[2] - P[2] + T[2] * P[2]
                i0 = j0 * T[0] + (0 if AXIS == 0 else m0) * D[0] - P[0]
                i1 = j1 * T[1] + (0 if AXIS == 1 else m1) * D[1] - P[1]
                i2 = j2 + reach // T[2] - P[2]
                first += (reach % T[2]) * (RED * GROUPS)  # `stride` neighbours of the last axis are seen as channels
            for c in range(0, RED, CB):
                mbarrier.wait(empty.index(slot), round ^ 1)
                mbarrier.expect(full.index(slot), BYTES)
                box = slots.index(slot * UNITS)._reinterpret(slots.dtype, [1, 1, 1, 8, CB], source_box.layout)
                tma.async_copy_global_to_shared(source_box, [n, i0, i1, i2, first + c], full.index(slot), box)
                slot, carry = wrapped(slot, 1, SLOTS)
                round ^= carry


@gluon.jit
def copy_weight(weight_box, slots, full, empty, tiles, counts, GEOMETRY: gl.constexpr, BOX: gl.constexpr,
                INPUT: gl.constexpr, COLUMN_TILES: gl.constexpr, GROUPS: gl.constexpr, BN: gl.constexpr,
                RED: gl.constexpr, COL: gl.constexpr, CB: gl.constexpr, AXIS: gl.constexpr, NT: gl.constexpr,
                SLOTS: gl.constexpr, BYTES: gl.constexpr):
    """The warp that copies boxes of the weight: one for every tap and step of channels."""
    K, T, D, P, G = GEOMETRY
    slot = tiles * 0
    round = tiles * 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        column, start, group, axis0, axis1, axis2 = place_of(tile, counts, GEOMETRY, BOX, INPUT, COLUMN_TILES, GROUPS,
                                                             BN)
        outer0, outer1, outer2 = outer_slots(axis0, axis1, axis2, AXIS)
        for outer in range(0, outer0 * outer1 * outer2):
            m2 = outer % outer2
            m1 = (outer // outer2) % outer1
            m0 = outer // (outer2 * outer1)
            for c in range(0, RED, CB):
                for t in gl.static_range(NT):
                    tap0 = axis0[1] + (t if AXIS == 0 else m0) * (T[0] // G[0] if INPUT else 1)
                    tap1 = axis1[1] + (t if AXIS == 1 else m1) * (T[1] // G[1] if INPUT else 1)
                    tap2 = axis2[1] + (t if AXIS == 2 else m2) * (T[2] // G[2] if INPUT else 1)
                    tap = (tap0 * K[1] + tap1) * K[2] + tap2
                    mbarrier.wait(empty.index(slot), round ^ 1)
                    mbarrier.expect(full.index(slot), BYTES)
                    if INPUT:
                        tma.async_copy_global_to_shared(weight_box, [group * RED + c, tap * COL + column],
                                                        full.index(slot), slots.index(slot))
                    else:
                        tma.async_copy_global_to_shared(weight_box, [group * COL + column, tap * RED + c],
                                                        full.index(slot), slots.index(slot))
                    slot, carry = wrapped(slot, 1, SLOTS)
                    round ^= carry


@gluon.jit
def result_rows(start, first_row, phases, extents, steps, BOX: gl.constexpr, ROWS: gl.constexpr, STRIDE: gl.constexpr,
                INPUT: gl.constexpr, COUNT: gl.constexpr, layout: gl.constexpr):
    """Offset in the result and presence of some rows of a tile."""
    N, R0, R1, R2 = extents
    r_n, r_0, r_1, r_2 = steps
    index = first_row + gl.arange(0, COUNT, layout=layout)
    n = start[0] + index // (BOX[1] * BOX[2] * BOX[3])
    i0 = start[1] + (index // (BOX[2] * BOX[3])) % BOX[1]
    i1 = start[2] + (index // BOX[3]) % BOX[2]
    i2 = start[3] + index % BOX[3]
    if INPUT:
        i0 = i0 * STRIDE[0] + phases[0]
        i1 = i1 * STRIDE[1] + phases[1]
        i2 = i2 * STRIDE[2] + phases[2]
    there = (index < ROWS) & (n < N) & (i0 < R0) & (i1 < R1) & (i2 < R2)
    where = n.to(gl.int64) * r_n + i0.to(gl.int64) * r_0 + i1.to(gl.int64) * r_1 + i2.to(gl.int64) * r_2
    return where, there


@gluon.jit
def result_columns(column, group, steps, STRIDE: gl.constexpr, COL: gl.constexpr, PATCH: gl.constexpr,
                   COUNT: gl.constexpr, layout: gl.constexpr):
    """Offset in the result and presence of some columns; PATCH: columns are the (tap, channel) pairs, in lines."""
    index = column + gl.arange(0, COUNT, layout=layout)
    if PATCH:
        LINE: gl.constexpr = STRIDE[2] * COL
        line = index // LINE
        where = (line // STRIDE[1]).to(gl.int64) * steps[1] + (line % STRIDE[1]).to(gl.int64) * steps[2] + index % LINE
        return where, index < LINE * STRIDE[0] * STRIDE[1]
    else:
        return (group * COL + index).to(gl.int64), index < COL


@gluon.jit
def masked_tile(pointers, place, extents, source_extents, source_steps, weight_steps, result_steps,
                GEOMETRY: gl.constexpr, STRIDE: gl.constexpr, BOX: gl.constexpr, ROWS: gl.constexpr,
                INPUT: gl.constexpr, PATCH: gl.constexpr, RED: gl.constexpr, COL: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
                WARPS: gl.constexpr):
    """Sum a tile again, every tap by itself, and add a tap's sums only to positions that have it.

    A zero of the padding may have met an infinite weight.
    """
    source, weight, result = pointers
    K, T, D, P, G = GEOMETRY
    column, start, group, axis0, axis1, axis2 = place
    S0, S1, S2 = source_extents
    s_n, s_0, s_1, s_2 = source_steps
    w_o, w_i, w_0, w_1, w_2 = weight_steps
    FEW: gl.constexpr = 16 * WARPS  # rows at a time
    WIDTH: gl.constexpr = 32
    DEPTH: gl.constexpr = 16
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    channel_left = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, left))
    channel_right = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, right))
    for first_row in range(0, BM, FEW):
        index = first_row + gl.arange(0, FEW, layout=gl.SliceLayout(1, left))
        n = start[0] + index // (BOX[1] * BOX[2] * BOX[3])
        j0 = start[1] + (index // (BOX[2] * BOX[3])) % BOX[1]
        j1 = start[2] + (index // BOX[3]) % BOX[2]
        j2 = start[3] + index % BOX[3]
        for first_column in range(0, BN, WIDTH):
            columns = column + first_column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, right))
            there_column = columns < (COL * STRIDE[0] * STRIDE[1] * STRIDE[2] if PATCH else COL)
            total = gl.full([FEW, WIDTH], 0.0, gl.float32, layout)
            for slot in range(0, axis0[2] * axis1[2] * axis2[2]):
                m2 = slot % axis2[2]
                m1 = (slot // axis2[2]) % axis1[2]
                m0 = slot // (axis2[2] * axis1[2])
                if INPUT:
                    i0 = j0 + axis0[3] - m0 * (D[0] // G[0])
                    i1 = j1 + axis1[3] - m1 * (D[1] // G[1])
                    i2 = j2 + axis2[3] - m2 * (D[2] // G[2])
                    tap0 = axis0[1] + m0 * (T[0] // G[0])
                    tap1 = axis1[1] + m1 * (T[1] // G[1])
                    tap2 = axis2[1] + m2 * (T[2] // G[2])
                else:
                    i0 = j0 * T[0] + m0 * D[0] - P[0]
                    i1 = j1 * T[1] + m1 * D[1] - P[1]
                    i2 = j2 * T[2] + m2 * D[2] - P[2]
                    tap0 = m0
                    tap1 = m1
                    tap2 = m2
                there = ((index < ROWS) & (n < source_extents[3]) & (i0 >= 0) & (i0 < S0) & (i1 >= 0) & (i1 < S1)
                         & (i2 >= 0) & (i2 < S2))
                row = n.to(gl.int64) * s_n + i0.to(gl.int64) * s_0 + i1.to(gl.int64) * s_1 + i2.to(gl.int64) * s_2
                at_tap = weight + (tap0.to(gl.int64) * w_0 + tap1.to(gl.int64) * w_1 + tap2.to(gl.int64) * w_2)
                part = gl.full([FEW, WIDTH], 0.0, gl.float32, layout)
                for c in range(0, RED, DEPTH):
                    a = gl.load(source + row[:, None] + (group * RED + c + channel_left)[None, :],
                                mask=there[:, None] & (c + channel_left < RED)[None, :], other=0.0)
                    at = c + channel_right
                    if INPUT:
                        place_b = (group * RED + at).to(gl.int64)[:, None] * w_o + (columns * w_i)[None, :]
                    else:
                        place_b = (at * w_i)[:, None] + (group * COL + columns).to(gl.int64)[None, :] * w_o
                    b = gl.load(at_tap + place_b, mask=(at < RED)[:, None] & there_column[None, :], other=0.0)
                    part = mma_v2(a, b, part)
                valid = gl.convert_layout(there, gl.SliceLayout(1, layout))
                total += gl.where(valid[:, None], part, 0.0)
            where, row_there = result_rows(start, first_row, (axis0[0], axis1[0], axis2[0]), extents, result_steps,
                                           BOX, ROWS, STRIDE, INPUT, FEW, gl.SliceLayout(1, layout))
            across, across_there = result_columns(column + first_column, group, result_steps, STRIDE, COL, PATCH, WIDTH,
                                                  gl.SliceLayout(0, layout))
            gl.store(result + where[:, None] + across[None, :], total.to(result.dtype.element_ty),
                     mask=row_there[:, None] & across_there[None, :])


@gluon.jit
def halves(value, layout: gl.constexpr):
    """The left and the right columns of a tile of sums; no thread gives anything to another."""
    ROWS: gl.constexpr = value.shape[0]
    WIDTH: gl.constexpr = value.shape[1] // 2
    left, right = value.reshape([ROWS, 2, WIDTH]).permute(0, 2, 1).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def chunks_of(value, CHUNK: gl.constexpr, WARPS: gl.constexpr):
    """The columns of a tile of sums, CHUNK at a time."""
    if value.shape[1] > CHUNK:
        HALF: gl.constexpr = value.shape[1] // 2
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
        left, right = halves(value, layout)
        return chunks_of(left, CHUNK, WARPS) + chunks_of(right, CHUNK, WARPS)
    else:
        return (value,)


@gluon.jit
def sum_tiles(source_slots, weight_slots, out_slots, barriers, result_box, pointers, tiles, counts, extents,
              source_extents, source_steps, weight_steps, result_steps, GEOMETRY: gl.constexpr, STRIDE: gl.constexpr,
              BOX: gl.constexpr, ROWS: gl.constexpr, INPUT: gl.constexpr, PATCH: gl.constexpr, COLUMN_TILES: gl.constexpr,
              GROUPS: gl.constexpr, RED: gl.constexpr, COL: gl.constexpr, AXIS: gl.constexpr, NT: gl.constexpr,
              UNITS: gl.constexpr, LINE_UNITS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CB: gl.constexpr,
              SS: gl.constexpr, WS: gl.constexpr, OS: gl.constexpr, CHUNK: gl.constexpr, BY_BOX: gl.constexpr, WARPS: gl.constexpr):
    """The multiplying warps: the sums of tile after tile, and their way to the result."""
    source_full, source_empty, weight_full, weight_empty = barriers
    result = pointers[2]
    K, T, D, P, G = GEOMETRY
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    PER: gl.constexpr = 128 // result.dtype.element_ty.primitive_bitwidth  # elements a thread stores at once
    flat: gl.constexpr = gl.BlockedLayout([1, PER], [32 * PER // CHUNK, CHUNK // PER], [WARPS, 1], [1, 0])
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(source_slots.layout.swizzle_byte_width, 16, rank=2)
    source_slot = tiles * 0
    source_round = tiles * 0
    weight_slot = tiles * 0
    weight_round = tiles * 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        place = place_of(tile, counts, GEOMETRY, BOX, INPUT, COLUMN_TILES, GROUPS, BN)
        column, start, group, axis0, axis1, axis2 = place
        outer0, outer1, outer2 = outer_slots(axis0, axis1, axis2, AXIS)
        steps = outer0 * outer1 * outer2 * ((RED + CB - 1) // CB)
        acc = gl.full([BM, BN], 0.0, gl.float32, layout)
        source_before = source_slot
        weight_before = weight_slot
        for step in range(0, steps):
            mbarrier.wait(source_full.index(source_slot), source_round)
            for t in gl.static_range(NT):
                mbarrier.wait(weight_full.index(weight_slot), weight_round)
                line = (NT - 1 - t if INPUT else t) * LINE_UNITS
                a = source_slots.index(source_slot * UNITS + line)._reinterpret(source_slots.dtype, [BM, CB],
                                                                                 rows_layout)
                b = weight_slots.index(weight_slot) if INPUT else weight_slots.index(weight_slot).permute([1, 0])
                acc = warpgroup_mma(a, b, acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                # the products before these are finished: their slots are free
                mbarrier.arrive(weight_empty.index(weight_before), pred=(step > 0) | (t > 0))
                if t == 0:
                    mbarrier.arrive(source_empty.index(source_before), pred=step > 0)
                weight_before = weight_slot
                weight_slot, carry = wrapped(weight_slot, 1, WS)
                weight_round ^= carry
            source_before = source_slot
            source_slot, carry = wrapped(source_slot, 1, SS)
            source_round ^= carry
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(weight_empty.index(weight_before), pred=steps > 0)
        mbarrier.arrive(source_empty.index(source_before), pred=steps > 0)
        if any_nan(acc):
            masked_tile(pointers, place, extents, source_extents, source_steps, weight_steps, result_steps, GEOMETRY,
                        STRIDE, BOX, ROWS, INPUT, PATCH, RED, COL, BM, BN, WARPS)
        else:
            chunks = chunks_of(acc.to(result.dtype.element_ty), CHUNK, WARPS)
            for i in gl.static_range(len(chunks)):
                out = out_slots.index(i % OS)
                if BY_BOX:
                    tma.store_wait(pendings=OS - 1)  # the box stored from this slot before
                gl.thread_barrier()
                out.store(chunks[i])
                if BY_BOX:
                    fence_async_shared()
                    gl.thread_barrier()
                    tma.async_copy_shared_to_global(
                        result_box, [start[0], start[1], start[2], start[3], group * COL + column + i * CHUNK],
                        out._reinterpret(out.dtype, [1, 1, 1, 8, CHUNK], result_box.layout))
                else:
                    gl.thread_barrier()
                    where, there = result_rows(start, 0, (axis0[0], axis1[0], axis2[0]), extents, result_steps, BOX,
                                               ROWS, STRIDE, INPUT, BM, gl.SliceLayout(1, flat))
                    across, across_there = result_columns(column + i * CHUNK, group, result_steps, STRIDE, COL,
                                                          PATCH, CHUNK, gl.SliceLayout(0, flat))
                    gl.store(result + where[:, None] + across[None, :], out.load(flat),
                             mask=there[:, None] & across_there[None, :])
    if BY_BOX:
        tma.store_wait(pendings=0)


@gluon.jit
def box_lines_kernel(
        source_box, weight_box, result_box, source, weight, result,
        tiles, N, S0, S1, S2, R0, R1, R2, boxes_n, boxes_0, boxes_1, boxes_2,
        s_n, s_0, s_1, s_2, w_o, w_i, w_0, w_1, w_2, rn, r0, r1, r2,
        RALIGN: gl.constexpr,
        K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        T0: gl.constexpr, T1: gl.constexpr, T2: gl.constexpr,
        D0: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr,
        P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
        G0: gl.constexpr, G1: gl.constexpr, G2: gl.constexpr,
        RED: gl.constexpr, COL: gl.constexpr, GROUPS: gl.constexpr, INPUT: gl.constexpr, PATCH: gl.constexpr,
        PN: gl.constexpr, B0: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr,
        AXIS: gl.constexpr, NT: gl.constexpr, UNITS: gl.constexpr, LINE_UNITS: gl.constexpr,
        SOURCE_BYTES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CB: gl.constexpr,
        SS: gl.constexpr, WS: gl.constexpr, OS: gl.constexpr, CHUNK: gl.constexpr, BY_BOX: gl.constexpr, WARPS: gl.constexpr):
    """UNITS of 8 rows make a slot of the source, LINE_UNITS the distance of two taps that share a box."""
    BOX: gl.constexpr = (PN, B0, B1, B2)
    ROWS: gl.constexpr = PN * B0 * B1 * B2
    dtype: gl.constexpr = source.dtype.element_ty
    COLUMN_TILES: gl.constexpr = ((COL * K0 * K1 * K2 if PATCH else COL) + BN - 1) // BN
    # windows side by side: one slot, whatever the stride
    ONE: gl.constexpr = (1, 1, 1)
    ZERO: gl.constexpr = (0, 0, 0)
    GEOMETRY: gl.constexpr = (ONE, ONE, ONE, ZERO, ONE) if PATCH else (
        (K0, K1, K2), (T0, T1, T2), (D0, D1, D2), (P0, P1, P2), (G0, G1, G2))
    source_layout: gl.constexpr = gl.NVMMASharedLayout(source_box.layout.swizzle_byte_width, 16, rank=2)
    out_layout: gl.constexpr = gl.NVMMASharedLayout(CHUNK * result.dtype.element_ty.primitive_bitwidth // 8,
                                                    result.dtype.element_ty.primitive_bitwidth, rank=2)
    source_slots = gl.allocate_shared_memory(dtype, [SS * UNITS, 8, CB], source_layout)
    if INPUT:
        weight_slots = gl.allocate_shared_memory(dtype, [WS, CB, BN], weight_box.layout)
    else:
        weight_slots = gl.allocate_shared_memory(dtype, [WS, BN, CB], weight_box.layout)
    out_slots = gl.allocate_shared_memory(result.dtype.element_ty, [OS, BM, CHUNK], out_layout)
    source_full = gl.allocate_shared_memory(gl.int64, [SS, 1], mbarrier.MBarrierLayout())
    source_empty = gl.allocate_shared_memory(gl.int64, [SS, 1], mbarrier.MBarrierLayout())
    weight_full = gl.allocate_shared_memory(gl.int64, [WS, 1], mbarrier.MBarrierLayout())
    weight_empty = gl.allocate_shared_memory(gl.int64, [WS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SS):
        mbarrier.init(source_full.index(i), count=1)
        mbarrier.init(source_empty.index(i), count=1)
    for i in gl.static_range(WS):
        mbarrier.init(weight_full.index(i), count=1)
        mbarrier.init(weight_empty.index(i), count=1)
    if ROWS < BM:  # rows that no copy writes
        fill: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // CB, CB // 8], [1, WARPS], [1, 0])
        for i in range(0, SS * UNITS):
            source_slots.index(i).store(gl.full([8, CB], 0.0, dtype, fill))
        fence_async_shared()
        gl.thread_barrier()
    counts = (boxes_n, boxes_0, boxes_1, boxes_2)
    barriers = (source_full, source_empty, weight_full, weight_empty)
    gl.warp_specialize(
        [(sum_tiles, (source_slots, weight_slots, out_slots, barriers, result_box, (source, weight, result), tiles,
                      counts, (N, R0, R1, R2), (S0, S1, S2, N), (s_n, s_0, s_1, s_2), (w_o, w_i, w_0, w_1, w_2),
                      (rn * RALIGN, r0 * RALIGN, r1 * RALIGN, r2 * RALIGN), GEOMETRY, (T0, T1, T2), BOX, ROWS, INPUT, PATCH,
                      COLUMN_TILES, GROUPS, RED, COL, AXIS, NT, UNITS, LINE_UNITS, BM, BN, CB, SS, WS, OS, CHUNK, BY_BOX,
                      WARPS)),
         (copy_source, (source_box, source_slots, source_full, source_empty, tiles, counts, GEOMETRY, BOX, INPUT,
                        COLUMN_TILES, GROUPS, BN, RED, CB, AXIS, NT, UNITS, SS, SOURCE_BYTES)),
         (copy_weight, (weight_box, weight_slots, weight_full, weight_empty, tiles, counts, GEOMETRY, BOX, INPUT,
                        COLUMN_TILES, GROUPS, BN, RED, COL, CB, AXIS, NT, WS, CB * BN * 2))],
        [1, 1], [24, 24])
