"""Where lines lie: the walk over the pixels of a tile (see weight_lines.py), device functions in Gluon."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment, attr-defined"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def first_line(line, shape):
    """Where a run begins: position in its chain, chain among the residues of the dilation, box on three axes, image."""
    length, spread, boxes_0, boxes_1, boxes_2 = shape
    rest = line // length
    boxes = rest // spread
    return (line % length, rest % spread, boxes % boxes_2, (boxes // boxes_2) % boxes_1,
            (boxes // (boxes_2 * boxes_1)) % boxes_0, boxes // (boxes_2 * boxes_1 * boxes_0))


@gluon.jit
def wrapped(counter, carry, end):
    """A digit with a carry added, and its own carry."""
    counter += carry
    full = (counter == end).to(gl.int32)
    return counter - full * end, full


@gluon.jit
def next_line(place, shape):
    """The line after a line, without divisions: they would take longer than the copies."""
    at, residue, box_2, box_1, box_0, image = place
    length, spread, boxes_0, boxes_1, boxes_2 = shape
    at, carry = wrapped(at, 1, length)
    residue, carry = wrapped(residue, carry, spread)
    box_2, carry = wrapped(box_2, carry, boxes_2)
    box_1, carry = wrapped(box_1, carry, boxes_1)
    box_0, carry = wrapped(box_0, carry, boxes_0)
    return at, residue, box_2, box_1, box_0, image + carry


@gluon.jit
def pixel_of(place, first, AXIS: gl.constexpr, BOX: gl.constexpr, STEP: gl.constexpr):
    """First pixel (n, q0, q1, q2) of a line. On the axis of a chain, position j of residue r is r + j*STEP."""
    at, residue, box_2, box_1, box_0, image = place
    q0 = (first[0] + box_0) * BOX[1]
    q1 = (first[1] + box_1) * BOX[2]
    q2 = (first[2] + box_2) * BOX[3]
    along = residue + at * STEP
    if AXIS == 0:
        q0 += along
    if AXIS == 1:
        q1 += along
    if AXIS == 2:
        q2 += along
    return image, q0, q1, q2


@gluon.jit
def stored_images(box, images, OPERAND: gl.constexpr, PRODUCTS: gl.constexpr, PN: gl.constexpr):
    """First image of a box of PN images as it is stored.

    Operands of several parts are stored one part after the other, `images` boxes each, and boxes are counted on from
    one product of parts to the next: of PRODUCTS, the last ones of PART_OF (dy, x). Small products come first: tensor
    cores cut off what does not fit beside the sum so far.
    """
    PART_OF: gl.constexpr = ((2, 0, 1, 1, 0, 0), (0, 2, 1, 0, 1, 0))
    row = box + PART_OF[OPERAND][6 - PRODUCTS] * images
    for j in gl.static_range(7 - PRODUCTS, 6):
        over = (box >= (j - 6 + PRODUCTS) * images).to(gl.int32)
        row += over * (PART_OF[OPERAND][j] - PART_OF[OPERAND][j - 1] - 1) * images
    return row * PN


@gluon.jit
def boxes_inside(tap, extents, boxes, A: gl.constexpr, AXIS: gl.constexpr, CHAIN: gl.constexpr,
                 GEOMETRY: gl.constexpr, BOX: gl.constexpr):
    """The first box of an axis where a tap reads x at all, and how many there are."""
    if CHAIN and A == AXIS:
        return tap * 0, boxes
    reach = tap * GEOMETRY[1][A] - GEOMETRY[2][A]
    MORE: gl.constexpr = (GEOMETRY[3] - 1) * GEOMETRY[1][A] if A == AXIS else 0  # from the first to the last tap
    low = (gl.maximum(-reach - MORE, 0) + GEOMETRY[0][A] - 1) // GEOMETRY[0][A]
    high = gl.minimum((extents[4 + A] - 1 - reach + GEOMETRY[0][A]) // GEOMETRY[0][A], extents[1 + A])
    first = low // BOX[1 + A]
    return first, gl.maximum((high + BOX[1 + A] - 1) // BOX[1 + A] - first, 0)


@gluon.jit
def lines_of_tile(tap0, tap1, tap2, shape, extents, AXIS: gl.constexpr, CHAIN: gl.constexpr, GEOMETRY: gl.constexpr,
                  BOX: gl.constexpr):
    """First boxes and shape of the lines on which some tap of a tile reads x: the others add nothing."""
    length, spread, boxes_0, boxes_1, boxes_2 = shape
    first0, boxes_0 = boxes_inside(tap0, extents, boxes_0, 0, AXIS, CHAIN, GEOMETRY, BOX)
    first1, boxes_1 = boxes_inside(tap1, extents, boxes_1, 1, AXIS, CHAIN, GEOMETRY, BOX)
    first2, boxes_2 = boxes_inside(tap2, extents, boxes_2, 2, AXIS, CHAIN, GEOMETRY, BOX)
    return (first0, first1, first2), (length, spread, boxes_0, boxes_1, boxes_2)


@gluon.jit
def tile_place(tile, AXIS: gl.constexpr, NT: gl.constexpr, KERNEL: gl.constexpr, BK: gl.constexpr, CB: gl.constexpr,
               KG: gl.constexpr, CG: gl.constexpr):
    """First channels (of output and input), first tap and group of a tile."""
    C_TILES: gl.constexpr = (CG + CB - 1) // CB
    K_TILES: gl.constexpr = (KG + BK - 1) // BK
    G0: gl.constexpr = (KERNEL[0] + NT - 1) // NT if AXIS == 0 else KERNEL[0]
    G1: gl.constexpr = (KERNEL[1] + NT - 1) // NT if AXIS == 1 else KERNEL[1]
    G2: gl.constexpr = (KERNEL[2] + NT - 1) // NT if AXIS == 2 else KERNEL[2]
    c_tile = (tile % C_TILES) * CB
    rest = tile // C_TILES
    k_tile = (rest % K_TILES) * BK
    rest = rest // K_TILES
    tap2 = (rest % G2) * (NT if AXIS == 2 else 1)
    rest = rest // G2
    tap1 = (rest % G1) * (NT if AXIS == 1 else 1)
    rest = rest // G1
    tap0 = (rest % G0) * (NT if AXIS == 0 else 1)
    return k_tile, c_tile, tap0, tap1, tap2, rest // G0


@gluon.constexpr_function
def tap_tiles(kernel, axis, taps):
    """Tiles with the same channels."""
    return kernel[0] * kernel[1] * kernel[2] // kernel[axis] * ((kernel[axis] + taps - 1) // taps)


@gluon.jit
def number_in_row(TILING: gl.constexpr, AXIS: gl.constexpr, NT: gl.constexpr, PARTS: gl.constexpr):
    """The number of this program's tile among those with the same output channels and group."""
    KERNEL, BK, CB, KG, CG = TILING
    C_TILES: gl.constexpr = (CG + CB - 1) // CB
    K_TILES: gl.constexpr = (KG + BK - 1) // BK
    tile = gl.program_id(0) % (gl.num_programs(0) // PARTS)
    return (tile // (C_TILES * K_TILES)) % tap_tiles(KERNEL, AXIS, NT) * C_TILES + tile % C_TILES


@gluon.jit
def slot_after(slot, round, STEPS: gl.constexpr, SLOTS: gl.constexpr):
    """The slot some steps on, and the round it is in."""
    over = (slot + STEPS >= SLOTS).to(gl.int32)
    return slot + STEPS - over * SLOTS, round ^ over


@gluon.jit
def segment(table, number, shape, extents, images, TILING: gl.constexpr, SEGMENTS: gl.constexpr, PARTS: gl.constexpr,
            AXIS: gl.constexpr, CHAIN: gl.constexpr, GEOMETRY: gl.constexpr, BOX: gl.constexpr):
    """One of this program's segments: the place of its tile, that of its lines, (part, first line, end, zero parts).

    Where all tiles have as many PARTS, a program has one of them, which it finds without the table: a first load takes
    about a microsecond.
    """
    KERNEL, BK, CB, KG, CG = TILING
    if PARTS == 0:
        at = table + gl.program_id(0) * (SEGMENTS * 5) + number * 5
        tile = gl.load(at)
        run = (gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4))
    else:
        tile = gl.program_id(0) % (gl.num_programs(0) // PARTS)
    place = tile_place(tile, AXIS, GEOMETRY[3], KERNEL, BK, CB, KG, CG)
    first, seen = lines_of_tile(place[2], place[3], place[4], shape, extents, AXIS, CHAIN, GEOMETRY, BOX)
    if PARTS > 0:
        part = gl.program_id(0) // (gl.num_programs(0) // PARTS)
        count = seen[0] * seen[1] * seen[2] * seen[3] * seen[4] * images
        length = (count + PARTS - 1) // PARTS
        begin = gl.minimum(part * length, count)
        run = (part, begin, gl.minimum(begin + length, count), tile * 0)
    return place, first, seen, run
