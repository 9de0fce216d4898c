"""Which strip for the sliding depthwise kernels: a cost model that counts instructions, registers and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .geometry import Geometry, turned
from .gpu import Gpu
from .launch import power_of_two
from .tiles import workspace_limit

MOST_REGISTERS = 236  # of a thread, by the model's count; the compiler needs some more
MOST_REGISTERS_DEEP = 200  # the same for DEEP strips, which hold the loads of several planes
LATENCY = 0.9e-6  # seconds from a load to its value when the memory is busy
MOST_STRIP = 16  # columns
SHARED = 0  # what plans put through shared memory unless tuning says otherwise: see Strip.SHARED
LONGEST_BODY = 1600  # products in the body of a loop: longer ones take long to compile


@dataclass(frozen=True)
class Strip:
    """U columns x V channels a thread, BC channels a tile; segments of rows, UNROLL rows a turn, runs of tiles."""

    U: int
    V: int
    BC: int
    segments: int = 1
    UNROLL: int = 1
    AHEAD: int = 1  # rows whose loads are under way
    HELD: bool = True  # input gradient: taps stay in registers
    splits: int = 1  # weight gradient: runs of tiles
    warps: int = 4
    LINES: int = 0  # weight gradient: lines of taps a program sums; 0: all
    SHARED: int = 0  # what goes through shared memory: 1 taps and sums, 2 also rows of dy that wait (weight gradient)
    DEEP: bool = False  # weight gradient: all planes of taps at once
    turn: bool = False  # the last axis is the one along which strips slide

    @property
    def S(self) -> int:
        return 32 * self.warps * self.V // self.BC

    def __str__(self) -> str:
        return (f"{self.S} strips of {self.U} columns x {self.BC} channels ({self.V} a thread), "
                f"{self.segments} segments of rows, {self.UNROLL} rows a turn, {self.splits} runs")


@dataclass(frozen=True)
class Work:
    """What one thread does for a strip, in instructions and registers, and how many strips there are."""

    registers: int
    per_step: float  # instructions of a step
    before: float  # instructions before the first step
    steps: int
    strips: int  # of one segment, all images and planes
    loaded: float  # bytes, all strips together
    moved: float  # bytes that must come from or go to memory
    under_way: float  # bytes a thread has asked for while it works on a step


def window(columns: int, stride: int, dilation: int, kernel: int) -> int:
    """Columns of dy that reach `columns` neighbours of dx."""
    reached = {(c - k * dilation) // stride for c in range(columns) for k in range(kernel)
               if (c - k * dilation) % stride == 0}
    return max(reached) - min(reached) + 1 if reached else 1


def work(kind: str, geo: Geometry, strip: Strip) -> Work:
    """Count the work of a strip; kind is "input", "weight" or "both"; geo has the sliding axis in the middle."""
    (k0, k1, k2), (_, t1, t2), (_, d1, d2) = geo.kernel, geo.stride, geo.dilation
    u, v = strip.U, strip.V
    packed = -(-v // 2)
    convert = 1.7 * v if v > 1 else 4.5  # instructions that make float32 of what a load brings
    reach = -(-k1 // t1)
    ring = max(k1, t1)
    if kind == "input":
        width = window(u, t2, d2, k2)
        held = k0 * k1 * k2 * v if strip.HELD else (k2 + 4) * v
        registers = ring * u * v + held + width * v + k0 * width * packed + 30
        loads = k0 * width + (0 if strip.HELD else k0 * k1 * k2)
        steps = -(-geo.x[1] // (d1 * t1)) + (reach - 1 if strip.segments > 1 else 0)
        # a step of the slide multiplies every tap with the columns it reaches: U/T2 of them
        products = k0 * k1 * k2 * u * v / t2
        moved = (ring - t1) * u * v / strip.UNROLL if ring > strip.UNROLL else 0
        per_step = products + loads * 2.0 + k0 * width * convert + t1 * u * (1.5 + v / 2) + moved + 12
        before = 500 + (4 if strip.SHARED else 30 * v) * k0 * k1 * k2  # taps read one by one are a sector each
        strips = geo.batch * geo.x[0] * d1 * -(-geo.x[2] // u)
        loaded = k0 * width * v
    elif kind == "weight":
        lines = strip.LINES or k1
        reach = -(-lines // t1)
        width = (u - 1) * t2 + (k2 - 1) * d2 + 1
        ring = 0 if strip.SHARED == 2 else (reach - 1) * u * v
        deep = k0 if strip.DEEP else 1
        registers = ring + deep * lines * k2 * v + (u + width) * v + (u + deep * t1 * width) * packed + 40
        steps = -(-geo.y[1] // d1) + (reach - 1 if d1 > 1 else 0)
        loads = u + deep * t1 * width
        moved = (reach - 1) * u * v if reach > strip.UNROLL else 0
        if strip.SHARED == 2:  # loads from shared memory, and barriers around the stores
            moved = (reach - 1) * u + 12 * u
        per_step = deep * lines * k2 * u * v + loads * 2.0 + loads * convert + moved + 16
        before = 80 + (reach - 1) * u * (3 + v)
        strips = geo.batch * geo.y[0] * (k0 // deep) * -(-k1 // lines) * d1 * -(-geo.y[2] // u)
        loaded = loads * v
    else:
        width = window(u, t2, d2, k2)
        registers = reach * width * v + 2 * k1 * k2 * v + 2 * u * v + (width + t1 * u) * packed + 30
        steps = -(-geo.x[1] // (d1 * t1))
        loads = width + t1 * u
        moved = (reach - 1) * width * v if reach > strip.UNROLL else 0
        per_step = 2 * k1 * k2 * u * v / t2 + loads * (2.0 + convert) + t1 * u * (1.5 + v / 2) + moved + 20
        before = 80 + (reach - 1) * width * (3 + v)
        strips = geo.batch * geo.x[0] * d1 * -(-geo.x[2] // u)
        loaded = loads * v
    inputs, outputs = geo.batch * geo.groups * math.prod(geo.x), geo.batch * geo.groups * math.prod(geo.y)
    # planes that are read again for every tap of axis 0, mostly from the cache
    again = (0.1 if strip.DEEP or kind == "input" else 0.25) * (k0 - 1)
    least = 2.0 * (inputs + outputs * (1 + again)) if kind == "input" else \
        2.0 * (1 + again) * (inputs + outputs) if kind == "weight" else 2.0 * (2 * inputs + outputs)
    return Work(registers + (strip.AHEAD - 1) * loads * packed, per_step, before, steps, strips,
                2.0 * loaded * geo.groups / v * strips * steps, least,
                2.0 * loaded * (strip.AHEAD - 0.5 + strip.UNROLL / 2))


def shared_bytes(kind: str, geo: Geometry, strip: Strip) -> int:
    """Shared memory of a program: taps, rows that wait, sums on their way out."""
    lines = strip.LINES or geo.kernel[1]
    table = 4 * 32 * strip.warps * strip.V * power_of_two(max(16, lines * geo.kernel[2]))
    rows = 4 * 32 * strip.warps * strip.V * strip.U * -(-lines // geo.stride[1]) if strip.SHARED == 2 else 0
    if strip.SHARED == 0:
        return 0
    return 4 * strip.BC * power_of_two(max(16, geo.taps)) if kind == "input" else max(table, rows)


def resident(kind: str, geo: Geometry, strip: Strip, registers: int, gpu: Gpu) -> int:
    """Programs of a multiprocessor at the same time."""
    return max(1, min(gpu.registers // (min(255, registers + 12) * 32 * strip.warps),
                      gpu.program_bytes // (shared_bytes(kind, geo, strip) + 1024), 32))


def estimate(kind: str, geo: Geometry, strip: Strip, gpu: Gpu) -> float:
    """Seconds, roughly: the longer of issuing all instructions and moving all bytes, in waves of programs."""
    done = work(kind, geo, strip)
    channel_tiles = -(-geo.groups // strip.BC)
    steps = -(-done.steps // strip.segments)
    steps = -(-steps // strip.UNROLL) * strip.UNROLL
    reach = -(-geo.kernel[1] // geo.stride[1]) - 1
    extra = reach if kind == "input" and strip.segments > 1 else 0
    tiles = -(-done.strips * strip.segments // strip.S) * channel_tiles
    at_once = gpu.multiprocessors * resident(kind, geo, strip, done.registers, gpu)
    groups = 1 if strip.DEEP else geo.kernel[0] * (-(-geo.kernel[1] // (strip.LINES or geo.kernel[1])))
    programs = tiles if kind == "input" else min(tiles, strip.splits * channel_tiles * groups)
    tiles_each = -(-tiles // programs)
    waves = -(-programs // at_once)
    after = 0 if kind == "input" else 2000 if strip.SHARED else geo.taps * 200  # adding up the strips
    cycles = tiles_each * ((steps + extra) * done.per_step + done.before) + after
    warps = min(programs, at_once) / gpu.multiprocessors * strip.warps / 4  # of a scheduler
    waiting = LATENCY * gpu.clock_hz * (2 * tiles_each + 1)  # for the first rows of every tile
    issue = 1.15 * waves * max(cycles * max(1.0, warps), cycles + waiting) / gpu.clock_hz
    in_flight = min(programs, at_once) * strip.warps * 32 * done.under_way
    wait = done.loaded * (1 + extra / max(1, steps)) * LATENCY / in_flight
    memory = done.moved * (1 + 0.3 * extra / max(1, steps)) / gpu.memory_bytes_per_s
    segment = 2 * min(strip.BC, geo.groups)  # bytes that lanes next to each other access
    memory *= 1.0 if segment >= 128 or (segment >= 64 and geo.groups % 32 == 0) else 1.25
    return math.hypot(issue, memory, wait) + gpu.launch_s * (1 if kind == "input" else 2)


def slides_along_last(geo: Geometry) -> bool:
    """Whether taps lie on the last axis only: then strips slide along it."""
    return geo.kernel[1] == 1 and geo.kernel[2] > 1


def planes_apart(geo: Geometry) -> bool:
    """Whether axis 0 links each plane of x with the same plane of dy only: one tap, no stride, no padding."""
    return geo.kernel[0] == geo.stride[0] == 1 and geo.pad[0] == 0 and geo.x[0] == geo.y[0]


def channel_tiles(channels: int) -> Iterator[int]:
    """Widths of a tile that waste less than an eighth of the channels."""
    for width in (128, 64, 32, 16):
        if -(-channels // width) * width <= 1.2 * channels or width == 16:
            yield width


def even_widths(extent: int, multiple: int) -> list[int]:
    """Widths, multiples of a number and no wider than a strip gets, that cut an extent into parts of about one size."""
    units = -(-extent // multiple)
    return [count * multiple for count in range(1, 2 * MOST_STRIP // multiple + 1)
            if -(-units // -(-units // count)) == count]


def worth_trying(kind: str, geo: Geometry, shared: int, gpu: Gpu) -> Iterator[Strip]:
    """Strips whose registers fit; `shared` is the most that may go through shared memory."""
    turn = slides_along_last(geo)
    if turn:
        geo = turned(geo)
    if geo.stride[0] > 1 or (geo.stride[1] > 1 and geo.dilation[1] > 1) or (kind == "both" and not planes_apart(geo)):
        return
    if geo.kernel[2] > MOST_REGISTERS:  # a line of taps, or its sums, is in registers
        return
    extent = geo.y[2] if kind == "weight" else geo.x[2]
    multiple = 1 if kind == "weight" else geo.stride[2]
    widths = even_widths(extent, multiple)
    rows = geo.y[1] if kind == "weight" else geo.x[1]
    reach = -(-geo.kernel[1] // geo.stride[1])
    taps = math.prod(geo.kernel[1:] if kind == "weight" else geo.kernel)
    for u in widths:
        if u > 1 and u * 8 < min(extent, MOST_STRIP):
            continue
        for v in (1, 2, 4):
            if geo.groups % v:
                continue
            for bc in channel_tiles(geo.groups):
                if bc // v > 32:
                    continue
                for unroll in sorted({1, 2, 3, 4, 8, 16, reach if reach <= 5 else 1}):
                    if unroll > 1 and (u > 1 and unroll not in (reach, 2)):
                        continue
                    if unroll > 1 and (unroll > rows // 2 or unroll * taps * u * v > LONGEST_BODY):
                        continue
                    strip = Strip(u, v, bc, 1, unroll, SHARED=min(shared, 1), turn=turn)
                    deep = replace(strip, DEEP=True)
                    if kind == "weight" and geo.kernel[0] > 1 and unroll == 1 and (
                            work(kind, geo, deep).registers <= MOST_REGISTERS_DEEP):
                        yield deep
                    if work(kind, geo, strip).registers <= MOST_REGISTERS:
                        yield strip
                        further = replace(strip, AHEAD=2)
                        if work(kind, geo, further).registers <= 170:
                            yield further
                    waiting = replace(strip, SHARED=2)
                    if shared == 2 and kind == "weight" and unroll == 1 and reach > 3 and u > 1 and (
                            work(kind, geo, waiting).registers <= MOST_REGISTERS
                            and shared_bytes(kind, geo, waiting) <= gpu.program_bytes // 2):
                        yield waiting
                    if work(kind, geo, strip).registers <= MOST_REGISTERS:
                        continue
                    if kind == "input" and geo.kernel[0] > 1:
                        strip = replace(strip, HELD=False)
                        if work(kind, geo, strip).registers <= MOST_REGISTERS:
                            yield strip
                    elif kind == "weight" and unroll == 1:
                        for lines in range(min(geo.kernel[1], MOST_REGISTERS // (geo.kernel[2] * v)), 0, -1):
                            groups = max(2, -(-geo.kernel[1] // lines))
                            strip = replace(strip, LINES=-(-geo.kernel[1] // groups))
                            if work(kind, geo, strip).registers <= MOST_REGISTERS:
                                yield strip
                                break


def in_runs(kind: str, geo: Geometry, strip: Strip, limit: int, size: int, gpu: Gpu) -> Iterator[Strip]:
    """The strip with the segments and runs that fill the card; `size`: bytes of a run's sums."""
    oriented = turned(geo) if strip.turn else geo
    done = work(kind, oriented, strip)
    channels = -(-geo.groups // strip.BC)
    at_once = gpu.multiprocessors * resident(kind, oriented, strip, done.registers, gpu)
    tiles = -(-done.strips // strip.S) * channels
    enough = False  # tiles, for runs of even length too: more segments would only overlap more
    for segments in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128):
        if enough or (segments > 1 and done.steps // segments < max(2 * strip.UNROLL, 6)):
            break
        enough = tiles * segments > (4 if kind == "input" else 32) * at_once
        if kind == "input":
            yield replace(strip, segments=segments)
            continue
        for waves in (1, 2, 3):
            lines = strip.LINES or oriented.kernel[1]
            groups = 1 if strip.DEEP else geo.kernel[0] * -(-oriented.kernel[1] // lines)
            runs = max(1, min(waves * at_once // (channels * groups), limit // size))
            yield replace(strip, segments=segments, splits=runs)


def all_strips(kind: str, geo: Geometry, max_workspace: int | None, bias: bool, gpu: Gpu,
               shared: int = SHARED) -> Iterator[Strip]:
    """All strips worth trying."""
    limit, size = workspace_limit(geo, max_workspace), 4 * geo.groups * (geo.taps + bias)
    for strip in worth_trying(kind, geo, shared, gpu):
        if not bias or bias_rides(kind, geo, strip):
            yield from in_runs(kind, geo, strip, limit, size, gpu)


def seconds_of(kind: str, geo: Geometry, strip: Strip, gpu: Gpu) -> float:
    """Expected of a strip, whichever axis it slides along."""
    return estimate(kind, turned(geo) if strip.turn else geo, strip, gpu)


def bias_rides(kind: str, geo: Geometry, strip: Strip) -> bool:
    """Whether the rows and columns of dy that a strip loads as its own are all of dy, so that they give the bias."""
    if strip.turn:
        geo = turned(geo)
    (_, pad1, pad2), (_, t1, t2), (_, d1, d2), (_, k1, k2) = geo.pad, geo.stride, geo.dilation, geo.kernel
    lines = strip.LINES or k1
    first = pad1 // t1 if d1 == 1 else 0 if kind == "weight" else pad1
    if first > (-(-lines // t1) - 1) * d1:
        return False
    if kind == "weight":
        return True
    columns = [(c + pad2 - k * d2) // t2 for c in range(strip.U) for k in range(k2) if (c + pad2 - k * d2) % t2 == 0]
    return bool(columns) and min(columns) <= 0 and strip.U // t2 <= max(columns) + 1
