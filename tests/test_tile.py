"""Boxes of a convolution: every cut gives the result of the whole, from pieces that are read where they lie."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

import convgrad
from convgrad import Conv, Problem
from convgrad.numbers import decode
from convgrad.tile import (
    Box,
    Piece,
    Tile,
    boxes_of,
    grad_output_box,
    input_box,
    input_tile,
    output_tile,
    tile_conv,
    tile_input_grad,
    tile_weight_grad,
)
from convgrad.tile import pieces as pieces_module
from convgrad.verify import exact_results, integer_operands, magnitudes, real_operands, wrong_bits, wrong_bound

CASES = {"native": 240, "reference": 30}
DTYPES = ("float32", "bfloat16", "float64")


def random_conv(rng: random.Random) -> Conv:
    """Any geometry: strides beyond the kernel, dilations, one-sided pads wider than the kernel, groups, no outputs."""
    axes = rng.randint(1, 3)
    longest = {1: 24, 2: 11, 3: 7}[axes]

    def per_axis(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randint(low, high) for _ in range(axes))

    groups = rng.choice([1, 1, 2, 3])
    pads = tuple(zip(per_axis(0, 4), per_axis(0, 4), strict=True))
    return Conv(rng.randint(1, 2), groups * rng.randint(1, 4), groups * rng.randint(1, 4), per_axis(1, longest),
                per_axis(1, 4), per_axis(1, 4), per_axis(1, 3), pads, groups)


def uneven(rng: random.Random, size: tuple[int, ...]) -> list[Box]:
    """A grid of boxes: one to all axes cut in 2 to 7 parts at random places; parts may be empty."""
    cut_axes = rng.sample(range(len(size)), rng.randint(1, len(size)))
    edges = [[0, *sorted(rng.randint(0, extent) for _ in range(rng.randint(1, 6))), extent] if axis in cut_axes
             else [0, extent] for axis, extent in enumerate(size)]
    boxes = [Box((), ())]
    for axis_edges in edges:
        boxes = [Box((*box.begin, first), (*box.end, last))
                 for box in boxes for first, last in itertools.pairwise(axis_edges)]
    return boxes


def cut(array: Any, boxes: list[Box]) -> list[Piece]:
    """Pieces of their own memory, as on different devices."""
    return [Piece(box.begin, np.ascontiguousarray(array[box.slices((0,) * len(box.begin))])) for box in boxes]


def near(pieces: list[Piece], needed: Box) -> list[Piece]:
    """The pieces that a tile would receive: its own block and halos."""
    return [piece for piece in pieces if not box_of(piece).intersection(needed).empty] or pieces[:1]


def box_of(piece: Piece) -> Box:
    return Box(piece.begin, tuple(a + extent for a, extent in zip(piece.begin, piece.array.shape[2:])))


def tiled(conv: Conv, wrt: str, operands: dict[str, Any], rng: random.Random, backend: str) -> Any:
    """The whole result from tiles whose operands lie in pieces that were cut elsewhere than the tiles."""
    dtype = operands[next(iter(operands))].dtype
    inputs, outputs = uneven(rng, conv.in_size), uneven(rng, conv.out_size)
    if wrt == "weight":
        pieces, dy = cut(operands["input"], inputs), operands["grad_output"]
        return sum((tile_weight_grad(conv, box, dy[box.slices((0,) * conv.axes)], near(pieces, input_box(conv, box)),
                                     backend=backend)
                    for box in outputs), np.zeros((), np.float64 if dtype == np.float64 else np.float32))
    result = np.full(conv.shape_of(wrt), 77, dtype)
    if wrt == "output":
        pieces, needed_of, function = cut(operands["input"], inputs), input_box, tile_conv
    else:
        pieces, needed_of, function = cut(operands["grad_output"], outputs), grad_output_box, tile_input_grad
    for box in outputs if wrt == "output" else inputs:
        place = result[box.slices((0,) * conv.axes)]
        read = near(pieces, needed_of(conv, box))
        assert function(conv, box, read, operands["weight"], out=place, backend=backend) is place
    return result


@pytest.mark.parametrize("wrt", ["output", "input", "weight"])
@pytest.mark.parametrize("backend", CASES)
def test_tiles_give_the_bits_of_the_whole(backend: str, wrt: str) -> None:
    for seed in range(CASES[backend]):
        rng = random.Random(seed)
        conv, dtype = random_conv(rng), DTYPES[seed % 3]
        out_dtype = "float32" if wrt == "weight" and dtype == "bfloat16" else dtype
        problem = Problem(conv, wrt, dtype, out_dtype)
        operands = integer_operands(problem, seed)
        got = tiled(conv, wrt, operands, rng, backend)
        wrong = wrong_bits(problem, wrt, got, exact_results(problem, operands)[0])
        assert wrong is None, f"seed {seed}: {wrong}"


@pytest.mark.parametrize("wrt", ["output", "input", "weight"])
def test_tiles_of_real_numbers_are_within_the_bound(wrt: str) -> None:
    for seed in range(60):
        rng = random.Random(1000 + seed)
        problem = Problem(random_conv(rng), wrt, ("float32", "float64")[seed % 2])
        operands = real_operands(problem, seed)
        got = tiled(problem.conv, wrt, operands, rng, "native")
        wrong = wrong_bound(problem, wrt, got, exact_results(problem, operands)[0], magnitudes(problem, operands)[0])
        assert wrong is None, f"seed {seed}: {wrong}"


def test_weight_gradients_added_in_one_order_have_the_same_bits_each_time() -> None:
    for seed in range(20):
        problem = Problem(random_conv(random.Random(seed)), "weight")
        operands = real_operands(problem, seed)
        first, again = (tiled(problem.conv, "weight", operands, random.Random(seed), "native") for _ in range(2))
        assert first.tobytes() == again.tobytes()


def reads(conv: Conv, axis: int) -> set[tuple[int, int]]:
    """(output, input) pairs of one axis, by the definition."""
    low = conv.padding[axis][0]
    return {(o, i) for o in range(conv.out_size[axis]) for k in range(conv.kernel_size[axis])
            if 0 <= (i := o * conv.stride[axis] + k * conv.dilation[axis] - low) < conv.in_size[axis]}


def test_boxes_are_those_that_the_definition_reads() -> None:
    """Each side of a needed box is touched, nothing outside is, and the local convolution reads the same pairs."""
    for seed in range(400):
        rng = random.Random(seed)
        conv = random_conv(rng)
        if 0 in conv.out_size:
            continue
        axis = rng.randrange(conv.axes)
        pairs = reads(conv, axis)
        for box, needed_of, tile_of, place in ((rng.choice(uneven(rng, conv.in_size)), grad_output_box, input_tile, 1),
                                               (rng.choice(uneven(rng, conv.out_size)), input_box, output_tile, 0)):
            needed, tile = needed_of(conv, box), tile_of(conv, box)
            own = range(box.begin[axis], box.end[axis])
            touched = {pair[1 - place] for pair in pairs if pair[place] in own}
            assert touched <= set(range(needed.begin[axis], needed.end[axis])), (seed, conv, box)
            if tile is not None:
                assert isinstance(tile, Tile)
                assert tile.conv.out_size == tile.output.size and tile.conv.in_size == tile.input.size
                local = {(o + tile.output.begin[axis], i + tile.input.begin[axis]) for o, i in reads(tile.conv, axis)}
                assert local == {pair for pair in pairs if pair[place] in own}, (seed, conv, box)


def test_halos_are_no_wider_than_the_kernel_reaches() -> None:
    conv = Conv(1, 1, 1, (64,), (5,), padding=2)
    assert grad_output_box(conv, Box((16,), (32,))) == Box((14,), (34,))
    assert input_box(conv, Box((16,), (32,))) == Box((14,), (34,))
    strided = Conv(1, 1, 1, (64,), (3,), stride=2, padding=1)
    assert grad_output_box(strided, Box((16,), (32,))) == Box((8,), (17,))


def test_only_seams_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 64x64 with a halo of one row above and below: the copies are a few rows, not the block."""
    copied = []
    read = pieces_module.Pieces.read

    def counting(self: Any, needed: Box) -> Any:
        array = read(self, needed)
        copied.append(0 if any(np.shares_memory(array, view) for _, view in self.views) else array.size)
        return array

    monkeypatch.setattr(pieces_module.Pieces, "read", counting)
    conv = Conv(1, 2, 2, (192, 64), (3, 3), padding=1)
    whole = np.ones(conv.output_shape, np.float32)
    weight = np.ones(conv.weight_shape, np.float32)
    pieces = cut(whole, [Box((63, 0), (64, 64)), Box((64, 0), (128, 64)), Box((128, 0), (129, 64))])
    got = tile_input_grad(conv, Box((64, 0), (128, 64)), pieces, weight)
    assert np.array_equal(got, convgrad.input_grad(whole, weight, (192, 64), padding=1)[:, :, 64:128])
    assert 0 < sum(copied) <= 2 * 3 * 64 * 2  # two seams of one row, three rows read for each, two channels
    copied.clear()
    tile_weight_grad(conv, Box((64, 0), (128, 64)), whole[:, :, 64:128], pieces)
    assert 0 < sum(copied) <= 2 * 4 * 64 * 2


