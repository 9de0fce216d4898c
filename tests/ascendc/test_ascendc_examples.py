"""Two worked examples with the tiles of the documentation's library: pieces, Iterate calls, offsets, traffic."""

from __future__ import annotations

import numpy as np
import pytest

import convgrad
from convgrad import ascendc


def published() -> ascendc.TConv3DBackpropInputTiling:
    """W 256x128x3x3x3, dX 1x128x11x128x128, dY 1x256x9x128x128, height and width padded by 1, half."""
    host = ascendc.describe((1, 256, 9, 128, 128), (256, 128, 3, 3, 3), ascendc.half, input_size=(11, 128, 128),
                            padding=(0, 1, 1))
    return ascendc.find_tiling(host).with_(baseM=256, baseK=48, baseN=128, stepKa=21, stepKb=3, al1Pbuffer=2,
                                           bl1Pbuffer=2, singleCoreM=16384)


def strided() -> ascendc.TConv3DBackpropInputTiling:
    """W 15x17x2x2x2, dX 1x17x20x60x60, dY 1x15x10x30x30, stride 2, bfloat16."""
    host = ascendc.describe((1, 15, 10, 30, 30), (15, 17, 2, 2, 2), ascendc.bfloat16_t, input_size=(20, 60, 60),
                            stride=2)
    return ascendc.find_tiling(host).with_(baseM=256, baseK=64, baseN=32, stepKa=1, stepKb=1, al1Pbuffer=2,
                                           bl1Pbuffer=2, singleCoreM=3600)


def test_published_pieces_and_arguments() -> None:
    t = published()
    t.validate()
    pieces = ascendc.split_pieces(t)
    assert len(pieces) == 11
    for d, piece in enumerate(pieces):
        assert (piece.singleShapeM, piece.singleShapeK, piece.singleShapeN) == (16384, 6912, 128)
        assert (piece.d, piece.curHoStartIdx) == (d, -1)
        assert (piece.offsetA, piece.offsetB, piece.offsetC) == (0, 0, 0)


def test_published_blocks() -> None:
    t = published()
    valid = []
    for d, piece in enumerate(ascendc.split_pieces(t)):
        blocks = list(piece.walk(t).blocks())
        assert len(blocks) == 64
        valid.append(len(blocks[0].kernel_depths))
        for i, block in enumerate(blocks):
            assert (block.first, block.last, block.channels, block.depth) == ((2 * i, 0), (2 * i + 1, 127), (0, 127), d)
            assert block.stretched_rows == (max(2 * i - 1, 0), min(2 * i + 2, 127))
            assert block.offset == (256 * i + d * 131072) * 16
            assert (block.runs, block.run_length, block.run_stride) == (8, 4096, 262144)
            assert block.products == 48 * valid[-1]
            assert (block.loads_a, block.loads_b) == (3 * valid[-1], 16 * valid[-1])
    assert valid == [1, 2, 3, 3, 3, 3, 3, 3, 3, 2, 1]


def test_published_loads_of_one_block() -> None:
    t = published()
    walk = ascendc.split_pieces(t)[2].walk(t)
    loads = walk.block((5, 0), 5, with_loads=True).loads
    first = [load for load in loads if load.queue == "A" and load.kernel_depth == 0]
    assert [load.slices for load in first] == [21, 21, 6]  # 7, 7 and 2 groups of 144
    assert [load.bytes for load in first] == [groups * 16 * 4 * 128 * 2 for groups in (7, 7, 2)]
    assert [load.buffer for load in first] == ["ping", "pong", "ping"]
    weights = [load for load in loads if load.queue == "B"]
    assert len(weights) == 48 and {load.bytes for load in weights} == {144 * 128 * 2}


def test_published_memory_and_traffic() -> None:
    t = published()
    assert t.memory_use() == {"L0A": 24576, "L0B": 12288, "L0C": 131072, "L1A": 229376, "L1B": 73728}
    assert t.memory_size() == {"L0A": 32768, "L0B": 32768, "L0C": 131072, "L1": 524160}
    traffic = ascendc.estimate(t)
    assert traffic.bytes_a == 449_445_888
    assert traffic.bytes_b == 1_019_215_872
    assert traffic.reread_b == 576.0
    assert traffic.bytes_c == 46_137_344
    assert traffic.flop == 260_919_263_232
    assert (traffic.pieces, traffic.blocks, traffic.passes) == (11, 704, 27 * 64)


def test_published_on_24_cores() -> None:
    t = published().with_(singleCoreM=256)
    pieces = ascendc.split_pieces(t, 24)
    assert len(pieces) == 704
    assert {len(piece.walk(t)) for piece in pieces} == {1}
    shares = np.bincount([piece.core for piece in pieces])
    assert shares.tolist() == [30] * 8 + [29] * 16  # the first 704 % 24 cores take one more
    assert [piece.core for piece in pieces] == sorted(piece.core for piece in pieces)


def test_our_tile_moves_fewer_bytes_than_the_published_one() -> None:
    host = ascendc.describe((1, 256, 9, 128, 128), (256, 128, 3, 3, 3), ascendc.half, input_size=(11, 128, 128),
                            padding=(0, 1, 1))
    ours, theirs = ascendc.estimate(ascendc.find_tiling(host)), ascendc.estimate(published())
    assert ours.bytes_a + ours.bytes_b < 0.85 * (theirs.bytes_a + theirs.bytes_b)


