"""The input gradient of few channels or small groups as one dense sum over cells; written in Gluon.

A row of the sum holds all results of T0 x T1 x (T2*fold) neighbouring positions and of several groups as columns, so
that a tensor-core product has no empty columns; its weights are spread out beforehand (`cells.spread_kernel`), with
zeros where a column has no such tap. A cell is a piece of one dy position, or a few neighbouring positions, of CB
elements. Lines of cells are copied by one warp; on axis 1 a line is used by all taps that meet it. A program keeps its
columns and takes one tile of rows after another, so that its weights can stay in shared memory.

`gather.py` has the same sums in plain Triton.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def tile_start(tile, boxes, LB: gl.constexpr, PN: gl.constexpr, B2: gl.constexpr):
    """First row (n, j0, j1, j2) of a tile."""
    boxes_0, boxes_1, boxes_2 = boxes
    rest = tile // boxes_2
    j2 = (tile % boxes_2) * B2
    j1 = (rest % boxes_1) * LB
    rest = rest // boxes_1
    return (rest // boxes_0) * PN, rest % boxes_0, j1, j2


@gluon.jit
def copy_cells(dy_box, weight_box, lines, weights, barriers, tiles, boxes, red_start, weight_start,
               U: gl.constexpr, LOW: gl.constexpr, CHUNKS: gl.constexpr, PER_ROW: gl.constexpr, CELL: gl.constexpr,
               CB: gl.constexpr, BN: gl.constexpr, PN: gl.constexpr, B2: gl.constexpr, LB: gl.constexpr,
               STAGES: gl.constexpr, RESIDENT: gl.constexpr):
    """The copying warp: per step the lines of one cell column, and the weights that meet them."""
    full, empty, ready = barriers
    first, last, stride = tiles
    HB: gl.constexpr = LB + U[1] - 1
    STEPS: gl.constexpr = U[0] * U[2] * CHUNKS
    if RESIDENT:
        mbarrier.expect(ready.index(0), STEPS * U[1] * BN * CB * 2)
        for i in range(STEPS * U[1]):
            tma.async_copy_global_to_shared(weight_box, [weight_start + i * BN, 0], ready.index(0), weights.index(i))
    stage = first * 0
    round = first * 0
    for tile in range(first, last, stride):
        n, j0, j1, j2 = tile_start(tile, boxes, LB, PN, B2)
        for step in range(STEPS):
            chunk = step % CHUNKS
            cell = (step // CHUNKS) % U[2] + LOW[2]
            s0 = step // (CHUNKS * U[2])
            part = ((cell % PER_ROW) + PER_ROW) % PER_ROW
            at = (cell - part) // PER_ROW
            mbarrier.wait(empty.index(stage), round ^ 1)
            mbarrier.expect(full.index(stage), HB * PN * B2 * CB * 2 + (0 if RESIDENT else U[1] * BN * CB * 2))
            for line in gl.static_range(HB):
                tma.async_copy_global_to_shared(
                    dy_box, [n, j0 + s0 + LOW[0], j1 + line + LOW[1], j2 + at, red_start + part * CELL + chunk * CB],
                    full.index(stage), lines.index(stage * HB + line))
            if not RESIDENT:
                for s1 in gl.static_range(U[1]):
                    tma.async_copy_global_to_shared(weight_box, [weight_start + (step * U[1] + s1) * BN, 0],
                                                    full.index(stage), weights.index(stage * U[1] + s1))
            stage += 1
            over = (stage == STAGES).to(gl.int32)
            stage -= over * STAGES
            round ^= over


@gluon.jit
def exact_line(dy, weight, n, j0, j1, j2, column, column_start, extents, steps, group_start,
               GEOMETRY: gl.constexpr, FOLD: gl.constexpr, KG: gl.constexpr, CG: gl.constexpr, GP: gl.constexpr):
    """A line again, term by term with a mask on every product: a zero in a product may have met Inf or NaN.

    n, j0, j1, j2 are rows, `column` the columns; returns the sums and where they are.
    """
    K: gl.constexpr = GEOMETRY[0]
    T: gl.constexpr = GEOMETRY[1]
    D: gl.constexpr = GEOMETRY[2]
    P: gl.constexpr = GEOMETRY[3]
    N, Y0, Y1, Y2 = extents
    y_n, y_0, y_1, y_2, w_o, w_i, w_0, w_1, w_2 = steps
    WIDTH: gl.constexpr = CG * GP
    c = (column_start + column) % WIDTH
    phase = (column_start + column) // WIDTH
    i2 = (j2 * (T[2] * FOLD))[:, None] + (phase % (T[2] * FOLD))[None, :]
    i1 = (j1 * T[1] + j2 * 0)[:, None] + ((phase // (T[2] * FOLD)) % T[1])[None, :]
    i0 = (j0 * T[0] + j2 * 0)[:, None] + (phase // (T[2] * FOLD * T[1]))[None, :]
    group = group_start + c // CG
    acc = (i2 * 0).to(gl.float32)
    for step in range(K[0] * K[1] * K[2] * KG):
        k = group * KG + step % KG
        tap = step // KG
        t2 = tap % K[2]
        t1 = (tap // K[2]) % K[1]
        t0 = tap // (K[2] * K[1])
        r0 = i0 + (P[0] - t0 * D[0])
        r1 = i1 + (P[1] - t1 * D[1])
        r2 = i2 + (P[2] - t2 * D[2])
        o0 = r0 // T[0]
        o1 = r1 // T[1]
        o2 = r2 // T[2]
        there = ((r0 >= 0) & (r1 >= 0) & (r2 >= 0) & (o0 * T[0] == r0) & (o1 * T[1] == r1) & (o2 * T[2] == r2)
                 & (o0 < Y0) & (o1 < Y1) & (o2 < Y2) & (n < N)[:, None] & (phase < T[0] * T[1] * T[2] * FOLD)[None, :])
        at = (n.to(gl.int64) * y_n)[:, None] + o0.to(gl.int64) * y_0 + o1.to(gl.int64) * y_1 + o2.to(gl.int64) * y_2
        a = gl.load(dy + at + k[None, :], mask=there, other=0.0).to(gl.float32)
        where = k.to(gl.int64) * w_o + (c % CG).to(gl.int64) * w_i + (t0 * w_0 + t1 * w_1 + t2 * w_2)
        b = gl.load(weight + where[None, :] + i2 * 0, mask=there, other=0.0).to(gl.float32)
        acc += gl.where(there, a * b, 0.0)
    return acc


@gluon.jit
def sum_cells(lines, weights, barriers, pointers, tiles, boxes, extents, results, steps, result_steps, column_start,
              group_start, GEOMETRY: gl.constexpr, FOLD: gl.constexpr, KG: gl.constexpr, CG: gl.constexpr,
              GP: gl.constexpr, U: gl.constexpr, CHUNKS: gl.constexpr, CB: gl.constexpr, BN: gl.constexpr,
              PN: gl.constexpr, B2: gl.constexpr, LB: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr,
              RALIGN: gl.constexpr, EXACT: gl.constexpr, GAPLESS: gl.constexpr, VECTOR: gl.constexpr,
              WARPS: gl.constexpr):
    """The multiplying warps: tile after tile."""
    full, empty, ready = barriers
    dy, weight, result = pointers
    first, last, stride = tiles
    N = extents[0]
    J1, J2, X0, X1, X2 = results
    rn, r0, r1, r2, row_step = result_steps
    M: gl.constexpr = PN * B2
    HB: gl.constexpr = LB + U[1] - 1
    STEPS: gl.constexpr = U[0] * U[2] * CHUNKS
    T: gl.constexpr = GEOMETRY[1]
    WIDTH: gl.constexpr = CG * GP
    RUN: gl.constexpr = T[2] * FOLD * WIDTH
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    COLUMN_THREADS: gl.constexpr = BN // VECTOR if BN // VECTOR < 32 else 32
    wide: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // COLUMN_THREADS, COLUMN_THREADS], [WARPS, 1], [1, 0])
    row = gl.arange(0, M, layout=gl.SliceLayout(1, wide))
    column = gl.arange(0, BN, layout=gl.SliceLayout(0, wide))
    all_column = column_start + column
    COLUMNS: gl.constexpr = T[0] * T[1] * RUN
    column_there = all_column < COLUMNS
    line_phase = all_column // RUN
    in_run = all_column % RUN
    phase_0 = line_phase // T[1]
    phase_1 = line_phase % T[1]
    if GAPLESS:  # all channels of the neighbouring positions that a run holds lie next to each other
        column_at = phase_0 * (r0 * RALIGN) + phase_1 * (r1 * RALIGN) + in_run
    else:
        column_at = (phase_0 * (r0 * RALIGN) + phase_1 * (r1 * RALIGN) + (in_run // WIDTH) * (r2 * RALIGN)
                     + in_run % WIDTH)
    column_at = gl.max_contiguous(gl.multiple_of(column_at, VECTOR), VECTOR)  # the compiler sees powers of two only
    if RESIDENT:
        mbarrier.wait(ready.index(0), 0)
    stage = first * 0
    round = first * 0
    for tile in range(first, last, stride):
        n, j0, j1, j2 = tile_start(tile, boxes, LB, PN, B2)
        sums = (gl.full([M, BN], 0.0, gl.float32, layout),) * LB
        for step in range(STEPS):
            mbarrier.wait(full.index(stage), round)
            more = ()
            for line in gl.static_range(LB):
                acc = sums[line]
                for s1 in gl.static_range(U[1]):
                    a = lines.index(stage * HB + line + s1).reshape([M, CB])
                    b = weights.index((step if RESIDENT else stage) * U[1] + s1).permute([1, 0])
                    acc = warpgroup_mma(a, b, acc, is_async=True)
                more += (acc,)
            sums = warpgroup_mma_wait(num_outstanding=0, deps=more)
            if LB == 1:
                sums = (sums,)
            mbarrier.arrive(empty.index(stage))
            stage += 1
            over = (stage == STAGES).to(gl.int32)
            stage -= over * STAGES
            round ^= over
        bad = (sums[0] != sums[0]).to(gl.int32)
        for line in gl.static_range(1, LB):
            bad = bad | (sums[line] != sums[line]).to(gl.int32)
        suspicious = gl.max(gl.max(bad, 1), 0)
        row_n = n + row // B2
        row_2 = j2 + row % B2
        i2 = row_2 * (T[2] * FOLD)
        row_at = row_n.to(gl.int64) * (rn * RALIGN) + row_2.to(gl.int64) * (row_step * RALIGN)
        for line in gl.static_range(LB):
            value = gl.convert_layout(sums[line].to(result.dtype.element_ty), wide)
            at_1 = j1 + line
            if suspicious != 0:
                value = exact_line(dy, weight, row_n, j0, at_1, row_2, column, column_start, extents, steps,
                                   group_start, GEOMETRY, FOLD, KG, CG, GP).to(result.dtype.element_ty)
            start = (j0 * T[0]).to(gl.int64) * (r0 * RALIGN) + (at_1 * T[1]).to(gl.int64) * (r1 * RALIGN)
            there = ((row_n < N) & (row_2 < J2) & (at_1 < J1))[:, None] & column_there[None, :]
            if not EXACT:
                there = (there & (i2[:, None] + (in_run // WIDTH)[None, :] < X2) & (at_1 * T[1] + phase_1 < X1)[None, :]
                         & (j0 * T[0] + phase_0 < X0)[None, :])
            gl.store(result + start + row_at[:, None] + column_at[None, :], value, mask=there)


@gluon.jit
def cell_gather_kernel(
        dy_box, weight_box, dy, weight, result,
        N, Y0, Y1, Y2, J1, J2, X0, X1, X2, boxes_0, boxes_1, boxes_2, tiles,
        y_n, y_0, y_1, y_2, w_o, w_i, w_0, w_1, w_2, rn, r0, r1, r2, row_step,
        RALIGN: gl.constexpr,
        K0: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
        T0: gl.constexpr, T1: gl.constexpr, T2: gl.constexpr,
        D0: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr,
        P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
        L0: gl.constexpr, L1: gl.constexpr, L2: gl.constexpr,  # lowest shift of dy, on the last axis in cells
        U0: gl.constexpr, U1: gl.constexpr, U2: gl.constexpr,  # how many shifts
        KG: gl.constexpr, CG: gl.constexpr, GP: gl.constexpr,  # channels of a group; groups a tile
        FOLD: gl.constexpr, CHUNKS: gl.constexpr, PER_ROW: gl.constexpr, CELL: gl.constexpr,
        EXACT: gl.constexpr, GAPLESS: gl.constexpr, VECTOR: gl.constexpr, RESIDENT: gl.constexpr, STAGES: gl.constexpr,
        CB: gl.constexpr, BN: gl.constexpr, PN: gl.constexpr, B2: gl.constexpr, LB: gl.constexpr,
        COLUMN_TILES: gl.constexpr, GROUP_TILES: gl.constexpr, SHARE: gl.constexpr, WARPS: gl.constexpr):
    """Programs come in sets of SHARE for each column tile and group tile; program i of a set takes tiles i, i+SHARE, …

    PER_ROW cells of CELL elements make a row of the folded dy; a cell is copied in CHUNKS pieces of CB elements.
    """
    HB: gl.constexpr = LB + U1 - 1
    STEPS: gl.constexpr = U0 * U2 * CHUNKS
    dtype: gl.constexpr = dy.dtype.element_ty
    pid = gl.program_id(0)
    column_tile = pid % COLUMN_TILES
    pid = pid // COLUMN_TILES
    super_group = pid // SHARE
    first = pid % SHARE
    lines = gl.allocate_shared_memory(dtype, [STAGES * HB, PN, 1, 1, B2, CB], dy_box.layout)
    weights = gl.allocate_shared_memory(dtype, [(STEPS if RESIDENT else STAGES) * U1, BN, CB], weight_box.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(ready.index(0), count=1)
    barriers = (full, empty, ready)
    span = (first, tiles, SHARE)
    boxes = (boxes_0, boxes_1, boxes_2)
    weight_start = (super_group * COLUMN_TILES + column_tile) * (STEPS * U1 * BN)
    result_at = result
    if GROUP_TILES > 1:  # else the compiler would not see how well the result is aligned
        result_at += super_group * (CG * GP)
    GEOMETRY: gl.constexpr = ((K0, K1, K2), (T0, T1, T2), (D0, D1, D2), (P0, P1, P2))
    gl.warp_specialize(
        [(sum_cells, (lines, weights, barriers, (dy, weight, result_at), span, boxes, (N, Y0, Y1, Y2),
                      (J1, J2, X0, X1, X2), (y_n, y_0, y_1, y_2, w_o, w_i, w_0, w_1, w_2),
                      (rn, r0, r1, r2, row_step), column_tile * BN, super_group * GP, GEOMETRY, FOLD, KG, CG, GP,
                      (U0, U1, U2), CHUNKS, CB, BN, PN, B2, LB, STAGES, RESIDENT, RALIGN, EXACT, GAPLESS, VECTOR,
                      WARPS)),
         (copy_cells, (dy_box, weight_box, lines, weights, barriers, span, boxes, super_group * (KG * GP), weight_start,
                       (U0, U1, U2), (L0, L1, L2), CHUNKS, PER_ROW, CELL, CB, BN, PN, B2, LB, STAGES, RESIDENT))],
        [1], [24])
