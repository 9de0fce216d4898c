"""Where the tiles of boxes lie: phases, places, steps of their sums, rows and columns of the result; adding parts.

The items of work of `box_lines.py` are counted through; these functions say what an item sums and where it belongs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .line_places import wrapped
from .stored import as_stored


@gluon.jit
def phase_of(order, K: gl.constexpr, T: gl.constexpr, D: gl.constexpr, P: gl.constexpr, G: gl.constexpr,
             INPUT: gl.constexpr):
    """One phase of an axis: its residue, first tap, number of slots, source shift.

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
def place_of(tile, counts, GEOMETRY: gl.constexpr, SHAPE: gl.constexpr):
    """Where a tile lies: first column, first position of its box, group, and (phase, first tap, slots, shift) per axis.

    Column tiles and phases are neighbours, so that they find the same source in the cache. The order of the phases
    turns from box to box, so that every program has tiles of all phases: with many taps and with few.
    """
    boxes_n, boxes_0, boxes_1, boxes_2, turn = counts
    K, T, D, P, G, INPUT = GEOMETRY
    BOX, BN, COLUMN_TILES = SHAPE
    column = (tile % COLUMN_TILES) * BN
    rest = tile // COLUMN_TILES
    PHASES: gl.constexpr = T[0] * T[1] * T[2] if INPUT else 1
    phase = rest % PHASES
    rest = rest // PHASES
    if PHASES > 1:
        phase = (phase + rest // turn) % PHASES
    j2 = (rest % boxes_2) * BOX[3]
    rest = rest // boxes_2
    j1 = (rest % boxes_1) * BOX[2]
    rest = rest // boxes_1
    j0 = (rest % boxes_0) * BOX[1]
    rest = rest // boxes_0
    n = (rest % boxes_n) * BOX[0]
    axis2 = phase_of(phase % T[2], K[2], T[2], D[2], P[2], G[2], INPUT)
    axis1 = phase_of((phase // T[2]) % T[1], K[1], T[1], D[1], P[1], G[1], INPUT)
    axis0 = phase_of(phase // (T[2] * T[1]), K[0], T[0], D[0], P[0], G[0], INPUT)
    return column, (n, j0, j1, j2), rest // boxes_n, axis0, axis1, axis2


@gluon.jit
def inside(axis, start, extent, B: gl.constexpr, T: gl.constexpr, D: gl.constexpr, G: gl.constexpr,
           INPUT: gl.constexpr):
    """A phase of an axis without the slots in which a box of B positions reads nothing but padding."""
    phase, first, slots, shift = axis
    if INPUT:  # slot m reads from start + shift - m*FAR on
        FAR: gl.constexpr = D // G
        lowest = start + shift
        skipped = gl.where(lowest >= extent, (lowest - extent) // FAR + 1, 0)
        end = gl.where(lowest + B > 0, gl.minimum(slots, (lowest + B - 1) // FAR + 1), 0)
        return phase, first + skipped * (T // G), gl.maximum(end - skipped, 0), shift - skipped * FAR
    else:
        lowest = start * T + shift
        highest = lowest + (B - 1) * T
        skipped = gl.where(highest < 0, (-highest + D - 1) // D, 0)
        end = gl.where(lowest < extent, gl.minimum(slots, (extent - 1 - lowest) // D + 1), 0)
        return phase, first + skipped, gl.maximum(end - skipped, 0), shift + skipped * D


@gluon.jit
def work_of(item, whole, counts, source_extents, GEOMETRY: gl.constexpr, SHAPE: gl.constexpr, AXIS: gl.constexpr,
            DEPTH_STEPS: gl.constexpr, PARTS: gl.constexpr):
    """The tile of an item of work, the outer slots per axis, and the steps to sum.

    The first `whole` tiles are one item each, the others PARTS items. A step is one slot and CB channels; on the axis
    whose taps share a box there is one slot.
    """
    K, T, D, P, G, INPUT = GEOMETRY
    BOX: gl.constexpr = SHAPE[0]
    if PARTS == 1:
        place = place_of(item, counts, GEOMETRY, SHAPE)
    else:
        place = place_of(gl.where(item < whole, item, whole + (item - whole) // PARTS), counts, GEOMETRY, SHAPE)
    column, start, group, axis0, axis1, axis2 = place
    if AXIS != 0 and K[0] + P[0] > 1:
        axis0 = inside(axis0, start[1], source_extents[0], BOX[1], T[0], D[0], G[0], INPUT)
    if AXIS != 1 and K[1] + P[1] > 1:
        axis1 = inside(axis1, start[2], source_extents[1], BOX[2], T[1], D[1], G[1], INPUT)
    if AXIS != 2 and K[2] + P[2] > 1:
        axis2 = inside(axis2, start[3], source_extents[2], BOX[3], T[2], D[2], G[2], INPUT)
    place = (column, start, group, axis0, axis1, axis2)
    outer0 = 1 if AXIS == 0 else axis0[2]
    outer1 = 1 if AXIS == 1 else axis1[2]
    outer2 = 1 if AXIS == 2 else axis2[2]
    steps = outer0 * outer1 * outer2 * DEPTH_STEPS
    if PARTS == 1:
        begin = steps * 0
        end = steps
    else:
        part = (item - whole) % PARTS
        begin = gl.where(item < whole, 0, part * steps // PARTS)
        end = gl.where(item < whole, steps, (part + 1) * steps // PARTS)
    return place, (outer1, outer2), begin, end


@gluon.jit
def slot_of(step, outer, DEPTH_STEPS: gl.constexpr):
    """Slot on three axes of a step, and which channels."""
    outer1, outer2 = outer
    slot = step // DEPTH_STEPS
    return slot // (outer2 * outer1), (slot // outer2) % outer1, slot % outer2, step % DEPTH_STEPS


@gluon.jit
def next_slot(m0, m1, m2, depth, outer, DEPTH_STEPS: gl.constexpr):
    """The same of the step after, without divisions: they would take longer than a step."""
    outer1, outer2 = outer
    depth, carry = wrapped(depth, 1, DEPTH_STEPS)
    m2, carry = wrapped(m2, carry, outer2)
    m1, carry = wrapped(m1, carry, outer1)
    return m0 + carry, m1, m2, depth


@gluon.jit
def source_of(start, axis, slot, K: gl.constexpr, T: gl.constexpr, D: gl.constexpr, G: gl.constexpr,
              INPUT: gl.constexpr):
    """Where a position reads on one axis in a slot, and its tap."""
    if INPUT:
        return start + axis[3] - slot * (D // G), axis[1] + slot * (T // G)
    else:
        return start * T + axis[3] + slot * D, axis[1] + slot


@gluon.jit
def rows_of_tap(source_slots, slot, tap, PLACE: gl.constexpr):
    """The rows of a slot that a tap multiplies, for one half of a tile; LAST: the tap whose rows come first, or 0."""
    UNITS, LINE_UNITS, HALF, HM, CB, LAST = PLACE
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(source_slots.layout.swizzle_byte_width,
                                                     source_slots.dtype.primitive_bitwidth, rank=2)
    line = LAST - tap if LAST > 0 else tap
    unit = slot * UNITS + line * LINE_UNITS + HALF * (HM // 8)
    return source_slots.index(unit)._reinterpret(source_slots.dtype, [HM, CB], rows_layout)


@gluon.jit
def result_rows(start, first_row, phases, extents, steps, BOX: gl.constexpr, ROWS: gl.constexpr, STRIDE: gl.constexpr,
                INPUT: gl.constexpr, COUNT: gl.constexpr, layout: gl.constexpr):
    """Offset in the result and presence of some rows of a tile."""
    N, R0, R1, R2 = extents
    r_n, r_0, r_1, r_2, _r_c = steps
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
    """Offset in the result, in steps of channels, and presence of some columns.

    PATCH: columns are the (tap, channel) pairs, in lines of neighbours. The step of channels is left to the caller: a
    number that the compiler does not know to be 1 would part neighbours, which are then stored one by one.
    """
    index = column + gl.arange(0, COUNT, layout=layout)
    if PATCH:
        LINE: gl.constexpr = STRIDE[2] * COL
        line = index // LINE
        where = (line // STRIDE[1]).to(gl.int64) * steps[1] + (line % STRIDE[1]).to(gl.int64) * steps[2] + index % LINE
        return where, index < LINE * STRIDE[0] * STRIDE[1]
    else:
        return (group * COL + index).to(gl.int64), index < COL


@gluon.jit
def larger_or_nan(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def any_nan(value):
    """Whether a tile has a NaN: one instruction for each element."""
    largest = gl.reduce(gl.reduce(value, 1, larger_or_nan), 0, larger_or_nan)
    return largest != largest


@gluon.jit
def add_box_parts_kernel(
        parts, result, first, second, own,
        whole, N, R0, R1, R2, boxes_n, boxes_0, boxes_1, boxes_2, turn, rn, r0, r1, r2, rc,
        RALIGN: gl.constexpr,
        K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        T0: gl.constexpr, T1: gl.constexpr, T2: gl.constexpr,
        D0: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr,
        P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
        G0: gl.constexpr, G1: gl.constexpr, G2: gl.constexpr,
        COL: gl.constexpr, INPUT: gl.constexpr, PATCH: gl.constexpr,
        PN: gl.constexpr, B0: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr, PARTS: gl.constexpr,
        BM: gl.constexpr, BN: gl.constexpr, FEW: gl.constexpr, WARPS: gl.constexpr):
    """Add the parts of tiles in order, FEW rows a program, and write them to the result."""
    ONE: gl.constexpr = (1, 1, 1)
    GEOMETRY: gl.constexpr = (ONE, ONE, ONE, (0, 0, 0), ONE, INPUT) if PATCH else (
        (K0, K1, K2), (T0, T1, T2), (D0, D1, D2), (P0, P1, P2), (G0, G1, G2), INPUT)
    SHAPE: gl.constexpr = ((PN, B0, B1, B2), BN, ((COL * K0 * K1 * K2 if PATCH else COL) + BN - 1) // BN)
    STRIDE: gl.constexpr = (T0, T1, T2)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // min(BN, 128), min(BN, 128) // 4], [WARPS, 1], [1, 0])
    tile = gl.program_id(0)
    first_row = gl.program_id(1) * FEW
    counts = (boxes_n, boxes_0, boxes_1, boxes_2, turn)
    column, start, group, axis0, axis1, axis2 = place_of(whole + tile, counts, GEOMETRY, SHAPE)
    row = first_row + gl.arange(0, FEW, layout=gl.SliceLayout(1, layout))
    at = parts + tile.to(gl.int64) * (PARTS * BM * BN) + (row * BN)[:, None] + gl.arange(
        0, BN, layout=gl.SliceLayout(0, layout))[None, :]
    total = gl.load(at)
    for part in gl.static_range(1, PARTS):
        total += gl.load(at + part * (BM * BN))
    steps = (rn * RALIGN, r0 * RALIGN, r1 * RALIGN, r2 * RALIGN, rc)
    where, there = result_rows(start, first_row, (axis0[0], axis1[0], axis2[0]), (N, R0, R1, R2), steps,
                               (PN, B0, B1, B2), PN * B0 * B1 * B2, STRIDE, INPUT, FEW, gl.SliceLayout(1, layout))
    beside, column_there = result_columns(column, group, steps, STRIDE, COL, PATCH, BN, gl.SliceLayout(0, layout))
    gl.store(result + where[:, None] + (beside * rc)[None, :], as_stored(total, result, (first, second, own)),
             mask=there[:, None] & column_there[None, :])
