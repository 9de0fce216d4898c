"""The weight gradient of the Triton backend: the walk over lines, plain kernels in the interpreter, all on a GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracle import as_problem, check_bound, check_exact, check_nonfinite
from triton_here import (
    ON_GPU,
    channels_last,
    integers_and_result,
    integers_on_gpu,
    needs_gpu,
    needs_interpreter,
    needs_triton,
    torch,
)

from convgrad import Problem, plan
from convgrad.plan import clear_plan_cache

GEOMETRIES = (
    "n3 c16 k24 i5x6 w3x3 p1x1 NHWC OHWI",
    "n2 c16 k16 i7x8 w3x3 s2x2 p1:0x0:1 NHWC OHWI",
    "n2 c16 k16 i4x5x6 w3x2x3 p1x0x1 NDHWC ODHWI",
    "n5 c24 k16 i17 w3 d4 p8:0 NLC OLI",
    "n2 c16 k16 i9x9 w1x1 s2x2 NHWC OHWI",
    "n1 c16 k16 i9x10 w4x4 s2x2 p1x1 NHWC OHWI",
    "n2 c64 k64 i6x7 w3x3 p3x3 d3x2 g2 NHWC OHWI",
    "n4 c4 k16 i8x12 w2x4 s2x4 NHWC OHWI",
    "n9 c2 k16 i2x4x4 w2x4x4 s2x4x4 NDHWC ODHWI",
    "n2 c16 k32 i67 w16 s8 p4 NLC OLI",
    "n3 c16 k16 i40 w3 s9 d2 NLC OLI",
    "n3 c50 k44 i9x8 w3x3 p1x1 NHWC OHWI",
    "n5 c34 k150 i40 w3 d4 p8:0 NLC OLI",
    "n6 c72 k136 i9 w3 p1 TBC LIO",
)


def box_at(described: Any, start: tuple[int, ...]) -> Any:
    """What the copy engine brings: a box of a tensor as rows of channels, zeros outside."""
    # what it can do: of a row, as much as it turns around in shared memory
    assert max(described.span) <= 256 and max(described.steps) <= 8 and 2 * described.box[-1] <= 128
    assert start[-1] % 8 == 0, "it reads from multiples of 16 bytes"
    tensor = described.base.as_strided(described.shape, described.strides).float().numpy()
    size_of_box = (*described.box[:-1], described.block_shape[-1])
    out = np.zeros(size_of_box)
    inner = [(-(min(0, first) // step), min(size, -((first - extent) // step)))
             for first, size, step, extent in zip(start, size_of_box, described.steps, tensor.shape)]
    if all(low < high for low, high in inner):
        out[tuple(slice(low, high) for low, high in inner)] = tensor[tuple(
            slice(first + low * step, first + (high - 1) * step + 1, step)
            for first, step, (low, high) in zip(start, described.steps, inner))]
    return out.reshape(-1, out.shape[-1])


def walk(geo: Any, tile: Any, step: Any, dy: Any, x: Any, rows_of_bias: int) -> tuple[Any, Any]:
    """The sums of weight_lines.py in NumPy, from the launch that the plan describes: (O, I, three taps), and of dy."""
    shape = (geo.groups * geo.group_out, geo.group_in, *geo.kernel)
    launch = step.describe(dy, x, torch.empty((tile.splits, *shape)))
    names = step.kernel.arg_names[7:7 + len(launch.scalars)]
    v = {**dict(zip(names, launch.scalars)), **launch.constants}
    dy_box, x_box, _, _, _, _, table = launch.leading(dy, x, None)
    kernel, stride, dilation, pad, sizes = ([v[f"{letter}{a}"] for a in range(3)] for letter in "KTDPB")
    axis, taps, box = v["AXIS"], v["NT"], (v["PN"], *sizes)
    spacing = dilation[axis] if v["CHAIN"] and stride[axis] == 1 else 1
    result = np.zeros(shape)
    groups_of_taps = [range(0, kernel[a], taps if a == axis else 1) for a in range(3)]
    tiles = list(itertools.product(range(geo.groups), *groups_of_taps, range(0, geo.group_out, tile.BK),
                                   range(0, geo.group_in, tile.CB)))
    if v["PARTS"]:
        segments = [(number, part, None, None, 0) for part in range(v["PARTS"]) for number in range(len(tiles))]
    else:
        segments = table.reshape(-1, 5).tolist()
    assert len(segments) == launch.grid[0] * v["SEGMENTS"]
    bias = np.full((rows_of_bias, v["b_split"]), np.nan)
    shares = rows_of_bias // tile.splits
    written = set()
    for number, part, begin, end, fill in segments:
        assert v["FILL"] or fill == 0
        if part < 0:
            continue
        group, *tap, k, c = tiles[number]
        for one in range(part, part + 1 + fill):  # every part of every tile is written once
            assert one < tile.splits and (number, one) not in written
            written.add((number, one))
        offsets, boxes = inside(tap, v, box)
        if begin is None:  # found by the kernel itself
            count = v["length"] * v["spread"] * math.prod(boxes) * v["images"]
            run = -(-count // v["PARTS"])
            begin, end = min(part * run, count), min(part * run + run, count)
        reach = [tap[a] * dilation[a] - pad[a] for a in range(3)]
        share = [other for other in tiles if (other[0], other[4]) == (group, k)].index(tiles[number])
        for_bias = range(begin + share * (end - begin) // max(shares, 1),
                         begin + (share + 1) * (end - begin) // max(shares, 1))
        sums = np.zeros(tile.BK)
        for line in range(begin, end):
            rest, at = divmod(line, v["length"])
            rest, residue = divmod(rest, v["spread"])
            q = [0, 0, 0]
            for a in (2, 1, 0):
                rest, q[a] = divmod(rest, boxes[a])
                q[a] = (q[a] + offsets[a]) * box[1 + a]
            q[axis] += residue + at * spacing
            n = rest * box[0]
            a_line = box_at(dy_box, (n, *q, group * geo.group_out + k))
            sums += a_line.sum(0) if line in for_bias else 0
            for t in range(taps):
                ahead = t if not v["SHARED"] else 0
                i = [q[a] * stride[a] + reach[a] + (ahead * dilation[a] if a == axis else 0) for a in range(3)]
                b_line = box_at(x_box, (n, *i, group * geo.group_in + c))
                if v["SHARED"]:
                    first = t * dilation[1] * box[3]
                    assert first % 8 == 0 and len(b_line) == (box[2] + (taps - 1) * dilation[1]) * box[3]
                    b_line = b_line[first:first + math.prod(box)]
                here = tuple(tap[a] + (t if a == axis else 0) for a in range(3))
                if here[axis] < kernel[axis]:
                    rows, columns = min(tile.BK, geo.group_out - k), min(tile.CB, geo.group_in - c)
                    result[(slice(group * geo.group_out + k, group * geo.group_out + k + rows), slice(c, c + columns),
                            *here)] += (a_line.T @ b_line)[:rows, :columns]
        if rows_of_bias:
            last = min(k + tile.BK, geo.group_out)
            bias[part * shares + share, group * geo.group_out + k:group * geo.group_out + last] = sums[:last - k]
    assert written == set(itertools.product(range(len(tiles)), range(tile.splits)))
    return result, bias


def inside(tap: list[int], v: dict[str, Any], box: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """First box and number of boxes on each axis, as weight_lines.boxes_inside has them."""
    offsets, boxes = [0, 0, 0], [v[f"boxes_{a}"] for a in range(3)]
    for a in range(3):
        if v["CHAIN"] and a == v["AXIS"]:
            continue
        reach = tap[a] * v[f"D{a}"] - v[f"P{a}"]
        last = reach + (v["NT"] - 1) * v[f"D{a}"] * (a == v["AXIS"])
        low = -(-max(-last, 0) // v[f"T{a}"])
        high = min((v[f"X{a}"] - 1 - reach) // v[f"T{a}"] + 1, v[f"Q{a}"])
        offsets[a] = low // box[1 + a]
        boxes[a] = max(0, -(-high // box[1 + a]) - offsets[a])
    return offsets, boxes


@pytest.mark.parametrize("text", GEOMETRIES)
def test_lines_cover_every_product_once(text: str) -> None:
    from convgrad.backends.triton import line_plans, line_views
    from convgrad.backends.triton.geometry import geometry
    from convgrad.backends.triton.gpu import H200

    problem, operands, expected = integers_and_result(f"weight_grad bf16 {text}")
    geo = geometry(problem.conv)
    fold = line_views.folded_axes(problem, geo)
    seen = line_views.folded(geo, fold)
    assert line_plans.supports(problem, geo) is None
    dy, x = (channels_last(np.pad(a, [(0, 0), (0, 0 if fold else -a.shape[1] % 8), *[(0, 0)] * (a.ndim - 2)]))
             for a in operands)
    small = replace(H200, multiprocessors=5)  # so that these small problems are shared, too
    by_shape = {(t.BK, t.CB, t.NT, t.axis, t.chain, t.programs > 0, t.box): t
                for t in line_plans.all_lines(seen, None, small)}
    assert by_shape
    x = line_views.folded_view(x, geo, fold)
    for tile in list(by_shape.values())[::max(1, len(by_shape) // 4)]:
        tile = line_plans.settled(seen, tile)
        tile = line_plans.turned(seen, tile) if problem.weight_layout.endswith("O") else tile
        rows = line_plans.bias_rows(seen, tile)
        result, bias = walk(seen, tile, line_plans.line_weight(seen, tile), dy, x, rows)
        if rows:
            assert np.array_equal(bias.sum(0), operands[0].sum((0, *range(2, operands[0].ndim)))), str(tile)
        taps = (*seen.kernel[:3 - fold], *geo.kernel[3 - fold:])
        result = result.reshape(result.shape[0], -1, *seen.kernel)
        if fold:  # rows are (folded taps, channel)
            result = result.transpose(0, 2, 3, 4, 1).reshape(result.shape[0], *taps, geo.group_in)
            result = result.transpose(0, 4, 1, 2, 3)
        assert np.array_equal(result.reshape(expected.shape), expected), str(tile)


@pytest.mark.parametrize("text", [
    "n8 c96 k64 i19 w5 p2 g2 NLC OLI", "n5 c32 k40 i23 w3 d4 p8:0 NLC OLI", "n18 c64 k72 i9 w4 p3 NLC OLI"])
def test_taps_share_lines_across_images(text: str) -> None:
    from convgrad.backends.triton import line_plans, line_views
    from convgrad.backends.triton.geometry import geometry
    from convgrad.backends.triton.gpu import H200

    problem, operands, expected = integers_and_result(f"weight_grad bf16 {text}")
    geo = geometry(problem.conv)
    dy, x = (line_views.images_last_view(channels_last(operand)) for operand in operands)
    seen = line_views.images_last(geo)
    tiles = {(t.NT, t.box): t for t in line_plans.shared_lines(geo, None, H200)}
    assert tiles
    for tile in tiles.values():
        rows = line_plans.bias_rows(seen, tile)
        result, bias = walk(seen, tile, line_plans.line_weight(seen, tile), dy, x, rows)
        assert np.array_equal(result.reshape(expected.shape), expected), str(tile)
        assert not rows or np.array_equal(bias.sum(0), operands[0].sum((0, 2))), str(tile)


@needs_triton
@pytest.mark.parametrize("text", GEOMETRIES)
def test_weight_gradient(text: str) -> None:
    check_exact(f"weight_grad bf16 {text}", "triton")
    if ON_GPU:
        check_bound(f"weight_grad f16 {text}", "triton")
        check_nonfinite(f"weight_grad bf16 {text}", "triton")
        check_bound(f"weight_grad e4m3>f32 {text} fp8", "triton")
        check_nonfinite(f"weight_grad e5m2>f32 {text}", "triton")


@pytest.mark.parametrize(("text", "limit", "decoded"), [
    ("n256 c256 k256 i14x14 w3x3 p1x1 NHWC OHWI", None, True),
    ("n256 c256 k256 i14x14 w3x3 p1x1 NHWC OHWI", 48 << 20, False),
    ("n8 c256 k256 i200x336 w3x3 p1x1 NHWC OHWI", None, False),
])
def test_16_bit_copies_of_fp8_stay_within_the_workspace(text: str, limit: int | None, decoded: bool,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.backends.triton.gpu import H200, Planning
    from convgrad.backends.triton.plans import make_plan

    monkeypatch.setattr(Planning, "gpu", H200)
    chosen = make_plan(Problem.parse(f"weight_grad e4m3>f32 {text} cuda"), limit)
    assert chosen.kernel.startswith("decoded_lines" if decoded else "pieces_decoded_lines")
    assert chosen.workspace_bytes <= (limit or 64 << 20)


@needs_interpreter
@pytest.mark.parametrize("text", ["n5 c16 k32 i9x7 w3x3 p1x1 NHWC OHWI", "n2 c32 k16 i29 w5 s2 p2 NLC OLI",
                                  "n3 c16 k16 i8x5x4 w3x2x3 p1x1x1 d2x1x1 g1 NDHWC ODHWI"])
@pytest.mark.parametrize("share", [0.3, 2.2])
def test_fp8_in_pieces_of_rows_and_images(text: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a share of an image, or of two; the plain kernels stand for those that sum lines."""
    from convgrad.backends.triton import copied_plans, decoded_plans
    from convgrad.backends.triton.gpu import H200, Planning

    runs = []

    def plain(query: Any, part: Problem, room: int) -> Any:
        runs.append(part)
        whole = part.conv == query.problem.conv
        served = tuple(kernel for kernel in query.kernels if kernel.fallback and not whole)
        return replace(copied_plans.without_copies(query, part, room), kernels=served)

    problem = Problem.parse(f"weight_grad e4m3>bf16 {text}")
    image = 2 * sum(math.prod(problem.shape_of_operand(name)[1:]) for name in problem.operands)
    monkeypatch.setattr(decoded_plans, "FOR_COPIES", share * image / 2**26)
    monkeypatch.setattr(decoded_plans, "pointer_seconds", lambda query: math.inf)
    monkeypatch.setattr(decoded_plans, "without_copies", plain)
    monkeypatch.setattr(decoded_plans, "channels_last", lambda tensor: True)  # the interpreter needs no alignment
    monkeypatch.setattr(Planning, "gpu", H200)
    monkeypatch.setenv("CONVGRAD_GPU_WITHOUT", "lines,wide,groups,copied")
    clear_plan_cache()
    try:
        assert plan(as_problem(problem, "triton"), backend="triton").kernel.startswith("pieces_")
        assert check_exact(problem, "triton") and len(runs) > 1
        assert check_bound(problem, "triton", style="gaps")
    finally:
        clear_plan_cache()


