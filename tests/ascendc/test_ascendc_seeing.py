"""Traces, traffic, pictures, the C++ text and the command."""

from __future__ import annotations

import itertools
import json
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from ascendc_problems import random_case, small_tile

from convgrad import ascendc
from convgrad.cli import main
from convgrad.frontends.ascendc.drawing import Drawing, Rectangle, Text
from convgrad.frontends.ascendc.font import glyphs
from convgrad.frontends.ascendc.picture import UNWRITTEN, core_colour, shade


def tiling_of(cores: int = 1) -> ascendc.TConv3DBackpropInputTiling:
    host = ascendc.describe((2, 15, 2, 6, 7), (15, 40, 2, 3, 2), ascendc.half, input_size=(4, 13, 14), stride=2,
                            padding=(0, (1, 0), 0))
    return ascendc.find_tiling(host, cores)


def png_pixels(data: bytes) -> np.ndarray:
    """Decode our own PNG files: RGB, filter 0."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, chunks = 8, {}
    while place < len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        body = data[place + 8:place + 8 + length]
        assert struct.unpack_from(">I", data, place + 8 + length)[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        place += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height = struct.unpack_from(">II", chunks[b"IHDR"])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_counted_bytes_equal_the_estimate(seed: int) -> None:
    """What the run reads and writes, what the trace says and what the estimate says are the same numbers."""
    case = random_case(seed)
    t = case.tiling()
    grad_output = ascendc.GlobalTensor(np.zeros(t.batch * t.grad_output_sample, t.element_type))
    weight = ascendc.GlobalTensor(np.zeros(t.weight_size, t.element_type))
    output = ascendc.GlobalTensor(np.zeros(t.batch * t.output_sample, t.element_type))
    trace: list[ascendc.Block] = []
    with ascendc.Conv3DBackpropInput(*ascendc.conv_types(t.element_type), allow_undocumented=True, trace=trace) as op:
        op.Init(t)
        for piece in ascendc.split_pieces(t, case.cores):
            if not piece.skipped:
                op.SetSingleShape(piece.singleShapeM, piece.singleShapeK, piece.singleShapeN)
                op.SetStartPosition(piece.d, piece.curHoStartIdx)
                op.SetGradOutput(grad_output[piece.offsetA])
                op.SetWeight(weight[piece.offsetB])
                op.IterateAll(output[piece.offsetC])
    traffic = ascendc.estimate(t, case.cores)
    assert grad_output.buffer.bytes_read == traffic.bytes_a == sum(block.bytes_a for block in trace)
    assert weight.buffer.bytes_read == traffic.bytes_b == sum(block.bytes_b for block in trace)
    assert output.buffer.bytes_written == traffic.bytes_c
    assert len(trace) == traffic.blocks
    assert sum(block.products for block in trace) == traffic.products


def test_trace_as_table_and_json_lines() -> None:
    t = small_tile(tiling_of())
    blocks = [block for piece in ascendc.split_pieces(t, 3) for block in piece.walk(t).blocks(piece.core)]
    lines = ascendc.to_json_lines(blocks).splitlines()
    assert len(lines) == len(blocks)
    first = json.loads(lines[0])
    assert first["first"] == [0, 0] and first["start_row"] == -1 and first["skipped"] is False
    assert {"bytes_a", "bytes_b", "kernel_depths", "dy_rows", "offset", "channels", "depth"} <= set(first)
    text = ascendc.to_text(blocks, limit=4)
    assert "curHo" in text and "L1 A bytes" in text and f"{len(blocks) - 4} more blocks" in text
    assert "(0,0)..(1,1)" in text.splitlines()[1]
    assert len(ascendc.to_text(blocks).splitlines()) == len(blocks) + 1


def test_skipped_blocks_say_so() -> None:
    """Stride 6 over a kernel of 1: most rows hold no dY, their blocks are neither computed nor written."""
    t = ascendc.find_tiling(ascendc.describe((1, 16, 1, 2, 16), (16, 16, 1, 1, 1), ascendc.half, input_size=(1, 8, 16),
                                             stride=(1, 6, 1))).with_(baseM=16, singleCoreM=128)
    blocks = list(ascendc.split_pieces(t)[0].walk(t).blocks())
    assert [block.skipped for block in blocks] == [False, True, True, True, True, True, False]
    assert "nothing" in ascendc.to_text(blocks).splitlines()[2]


def test_picture_shows_blocks_by_core() -> None:
    t = small_tile(tiling_of()).with_(singleCoreM=4 * 14, baseN=16)
    drawing = ascendc.draw(t, 3, sample=1, depth=2)
    blocks = [block for piece in ascendc.split_pieces(t, 3) if (piece.n, piece.d, piece.cin1_0) == (1, 2, 0)
              for block in piece.walk(t).blocks(piece.core)]
    assert len({block.core for block in blocks}) > 1
    plane = [shape for shape in drawing.shapes if isinstance(shape, Rectangle) and shape.title.startswith("core ")]
    # Every pixel of the plane is painted once by the block it belongs to.
    cell = drawing_cell(drawing)
    painted = np.full((t.hi, t.wi), -1)
    for shape in plane:
        if shape.fill is None:
            continue
        core = int(shape.title.split(",")[0].removeprefix("core "))
        assert shape.fill in (core_colour(core), shade(core_colour(core), 0.86))
        rows = slice(round((shape.y - cell.y) / cell.height), round((shape.y + shape.height - cell.y) / cell.height))
        columns = slice(round((shape.x - cell.x) / cell.width), round((shape.x + shape.width - cell.x) / cell.width))
        assert (painted[rows, columns] == -1).all()
        painted[rows, columns] = core
    expected = np.full(t.hi * t.wi, -1)
    for block in blocks:
        start = block.first[0] * t.wi + block.first[1]
        expected[start:start + block.pixels] = block.core
    assert np.array_equal(painted.reshape(-1), expected)
    titles = {shape.title for shape in drawing.shapes if isinstance(shape, Rectangle)}
    assert {"padding", "inserted zero rows", "inserted zero columns", "dY"} <= titles
    words = " ".join(shape.text for shape in drawing.shapes if isinstance(shape, Text))
    for word in ("L0A", "L0B", "L0C", "L1", "GM -> L1", "core 0"):
        assert word in words


def drawing_cell(drawing: Drawing) -> Rectangle:
    """The top left cell of the dX plane, from the background that is drawn first."""
    background = next(shape for shape in drawing.shapes if isinstance(shape, Rectangle) and shape.fill == UNWRITTEN)
    return background._replace(width=background.width / 14, height=background.height / 13)


def test_svg_is_well_formed_and_png_has_its_size() -> None:
    drawing = ascendc.draw(tiling_of(5), 5)
    root = ElementTree.fromstring(drawing.to_svg())
    assert root.tag.endswith("svg") and float(root.attrib["width"]) == pytest.approx(drawing.width, rel=1e-4)
    assert len(list(root)) > 20
    pixels = png_pixels(drawing.to_png(zoom=1))
    assert pixels.shape[:2] == (round(drawing.height), round(drawing.width))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 8


def test_painting() -> None:
    drawing = Drawing(20, 12, [Rectangle(1, 1, 4, 3, (10, 20, 30)), Rectangle(6, 1, 4, 4, None, (9, 9, 9)),
                               Text(12, 2, "1", colour=(1, 2, 3))])
    pixels = png_pixels(drawing.to_png(zoom=1))
    assert (pixels[1:4, 1:5] == (10, 20, 30)).all() and (pixels[4, 1:5] == 255).all()
    assert (pixels[1, 6:10] == 9).all() and (pixels[2:4, 7:9] == 255).all()
    assert np.array_equal((pixels[2:11, 12:17] == (1, 2, 3)).all(axis=2), glyphs()["1"])
    unknown = png_pixels(Drawing(9, 9, [Text(0, 0, "\u00e9")]).to_png(zoom=1))
    assert (unknown[:9, :5] != 255).all()


def test_font_has_every_letter_and_no_twins() -> None:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 .,:;-+*/=()[]<>%_'|#"
    assert set(glyphs()) == set(letters)
    for one, other in itertools.combinations(letters, 2):
        assert not np.array_equal(glyphs()[one], glyphs()[other]), (one, other)


def test_picture_refuses_planes_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="sample=2, depth=0: dX has 2 samples and 4 depths"):
        ascendc.draw(tiling_of(), sample=2)


def test_cpp_text_holds_the_numbers_of_the_problem() -> None:
    text = ascendc.to_cpp_stub(tiling_of(), 2)
    t = tiling_of()
    assert f"SetSingleShape(rows * 14, {t.full_k}, channels);  // M, K, N" in text
    assert "startRow = row0 - 1;" in text and "ctx.isFirstIter_ = true" in text
    assert text.index("Init(") < text.index("SetSingleShape") < text.index("Iterate") < text.index("End()")
    assert text.count("{") == text.count("}")


def call(*words: str) -> int:
    return main(["ascendc", *words])


PROBLEM = "input_grad bf16 n1 c17 k15 i4x12x14 w2x2x2 s2x2x2"


def test_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, image, lines = tmp_path / "a.svg", tmp_path / "a.png", tmp_path / "a.jsonl"
    assert call(PROBLEM, "--cores", "3", "--svg", str(svg), "--png", str(image), "--json", str(lines), "--cpp", "--run",
                "--set", "baseM=32", "--depth", "1") == 0
    out = capsys.readouterr().out
    assert "baseM=32" in out and "blocks of sample 0, depth 1" in out and "gradInput_.Init" in out
    assert "every block agrees with the plain gradient" in out
    ElementTree.fromstring(svg.read_text())
    assert png_pixels(image.read_bytes()).size
    assert len(lines.read_text().splitlines()) == 4 * 6


@pytest.mark.parametrize(("words", "code", "reason"), [
    (["input_grad f16 n1 c8 k8 i9x9 w3x3 p4x4"], 3, "padUp=4 is larger than 2"),
    (["input_grad f16 n1 c8 k8 i9x9 w3x3 g2"], 3, "groups=2: Conv3DBackpropInput takes one group"),
    (["weight_grad f16 n1 c8 k8 i9x9 w3x3 g2"], 3, "groups=2: Conv3DBackpropFilter takes one group"),
    (["weight_grad f16 n1 c8 k8 i9x9 w3x3", "--product", "Ascend950"], 3, "the API does not exist on Ascend950"),
    (["weight_grad f16 n1 c8 k8 i9x9 w3x3", "--json", "a.json", "--ncdhw"], 2, "--json, --ncdhw: for input_grad only"),
    ([PROBLEM, "--svg", "no/such/folder/a.svg"], 2, "No such file or directory: 'no/such/folder/a.svg'"),
    ([PROBLEM, "--set", "to_bytes=1"], 2, "--set to_bytes=1: expected FIELD=NUMBER"),
    (["bias_grad f16 n1 c8 k8 i9x9 w3x3"], 3, "computes input_grad and weight_grad, not 'bias'"),
    ([PROBLEM, "--product", "Ascend950"], 3, "the API does not exist on Ascend950"),
    ([PROBLEM, "--product", "Ascend310"], 2, "product 'Ascend310' is none of Ascend910B"),
    ([PROBLEM, "--set", "baseM=20"], 2, "baseM=20 is not a multiple of 16"),
    ([PROBLEM, "--set", "baseQ=20"], 2, "--set baseQ=20: expected FIELD=NUMBER"),
    ([PROBLEM, "--depth", "9"], 2, "--depth 9: dX has the depths 0..3"),
])
def test_command_refuses_with_a_reason(words: Sequence[str], code: int, reason: str,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == code
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("words", [["input_grad f16 n1"], [PROBLEM, "--cores", "0"]])
def test_command_refuses_bad_arguments(words: Sequence[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        call(*words)
    assert stopped.value.code == 2


def test_command_takes_two_axes_and_weight_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("input_grad f16 n1 c8 k8 i9x9 w3x3") == 0
    assert call("weight_grad f16 n1 c8 k8 i9x9 w3x3", "--cores", "4") == 0
    assert "pieces    4 on 4 core(s)" in capsys.readouterr().out


def test_the_command_runs_draws_and_prints_the_weight_gradient(tmp_path, capsys) -> None:
    from convgrad.cli import main

    picture = tmp_path / "filter.svg"
    problem = "weight_grad f16 n2 c17 k20 i3x6x7 w2x2x3 s1x2x1 p0x1x1"
    assert main(["ascendc", problem, "--cores", "3", "--run", "--cpp", "--svg", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "every block agrees with the plain gradient" in out and "Conv3DBackpropFilter<" in out
    assert "Conv3DBackpropFilter" in picture.read_text()


def test_the_command_says_that_float32_is_not_documented(capsys) -> None:
    from convgrad.cli import main

    assert main(["ascendc", "input_grad f32 n1 c9 k8 i1x4x4 w1x1x1", "--run", "--ncdhw", "--cpp", "--cpp-host"]) == 0
    shown = capsys.readouterr()
    assert "float32 is not documented" in shown.err
    assert "every block agrees" in shown.out and "host.GetTiling(tilingData)" in shown.out
    assert "ConvFormat::NCDHW, float" in shown.out


def test_pictures_show_no_padded_channels() -> None:
    tiling = ascendc.find_tiling(ascendc.describe((1, 3, 1, 4, 4), (3, 5, 1, 1, 1), ascendc.half, input_size=(1, 4, 4)))
    assert "channels 0..4" in ascendc.draw(tiling).to_svg()
