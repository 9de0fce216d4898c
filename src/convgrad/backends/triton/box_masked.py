"""The tile of `box_lines.py` whose sums hold a NaN, summed again with a mask on every product; written in Gluon."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from .box_places import result_columns, result_rows, slot_of, source_of
from .stored import as_stored


@gluon.jit
def masked_products(source, at_tap, row, there, first, columns, there_column, group, joined, w_o, w_i,
                    layout: gl.constexpr, INPUT: gl.constexpr, RED: gl.constexpr, COL: gl.constexpr,
                    JOINED: gl.constexpr, CB: gl.constexpr):
    """The products of one tap and step of channels, for some rows and columns; of JOINED groups for one of them."""
    stored: gl.constexpr = source.dtype.element_ty
    operand: gl.constexpr = gl.float16 if stored.is_fp8() else stored
    DEPTH: gl.constexpr = 16
    channel_left = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, gl.DotOperandLayout(0, layout, 2)))
    channel_right = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, gl.DotOperandLayout(1, layout, 2)))
    part = gl.full([row.shape[0], columns.shape[0]], 0.0, gl.float32, layout)
    for c in range(first, gl.minimum(first + CB, RED), DEPTH):
        mine = (c + channel_left < RED) & ((c + channel_left) * JOINED // RED == joined)
        a = gl.load(source + row[:, None] + (group * RED + c + channel_left)[None, :],
                    mask=there[:, None] & mine[None, :], other=0.0)
        at = c + channel_right
        if INPUT:
            place_b = (group * RED + at).to(gl.int64)[:, None] * w_o + (columns * w_i)[None, :]
        else:
            place_b = (at * w_i)[:, None] + (group * COL + columns).to(gl.int64)[None, :] * w_o
        b = gl.load(at_tap + place_b, mask=(at < RED)[:, None] & there_column[None, :], other=0.0)
        part = mma_v2(a.to(operand), b.to(operand), part)
    return part


@gluon.jit
def masked_floats(source, at_tap, row, there, first, columns, there_column, group, w_o, w_i, layout: gl.constexpr,
                  INPUT: gl.constexpr, RED: gl.constexpr, COL: gl.constexpr, CB: gl.constexpr):
    """The same of float32 numbers: products of parts of Inf would be NaN."""
    row = gl.convert_layout(row, gl.SliceLayout(1, layout))
    there = gl.convert_layout(there, gl.SliceLayout(1, layout))
    columns = gl.convert_layout(columns, gl.SliceLayout(0, layout))
    there_column = gl.convert_layout(there_column, gl.SliceLayout(0, layout))
    part = gl.full([row.shape[0], columns.shape[0]], 0.0, gl.float32, layout)
    for c in range(first, gl.minimum(first + CB, RED)):
        a = gl.load(source + row + group * RED + c, mask=there, other=0.0)
        if INPUT:
            place_b = (group * RED + c).to(gl.int64) * w_o + columns * w_i
        else:
            place_b = c * w_i + (group * COL + columns).to(gl.int64) * w_o
        b = gl.load(at_tap + place_b, mask=there_column, other=0.0)
        part += a[:, None] * b[None, :]
    return part


@gluon.jit
def masked_sums(pointers, first_row, first_column, work, batch, source_extents, source_steps, weight_steps,
                layout: gl.constexpr, GEOMETRY: gl.constexpr, BOX: gl.constexpr, ROWS: gl.constexpr,
                COLUMNS: gl.constexpr, AXIS: gl.constexpr, NT: gl.constexpr, RED: gl.constexpr, COL: gl.constexpr,
                JOINED: gl.constexpr, CB: gl.constexpr, FEW: gl.constexpr, WIDTH: gl.constexpr):
    """FEW rows and WIDTH columns of a tile, every tap by itself."""
    source, weight, _result, _parts, _scales = pointers
    K, T, D, _P, G, INPUT = GEOMETRY
    place, outer, begin, end = work
    column, start, group, axis0, axis1, axis2 = place
    S0, S1, S2 = source_extents
    s_n, s_0, s_1, s_2 = source_steps
    w_o, w_i, w_0, w_1, w_2 = weight_steps
    index = first_row + gl.arange(0, FEW, layout=gl.SliceLayout(1, gl.DotOperandLayout(0, layout, 2)))
    n = start[0] + index // (BOX[1] * BOX[2] * BOX[3])
    j0 = start[1] + (index // (BOX[2] * BOX[3])) % BOX[1]
    j1 = start[2] + (index // BOX[3]) % BOX[2]
    j2 = start[3] + index % BOX[3]
    columns = column + first_column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.DotOperandLayout(1, layout, 2)))
    summed = column + first_column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    total = gl.full([FEW, WIDTH], 0.0, gl.float32, layout)
    for number in range(begin * NT * JOINED, end * NT * JOINED):
        step = number // JOINED
        joined = number % JOINED
        m0, m1, m2, depth = slot_of(step // NT, outer, (RED + CB - 1) // CB)
        t = step % NT
        i0, tap0 = source_of(j0, axis0, t if AXIS == 0 else m0, K[0], T[0], D[0], G[0], INPUT)
        i1, tap1 = source_of(j1, axis1, t if AXIS == 1 else m1, K[1], T[1], D[1], G[1], INPUT)
        i2, tap2 = source_of(j2, axis2, t if AXIS == 2 else m2, K[2], T[2], D[2], G[2], INPUT)
        there = ((index < ROWS) & (n < batch) & (i0 >= 0) & (i0 < S0) & (i1 >= 0) & (i1 < S1) & (i2 >= 0) & (i2 < S2))
        row = n.to(gl.int64) * s_n + i0.to(gl.int64) * s_0 + i1.to(gl.int64) * s_1 + i2.to(gl.int64) * s_2
        at_tap = weight + (tap0.to(gl.int64) * w_0 + tap1.to(gl.int64) * w_1 + tap2.to(gl.int64) * w_2)
        if source.dtype.element_ty == gl.float32:
            part = masked_floats(source, at_tap, row, there, depth * CB, columns, columns < COLUMNS, group, w_o, w_i,
                                 layout, INPUT, RED, COL, CB)
        else:
            part = masked_products(source, at_tap, row, there, depth * CB, columns, columns < COLUMNS, group, joined,
                                   w_o, w_i, layout, INPUT, RED, COL, JOINED, CB)
        valid = gl.convert_layout(there, gl.SliceLayout(1, layout))
        mine = (summed * JOINED // COL == joined) | (JOINED == 1)
        total += gl.where(valid[:, None] & mine[None, :], part, 0.0)
    return total


@gluon.jit
def masked_tile(pointers, is_part, parts_at, first, work, extents, source_extents, source_steps, weight_steps,
                result_steps, GEOMETRY: gl.constexpr, SHAPE: gl.constexpr, STRIDE: gl.constexpr, ROWS: gl.constexpr,
                PATCH: gl.constexpr, AXIS: gl.constexpr, NT: gl.constexpr, RED: gl.constexpr, COL: gl.constexpr,
                JOINED: gl.constexpr, PARTS: gl.constexpr, HM: gl.constexpr, CB: gl.constexpr):
    """Sum HM rows of a tile again, from `first` on, and add a tap's sums only to positions that have it.

    A zero of the padding may have met an infinite weight, or an infinite source a zero between JOINED groups. Loops in
    a loop are functions of their own, because Triton reads what is in a loop twice.
    """
    _source, _weight, result, parts, scales = pointers
    BOX: gl.constexpr = SHAPE[0]
    BN: gl.constexpr = SHAPE[1]
    place = work[0]
    column, start, group, axis0, axis1, axis2 = place
    FEW: gl.constexpr = 64  # rows at a time
    WIDTH: gl.constexpr = 32
    BLOCKS: gl.constexpr = (BN + WIDTH - 1) // WIDTH
    COLUMNS: gl.constexpr = COL * STRIDE[0] * STRIDE[1] * STRIDE[2] if PATCH else COL
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    across: gl.constexpr = gl.SliceLayout(0, layout)
    for block in range(0, HM // FEW * BLOCKS):
        first_row = first + block // BLOCKS * FEW
        first_column = block % BLOCKS * WIDTH
        total = masked_sums(pointers, first_row, first_column, work, extents[0], source_extents, source_steps,
                            weight_steps, layout, GEOMETRY, BOX, ROWS, COLUMNS, AXIS, NT, RED, COL, JOINED, CB, FEW,
                            WIDTH)
        where, row_there = result_rows(start, first_row, (axis0[0], axis1[0], axis2[0]), extents, result_steps, BOX,
                                       ROWS, STRIDE, GEOMETRY[5], FEW, rows)
        beside, column_there = result_columns(column + first_column, group, result_steps, STRIDE, COL, PATCH, WIDTH,
                                              across)
        to_result = row_there[:, None] & column_there[None, :]
        if PARTS > 1:
            at_row = (first_row + gl.arange(0, FEW, layout=rows)) * BN + parts_at
            at_column = first_column + gl.arange(0, WIDTH, layout=across)
            to_part = ((at_row >= 0) & is_part)[:, None] & (at_column >= 0)[None, :]
            gl.store(parts + at_row[:, None] + at_column[None, :], total, mask=to_part)
            to_result = to_result & (is_part == 0)
        at = result + where[:, None] + (beside * result_steps[4])[None, :]
        gl.store(at, as_stored(total, result, scales), mask=to_result)
