"""Plans for the depthwise weight gradient by strips that the copy engine feeds: when they fit, how tiles lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl

from ...problem import Problem
from .box_plans import accepts
from .descriptors import BoxDescriptor
from .geometry import Geometry, strides_of
from .gpu import Gpu
from .kernel import Kernel, Prepared, Query
from .launch import Launch, Step
from .numbers_on_device import sixteen_bits
from .slide_boxes import slide_box_kernel, slot_columns
from .slide_plans import Sums

MOST_REGISTERS = 215  # of a thread, as they are counted here
STAGE_BYTES = 66 * 1024  # of shared memory: three programs a multiprocessor
MOST_COLUMNS = 34
LONGEST_BODY = 2000  # products in the body of a loop
LEAST_WARPS = 2.0  # of a scheduler that hide each other's waits
CLOCK_SHARE = 0.81  # what waiting leaves of the clock


@dataclass(frozen=True)
class BoxStrip:
    """U columns x V channels a thread, BC channels a program; stages of ROWS rows, STAGES wait, UNROLL a turn."""

    U: int
    V: int
    BC: int
    ROWS: int
    UNROLL: int
    STAGES: int
    splits: int
    warps: int = 4

    @property
    def S(self) -> int:
        """Images of a tile, a strip each."""
        return 32 * self.warps * self.V // self.BC

    def __str__(self) -> str:
        return (f"strips of {self.U} columns x {self.S} images x {self.BC} channels ({self.V} a thread), "
                f"{self.STAGES} x {self.ROWS} rows under way, {self.splits} runs")


def supports(problem: Problem, geo: Geometry) -> str | None:
    """16-bit operands in channels last, no dilation."""
    if not sixteen_bits(problem) or not problem.layout.endswith("C") or geo.groups % 8:
        return "16-bit operands with channels last and multiples of 8 channels only"
    fits = geo.stride[0] == max(geo.dilation) == 1
    return None if fits else "no dilation, and no stride on the first of three axes"


def rows_of(geo: Geometry, bias: bool) -> int:
    """Rows of dy of a tile: all that have products, and as many that what it leaves in registers meets zeros only."""
    pad, stride = geo.pad[1], geo.stride[1]
    reach = -(-geo.kernel[1] // stride)
    products = min(geo.y[1] + reach - 1, (geo.x[1] - 1 + pad) // stride + 1)
    return max(1, products, geo.y[1] + reach - 1 - max(pad, 0) // stride, geo.y[1] if bias else 1)


class Walk(NamedTuple):
    """How runs of stages lie: `stages` a tile, `all_stages` of all tiles, `run` of a run, `splits` runs."""

    stages: int
    all_stages: int
    run: int
    splits: int


def walk_of(geo: Geometry, strip: BoxStrip, bias: bool) -> Walk:
    """Runs of whole stages, as even as they get."""
    stages = -(-rows_of(geo, bias) // strip.ROWS)
    all_stages = -(-geo.y[2] // strip.U) * geo.y[0] * -(-geo.batch // strip.S) * stages
    run = -(-all_stages // min(all_stages, strip.splits))
    return Walk(stages, all_stages, run, -(-all_stages // run))


def box_of(tensor: Any, planes: int, rows: int, columns: int, strip: BoxStrip) -> BoxDescriptor:
    """The tensor as (planes, rows, columns, images, channels), S images and BC channels a box."""
    n, _, s0, s1, s2 = strides_of(tensor)
    batch, channels, *extents = tensor.shape
    extents = [1] * (3 - len(extents)) + extents
    steps = zip((s0, s1, s2, n), (*extents, batch))
    strides = [step if extent > 1 else channels for step, extent in steps]  # of one element it may be anything
    return BoxDescriptor(tensor, [*extents, batch, channels], [*strides, 1],
                         [1, 1, slot_columns(planes * rows * columns, strip.S), strip.S, strip.BC],
                         gl.NVMMASharedLayout(2 * strip.BC, 16, rank=5), box=(planes, rows, columns, strip.S, strip.BC))


def build(query: Query, strip: BoxStrip) -> Prepared:
    """The weight gradient, alone or with the bias gradient."""
    problem, geo = query.problem, query.geo
    bias = "bias" in problem.results
    walk = walk_of(geo, strip, bias)
    channel_tiles = -(-geo.groups // strip.BC)
    width = (strip.U - 1) * geo.stride[2] + geo.kernel[2]

    def leading(dy: Any, x: Any, partial: Any) -> tuple[Any, ...]:
        return (box_of(x, geo.kernel[0], strip.ROWS * geo.stride[1], width, strip),
                box_of(dy, 1, strip.ROWS, strip.U, strip), dy, x, partial)

    def launch(dy: Any, x: Any, partial: Any) -> Launch:
        yn, _, *y = strides_of(dy)
        xn, _, *xs = strides_of(x)
        constants = {name: value for name, value in geo.constants().items() if name[0] in "KTP" and name != "T0"} | {
            "C": geo.groups, "Q2": geo.y[2], "X2": geo.x[2], "BIAS": bias, "U": strip.U, "V": strip.V,
            "ROWS": strip.ROWS, "UNROLL": strip.UNROLL, "STAGES": strip.STAGES, "S": strip.S, "BC": strip.BC,
            "WARPS": strip.warps}
        scalars = (geo.batch, *geo.y[:2], *geo.x[:2], geo.y[0], *walk[:3], channel_tiles, yn, *y, xn, *xs)
        return Launch((channel_tiles * walk.splits,), scalars, constants, strip.warps, 1, leading)

    step = Step(slide_box_kernel, launch)
    sums = Sums(problem, geo, strides_of, walk.splits)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        partial = sums.partial(workspace, results[0])
        step(*operands, partial)
        sums.add(partial, results)

    return Prepared(f"slide_box_{query.short}_{strip.U}x{strip.V}_split{walk.splits}", str(strip), sums.bytes, run)


def slot_bytes(geo: Geometry, strip: BoxStrip) -> int:
    """Shared memory of a stage."""
    width = (strip.U - 1) * geo.stride[2] + geo.kernel[2]
    columns = slot_columns(geo.kernel[0] * strip.ROWS * geo.stride[1] * width, strip.S) + \
        slot_columns(strip.ROWS * strip.U, strip.S)
    return 2 * columns * strip.S * strip.BC


def registers(geo: Geometry, strip: BoxStrip) -> float:
    """Of a thread, about: sums, rows of dy that wait, a row of each."""
    reach = -(-geo.kernel[1] // geo.stride[1])
    width = (strip.U - 1) * geo.stride[2] + geo.kernel[2]
    return strip.V * (geo.taps + (reach - 1) * strip.U + 0.7 * (strip.U + width)) + 25


def resident(geo: Geometry, strip: BoxStrip, gpu: Gpu) -> int:
    """Programs of a multiprocessor at the same time."""
    return int(min(gpu.registers // (registers(geo, strip) * 32 * strip.warps),
                   gpu.program_bytes // (strip.STAGES * slot_bytes(geo, strip) + 1024), 64 // strip.warps))


def estimate(geo: Geometry, strip: BoxStrip, bias: bool, gpu: Gpu) -> float:
    """Seconds: instructions of all warps, or what comes from memory."""
    walk = walk_of(geo, strip, bias)
    reach = -(-geo.kernel[1] // geo.stride[1])
    width = (strip.U - 1) * geo.stride[2] + geo.kernel[2]
    columns = strip.ROWS * (strip.U + geo.kernel[0] * geo.stride[1] * width)
    moves = 0 if strip.ROWS * strip.UNROLL % reach == 0 else (reach - 1) * strip.U * strip.V
    cycles = strip.ROWS * (geo.taps * strip.U * strip.V + 20) + 1.4 * columns * max(strip.V, 1.5) + moves + 70
    tiles = -(-geo.groups // strip.BC)
    programs = tiles * walk.splits
    waves = -(-programs // (gpu.multiprocessors * resident(geo, strip, gpu)))
    before = 0 if walk.run % walk.stages == 0 else (reach - 2 + strip.ROWS) // strip.ROWS
    busy = waves * resident(geo, strip, gpu) * strip.warps / 4  # warps of a scheduler, one after the other
    issue = (walk.run + before) * cycles * max(busy, waves * LEAST_WARPS) / (CLOCK_SHARE * gpu.clock_hz)
    elements = geo.batch * geo.groups * (math.prod(geo.x) + math.prod(geo.y))
    return math.hypot(issue, 2 * elements / gpu.memory_bytes_per_s) + 2 * gpu.launch_s


def tiles(query: Query) -> Iterator[BoxStrip]:
    """Strips whose registers and stages fit, with runs that fill the card."""
    geo, gpu, bias = query.geo, query.gpu, "bias" in query.problem.results
    reach = -(-geo.kernel[1] // geo.stride[1])
    size = 4 * geo.groups * (geo.taps + bias)
    widths = {-(-geo.y[2] // -(-geo.y[2] // columns)) for columns in range(1, MOST_COLUMNS + 1)}
    for columns, rows, (v, channels) in product(sorted(widths), {1, 2, 3}, ((2, 64), (2, 32), (1, 32))):
        if (columns < 4 and columns < geo.y[2]) or (rows > 1 and rows > rows_of(geo, bias)) \
                or (channels > 32 and -(-geo.groups // channels) * channels > 1.2 * geo.groups):
            continue
        whole = reach // math.gcd(reach, rows)
        for unroll in {1, whole if whole * rows * geo.taps * columns * v <= LONGEST_BODY else 1}:
            strip = BoxStrip(columns, v, channels, rows, unroll, 2, 1)
            strip = replace(strip, STAGES=max(2, min(4, STAGE_BYTES // slot_bytes(geo, strip))))
            if geo.batch < strip.S or registers(geo, strip) > MOST_REGISTERS or resident(geo, strip, gpu) < 2:
                continue
            runs = resident(geo, strip, gpu) * gpu.multiprocessors // -(-geo.groups // channels)
            yield replace(strip, splits=max(1, min(runs, query.limit // size)))


KERNEL = Kernel("slide_box", frozenset({"weight", "weight+bias"}), supports, accepts, tiles, build, BoxStrip,
                lambda query, strip: estimate(query.geo, strip, "bias" in query.problem.results, query.gpu),
                depthwise=True)
