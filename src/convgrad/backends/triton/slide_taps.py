"""The taps of a depthwise weight in registers: read as they lie in memory, turned in shared memory."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# ruff: noqa: RUF005
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def padded(count):
    """The next power of two, 16 at least."""
    return max(16, triton.next_power_of_2(count))


@triton.constexpr_function
def tap_layout(columns, WARPS):
    """The lanes of a warp along the taps of a channel, which are neighbours in memory."""
    lanes = min(32, columns)
    return gl.BlockedLayout([1, 1], [32 // lanes, lanes], [WARPS, 1], [1, 0])


@gluon.jit
def held_taps(weight, c_tile, w_c, w_0, w_1, C: gl.constexpr, W2: gl.constexpr, K0: gl.constexpr, K1: gl.constexpr,
              K2: gl.constexpr, BC: gl.constexpr, WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    """All taps of BC channels as a tuple of rows of channels, and whether one of them is infinite or NaN.

    Read tap by tap, every channel would be a memory access of its own: with 49 taps that took longer than the sums.
    """
    COLUMNS: gl.constexpr = padded(K0 * K1 * K2)
    READ: gl.constexpr = tap_layout(COLUMNS, WARPS)
    c = c_tile + gl.arange(0, BC, layout=gl.SliceLayout(1, READ))[:, None]
    tap = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, READ))[None, :]
    at = weight + c * w_c + ((tap // (K1 * K2)) * w_0 + ((tap // K2) % K1) * w_1 + (tap % K2) * W2)
    values = gl.load(at, mask=(c < C) & (tap < K0 * K1 * K2), other=0.0).to(gl.float32)
    bad = gl.max(gl.max((values * 0.0 != 0.0).to(gl.int32), 1), 0)
    table = gl.allocate_shared_memory(gl.float32, [COLUMNS, BC], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    table.store(gl.permute(values, (1, 0)))
    gl.thread_barrier()
    taps = ()
    for k in gl.static_range(K0 * K1 * K2):
        taps = taps + (table.slice(k, 1).load(LAYOUT),)
    return taps, bad


@triton.constexpr_function
def sum_layout(S, WARPS):
    """S rows of one column a thread: what is added up lies in one thread."""
    return gl.BlockedLayout([S, 1], [1, 32], [WARPS, 1], [1, 0])


@gluon.jit
def store_sums(out, sums, c_tile, taps, C: gl.constexpr, COUNT: gl.constexpr, S: gl.constexpr, BC: gl.constexpr,
               WARPS: gl.constexpr):
    """Add the S strips of COUNT sums and store them as rows of channels; only the first `taps` rows are wanted.

    All at once through shared memory: one after the other, each would wait for the whole program twice.
    """
    ROWS: gl.constexpr = padded(COUNT)
    table = gl.allocate_shared_memory(gl.float32, [ROWS * S, BC], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for e in gl.static_range(COUNT):
        table.slice(e * S, S).store(sums[e])
    gl.thread_barrier()
    total = gl.sum(gl.reshape(table.load(sum_layout(S, WARPS)), [ROWS, S, BC]), 1)
    LAYOUT: gl.constexpr = total.type.layout
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    c = c_tile + gl.arange(0, BC, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(out + row * C + c, total, mask=(row < taps) & (c < C))


@gluon.jit
def row_table(ROWS: gl.constexpr, U: gl.constexpr, S: gl.constexpr, BC: gl.constexpr):
    """Shared memory for ROWS rows of U columns: where registers do not hold them."""
    return gl.allocate_shared_memory(gl.float32, [ROWS * U, S, BC], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def put_row(table, place, row, U: gl.constexpr):
    for u in gl.static_range(U):
        table.index(place * U + u).store(row[u])


@gluon.jit
def get_row(table, place, U: gl.constexpr, LAYOUT: gl.constexpr):
    row = ()
    for u in gl.static_range(U):
        row = row + (table.index(place * U + u).load(LAYOUT),)
    return row
