"""Random cases. Case number i of a seed is always the same, whoever asks for it and in whatever order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from ..guarded import PLAIN, View
from ..problem import DTYPES, SPATIAL_LETTERS, Conv, Problem, default_compute
from ..verify import REAL_DATA
from .case import Case

RESULTS = {"output": 3, "input": 4, "weight": 4, "bias": 1, "input+weight": 1, "input+bias": 1, "weight+bias": 2,
           "input+weight+bias": 4}
FORMATS = {"float32": 28, "bfloat16": 22, "float16": 16, "float64": 8, "float8_e4m3fn": 10, "float8_e5m2": 7,
           "hifloat8": 7}
MODES = ("tf32", "hf32", "hf32_even", "hf32_10", "hf32_10_even", "bf16", "f16")
AROUND_TILES = (3, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65)
ROUND = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Limits:
    """What one case may cost: multiply-adds, and elements of its largest array."""

    products: int
    elements: int


LIMITS = {"native": Limits(10**7, 200_000), "reference": Limits(10**6, 50_000), "triton": Limits(10**9, 4_000_000)}
PLANNED = Limits(2**62, 2**40)  # nothing is computed
INTERPRETED = Limits(20_000, 4_000)

Geometry = tuple[int, int, int, int, list[list[int]]]  # batch, groups, channels per group in and out, axes (see `axis`)


def axis(random: Random, size: int, kernel: int, stride: int, dilation: int, pads: int = 2) -> list[int]:
    """One axis: size, kernel, stride, dilation, low and high padding, which is enough for one output at least."""
    low, high = (random.randint(0, pads) if random.random() < 0.6 else 0 for _ in range(2))
    if random.random() < 0.4:
        high = low
    return [size, kernel, stride, dilation, low, max(high, dilation * (kernel - 1) + 1 - size - low)]


def few(random: Random) -> int:
    """Strides and dilations: mostly 1."""
    return random.choice((1, 1, 1, 1, 2, 2, 3, 4))


def some_axes(random: Random, longest: dict[int, int], kernel: int = 4) -> list[list[int]]:
    axes = random.choice((1, 1, 2, 2, 2, 2, 3, 3))
    return [axis(random, random.randint(1, longest[axes]), random.choice((1, 1, random.randint(1, kernel), 3)),
                 few(random), few(random), random.choice((1, 2, 4))) for _ in range(axes)]


def tiny(random: Random) -> Geometry:
    return (random.randint(1, 3), random.choice((1, 1, 2, 3, 4)), random.randint(1, 5), random.randint(1, 5),
            some_axes(random, {1: 24, 2: 9, 3: 6}))


def tiles(random: Random) -> Geometry:
    """Channels and extents around vector and tile widths."""
    return (random.choice((1, 2, 3, 5)), random.choice((1, 1, 1, 2)), random.choice(AROUND_TILES),
            random.choice(AROUND_TILES), some_axes(random, {1: 70, 2: 20, 3: 9}))


def depthwise(random: Random) -> Geometry:
    channels = random.choice((*AROUND_TILES, *ROUND))
    return (random.choice((1, 2, 3, 7, 16)), channels, 1, random.choice((1, 1, 1, 1, 2, 3)),
            some_axes(random, {1: 120, 2: 28, 3: 12}, 7))


def narrow_groups(random: Random) -> Geometry:
    return (random.choice((1, 2, 4, 7)), random.choice((2, 3, 5, 8, 16, 32)), random.choice((2, 3, 4, 8, 16, 17)),
            random.choice((1, 2, 3, 4, 8, 16)), some_axes(random, {1: 60, 2: 16, 3: 9}))


def long_axis(random: Random) -> Geometry:
    axes = some_axes(random, {1: 40, 2: 7, 3: 3})
    random.choice(axes)[0] = random.choice((255, 256, 257, 1000, 4097, 20_000))
    return random.choice((1, 2)), random.choice((1, 1, 2)), random.randint(1, 9), random.randint(1, 9), axes


def many_channels(random: Random) -> Geometry:
    into, out = random.choice((96, 128, 130, 192, 256, 257, 384, 512)), random.choice((*AROUND_TILES, *ROUND))
    if random.random() < 0.5:
        into, out = out, into
    return random.choice((1, 2, 4, 8)), 1, into, out, some_axes(random, {1: 20, 2: 9, 3: 5}, 3)


def whole_image(random: Random) -> Geometry:
    """A kernel about as large as the image: one output, or a few."""
    batch, groups, into, out, axes = tiny(random)
    for one in axes:
        one[:] = axis(random, one[0], max(1, one[0] + random.choice((-1, 0, 0, 0, 1))), one[2], 1, 1)
    return batch, groups, random.choice((into, 33, 64)), random.choice((out, 17, 40)), axes


def layers(random: Random) -> Geometry:
    """What networks have: round channel numbers, square kernels, equal pads."""
    axes = random.choice((1, 2, 2, 2, 3))
    kernel, stride, dilation = (random.choice(some) for some in ((1, 2, 3, 3, 3, 5, 7), (1, 1, 2), (1, 1, 1, 2)))
    sizes = [random.choice({1: (128, 500, 1024), 2: (7, 14, 28, 56), 3: (4, 7, 8, 14)}[axes]) for _ in range(axes)]
    pad = random.choice((0, dilation * (kernel // 2)))
    return (random.choice((1, 2, 8, 16)), random.choice((1, 1, 1, 4)), random.choice((3, *ROUND)), random.choice(ROUND),
            [[size, min(kernel, size), stride, dilation, pad, max(pad, dilation * (kernel - 1) + 1 - size - pad)]
             for size in sizes])


def empty(random: Random) -> Geometry:
    """Some extent is zero: batch, channels, an axis of the input, or one of the output."""
    batch, groups, into, out, axes = tiny(random)
    place = random.randrange(5)
    if place > 2:
        one = random.choice(axes)
        one[0] = 0 if place == 3 else one[0]
        if place == 4:
            one[1] = one[0] + one[4] + one[5] + 1
        elif random.random() < 0.3:
            one[4] = one[5] = 0
    return (0 if place == 0 else batch, groups, 0 if place == 1 else into, 0 if place == 2 else out, axes)


def far_apart(random: Random) -> Geometry:
    """Strides, dilations and pads much larger than the image; memory and time must not grow with them."""
    batch, groups, into, out, axes = tiny(random)
    one, far = random.choice(axes), random.choice((50, 1000, 10**5, 10**7))
    which = random.randrange(3)
    if which == 0:
        one[2] = far
    elif which == 1:
        one[:] = [one[0], 2, one[2], far, far, 0]
    else:
        one[2], one[4] = far, far * random.randint(1, 3)
    return batch, groups, into, out, axes


def enormous(random: Random) -> Geometry:
    """Too large to compute; planning must be quick all the same."""
    batch, groups, into, out, axes = random.choice((tiny, tiles, layers))(random)
    one = random.choice(axes)
    one[0] = random.choice((10**4, 160_000, 10**6, 10**8))
    if random.random() < 0.3:
        one[1] = random.choice((one[0], one[0] // 2, 1000))
        one[5] = max(one[5], one[3] * (one[1] - 1) + 1 - one[0] - one[4])
    return batch * random.choice((1, 8, 64)), groups, into, out, axes


SORTS: dict[str, dict[Callable[[Random], Geometry], int]] = {
    "native": {tiny: 30, tiles: 14, depthwise: 12, narrow_groups: 12, long_axis: 6, many_channels: 4, whole_image: 8,
               layers: 4, empty: 6, far_apart: 4},
    "reference": {tiny: 60, depthwise: 10, narrow_groups: 10, whole_image: 8, empty: 8, far_apart: 4},
    "triton": {tiny: 8, tiles: 20, depthwise: 18, narrow_groups: 14, long_axis: 5, many_channels: 10, whole_image: 4,
               layers: 16, empty: 3, far_apart: 2},
}


def pick(random: Random, weights: dict[str, int]) -> str:
    return random.choices(list(weights), list(weights.values()))[0]


class Generator:
    """Cases for one backend. `plan_only` also draws problems that are too large to compute."""

    def __init__(self, backend: str, seed: int, plan_only: bool = False, interpreted: bool = False) -> None:
        self.backend, self.seed = backend, seed
        sorts = SORTS.get(backend, SORTS["native"])
        self.sorts = {**sorts, enormous: 10, layers: 30} if plan_only else sorts
        self.limits = PLANNED if plan_only else INTERPRETED if interpreted else LIMITS.get(backend, LIMITS["native"])
        self.on_gpu = backend == "triton"

    def case(self, index: int) -> tuple[str, Case]:
        """A case and the sort of geometry it has."""
        random = Random(f"{self.seed}/{index}")
        sort = random.choices(list(self.sorts), list(self.sorts.values()))[0]
        conv = fitted(sort(random), self.limits)
        problem = self.problem(random, conv)
        call = self.call(random, problem)
        data: tuple[str, ...] = (random.choice(("whole", "whole", "dense", "special")),)
        if self.on_gpu:  # to compile costs a thousand times more than to run
            data += (random.choice(list(REAL_DATA)),) + ("special",) * (data[0] != "special")
        elif random.random() < 0.3:
            data = (random.choice(list(REAL_DATA)),)
        limit = None if random.random() < 0.85 else random.choice((0, 1, random.randrange(1, 2**random.randint(4, 24))))
        threads = () if self.on_gpu else random.choice(((), (), (1,), (2,), (1, 3), (2, 1, 5)))
        views, seed = self.views(random, problem, call), random.randrange(1000)
        repeats = random.choice((1, 2, 3)) if self.on_gpu else 1
        return sort.__name__, Case(problem, data, seed, views, call, limit, threads, repeats)

    def problem(self, random: Random, conv: Conv) -> Problem:
        dtype = pick(random, FORMATS)
        out_dtype = random.choice(("", "", "", dtype, "float32", random.choice(list(DTYPES))))
        modes = [*MODES] + ["fp8", "fp8"] * dtype.startswith("float8")
        compute = random.choice(modes) if default_compute(dtype) == "f32" and random.random() < 0.25 else ""
        spatial = SPATIAL_LETTERS[conv.axes]
        layout, weight_layout = "NC" + spatial, "OI" + spatial
        if random.random() < 0.5:
            layout = "N" + spatial + "C"
        if random.random() < 0.4:
            weight_layout = "O" + spatial + "I"
        if random.random() < (0.1 if self.on_gpu else 0.25):
            layout, weight_layout = ("".join(random.sample(word, len(word))) for word in (layout, weight_layout))
        return Problem(conv, pick(random, RESULTS), dtype, out_dtype, compute, layout, weight_layout,
                       "cuda" if self.on_gpu else "cpu", random.random() < 0.12)

    def call(self, random: Random, problem: Problem) -> tuple[str, ...]:
        conv, alone = problem.conv, len(problem.results) == 1
        ways = ["plan", "plan", "function"] if alone else ["plan"]
        ways += ["backward"] if "output" not in problem.results else []
        ways += ["transposed"] if alone and problem.wrt != "bias" and 0 not in (*conv.in_size, *conv.out_size) else []
        way = random.choice(ways)
        if way == "plan":
            return ("plan",)
        given = [word for word, share in (("out", 0.6), ("permuted", 0.4)) if random.random() < share]
        same_plan = "permuted" not in given and problem.wrt != "bias"  # how much workspace others need is not known
        return (way, *given, *["workspace"] * (same_plan and random.random() < 0.4))

    def views(self, random: Random, problem: Problem, call: Sequence[str]) -> tuple[View, ...]:
        if random.random() < (0.7 if self.on_gpu else 0.4):  # many of a GPU's kernels take dense tensors only
            return ()
        given = call[0] == "plan" or "out" in call  # results that nobody gives are plain
        rank = problem.conv.axes + 2
        return (*(self.view(random, rank, operand=True) for _ in problem.operands),
                *(self.view(random, 1 if wrt == "bias" else rank, operand=False) if given else PLAIN
                  for wrt in problem.results))

    def view(self, random: Random, rank: int, operand: bool) -> View:
        if random.random() < 0.5:
            return View(offset=random.random() < 0.3)

        def axes(share: float) -> tuple[int, ...]:
            if random.random() > share:
                return ()
            return tuple(sorted(random.sample(range(rank), random.choice((1, 1, 2, rank)) if rank > 1 else 1)))

        return View(random.random() < 0.3, axes(0.3), axes(0.25), () if self.on_gpu else axes(0.25),
                    axes(0.35) if operand else ())


def fitted(geometry: Geometry, limits: Limits) -> Conv:
    """The geometry as a Conv, its largest extents halved until it fits."""
    batch, groups, into, out, axes = geometry
    while True:
        sizes, kernel, stride, dilation, low, high = zip(*axes)
        conv = Conv(batch, groups * into, groups * out, sizes, kernel, stride, dilation, tuple(zip(low, high)), groups)
        products = math.prod(conv.output_shape) * into * conv.taps
        largest = max(math.prod(shape) for shape in (conv.input_shape, conv.weight_shape, conv.output_shape))
        if products <= limits.products and largest <= limits.elements:
            return conv
        longest = max(axes, key=lambda one: one[0] + one[4] + one[5])
        space = sum(longest[place] for place in (0, 4, 5))
        if space >= max(batch, groups, into, out):
            longest[0], longest[4], longest[5] = -(-longest[0] // 2), longest[4] // 2, longest[5] // 2
            longest[1] = max(1, min(longest[1], longest[0]))
            longest[3] = max(1, min(longest[3], space // max(1, longest[1] - 1)))
        elif batch >= max(groups, into, out):
            batch //= 2
        elif groups >= max(into, out):
            groups //= 2
        else:
            into, out = (into // 2, out) if into >= out else (into, out // 2)
