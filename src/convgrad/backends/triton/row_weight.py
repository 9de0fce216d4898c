"""The dense weight gradient of FP8 numbers from rows of pixels (see `pixel_rows.py`), by FP8 products; in Gluon.

A program sums BK output channels x CB input channels of one tap over a run of steps. A step is 128 pixels of a row of
dy and of the row of x that the tap meets there. One warp copies the steps into a ring of slots, two groups of four
warps multiply them, each 64 of the output channels: while one adds a step's sums in float32, the other's products run.
What the copies fill with zeros is the padding. Sums with a NaN are flagged, for `masked_rows_kernel` to make again.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from .box_lines import chunks_of
from .box_places import any_nan
from .fp8_products import add_narrow
from .line_places import tile_place, wrapped
from .weight_lines import store_tap


@gluon.jit
def pixels_inside(tap, X, Y, T: gl.constexpr, D: gl.constexpr, P: gl.constexpr):
    """The first pixel of an axis where a tap reads x, how many there are, and where pixel 0 would read."""
    reach = tap * D - P
    low = (gl.maximum(-reach, 0) + T - 1) // T
    return low, gl.maximum(gl.minimum((gl.maximum(X - 1 - reach, -T) + T) // T, Y) - low, 0), reach


@gluon.jit
def copy_steps(dy_box, x_box, dy_slots, x_slots, full, empty, table, extents, GEOMETRY: gl.constexpr,
               TILING: gl.constexpr, ROWS: gl.constexpr, SEGMENTS: gl.constexpr, SLOTS: gl.constexpr):
    """The warp that copies both operands, in the order in which `sum_steps` reads them."""
    KERNEL, BK, CB, KG, CG = TILING
    T, D, P = GEOMETRY
    IMAGES, PLANE, BY_TAP, COPIES, BP = ROWS
    Y0, Y1, Y2, X0, X1, X2 = extents
    slot = gl.program_id(0) * 0
    round = gl.program_id(0) * 0  # how often all slots were filled, modulo 2
    for number in range(SEGMENTS):
        at = table + (gl.program_id(0) * SEGMENTS + number) * 4
        begin = gl.load(at + 2)
        end = gl.load(at + 3)
        k_tile, c_tile, tap0, tap1, tap2, _ = tile_place(gl.load(at), 2, 1, KERNEL, BK, CB, KG, CG)
        low0, count0, reach0 = pixels_inside(tap0, X0, Y0, T[0], D[0], P[0])
        low1, count1, reach1 = pixels_inside(tap1, X1, Y1, T[1], D[1], P[1])
        low2, count2, reach2 = pixels_inside(tap2, X2, Y2, T[2], D[2], P[2])
        copy = tap2 if BY_TAP else (reach2 + P[2] * T[2]) % T[2]
        if PLANE:
            run = count1 * Y2 * IMAGES
            start = low1 * Y2 * IMAGES
            shift = reach1 * Y2 * IMAGES
            lines = count1 * 0 + 1
        else:
            run = count2 * IMAGES
            start = low2 * IMAGES
            shift = ((reach2 + P[2] * T[2]) // T[2] - P[2]) * IMAGES
            if BY_TAP:  # with zeros where the tap reads nothing
                run = Y2 * IMAGES
                start = low2 * 0
                shift = low2 * 0
            lines = count1
        steps = gl.maximum((run + BP - 1) // BP, 1)
        rest = begin // steps
        step = begin % steps
        line = rest % lines
        q0 = rest // lines % count0
        image = rest // lines // count0
        for _ in range(begin, end):
            y_row = image * Y0 + low0 + q0
            x_row = image * X0 + (low0 + q0) * T[0] + reach0
            if not PLANE:
                y_row = y_row * Y1 + low1 + line
                x_row = x_row * X1 + (low1 + line) * T[1] + reach1
            p = start + step * BP
            mbarrier.wait(empty.index(slot), round ^ 1)
            mbarrier.expect(full.index(slot), (BK + CB) * BP)
            tma.async_copy_global_to_shared(dy_box, [k_tile, y_row, p], full.index(slot), dy_slots.index(slot))
            tma.async_copy_global_to_shared(x_box, [c_tile, x_row * COPIES + copy, p + shift], full.index(slot),
                                            x_slots.index(slot))
            slot, carry = wrapped(slot, 1, SLOTS)
            round ^= carry
            step, carry = wrapped(step, 1, steps)
            line, carry = wrapped(line, carry, lines)
            q0, carry = wrapped(q0, carry, count0)
            image += carry


@gluon.jit
def sum_steps(HALF: gl.constexpr, dy_slots, x_slots, full, empty, result, sums, flags, table, result_steps,
              TILING: gl.constexpr, SEGMENTS: gl.constexpr, BP: gl.constexpr, HALVES: gl.constexpr,
              SLOTS: gl.constexpr):
    """Four multiplying warps: the steps of each segment, then their rows of its sums to the result or to a slot."""
    KERNEL, BK, CB, KG, CG = TILING
    HM: gl.constexpr = BK // HALVES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CB, 32])
    slot = gl.program_id(0) * 0
    round = gl.program_id(0) * 0
    for number in range(SEGMENTS):
        segment = gl.program_id(0) * SEGMENTS + number
        at = table + segment * 4
        k_tile, c_tile, tap0, tap1, tap2, _ = tile_place(gl.load(at), 2, 1, KERNEL, BK, CB, KG, CG)
        goes_to = gl.load(at + 1)
        acc = gl.full([HM, CB], 0.0, gl.float32, layout)
        for _ in range(gl.load(at + 2), gl.load(at + 3)):
            mbarrier.wait(full.index(slot), round)
            rows = dy_slots.index(slot).reshape([BK, BP]).slice(HALF * HM, HM, dim=0)
            acc = add_narrow(acc, rows, x_slots.index(slot).reshape([CB, BP]), layout)
            mbarrier.arrive(empty.index(slot))
            slot, carry = wrapped(slot, 1, SLOTS)
            round ^= carry
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))  # without it the compiler spills sums in the loop
        gl.store(flags + segment * HALVES + HALF, any_nan(acc).to(gl.int32))
        if goes_to >= 0:
            row = HALF * HM + gl.arange(0, HM, layout=gl.SliceLayout(1, layout))
            column = gl.arange(0, CB, layout=gl.SliceLayout(0, layout))
            gl.store(sums + goes_to.to(gl.int64) * (BK * CB) + row[:, None] * CB + column[None, :], acc)
        else:
            tap = (gl.where(goes_to < -1, KERNEL[0], tap0), tap1, tap2)  # programs with fewer segments store nothing
            store_sums(acc, result, tap, k_tile + HALF * HM, c_tile, result_steps, KERNEL, KG, CG)


@gluon.jit
def store_sums(acc, target, tap, k_tile, c_tile, steps, KERNEL: gl.constexpr, KG: gl.constexpr, CG: gl.constexpr):
    """Some columns at a time: the addresses of all would leave no registers to the sums."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    chunks = chunks_of(acc, 32)
    for i in gl.static_range(len(chunks)):
        store_tap(chunks[i], target, tap, (k_tile, c_tile + i * 32), steps, False, False, layout, 4, KERNEL,
                  acc.shape[0], 32, KG, CG)


