"""Plans that copy tensors to channels last first: channels-first ones, or operands that lie in different orders.

The copies need memory, so a problem is computed in pieces that fit the workspace: some images, or where not even one
fits, some rows of one. A piece is a problem of its own with channels last, for which the usual ways are asked. Results
that lie otherwise are copied back, in the launch that copies the next piece's operand; weight gradients of pieces are
added in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ...problem import DTYPES, SPATIAL_LETTERS, Conv, Problem
from .box_plans import weight_rows_fit
from .copies import copy_kernel
from .geometry import Geometry, channels_last, geometry
from .launch import Launch, Step, aligned_strides, power_of_two
from .line_plans import LAUNCH_SECONDS
from .numbers_on_device import scratch
from .part_plans import MOST_CHUNKS, flops_of, outer_axis
from .tiles import workspace_limit
from .tuning import left_out
from .ways import Operands, Way, add_step, by_box_lines

AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COPY_BYTES = 3.2e12  # read and written, a second
COPY_SECONDS = 10e-6  # of a launch that copies, beside its bytes: the kernels before and behind it wait for each other
POINTER_FLOPS = 40e12  # of gather.py and weight.py on 16-bit tensors with channels first, a second
PREFERRED_BYTES = 2**26  # of copies in a piece: smaller pieces, which the cache could hold, were slower on an H200,
PHASED_BYTES = 2**25  # but not those of input gradients at a stride, whose phases come to memory one after the other
MOST_SIZES = 12  # of pieces that are tried
MOST_SLABS = 8  # weight gradients of pieces that are kept before they are added
ALIGNMENT = 256
Inner = Callable[[Problem, int], list[Way]]  # the ways to a piece within so many bytes, the best first


@dataclass(frozen=True)
class Piece:
    """Images from `image` on, and from `x_row` and `y_row` on the rows of one axis, as a convolution of their own."""

    conv: Conv
    image: int
    axis: int
    x_row: int
    y_row: int

    def x_of(self, tensor: Any) -> Any:
        return self.view(tensor, self.x_row, self.conv.in_size[self.axis])

    def y_of(self, tensor: Any) -> Any:
        return self.view(tensor, self.y_row, self.conv.out_size[self.axis])

    def view(self, tensor: Any, row: int, rows: int) -> Any:
        return tensor[self.image:self.image + self.conv.batch].narrow(2 + self.axis, row, rows)


def rows_of(conv: Conv, is_input: bool, axis: int, begin: int, end: int) -> tuple[int, int, int, int, int] | None:
    """First rows of x and y, rows of x and the padding of both sides, of some rows of the input gradient (or y)."""
    extent, outputs, stride, span = conv.in_size[axis], conv.out_size[axis], conv.stride[axis], conv.span[axis]
    low = conv.padding[axis][0]
    if is_input:
        x_first, x_last = begin, end - 1
        reach = -(-(begin + low - span + 1) // stride)
        y_first = min(max(0, min(reach, (begin + low) // stride)), outputs - 1)
        y_last = max(y_first, min(outputs - 1, (end - 1 + low) // stride))
    else:
        y_first, y_last = begin, end - 1
        x_first, x_last = max(0, begin * stride - low), min(extent, (end - 1) * stride - low + span) - 1
        if x_last < x_first:
            return None  # nothing but padding
    return (x_first, y_first, x_last - x_first + 1, low + x_first - y_first * stride,
            max(0, y_last * stride - low + span - 1 - x_last))


def pieces_of(conv: Conv, is_input: bool, axis: int, images: int, rows: int) -> list[Piece]:
    """The pieces of a problem, image after image; none where one would be nothing but padding."""
    extent = (conv.in_size if is_input else conv.out_size)[axis]
    begins = range(0, extent, rows)
    places = [rows_of(conv, is_input, axis, begin, min(extent, begin + rows)) for begin in begins]
    if len(places) == 1:
        places = [(0, 0, conv.in_size[axis], *conv.padding[axis])]
    alike = lru_cache(maxsize=None)(lambda batch, *row: with_rows(replace(conv, batch=batch), axis, *row))
    found = []
    for image in range(0, conv.batch, images):
        for place in places:
            if place is None:
                return []
            x_first, y_first, *row = place
            found.append(Piece(alike(min(images, conv.batch - image), *row), image, axis, x_first, y_first))
    return found


def with_rows(conv: Conv, axis: int, extent: int, low: int, high: int) -> Conv:
    """The convolution with another extent and padding of one axis."""
    sizes, pads = list(conv.in_size), list(conv.padding)
    sizes[axis], pads[axis] = extent, (low, high)
    return replace(conv, in_size=tuple(sizes), padding=tuple(pads))


def element_bytes(problem: Problem, direct: bool) -> tuple[int, int, int]:
    """Bytes of an element of x, y and the weight that are copied; 0 for those that are not."""
    size, out = DTYPES[problem.dtype][1], 0 if direct else DTYPES[problem.out_dtype][1]
    return {"input": (out, size, size), "output": (size, out, size), "weight": (size, size, 0)}[problem.wrt]


def cut_axis(conv: Conv, extents: tuple[int, int, int]) -> int:
    """The axis that is cut into rows: not the last, whose neighbours are neighbours in memory, if another is long."""
    found = outer_axis((*extents[:2], 1)) if max(extents[:2]) >= 8 else outer_axis(extents)
    return max(found, 3 - conv.axes)  # where all extents are 1, the first axis that there is


def up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Copied:
    """A problem in pieces: `take` says whether the tensors can be copied."""

    problem: Problem
    pieces: list[Piece]
    ways: dict[Conv, list[Way]]
    copied: tuple[int, int, int]  # bytes for the copies of x, y and the weight
    slabs: int  # weight gradients of pieces
    direct: bool  # results go to their place at once
    as_they_lie: bool = False  # the ways take the operands of a weight gradient so

    @property
    def is_input(self) -> bool:
        return self.problem.wrt == "input"

    @property
    def slab_bytes(self) -> int:
        return 4 * math.prod(self.problem.conv.weight_shape)

    @property
    def offsets(self) -> list[int]:
        """Where the copies of x, y and weight, the slabs and the memory of the pieces' own ways begin, and the end."""
        inner = max(way.workspace_bytes for ways in self.ways.values() for way in ways)
        found = [0]
        for size in (*self.copied, self.slabs * self.slab_bytes, inner + ALIGNMENT):
            found.append(found[-1] + up(size))
        return found

    @property
    def workspace_bytes(self) -> int:
        return self.offsets[-1] + 64

    @property
    def seconds(self) -> float:
        """Estimated: the pieces' own times, and every copy written and read once more."""
        own = sum(self.ways[piece.conv][0].seconds for piece in self.pieces)
        inputs, outputs, weights = element_bytes(self.problem, self.direct) if any(self.copied) else (0, 0, 0)
        moved = sum(inputs * math.prod(piece.conv.input_shape) + outputs * math.prod(piece.conv.output_shape)
                    for piece in self.pieces) + weights * math.prod(self.problem.conv.weight_shape)
        adding = 2 * self.slab_bytes * len(self.pieces) if self.slabs else 0
        launches = len(self.pieces) + (not self.direct if self.problem.wrt != "weight" else
                                       -(-len(self.pieces) // MOST_SLABS))
        return own + (2 * moved + adding) / COPY_BYTES + launches * COPY_SECONDS

    @property
    def note(self) -> str:
        first = self.pieces[0].conv
        rows = (first.in_size if self.is_input else first.out_size)[self.pieces[0].axis]
        way = self.ways[first][0]
        at_once = " (results at once to their place)" if self.direct else ""
        return (f"{len(self.pieces)} pieces of {first.batch} images x {rows} rows copied to channels last{at_once}, "
                f"then {way.name}: {way.note}; {self.seconds * 1e6:.0f} us expected with the copies")

    def take(self, operands: Operands, result: Any) -> bool:
        piece = self.pieces[0]
        if self.problem.wrt == "weight":
            return copies(piece.y_of(operands[0])) and copies(piece.x_of(operands[1]))
        source, target = (piece.y_of, piece.x_of) if self.is_input else (piece.x_of, piece.y_of)
        return copies(source(operands[0])) and copies(operands[1]) and (self.direct or copies(target(result)))

    def memory(self, workspace: Any, like: Any) -> Any:
        return scratch(self.problem, workspace, (self.offsets[-1] // 4,), like).view(torch.uint8)

    def run(self, operands: Operands, result: Any, workspace: Any) -> None:
        memory = self.memory(workspace, result)
        inner = memory[self.offsets[4]:]
        if self.problem.wrt == "weight":
            self.sum_pieces(operands[0], operands[1], result, memory, inner)
        else:
            self.write_pieces(operands[0], operands[1], result, memory, inner)

    def write_pieces(self, source: Any, weight: Any, result: Any, memory: Any, inner: Any) -> None:
        """The output or the input gradient, piece by piece."""
        x_at, y_at, weight_at = self.offsets[:3]
        from_at, to_at = (y_at, x_at) if self.is_input else (x_at, y_at)
        waiting: list[tuple[Any, Any]] = []  # what the next launch of the copying kernel copies
        if not weight_rows_fit(weight):
            copy = like(weight, memory[weight_at:])
            waiting.append((weight, copy))
            weight = copy
        for piece in self.pieces:
            part, target = (piece.y_of(source), piece.x_of(result)) if self.is_input else \
                (piece.x_of(source), piece.y_of(result))
            if not channels_last(part):
                waiting.append((part, like(part, memory[from_at:])))
                part = waiting[-1][1]
            copy_all(waiting)
            written = target if self.direct or channels_last(target) else like(target, memory[to_at:])
            run_first(self.ways[piece.conv], (part, weight), written, inner)
            waiting = [(written, target)] if written is not target else []
        copy_all(waiting)

    def sum_pieces(self, dy: Any, x: Any, result: Any, memory: Any, inner: Any) -> None:
        """The weight gradient: the sums of pieces are added in order, some at a time."""
        x_at, y_at, _, slabs_at = self.offsets[:4]
        conv = self.problem.conv
        shape = (conv.out_channels, *conv.kernel_size, conv.group_in)
        slabs = memory[slabs_at:slabs_at + self.slabs * self.slab_bytes].view(torch.float32).view(self.slabs, *shape)
        order = (0, conv.axes + 1, *range(1, conv.axes + 1))
        filled = 0
        for number, piece in enumerate(self.pieces):
            parts, waiting = [piece.y_of(dy), piece.x_of(x)], []
            for place, at in enumerate((y_at, x_at)):
                if not (self.as_they_lie or channels_last(parts[place])):
                    waiting.append((parts[place], like(parts[place], memory[at:])))
                    parts[place] = waiting[-1][1]
            copy_all(waiting)
            target = slabs[filled].permute(order) if self.slabs else result
            run_first(self.ways[piece.conv], (parts[0], parts[1]), target, inner)
            filled += 1
            last = number == len(self.pieces) - 1
            if self.slabs and (last or filled == self.slabs):
                adding(conv, filled)(slabs, result if last else slabs[0].permute(order))
                filled = 1


def slabs_for(pieces: list[Piece], dw_bytes: int, limit: int) -> int:
    """How many weight gradients of pieces are kept before they are added: an eighth of the memory, two at least."""
    return max(2, min(len(pieces), MOST_SLABS, limit // (8 * dw_bytes)))


@lru_cache(maxsize=64)
def adding(conv: Conv, count: int) -> Step:
    return add_step(geometry(conv), count)


def run_first(ways: list[Way], operands: Operands, result: Any, workspace: Any) -> None:
    way = next(way for way in ways if way.takes(operands, result))
    way.run(operands, result, workspace)


def like(tensor: Any, memory: Any) -> Any:
    """A tensor of the same shape in given memory, channels last."""
    outer, channels, *spatial = tensor.shape
    flat = memory[:tensor.numel() * tensor.element_size()].view(tensor.dtype)
    return flat.view(outer, *spatial, channels).permute(0, -1, *range(1, tensor.dim() - 1))


def runs_of(tensor: Any) -> list[tuple[int, int]]:
    """The spatial axes as few as they are in memory: (extent, stride), the last one fastest."""
    found: list[tuple[int, int]] = []
    for extent, step in zip(tensor.shape[2:], tensor.stride()[2:]):
        if extent == 1:
            continue
        if found and found[-1][1] == extent * step:
            found[-1] = (found[-1][0] * extent, step)
        else:
            found.append((extent, step))
    return found or [(1, 1)]


def copies(tensor: Any) -> bool:
    """Whether the copying kernel can read or write a tensor: runs of positions, neighbours or with their channels."""
    runs = runs_of(tensor)
    return len(runs) <= 2 and (runs[-1][1] == 1 or tensor.shape[1] == 1 or tensor.stride(1) == 1)


def copy_all(pairs: list[tuple[Any, Any]]) -> None:
    """Copy one or two tensors (from, to) in one launch."""
    if pairs:
        copy(*(tensor.view(AS_INTEGERS[tensor.element_size()]) for pair in pairs for tensor in pair))


def copy_arguments(source: Any, target: Any) -> tuple[int, tuple[int, ...], tuple[Any, ...]]:
    """Programs, scalars and constants of one copy; see copies.copy_tile."""
    channels = source.shape[1]
    cut = max(runs_of(source), runs_of(target), key=len)
    outer, run = (cut[0][0], cut[1][0]) if len(cut) == 2 else (1, cut[0][0])
    steps: list[int] = []
    first, align = [], []
    for tensor in (source, target):
        runs = runs_of(tensor)
        step = runs[-1][1]
        channel_step = tensor.stride(1)
        first.append(channels > 1 and channel_step != 1)
        far = channel_step if first[-1] else step
        aligned, found = aligned_strides((tensor.stride(0) if tensor.shape[0] > 1 else 0,
                                          (runs[0][1] if len(runs) == 2 else run * step) if outer > 1 else 0, far))
        steps += found
        align.append(aligned)
    channel_align, (some_channels,) = aligned_strides((channels,))
    run_align, (some_run,) = aligned_strides((run,))
    side = max(64, 128 // source.element_size())
    bc, bp = min(side, power_of_two(channels)), min(side, power_of_two(run))
    if bc < side:
        bp = min(side * side // bc, power_of_two(run))
    elif bp < side:
        bc = min(side * side // bp, power_of_two(channels))
    programs = source.shape[0] * outer * -(-run // bp) * -(-channels // bc)
    return (programs, (programs, some_channels, outer, some_run, *steps),
            (*first, *align, channel_align, run_align, bc, bp))


CONSTANTS = ("FROM_FIRST", "TO_FIRST", "FROM_ALIGN", "TO_ALIGN", "CHANNEL_ALIGN", "RUN_ALIGN", "BC", "BP")


def copy_launch(*tensors: Any) -> Launch:
    pairs = [tensors[:2], tensors[-2:]]
    a_programs, a_scalars, a_constants = copy_arguments(*pairs[0])
    b_programs, b_scalars, b_constants = copy_arguments(*pairs[1])
    constants = {f"{letter}_{name}": value for letter, values in (("A", a_constants), ("B", b_constants))
                 for name, value in zip(CONSTANTS, values)}
    return Launch((a_programs + (b_programs if len(tensors) > 2 else 0),), (*a_scalars, *b_scalars), constants, 4, 1,
                  lambda *given: (*given[:2], *given[-2:]))


copy = Step(copy_kernel, copy_launch)


def offered(problem: Problem, geo: Geometry, max_workspace: int | None, inner: Inner, chosen: bool) -> Way | str:
    """The way for problems whose channels are not last; or why there is none."""
    plan = "copies were left out" if left_out("copied_") else for_problem(problem, geo, max_workspace, inner)
    if isinstance(plan, str):
        return plan
    if not chosen and not worth_it(plan, geo):
        return "not copied to channels last: that would take longer"
    return Way(f"copied_{plan.ways[plan.pieces[0].conv][0].name}", plan.note, plan.seconds, plan.workspace_bytes,
               plan.take, plan.run)


def where_they_lie_otherwise(problem: Problem, geo: Geometry, inner: Inner) -> Way:
    """The way for tensors that do not lie as their layout says: planned when first met, with memory of its own."""
    plan = lru_cache(maxsize=1)(lambda: "" if left_out("copied_") else for_problem(problem, geo, None, inner))

    def takes(operands: Operands, result: Any) -> bool:
        found = plan()
        return isinstance(found, Copied) and worth_it(found, geo) and found.take(operands, result)

    def run(operands: Operands, result: Any, workspace: Any) -> None:
        found = plan()
        assert isinstance(found, Copied)
        found.run(operands, result, None)

    return Way("copied", "copied to channels last first", math.inf, 0, takes, run)


def for_problem(problem: Problem, geo: Geometry, max_workspace: int | None, inner: Inner) -> Copied | str:
    """The plan with the least expected time; or why there is none."""
    if problem.dtype == "float64" or problem.out_dtype == "float64":
        return "float64 is not copied"
    if 0 in (*problem.conv.input_shape, *problem.conv.output_shape):
        return "there is nothing to copy"
    limit = workspace_limit(geo, max_workspace)
    at_once = (False,) if problem.wrt == "weight" else (True, False)
    found = [plan for share in (0.02, 0.125, 0.25, 0.5) for direct in at_once
             if (plan := in_pieces(problem, geo, limit, share, direct, inner)) is not None]
    if not found:
        return f"not copied to channels last: no row of it fits {limit} bytes of workspace"
    return min(found, key=lambda plan: plan.seconds)


def worth_it(plan: Copied, geo: Geometry) -> bool:
    """Whether copies and all are expected to be faster than kernels that read by pointers."""
    return plan.seconds < LAUNCH_SECONDS + flops_of(geo) / POINTER_FLOPS


def sizes_to_try(problem: Problem, geo: Geometry, image: int, room: int) -> Iterator[tuple[int, int]]:
    """(images, rows) of a piece, about as large as fits and then smaller ones; `image`: bytes of an image's copies."""
    conv = problem.conv
    extents, step = (geo.x, geo.stride) if problem.wrt == "input" else (geo.y, (1, 1, 1))
    axis = cut_axis(conv, extents)
    extent = extents[axis]
    images, rows = min(conv.batch, room // image), extent
    if images == 0:
        images, rows = 1, extent * room // image
    for _ in range(MOST_SIZES):
        if images < 1 or rows < step[axis] or -(-conv.batch // images) * -(-extent // rows) > MOST_CHUNKS:
            return
        fewest, most = -(-conv.batch // images), conv.batch // (images * 3 // 4 + 1)
        count = next((count for count in range(fewest, min(most, MOST_CHUNKS) + 1) if conv.batch % count == 0), fewest)
        images = -(-conv.batch // count)  # pieces of about the same size; of the same if possible
        if rows < extent:
            rows = -(-extent // -(-extent // rows))
            rows = -(-rows // step[axis]) * step[axis]
        yield images, min(rows, extent)
        images, rows = (images * 3 // 4, rows) if images > 1 else (images, min(rows - step[axis], rows * 3 // 4))


def in_pieces(problem: Problem, geo: Geometry, limit: int, for_inner: float, direct: bool,
              inner: Inner) -> Copied | None:
    """The largest pieces that leave a share of the workspace to their own ways."""
    conv, is_input = problem.conv, problem.wrt == "input"
    letters = SPATIAL_LETTERS[conv.axes]
    x_size, y_size, weight_size = element_bytes(problem, direct)
    weight_bytes = weight_size * math.prod(conv.weight_shape)
    preferred = min(PREFERRED_BYTES, PHASED_BYTES) if is_input and geo.phases > 1 else PREFERRED_BYTES
    room = min(preferred, int(limit * (1 - for_inner)) - weight_bytes)
    image = x_size * math.prod(conv.input_shape[1:]) + y_size * math.prod(conv.output_shape[1:])
    axis = cut_axis(conv, geo.x if is_input else geo.y) - (3 - conv.axes)
    for images, rows in sizes_to_try(problem, geo, image, room) if room > 0 else ():
        pieces = pieces_of(conv, is_input, axis, images, rows)
        if not pieces:
            return None
        several = problem.wrt == "weight" and len(pieces) > 1
        dw_bytes = 4 * math.prod(conv.weight_shape)
        slabs = slabs_for(pieces, dw_bytes, limit) if several else 0
        copied = (max(x_size * math.prod(piece.conv.input_shape) for piece in pieces),
                  max(y_size * math.prod(piece.conv.output_shape) for piece in pieces), weight_bytes)
        left = limit - sum(map(up, copied)) - up(slabs * dw_bytes) - 3 * ALIGNMENT
        if left < 0:
            continue
        ways: dict[Conv, list[Way]] = {}
        for piece in pieces:
            if piece.conv not in ways:
                part = problem.with_(conv=piece.conv, layout=f"N{letters}C", weight_layout=f"O{letters}I",
                                     out_dtype="float32" if several else problem.out_dtype)
                found = inner(part, left)
                if direct:
                    boxes = by_box_lines(part, geometry(part.conv), left, None, True)
                    if boxes is None or not found[0].writes_columns:
                        return None
                    found[0] = boxes
                ways[piece.conv] = found
        plan = Copied(problem, pieces, ways, copied, slabs, direct)
        if plan.workspace_bytes <= limit:
            return plan
    return None
