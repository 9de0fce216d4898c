"""Few groups with windows of one point as one dense problem: their weights on the diagonal of a matrix of zeros.

Where groups have no multiple of 64 channels, boxes of one group are narrow and copied slowly. The dense problem has as
many times more products as there are groups, which take no longer than the memory does while channels are few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...problem import Problem
from . import box_line_plans
from .box_line_tiles import BoxLineTile, all_tiles, work_of
from .flat import INPUTS_LAST
from .geometry import Geometry, geometry
from .kernel import Kernel, Operands, Prepared, Query
from .launch import Launch, Step
from .numbers_on_device import scratch, sixteen_bits
from .padded import join_kernel

PRODUCTS = 0.6  # of the tensor cores' speed
JOIN_SECONDS = 3e-6
BLOCK = 1024


def supports(problem: Problem, geo: Geometry) -> str | None:
    """Groups that can be joined: 16-bit numbers, one tap, rows of whole 16 bytes."""
    if not sixteen_bits(problem) or geo.groups == 1 or geo.taps > 1:
        return "16-bit groups with windows of one point only"
    if geo.groups * geo.group_in % 8 or geo.groups * geo.group_out % 8 or geo.group_in % 64 + geo.group_out % 64 == 0:
        return "channels in multiples of 8, groups not in multiples of 64"
    wide, seen = dense(problem), geometry(dense(problem).conv)
    if box_line_plans.copies_for(wide, seen).bytes:
        return "the dense problem needs copies"
    return box_line_plans.supports(wide, seen)


def dense(problem: Problem) -> Problem:
    """The problem of all groups at once."""
    conv = replace(problem.conv, groups=1)
    return problem.with_(conv=conv, weight_layout=INPUTS_LAST[conv.axes - 1])


def accepts(query: Query) -> str | None:
    wide = dense(query.problem)
    if box_line_plans.lies(wide, geometry(wide.conv), box_line_plans.Copies(0, 0), query.operands[0], query.result):
        return None
    return "channels are not neighbours in memory, or rows not at multiples of 16 bytes"


def pays(query: Query) -> bool:
    """Whether joined products take no longer than their bytes."""
    geo, gpu = query.geo, query.gpu
    channels_in, channels_out = geo.groups * geo.group_in, geo.groups * geo.group_out
    moved = 2 * geo.batch * (channels_in * math.prod(geo.x) + channels_out * math.prod(geo.y))
    products = 2 * geo.pixels * channels_in * channels_out
    return products / (PRODUCTS * gpu.tensor_flops) < moved / gpu.memory_bytes_per_s


def joined_floats(wide: Problem) -> int:
    """Elements of float32 that the joined weights take, in whole 16 bytes."""
    return -(-math.prod(wide.conv.weight_shape) // 8) * 4


def tiles(query: Query) -> Iterator[BoxLineTile]:
    wide = dense(query.problem)
    geo = geometry(wide.conv)
    left = box_line_plans.limit_of(wide, geo, query.max_workspace) - 4 * joined_floats(wide)
    return all_tiles(work_of(wide, geo), left, query.gpu) if left >= 0 and pays(query) else iter(())


def build(query: Query, tile: BoxLineTile) -> Prepared:
    geo, wide = query.geo, dense(query.problem)
    plan = box_line_plans.box_lines(wide, geometry(wide.conv), tile, query.gpu, joined=geo.groups)
    size, end = math.prod(wide.conv.weight_shape), joined_floats(wide)

    def launch(weight: Any, joined: Any) -> Launch:
        w_o, w_i = weight.stride()[:2]
        return Launch((-(-size // BLOCK),), (size, w_o, w_i),
                      {"KG": geo.group_out, "CG": geo.group_in, "CHANNELS": wide.conv.in_channels, "BE": BLOCK}, 4, 1)

    join = Step(join_kernel, launch)

    def run(operands: Operands, results: tuple[Any, ...], workspace: Any) -> None:
        source, weight = operands
        memory = scratch(query.problem, workspace, (end + plan.memory,), results[0])
        outs, ins, *kernel = wide.conv.weight_shape
        joined = memory[:end].view(weight.dtype)[:size].view(outs, *kernel, ins).permute(
            0, -1, *range(1, len(kernel) + 1))
        join(weight, joined)
        plan.run(source, joined, results[0], memory[end:])

    return Prepared(f"joined_{query.short}_{tile.BM}x{tile.BN}x{tile.CB}", f"{geo.groups} groups joined, {tile}",
                    4 * (end + plan.memory), run)


KERNEL = Kernel("joined", frozenset({"output", "input"}), supports, accepts, tiles, build, BoxLineTile,
                lambda query, tile: tile.seconds + JOIN_SECONDS,
                kind=lambda query, tile: (tile.BM, tile.BN, tile.warps, tile.NT), measured=3)
