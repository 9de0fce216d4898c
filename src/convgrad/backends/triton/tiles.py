"""Which tile: a cost model that picks one without measuring, printable, so that `explain` can show its reasons."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from .geometry import Geometry
from .gpu import WORKSPACE_FLOOR, Gpu
from .launch import power_of_two

Box = tuple[int, int, int, int]

PROGRAMS = 132  # that the adding kernels should have at least; the order of sums must not depend on the card


@dataclass(frozen=True)
class GatherTile:
    """Tile of the output and input-gradient kernel: rows x columns, TS taps x CB channels per step, GP groups."""

    BM: int
    BN: int
    CB: int
    TS: int
    GP: int
    PACK: bool
    FLAT: bool
    warps: int
    stages: int

    def constants(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name.isupper()}

    def __str__(self) -> str:
        groups = f", {self.GP} groups" if self.GP > 1 else ""
        return (f"{self.BM}x{self.BN} tile, {self.TS}x{self.CB} (taps x channels) a step{groups}"
                f"{', phases packed' if self.PACK else ''}, {self.warps} warps, {self.stages} stages")


@dataclass(frozen=True)
class WeightTile:
    """Tile of the weight-gradient kernel: BK output channels x (TS taps x CB channels), BP pixels a step."""

    BK: int
    CB: int
    TS: int
    box: Box
    GP: int
    SWAP: bool
    FLAT: bool
    SEG: bool
    SPLITS: int
    warps: int
    stages: int

    @property
    def BP(self) -> int:
        return math.prod(self.box)

    def constants(self) -> dict[str, Any]:
        pn, b0, b1, b2 = self.box
        return {name: value for name, value in asdict(self).items() if name.isupper()} | {
            "PN": pn, "B0": b0, "B1": b1, "B2": b2}

    def __str__(self) -> str:
        groups = f", {self.GP} groups" if self.GP > 1 else ""
        return (f"{self.BK} x ({self.TS}x{self.CB}) tile, {self.BP} pixels a step, {self.SPLITS} runs of pixels"
                f"{groups}{', segments of lines' if self.SEG else ''}{', swapped' if self.SWAP else ''}, "
                f"{self.warps} warps, {self.stages} stages")


def groups_per_tile(geo: Geometry) -> int:
    """How many small groups share a tile: enough for 32 channels of both kinds, as a divisor of the group count."""
    widest = max(geo.group_in, geo.group_out)
    best = 1
    for count in range(1, geo.groups + 1):
        if count * widest > 32:
            break
        if geo.groups % count == 0:
            best = count
    return best


def choose_gather(geo: Geometry, is_input: bool, itemsize: int, gpu: Gpu) -> GatherTile:
    """Pick the tile with the lowest estimated time for the output (or the input gradient)."""
    gp = groups_per_tile(geo)
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    pack = is_input and packs_phases(geo)
    slots = math.prod(geo.span) if pack else geo.taps if not is_input else \
        math.prod(-(-k // (s // g)) for k, s, g in zip(geo.kernel, geo.stride, geo.common))
    columns = col * gp * (geo.phases if pack else 1)
    rows = geo.batch * math.prod(geo.phase_positions if is_input else geo.y)
    launches = (1 if pack or not is_input else geo.phases) * (geo.groups // gp)
    depth = red * gp
    widest_step = 128 // itemsize  # elements of one row of a shared-memory swizzle
    cb = max(min(power_of_two(depth), widest_step), 16 if slots == 1 else 1)
    if depth > cb and depth % cb and depth % (cb // 2) == 0 and cb > 32:
        cb //= 2
    ts = 1 if cb * 2 > widest_step else min(widest_step // cb, power_of_two(slots))
    flat = cb < 8 and ts > 1
    if flat:
        ts, cb = max(1, min(widest_step, power_of_two(slots * depth), 64) // 16), 16
    bn = cheapest_width(columns)
    bm = 128 if bn > 64 else 256 if bn <= 32 and ts == 1 else 128
    while bm > 32 and -(-rows // bm) * -(-columns // bn) * launches < gpu.multiprocessors:
        if bn > 64 and bm == 64:
            bn //= 2
        else:
            bm //= 2
    warps = 8 if bm * bn >= 128 * 128 else 4
    steps = -(-slots * depth // (ts * cb)) if flat else -(-slots // ts) * -(-depth // cb)
    if pack and not flat:  # measured on an H200: shallow pipelines, or none where loads are scattered
        bm, warps, most = (256 if rows >= 256 * gpu.multiprocessors else bm), 4, 2
    else:
        most = 1 if ts > 1 or flat else 4
        warps = 4 if most == 1 else warps
    stages = min(stages_for((bm + bn) * cb * ts * itemsize, gpu, most), max(1, steps))
    return GatherTile(bm, bn, cb, ts, gp, pack, flat, warps, stages)


def packs_phases(geo: Geometry) -> bool:
    """Whether the phases of the input gradient are packed as columns of one product.

    That multiplies by some zeros; it pays when one phase alone leaves a tile mostly empty.
    """
    if geo.groups > 1 or geo.phases == 1:
        return False
    zeros = math.prod(geo.span) * geo.phases / geo.taps
    alone = max(16, geo.group_in) / geo.group_in
    return (zeros < alone and geo.group_in < 32) or (zeros == 1 and geo.group_in < 64)


def cheapest_width(columns: int) -> int:
    """Width of a tile by wasted columns against the speed of narrow tiles."""
    speed = {16: 0.25, 32: 0.45, 64: 0.75, 128: 1.0, 256: 1.02}
    return min(speed, key=lambda width: -(-columns // width) * width / speed[width])


def stages_for(step_bytes: int, gpu: Gpu, most: int = 4) -> int:
    return max(1, min(most, gpu.program_bytes // max(1, step_bytes)))


@lru_cache(maxsize=8192)
def best_box(extents: tuple[int, ...], volume: int, most: tuple[int, ...] = (256, 256, 256)) -> Box:
    """The box of `volume` positions (powers of two) that covers the extents with the fewest positions to spare.

    `most`: largest extents of a box on the three axes.
    """
    best: tuple[float, Box] | None = None
    e0, e1, e2, e3 = extents
    # (size, positions covered, share of a box's border) by axis, the last axis first: every box is tried
    axes = [[(size, -(-extent // size) * size, 1.0 / size if extent > 1 else 0.0)
             for size in (1 << e for e in range(volume.bit_length())) if size <= limit]
            for extent, limit in zip((e3, e2, e1), reversed(most))]
    for b2, cover2, halo2 in axes[0]:
        for b1, cover1, halo1 in axes[1]:
            for b0, cover0, halo0 in axes[2]:
                images = volume // (b0 * b1 * b2)
                if images == 0 or images > 256 or volume % (b0 * b1 * b2):
                    continue
                covered = -(-e0 // images) * images * cover0 * cover1 * cover2
                cost = covered * (1 + 0.01 * (halo0 + halo1 + halo2))
                if best is None or cost < best[0]:
                    best = (cost, (images, b0, b1, b2))
    assert best is not None
    return best[1]


def choose_weight(geo: Geometry, itemsize: int, max_workspace: int | None, lines: bool, gpu: Gpu) -> WeightTile:
    """Pick the tile for the weight gradient, and into how many runs the pixels are split.

    `lines` says that taps of the last axis and channels are neighbours in memory (one long line of x).
    """
    gp = groups_per_tile(geo)
    rows, channels = geo.group_out * gp, geo.group_in * gp
    segmented = lines and channels < 32 and geo.kernel[2] > 1 and geo.dilation[2] == 1 and geo.groups == 1
    cb = min(power_of_two(channels), 128 if itemsize <= 2 else 64)  # wider, split float32 products spill registers
    if channels > cb // 2 and channels % cb:
        cb = min((64, 32, 16), key=lambda width: (-(-channels // width) * width, -width)) if channels > 16 else cb
    ts = 1 if cb >= 64 else min(128 // cb, power_of_two(geo.taps))
    flat = cb < 8 and geo.taps > 1 and not segmented
    if segmented:
        line = geo.kernel[2] * channels
        cb = min((32, 16, 8), key=lambda width: (-(-line // width) * width, -width))
        segments = geo.kernel[0] * geo.kernel[1] * -(-line // cb)
        ts = min((256 if rows <= 64 else 128) // cb, power_of_two(segments))
        while ts * cb < 16:
            ts *= 2
        columns = -(-segments // ts)
    elif flat:
        ts, cb = min(128, max(16, power_of_two(geo.taps * channels))), 1
        columns = -(-geo.taps * channels // (ts * cb))
    else:
        while ts * cb < 16:
            cb *= 2
        columns = -(-geo.taps // ts) * -(-channels // cb)
    bk = min(128, max(16, power_of_two(rows)))
    if rows > bk // 2 and rows % bk and bk > 64:
        bk = 64 if -(-rows // 64) * 64 < -(-rows // 128) * 128 else 128
    swap = bk < 64 and ts * cb >= 64
    bp = 64 if itemsize <= 2 and not (segmented and ts * cb > 128) else 32
    tiles = -(-rows // bk) * columns * (geo.groups // gp)
    splits = choose_splits(geo, tiles, bp, max_workspace, gpu)
    scattered = flat or segmented
    warps = 8 if bk * ts * cb >= 128 * 128 or scattered else 4
    stages = stages_for((bk + ts * cb) * bp * itemsize, gpu, 2 if scattered else 4)
    return WeightTile(bk, cb, ts, best_box((geo.batch, *geo.y), bp), gp, swap, flat, segmented, splits, warps, stages)


def workspace_limit(geo: Geometry, max_workspace: int | None) -> int:
    """Bytes for a weight gradient: max(64 MiB, twice the gradient in float32), or what the caller allows."""
    limit = max(WORKSPACE_FLOOR, 8 * geo.groups * geo.group_out * geo.group_in * geo.taps)
    return limit if max_workspace is None else min(limit, max_workspace)


def most_splits(geo: Geometry, max_workspace: int | None) -> int:
    """Most runs of pixels whose partial weight gradients fit into the workspace."""
    weight_bytes = 4 * geo.groups * geo.group_out * geo.group_in * geo.taps
    return max(1, min(1024, workspace_limit(geo, max_workspace) // max(1, weight_bytes)))


def choose_splits(geo: Geometry, tiles: int, bp: int, max_workspace: int | None, gpu: Gpu, waves: int = 4) -> int:
    """Runs of pixels: enough programs for some waves, no run shorter than 8 steps, workspace within its limit."""
    wanted = min(-(-waves * gpu.multiprocessors // max(1, tiles)), max(1, geo.pixels // (8 * bp)))
    return max(1, min(wanted, most_splits(geo, max_workspace)))


def reduce_tile(size: int, splits: int) -> tuple[int, int]:
    """(runs, elements) one program of the adding kernel takes at a time: few elements where there are many runs."""
    elements = 256 if size >= 256 * PROGRAMS else 64 if size >= 64 * PROGRAMS else 16
    return min(power_of_two(splits), max(4, 4096 // elements)), elements
