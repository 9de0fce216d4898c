"""FP8 tensors as rows of pixels, one for each channel, as FP8 products that sum over pixels read them.

A row holds the pixels of one line of the last axis (or of all lines of a plane), each of them for IMAGES images side
by side, so that rows are long where lines are short. `row_weight.py` multiplies such rows.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from .elements import as_result, settled


@triton.jit
def copy_rows(program, source, target, words, N, X0, X1, X2, lines, length, pitch, s_n, s_0, s_1, s_2, t_c,
              IMAGES: tl.constexpr, PLANE: tl.constexpr, CUTS: tl.constexpr, LINE_STEP: tl.constexpr,
              FIRST_LINE: tl.constexpr, COPIES: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
              FIRST: tl.constexpr, BETWEEN: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr):
    """4*BC channels of 4*BP pixels of one row; memory is read and written 4 numbers at a time, as 32-bit words.

    A row's column j is the source's column j*STEP + FIRST + copy*BETWEEN, zero where that is outside. PLANE: a row
    holds the COLUMNS columns of all X1 lines. CUTS: so many parts of an image's `lines`, LINE_STEP lines after each
    other, count as images; X1 is the number of lines of each.
    """
    channel_tiles = tl.cdiv(words, BC)
    row_tiles = tl.cdiv(pitch, BP)
    c = (program % channel_tiles) * BC + tl.arange(0, BC)
    program = program // channel_tiles
    m = (program % row_tiles) * BP + tl.arange(0, BP)
    row = program // row_tiles
    copy = row % COPIES
    rest = row // COPIES
    line = 0
    if not PLANE:
        line = rest % X1
        rest = rest // X1
    plane = source + (rest % X0).to(tl.int64) * s_0
    image = rest // X0 * IMAGES
    some = (c < words)[None, :]
    for k in tl.static_range(4):  # the same channels of four neighbouring pixels, as words
        p = m * 4 + k
        part = image + p % IMAGES
        n = part // CUTS
        column = p // IMAGES
        at_line = line + part % CUTS * LINE_STEP + FIRST_LINE
        if PLANE:
            at_line = column // COLUMNS
            column = column % COLUMNS
        i2 = column * STEP + FIRST + copy * BETWEEN
        there = (p < length) & (n < N) & (at_line >= 0) & (at_line < lines) & (i2 >= 0) & (i2 < X2)
        where = n.to(tl.int64) * s_n + at_line.to(tl.int64) * s_1 + i2.to(tl.int64) * s_2
        value = tl.load(plane + where[:, None] + c[None, :], mask=there[:, None] & some, other=0)
        if k == 0:
            w0 = value
        elif k == 1:
            w1 = value
        elif k == 2:
            w2 = value
        else:
            w3 = value
    target += row.to(tl.int64) * pitch
    for k in tl.static_range(4):  # the same pixels of four neighbouring channels
        turned = (((w0 >> (8 * k)) & 255) | (((w1 >> (8 * k)) & 255) << 8) | (((w2 >> (8 * k)) & 255) << 16)
                  | ((w3 >> (8 * k)) << 24))
        tl.store(target + (c * 4 + k).to(tl.int64)[:, None] * t_c + m[None, :], tl.trans(turned),
                 mask=(c < words)[:, None] & (m < pitch)[None, :])


@triton.jit
def pixel_rows_kernel(
        dy, dy_rows, x, x_rows, y_programs, N, Y0, Y1, Y2, X0, X1, X2, y_lines, x_lines, y_words, y_length, y_pitch,
        y_c, x_words, x_length, x_pitch, x_c, y_n, y_0, y_1, y_2, x_n, x_0, x_1, x_2,
        IMAGES: tl.constexpr, PLANE: tl.constexpr, CUTS: tl.constexpr, Y_STEP: tl.constexpr, X_STEP: tl.constexpr,
        FIRST_LINE: tl.constexpr, COPIES: tl.constexpr, Y_COLUMNS: tl.constexpr,
        X_COLUMNS: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, BETWEEN: tl.constexpr, BC: tl.constexpr,
        BP: tl.constexpr):
    """The rows of both operands: the last programs copy x."""
    program = tl.program_id(0)
    if program < y_programs:
        copy_rows(program, dy, dy_rows, y_words, N, Y0, Y1, Y2, y_lines, y_length, y_pitch, y_n, y_0, y_1, y_2, y_c,
                  IMAGES, PLANE, CUTS, Y_STEP, 0, 1, Y_COLUMNS, 1, 0, 0, BC, BP)
    else:
        copy_rows(program - y_programs, x, x_rows, x_words, N, X0, X1, X2, x_lines, x_length, x_pitch, x_n, x_0, x_1,
                  x_2, x_c, IMAGES, PLANE, CUTS, X_STEP, FIRST_LINE, COPIES, X_COLUMNS, STEP, FIRST, BETWEEN, BC, BP)


@triton.jit
def pixels_inside(tap, X, Y, T, D, P):
    """The first pixel of an axis where a tap reads x, how many there are, and where pixel 0 would read."""
    reach = tap * D - P
    low = (tl.maximum(-reach, 0) + T - 1) // T
    return low, tl.maximum(tl.minimum((tl.maximum(X - 1 - reach, -T) + T) // T, Y) - low, 0), reach


@triton.jit
def masked_sums(dy_rows, x_rows, result, slots, segment, first_k, first_c, Y0, Y1, Y2, X0, X1, X2, y_length, y_pitch,
                y_c, x_length, x_pitch, x_c, r_k, r_c, r_0, r_1, r_2, K0, K1, K2, T0, T1, T2, D0, D1, D2, P0, P1, P2,
                KG, CG, IMAGES, PLANE, CUTS, y_lines, x_lines, FIRST_LINE, BY_TAP, COPIES, BK, CB, BP: tl.constexpr,
                FEW: tl.constexpr, SETTLE: tl.constexpr):
    """FEW x FEW of a segment's sums with a mask on every product."""
    slot = tl.load(segment + 1)
    begin = tl.load(segment + 2)
    end = tl.load(segment + 3)
    c_tile, k_tile, tap0, tap1, tap2 = place_of(tl.load(segment), K1, K2, KG, CG, BK, CB)
    c = c_tile + first_c + tl.arange(0, FEW)
    k = k_tile + first_k + tl.arange(0, FEW)
    low0, count0, reach0 = pixels_inside(tap0, X0, Y0, T0, D0, P0)
    low1, count1, reach1 = pixels_inside(tap1, X1, Y1, T1, D1, P1)
    low2, count2, reach2 = pixels_inside(tap2, X2, Y2, T2, D2, P2)
    plane = PLANE != 0
    by_tap = BY_TAP != 0
    run = tl.where(plane, count1 * Y2, tl.where(by_tap, Y2, count2)) * IMAGES
    start = tl.where(plane, low1 * Y2, tl.where(by_tap, 0, low2)) * IMAGES
    shift = tl.where(plane, reach1 * Y2, tl.where(by_tap, 0, (reach2 + P2 * T2) // T2 - P2)) * IMAGES
    lines = tl.where(plane, 1, count1)
    copy = tl.where(by_tap, tap2, (reach2 + P2 * T2) % T2)
    steps = tl.maximum((run + BP - 1) // BP, 1)
    e = tl.arange(0, BP)
    acc = tl.zeros([FEW, FEW], dtype=tl.float32)
    for step in range(begin, end):
        rest = step // steps
        q0 = low0 + rest // lines % count0
        q1 = low1 + rest % lines
        image = rest // lines // count0
        y_row = image * Y0 + q0
        x_row = image * X0 + q0 * T0 + reach0
        y_row = tl.where(plane, y_row, y_row * Y1 + q1).to(tl.int64)
        x_row = (tl.where(plane, x_row, x_row * X1 + q1 * T1 + reach1) * COPIES + copy).to(tl.int64)
        p = start + step % steps * BP + e
        i2 = p // IMAGES % Y2 * T2 + reach2
        there = (p < y_length) & (p + shift >= 0) & (p + shift < x_length) & (i2 >= 0) & (i2 < X2)
        cut = (image * IMAGES + p % IMAGES) % CUTS
        i1 = (q1 + cut * Y1) * T1 + reach1 + FIRST_LINE
        there = there & (plane | ((q1 + cut * Y1 < y_lines) & (i1 >= 0) & (i1 < x_lines)))
        dy = tl.load(dy_rows + k.to(tl.int64)[:, None] * y_c + y_row * y_pitch + p[None, :],
                     mask=(k < KG)[:, None] & there[None, :], other=0.0)
        x = tl.load(x_rows + c.to(tl.int64)[None, :] * x_c + x_row * x_pitch + (p + shift)[:, None],
                    mask=(c < CG)[None, :] & there[:, None], other=0.0)
        acc = tl.dot(dy.to(tl.float16), x.to(tl.float16), acc)
        if SETTLE:
            acc = settled(acc)
    there = (k < KG)[:, None] & (c < CG)[None, :]
    if slot < 0:
        in_result = places(result, k, c, tap0, tap1, tap2, r_k, r_c, r_0, r_1, r_2)
        tl.store(in_result, as_result(acc, result), mask=there)
    else:
        place = slots + slot.to(tl.int64) * (BK * CB) + (k - k_tile)[:, None] * CB + (c - c_tile)[None, :]
        tl.store(place, acc)


NUMBERS = ("Y0", "Y1", "Y2", "X0", "X1", "X2", "y_length", "y_pitch", "y_c", "x_length", "x_pitch", "x_c", "r_k", "r_c",
           "r_0", "r_1", "r_2", "K0", "K1", "K2", "T0", "T1", "T2", "D0", "D1", "D2", "P0", "P1", "P2", "KG", "CG",
           "IMAGES", "PLANE", "CUTS", "y_lines", "x_lines", "FIRST_LINE", "BY_TAP", "COPIES", "SEGMENTS", "BK",
           "CB")  # of masked_rows_kernel


@triton.jit(do_not_specialize=NUMBERS)
def masked_rows_kernel(
        dy_rows, x_rows, result, slots, flags, table, Y0, Y1, Y2, X0, X1, X2, y_length, y_pitch, y_c, x_length, x_pitch,
        x_c, r_k, r_c, r_0, r_1, r_2, K0, K1, K2, T0, T1, T2, D0, D1, D2, P0, P1, P2, KG, CG, IMAGES, PLANE, CUTS,
        y_lines, x_lines, FIRST_LINE, BY_TAP, COPIES, SEGMENTS, BK, CB, BP: tl.constexpr, FEW: tl.constexpr,
        FLAGS: tl.constexpr, SETTLE: tl.constexpr):
    """A program's sums (see `row_weight.py`) again, with a mask on every product, where `flags` asks for it.

    There a zero of the padding may have met an infinite operand. The interpreter sums everything by this kernel, whose
    numbers are no constants, so that one is compiled for all problems.
    """
    halves = BK // 64
    mine = SEGMENTS * halves
    flag = tl.arange(0, FLAGS)
    bad = 0
    for first in range(0, mine, FLAGS):  # all at once, because nearly always none is set
        some = tl.load(flags + tl.program_id(0) * mine + first + flag, mask=first + flag < mine, other=0)
        bad += tl.max(some, 0)
    if bad != 0:
        for number in range(SEGMENTS):
            at = tl.program_id(0) * SEGMENTS + number
            if tl.load(table + at * 4 + 1) > -2:
                for block in range(BK // FEW * (CB // FEW)):
                    first_k = block // (CB // FEW) * FEW
                    if tl.load(flags + at * halves + first_k // 64) != 0:
                        masked_sums(dy_rows, x_rows, result, slots, table + at * 4, first_k,
                                    block % (CB // FEW) * FEW, Y0, Y1, Y2, X0, X1, X2, y_length, y_pitch, y_c, x_length,
                                    x_pitch, x_c, r_k, r_c, r_0, r_1, r_2, K0, K1, K2, T0, T1, T2, D0, D1, D2, P0, P1,
                                    P2, KG, CG, IMAGES, PLANE, CUTS, y_lines, x_lines, FIRST_LINE, BY_TAP, COPIES, BK,
                                    CB, BP, FEW, SETTLE)


@triton.jit
def place_of(tile, K1, K2, KG, CG, BK, CB):
    """First input and output channel, and the tap of a tile; see line_places.tile_place."""
    c_tiles = (CG + CB - 1) // CB
    k_tiles = (KG + BK - 1) // BK
    taps = tile // (c_tiles * k_tiles)
    return (tile % c_tiles) * CB, (tile // c_tiles % k_tiles) * BK, taps // (K2 * K1), taps // K2 % K1, taps % K2


@triton.jit
def places(result, k, c, tap0, tap1, tap2, r_k, r_c, r_0, r_1, r_2):
    return (result + tap0.to(tl.int64) * r_0 + tap1.to(tl.int64) * r_1 + tap2.to(tl.int64) * r_2
            + k.to(tl.int64)[:, None] * r_k + c.to(tl.int64)[None, :] * r_c)


@triton.jit(do_not_specialize=("K1", "K2"))
def add_slots_kernel(slots, result, table, r_k, r_c, r_0, r_1, r_2, K1, K2, KG, CG, BK: tl.constexpr, CB: tl.constexpr,
                     FEW: tl.constexpr, AT_ONCE: tl.constexpr):
    """FEW rows of a tile that several programs summed: its slots, added in order."""
    at = table + tl.program_id(0) * 3
    c_tile, k_tile, tap0, tap1, tap2 = place_of(tl.load(at), K1, K2, KG, CG, BK, CB)
    row = tl.program_id(1) * FEW + tl.arange(0, FEW)
    column = tl.arange(0, CB)
    place = slots + tl.load(at + 1).to(tl.int64) * (BK * CB) + row[:, None] * CB + column[None, :]
    acc = tl.zeros([FEW, CB], dtype=tl.float32)
    count = tl.load(at + 2)
    for first in range(0, count, AT_ONCE):
        for more in tl.static_range(AT_ONCE):  # added in order, loaded together
            there = (row[:, None] >= 0) & (first + more < count)
            acc += tl.load(place + more * (BK * CB), mask=there, other=0.0)
        place += AT_ONCE * (BK * CB)
    tl.store(places(result, k_tile + row, c_tile + column, tap0, tap1, tap2, r_k, r_c, r_0, r_1, r_2),
             as_result(acc, result), mask=(k_tile + row < KG)[:, None] & (c_tile + column < CG)[None, :])
