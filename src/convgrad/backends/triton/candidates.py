"""Candidates for tuning: the tiles worth measuring for a problem, the model's own pick first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from ...problem import DTYPES, Problem
from . import (
    band_plans,
    block_plans,
    box_line_plans,
    box_plans,
    cell_plans,
    depthwise_plans,
    group_plans,
    joined_plans,
    line_plans,
    slide_box_plans,
    slide_plans,
    span_plans,
    wide_plans,
)
from .flat import flattened
from .geometry import Geometry, geometry
from .launch import power_of_two
from .numbers_on_device import operand_bytes
from .plans import LINE_ENDS
from .tiles import best_box, choose_gather, choose_splits, choose_weight
from .tuning import SEPARATE, Choice


def candidates(problem: Problem) -> list[Choice]:
    """All choices to measure for a problem; empty where there is nothing to choose."""
    problem = flattened(problem) or problem
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
    if not problem.layout.endswith("C") and DTYPES[problem.dtype][1] <= 2 and geo.groups < max(
            problem.conv.in_channels, problem.conv.out_channels):
        found.insert(0, {"kernel": "copied"})
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
    red = geo.group_out if is_input else geo.group_in
    for blocks in block_plans.worth_measuring(problem, geo):
        yield choice_of("blocks", blocks)
    if cell_plans.expected_to_pay(geo):
        for cells in cell_plans.worth_measuring(problem, geo):
            yield choice_of("cells", cells)
    if not plain.PACK or patch:
        for tile in joined_plans.worth_measuring(problem, geo):
            yield choice_of("joined", tile)
        for tile in box_line_plans.worth_measuring(problem, geo):
            yield choice_of("box_lines", tile)
    if problem.dtype == "float32" or not box_line_plans.fits(problem, geo) or red < 64:
        yield choice_of("gather", plain)
        for rows, stages, warps in ((128, 1, 4), (256, 1, 4), (256, 2, 4), (128, 2, 4), (64, 1, 4), (128, 3, 8)):
            if rows * plain.BN <= 256 * 128:
                yield choice_of("gather", replace(plain, BM=rows, stages=stages, warps=warps))


def weight(problem: Problem, geo: Geometry) -> Iterator[Choice]:
    size = operand_bytes(problem)
    plain = choose_weight(geo, size, None, problem.layout.endswith(LINE_ENDS))
    for blocks in block_plans.worth_measuring(problem, geo):
        yield choice_of("blocks", blocks)
    for groups in group_plans.worth_measuring(problem, geo):
        yield choice_of("groups", groups)
    for spans in span_plans.worth_measuring(problem, geo):
        yield choice_of("spans", spans)
    yield from wide_plans.worth_measuring(problem, geo)
    lines = line_plans.worth_measuring(problem, geo)
    for tile in lines:
        yield choice_of("lines", tile)
    yield choice_of("weight", plain)
    if lines and min(geo.group_in, geo.group_out) >= 64:
        return  # lines were never slower there
    for times, pixels, stages, warps in ((1, 64, 2, 8), (1, 64, 1, 4), (2, 32, 2, 8), (2, 64, 2, 8), (1, 64, 3, 4),
                                         (2, 32, 1, 4), (4, 32, 2, 8), (1, 32, 2, 8)):
        columns = plain.TS * times
        width = columns * plain.CB
        if width * pixels <= 16384 and width <= 2 * power_of_two(geo.taps * geo.group_in * plain.GP):
            tiles = -(-geo.taps * geo.group_in * plain.GP // width) * -(-geo.group_out * plain.GP // plain.BK)
            splits = choose_splits(geo, tiles * (geo.groups // plain.GP), pixels, None, 4)
            yield choice_of("weight", replace(
                plain, TS=columns, box=best_box((geo.batch, *geo.y), pixels), warps=warps, stages=stages,
                SWAP=plain.BK < 64 and width >= 64, SPLITS=splits))


def depthwise(problem: Problem, geo: Geometry) -> Iterator[Choice]:
    strips = [choice_of(kernel, strip) for kernel, strip in slide_plans.worth_measuring(problem, geo)]
    if strips and len(problem.results) > 1 and problem.wrt != "weight+bias":
        yield SEPARATE
    for boxed in slide_box_plans.worth_measuring(problem, geo):
        yield choice_of("slide_box", boxed)
    for band in band_plans.worth_measuring(problem, geo):
        yield choice_of("band", band)
    yield from strips
    yield from plain_depthwise(problem, geo)


def plain_depthwise(problem: Problem, geo: Geometry) -> Iterator[Choice]:
    geo, _ = depthwise_plans.in_turn(geo)
    last = geo.kernel[2]
    contiguous = depthwise_plans.channels_last(problem)
    width = depthwise_plans.channel_width(geo.groups, contiguous)
    lines = geo.kernel[0] * geo.kernel[1]
    if len(problem.results) > 1 and problem.wrt != "weight+bias":
        if not depthwise_plans.fused_fits(geo):
            return
        yield SEPARATE
    apart = geo.dilation[2] // geo.common[2] > 4 or last == 1
    shapes = ((1, 4), (2, 4), (1, 8), (2, 8), (2, 2)) if apart else \
        ((4, 4), (8, 4), (4, 8), (8, 8), (8, 2), (4, 2), (2, 8))
    for neighbours, elements in shapes:
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
