"""Plans for depthwise gradients on the tensor cores: when they fit, which tile, how tensors become strips."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import DTYPES, Plan, Problem
from . import strips
from .band_input import band_input_kernel
from .bands import band_weight_kernel
from .depthwise_plans import channels_last
from .geometry import Geometry, strides_of, turned
from .launch import INTERPRETED, Launch, Step
from .numbers_on_device import on_tensors, rounding
from .slide_plans import Sums
from .strips import choose_strip
from .tiles import MULTIPROCESSORS, WORKSPACE_FLOOR
from .tuning import Choice, fields_of, left_out

SHARED_BYTES = 200 * 1024  # of a program
MOST_REGISTERS = 236  # of a thread
CLOCK = 1.6e9  # as if: what the phases of a step leave of it
PRODUCT_CYCLES = 7.0  # of a tensor core
CACHE_BYTES = 5.5e12
MEMORY_BYTES = 3.6e12
LAUNCH_SECONDS = 5e-6
WHOLE_TILE = 24  # steps of a tile that is not divided between runs where it has neighbours
LOAD_CYCLES = 4.0  # of a load from shared memory
STEP_CYCLES = 150.0  # of a step that does nothing
STORE_CYCLES = 75.0  # of a group of columns of dx, for each channel of a thread
PROGRAM_SECONDS = 4e-6  # before its first and after its last step


@dataclass(frozen=True)
class Band:
    """J groups of 8 columns a tile, V channels a warp, LINES lines of taps a program (weight gradient)."""

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
        return (f"bands of {8 * self.J} columns x 16 strips x {self.V * self.warps} channels, {self.LINES} lines, "
                f"{self.STAGES} stages, {self.splits} runs, {self.seconds * 1e6:.0f} us expected")


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


def run_steps(walk: Walk, band: Band, bias: bool) -> int:
    """Steps of a run.

    Whole tiles with the bias gradient, since the steps before a run would count twice, and where tiles are neighbours:
    programs that run at the same time then read the same rows, and what two tiles read comes from memory once.
    """
    if bias or (walk.column_tiles > 1 and walk.steps >= WHOLE_TILE):
        return -(-walk.tiles // min(walk.tiles, band.splits)) * walk.steps
    return -(-walk.tiles * walk.steps // band.splits)


def groups_of(kind: str, geo: Geometry, band: Band) -> tuple[int, int]:
    """Groups of columns that a step copies: of x and of dy, or of dy and of dx."""
    return band.J - 1 + 2 * products_wide(geo), band.J


def registers(kind: str, geo: Geometry, band: Band) -> int:
    wide, v, j = products_wide(geo), band.V, band.J
    if kind == "weight":
        return band.LINES * wide * 4 * v + band.LINES * j * 2 * v + 8 * v + 30
    return geo.kernel[1] * j * 4 * v + geo.kernel[1] * wide * 2 * v + 8 * v + 34


def estimate(kind: str, geo: Geometry, band: Band, bias: bool) -> float:
    """Seconds: products, reads of shared memory, copies from the cache and from memory."""
    walk = walk_of(kind, geo, band, bias)
    lines = band.LINES if kind == "weight" else geo.kernel[1]
    channel_tiles = -(-geo.groups // (band.V * band.warps))
    sets = channel_tiles * (geo.kernel[0] * -(-geo.kernel[1] // band.LINES) if kind == "weight" else 1)
    run = run_steps(walk, band, bias)
    programs = sets * -(-walk.tiles * walk.steps // run)
    run += lines - 1 if run % walk.steps else 0  # rows that a run needs of the steps before
    waves = -(-programs // MULTIPROCESSORS)
    first, second = groups_of(kind, geo, band)
    wide = products_wide(geo)
    products = band.warps * band.V * lines * wide * band.J * PRODUCT_CYCLES / 4
    loads = band.warps * 4 * (2 * (band.J + 2 * wide - 2) + (band.J if kind == "weight" else 0)) * LOAD_CYCLES
    cycles = (max(products, loads) if band.AHEAD else products + loads) + STEP_CYCLES
    if kind == "input":
        cycles += STORE_CYCLES * band.J * band.V
    box = 16 * 8 * band.V * band.warps * 2
    issue = waves * (run * cycles / CLOCK + PROGRAM_SECONDS)
    cache = programs * run * (first + second) * box / CACHE_BYTES
    elements = geo.batch * geo.groups * (math.prod(geo.x) + math.prod(geo.y))
    memory = 2 * elements * (1 + 0.2 * (geo.kernel[0] - 1)) / MEMORY_BYTES
    return (issue**3 + max(cache, memory)**3)**(1 / 3) + LAUNCH_SECONDS * (2 if kind == "weight" else 1)


def options(kind: str, geo: Geometry, max_workspace: int | None, bias: bool) -> Iterator[Band]:
    """Bands whose sums fit into registers and shared memory, with runs that fill the chip."""
    planes = max(geo.x[0], geo.y[0], geo.kernel[0]) > 1
    best = 4 if kind == "weight" else 2  # strips next to each other, so that lanes read from different banks
    if planes:
        beside = max(best, 16 // (1 << max(0, geo.batch.bit_length() - 1))) if geo.batch < 16 else best
    else:
        beside = next(b for b in (best, 2, 1) if geo.batch % b == 0)
    columns = geo.y[2] if kind == "weight" else geo.x[2]
    size = 4 * geo.groups * (geo.taps + bias)
    limit = max(WORKSPACE_FLOOR, 2 * size)
    limit = limit if max_workspace is None else min(max_workspace, limit)
    for v in (2, 4, 8):
        for j in range(1, 5):
            if j > 1 and 8 * (j - 1) >= columns:
                continue
            for lines in range(min(8, geo.kernel[1]), 0, -1) if kind == "weight" else (geo.kernel[1],):
                if kind == "input" and lines > 8:
                    continue
                band = Band(j, v, lines, 2, min(beside, 16), 1, kind == "input" and lines > 3)
                if registers(kind, geo, band) > MOST_REGISTERS:
                    continue
                box = 16 * 8 * v * band.warps * 2
                first, second = groups_of(kind, geo, band)
                left = SHARED_BYTES - (0 if kind == "weight" else 2 * j * box)
                stages = min(8, left // (box * (first + second if kind == "weight" else first)))
                if stages < 2:
                    continue
                walk = walk_of(kind, geo, band, bias)
                sets = -(-geo.groups // (v * band.warps)) * (
                    geo.kernel[0] * -(-geo.kernel[1] // lines) if kind == "weight" else 1)
                counts = {max(1, min(walk.tiles * walk.steps // lines, waves * MULTIPROCESSORS // sets))
                          for waves in (1, 2, 3)}
                if walk.column_tiles > 1 and walk.steps >= WHOLE_TILE and walk.tiles * sets >= MULTIPROCESSORS:
                    counts = {walk.tiles}
                for runs in sorted(counts):
                    if kind == "weight" and runs * size > limit:
                        continue
                    band = replace(band, STAGES=stages, splits=runs)
                    yield replace(band, seconds=estimate(kind, geo, band, bias))


def fits(problem: Problem, geo: Geometry) -> bool:
    """Whether bands compute what is asked for: 16-bit operands in channels last, no stride and no dilation."""
    return (not INTERPRETED and not left_out("band_") and channels_last(problem)
            and problem.dtype in ("bfloat16", "float16") and rounding(problem) == ""
            and problem.wrt in ("input", "weight", "weight+bias") and geo.groups % 8 == 0
            and max(geo.stride) == max(geo.dilation) == 1
            and (problem.wrt != "input" or (geo.kernel[0] == 1 and DTYPES[problem.out_dtype][1] == 2)))


def takes(*tensors: Any) -> bool:
    """Whether the copy engine can read and write the tensors: channels next to each other, rows at 16 bytes."""
    return all(t.data_ptr() % 16 == 0 and t.stride(1) == 1 and all(
        step % 8 == 0 and step > 0 for axis, (step, extent) in enumerate(zip(t.stride(), t.shape))
        if axis != 1 and extent > 1) for t in tensors)


def box_of(tensor: Any, band: Band, split: bool) -> Any:
    """The tensor as (strips, rows, columns, strips, channels), a row of 8 columns x 16 strips a box."""
    n, _, s0, s1, s2 = strides_of(tensor)
    batch, channels, *extents = tensor.shape
    e0, e1, e2 = (1,) * (3 - len(extents)) + tuple(extents)
    channels_a_box = band.V * band.warps
    if split:
        shape, strides = [batch // band.BB, e1, e2, band.BB], [n * band.BB, s1, s2, n]
    else:
        shape, strides = [batch, e1, e2, e0], [n, s1, s2, s0]
    return TensorDescriptor(tensor, [*shape, channels], [*(step or channels for step in strides), 1],
                            [16 // band.BB, 1, 8, band.BB, channels_a_box],
                            gl.NVMMASharedLayout(min(128, 2 * channels_a_box), 16, rank=5))


def weight_plan(problem: Problem, geo: Geometry, band: Band) -> Plan:
    """The weight gradient, alone or with the bias gradient."""
    bias = "bias" in problem.results
    walk = walk_of("weight", geo, band, bias)
    channel_tiles = -(-geo.groups // (band.V * band.warps))
    groups = -(-geo.kernel[1] // band.LINES)
    run_length = run_steps(walk, band, bias)
    splits = -(-walk.tiles * walk.steps // run_length)

    def leading(dy: Any, x: Any, partial: Any) -> tuple[Any, ...]:
        return box_of(x, band, walk.split), box_of(dy, band, walk.split), dy, x, partial

    def launch(dy: Any, x: Any, partial: Any) -> Launch:
        yn, _, *y = strides_of(dy)
        xn, _, *xs = strides_of(x)
        constants = {name: value for name, value in geo.constants().items() if name[0] in "KP"} | {
            "C": geo.groups, "BIAS": bias, "LINES": band.LINES, "J": band.J, "SPLIT": walk.split, "BB": band.BB,
            "STAGES": band.STAGES, "UNROLL": band.LINES,
            "V": band.V, "WARPS": band.warps}
        scalars = (geo.batch, *geo.y, *geo.x, walk.column_tiles, walk.b_tiles, walk.steps,
                   walk.tiles * walk.steps, run_length, channel_tiles, yn, *y, xn, *xs)
        return Launch((channel_tiles * geo.kernel[0] * groups * splits,), scalars, constants, band.warps, 1, leading)

    step = Step(band_weight_kernel, launch)
    sums = Sums(problem, geo, strides_of, splits)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        partial = sums.partial(workspace, results[0])
        step(*operands, partial)
        sums.add(partial, results)

    return Plan(problem, "triton", f"band_weight_{DTYPES[problem.dtype][0]}_{band.J}x{band.V}_split{splits}",
                on_tensors(problem, run), sums.bytes, (f"tile: {band}",))


def input_plan(problem: Problem, geo: Geometry, band: Band) -> Plan:
    """The input gradient."""
    walk = walk_of("input", geo, band, False)
    channel_tiles = -(-geo.groups // (band.V * band.warps))
    run_length = run_steps(walk, band, False)
    programs = channel_tiles * -(-walk.tiles * walk.steps // run_length)

    def leading(dy: Any, weight: Any, dx: Any) -> tuple[Any, ...]:
        return box_of(dy, band, walk.split), dy, weight, dx

    def launch(dy: Any, weight: Any, dx: Any) -> Launch:
        yn, _, *y = strides_of(dy)
        rn, _, *r = strides_of(dx)
        wc, _, _, w1, w2 = strides_of(weight)
        constants = {"C": geo.groups, "K1": geo.kernel[1], "K2": geo.kernel[2], "P1": geo.pad[1], "P2": geo.pad[2],
                     "J": band.J, "SPLIT": walk.split, "BB": band.BB, "STAGES": band.STAGES,
                     "AHEAD": band.AHEAD, "UNROLL": geo.kernel[1], "V": band.V, "WARPS": band.warps}
        scalars = (geo.batch, geo.x[0], *geo.y[1:], *geo.x[1:], walk.column_tiles, walk.b_tiles, walk.steps,
                   walk.tiles * walk.steps, run_length, channel_tiles, yn, *y, rn, *r, wc, w1, w2)
        return Launch((programs,), scalars, constants, band.warps, 1, leading)

    step = Step(band_input_kernel, launch)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        step(*operands, results[0])

    return Plan(problem, "triton", f"band_input_{DTYPES[problem.dtype][0]}_{band.J}x{band.V}",
                on_tensors(problem, run), 0, (f"tile: {band}",))


def for_problem(problem: Problem, geo: Geometry, max_workspace: int | None, choice: Choice | None) -> Plan | None:
    """The plan by bands; None where they do not fit or are not chosen."""
    if not fits(problem, geo) or (choice is not None and choice["kernel"] != "band"):
        return None
    kind = "input" if problem.wrt == "input" else "weight"
    bias = "bias" in problem.results
    band = Band(**fields_of(choice)) if choice is not None else faster_than_strips(kind, geo, max_workspace, bias)
    if band is None:
        return None
    return input_plan(problem, geo, band) if kind == "input" else weight_plan(problem, geo, band)


def faster_than_strips(kind: str, geo: Geometry, max_workspace: int | None, bias: bool) -> Band | None:
    """The best band where the models expect it to be faster than the best strip."""
    band = min(options(kind, geo, max_workspace, bias), key=lambda band: band.seconds, default=None)
    strip = None if band is None else choose_strip(kind, geo, max_workspace, bias)
    if band is None or strip is None:
        return band
    return band if band.seconds < 1e-3 * strips.estimate(kind, turned(geo) if strip.turn else geo, strip) else None


def faster_apart(problem: Problem, geo: Geometry, max_workspace: int | None) -> bool:
    """Whether input and weight gradient, each by bands, are expected to take less time than one pass of strips."""
    parts = [problem.with_(wrt="input"), problem.with_(wrt="weight")]
    if not all(fits(part, geo) for part in parts):
        return False
    bias = "bias" in problem.results
    found = [faster_than_strips("input", geo, max_workspace, False),
             faster_than_strips("weight", geo, max_workspace, bias)]
    strip = choose_strip("both", geo, max_workspace, bias)
    return strip is None or sum(band.seconds if band is not None else math.inf for band in found) < \
        1e-3 * strips.estimate("both", turned(geo) if strip.turn else geo, strip)


def or_other(banded: Plan, other: Plan) -> Plan:
    """The plan by bands where the tensors lie as it needs, otherwise the other one."""
    problem = banded.problem

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        wide = [t for name, t in zip((*problem.operands, *problem.results), (*operands, *results))
                if name not in ("weight", "bias")]
        (banded if takes(*wide) else other).run(operands, results, workspace)

    return banded._replace(run=run, workspace_bytes=max(banded.workspace_bytes, other.workspace_bytes),
                           notes=(*banded.notes, f"where rows are not multiples of 16 bytes: {other.kernel}"))


def worth_measuring(problem: Problem, geo: Geometry, count: int = 5) -> list[Band]:
    """The best bands of different shapes."""
    if not fits(problem, geo):
        return []
    found: list[Band] = []
    shapes: set[tuple[int, ...]] = set()
    kind = "input" if problem.wrt == "input" else "weight"
    for band in sorted(options(kind, geo, None, "bias" in problem.results), key=lambda band: band.seconds):
        if (band.J, band.V, band.LINES) not in shapes:
            shapes.add((band.J, band.V, band.LINES))
            found.append(band)
    return found[:count]
