"""The kernels that read by pointers: any stride, any number format, any card. They serve where no other does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import triton.language as tl

from ...problem import Problem
from .bias_parts import bias_add_step
from .gather import gather_kernel
from .geometry import Geometry, needs_wide, runs_of, strides_of
from .gpu import WORKSPACE_FLOOR, runs_anywhere
from .kernel import Kernel, Operands, Prepared, Query
from .launch import INTERPRETED, Launch, Step, aligned_strides, power_of_two
from .numbers_on_device import STORED_8BIT, arithmetic, operand_bytes, scratch, table_for
from .part_copies import FEW_PRODUCTS, products_needed
from .split_k import add_step
from .tiles import (
    GatherTile,
    WeightTile,
    best_box,
    choose_gather,
    choose_splits,
    choose_weight,
    most_splits,
)
from .weight import bias_kernel, weight_kernel

# Shares of the tensor cores' speed that were seen on an H200.
PRODUCTS = 0.04  # 16-bit tensors with channels first
FP8_WEIGHT_PRODUCTS = 0.16  # weight gradients of FP8 with channels last: 67 to 190e12 a second
FLOAT32_WEIGHT_PRODUCTS = 0.025
BY_PIXEL = not INTERPRETED  # how weight_kernel sums tiles with a NaN again
FEW_CHANNELS = 3  # how much slower float32 is with few channels or groups


def seconds(query: Query, tile: Any = None) -> float:
    """Expected, roughly: all tiles of these kernels are about as fast."""
    problem, geo, gpu = query.problem, query.geo, query.gpu
    share = PRODUCTS
    if problem.wrt == "weight" and problem.dtype == "float32":
        narrow = geo.groups > 1 or min(geo.group_in, geo.group_out) < 16
        share = FLOAT32_WEIGHT_PRODUCTS / (FEW_CHANNELS if narrow else 1)
    elif problem.wrt == "weight" and problem.dtype in ("float8_e4m3fn", "float8_e5m2") and query.channels_last():
        share = FP8_WEIGHT_PRODUCTS
    return gpu.launch_s + geo.flops / (share * gpu.tensor_flops)


def gather_launch(geo: Geometry, tile: GatherTile, is_input: bool, numbers: dict[str, Any], source: Any, weight: Any,
                  result: Any) -> Launch:
    sn, sc, *s = strides_of(source)
    wo, wi, *w = strides_of(weight)
    rn, rc, *r = strides_of(result)
    salign, (sn, *s) = aligned_strides((sn, *s))
    walign, (wo, *w) = aligned_strides((wo, *w))
    ralign, (rn, *r) = aligned_strides((rn, *r))
    from_extents, to_extents = (geo.y, geo.x) if is_input else (geo.x, geo.y)
    positions = geo.phase_positions if is_input else geo.y
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    row_tiles = -(-geo.batch * math.prod(positions) // tile.BM)
    columns = col * tile.GP * (geo.phases if tile.PACK else 1)
    programs = -(-columns // tile.BN) * row_tiles * (geo.groups // tile.GP)
    if is_input and not tile.PACK:
        programs *= geo.phases
    slots = geo.span if tile.PACK else geo.kernel
    constants = {
        "SALIGN": salign, "WALIGN": walign, "RALIGN": ralign, **geo.constants(), **geo.phase_constants(),
        "U0": slots[0], "U1": slots[1], "U2": slots[2], "RED": red, "COL": col, "INPUT": is_input,
        "WIDE": needs_wide(source, weight, result), **numbers, **tile.constants()}
    scalars = (geo.batch, *from_extents, *to_extents, *positions, row_tiles, sn, sc, *s, wo, wi, *w, rn, rc, *r)
    return Launch((programs,), scalars, constants, tile.warps, tile.stages)


def gather_tiles(query: Query) -> Iterator[GatherTile]:
    yield choose_gather(query.geo, query.problem.wrt == "input", operand_bytes(query.problem), query.gpu)


def gather_candidates(query: Query) -> Iterator[GatherTile]:
    """Tiles of different shapes for tuning, the model's first."""
    plain, = gather_tiles(query)
    yield plain
    for rows, stages, warps in ((128, 1, 4), (256, 1, 4), (256, 2, 4), (128, 2, 4), (64, 1, 4), (128, 3, 8)):
        if rows * plain.BN <= 256 * 128:
            yield replace(plain, BM=rows, stages=stages, warps=warps)


