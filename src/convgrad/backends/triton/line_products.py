"""Products of lines (see weight_lines.py): dy and x of a run from shared memory to sums, device functions in Gluon."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment, attr-defined"
# ruff: noqa: RUF005
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .line_places import slot_after, wrapped


@gluon.jit
def product_of_line(y_pixels, x_pixels, acc, TURNED: gl.constexpr, BP: gl.constexpr, BK: gl.constexpr):
    """Add the products of a line's pixels; rows of the sums are output channels, or input channels where TURNED."""
    if TURNED:
        rows = x_pixels
        columns = y_pixels.reshape([BP, BK])
    else:
        rows = y_pixels.reshape([BP, BK])
        columns = x_pixels
    return warpgroup_mma(rows.permute([1, 0]), columns, acc, is_async=True)


@gluon.jit
def x_line(x_slots, slot, tap, BP: gl.constexpr, CB: gl.constexpr, UNITS: gl.constexpr):
    """The pixels of x that a tap multiplies; with UNITS (see weight_lines.py) those of all taps are in one slot."""
    if UNITS[0] == 0:
        return x_slots.index(slot).reshape([BP, CB])
    else:
        layout: gl.constexpr = gl.NVMMASharedLayout(x_slots.layout.swizzle_byte_width, 16, rank=2)
        return x_slots.index(slot * UNITS[0] + tap * UNITS[1])._reinterpret(x_slots.dtype, [BP, CB], layout)


@gluon.jit
def multiply_lines(slots, barriers, begin, end, first, length, state, sums, bias, ones, BIAS: gl.constexpr,
                   TURNED: gl.constexpr, NT: gl.constexpr, ADVANCE: gl.constexpr, UNITS: gl.constexpr,
                   BP: gl.constexpr, BK: gl.constexpr, CB: gl.constexpr, YS: gl.constexpr, XS: gl.constexpr):
    """Add the products of lines of a run, which starts at `first`, and with BIAS the sums of dy to `bias`.

    A slot is given back when the next line's products are under way.
    """
    y_slots, x_slots = slots
    y_full, y_empty, x_full, x_empty = barriers
    LINES: gl.constexpr = NT if UNITS[0] == 0 else 1  # slots of x for a line of dy
    # of x: the first tap's slot; `back`: x lines of the line before that are not needed again
    y_slot, y_round, x_slot, x_round, at, y_before, x_before, round_before, back = state
    for line in range(begin, end):
        mbarrier.wait(y_full.index(y_slot), y_round)
        more = ()
        if BIAS:
            bias = warpgroup_mma(y_slots.index(y_slot).reshape([BP, BK]).permute([1, 0]), ones.permute([1, 0]), bias,
                                 is_async=True)
        for t in gl.static_range(NT):
            slot, round = slot_after(x_slot, x_round, t if LINES > 1 else 0, XS)
            if LINES > 1:  # otherwise one barrier stands for a slot of both
                mbarrier.wait(x_full.index(slot), round)
            x_pixels = x_line(x_slots, slot, t, BP, CB, UNITS)
            more += (product_of_line(y_slots.index(y_slot), x_pixels, sums[t], TURNED, BP, BK),)
        if BIAS:
            more = warpgroup_mma_wait(num_outstanding=NT, deps=more + (bias,))
            sums = more[:NT]
            bias = more[NT]
        else:
            sums = warpgroup_mma_wait(num_outstanding=NT, deps=more)
            if NT == 1:
                sums = (sums,)
        mbarrier.arrive(y_empty.index(y_before), pred=line > first)
        if LINES > 1:
            for t in gl.static_range(LINES):
                slot, round = slot_after(x_before, x_round, t, XS)
                mbarrier.arrive(x_empty.index(slot), pred=t < back)
        y_before = y_slot
        y_slot, carry = wrapped(y_slot, 1, YS)
        y_round ^= carry
        x_before = x_slot
        round_before = x_round
        at, last = wrapped(at, 1, length)
        back = gl.where(last != 0, LINES, ADVANCE)
        over = (x_slot + back >= XS).to(gl.int32)
        x_slot += back - over * XS
        x_round ^= over
    if BIAS:
        more = warpgroup_mma_wait(num_outstanding=0, deps=sums + (bias,))
        sums = more[:NT]
        bias = more[NT]
    else:
        sums = warpgroup_mma_wait(num_outstanding=0, deps=sums)
        if NT == 1:
            sums = (sums,)
    return sums, bias, (y_slot, y_round, x_slot, x_round, at, y_before, x_before, round_before, back)


@gluon.jit
def bias_share(begin, end, number, TILES: gl.constexpr):
    """The lines of a run whose dy the tile with this number adds to the bias gradient: TILES tiles share them."""
    length = end - begin
    return begin + number * length // TILES, begin + (number + 1) * length // TILES


@gluon.jit
def multiply_run(slots, barriers, run, length, state, sums, bias, ones, share, BIAS: gl.constexpr,
                 SHARES: gl.constexpr, TURNED: gl.constexpr, NT: gl.constexpr, ADVANCE: gl.constexpr,
                 UNITS: gl.constexpr, BP: gl.constexpr, BK: gl.constexpr, CB: gl.constexpr, YS: gl.constexpr,
                 XS: gl.constexpr):
    """Add the products of all lines of a segment, and with BIAS the sums of dy of some."""
    begin, end = run
    y_slot, y_round, x_slot, x_round = state
    # NOTE: values of their own: Triton takes a variable that starts as another one and becomes it for a constant
    walk = (y_slot, y_round, x_slot, x_round, begin % length, begin * 0, begin * 0, begin * 0, begin * 0)
    if BIAS:
        bias_begin, bias_end = bias_share(begin, end, share, SHARES)
        if SHARES > 1:
            sums, bias, walk = multiply_lines(slots, barriers, begin, bias_begin, begin, length, walk, sums, bias, ones,
                                              False, TURNED, NT, ADVANCE, UNITS, BP, BK, CB, YS, XS)
        sums, bias, walk = multiply_lines(slots, barriers, bias_begin, bias_end, begin, length, walk, sums, bias, ones,
                                          True, TURNED, NT, ADVANCE, UNITS, BP, BK, CB, YS, XS)
        if SHARES > 1:
            sums, bias, walk = multiply_lines(slots, barriers, bias_end, end, begin, length, walk, sums, bias, ones,
                                              False, TURNED, NT, ADVANCE, UNITS, BP, BK, CB, YS, XS)
    else:
        sums, bias, walk = multiply_lines(slots, barriers, begin, end, begin, length, walk, sums, bias, ones, False,
                                          TURNED, NT, ADVANCE, UNITS, BP, BK, CB, YS, XS)
    y_slot, y_round, x_slot, x_round, _at, y_before, x_before, round_before, _back = walk
    y_empty, x_empty = barriers[1], barriers[3]
    LINES: gl.constexpr = NT if UNITS[0] == 0 else 1
    # a run may end within a chain, whose last lines nobody needs then
    mbarrier.arrive(y_empty.index(y_before), pred=begin < end)
    if LINES > 1:
        for t in gl.static_range(LINES):
            slot, _round = slot_after(x_before, x_round, t, XS)
            mbarrier.arrive(x_empty.index(slot), pred=begin < end)
    if begin < end:
        x_slot, x_round = slot_after(x_before, round_before, LINES, XS)
    return sums, bias, (y_slot, y_round, x_slot, x_round)
