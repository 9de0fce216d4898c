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
from typing import Any, NamedTuple

import torch

from ...problem import DTYPES, SPATIAL_LETTERS, Conv, Problem
from .box_plans import weight_rows_fit
from .copies import copy_kernel
from .geometry import Geometry, channels_last, geometry, outer_axis, runs_of
from .gpu import Gpu, runs_anywhere
from .kernel import Kernel, Operands, Prepared, Query, choose
from .launch import Launch, Step, aligned_strides, power_of_two
from .numbers_on_device import TORCH_DTYPES, scratch
from .pieces import Piece, pieces_of
from .pointer_plans import seconds as pointer_seconds
from .split_k import add_step

AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COPY_SHARE = 0.89  # of the memory's speed
COPY_SECONDS = 10e-6  # of a launch that copies, beside its bytes: the kernels before and behind it wait for each other
PREFERRED_BYTES = 2**26  # of copies in a piece: smaller pieces, which the cache could hold, were slower on an H200,
PHASED_BYTES = 2**25  # but not those of input gradients at a stride, whose phases come to memory one after the other
MOST_SIZES = 12  # of pieces that are tried
MOST_CHUNKS = 1024  # of a problem, so that planning takes milliseconds
MOST_SLABS = 8  # weight gradients of pieces that are kept before they are added
ALIGNMENT = 256


class Inner(NamedTuple):
    """What computes a piece."""

    prepared: Prepared
    seconds: float