def build_gather(query: Query, tile: GatherTile) -> Prepared:
    problem, geo = query.problem, query.geo
    step = Step(gather_kernel, lambda source, weight, result, table: gather_launch(
        geo, tile, problem.wrt == "input", arithmetic(problem), source, weight, result))
    return Prepared(f"gather_{query.short}_{tile.BM}x{tile.BN}x{tile.TS * tile.CB}", str(tile), 0,
                    lambda operands, results, workspace: step(*operands, *results, table_for(problem, results[0])))


def in_lines(x: Any) -> bool:
    """Whether channels and the last spatial axis of x follow each other without a gap."""
    channels = x.shape[1]
    return (channels == 1 or x.stride(1) == 1) and (x.shape[-1] == 1 or x.stride(-1) == channels)


def weight_launch(geo: Geometry, tile: WeightTile, numbers: dict[str, Any], dy: Any, x: Any, result: Any) -> Launch:
    yn, yc, *y = strides_of(dy)
    xn, xc, *xs = strides_of(x)
    yalign, (yn, *y) = aligned_strides((yn, *y))
    if tile.SEG:  # the last axis is part of a line, whose start need not be aligned
        xalign, (xn, *outer) = aligned_strides((xn, *xs[:2]))
        xs = [*outer, xs[2]]
    else:
        xalign, (xn, *xs) = aligned_strides((xn, *xs))
    if tile.SPLITS > 1:
        r_split, ro, ri, *r = result.stride()
    else:
        r_split, (ro, ri, *r) = 0, strides_of(result)
    boxes = tuple(-(-extent // size) for extent, size in zip((geo.batch, *geo.y), tile.box))
    run = -(-math.prod(boxes) // tile.SPLITS)
    stages = min(tile.stages, run)  # more would only take shared memory
    channels = geo.group_in * tile.GP
    if tile.FLAT:
        columns = -(-geo.taps * channels // (tile.TS * tile.CB))
    elif tile.SEG:
        columns = -(-geo.kernel[0] * geo.kernel[1] * -(-geo.kernel[2] * channels // tile.CB) // tile.TS)
    else:
        columns = -(-geo.taps // tile.TS) * -(-channels // tile.CB)
    programs = columns * -(-geo.group_out * tile.GP // tile.BK) * tile.SPLITS * (geo.groups // tile.GP)
    constants = {"YALIGN": yalign, "XALIGN": xalign, **geo.constants(), "KG": geo.group_out, "CG": geo.group_in,
                 "WIDE": needs_wide(dy, x, result), **numbers, **tile.constants(), "BY_PIXEL": BY_PIXEL}
    scalars = (geo.batch, *geo.y, *geo.x, *boxes[1:], math.prod(boxes), run, yn, yc, *y, xn, xc, *xs, r_split, ro, ri,
               *r)
    return Launch((programs,), scalars, constants, tile.warps, stages)


def weight_tiles(query: Query) -> Iterator[WeightTile]:
    lines = query.problem.layout.endswith(("LC", "WC")) and in_lines(query.operands[1])
    yield choose_weight(query.geo, operand_bytes(query.problem), query.max_workspace, lines, query.gpu)


def weight_candidates(query: Query) -> Iterator[WeightTile]:
    """Tiles of different shapes for tuning, the model's first."""
    geo = query.geo
    plain, = weight_tiles(query)
    yield plain
    for times, pixels, stages, warps in ((1, 64, 2, 8), (1, 64, 1, 4), (2, 32, 2, 8), (2, 64, 2, 8), (1, 64, 3, 4),
                                         (2, 32, 1, 4), (4, 32, 2, 8), (1, 32, 2, 8)):
        columns = plain.TS * times
        width = columns * plain.CB
        if width * pixels <= 16384 and width <= 2 * power_of_two(geo.taps * geo.group_in * plain.GP):
            tiles = -(-geo.taps * geo.group_in * plain.GP // width) * -(-geo.group_out * plain.GP // plain.BK)
            splits = choose_splits(geo, tiles * (geo.groups // plain.GP), pixels, None, query.gpu)
            yield replace(plain, TS=columns, box=best_box((geo.batch, *geo.y), pixels), warps=warps, stages=stages,
                          SWAP=plain.BK < 64 and width >= 64, SPLITS=splits)


def build_weight(query: Query, tile: WeightTile) -> Prepared:
    problem, geo = query.problem, query.geo
    numbers = arithmetic(problem)
    if numbers["PRECISION"] == "tf32x3" and products_needed(problem) == FEW_PRODUCTS:
        numbers["PRECISION"] = "bf16x3"
    splits = min(tile.SPLITS, most_splits(geo, query.max_workspace))
    if tile.SEG and not in_lines(query.operands[1]):
        tile = choose_weight(geo, operand_bytes(problem), query.max_workspace, False, query.gpu)
    tile = replace(tile, SPLITS=splits)
    step = Step(weight_kernel, lambda dy, x, result, table: weight_launch(geo, tile, numbers, dy, x, result))
    add = add_step(geo, splits)
    shape = (splits, geo.groups * geo.group_out, *geo.kernel, geo.group_in)

    def run(operands: Operands, results: tuple[Any, ...], workspace: Any) -> None:
        dw, = results
        if splits == 1:
            step(*operands, dw, table_for(problem, dw))
            return
        partial = scratch(problem, workspace, shape, dw)
        step(*operands, partial.permute(0, 1, 5, 2, 3, 4), table_for(problem, dw))
        add(partial, dw)

    return Prepared(f"weight_{query.short}_{tile.BK}x{tile.TS * tile.CB}x{tile.BP}_split{splits}", str(tile),
                    (8 if problem.dtype == "float64" else 4) * math.prod(shape) if splits > 1 else 0, run)


def build_bias(query: Query, tile: Any) -> Prepared:
    problem, geo = query.problem, query.geo
    channels = geo.groups * geo.group_out
    bk = min(128, power_of_two(channels)) if problem.layout.endswith("C") else 1  # neighbours in memory side by side
    bp = max(1, 4096 // bk)
    limit = WORKSPACE_FLOOR if query.max_workspace is None else query.max_workspace
    tiles = -(-channels // bk)
    splits = max(1, min(-(-8 * query.gpu.multiprocessors // tiles), geo.pixels // (4 * bp), limit // (8 * channels)))
    double = problem.dtype == "float64"
    numbers = {"ROUND": STORED_8BIT.get(problem.dtype, ""), "ACC": tl.float64 if double else tl.float32}
    run_length = -(-geo.pixels // splits)
    run_length = -(-run_length // bp) * bp

    def launch(dy: Any, result: Any, table: Any) -> Launch:
        yn, yc, *y = strides_of(dy)
        extents, runs = geo.y, runs_of(dy)
        if len(runs) == 1:  # fewer divisions
            extents, y = (1, 1, runs[0][0]), [0, 0, runs[0][1]]
        align, (yn, *y) = aligned_strides((yn, *y))
        r_split, r_k = result.stride() if splits > 1 else (0, result.stride(0))
        constants = {"YALIGN": align, "WIDE": needs_wide(dy), **numbers, "BP": bp, "BK": bk}
        scalars = (geo.pixels, run_length, *extents, yn, yc, *y, r_split, r_k, channels)
        return Launch((tiles, splits), scalars, constants, 8, 2)

    step = Step(bias_kernel, launch)
    add = bias_add_step(channels, splits)
    size = (8 if double else 4) * splits * channels if splits > 1 else 0

    def run(operands: Operands, results: tuple[Any, ...], workspace: Any) -> None:
        db, = results
        if splits == 1:
            step(operands[0], db, table_for(problem, db))
            return
        partial = scratch(problem, workspace, (splits, channels), db)
        step(operands[0], partial, table_for(problem, db))
        add(partial, db)

    return Prepared(f"bias_{query.short}_{bp}x{bk}_split{splits}", f"{bp} x {bk}, {splits} runs of pixels", size, run)


def bias_seconds(query: Query, tile: Any) -> float:
    return query.gpu.launch_s + query.problem.min_bytes / query.gpu.memory_bytes_per_s


def anything(problem: Problem, geo: Geometry) -> str | None:
    return None


GATHER = Kernel("gather", frozenset({"output", "input"}), anything, lambda query: None, gather_tiles, build_gather,
                GatherTile, seconds, runs_anywhere, candidates=gather_candidates, eight_bits=True, fallback=True)
WEIGHT = Kernel("weight", frozenset({"weight"}), anything, lambda query: None, weight_tiles, build_weight, WeightTile,
                seconds, runs_anywhere, candidates=weight_candidates, eight_bits=True, fallback=True)
BIAS = Kernel("bias", frozenset({"bias"}), anything, lambda query: None, lambda query: [()], build_bias, None,
              bias_seconds, runs_anywhere, eight_bits=True, fallback=True)
