"""Output, input gradient and weight gradient of one box of a convolution whose operands lie in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..call import SAME_NAMES, Options, problem_of
from ..frontends import Kind, kind_of
from ..plan import checked_request, plan
from ..problem import Conv, Problem
from .boxes import Box, checked_box, checked_conv, grad_output_box, input_box, input_tile, output_tile
from .pieces import Piece, Pieces, checked_pieces, parts_of, seam_of_inputs, seam_of_outputs


def tile_conv(conv: Conv, box: Box, input: Sequence[Piece], weight: Any, *, out: Any = None, compute: str | None = None,
              dtype: str | None = None, out_dtype: str | None = None, backend: str | None = None,
              num_threads: int | None = None) -> Any:
    """The part of a convolution's output that lies in `box`.

    Parameters not listed are those of `convgrad.conv`.

    Parameters
    ----------
    conv : Conv
        The whole convolution; its batch is that of the pieces.
    box : Box
        Positions of the output.
    input : sequence of Piece
        Arrays (N, C, spatial) that together hold `input_box(conv, box)`: the own block and the halos of its
        neighbours, in any strides. Where pieces overlap the first one is read.
    weight : array
        The whole weight (K, C/groups, spatial).

    Returns
    -------
    array
        The output (N, K, spatial of the box).

    Examples
    --------
    >>> import numpy as np
    >>> from convgrad import Conv
    >>> from convgrad.tile import Box, Piece, tile_conv
    >>> x = np.arange(8.0).reshape(1, 1, 8)
    >>> halves = [Piece((0,), x[:, :, :4]), Piece((4,), x[:, :, 4:])]
    >>> tile_conv(Conv(1, 1, 1, (8,), (3,)), Box((2,), (5,)), halves, np.ones((1, 1, 3)), backend="reference")
    array([[[ 9., 12., 15.]]])
    """
    conv = checked_conv(conv)
    box, needed = checked_box(box, conv.out_size, "box"), input_box(conv, box)
    found = checked_pieces(input, conv.in_size, conv.input_shape[:2], "input")
    _check_shape("weight", weight, conv.weight_shape)
    asked = Asked.of("output", conv, {**_named(found, "input"), "weight": weight},
                     Options(None, None, compute, dtype, out_dtype, backend, num_threads))
    pieces = asked.pieces(found, needed, "input")
    result, target = asked.result((conv.batch, conv.out_channels, *box.size), out)
    filter = asked.view(weight, "weight")
    for part in parts_of(conv, box, pieces.cuts(needed), seam_of_outputs):
        tile = output_tile(conv, part)
        if tile is None:
            target[part.slices(box.begin)] = 0
        else:
            asked.run(tile.conv, (pieces.read(tile.input), filter), target[part.slices(box.begin)])
    return asked.kind.returned(result, asked.like)


def tile_input_grad(conv: Conv, box: Box, grad_output: Sequence[Piece], weight: Any, *, out: Any = None,
                    compute: str | None = None, dtype: str | None = None, out_dtype: str | None = None,
                    backend: str | None = None, num_threads: int | None = None) -> Any:
    """The part of a convolution's input gradient that lies in `box`; every element is summed wholly here.

    Parameters not listed are those of `convgrad.input_grad`.

    Parameters
    ----------
    conv : Conv
        The whole convolution; its batch is that of the pieces.
    box : Box
        Positions of the input.
    grad_output : sequence of Piece
        Arrays (N, K, spatial) that together hold `grad_output_box(conv, box)`: the own block and the halos of its
        neighbours, in any strides. Where pieces overlap the first one is read.
    weight : array
        The whole weight (K, C/groups, spatial).

    Returns
    -------
    array
        The gradient (N, C, spatial of the box).

    Examples
    --------
    >>> import numpy as np
    >>> from convgrad import Conv
    >>> from convgrad.tile import Box, Piece, tile_input_grad
    >>> halves = [Piece((0,), np.ones((1, 1, 3))), Piece((3,), np.ones((1, 1, 3)))]
    >>> tile_input_grad(Conv(1, 1, 1, (8,), (3,)), Box((1,), (5,)), halves, np.ones((1, 1, 3)), backend="reference")
    array([[[2., 3., 3., 3.]]])
    """
    conv = checked_conv(conv)
    box, needed = checked_box(box, conv.in_size, "box"), grad_output_box(conv, box)
    found = checked_pieces(grad_output, conv.out_size, conv.output_shape[:2], "grad_output")
    _check_shape("weight", weight, conv.weight_shape)
    asked = Asked.of("input", conv, {**_named(found, "grad_output"), "weight": weight},
                     Options(None, None, compute, dtype, out_dtype, backend, num_threads))
    pieces = asked.pieces(found, needed, "grad_output")
    result, target = asked.result((conv.batch, conv.in_channels, *box.size), out)
    filter = asked.view(weight, "weight")
    for part in parts_of(conv, box, pieces.cuts(needed), seam_of_inputs):
        tile = input_tile(conv, part)
        if tile is None or tile.input != part:  # what no output reads
            target[part.slices(box.begin)] = 0
        if tile is not None:
            asked.run(tile.conv, (pieces.read(tile.output), filter), target[tile.input.slices(box.begin)])
    return asked.kind.returned(result, asked.like)


def tile_weight_grad(conv: Conv, box: Box, grad_output: Any, input: Sequence[Piece], *, out: Any = None,
                     compute: str | None = None, dtype: str | None = None, backend: str | None = None,
                     num_threads: int | None = None) -> Any:
    """What the outputs in `box` add to a convolution's weight gradient.

    The partial gradients of boxes that divide the output add up to the whole one. They are float32 (float64 for
    float64 operands); added in one order they give the same bits every time. Parameters not listed are those of
    `convgrad.weight_grad`.

    Parameters
    ----------
    conv : Conv
        The whole convolution; its batch is that of the arrays.
    box : Box
        Positions of the output.
    grad_output : array
        Gradient of the output in the box (N, K, spatial of the box).
    input : sequence of Piece
        Arrays (N, C, spatial) that together hold `input_box(conv, box)`, as in `tile_conv`.

    Returns
    -------
    array
        The partial gradient (K, C/groups, spatial).

    Examples
    --------
    >>> import numpy as np
    >>> from convgrad import Conv
    >>> from convgrad.tile import Box, Piece, tile_weight_grad
    >>> x = np.arange(8.0).reshape(1, 1, 8)
    >>> halves = [Piece((0,), x[:, :, :4]), Piece((4,), x[:, :, 4:])]
    >>> tile_weight_grad(Conv(1, 1, 1, (8,), (3,)), Box((2,), (5,)), np.ones((1, 1, 3)), halves, backend="reference")
    array([[[ 9., 12., 15.]]])
    """
    conv = checked_conv(conv)
    box, needed = checked_box(box, conv.out_size, "box"), input_box(conv, box)
    found = checked_pieces(input, conv.in_size, conv.input_shape[:2], "input")
    _check_shape("grad_output", grad_output, (conv.batch, conv.out_channels, *box.size))
    asked = Asked.of("weight", conv, {"grad_output": grad_output, **_named(found, "input")},
                     Options(None, None, compute, dtype, None, backend, num_threads))
    pieces = asked.pieces(found, needed, "input")
    result, total = asked.result(conv.weight_shape, out)
    block = asked.view(grad_output, "grad_output")
    target, partial = total, None
    for part in parts_of(conv, box, pieces.cuts(needed), seam_of_outputs):
        tile = output_tile(conv, part)
        if tile is None:
            continue
        asked.run(tile.conv, (block[part.slices(box.begin)], pieces.read(tile.input)), target)
        if target is partial:
            total += partial
        elif partial is None:  # the first part is written, all others are added to it
            target = partial = asked.view(asked.empty(conv.weight_shape), "a partial sum", asked.problem.out_dtype)
    if partial is None:
        total[...] = 0
    return asked.kind.returned(result, asked.like)


@dataclass(frozen=True)
class Asked:
    """What all parts of one call share."""

    kind: Kind
    problem: Problem  # the whole one
    operands: dict[str, Any]
    backend: str | None
    num_threads: int | None

    @staticmethod
    def of(wrt: str, conv: Conv, operands: dict[str, Any], options: Options) -> Asked:
        """Check that all operands are of one kind and number format, on one device."""
        kind = kind_of(operands, SAME_NAMES)
        if kind.recorded(operands):
            raise ValueError("the arrays are recorded (they require gradients, or a program is traced), which does not "
                             "go with tiles: detach them first")
        checked_request(options.backend, None, options.num_threads)
        problem, _ = problem_of(kind, wrt, conv, operands, options)
        if wrt == "weight":
            problem = problem.with_(out_dtype="float64" if problem.dtype == "float64" else "float32")
        threads = kind.threads() if options.num_threads is None and problem.device == "cpu" else options.num_threads
        return Asked(kind, problem, operands, options.backend, threads)

    @property
    def like(self) -> Any:
        return next(iter(self.operands.values()))

    def run(self, conv: Conv, operands: tuple[Any, ...], result: Any) -> None:
        chosen = plan(self.problem.with_(conv=conv), backend=self.backend, num_threads=self.num_threads)
        self.kind.execute(chosen.run, operands, (result,), None)

    def view(self, array: Any, name: str, format_name: str = "") -> Any:
        return self.kind.operand(array, name, None, format_name or self.problem.dtype)

    def empty(self, shape: tuple[int, ...]) -> Any:
        return self.kind.empty(shape, self.problem.out_dtype, self.like)

    def pieces(self, found: list[Piece], needed: Box, name: str) -> Pieces:
        """The pieces as a backend reads them; together they must hold the box that is needed."""
        views = [(Box(begin, tuple(a + extent for a, extent in zip(begin, array.shape[2:]))), self.view(array, name))
                 for begin, array in found]
        pieces = Pieces(self.kind, self.problem.dtype, views, found[0].array)
        if not needed.empty:
            pieces.check_cover(needed, name)
        return pieces

    def result(self, shape: tuple[int, ...], out: Any) -> tuple[Any, Any]:
        """The result array, new where `out` is None, and the view of it that a backend writes."""
        if out is None:
            out = self.empty(shape)
        else:
            self.kind.check_out(out, shape, self.problem.out_dtype, "out", self.operands)
        return out, self.view(out, "out", self.problem.out_dtype)


def _named(pieces: list[Piece], name: str) -> dict[str, Any]:
    return {f"{name}[{place}]": piece.array for place, piece in enumerate(pieces)}


def _check_shape(name: str, array: Any, expected: tuple[int, ...]) -> None:
    shape = tuple(getattr(array, "shape", ()))
    if shape != expected:
        raise ValueError(f"{name} has shape {shape}, but {expected} is expected")