def test_a_cut_where_no_result_reads_both_sides_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module.Pieces, "cells", pytest.fail)
    monkeypatch.setattr(pieces_module.Pieces, "check_cover", lambda *_: None)
    for stride, size in ((1, 12), (3, 34)):
        conv = Conv(1, 1, 1, (size,), (1,), stride=stride)
        whole = np.arange(1.0, 13).reshape(1, 1, 12)
        got = tile_input_grad(conv, Box((0,), (size,)), cut(whole, [Box((0,), (5,)), Box((5,), (12,))]),
                              np.ones((1, 1, 1)))
        assert np.array_equal(got[0, 0, ::stride], whole[0, 0])
        assert got.sum() == whole.sum()


def test_a_transposed_convolution_is_an_input_gradient() -> None:
    small, weight = np.arange(1.0, 7).reshape(1, 1, 6), np.array([[[1.0, 2.0, 4.0]]])
    whole = convgrad.conv_transpose(small, weight, stride=2, padding=1, output_padding=1)
    conv = Conv(1, 1, 1, whole.shape[2:], (3,), stride=2, padding=1)
    pieces = cut(small, [Box((0,), (2,)), Box((2,), (6,))])
    parts = [tile_input_grad(conv, box, pieces, weight) for box in boxes_of(whole.shape[2:], (5,))]
    assert np.array_equal(np.concatenate(parts, 2), whole)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    conv = Conv(1, 2, 3, (9, 8), (3, 2), stride=(2, 1), padding=1)
    operands = integer_operands(Problem(conv, "input", "bfloat16"))
    exact = exact_results(Problem(conv, "input", "bfloat16"), operands)[0]
    dy = torch.from_numpy(decode(operands["grad_output"], "bfloat16")).bfloat16()
    weight = torch.from_numpy(decode(operands["weight"], "bfloat16")).bfloat16()
    pieces = [Piece((0, 0), dy[:, :, :2]), Piece((2, 0), dy[:, :, 2:].contiguous())]
    parts = [tile_input_grad(conv, box, pieces, weight) for box in boxes_of(conv.in_size, (3, 1))]
    assert parts[0].dtype == torch.bfloat16
    assert np.array_equal(torch.cat(parts, 2).double().numpy(), exact)
    with pytest.raises(ValueError, match="recorded"):
        tile_input_grad(conv, Box((0, 0), (9, 8)), pieces, weight.clone().requires_grad_())


