"""Few groups with windows of one point as one dense problem: their weights on the diagonal of a matrix of zeros.

Where groups have no multiple of 64 channels, boxes of one group are narrow and copied slowly. The dense problem has as
many times more products as there are groups, which take no longer than the memory does while channels are few.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ...problem import Problem
from . import box_line_plans
from .box_line_tiles import BoxLineTile, best_tiles
from .flat import INPUTS_LAST
from .geometry import Geometry, geometry
from .launch import INTERPRETED, Launch, Step
from .numbers_on_device import rounding
from .padded import join_kernel
from .tiles import WORKSPACE_FLOOR
from .tuning import Choice

PRODUCTS, MEMORY_BYTES = 600e12, 3.8e12  # a second
JOIN_SECONDS = 3e-6
BLOCK = 1024


@dataclass(frozen=True)
class JoinedPlan:
    """Output or input gradient of all groups at once: `take` says whether the tensors lie as it needs."""

    dense: box_line_plans.BoxLines
    join: Step

    @property
    def tile(self) -> BoxLineTile:
        return self.dense.tile

    @property
    def weights(self) -> int:
        """Elements of the joined weights."""
        return math.prod(self.dense.problem.conv.weight_shape)

    @property
    def words(self) -> int:
        """Elements of float32 that a call needs beside its tensors."""
        return -(-self.weights // 8) * 4 + self.dense.memory

    def take(self, source: Any, result: Any) -> bool:
        return self.dense.lies(source, result)

    def write(self, source: Any, weight: Any, result: Any, memory: Any) -> None:
        """Join the weights, then multiply."""
        end = -(-self.weights // 8) * 4
        outs, ins, *kernel = self.dense.problem.conv.weight_shape
        joined = memory[:end].view(weight.dtype)[:self.weights].view(outs, *kernel, ins).permute(
            0, -1, *range(1, len(kernel) + 1))
        self.join(weight, joined)
        self.dense.run(source, joined, result, memory[end:])


def fits(problem: Problem, geo: Geometry) -> bool:
    """Whether groups can be joined: 16-bit numbers, one tap, rows of whole 16 bytes."""
    return (not INTERPRETED and problem.wrt in ("input", "output") and geo.groups > 1 and geo.taps == 1
            and problem.dtype in ("bfloat16", "float16") and rounding(problem) == ""
            and geo.groups * geo.group_in % 8 == 0 and geo.groups * geo.group_out % 8 == 0)


def expected_to_pay(geo: Geometry) -> bool:
    """Narrow groups whose joined products take no longer than their bytes."""
    channels_in, channels_out = geo.groups * geo.group_in, geo.groups * geo.group_out
    moved = 2 * geo.batch * (channels_in * math.prod(geo.x) + channels_out * math.prod(geo.y))
    return (geo.group_in % 64 + geo.group_out % 64 > 0
            and 2 * geo.pixels * channels_in * channels_out / PRODUCTS < moved / MEMORY_BYTES)


def worth_measuring(problem: Problem, geo: Geometry, count: int = 3) -> list[BoxLineTile]:
    """The best tiles of the dense problem."""
    conv = replace(problem.conv, groups=1)
    return best_tiles(problem.with_(conv=conv), geometry(conv), count) if fits(problem, geo) and \
        expected_to_pay(geo) else []


def for_problem(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> JoinedPlan | None:
    """The plan of the measured choice, or of the cost model; None where groups are not joined."""
    if (choice["kernel"] != "joined" if choice is not None else not expected_to_pay(geo)) or not fits(problem, geo):
        return None
    conv = replace(problem.conv, groups=1)
    wide = problem.with_(conv=conv, weight_layout=INPUTS_LAST[conv.axes - 1])
    limit = WORKSPACE_FLOOR if max_workspace is None else min(WORKSPACE_FLOOR, max_workspace)
    size = math.prod(conv.weight_shape)
    room = limit - 4 * (-(-size // 8) * 4)
    named = None if choice is None else {**choice, "kernel": "box_lines"}
    dense = None if room < 0 else box_line_plans.for_problem(wide, geometry(conv), named, room, joined=geo.groups)
    if dense is None or dense.copies.bytes:
        return None

    def launch(weight: Any, joined: Any) -> Launch:
        w_o, w_i = weight.stride()[:2]
        return Launch((-(-size // BLOCK),), (size, w_o, w_i),
                      {"KG": geo.group_out, "CG": geo.group_in, "CHANNELS": conv.in_channels, "BE": BLOCK}, 4, 1)

    return JoinedPlan(dense, Step(join_kernel, launch))