@gluon.jit
def row_weight_kernel(
        dy_box, x_box, result, sums, flags, table, Y0, Y1, Y2, X0, X1, X2, r_k, r_c, r_0, r_1, r_2,
        K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, T0: gl.constexpr, T1: gl.constexpr, T2: gl.constexpr,
        D0: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
        KG: gl.constexpr, CG: gl.constexpr, IMAGES: gl.constexpr, PLANE: gl.constexpr, BY_TAP: gl.constexpr,
        COPIES: gl.constexpr, SEGMENTS: gl.constexpr, BK: gl.constexpr, CB: gl.constexpr, BP: gl.constexpr,
        SLOTS: gl.constexpr):
    """PLANE: rows hold whole planes. BY_TAP: x has a row for each tap of the last axis, else for each phase."""
    HALVES: gl.constexpr = BK // 64
    TILING: gl.constexpr = ((K0, K1, K2), BK, CB, KG, CG)
    GEOMETRY: gl.constexpr = ((T0, T1, T2), (D0, D1, D2), (P0, P1, P2))
    ROWS: gl.constexpr = (IMAGES, PLANE, BY_TAP, COPIES, BP)
    dy_slots = gl.allocate_shared_memory(dy_box.dtype, [SLOTS, BK, 1, BP], dy_box.layout)
    x_slots = gl.allocate_shared_memory(x_box.dtype, [SLOTS, CB, 1, BP], x_box.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=HALVES)
    extents = (Y0, Y1, Y2, X0, X1, X2)
    steps = (r_k, r_c, r_0, r_1, r_2)
    if HALVES == 2:
        gl.warp_specialize(
            [(sum_steps, (0, dy_slots, x_slots, full, empty, result, sums, flags, table, steps, TILING, SEGMENTS, BP, 2,
                          SLOTS)),
             (sum_steps, (1, dy_slots, x_slots, full, empty, result, sums, flags, table, steps, TILING, SEGMENTS, BP, 2,
                          SLOTS)),
             (copy_steps, (dy_box, x_box, dy_slots, x_slots, full, empty, table, extents, GEOMETRY, TILING, ROWS,
                           SEGMENTS, SLOTS))],
            [4, 1], [240, 24])
    else:
        gl.warp_specialize(
            [(sum_steps, (0, dy_slots, x_slots, full, empty, result, sums, flags, table, steps, TILING, SEGMENTS, BP, 1,
                          SLOTS)),
             (copy_steps, (dy_box, x_box, dy_slots, x_slots, full, empty, table, extents, GEOMETRY, TILING, ROWS,
                           SEGMENTS, SLOTS))],
            [1], [24])
