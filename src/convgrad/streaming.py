"""Calls under a ceiling of memory: a problem is cut into tiles that are computed one after the other.

A tile is some images, or for one image some positions of the first spatial axis. It counts the blocks of operands and
results that it touches, the whole weight, and its scratch memory. Operands such as `numpy.memmap` are so read block by
block. The batch is cut first: images share nothing but the weight, while neighbouring tiles of one image read their
halos twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .call import SAME_NAMES, Options, order_of, problem_of
from .frontends import Kind, kind_of
from .numbers import encode
from .plan import checked_request, plan
from .problem import DTYPES, Conv, Plan, Problem, Unsupported, checked_int
from .tile.boxes import Box, input_tile, output_tile

Slices = tuple[slice, ...]


class Job(NamedTuple):
    """One tile: its plan, what it reads, and where its result lies in an output or input gradient."""

    plan: Plan | None  # None: nothing to sum
    reads: dict[str, Slices]
    written: Slices = ()
    zeros: Slices | None = None  # a box with positions that nothing reaches, cleared first
    asked: str = ""  # number format of the result; that of a part may be wider

    @property
    def planned(self) -> Plan:
        assert self.plan is not None
        return self.plan

    def operands(self, views: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(views[name][self.reads[name]] for name in self.planned.problem.operands)


@dataclass(frozen=True)
class Stream:
    """One result of a call under a ceiling."""

    problem: Problem
    limit: int
    options: Options
    threads: int | None

    @property
    def wrt(self) -> str:
        return self.problem.wrt

    @property
    def adds(self) -> bool:
        return self.wrt in ("weight", "bias")

    @property
    def sums(self) -> str:
        """The number format in which parts of a weight or bias gradient are added."""
        return "float64" if "float64" in (self.problem.dtype, self.problem.out_dtype) else "float32"

    def jobs(self) -> list[Job]:
        """The tiles of the coarsest cut under the ceiling; an error where the finest is above it."""
        conv = self.problem.conv
        extent = (conv.in_size if self.wrt == "input" else conv.out_size)[0]
        cuts = [*((images, extent) for images in halves(conv.batch)), *((1, rows) for rows in halves(extent)[1:])]
        for images, rows in cuts:
            try:
                return list(self._tiles(max(1, images), max(1, rows)))
            except _TooLarge as error:
                reason = error
        plan(self.problem, backend=self.options.backend, num_threads=self.threads)  # raises where nobody can run it
        raise ValueError(f"max_memory_bytes={self.limit} is too little for '{self.problem}': a tile of one image and "
                         f"one position of the first axis {reason}")

    def _tiles(self, images: int, rows: int) -> Iterator[Job]:
        conv = self.problem.conv
        size = conv.in_size if self.wrt == "input" else conv.out_size
        whole = images >= conv.batch and rows >= size[0]
        for image in range(0, conv.batch, images):
            part = replace(conv, batch=min(images, conv.batch - image))
            at = slice(image, image + part.batch)
            for row in range(0, size[0], rows):
                box = Box((row, *(0,) * (conv.axes - 1)), (min(size[0], row + rows), *size[1:]))
                yield self._job(part, box, at, whole)

    def _job(self, conv: Conv, box: Box, images: slice, whole: bool) -> Job:
        origin = (0,) * conv.axes

        def place(some: Box) -> Slices:
            return images, *some.slices(origin)[1:]

        if self.wrt == "bias":
            flat = Conv(conv.batch, 1, conv.out_channels, box.size, (1,) * conv.axes)
            return Job(self._plan(flat, whole), {"grad_output": place(box)}, asked=self.problem.out_dtype)
        tile = (input_tile if self.wrt == "input" else output_tile)(conv, box)
        if tile is None:
            return Job(None, {}, zeros=place(box))
        reads = {"input": place(tile.input), "grad_output": place(tile.output), "weight": ()}
        written = tile.input if self.wrt == "input" else box
        return Job(self._plan(tile.conv, whole), reads, place(written), place(box) if written != box else None,
                   self.problem.out_dtype)

    def _plan(self, conv: Conv, whole: bool) -> Plan:
        """The plan of a tile with what its blocks leave for scratch memory."""
        problem = self.problem.with_(conv=conv)
        blocks = problem.min_bytes
        if self.adds and not whole:
            problem = problem.with_(out_dtype=self.sums)
            elements = math.prod(conv.shape_of(self.wrt))  # a part, their sum, and the result
            blocks += 2 * elements * DTYPES[self.sums][1]
        room = self.limit - blocks
        if room < 0:
            raise _TooLarge(f"has {blocks} bytes of operands and results")
        most = self.options.max_workspace_bytes
        try:
            return plan(problem, backend=self.options.backend, num_threads=self.threads,
                        max_workspace_bytes=room if most is None else min(room, most))
        except Unsupported as error:
            raise _TooLarge(f"has {blocks} bytes of operands and results and more scratch memory than is left: "
                            f"{error}") from None


class _TooLarge(Exception):
    """A tile above the ceiling."""


def halves(extent: int) -> list[int]:
    """extent, half of it rounded up, and so on to 1."""
    found = [extent]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


class Ceiling(NamedTuple):
    """max_memory_bytes, and what does not go with it."""

    max_memory_bytes: object
    workspace: Any = None
    accumulate: bool = False


def streamed(wrt: str, geometry: Conv, arrays: dict[str, Any], options: Options, outs: dict[str, Any],
             ceiling: Ceiling) -> list[Any]:
    """The results `wrt` of a call, tile by tile; everything is checked before anything is written."""
    kind = kind_of(arrays, SAME_NAMES)
    limit = checked_int(ceiling.max_memory_bytes, "max_memory_bytes", 1)
    checked_request(options.backend, options.max_workspace_bytes, options.num_threads)
    problem, formats = problem_of(kind, wrt, geometry, arrays, options)
    _check_goes_with(kind, problem, arrays, ceiling)
    threads = kind.threads() if options.num_threads is None else options.num_threads
    streams = [Stream(problem.with_(wrt=one), limit, options, threads) for one in problem.results]
    todo = [stream.jobs() for stream in streams]
    axes, like = geometry.axes, next(iter(arrays.values()))
    views = {name: kind.operand(array, name, order_of(name, axes, options), formats[name])
             for name, array in arrays.items()}
    results: dict[str, Any] = {}
    targets = []
    for one, (label, out) in zip(problem.results, outs.items()):
        shape = geometry.shape_of(one)
        order = None if one == "bias" else order_of("weight" if one == "weight" else "input", axes, options)
        own = shape if order is None else tuple(shape[order.index(axis)] for axis in range(len(shape)))
        if out is None:
            out = kind.empty(own, problem.out_dtype, like)
        else:
            kind.check_out(out, own, problem.out_dtype, label, {**arrays, **results})
        results[label] = out
        targets.append(kind.operand(out, label, order, problem.out_dtype))

    def run(job: Job, result: Any) -> None:
        # Plans that bring their own scratch memory keep it for the next call: many tiles would keep too much.
        workspace = np.empty(job.planned.workspace_bytes, np.uint8)
        kind.execute(job.planned.run, job.operands(views), (result,), workspace)

    for stream, jobs, target in zip(streams, todo, targets):
        (add_up if stream.adds else fill)(jobs, target, run)
    return [kind.returned(result, like) for result in results.values()]


def _check_goes_with(kind: Kind, problem: Problem, arrays: dict[str, Any], ceiling: Ceiling) -> None:
    given = [*["workspace"] * (ceiling.workspace is not None), *["scales"] * problem.scaled,
             *["accumulate=True"] * ceiling.accumulate]
    if given:
        raise ValueError(f"max_memory_bytes does not go with {', '.join(given)}")
    if kind.recorded(arrays):
        raise ValueError("the arrays are recorded (they require gradients, or a program is traced), which does not go "
                         "with max_memory_bytes: detach them first")
    if problem.device != "cpu":
        raise ValueError("max_memory_bytes is for arrays in the memory of the host, but these are on a GPU")


Run = Callable[[Job, Any], None]


def fill(jobs: list[Job], target: Any, run: Run) -> None:
    """An output or input gradient: every tile is a part of it."""
    for job in jobs:
        if job.zeros is not None:
            target[job.zeros] = 0
        if job.plan is not None:
            run(job, target[job.written])


def add_up(jobs: list[Job], target: Any, run: Run) -> None:
    """A weight or bias gradient: the sum over the tiles in their order, rounded once to the format of the result."""
    jobs = [job for job in jobs if job.plan is not None]
    if not jobs:
        target[...] = 0
        return
    first, *rest = jobs
    sums, asked = first.planned.problem.out_dtype, first.asked
    total = target if sums == asked else np.empty(target.shape, sums)
    run(first, total)
    part = np.empty(target.shape if rest else 0, sums)
    for job in rest:
        run(job, part)
        total += part
    if total is not target:
        for rounded, row in zip(target, total):  # row by row: encode has float64 temporaries
            rounded[...] = encode(row, asked)