@needs_gpu
@pytest.mark.parametrize("text", GEOMETRIES[:6])
def test_lines_agree_with_their_plain_twin(text: str) -> None:
    from convgrad.backends.triton.candidates import candidates
    from convgrad.backends.triton.plans import make_plan

    problem = Problem.parse(f"weight_grad bf16 {text} cuda")
    lines = make_plan(problem, None, next(entry for entry in candidates(problem) if entry["kernel"] == "lines"))
    twin = make_plan(problem, None, {"kernel": "plain"})
    assert lines.kernel.startswith("lines") and not twin.kernel.startswith("lines")
    operands = integers_on_gpu(problem)
    results = [torch.full(problem.conv.weight_shape, math.nan, device="cuda").bfloat16() for _ in range(2)]
    lines.run(operands, (results[0],), None)
    twin.run(operands, (results[1],), None)
    assert torch.equal(*results)


@needs_gpu
@pytest.mark.parametrize("text", GEOMETRIES[-3:])
def test_lines_are_chosen(text: str) -> None:
    from convgrad.backends.triton.plans import make_plan

    assert make_plan(Problem.parse(f"weight_grad bf16 {text} cuda"), None).kernel.startswith("lines")


def test_copies_of_ragged_channels_keep_within_the_workspace() -> None:
    from convgrad.backends.triton import line_plans
    from convgrad.backends.triton.gpu import H200
    from convgrad.backends.triton.kernel import best_tile
    from convgrad.backends.triton.registry import query_of

    problem = Problem.parse("weight_grad bf16 n64 c150 k152 i1000 w7 p384:0 d64 NLC OLI cuda")
    copy = 2 * 64 * 1000 * 152  # of x alone
    for limit in (None, 2 * copy, copy):
        query = query_of(problem, limit, H200)
        tile, _ = best_tile(line_plans.KERNEL, query, None)
        assert copy <= line_plans.build(query, tile).workspace_bytes <= (limit or 64 << 20)
    assert not list(line_plans.tiles(query_of(problem, copy - 1, H200)))