Find = Callable[[Problem, int], Inner | None]  # what computes a piece within so many bytes


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
    """A problem in pieces."""

    problem: Problem
    gpu: Gpu
    pieces: list[Piece]
    inner: dict[Conv, Inner]
    copied: tuple[int, int, int]  # bytes for the copies of x, y and the weight
    slabs: int  # weight gradients of pieces
    direct: bool  # results go to their place at once

    @property
    def is_input(self) -> bool:
        return self.problem.wrt == "input"

    @property
    def slab_bytes(self) -> int:
        return 4 * math.prod(self.problem.conv.weight_shape)

    @property
    def offsets(self) -> list[int]:
        """Where the copies of x, y and weight, the slabs and the memory of the pieces' own ways begin, and the end."""
        inner = max(found.prepared.workspace_bytes for found in self.inner.values())
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
        own = sum(self.inner[piece.conv].seconds for piece in self.pieces)
        sizes = element_bytes(self.problem, self.direct)
        inputs, outputs, weights = (size if there else 0 for size, there in zip(sizes, self.copied))
        moved = sum(inputs * math.prod(piece.conv.input_shape) + outputs * math.prod(piece.conv.output_shape)
                    for piece in self.pieces) + weights * math.prod(self.problem.conv.weight_shape)
        adding = 2 * self.slab_bytes * len(self.pieces) if self.slabs else 0
        launches = len(self.pieces) + (not self.direct if self.problem.wrt != "weight" else
                                       -(-len(self.pieces) // MOST_SLABS))
        return own + (2 * moved + adding) / (COPY_SHARE * self.gpu.memory_bytes_per_s) + launches * COPY_SECONDS

    @property
    def note(self) -> str:
        first = self.pieces[0].conv
        rows = (first.in_size if self.is_input else first.out_size)[self.pieces[0].axis]
        prepared = self.inner[first].prepared
        at_once = " (results at once to their place)" if self.direct else ""
        return (f"{len(self.pieces)} pieces of {first.batch} images x {rows} rows copied to channels last{at_once}, "
                f"then {prepared.name}: {prepared.note}; {self.seconds * 1e6:.0f} us expected with the copies")

    def memory(self, workspace: Any, like: Any) -> Any:
        return scratch(self.problem, workspace, (self.offsets[-1] // 4,), like).view(torch.uint8)

    def run(self, operands: Operands, results: tuple[Any, ...], workspace: Any) -> None:
        result, = results
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
        if self.copied[2]:
            copy = like(weight, memory[weight_at:])
            waiting.append((weight, copy))
            weight = copy
        for piece in self.pieces:
            part, target = (piece.y_of(source), piece.x_of(result)) if self.is_input else \
                (piece.x_of(source), piece.y_of(result))
            if self.copied[1 if self.is_input else 0]:
                waiting.append((part, like(part, memory[from_at:])))
                part = waiting[-1][1]
            copy_all(waiting)
            written = like(target, memory[to_at:]) if self.copied[0 if self.is_input else 1] else target
            self.inner[piece.conv].prepared.run((part, weight), (written,), inner)
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
                if self.copied[1 - place]:
                    waiting.append((parts[place], like(parts[place], memory[at:])))
                    parts[place] = waiting[-1][1]
            copy_all(waiting)
            target = slabs[filled].permute(order) if self.slabs else result
            self.inner[piece.conv].prepared.run((parts[0], parts[1]), (target,), inner)
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


def like(tensor: Any, memory: Any) -> Any:
    """A tensor of the same shape in given memory, channels last."""
    outer, channels, *spatial = tensor.shape
    flat = memory[:tensor.numel() * tensor.element_size()].view(tensor.dtype)
    return flat.view(outer, *spatial, channels).permute(0, -1, *range(1, tensor.dim() - 1))


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


def supports(problem: Problem, geo: Geometry) -> str | None:
    if problem.dtype == "float64" or problem.out_dtype == "float64":
        return "float64 is not copied"
    return "there is nothing to copy" if 0 in (*problem.conv.input_shape, *problem.conv.output_shape) else None


def accepts(query: Query) -> str | None:
    """Tensors that are not all channels last, and that the copying kernel can read and write."""
    if not any(map(worth_a_copy, activations(query))):
        return "all tensors have channels last already"
    if not all(map(copies, (*activations(query), *(weight_of(query))))):
        return "the copying kernel does not read these strides"
    return None


def activations(query: Query) -> list[Any]:
    """The tensors of the problem that are no weights."""
    problem = query.problem
    named = zip((*problem.operands, *problem.results), (*query.operands, *query.results))
    return [tensor for name, tensor in named if name != "weight"]


def worth_a_copy(tensor: Any) -> bool:
    """Whether channels are not neighbours in memory, or rows would only in a copy begin at multiples of 16 bytes."""
    apart = tensor.shape[1] > 1 and tensor.stride(1) != 1
    return not channels_last(tensor) and (apart or tensor.shape[1] * tensor.element_size() % 16 == 0)


def weight_of(query: Query) -> tuple[Any, ...]:
    """The weight, where it is an operand."""
    return query.operands[1:2] if query.problem.wrt != "weight" else ()


def weight_lies(query: Query) -> bool:
    return all(map(weight_rows_fit, weight_of(query)))


def tiles(query: Query) -> Iterator[Copied]:
    """Plans in pieces, where the pointer kernels are expected to be slower."""
    at_once = (False,) if query.problem.wrt == "weight" else (True, False)
    slowest, known = pointer_seconds(query), Known({})
    for share in (0.5, 0.25, 0.125, 0.02):  # from most memory on, see Known
        for direct in at_once:
            plan = in_pieces(query, share, direct, known)
            if plan is not None and plan.seconds <= slowest:
                yield plan


def build(query: Query, plan: Copied) -> Prepared:
    inner = plan.inner[plan.pieces[0].conv].prepared
    return Prepared(f"copied_{inner.name}", plan.note, plan.workspace_bytes, plan.run)


@dataclass(frozen=True)
class Known:
    """What was found for pieces, so that pieces of the same shape are not planned again for a little more memory."""

    found: dict[tuple[Problem, bool], Inner | None]

    def find(self, query: Query, direct: bool, room: int) -> Inner | None:
        """What computes a piece within `room` bytes."""
        key = (query.problem, direct)
        found = self.found.get(key)
        if found is None or found.prepared.workspace_bytes > room:
            choice = choose(replace(query, max_workspace=room))
            # what reads by pointers anyway is not worth a copy
            found = None if choice is None or (direct and choice.kernel.fallback) else \
                Inner(choice.prepared, math.inf if choice.kernel.fallback else choice.seconds)
            self.found[key] = found
        return found


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


def in_pieces(query: Query, for_inner: float, direct: bool, known: Known) -> Copied | None:
    """The largest pieces that leave a share of the workspace to their own kernels."""
    problem, geo, limit = query.problem, query.geo, query.limit
    conv, is_input, is_weight = problem.conv, problem.wrt == "input", problem.wrt == "weight"
    copied = to_copy(query, direct)
    x_size, y_size, weight_size = (size if there else 0 for size, there in zip(element_bytes(problem, direct), copied))
    weight_bytes = weight_size * math.prod(conv.weight_shape)
    preferred = min(PREFERRED_BYTES, PHASED_BYTES) if is_input and geo.phases > 1 else PREFERRED_BYTES
    room = min(preferred, int(limit * (1 - for_inner)) - weight_bytes)
    image = max(1, x_size * math.prod(conv.input_shape[1:]) + y_size * math.prod(conv.output_shape[1:]))
    axis = cut_axis(conv, geo.x if is_input else geo.y) - (3 - conv.axes)
    for images, rows in sizes_to_try(problem, geo, image, room) if room > 0 else ():
        pieces = pieces_of(conv, is_input, axis, images, rows)
        if not pieces:
            return None
        several = is_weight and len(pieces) > 1
        dw_bytes = 4 * math.prod(conv.weight_shape)
        slabs = slabs_for(pieces, dw_bytes, limit) if several else 0
        sizes = (max(x_size * math.prod(piece.conv.input_shape) for piece in pieces),
                 max(y_size * math.prod(piece.conv.output_shape) for piece in pieces), weight_bytes)
        left = limit - sum(map(up, sizes)) - up(slabs * dw_bytes) - 3 * ALIGNMENT
        if left < 0:
            continue
        inner: dict[Conv, Inner] = {}
        for piece in pieces:
            if piece.conv not in inner:
                found = known.find(of_piece(query, piece, copied, several), direct, left)
                if found is None:
                    return None
                inner[piece.conv] = found
        plan = Copied(problem, query.gpu, pieces, inner, sizes, slabs, direct)
        if plan.workspace_bytes <= limit:
            return plan
    return None


def to_copy(query: Query, direct: bool) -> tuple[bool, bool, bool]:
    """Whether x, y and the weight are copied; of a direct plan the result is not."""
    wrt = query.problem.wrt
    if wrt == "weight":
        dy, x = query.operands
        return worth_a_copy(x), worth_a_copy(dy), False
    source, target = worth_a_copy(query.operands[0]), not direct and worth_a_copy(query.result)
    return (target, source, not weight_lies(query)) if wrt == "input" else (source, target, not weight_lies(query))


def of_piece(query: Query, piece: Piece, copied: tuple[bool, bool, bool], several: bool) -> Query:
    """The query for a piece: its tensors as they will lie, on the meta device."""
    problem, letters = query.problem, SPATIAL_LETTERS[query.problem.conv.axes]
    part = problem.with_(conv=piece.conv, layout=f"N{letters}C", weight_layout=f"O{letters}I",
                         out_dtype="float32" if several else problem.out_dtype)
    names = {"input": (piece.x_of, copied[0]), "output": (piece.y_of, copied[1]),
             "grad_output": (piece.y_of, copied[1]), "weight": (lambda weight: weight, copied[2])}

    def lying(name: str, tensor: Any, dtype: str) -> Any:
        view, copy = names[name]
        seen = view(tensor)
        return channels_last_meta(tuple(seen.shape), dtype) if copy or (name == "weight" and several) else seen

    return replace(
        query, problem=part, kernels=tuple(kernel for kernel in query.kernels if not kernel.copies),
        operands=tuple(lying(name, tensor, problem.dtype) for name, tensor in zip(problem.operands, query.operands)),
        results=tuple(lying(name, tensor, part.out_dtype) for name, tensor in zip(problem.results, query.results)))


def channels_last_meta(shape: tuple[int, ...], dtype: str) -> Any:
    """A canonical tensor on the meta device whose channels are neighbours."""
    outer, channels, *spatial = shape
    return torch.empty((outer, *spatial, channels), dtype=TORCH_DTYPES[dtype], device="meta").permute(
        0, -1, *range(1, len(shape) - 1))


def without_copies(query: Query, problem: Problem, room: int) -> Query:
    """The query for a problem on copies with channels last, within `room` bytes and by no kernel that copies itself."""
    return replace(
        query, problem=problem, max_workspace=room,
        operands=tuple(channels_last_meta(problem.shape_of_operand(name), problem.dtype) for name in problem.operands),
        results=tuple(channels_last_meta(problem.conv.shape_of(name), problem.out_dtype) for name in problem.results),
        kernels=tuple(kernel for kernel in query.kernels if not (kernel.copies or kernel.fallback)))


def of_pieces(problem: Problem, gpu: Gpu, pieces: list[Piece], limit: int, find: Find) -> Copied | None:
    """The plan of given pieces, where `find(piece, bytes)` finds what computes all of them as they lie.

    The sums of several wait in slabs, and what these leave of the limit is for the kernels.
    """
    slab = 4 * math.prod(problem.conv.weight_shape)
    slabs = slabs_for(pieces, slab, limit) if len(pieces) > 1 else 0
    left = limit - up(slabs * slab) - 3 * ALIGNMENT
    inner: dict[Conv, Inner] = {}
    for piece in pieces:
        if piece.conv not in inner:
            found = find(problem.with_(conv=piece.conv, out_dtype="float32"), left)
            if found is None:
                return None
            inner[piece.conv] = found
    return Copied(problem, gpu, pieces, inner, (0, 0, 0), slabs, False) if pieces else None


KERNEL = Kernel("copied", frozenset({"output", "input", "weight"}), supports, accepts, tiles, build,
                requires=runs_anywhere, copies=True)
