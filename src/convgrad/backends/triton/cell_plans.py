"""Plans by cells: which fold and tile, how the tensors are seen, the workspace for spread weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import DTYPES, Problem
from .cell_gather import cell_gather_kernel
from .cells import spread_kernel
from .geometry import Geometry, strides_of
from .gpu import WORKSPACE_FLOOR, Gpu
from .kernel import Kernel, Operands, Prepared, Query
from .launch import Launch, Step, aligned_strides
from .numbers_on_device import scratch, sixteen_bits

# What the cost model counts with: shares of the tensor cores' speed by the columns of a tile, of the L2 cache's by the
# channels of a row, and seconds.
PRODUCTS = {8: 0.233, 16: 0.404, 32: 0.607, 64: 0.910, 128: 0.859, 256: 0.890}
CACHE_SHARES = {16: 0.32, 32: 0.44, 64: 0.56}
LAUNCHES = 2  # weights are spread first
TILE_SECONDS = 0.6e-6
WRITE_BYTES = 65e9  # of one multiprocessor
STEP_SECONDS = 0.1e-6
SHARED_BYTES = {1: 222 * 1024, 2: 111 * 1024}  # of a program, by how many share a multiprocessor
HALF_REGISTERS = 128  # a thread at the start, so that two programs fit a multiprocessor: 4 warps copy or wait
PRODUCT_REGISTERS = 26  # beside its sums, that ptxas wants for one product (C7602: 154 for 256 columns)
MOST_SPREAD = WORKSPACE_FLOOR


@dataclass(frozen=True)
class CellTile:
    """LB lines of PN x B2 rows x BN columns; `fold` positions of dy a row, GP groups, CB elements a copy."""

    fold: int
    GP: int
    CB: int
    BN: int
    PN: int
    B2: int
    LB: int
    stages: int
    resident: bool
    warps: int
    together: int
    seconds: float = field(compare=False)

    def __str__(self) -> str:
        return (f"cells of {self.fold} positions x {self.GP} groups, {self.LB} lines of {self.PN}x{self.B2} rows x "
                f"{self.BN} columns x {self.CB}, {self.stages} stages, weights "
                f"{'kept' if self.resident else 'copied'}, {self.seconds * 1e6:.0f} us expected")


@dataclass(frozen=True)
class CellShape:
    """How a fold and a tile divide the problem."""

    per_cell: int  # positions of dy in a cell
    per_row: int  # cells in a row of the folded dy
    cell: int  # elements
    chunks: int
    low: tuple[int, int, int]
    shifts: tuple[int, int, int]
    rows: tuple[int, int, int]  # on three axes
    columns: int

    @property
    def steps(self) -> int:
        return self.shifts[0] * self.shifts[2] * self.chunks


def cell_shape(geo: Geometry, fold: int, gp: int, cb: int) -> CellShape:
    red = geo.group_out * gp
    per_cell = min(fold, 1 << (max(1, cb // red).bit_length() - 1))  # a power of two as the fold: cells fill a row
    low, high = geo.lowest[2], geo.lowest[2] + geo.span[2] - 1 + fold - 1
    first = low // per_cell
    rows = (*geo.phase_positions[:2], -(-geo.x[2] // (geo.stride[2] * fold)))
    return CellShape(per_cell, fold // per_cell, per_cell * red, -(-per_cell * red // cb),
                     (geo.lowest[0], geo.lowest[1], first), (geo.span[0], geo.span[1], high // per_cell - first + 1),
                     rows, geo.phases * fold * geo.group_in * gp)


def supports(problem: Problem, geo: Geometry) -> str | None:
    """Small groups, or few channels on one side: the input gradient of 16-bit tensors with channels last."""
    if not sixteen_bits(problem) or DTYPES[problem.out_dtype][1] != 2 or not problem.layout.endswith("C"):
        return "16-bit tensors with channels last only"
    if geo.groups > 1:  # with many taps on the last axis, which do not share their copies, boxes were faster
        if max(geo.group_in, geo.group_out) > 128 or geo.span[2] > 32:
            return "groups of at most 128 channels, and windows of at most 32 on the last axis"
    elif min(geo.group_in, geo.group_out) > 16:
        return "at most 16 channels on one side"
    if geo.groups * geo.group_out * max(folds(geo)) % 8:
        return "rows of dy are not multiples of 16 bytes"
    return None


def folds(geo: Geometry) -> list[int]:
    """How many positions of dy may make a row: groups cannot be folded, their channels are not neighbours."""
    if geo.groups > 1:
        return [1]
    return [fold for fold in (1, 2, 4, 8, 16) if geo.y[2] % fold == 0 and (fold == 1 or geo.group_out * fold <= 512)]


def group_counts(geo: Geometry) -> list[int]:
    """How many groups may share a tile: where there are several tiles, each starts at a multiple of 16 bytes of dy.

    Copies that started between two such places ended with an illegal instruction on an H200.
    """
    if geo.groups == 1:
        return [1]
    return [count for count in range(1, geo.groups + 1)
            if geo.groups % count == 0 and (count == 1 or count * max(geo.group_in, geo.group_out) <= 64)
            and (count == geo.groups or count * geo.group_out % 8 == 0)]


def tiles(query: Query) -> Iterator[CellTile]:
    """Every tile that the shapes allow and whose rows of dy lie without gaps."""
    return (tile for tile in all_cells(query.geo, query.max_workspace, query.gpu) if lies(tile, query))


def all_cells(geo: Geometry, max_workspace: int | None, gpu: Gpu) -> Iterator[CellTile]:
    limit = MOST_SPREAD if max_workspace is None else min(MOST_SPREAD, max_workspace)
    dy_bytes = 2 * geo.groups * geo.group_out * geo.pixels
    dx_bytes = 2 * geo.groups * geo.group_in * geo.batch * math.prod(geo.x)
    for fold in folds(geo):
        if geo.groups * geo.group_out * fold % 8:
            continue
        for gp in group_counts(geo):
            for cb in (64, 32, 16):
                shape = cell_shape(geo, fold, gp, cb)
                memory = (dy_bytes + dx_bytes) / gpu.memory_bytes_per_s
                if (cb > 16 and cb >= 2 * max(shape.cell, 1)) or shape.columns > 2048 or shape.shifts[1] > 8:
                    continue
                if shape.per_row > 1 and shape.cell % 8:  # a copy of a cell starts at a multiple of 16 bytes, too
                    continue
                yield from tiles_of(geo, shape, (fold, gp, cb), limit, memory, gpu)


def tiles_of(geo: Geometry, shape: CellShape, cell: tuple[int, int, int], limit: int, memory: float,
             gpu: Gpu) -> Iterator[CellTile]:
    fold, gp, cb = cell
    overlap = shape.shifts[1]
    for bn in PRODUCTS:
        if bn >= 2 * shape.columns and bn > 8:
            continue
        column_tiles = -(-shape.columns // bn)
        sets = column_tiles * (geo.groups // gp)
        spread = sets * shape.steps * overlap * bn * cb * 2
        if spread > limit:
            continue
        for rows, warps in ((64, 4), (128, 4), (128, 8), (256, 8)):
            pn, b2 = line_of(geo.batch, shape.rows[2], rows)
            for lines in (1, 2, 3, 4, 5, 6, 7, 8):
                registers = lines * rows * bn // (warps * 32)
                if registers > 128 or lines > shape.rows[1] or (
                        lines > 1 and -(-shape.rows[1] // lines) == -(-shape.rows[1] // (lines - 1))):
                    continue
                boxes = (-(-geo.batch // pn), shape.rows[0], -(-shape.rows[1] // lines), -(-shape.rows[2] // b2))
                half = warps == 4 and bn // 2 + PRODUCT_REGISTERS <= HALF_REGISTERS
                for together in (1, 2) if half else (1,):
                    yield from pipelines(CellTile(fold, gp, cb, bn, pn, b2, lines, 0, False, warps, together, 0.0),
                                         shape, math.prod(boxes), sets, memory, gpu)


def pipelines(tile: CellTile, shape: CellShape, tiles: int, sets: int, memory: float,
              gpu: Gpu) -> Iterator[CellTile]:
    """The tile with weights kept in shared memory or copied with the lines, each with its estimated time."""
    programs = gpu.multiprocessors * tile.together
    share = max(1, min(tiles, programs // sets))
    waves = -(-tiles // share) * max(1, -(-sets * share // programs))
    rows, overlap = tile.PN * tile.B2, shape.shifts[1]
    line_bytes = (tile.LB + overlap - 1) * rows * tile.CB * 2
    weight_bytes = overlap * tile.BN * tile.CB * 2
    for resident in (True, False):
        if resident and shape.steps * weight_bytes > 112 * 1024:
            continue
        fixed = rows * tile.BN * 2 + 2048 + (shape.steps * weight_bytes if resident else 0)
        step_bytes = line_bytes + (0 if resident else weight_bytes)
        stages = min(4, (SHARED_BYTES[tile.together] - fixed) // step_bytes)
        if stages < 2:
            continue
        # seconds of one tile of each program of a multiprocessor; two programs write while the other multiplies
        products = programs * 2 * rows * tile.LB * tile.BN * overlap * shape.steps * tile.CB / (
            PRODUCTS[tile.BN] * gpu.tensor_flops)
        copies = programs * shape.steps * step_bytes / (CACHE_SHARES[tile.CB] * gpu.l2_bytes_per_s)
        writing = TILE_SECONDS + rows * tile.LB * tile.BN * 2 / WRITE_BYTES
        seconds = max(products, copies) + STEP_SECONDS * shape.steps + (
            writing if tile.together == 1 else 0.3 * writing)
        yield replace(tile, stages=stages, resident=resident,
                      seconds=LAUNCHES * gpu.launch_s + max(waves * seconds, memory))


def line_of(batch: int, extent: int, rows: int) -> tuple[int, int]:
    """The box of images x positions of the last axis with `rows` rows that leaves the fewest to spare, a wide one."""
    sizes = [1 << e for e in range(rows.bit_length()) if rows >> e <= 256 and 1 << e <= 256]
    return min(((rows // b2, b2) for b2 in sizes),
               key=lambda box: (-(-batch // box[0]) * box[0] * -(-extent // box[1]) * box[1], -box[1]))


def accepts(query: Query) -> str | None:
    """Channels of dy and of the result are neighbours in memory, rows of dy at multiples of 16 bytes."""
    dy, result = query.operands[0], query.result
    if (dy.shape[1] > 1 and dy.stride(1) != 1) or (result.shape[1] > 1 and result.stride(1) != 1):
        return "channels are not neighbours in memory"
    steps = [step for axis, (step, extent) in enumerate(zip(dy.stride(), dy.shape))
             if axis not in (1, dy.dim() - 1) and extent > 1]
    if dy.data_ptr() % 16 or any(step % 8 or step <= 0 for step in steps) or all(extent == 1 for extent in dy.shape):
        return "rows of dy do not begin at multiples of 16 bytes"
    return None


def lies(tile: CellTile, query: Query) -> bool:
    """Whether the positions of a row of dy that a cell folds are neighbours, at multiples of 16 bytes."""
    dy = query.operands[0]
    if dy.shape[-1] == 1:
        return True
    return (tile.fold == 1 or dy.stride(-1) == dy.shape[1]) and dy.stride(-1) * tile.fold % 8 == 0 < dy.stride(-1)


@dataclass(frozen=True)
class CellPlan:
    """The launches of a tile."""

    geo: Geometry
    tile: CellTile
    spread_size: int
    spread: Step
    gather: Step

    def write(self, dy: Any, weight: Any, result: Any, workspace: Any) -> None:
        """Spread the weights over the workspace, then sum."""
        spread = workspace.view(dy.dtype)
        self.spread(weight, spread)
        self.gather(dy, spread, weight, result)


def build(query: Query, tile: CellTile) -> Prepared:
    plan = cell_plan(query.geo, tile, query.gpu)
    words = -(-plan.spread_size // 2)

    def run(operands: Operands, results: tuple[Any, ...], workspace: Any) -> None:
        dy, weight = operands
        plan.write(dy, weight, results[0], scratch(query.problem, workspace, (words,), results[0]))

    return Prepared(f"cells_{query.short}_{tile.PN * tile.B2}x{tile.BN}x{tile.CB}", str(tile), 4 * words, run)


def cell_plan(geo: Geometry, tile: CellTile, gpu: Gpu) -> CellPlan:
    shape = cell_shape(geo, tile.fold, tile.GP, tile.CB)
    column_tiles = -(-shape.columns // tile.BN)
    sets = column_tiles * (geo.groups // tile.GP)
    overlap = shape.shifts[1]
    size = sets * shape.steps * overlap * tile.BN * tile.CB
    boxes = (-(-geo.batch // tile.PN), shape.rows[0], -(-shape.rows[1] // tile.LB), -(-shape.rows[2] // tile.B2))
    tiles = math.prod(boxes)
    share = max(1, min(tiles, gpu.multiprocessors * tile.together // sets))
    common = {**geo.constants(),
              **{f"L{axis}": shape.low[axis] for axis in range(3)},
              **{f"U{axis}": shape.shifts[axis] for axis in range(3)},
              "KG": geo.group_out, "CG": geo.group_in, "GP": tile.GP, "FOLD": tile.fold, "CHUNKS": shape.chunks,
              "CB": tile.CB, "BN": tile.BN, "COLUMN_TILES": column_tiles}

    def spread_launch(weight: Any, spread: Any) -> Launch:
        block = 1024
        return Launch((-(-size // block),), (size, *strides_of(weight)),
                      {**common, "PER_CELL": shape.per_cell, "BE": block}, 4, 1)

    def leading(dy: Any, spread: Any, weight: Any, result: Any) -> tuple[Any, ...]:
        n, _, *steps = strides_of(dy)
        spare = -(-dy.shape[1] // 8) * 8
        extents = [dy.shape[0], *geo.y[:2], geo.y[2] // tile.fold, dy.shape[1] * tile.fold]
        strides = [n or spare, steps[0] or spare, steps[1] or spare, steps[2] * tile.fold or spare * tile.fold, 1]
        swizzle = min(128, 2 * tile.CB)
        dy_box = TensorDescriptor(dy, extents, strides, [tile.PN, 1, 1, tile.B2, tile.CB],
                                  gl.NVMMASharedLayout(swizzle, 16, rank=5))
        weight_box = TensorDescriptor(spread, [size // tile.CB, tile.CB], [tile.CB, 1], [tile.BN, tile.CB],
                                      gl.NVMMASharedLayout(swizzle, 16, rank=2))
        return dy_box, weight_box, dy, weight, result

    def gather_launch(dy: Any, spread: Any, weight: Any, result: Any) -> Launch:
        yn, _, *y = strides_of(dy)
        rn, _, r0, r1, r2 = strides_of(result)
        gapless = geo.groups == 1 and (result.shape[-1] == 1 or result.stride(-1) == result.shape[1])
        align, results = aligned_strides((rn, r0, r1, 0 if gapless else r2, r2 * geo.stride[2] * tile.fold))
        run = geo.group_in * tile.GP * (geo.stride[2] * tile.fold if gapless else 1)
        vector = 8
        while run % vector or align % vector or vector > tile.BN:
            vector //= 2
        exact = all(geo.x[axis] % (geo.stride[axis] * (tile.fold if axis == 2 else 1)) == 0 for axis in range(3))
        constants = {"RALIGN": align, **common, "PER_ROW": shape.per_row, "CELL": shape.cell, "EXACT": exact,
                     "GAPLESS": gapless, "VECTOR": vector, "RESIDENT": tile.resident, "STAGES": tile.stages,
                     "PN": tile.PN, "B2": tile.B2, "LB": tile.LB,
                     "GROUP_TILES": geo.groups // tile.GP, "SHARE": share, "WARPS": tile.warps}
        scalars = (geo.batch, *geo.y, *shape.rows[1:], *geo.x, *boxes[1:], tiles, yn, *y, *strides_of(weight), *results)
        return Launch((sets * share,), scalars, constants, tile.warps, 1, leading,
                      HALF_REGISTERS if tile.together == 2 else None)

    return CellPlan(geo, tile, size, Step(spread_kernel, spread_launch), Step(cell_gather_kernel, gather_launch))


KERNEL = Kernel("cells", frozenset({"input"}), supports, accepts, tiles, build, CellTile,
                kind=lambda query, tile: (tile.fold, tile.GP, tile.BN))
