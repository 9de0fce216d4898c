"""Depthwise gradients by sliding along rows, in Gluon: every element is loaded once per strip and used from registers.

A thread owns a *strip*: U neighbouring columns of V channels. It walks down the rows; a row is a window of columns,
wide enough for all taps of the strip. The loads of the next row are under way while one is used. Columns and taps are
tuples that the compiler unrolls, so that addresses are constants and all sums stay in registers. `depthwise.py` has the
same sums in plain Triton; Gluon is used because plain Triton's search for layouts takes minutes on such long bodies.

Axis 0 is summed tap by tap, axis 1 is the one along which a strip slides, axis 2 the one of the columns. On axis 1 a
dilation is taken apart into residues: rows of one residue are neighbours. One *step* of the slide is one row of dy.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# ruff: noqa: RUF005
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .slide_taps import held_taps


@triton.constexpr_function
def window_low(U, T, D, P, K):
    """Leftmost column of dy that the columns 0..U-1 of dx need."""
    return min(((c + P - k * D) // T for c in range(U) for k in range(K) if (c + P - k * D) % T == 0), default=0)


@triton.constexpr_function
def window_width(U, T, D, P, K):
    """How many columns of dy the columns 0..U-1 of dx need."""
    columns = [(c + P - k * D) // T for c in range(U) for k in range(K) if (c + P - k * D) % T == 0]
    return max(columns) - min(columns) + 1 if columns else 1


@triton.constexpr_function
def tap_between(c, w, U, T, D, P, K):
    """The tap through which column w of a window of dy reaches column c of dx; -1 for none."""
    low = min(((c + P - k * D) // T for c in range(U) for k in range(K) if (c + P - k * D) % T == 0), default=0)
    return next((k for k in range(K) if c + P - k * D == (w + low) * T), -1)


@triton.constexpr_function
def larger(a, b):
    return max(a, b)


@triton.constexpr_function
def rows_reached(K, T):
    """How many steps a row of dy stays in use."""
    return (K + T - 1) // T


@triton.constexpr_function
def strip_layout(V, BC, WARPS):
    """V channels a thread, the lanes of a warp along the channels first."""
    lanes = BC // V
    return gl.BlockedLayout([1, V], [32 // lanes, lanes], [WARPS, 1], [1, 0])


@gluon.jit
def load_row(at, column, there, EXTENT: gl.constexpr, STEP: gl.constexpr, WIDTH: gl.constexpr):
    """WIDTH neighbouring columns of a row from `column` on; zero outside the image."""
    values = ()
    for j in gl.static_range(WIDTH):
        inside = (column + j).to(gl.uint32, bitcast=True) < EXTENT
        values = values + (gl.load(at + j * STEP, mask=there & inside, other=0.0),)
    return values


@gluon.jit
def load_planes(at, step, column, there, plane, extent, EXTENT: gl.constexpr, STEP: gl.constexpr, WIDTH: gl.constexpr,
                K: gl.constexpr, D: gl.constexpr, P: gl.constexpr):
    """The same row of the K planes that reach a plane of dx."""
    values = ()
    for k in gl.static_range(K):
        values = values + load_row(at - k * D * step, column, there & below(plane + (P - k * D), extent), EXTENT, STEP,
                                   WIDTH)
    return values


@gluon.jit
def as_sums(values, WIDTH: gl.constexpr):
    sums = ()
    for j in gl.static_range(WIDTH):
        sums = sums + (values[j].to(gl.float32),)
    return sums


@gluon.jit
def steps_of(values, ALIGN: gl.constexpr):
    """Strides as 64-bit numbers; one that is 1 comes as a constant, which has no type of its own."""
    steps = ()
    for j in gl.static_range(len(values)):
        steps = steps + (gl.cast(values[j], gl.int64) * ALIGN,)
    return steps


@gluon.jit
def below(value, extent):
    """0 <= value < extent."""
    return value.to(gl.uint32, bitcast=True) < extent


@gluon.jit
def add_line(sums, window, taps, U: gl.constexpr, WIDTH: gl.constexpr, T: gl.constexpr, D: gl.constexpr,
             P: gl.constexpr, K: gl.constexpr):
    """Add a window of dy, times a line of taps, to the sums of U columns of dx."""
    for w in gl.static_range(WIDTH):
        for c in gl.static_range(U):
            if tap_between(c, w, U, T, D, P, K) >= 0:
                sums = sums[:c] + (sums[c] + window[w] * taps[tap_between(c, w, U, T, D, P, K)],) + sums[c + 1:]
    return sums


@gluon.jit
def load_taps(at, there, STEP: gl.constexpr, K: gl.constexpr):
    """A line of taps."""
    taps = ()
    for k in gl.static_range(K):
        taps = taps + (gl.load(at + k * STEP, mask=there, other=0.0).to(gl.float32),)
    return taps


@gluon.jit
def read_taps(at, w_0, w_1, there, zero, STEP: gl.constexpr, K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr):
    """All taps, and whether one of them is infinite or NaN."""
    taps = ()
    for k in gl.static_range(K0 * K1):
        taps = taps + load_taps(at + (k // K1) * w_0 + (k % K1) * w_1, there, STEP, K2)
    suspect = zero
    for k in gl.static_range(K0 * K1 * K2):
        suspect += taps[k] * 0.0
    return taps, any_of(suspect != suspect)


@gluon.jit
def store_row(at, column, there, sums, EXTENT: gl.constexpr, STEP: gl.constexpr, U: gl.constexpr,
              BEYOND: gl.constexpr = False):
    """Store U columns; with BEYOND some strips lie outside the image altogether."""
    for c in gl.static_range(U):
        ok = there
        if EXTENT % U != 0 or BEYOND:
            ok = there & (column + c < EXTENT)
        gl.store(at + c * STEP, sums[c].to(at.dtype.element_ty), mask=ok)


@gluon.jit
def place_of(tile, strips, segments, planes, RESIDUES: gl.constexpr, NEAR: gl.constexpr, S: gl.constexpr,
             LAYOUT: gl.constexpr):
    """(image, plane, segment, residue, strip) of the S strips of a tile.

    NEAR: planes are neighbours, because taps reach several: what all of them load then comes from memory but once.
    """
    g = tile * S + gl.arange(0, S, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    if NEAR:
        plane = g % planes
        g = g // planes
    strip = g % strips
    g = g // strips
    residue = g % RESIDUES
    g = g // RESIDUES
    segment = g % segments
    g = g // segments
    if not NEAR:
        plane = g % planes
        g = g // planes
    return g, plane, segment, residue, strip


@gluon.jit
def any_of(flags):
    return gl.max(gl.max(flags.to(gl.int32), 1), 0)


@gluon.jit
def masked_input(dy, w_at, dx, there, n, plane, first, strip, c, rows, Q0, Q1, X1, y_steps, r_steps, w_0, w_1,
                 Q2: gl.constexpr, X2: gl.constexpr, Y2: gl.constexpr, R2: gl.constexpr, W2: gl.constexpr,
                 KERNEL: gl.constexpr, STRIDE: gl.constexpr, DILATION: gl.constexpr, PAD: gl.constexpr,
                 U: gl.constexpr, zero):
    """The rows first, first + dilation, … of dx with every product masked: slow, for infinite weights.

    A zero that stands for padding times an infinite weight would be NaN.
    """
    y_n, y_0, y_1 = y_steps
    r_n, r_0, r_1 = r_steps
    for e in range(0, rows * U):
        m_1 = first + (e // (STRIDE[1] * U)) * (STRIDE[1] * DILATION[1]) + (e // U) % STRIDE[1]
        m_2 = strip * U + e % U
        again = zero
        for tap in range(0, KERNEL[0] * KERNEL[1] * KERNEL[2]):
            tap0 = tap // (KERNEL[1] * KERNEL[2])
            tap1 = (tap // KERNEL[2]) % KERNEL[1]
            tap2 = tap % KERNEL[2]
            s_0 = plane + PAD[0] - tap0 * DILATION[0]
            s_1 = m_1 + PAD[1] - tap1 * DILATION[1]
            s_2 = m_2 + PAD[2] - tap2 * DILATION[2]
            ok = there & (below(s_0, Q0) & below(s_1, Q1 * STRIDE[1]) & (s_1 % STRIDE[1] == 0)
                          & below(s_2, Q2 * STRIDE[2]) & (s_2 % STRIDE[2] == 0))
            source = dy + (n.to(gl.int64) * y_n + s_0.to(gl.int64) * y_0 + (s_1 // STRIDE[1]).to(gl.int64) * y_1
                           + (s_2 // STRIDE[2]) * Y2) + c
            value = gl.load(source, mask=ok, other=0.0).to(gl.float32)
            factor = gl.load(w_at + tap0 * w_0 + tap1 * w_1 + tap2 * W2, mask=there, other=0.0).to(gl.float32)
            again += gl.where(ok, value * factor, 0.0)
        target = dx + (n.to(gl.int64) * r_n + plane.to(gl.int64) * r_0 + m_1.to(gl.int64) * r_1 + m_2 * R2) + c
        gl.store(target, again.to(dx.dtype.element_ty), mask=there & (below(m_1, X1) & (m_2 < X2)))


@gluon.jit
def slide_input_kernel(
        dy, weight, dx, N, Q0, Q1, X0, X1, strips, segments, steps, start, turns, channel_tiles,
        yn, y0, y1, rn, r0, r1, w_c, w_0, w_1,
        YALIGN: gl.constexpr, RALIGN: gl.constexpr, C: gl.constexpr, Q2: gl.constexpr, X2: gl.constexpr,
        Y2: gl.constexpr, R2: gl.constexpr, W2: gl.constexpr,
        K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        T1: gl.constexpr, T2: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr,
        P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
        HELD: gl.constexpr, SHARED: gl.constexpr, FLUSH: gl.constexpr, U: gl.constexpr, V: gl.constexpr,
        UNROLL: gl.constexpr, AHEAD: gl.constexpr, S: gl.constexpr, BC: gl.constexpr, WARPS: gl.constexpr):
    """dx: each row of dy is added to the sums of the rows it reaches; the finished rows are stored, the rest move up.

    A segment of rows starts `start` steps before its first row, so that all rows of dy that reach it are met. With
    FLUSH there is one segment, which starts at the first row of dy and stores what is left after the last one.
    """
    y_n, y_0, y_1 = steps_of((yn, y0, y1), YALIGN)
    r_n, r_0, r_1 = steps_of((rn, r0, r1), RALIGN)
    LAYOUT: gl.constexpr = strip_layout(V, BC, WARPS)
    WIDTH: gl.constexpr = window_width(U, T2, D2, P2, K2)
    LOW: gl.constexpr = window_low(U, T2, D2, P2, K2)
    RING: gl.constexpr = larger(K1, T1)
    FIRST: gl.constexpr = P1 // T1 if D1 == 1 else P1  # row of dy of step 0
    pid = gl.program_id(0)
    c_tile = (pid % channel_tiles) * BC
    c = c_tile + gl.arange(0, BC, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    n, plane, segment, residue, strip = place_of(pid // channel_tiles, strips, segments, X0, D1, K0 > 1, S, LAYOUT)
    there = (n < N) & (c < C)
    step = segment * steps - start
    o = FIRST + residue + step * D1
    i = T1 * FIRST - P1 + residue + step * (T1 * D1)
    column = strip * (U // T2) + LOW
    y_at = dy + (n.to(gl.int64) * y_n + (plane + P0).to(gl.int64) * y_0 + o.to(gl.int64) * y_1 + column * Y2) + c
    r_at = dx + (n.to(gl.int64) * r_n + plane.to(gl.int64) * r_0 + i.to(gl.int64) * r_1 + strip * (U * R2)) + c
    zero = gl.full([S, BC], 0.0, gl.float32, LAYOUT)
    w_at = weight + gl.full([S, 1], 0, gl.int32, LAYOUT) + c * w_c

    if HELD:
        if SHARED > 0:
            taps, bad = held_taps(weight, c_tile, w_c, w_0, w_1, C, W2, K0, K1, K2, BC, WARPS, LAYOUT)
        else:
            taps, bad = read_taps(w_at, w_0, w_1, there, zero, W2, K0, K1, K2)
    else:
        suspect = zero
        for k in range(0, K0 * K1 * K2):
            suspect += gl.load(w_at + k * W2, mask=there, other=0.0).to(gl.float32) * 0.0
        bad = any_of(suspect != suspect)
    if bad != 0:
        masked_input(dy, w_at, dx, there, n, plane, i + start * (T1 * D1), strip, c, steps * T1, Q0, Q1, X1,
                     (y_n, y_0, y_1), (r_n, r_0, r_1), w_0, w_1, Q2, X2, Y2, R2, W2, (K0, K1, K2), (1, T1, T2),
                     (D0, D1, D2), (P0, P1, P2), U, zero)
    else:
        acc = (zero,) * (RING * U)
        ahead = ()
        for a in gl.static_range(AHEAD):
            ahead = ahead + load_planes(y_at + a * D1 * y_1, y_0, column, there & below(o + a * D1, Q1), plane, Q0, Q2,
                                        Y2, WIDTH, K0, D0, P0)
        for turn in range(0, turns):
            for s in gl.static_range(UNROLL):
                current = ahead[:K0 * WIDTH]
                o += D1
                y_at += D1 * y_1
                ahead = ahead[K0 * WIDTH:] + load_planes(
                    y_at + (AHEAD - 1) * D1 * y_1, y_0, column, there & below(o + (AHEAD - 1) * D1, Q1), plane, Q0, Q2,
                    Y2, WIDTH, K0, D0, P0)
                for k0 in gl.static_range(K0):
                    window = as_sums(current[k0 * WIDTH:k0 * WIDTH + WIDTH], WIDTH)
                    for k1 in gl.static_range(K1):
                        if HELD:
                            line = taps[(k0 * K1 + k1) * K2:(k0 * K1 + k1) * K2 + K2]
                        else:
                            line = load_taps(w_at + k0 * w_0 + k1 * w_1, there, W2, K2)
                        acc = acc[:k1 * U] + add_line(acc[k1 * U:k1 * U + U], window, line, U, WIDTH, T2, D2, P2, K2) \
                            + acc[k1 * U + U:]
                for t in gl.static_range(T1):
                    keep = below(i + t, X1)
                    if not FLUSH:
                        keep = keep & (turn * UNROLL + s >= start) & (turn * UNROLL + s < start + steps)
                    store_row(r_at + t * r_1, strip * U, there & keep, acc[t * U:t * U + U], X2, R2, U)
                acc = acc[T1 * U:] + (zero,) * (T1 * U)
                i += T1 * D1
                r_at += T1 * D1 * r_1
        if FLUSH:
            for t in gl.static_range(RING - T1):
                store_row(r_at + t * r_1, strip * U, there & below(i + t, X1), acc[t * U:t * U + U], X2, R2, U)


@gluon.jit
def tall_input_kernel(
        dy, taps, dx, weight, N, planes, Q1, X1, strips, blocks, channel_tiles, yn, y0, y1, rn, r0, r1, w_c, w_1,
        YALIGN: gl.constexpr, RALIGN: gl.constexpr, C: gl.constexpr, Q2: gl.constexpr, X2: gl.constexpr,
        Y2: gl.constexpr, R2: gl.constexpr, W2: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        P1: gl.constexpr, P2: gl.constexpr, R: gl.constexpr, U: gl.constexpr, V: gl.constexpr,
        S: gl.constexpr, BC: gl.constexpr, WARPS: gl.constexpr):
    """dx at stride 1 for kernels with many taps: R rows x U columns a thread, the taps (tap-major) loaded as needed.

    Axis 0 has one tap, which links each of the `planes` of dx with the same plane of dy.
    """
    y_n, y_0, y_1 = steps_of((yn, y0, y1), YALIGN)
    r_n, r_0, r_1 = steps_of((rn, r0, r1), RALIGN)
    LAYOUT: gl.constexpr = strip_layout(V, BC, WARPS)
    WIDTH: gl.constexpr = U + K2 - 1
    LOW: gl.constexpr = P2 - K2 + 1
    pid = gl.program_id(0)
    c = (pid % channel_tiles) * BC + gl.arange(0, BC, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    n, plane, block, _, strip = place_of(pid // channel_tiles, strips, blocks, planes, 1, False, S, LAYOUT)
    there = (n < N) & (c < C)
    i = block * R
    column = strip * U + LOW
    # the rows of dy that reach some row of the tile: row o = i + pad - (K1 - 1) + e meets row r through K1 - 1 + r - e
    highest = gl.max(gl.max(i, 1), 0)
    lowest = gl.min(gl.min(i, 1), 0)
    begin = gl.maximum(K1 - 1 - P1 - highest, 0)
    end = gl.minimum(K1 - 1 + R, Q1 + (K1 - 1 - P1) - lowest)
    o = i + (P1 - K1 + 1) + begin
    y_at = dy + (n.to(gl.int64) * y_n + plane.to(gl.int64) * y_0 + o.to(gl.int64) * y_1 + column * Y2) + c
    t_at = taps + gl.full([S, 1], 0, gl.int32, LAYOUT) + c
    zero = gl.full([S, BC], 0.0, gl.float32, LAYOUT)
    acc = (zero,) * (R * U)
    ahead = load_row(y_at, column, there & below(o, Q1), Q2, Y2, WIDTH)
    for e in range(begin, end):
        window = as_sums(ahead, WIDTH)
        o += 1
        y_at += y_1
        ahead = load_row(y_at, column, there & below(o, Q1), Q2, Y2, WIDTH)
        for r in gl.static_range(R):
            k1 = K1 - 1 + r - e
            line = load_taps(t_at + k1 * (K2 * C), there & (k1 >= 0) & (k1 < K1), C, K2)
            acc = acc[:r * U] + add_line(acc[r * U:r * U + U], window, line, U, WIDTH, 1, 1, P2, K2) + acc[r * U + U:]
    suspect = zero
    for e in gl.static_range(R * U):
        suspect += acc[e] * 0.0
    if any_of(suspect != suspect) != 0:
        w_at = weight + gl.full([S, 1], 0, gl.int32, LAYOUT) + c * w_c
        masked_input(dy, w_at, dx, there, n, plane, i, strip, c, R, planes, Q1, X1, (y_n, y_0, y_1), (r_n, r_0, r_1), 0,
                     w_1, Q2, X2, Y2, R2, W2, (1, K1, K2), (1, 1, 1), (1, 1, 1), (0, P1, P2), U, zero)
    else:
        r_at = dx + (n.to(gl.int64) * r_n + plane.to(gl.int64) * r_0 + i.to(gl.int64) * r_1 + strip * (U * R2)) + c
        for r in gl.static_range(R):
            store_row(r_at + r * r_1, strip * U, there & (i + r < X1), acc[r * U:r * U + U], X2, R2, U)
