"""Output and input gradient on boxes: which products a launch sums, on the CPU; the kernels themselves on a GPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from oracle import check_bound, check_exact, check_nonfinite
from triton_here import DEVICE, channels_last, integers_and_result, needs_gpu, needs_triton, torch

from convgrad import Problem

GEOMETRIES = (
    "n3 c32 k24 i5x6 w3x3 p1x1 NHWC OHWI",
    "n2 c16 k40 i7x9 w3x3 s2x2 p1:0x0:1 NHWC OHWI",
    "n2 c16 k16 i4x5x6 w3x2x3 p1x0x1 NDHWC ODHWI",
    "n5 c24 k16 i17 w3 d4 p8:0 NLC OLI",
    "n2 c16 k16 i9x9 w1x1 s2x2 NHWC OHWI",
    "n1 c16 k16 i9x10 w4x4 s2x2 p1x1 NHWC OHWI",
    "n2 c64 k64 i6x7 w3x3 p3x3 d3x2 g2 NHWC OHWI",
    "n1 c16 k16 i10x9 w3x2 s4x2 d2x3 p2x1 NHWC OHWI",
    "n3 c4 k16 i8x12 w2x4 s2x4 NHWC OHWI",
    "n2 c136 k80 i7x7 w3x3 p1x1 NHWC OHWI",
    "n2 c22 k36 i19 w3 p4:0 d2 NLC OLI",
    "n2 c24 k20 i6x7 w2x3 p1x1 NHWC HWIO",
    "n2 c24 k136 i6x7 w2x3 p1x1 NHWC HWIO",
    "n3 c72 k40 i9 w3 p1 TBC LIO",
    "n2 c20 k24 i9 w2 p1 NLC OLI",
    "n1 c32 k144 i4x5 w2x3 p1x1 NHWC HWIO",
    "n2 c144 k96 i7x6 w3x2 s2x1 p1x0 g3 NHWC OHWI",
    "n2 c64 k96 i9 w3 p1 g2 NLC LOI",
)
# Formats and compute modes of the products: 16-bit, FP8 decoded to 16-bit, FP8, float32 in three 16-bit parts.
PRODUCTS = ("bf16", "e4m3>bf16", "e5m2>bf16 fp8", "f32")
IN_PARTS = 1 + 2.0**-10 + 2.0**-20  # times a small number: all three parts have some of it
SHUFFLED = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]  # as `decoded` in fp8_products.py


def box_at(descriptor: Any, start: tuple[int, ...]) -> Any:
    """What one copy brings: elements `steps` apart, zeros outside of the tensor."""
    assert start[-1] % 8 == 0, "the copy engine reads from multiples of 16 bytes"
    tensor = descriptor.base.as_strided(descriptor.shape, descriptor.strides).float().numpy()
    box = descriptor.box or descriptor.block_shape
    out = np.zeros(box)
    places = [[first + i * step for i in range(size)]
              for first, size, step in zip(start, box, descriptor.steps or (1,) * len(box))]
    for index in itertools.product(*[range(size) for size in box[:-1]]):
        at = [axis[i] for axis, i in zip(places, index)]
        if all(0 <= place < extent for place, extent in zip(at, tensor.shape)):
            row = tensor[tuple(at)]
            for i, place in enumerate(places[-1]):
                if 0 <= place < len(row):
                    out[(*index, i)] = row[place]
    return out


def phase_of(order: int, k: int, t: int, d: int, p: int, g: int, is_input: bool) -> tuple[int, int, int, int]:
    """As in box_lines.py."""
    if not is_input:
        return 0, 0, k, -p
    step = t // g
    first = order % step
    phase = (first * d + order // step - p) % t
    slots = -(-(k - first) // step) if order < step and first < k else 0
    return phase, first, slots, (phase + p - first * d) // t


def inside(axis: tuple[int, ...], start: int, extent: int, b: int, t: int, d: int, g: int,
           is_input: bool) -> tuple[int, ...]:
    """As in box_places.py, by trying all slots."""
    phase, first, slots, shift = axis
    reads = [[start + i + shift - m * (d // g) if is_input else (start + i) * t + shift + m * d for i in range(b)]
             for m in range(slots)]
    there = [m for m in range(slots) if any(0 <= place < extent for place in reads[m])] or [0]
    skipped, count = there[0], len(there) if slots and any(0 <= place < extent for place in reads[there[0]]) else 0
    assert there == list(range(there[0], there[-1] + 1))
    move = -(d // g) if is_input else d
    return phase, first + skipped * (t // g if is_input else 1), count, shift + skipped * move


def rows_of(tensor: Any) -> Any:
    """A copy with channels last, padded to a multiple of 8."""
    last = tensor.permute(0, *range(2, tensor.dim()), 1).contiguous()
    last = torch.nn.functional.pad(last, (0, -last.shape[-1] % 8))
    return last.permute(0, -1, *range(1, tensor.dim() - 1))


def walk(lines: Any, source: Any, weight: Any, shape: tuple[int, ...]) -> Any:
    """The sums of box_lines.py in NumPy, from the launch that the plan describes; every result is written once."""
    pieces = 3 if source.dtype == torch.float32 else 1
    stored = torch.float32 if pieces > 1 else torch.bfloat16
    result = torch.empty((shape[0], *shape[2:], shape[1]), dtype=stored).permute(0, -1, *range(1, len(shape) - 1))
    source = rows_of(source) if lines.copies.source else source
    rows = weight
    if lines.copies.weight:
        rows = lines.weight_rows(weight.to(DEVICE), torch.empty(lines.copies.weight // 4, device=DEVICE)).cpu()
    narrow = source.element_size() == 1
    launch = lines.write.describe(source, weight, rows, result, result)
    source_box, weight_box, *_ = launch.leading(source, weight, rows, result, result)
    v = {**dict(zip(lines.write.kernel.arg_names[10:], launch.scalars)), **launch.constants}
    is_input, patch, taps, axis = v["INPUT"], v["PATCH"], v["NT"], v["AXIS"]
    kernel, stride, dilation, pad, common = ([v[f"{letter}{a}"] for a in range(3)] for letter in "KTDPG")
    real_stride, columns = stride, v["COL"] * (math.prod(kernel) if patch else 1)
    if patch:
        kernel = stride = dilation = common = [1, 1, 1]
        pad = [0, 0, 0]
    box = (v["PN"], v["B0"], v["B1"], v["B2"])
    extents = (shape[0], *(1,) * (5 - len(shape)), *shape[2:], shape[1])
    out = np.full(extents, np.nan)
    parts: dict[int, Any] = {}
    depth = -(-v["RED"] // v["CB"])
    for item in range(v["items"]):
        tile, part = (item, 0) if item < v["whole"] else (v["whole"] + (item - v["whole"]) // v["PARTS"],
                                                          (item - v["whole"]) % v["PARTS"])
        rest, column = divmod(tile, -(-columns // v["BN"]))
        column *= v["BN"]
        count = math.prod(stride) if is_input else 1
        phase, rest = (rest % count + rest // count // v["turn"]) % count, rest // count
        start = [0, 0, 0, 0]
        for a, name in ((3, "boxes_2"), (2, "boxes_1"), (1, "boxes_0"), (0, "boxes_n")):
            rest, place = divmod(rest, v[name])
            start[a] = place * box[a]
        group = rest
        orders = (phase // (stride[2] * stride[1]), (phase // stride[2]) % stride[1], phase % stride[2])
        phases = [phase_of(*values, is_input) for values in zip(orders, kernel, stride, dilation, pad, common)]
        seen = source_box.shape[1:4]
        phases = [phases[a] if a == axis or kernel[a] + pad[a] <= 1 else
                  inside(phases[a], start[1 + a], seen[a], box[1 + a], stride[a], dilation[a], common[a], is_input)
                  for a in range(3)]
        outer = [1 if a == axis else phases[a][2] for a in range(3)]
        steps = math.prod(outer) * depth
        begin, end = (0, steps) if item < v["whole"] else (part * steps // v["PARTS"],
                                                           (part + 1) * steps // v["PARTS"])
        acc = np.zeros((v["BM"], v["BN"]))
        for step in range(begin, end):
            slot, c = step // depth, step % depth * v["CB"]
            m = [slot // (outer[2] * outer[1]), slot // outer[2] % outer[1], slot % outer[2]]
            lowest = [(taps - 1 if is_input else 0) if a == axis else m[a] for a in range(3)]
            at = [start[1 + a] + phases[a][3] - lowest[a] * (dilation[a] // common[a]) if is_input else
                  start[1 + a] * stride[a] + phases[a][3] + lowest[a] * dilation[a] for a in range(3)]
            box_rows = box_at(source_box, (start[0], *at, group * v["RED"] + c)).reshape(-1, v["CB"])
            assert box_rows.size * source.element_size() == v["SOURCE_BYTES"]
            held = np.zeros((8 * v["UNITS"], v["CB"]))
            held[:len(box_rows)] = box_rows
            if narrow and rows.element_size() == 2:
                held = held.reshape(len(held), -1, 16)[:, :, SHUFFLED].reshape(held.shape)
            for t in range(taps):
                now = [t if a == axis else m[a] for a in range(3)]
                tap = [phases[a][1] + now[a] * (stride[a] // common[a] if is_input else 1) for a in range(3)]
                flat = (tap[0] * kernel[1] + tap[1]) * kernel[2] + tap[2]
                line = 8 * v["LINE_UNITS"] * (taps - 1 - t if is_input else t)
                a_rows = held[line:line + v["BM"]]
                fp8 = rows.element_size() == 1
                at_weight = (group * v["WEIGHT_RED"] + c, flat * v["WEIGHT_COL"] + column) \
                    if is_input and not fp8 else (group * v["COL"] + column, flat * v["WEIGHT_RED"] + c)
                b = box_at(weight_box, at_weight[::-1] if v["TURNED"] else at_weight)
                for piece in range(1, pieces):
                    b += box_at(weight_box, (at_weight[0] + piece * v["PIECE_ROWS"], at_weight[1]))
                acc += a_rows @ (b.T if is_input == v["TURNED"] or fp8 else b)
        if item >= v["whole"]:
            parts[tile] = parts.get(tile, 0) + acc
            if part + 1 < v["PARTS"]:
                continue
            acc = parts[tile]
        for row in range(math.prod(box)):
            n, j = start[0] + row // (box[1] * box[2] * box[3]), [
                start[1] + row // (box[2] * box[3]) % box[1], start[2] + row // box[3] % box[2],
                start[3] + row % box[3]]
            for i in range(min(v["BN"], columns - column)):
                to, channel = [j[a] * real_stride[a] + phases[a][0] if is_input else j[a] for a in range(3)], \
                    group * v["COL"] + column + i
                if patch:
                    line, beside = divmod(column + i, real_stride[2] * v["COL"])
                    to = [to[0] + line // real_stride[1], to[1] + line % real_stride[1], to[2] + beside // v["COL"]]
                    channel = beside % v["COL"]
                if n < extents[0] and all(place < extent for place, extent in zip(to, extents[1:4])):
                    assert np.isnan(out[(n, *to, channel)])
                    out[(n, *to, channel)] = acc[row, i]
    return out


@needs_triton
@pytest.mark.parametrize(("products", "text"), [
    (products, text) for products in PRODUCTS for text in (GEOMETRIES[::2] if products == "f32" else GEOMETRIES)
    if products == "bf16" or "c136" not in text])  # which takes long
@pytest.mark.parametrize("routine", ["conv", "input_grad"])
def test_tiles_sum_every_product_once(products: str, routine: str, text: str) -> None:
    from convgrad.backends.triton import box_line_plans, box_line_tiles
    from convgrad.backends.triton.geometry import geometry
    from convgrad.backends.triton.gpu import H200

    dtype, *mode = products.split()
    problem, operands, expected = integers_and_result(" ".join((routine, dtype, text, *mode)))
    geo = geometry(problem.conv)
    if box_line_plans.supports(problem, geo) is not None:
        red = geo.group_out if routine == "input_grad" else geo.group_in
        patch = geo.kernel == geo.stride and max(geo.kernel) > 1
        short = red % 8 or geo.group_in % 8 if dtype == "f32" else red % 16 or patch
        assert (routine == "conv" and geo.group_in < 16) or (dtype != "bf16" and short)
        return
    stored = {"bf16": torch.bfloat16, "f32": torch.float32, "e4m3": torch.float8_e4m3fn,
              "e5m2": torch.float8_e5m2}[dtype.split(">")[0]]
    source, weight = (channels_last(operand).to(stored) for operand in operands)
    if problem.weight_layout.endswith("IO"):
        around = (*range(2, weight.dim()), 1, 0)
        weight = weight.permute(around).contiguous().permute(*(around.index(axis) for axis in range(weight.dim())))
    if dtype == "f32":
        weight, expected = weight * IN_PARTS, expected * IN_PARTS
    tiles: dict[Any, Any] = {}
    for tile in box_line_tiles.all_tiles(box_line_tiles.work_of(problem, geo), None, H200):
        tiles.setdefault((tile.BM == 64, tile.NT > 1 and tile.axis, tile.parts > 1, tile.CB), tile)
    for tile in list(tiles.values())[::max(1, len(tiles) // 4)]:
        got = walk(box_line_plans.box_lines(problem, geo, tile, H200), source, weight, expected.shape)
        got = got.transpose(0, 4, 1, 2, 3).reshape(expected.shape)
        assert np.array_equal(got, expected), str(tile)


@needs_triton
@pytest.mark.parametrize("shape", [(3, 22, 5), (2, 150, 3, 4), (2, 16, 2, 3, 2)])
def test_padded_copies(shape: tuple[int, ...]) -> None:
    from convgrad.backends.triton.padding import padded, up8

    tensor = torch.randint(-9, 9, shape, device=DEVICE).bfloat16()
    memory = torch.full((math.prod(shape) // shape[1] * up8(shape[1]) // 2,), float("nan"), device=DEVICE)
    assert torch.equal(padded(tensor, memory, torch.bfloat16), rows_of(tensor))


@needs_gpu
@pytest.mark.parametrize("text", GEOMETRIES)
@pytest.mark.parametrize("routine", ["conv", "input_grad"])
def test_on_a_gpu(routine: str, text: str) -> None:
    check_exact(f"{routine} bf16 {text}", "triton")
    check_bound(f"{routine} f16 {text}", "triton")
    check_bound(f"{routine} e4m3>bf16 {text}", "triton")
    check_bound(f"{routine} e5m2>f32 {text}", "triton", positive=True)
    check_exact(f"{routine} e4m3>f32 {text} fp8", "triton")
    check_bound(f"{routine} e4m3>bf16 {text} fp8", "triton")
    check_bound(f"{routine} e5m2>f32 {text} fp8", "triton", positive=True)
    check_nonfinite(f"{routine} e4m3>f32 {text} fp8", "triton")
    check_nonfinite(f"{routine} e5m2>f32 {text}", "triton")
    check_nonfinite(f"{routine} bf16 {text}", "triton")
    check_exact(f"{routine} f32 {text}", "triton")
    check_bound(f"{routine} f32 {text}", "triton")
    check_bound(f"{routine} f32 {text}", "triton", positive=True)
    check_nonfinite(f"{routine} f32 {text}", "triton")


@needs_gpu
@pytest.mark.parametrize("text", GEOMETRIES)
@pytest.mark.parametrize("routine", ["conv", "input_grad"])
def test_agrees_with_its_plain_twin(routine: str, text: str) -> None:
    from convgrad.backends.triton.candidates import candidates
    from convgrad.backends.triton.plans import make_plan
    from convgrad.backends.triton.registry import empty_tensor

    problem = Problem.parse(f"{routine} bf16 {text} cuda")
    twin = make_plan(problem, None, {"kernel": "plain"})
    generator = torch.Generator(device="cuda").manual_seed(5)
    operands = []
    for name in problem.operands:
        shape = problem.shape_of_operand(name)
        operands.append(empty_tensor(problem, name, problem.dtype, "cuda"))
        operands[-1].copy_(torch.randint(-3, 4, shape, device="cuda", generator=generator))
    shape = problem.conv.shape_of(problem.wrt)
    wanted = torch.empty((shape[0], *shape[2:], shape[1]), device="cuda", dtype=torch.bfloat16).permute(
        0, -1, *range(1, len(shape) - 1))
    twin.run(tuple(operands), (wanted,), None)
    for entry in [entry for entry in candidates(problem) if entry["kernel"] == "box_lines"][:4]:
        got = torch.full_like(wanted, float("nan"))
        make_plan(problem, None, entry).run(tuple(operands), (got,), None)
        assert torch.equal(got, wanted), entry