CONV = Conv(1, 2, 3, (8,), (3,), padding=1)
DY, WEIGHT = np.ones((1, 3, 8), np.float32), np.ones((3, 2, 3), np.float32)
BAD = [
    (dict(conv="conv"), TypeError, "conv must be a Conv, got str"),
    (dict(box=4), TypeError, "box must be a Box or a pair"),
    (dict(box=Box((4,), (9,))), ValueError, "box goes from 4 to 9 on axis 0, which is not inside 0 to 8"),
    (dict(box=Box((5,), (4,))), ValueError, "box goes from 5 to 4 on axis 0"),
    (dict(box=Box((0, 0), (1, 1))), ValueError, "box.begin must have one value per spatial axis"),
    (dict(grad_output=DY), TypeError, "grad_output must be a sequence of at least one Piece"),
    (dict(grad_output=[]), TypeError, "grad_output must be a sequence of at least one Piece"),
    (dict(grad_output=[DY]), TypeError, r"grad_output\[0\] must be a Piece"),
    (dict(grad_output=[Piece((1,), DY)]), ValueError, r"grad_output\[0\] goes from 1 to 9 on axis 0"),
    (dict(grad_output=[Piece((0,), DY[:, :2])]), ValueError, r"\(batch, channels\) = \(1, 3\)"),
    (dict(grad_output=[Piece((0,), DY[..., :3]), Piece((4,), DY[..., 4:])]), ValueError,
     r"grad_output: no piece holds the box from \(3,\) to \(4,\); the tile reads \(1,\) to \(7,\)"),
    (dict(grad_output=[Piece((0,), DY[..., :4]), Piece((4,), DY[..., 4:].astype(np.float64))]), TypeError,
     r"grad_output\[0\] is float32, grad_output\[1\] is float64"),
    (dict(weight=WEIGHT[:, :1]), ValueError, r"weight has shape \(3, 1, 3\), but \(3, 2, 3\) is expected"),
    (dict(out=np.full((1, 2, 5), 7, np.float32)), ValueError, "out has shape"),
    (dict(out=np.full((1, 2, 4), 7, np.float64)), TypeError, "out has dtype float64"),
    (dict(backend="none"), ValueError, "backend='none' is none of"),
]


@pytest.mark.parametrize("changes, error, message", BAD)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = dict(conv=CONV, box=Box((2,), (6,)), grad_output=[Piece((0,), DY)], weight=WEIGHT,
                     out=np.full((1, 2, 4), 7, np.float32)) | changes
    with pytest.raises(error, match=message):
        tile_input_grad(**arguments)
    assert (arguments["out"] == 7).all()


def test_bad_cuts_and_blocks() -> None:
    with pytest.raises(ValueError, match="parts must have one value per axis"):
        list(boxes_of((4, 4), (2,)))
    with pytest.raises(ValueError, match=r"parts\[0\] must be at least 1"):
        list(boxes_of((4,), (0,)))
    with pytest.raises(ValueError, match=r"grad_output has shape \(1, 3, 8\), but \(1, 3, 4\) is expected"):
        tile_weight_grad(CONV, Box((2,), (6,)), DY, [Piece((0,), np.ones((1, 2, 8), np.float32))])
