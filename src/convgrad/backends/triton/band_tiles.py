"""Which band for depthwise gradients on the tensor cores: how tiles and runs lie, and a model of their time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from .geometry import Geometry
from .gpu import Gpu
from .tiles import workspace_limit

SHARED_BYTES = 200 * 1024  # of a program
MOST_REGISTERS = 236  # of a thread
CLOCK_SHARE = 0.865  # what the phases of a step leave of the clock
PRODUCT_CYCLES = 7.0  # of a tensor core
CACHE_SHARE = 0.44  # of the L2 cache's speed
WORTH_SHARING = 0.85  # of a run: where steps shared by more programs are no more
WHOLE_TILE = 24  # steps of a tile that is not divided between runs where it has neighbours
LOAD_CYCLES = 4.0  # of a load from shared memory
STEP_CYCLES = 150.0  # of a step that does nothing
STORE_CYCLES = 75.0  # of a group of columns of dx, for each channel of a thread
TAP_CYCLES = 8.0  # of a matrix of taps that is read from the weight, for each channel
PROGRAM_SECONDS = 4e-6  # before its first and after its last step


@dataclass(frozen=True)
class Band:
    """J groups of 8 columns a tile (0: the sliding line of band_line.py), V channels a warp.

    LINES lines of taps a program (weight gradient); fewer than all lines for the input gradient: rows of a program of
    band_tall.py.
    """

    J: int
    V: int
    LINES: int
    STAGES: int
    BB: int
    splits: int
    AHEAD: bool = False  # input gradient: a step is loaded while the products of the one before are summed
    warps: int = 8
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return (f"bands of {8 * self.J or 16} columns x 16 strips x {self.V * self.warps} channels, "
                f"{self.LINES} lines, {self.STAGES} stages, {self.splits} runs, {self.seconds * 1e6:.0f} us expected")


@dataclass(frozen=True)
class Walk:
    """How the tiles of a band lie: strips are images, or images and planes."""

    split: bool
    a_tiles: int
    b_tiles: int
    column_tiles: int
    steps: int

    @property
    def tiles(self) -> int:
        return self.a_tiles * self.b_tiles * self.column_tiles


def products_wide(geo: Geometry) -> int:
    """Products of 16 columns that hold all diagonals."""
    return (geo.kernel[2] + 22) // 16


def walk_of(kind: str, geo: Geometry, band: Band, bias: bool) -> Walk:
    planes = geo.y[0] if kind == "weight" else geo.x[0]
    split = max(geo.x[0], geo.y[0], geo.kernel[0]) == 1 and band.BB > 1
    a_extent = geo.batch // band.BB if split else geo.batch
    columns = geo.y[2] if kind == "weight" else geo.x[2]
    steps = 1
    for pad in range(geo.pad[1], geo.pad[1] - geo.kernel[1], -band.LINES):
        # enough for all sums, and what a tile leaves in the registers must not meet the next one's rows: see bands.py
        lines = band.LINES if kind == "weight" else geo.kernel[1]
        work = min(geo.x[1] + pad, geo.y[1] + lines - 1) if kind == "weight" else geo.x[1] + pad
        steps = max(steps, work, geo.y[1] + lines - 1 - max(pad, 0), geo.y[1] if bias else 1)
    return Walk(split, -(-a_extent // (16 // band.BB)), 1 if split else -(-planes // band.BB),
                -(-columns // (8 * band.J)), steps)


@dataclass(frozen=True)
class Runs:
    """Runs of steps after each other: `long` of `run` steps, then some of `short` steps, `count` in all."""

    run: int
    long: int
    short: int
    count: int

    def bounds(self, total: int) -> list[tuple[int, int]]:
        """Begin and end of each, as the kernels compute them."""
        begins = [min(n, self.long) * self.run + max(n - self.long, 0) * self.short for n in range(self.count)]
        return [(begin, min(begin + (self.run if n < self.long else self.short), total))
                for n, begin in enumerate(begins)]


def runs_of(kind: str, walk: Walk, band: Band, sets: int, gpu: Gpu) -> Runs:
    """The runs of each of `sets` sets of programs.

    They are whole tiles where tiles are neighbours: programs that run at the same time then read the same rows, and
    what two tiles read comes from memory once. What whole waves of programs leave over is shared by all programs of
    the last wave for an input gradient; weight gradients got slower by that.
    """
    total = walk.tiles * walk.steps
    whole = walk.column_tiles > 1 and walk.steps >= WHOLE_TILE
    run = -(-walk.tiles // min(walk.tiles, band.splits)) * walk.steps if whole else -(-total // band.splits)
    count = -(-total // run)
    early = count * sets // gpu.multiprocessors * gpu.multiprocessors // sets
    sharing = gpu.multiprocessors // sets
    if kind == "input" and whole and 0 < early < count < early + sharing:
        short = -(-(total - early * run) // sharing)
        if short + band.LINES < WORTH_SHARING * run:
            return Runs(run, early, short, early + -(-(total - early * run) // short))
    return Runs(run, count, run, count)


def groups_of(kind: str, geo: Geometry, band: Band) -> tuple[int, int]:
    """Groups of columns that a step copies: of x and of dy, or of dy and of dx."""
    return band.J - 1 + 2 * products_wide(geo), band.J


def is_tall(geo: Geometry, band: Band) -> bool:
    """Whether a band of an input gradient holds some rows of dx (band_tall.py), not the taps of all lines."""
    return geo.kernel[1] > band.LINES


def registers(kind: str, geo: Geometry, band: Band) -> int:
    wide, v, j = products_wide(geo), band.V, band.J
    if kind == "weight":
        return band.LINES * wide * 4 * v + band.LINES * j * 2 * v + 8 * v + 30
    tall = 4 * wide * v + 16 if is_tall(geo, band) else 0  # taps that are loaded, and where from
    return band.LINES * j * 4 * v + geo.kernel[0] * band.LINES * wide * 2 * v + 8 * v + 34 + tall


def estimate(kind: str, geo: Geometry, band: Band, bias: bool, gpu: Gpu) -> float:
    """Seconds: products, reads of shared memory, copies from the cache and from memory."""
    walk = walk_of(kind, geo, band, bias)
    lines = band.LINES
    channel_tiles = -(-geo.groups // (band.V * band.warps))
    sets = channel_tiles * (geo.kernel[0] * -(-geo.kernel[1] // band.LINES) if kind == "weight" else 1)
    runs = runs_of(kind, walk, band, sets, gpu)
    wide, taps = products_wide(geo), 0.0
    programs = sets * runs.count
    before = lines - 1 if runs.run % walk.steps else 0  # rows that a run needs of the steps before
    waves: float = -(-programs // gpu.multiprocessors)
    run = runs.run + before
    if runs.long < runs.count:
        waves = sets * runs.long // gpu.multiprocessors + (runs.short + lines - 1) / run
    if kind == "input" and is_tall(geo, band):
        programs = sets * walk.tiles * -(-geo.x[1] // lines)
        run = min(geo.y[1], geo.kernel[1] - 1 + lines)
        waves = -(-programs // gpu.multiprocessors)
        taps = band.warps * band.V * wide * TAP_CYCLES
    first, second = groups_of(kind, geo, band)
    planes = geo.kernel[0] if kind == "input" else 1  # that a step has rows of
    products = planes * band.warps * band.V * lines * wide * band.J * PRODUCT_CYCLES / 4
    loads = planes * band.warps * 4 * (2 * (band.J + 2 * wide - 2) + (band.J if kind == "weight" else 0)) * LOAD_CYCLES
    cycles = (max(products, loads) if band.AHEAD else products + loads) + STEP_CYCLES
    if kind == "input":
        cycles += taps or STORE_CYCLES * band.J * band.V
    box = 16 * 8 * band.V * band.warps * 2
    issue = waves * (run * cycles / (CLOCK_SHARE * gpu.clock_hz) + PROGRAM_SECONDS)
    copied = min(programs, waves * gpu.multiprocessors) * run * (planes * first + second) * box
    cache = copied / (CACHE_SHARE * gpu.l2_bytes_per_s)
    elements = geo.batch * geo.groups * (math.prod(geo.x) + math.prod(geo.y))
    memory = 2 * elements * (1 + 0.2 * (geo.kernel[0] - 1)) / gpu.memory_bytes_per_s
    return (issue**3 + max(cache, memory)**3)**(1 / 3) + gpu.launch_s * (2 if kind == "weight" else 1)


def back_of(geo: Geometry) -> int:
    """Groups of 8 columns before the own two that 16 columns reach: see band_line.py."""
    return (geo.kernel[2] + 6) // 8


def line_steps(kind: str, geo: Geometry) -> int:
    """Steps of a tile of band_line.py: all columns, and as many more as empty the registers."""
    if kind == "input":
        return -(-(-(-geo.x[2] // 8) + back_of(geo)) // 2)
    return max(-(-min(geo.y[2] + geo.kernel[2] - 1, geo.x[2] + geo.pad[2]) // 16),
               -(-(-(-geo.y[2] // 8) + back_of(geo)) // 2))


def estimate_line(kind: str, geo: Geometry, band: Band, gpu: Gpu) -> float:
    """The same for a sliding line."""
    channel_tiles = -(-geo.groups // (band.V * band.warps))
    steps = -(-geo.batch // 16) * line_steps(kind, geo)
    back, boxes = back_of(geo), 4 if kind == "weight" else 2
    run = -(-steps // band.splits) + (back + 1) // 2
    cycles = band.warps * (band.V * (back + 2) * PRODUCT_CYCLES / 4 + 4 * boxes * LOAD_CYCLES) + STEP_CYCLES
    if kind == "input":
        cycles += STORE_CYCLES * 2 * band.V
    waves = -(-channel_tiles * band.splits // gpu.multiprocessors)
    issue = waves * (run * cycles / (CLOCK_SHARE * gpu.clock_hz) + PROGRAM_SECONDS)
    copied = channel_tiles * band.splits * run * 4 * 16 * 8 * band.V * band.warps * 2
    memory = 2 * geo.batch * geo.groups * (geo.x[2] + geo.y[2]) / gpu.memory_bytes_per_s
    cache = copied / (CACHE_SHARE * gpu.l2_bytes_per_s)
    return (issue**3 + max(cache, memory)**3)**(1 / 3) + gpu.launch_s * (2 if kind == "weight" else 1)


def line_options(kind: str, geo: Geometry, beside: int, size: int, limit: int, gpu: Gpu) -> Iterator[Band]:
    """Sliding lines whose sums fit."""
    for v in (2, 4, 8):
        box = 16 * 8 * v * 8 * 2
        stages = SHARED_BYTES // (4 * box) if kind == "weight" else (SHARED_BYTES - 4 * box) // (2 * box)
        band = Band(0, v, 1, min(8, stages), beside, 1)
        if (back_of(geo) + 2) * 6 * v + 8 * v + 34 > MOST_REGISTERS:
            continue
        channel_tiles = -(-geo.groups // (v * band.warps))
        for waves in (1, 2, 3):
            most = -(-geo.batch // 16) * line_steps(kind, geo)
            runs = max(1, min(most, waves * gpu.multiprocessors // channel_tiles))
            if kind == "input" or runs * size <= limit:
                band = replace(band, splits=runs)
                yield replace(band, seconds=estimate_line(kind, geo, band, gpu))


def options(kind: str, geo: Geometry, max_workspace: int | None, bias: bool, gpu: Gpu) -> Iterator[Band]:
    """Bands whose sums fit into registers and shared memory, with runs that fill the chip."""
    planes = max(geo.x[0], geo.y[0], geo.kernel[0]) > 1
    best = 4 if kind == "weight" else 2  # strips next to each other, so that lanes read from different banks
    if planes:
        beside = max(best, 16 // (1 << max(0, geo.batch.bit_length() - 1))) if geo.batch < 16 else best
    else:
        beside = next(b for b in (best, 2, 1) if geo.batch % b == 0)
    columns = geo.y[2] if kind == "weight" else geo.x[2]
    size = 4 * geo.groups * (geo.taps + bias)
    limit = workspace_limit(geo, max_workspace)
    if geo.kernel[:2] == (1, 1) and max(geo.x[:2] + geo.y[:2]) == 1:
        yield from line_options(kind, geo, beside, size, limit, gpu)
    for v, j in product((2, 4, 8), range(1, 5)):
        if j > 1 and 8 * (j - 1) >= columns:
            continue
        all_lines = geo.kernel[1]
        for lines in range(min(8, all_lines), 0, -1) if kind == "weight" or all_lines > 8 else (all_lines,):
            ahead = kind == "input" and 3 < lines == all_lines and geo.kernel[0] == 1
            band = Band(j, v, lines, 2, min(beside, 16), 1, ahead)
            if registers(kind, geo, band) > MOST_REGISTERS:
                continue
            box = 16 * 8 * v * band.warps * 2
            first, second = groups_of(kind, geo, band)
            left = SHARED_BYTES - (0 if kind == "weight" else 2 * j * box)
            stages = min(8, left // (box * (first + second if kind == "weight" else geo.kernel[0] * first)))
            if stages < 2:
                continue
            walk = walk_of(kind, geo, band, bias)
            sets = -(-geo.groups // (v * band.warps)) * (
                geo.kernel[0] * -(-geo.kernel[1] // lines) if kind == "weight" else 1)
            counts = {max(1, min(walk.tiles * walk.steps // lines, waves * gpu.multiprocessors // sets))
                      for waves in (1, 2, 3)}
            if walk.column_tiles > 1 and walk.steps >= WHOLE_TILE and walk.tiles * sets >= gpu.multiprocessors:
                counts = {walk.tiles}
            for runs in sorted(counts):
                band = replace(band, STAGES=stages, splits=runs)
                if kind == "weight" and runs_of(kind, walk, band, sets, gpu).count * size > limit:
                    continue
                yield replace(band, seconds=estimate(kind, geo, band, bias, gpu))