def test_one_depth_of_the_published_problem_is_right() -> None:
    """A slab of the large example in its full width and channels: three dY depths give the depth 4 of dX."""
    rng, t, d = np.random.default_rng(0), published(), 4
    dy = np.zeros((1, 256, 9, 128, 128), np.float16)
    dy[:, :, d - 2:d + 1] = rng.choice(np.array([-1, 0, 0, 1], np.float16), (1, 256, 3, 128, 128))
    w = rng.choice(np.array([-1, 0, 0, 1], np.float16), (256, 128, 3, 3, 3))
    op = ascendc.Conv3DBackpropInput(*ascendc.conv_types(ascendc.half))
    grad_output = ascendc.GlobalTensor(ascendc.pack_ndc1hwc0(dy))
    weight = ascendc.GlobalTensor(ascendc.pack_fractal_z_3d(w))
    memory = np.full((1, 11, 8, 128, 128, 16), np.nan, np.float16)
    output = ascendc.GlobalTensor(memory)
    op.Init(t)
    op.SetSingleShape(16384, 6912, 128)
    op.SetStartPosition(d, -1)
    op.SetGradOutput(grad_output[0])
    op.SetWeight(weight[0])
    calls = 0
    while op.Iterate():
        op.GetTensorC(output[0])
        calls += 1
    op.ctx.isFirstIter_ = True
    op.End()
    assert calls == 64
    shown = [0, 15, 16, 77, 127]  # the reference is slow: some channels, one kernel depth at a time
    exact = sum(convgrad.input_grad(dy[:, :, d - kd], w[:, shown, kd], (128, 128), padding=1, backend="reference")
                for kd in range(3))
    assert np.array_equal(ascendc.unpack_ndc1hwc0(memory, 128)[:, shown, d], exact)
    assert np.isnan(memory[:, :d]).all() and np.isnan(memory[:, d + 1:]).all()
    # What was really read and written is what the estimate says for three kernel depths.
    assert grad_output.buffer.bytes_read == 254 * 3 * 128 * 256 * 2
    assert weight.buffer.bytes_read == 64 * 3 * 2304 * 128 * 2
    assert output.buffer.bytes_written == 128 * 128 * 128 * 2


def test_the_published_problem_runs_in_less_than_a_minute() -> None:
    assert ascendc.model_seconds(published()) < 60


def test_strided_pieces_and_block_table() -> None:
    t = strided()
    t.validate()
    assert (t.backpropPadUp, t.backpropPadDown, t.backpropPadLeft, t.backpropPadRight, t.backpropPadTail) == (1,) * 5
    pieces = ascendc.split_pieces(t)
    assert len(pieces) == 20
    for d, piece in enumerate(pieces):
        assert (piece.singleShapeM, piece.singleShapeK, piece.singleShapeN) == (3600, 128, 17)
        walk = piece.walk(t)
        assert (walk.shape.m_iter, walk.shape.n_iter, walk.shape.k_iter) == (15, 1, 1)
        assert [kd for kd, _ in walk.kernel_depths] == [d % 2]
    blocks = list(pieces[0].walk(t).blocks())
    table = {block.iterate: (block.first_pixel, block.first_pixel + block.pixels - 1, block.first, block.last,
                             block.start_row, block.pixels) for block in blocks}
    assert table[0] == (0, 255, (0, 0), (4, 15), -1, 256)
    assert table[1] == (256, 511, (4, 16), (8, 31), 3, 256)
    assert table[2] == (512, 767, (8, 32), (12, 47), 7, 256)
    assert table[3] == (768, 1023, (12, 48), (17, 3), 11, 256)
    assert table[14] == (3584, 3599, (59, 44), (59, 59), 58, 16)
    assert len(table) == 15


@pytest.mark.parametrize("cores", [1, 6])
def test_strided_example_is_right(cores: int) -> None:
    rng = np.random.default_rng(1)
    dy = rng.integers(-2, 3, (1, 15, 10, 30, 30)).astype(ascendc.bfloat16_t)
    w = rng.integers(-2, 3, (15, 17, 2, 2, 2)).astype(ascendc.bfloat16_t)
    trace: list[ascendc.Block] = []
    got = ascendc.run(dy, w, input_size=(20, 60, 60), stride=2, tiling=strided(), cores=cores, trace=trace)
    assert got.tobytes() == convgrad.input_grad(dy, w, (20, 60, 60), stride=2, backend="reference").tobytes()
    assert len(trace) == 300


def test_every_element_belongs_to_one_piece() -> None:
    t = strided().with_(baseN=16, singleCoreM=7 * 60)
    seen = np.zeros((t.batch, t.di, t.cin1, t.hi), int)
    for piece in ascendc.split_pieces(t, 7):
        groups = -(-piece.cin // 16)
        seen[piece.n, piece.d, piece.cin1_0:piece.cin1_0 + groups, piece.row0:piece.row0 + piece.rows] += 1
    assert (seen == 1).all()


def test_rows_that_no_output_reaches_are_left_out_of_the_last_piece() -> None:
    """Kernel 2, stride 3: two outputs reach the rows 0, 1, 3 and 4 of seven."""
    host = ascendc.describe((1, 16, 1, 2, 4), (16, 16, 1, 2, 1), ascendc.half, input_size=(1, 7, 4), stride=(1, 3, 1))
    t = ascendc.find_tiling(host)
    assert (t.initOutputFlag, t.unreached_rows) == (1, 2)
    assert [(piece.row0, piece.rows) for piece in ascendc.split_pieces(t)] == [(0, 5)]