def test_turned_tiles_are_for_results_with_neighbouring_output_channels() -> None:
    from convgrad.backends.triton import line_plans
    from convgrad.backends.triton.gpu import H200
    from convgrad.backends.triton.kernel import best_tile
    from convgrad.backends.triton.registry import query_of

    for layout, turned in (("LIO", True), ("OLI", False)):
        problem = Problem.parse(f"weight_grad bf16 n80 c2048 k4096 i50 w1 TBC {layout} cuda")
        query = query_of(problem, gpu=H200)
        tile, _ = best_tile(line_plans.KERNEL, query, None)
        found = line_plans.line_plan(problem, query.geo, tile).tile
        assert found.splits == 1 and found.turned == turned


@needs_interpreter
@pytest.mark.parametrize("text", ["f32 n2 c4 k40 i6 w3 p1 NLC OLI", "f32 n2 c40 k4 i5x4 w2x2 p1x0",
                                  "bf16 n1 c8 k8 i3x4 w3x1 p1x0 g4"])
def test_tiles_with_a_nan_pixel_by_pixel(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; elsewhere the interpreter takes many pixels at once."""
    from convgrad.backends.triton import pointer_plans

    monkeypatch.setattr(pointer_plans, "BY_PIXEL", True)
    clear_plan_cache()
    try:
        assert check_nonfinite(f"weight_grad {text}", "triton")
    finally:
        clear_plan_cache()
