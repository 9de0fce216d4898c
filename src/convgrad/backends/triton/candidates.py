"""Candidates for tuning: the tiles worth measuring for a problem, the model's own pick first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from ...problem import Problem
from . import box_plans, depthwise_plans
from .geometry import Geometry, geometry
from .launch import power_of_two
from .numbers_on_device import operand_bytes
from .plans import LINE_ENDS
from .tiles import best_box, choose_gather, choose_splits, choose_weight, stages_for
from .tuning import Choice


def candidates(problem: Problem) -> list[Choice]:
    """All choices to measure for a problem; empty where there is nothing to choose."""
    geo = geometry(problem.conv)
    if math.prod(problem.conv.output_shape) == 0 or problem.wrt == "bias":
        return []
    if geo.groups > 1 and geo.group_in == geo.group_out == 1:
        found = list(depthwise(problem, geo))
    elif len(problem.results) > 1:
        return []
    elif problem.wrt == "weight":
        found = list(weight(problem, geo))
    else:
        found = list(gather(problem, geo))
    unique: list[Choice] = []
    for choice in found:
        if choice not in unique:
            unique.append(choice)
    return unique


def choice_of(kernel: str, tile: Any) -> Choice:
    return {"kernel": kernel, **{name: list(value) if isinstance(value, tuple) else value
                                 for name, value in asdict(tile).items()}}


def gather(problem: Problem, geo: Geometry) -> Iterator[Choice]:
    is_input = problem.wrt == "input"
    size = operand_bytes(problem)
    plain = choose_gather(geo, is_input, size)
    patch = box_plans.is_patch(problem, geo)
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    if (not plain.PACK or patch) and box_plans.gather_fits(problem, geo):
        model = box_plans.choose_box_gather(geo, is_input, patch)
        yield choice_of("box", model)
        columns = col * geo.taps if patch else col
        extents = (geo.batch, *(geo.phase_positions if is_input else geo.y))
        for rows, width, warps, per_sm in ((128, 128, 8, 1), (128, 128, 4, 2), (128, 128, 8, 2), (128, 256, 8, 1),
                                           (256, 128, 8, 1), (128, 64, 4, 2), (128, 64, 4, 3), (256, 64, 8, 1),
                                           (256, 64, 4, 2), (64, 128, 4, 3), (64, 64, 4, 4), (64, 256, 4, 1),
                                           (256, 32, 4, 2), (128, 32, 4, 4)):
            if width <= max(32, 2 * power_of_two(columns) // 2) and width * 8 >= min(columns, 256):
                for cb in {model.CB, 128} if red % 128 == 0 and rows * width <= 128 * 128 else {model.CB}:
                    stages = stages_for((rows + width) * cb * 2, 4) if per_sm == 1 else \
                        stages_for((rows + width) * cb * 2 * per_sm, 4)
                    if stages > 1:
                        yield choice_of("box", box_plans.BoxTile(best_box(extents, rows), width, cb, warps, stages, 1,
                                                                 per_sm))
    if problem.dtype == "float32" or not box_plans.gather_fits(problem, geo) or red < 64:
        yield choice_of("gather", plain)
        for rows in (64, 128, 256):
            for stages in (1, 2, plain.stages):
                for warps in (4, 8):
                    if rows * plain.BN <= 256 * 128:
                        yield choice_of("gather", replace(plain, BM=rows, stages=stages, warps=warps))


def weight(problem: Problem, geo: Geometry) -> Iterator[Choice]:
    size = operand_bytes(problem)
    plain = choose_weight(geo, size, None, problem.layout.endswith(LINE_ENDS))
    if box_plans.weight_fits(problem, geo):
        if plain.TS == 1:
            yield choice_of("box", box_plans.choose_box_weight(geo, None))
        for bk, cb, pixels, warps in ((128, 128, 64, 8), (128, 128, 128, 8), (128, 128, 64, 4), (128, 256, 64, 8),
                                      (256, 128, 64, 8), (64, 128, 64, 4), (128, 64, 64, 4), (64, 64, 64, 4),
                                      (64, 64, 128, 4), (64, 256, 64, 4), (256, 64, 64, 8), (64, 32, 128, 4)):
            if bk <= max(64, power_of_two(geo.group_out)) and cb <= max(32, power_of_two(geo.group_in)):
                tiles = -(-geo.group_out // bk) * -(-geo.group_in // cb) * geo.taps * geo.groups
                for waves in (1, 3) if bk * cb > 128 * 64 else (4,):
                    splits = choose_splits(geo, tiles, pixels, None, waves)
                    yield choice_of("box", box_plans.BoxTile(best_box((geo.batch, *geo.y), pixels), bk, cb, warps,
                                                             stages_for((bk + cb) * pixels * 2), splits))
    if plain.TS > 1 or plain.FLAT or plain.SEG or not box_plans.weight_fits(problem, geo):
        yield choice_of("weight", plain)
        for columns in (plain.TS, plain.TS * 2, plain.TS * 4, plain.TS * 8):
            for pixels in (16, 32, 64):
                width = columns * plain.CB
                if width * pixels > 32768 or width > 1024 or width > 2 * power_of_two(geo.taps * geo.group_in * plain.GP):
                    continue
                warps = 8 if width * plain.BK >= 128 * 64 or width * pixels >= 8192 else 4
                for stages in (1, 2, 3):
                    tile = replace(plain, TS=columns, box=best_box((geo.batch, *geo.y), pixels), warps=warps, stages=stages,
                                   SWAP=plain.BK < 64 and width >= 64)
                    tiles = -(-geo.taps * geo.group_in * plain.GP // width) * -(-geo.group_out * plain.GP // plain.BK)
                    splits = choose_splits(geo, tiles * (geo.groups // plain.GP), pixels, None, 4)
                    yield choice_of("weight", replace(tile, SPLITS=splits))


def depthwise(problem: Problem, geo: Geometry) -> Iterator[Choice]:
    last = geo.kernel[2]
    contiguous = depthwise_plans.channels_last(problem)
    width = depthwise_plans.channel_width(geo.groups, contiguous)
    lines = geo.kernel[0] * geo.kernel[1]
    if len(problem.results) > 1 and problem.wrt != "weight+bias":
        if not depthwise_plans.fused_fits(geo):
            return
        yield {"kernel": "separate"}
    for neighbours in (1, 2, 4, 8):
        for elements in (2, 4, 8):
            rows = max(1, depthwise_plans.THREADS * (elements if contiguous else 2) // width)
            tile = depthwise_plans.DepthwiseTile(neighbours, rows, width)
            if problem.wrt in ("output", "input"):
                if neighbours * elements <= 64 and last * elements <= 128 and neighbours * elements >= 4:
                    yield choice_of("depthwise", tile)
            elif problem.wrt in ("weight", "weight+bias"):
                fitting = max(1, min(lines, 112 // (elements * last)))
                if last * elements <= 128 and neighbours * elements <= 32:
                    yield choice_of("depthwise", replace(tile, LINES=-(-lines // -(-lines // fitting))))
            elif geo.taps * elements <= 76 and neighbours * elements <= 16:
                yield choice_of("depthwise", tile)
