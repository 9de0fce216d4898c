"""The host side: setters, refusals with reasons, the structure and its bytes, and the tile search."""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from ascendc_problems import random_case

from convgrad import Unsupported, ascendc
from convgrad.frontends.ascendc import (
    Conv3DBackpropInputTilingData,
    Conv3DBpInputTiling,
    ConvDtype,
    ConvFormat,
    PlatformInfo,
    TConv3DBackpropInputTiling,
    TPosition,
)

PUBLISHED = {  # the documentation's shapes
    "weight": (256, 128, 3, 3, 3), "input": (1, 128, 11, 128, 128), "grad_output": (1, 256, 9, 128, 128),
    "padding": (0, 0, 1, 1, 1, 1)}


def described(weight: tuple[int, ...] = (20, 40, 2, 3, 3), input: tuple[int, ...] | None = (1, 40, 5, 9, 8),
              grad_output: tuple[int, ...] = (1, 20, 4, 9, 8), padding: tuple[int, ...] = (0, 0, 1, 1, 1, 1),
              stride: tuple[int, ...] = (1, 1, 1), dilation: tuple[int, ...] = (1, 1, 1),
              platform: PlatformInfo | None = None) -> Conv3DBpInputTiling:
    host = Conv3DBpInputTiling(platform)
    assert host.SetWeightShape(*weight)
    assert input is None or host.SetInputShape(*input)
    assert host.SetGradOutputShape(*grad_output)
    host.SetPadding(*padding)
    host.SetStride(*stride)
    host.SetDilation(*dilation)
    return host


def pads(t: TConv3DBackpropInputTiling) -> tuple[int, ...]:
    return t.backpropPadTail, t.backpropPadUp, t.backpropPadDown, t.backpropPadLeft, t.backpropPadRight


def test_get_tiling_fills_the_member_of_the_structure() -> None:
    data = Conv3DBackpropInputTilingData()
    host = described(**PUBLISHED)
    assert host.GetTiling(data) == 0
    assert host.explain() == ""
    t = data.conv3DDxTiling
    assert (t.batch, t.cin, t.cout, t.cin1, t.cout1, t.c0, t.c0Bits) == (1, 128, 256, 8, 16, 16, 4)
    assert (t.dout, t.ho, t.wo, t.di, t.hi, t.wi, t.dk, t.hk, t.wk) == (9, 128, 128, 11, 128, 128, 3, 3, 3)
    assert pads(t) == (2, 1, 1, 1, 1)
    assert (t.al0Pbuffer, t.bl0Pbuffer, t.cl0Pbuffer, t.stepM, t.stepN, t.iterateOrder) == (2, 2, 1, 1, 1, 1)
    assert (t.initOutputFlag, t.hf32Flag, t.singleCoreCout, t.singleCoreCout1) == (0, 0, 256, 16)
    assert t.singleCoreCin == t.baseN == t.singleCoreCin1 * 16
    alone = TConv3DBackpropInputTiling()
    assert host.GetTiling(alone) == 0
    assert alone == t


def test_the_structure_has_66_fields_in_280_bytes() -> None:
    assert len(fields(TConv3DBackpropInputTiling)) == 66
    t = TConv3DBackpropInputTiling(*range(1, 67))
    t.hf32Flag, t.initOutputFlag, t.reserved = -1, 1, -7
    t.singleCoreM = 2**40
    data = t.to_bytes()
    assert len(data) == 280
    assert TConv3DBackpropInputTiling.from_bytes(data) == t
    assert struct.unpack_from("<3I", data) == (1, 2, 3)  # batch, cin, cout
    assert struct.unpack_from("<I", data, 4 * 59) == (60,)  # iterateOrder
    assert struct.unpack_from("<3i", data, 240) == (-1, 1, -7)
    assert struct.unpack_from("<3Q", data, 256) == (64, 2**40, 66)  # singleCoreBatch, singleCoreM, singleCoreCin
    names = [f.name for f in fields(t)]
    assert names[:3] + names[47:50] + names[-3:] == ["batch", "cin", "cout", "baseM", "baseK", "baseN",
                                                     "singleCoreBatch", "singleCoreM", "singleCoreCin"]
    with pytest.raises(ValueError, match="has 280 bytes, got 279"):
        TConv3DBackpropInputTiling.from_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"baseM=-1 is not an integer in \[0, 4294967295\]"):
        TConv3DBackpropInputTiling(baseM=-1).to_bytes()


def test_a_tiling_survives_its_bytes_and_still_runs() -> None:
    t = ascendc.find_tiling(described())
    again = TConv3DBackpropInputTiling.from_bytes(t.to_bytes())
    assert again == t
    dy, w = np.ones((1, 20, 4, 9, 8), np.float16), np.ones((20, 40, 2, 3, 3), np.float16)
    results = [ascendc.run(dy, w, input_size=(5, 9, 8), padding=(0, 1, 1), tiling=tiling) for tiling in (t, again)]
    assert results[0].tobytes() == results[1].tobytes()


def test_setters_refuse_contradictions_and_keep_the_first_values() -> None:
    host = Conv3DBpInputTiling()
    assert host.SetWeightShape(20, 40, 2, 3, 3) is True
    assert host.SetInputShape(1, 41, 5, 9, 8) is False  # cin
    assert host.SetInputShape(1, 40, 5, 9, 8) is True
    assert host.SetGradOutputShape(1, 21, 4, 9, 8) is False  # cout
    assert host.SetGradOutputShape(2, 20, 4, 9, 8) is False  # batch
    assert host.SetGradOutputShape(1, 20, 4, 9, 8) is True
    assert host.SetWeightShape(20, 41, 1, 1, 1) is False
    assert host.SetWeightShape(21, 40, 1, 1, 1) is False
    host.SetPadding(0, 0, 1, 1, 1, 1)
    t = TConv3DBackpropInputTiling()
    assert host.GetTiling(t) == -1
    assert host.explain() == "SetWeightShape returned False: cout=21 where an earlier call said 20"
    assert host.SetWeightShape(20, 40, 2, 3, 3) is True  # the right call takes the wrong one back
    assert host.GetTiling(t) == 0
    assert (t.dk, t.hk, t.cin, t.cout, t.batch) == (2, 3, 40, 20, 1)


def test_output_padding_after_the_input_shape_is_not_forgotten() -> None:
    host = described()
    assert host.SetOutputPadding(0, 1, 0) is False  # SetInputShape was called: no transposed convolution
    assert host.GetTiling(TConv3DBackpropInputTiling()) == -1
    assert "SetOutputPadding(0, 1, 0) returned False" in host.explain()


def test_parameters_have_the_names_of_the_page() -> None:
    host = described()
    host.SetPadding(padFront=0, padBack=0, padUp=1, padDown=1, padLeft=1, padRight=1)
    host.SetStride(strideD=1, strideH=1, strideW=1)
    host.SetDilation(dilationD=1, dilationH=1, dilationW=1)
    assert host.GetTiling(TConv3DBackpropInputTiling()) == 0
    assert Conv3DBpInputTiling().SetOutputPadding(outputPadD=0, outputPadH=1, outputPadW=0)


@pytest.mark.parametrize("change, words", [
    (lambda host: host.SetWeightType(ascendc.TPosition.CO1, ascendc.ConvFormat.FRACTAL_Z_3D,
                                     ascendc.ConvDtype.FLOAT16), "weight lies in CO1, it must be GM"),
    (lambda host: host.SetInputType(ascendc.TPosition.A1, ascendc.ConvFormat.NDC1HWC0, ascendc.ConvDtype.FLOAT16),
     "input lies in A1, it must be GM"),
    (lambda host: host.SetInputType(ascendc.TPosition.GM, ascendc.ConvFormat.NHWC, ascendc.ConvDtype.FLOAT16),
     "input format is NHWC, it must be NDC1HWC0 or NCDHW"),
    (lambda host: host.SetGradOutputType(ascendc.TPosition.GM, ascendc.ConvFormat.NCDHW, ascendc.ConvDtype.FLOAT16),
     "GradOutput format is NCDHW, it must be NDC1HWC0")])
def test_positions_and_formats_of_the_page(change, words) -> None:
    host = described()
    change(host)
    assert host.GetTiling(TConv3DBackpropInputTiling()) == -1
    assert words in host.explain()


@pytest.mark.parametrize("kind", [Conv3DBpInputTiling, ascendc.Conv3dBpFilterTiling])
def test_unknown_platforms_fail_at_construction(kind) -> None:
    with pytest.raises(ValueError, match="socVersion 'Ascend1000' is none of Ascend910B"):
        kind(ascendc.PlatformInfo("Ascend1000"))
    with pytest.raises(TypeError, match="platform must be a PlatformInfo, got str"):
        kind("Ascend910B")
    assert kind(ascendc.PlatformInfo("Ascend910B3")).platform.socVersion == "Ascend910B3"


def test_a_tile_of_40_pixels_in_float32() -> None:
    host = ascendc.describe((1, 8, 1, 5, 8), (8, 8, 1, 1, 1), ascendc.float32, input_size=(1, 5, 8))
    t = ascendc.find_tiling(host).with_(baseM=40)
    t.validate()
    rng = np.random.default_rng(0)
    dy, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((1, 8, 1, 5, 8), (8, 8, 1, 1, 1)))
    dx = ascendc.run(dy, w, input_size=(1, 5, 8), tiling=t, allow_undocumented=True)
    assert np.array_equal(dx, np.einsum("nodhw,oi->nidhw", dy, w[:, :, 0, 0, 0]))
    with pytest.raises(ValueError, match="baseM=40 is not a multiple of 16"):
        ascendc.find_tiling(described()).with_(baseM=40).validate()


@pytest.mark.parametrize("width", [5000, 8000, 15900])
def test_the_filter_tiles_rows_up_to_the_size_of_l1(width) -> None:
    """Two buffers of such a row do not fit; one does."""
    tiling = ascendc.find_filter_tiling((1, 16, 1, 1, width), (1, 16, 1, 1, width), (1, 1, 1), ascendc.half)
    t = tiling.dwTiling
    assert not t.problems() and t.bl1Pbuffer == (1 if width == 15900 else 2)
    rng = np.random.default_rng(0)
    dy, x = (rng.integers(-1, 2, (1, 16, 1, 1, width)).astype(np.float16) for _ in range(2))
    dw = ascendc.run_filter(dy, x, kernel_size=1, tiling=tiling)
    exact = np.einsum("ow,iw->oi", dy[0, :, 0, 0].astype(float), x[0, :, 0, 0].astype(float))
    assert np.array_equal(dw[:, :, 0, 0, 0], exact)


def test_setters_take_whole_numbers() -> None:
    host = Conv3DBpInputTiling()
    assert host.SetWeightShape(np.int64(20), 40, 2, 3, 3)
    with pytest.raises(TypeError, match=r"SetStride: strideH must be an integer, got 1\.5"):
        host.SetStride(1, 1.5, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="SetGradOutputShape: c must be an integer, got 'a'"):
        host.SetGradOutputShape(1, "a", 1, 1, 1)  # type: ignore[arg-type]


def test_transposed_shapes_are_inferred() -> None:
    host = described(weight=(44, 4, 2, 3, 2), input=None, grad_output=(1, 44, 17, 5, 77), padding=(0,) * 6,
                     stride=(1, 2, 1))
    assert host.SetOutputPadding(0, 1, 0) is True
    t = TConv3DBackpropInputTiling()
    assert host.GetTiling(t) == 0
    assert (t.batch, t.cin, t.di, t.hi, t.wi) == (1, 4, 18, 12, 78)
    assert pads(t) == (1, 2, 3, 1, 1)
    assert t.initOutputFlag == 1


def test_published_shapes_as_transposed_convolution_want_a_zeroed_output() -> None:
    t = TConv3DBackpropInputTiling()
    assert described(**(PUBLISHED | {"input": None})).GetTiling(t) == 0
    assert (t.di, t.hi, t.wi, t.initOutputFlag) == (11, 128, 128, 1)


def test_both_kinds_at_once_are_refused() -> None:
    host = Conv3DBpInputTiling()
    host.SetWeightShape(20, 40, 2, 3, 3)
    assert host.SetOutputPadding(0, 0, 0) is True
    host.SetInputShape(1, 40, 5, 9, 8)
    host.SetGradOutputShape(1, 20, 4, 7, 6)
    assert host.GetTiling(TConv3DBackpropInputTiling()) == -1
    assert "SetInputShape and SetOutputPadding were both called" in host.explain()


def wide(extent: int) -> dict[str, Any]:
    return {"weight": (16, 16, 1, 1, 1), "input": (1, 16, 1, 4, extent), "grad_output": (1, 16, 1, 4, extent),
            "padding": (0,) * 6}


@pytest.mark.parametrize(("changes", "reason"), [
    ({"padding": (0, 0, -1, 1, 1, 1)}, "padUp=-1 is negative"),
    ({"stride": (1, 0, 1)}, "stride height must be positive, got 0"),
    ({"dilation": (1, 1, 0)}, "dilation width must be positive, got 0"),
    ({"weight": (20, 40, 0, 3, 3)}, "kernel depth must be positive, got 0"),
    ({"grad_output": (1, 20, 4, 0, 8)}, "dY height must be positive, got 0"),
    ({"grad_output": (1, 20, 4, 9, 7)}, "width: input 8 with pads 1, 1, kernel 3, dilation 1, stride 1 gives 8"),
    ({"stride": (3, 1, 1), "grad_output": (1, 20, 2, 9, 8)}, "strideD=3 is larger than the kernel depth 2"),
    ({"stride": (1, 64, 1), "grad_output": (1, 20, 4, 1, 8)}, "strideH=64 is larger than 63"),
    ({"stride": (1, 1, 64), "grad_output": (1, 20, 4, 9, 1)}, "strideW=64 is larger than 63"),
    ({"padding": (0, 0, 3, 1, 1, 1), "grad_output": (1, 20, 4, 11, 8)}, "padUp=3 is larger than 2 = min(255, k"),
    ({"weight": (20, 40, 2, 3, 200), "input": (1, 40, 5, 9, 700), "grad_output": (1, 20, 4, 9, 305),
      "dilation": (1, 1, 2), "padding": (0, 0, 1, 1, 1, 1)},
     "backpropPadLeft = (wk-1)*dilationW - padLeft = 397 is outside [0, 255]"),
    ({"weight": (20, 40, 2, 3, 300), "input": (1, 40, 5, 9, 700), "grad_output": (1, 20, 4, 9, 406),
      "padding": (0, 0, 1, 1, 5, 0)}, "width: input - dY*stride + pad = 299 is outside [-255, 255]"),
    (wide(2**31), "hi*wi=8589934592 is larger than 2^32-1"),
    (wide(2**20), "no tile fits L1: the smallest needs"),
])
def test_refusals_name_the_rule_and_the_numbers(changes: dict[str, Any], reason: str) -> None:
    host = described(**changes)
    data = TConv3DBackpropInputTiling()
    assert host.GetTiling(data) == -1
    assert reason in host.explain()
    assert data == TConv3DBackpropInputTiling(), "a failed GetTiling must not write"


def test_every_broken_rule_is_listed() -> None:
    host = described(stride=(3, 64, 1), padding=(0, 0, 5, 5, 1, 1), grad_output=(1, 20, 4, 9, 8))
    assert host.GetTiling(TConv3DBackpropInputTiling()) == -1
    lines = host.explain().splitlines()
    assert len(lines) >= 6
    for part in ("depth: input 5", "height: input 9", "strideD=3", "strideH=64", "padUp=5", "padDown=5"):
        assert any(part in line for line in lines), part


def test_formats_and_types_are_checked() -> None:
    host = described()
    host.SetWeightType(TPosition.GM, ConvFormat.NCDHW, ConvDtype.INT8)
    host.SetGradOutputType(TPosition.GM, ConvFormat.NDHWC, ConvDtype.BF16)
    assert host.GetTiling(TConv3DBackpropInputTiling()) == -1
    assert host.explain().splitlines() == [
        "weight format is NCDHW, it must be FRACTAL_Z_3D", "GradOutput format is NDHWC, it must be NDC1HWC0",
        "weight type is INT8, it must be FLOAT16 or BF16 (FLOAT32 as an extension)"]
    host.SetWeightType(TPosition.GM, ConvFormat.FRACTAL_Z_3D, ConvDtype.BF16)
    host.SetGradOutputType(TPosition.GM, ConvFormat.NDC1HWC0, ConvDtype.FLOAT16)
    assert host.GetTiling(TConv3DBackpropInputTiling()) == -1
    assert host.explain() == "the types differ: weight BF16, grad_output FLOAT16"


def test_products() -> None:
    assert PlatformInfo.of("Atlas A2").usable_l1 == 524160
    assert PlatformInfo.of("Ascend910_93").l0CSize == 131072
    assert PlatformInfo() == PlatformInfo.ascend910b()
    assert (PlatformInfo().l1Size, PlatformInfo().ubSize, PlatformInfo().btSize) == (524288, 262144, 1024)
    host = described(platform=PlatformInfo.of("Ascend950"))
    assert host.GetTiling(TConv3DBackpropInputTiling()) == -1
    assert host.explain() == "the API does not exist on Ascend950 (Atlas A2 and A3 only)"
    with pytest.raises(ValueError, match="product 'Ascend310' is none of Ascend910B"):
        PlatformInfo.of("Ascend310")


def test_smaller_memories_give_smaller_tiles() -> None:
    small = PlatformInfo("Ascend910B", l1Size=65536, l0CSize=8192, l0ASize=8192, l0BSize=8192)
    t, full = TConv3DBackpropInputTiling(), TConv3DBackpropInputTiling()
    assert described(platform=small).GetTiling(t) == 0
    assert described().GetTiling(full) == 0
    t.validate(small)
    assert t.baseM * t.baseN * 4 <= 8192 < full.baseM * full.baseN * 4


@pytest.mark.parametrize("case", [random_case(seed) for seed in range(0, 240, 6)], ids=str)
def test_found_tiles_fit(case: Any) -> None:
    conv = case.problem.conv
    t = ascendc.find_tiling(ascendc.describe(conv.output_shape, conv.weight_shape, ascendc.half, **case.geometry), 3)
    assert t.problems() == []
    use = t.memory_use()
    assert use["L0A"] <= 32768 and use["L0B"] <= 32768 and use["L0C"] <= 131072
    assert use["L1A"] + use["L1B"] <= 524160
    assert t.singleCoreM % t.wi == 0


@pytest.mark.parametrize("problem", [
    ((256, 128, 3, 3, 3), (1, 128, 11, 128, 128), (0, 1, 1), 1),
    ((512, 512, 1, 3, 3), (1, 512, 1, 56, 56), (0, 1, 1), 1),
    ((64, 3, 7, 7, 7), (2, 3, 16, 112, 112), (3, 3, 3), 2), ((32, 16, 1, 15, 15), (1, 16, 1, 64, 64), 0, 1)])
def test_search_beats_every_tile_of_a_coarse_grid(problem: Any) -> None:
    """Nothing that fits and is double-buffered moves fewer bytes than what the search found."""
    weight, size, padding, stride = problem
    pads = (padding,) * 3 if isinstance(padding, int) else padding
    out = tuple((n + 2 * p - k) // stride + 1 for n, p, k in zip(size[2:], pads, weight[2:], strict=True))
    found = ascendc.find_tiling(ascendc.describe((size[0], weight[0], *out), weight, ascendc.half, input_size=size[2:],
                                                 padding=padding, stride=stride))
    best = ascendc.estimate(found)
    tried = 0
    for base_m in (16, 64, 128, 256, 384, 512, 1024):
        for base_n in (16, 32, 64, 128, 256):
            if base_n > found.cin1 * 16:
                continue
            other = found.with_(baseM=base_m, baseN=base_n, baseK=16, stepKa=found.hk * found.wk,
                                stepKb=found.hk * found.wk, al1Pbuffer=2, bl1Pbuffer=2)
            if not other.problems():
                tried += 1
                traffic = ascendc.estimate(other)
                assert best.bytes_a + best.bytes_b <= traffic.bytes_a + traffic.bytes_b, (base_m, base_n)
    assert tried >= 3


def test_weights_stay_in_l1_where_that_saves_traffic() -> None:
    t = ascendc.find_tiling(ascendc.describe((1, 64, 1, 56, 56), (64, 64, 1, 3, 3), ascendc.half,
                                             input_size=(1, 56, 56), padding=(0, 1, 1)))
    assert t.weights_resident
    assert ascendc.estimate(t).reread_b == 1.0


def test_cores_are_kept_busy() -> None:
    host = described(**PUBLISHED)
    for cores in (1, 7, 20, 24):
        t = ascendc.find_tiling(host, cores)
        assert ascendc.estimate(t, cores).imbalance < 1.15
    small = ascendc.describe((1, 64, 1, 28, 28), (64, 64, 1, 3, 3), ascendc.half, input_size=(1, 28, 28),
                             padding=(0, 1, 1))
    assert {piece.core for piece in ascendc.split_pieces(ascendc.find_tiling(small, 14), 14)} == set(range(14))
    assert ascendc.find_tiling(small).singleCoreM == 28 * 28


@pytest.mark.parametrize(("changes", "reason"), [
    ({"baseM": 24}, "baseM=24 is not a multiple of 16"),
    ({"stepKa": 2, "stepKb": 3}, "neither of stepKa=2 and stepKb=3 divides the other"),
    ({"baseK": 48}, r"stepKa\*baseK=48 is not a multiple of hk\*wk\*c0=144"),
    ({"singleCoreM": 20}, "singleCoreM=20 is not a whole number of dX rows of wi=8 pixels"),
    ({"iterateOrder": 2}, "iterateOrder=2 is neither 0"),
    ({"stepM": 2}, "stepM=2 must be 1"),
    ({"backpropPadUp": 2}, "backpropPadUp=2 must be 1"),
    ({"cin1": 9}, "cin1=9 must be 3"),
    ({"c0": 8, "c0Bits": 4}, "c0=8, c0Bits=4"),
    ({"di": 4}, "depth: 4 outputs need 5 positions, the padded input has 4"),
    ({"baseM": 1024, "baseN": 48}, "L0A needs 294912 bytes of 32768; L0C needs 196608 bytes of 131072"),
    ({"stepKa": 100, "stepKb": 100}, "L1 needs 460800 bytes for A and 921600 for B, together more than 524160"),
    ({"al1Pbuffer": 3}, "al1Pbuffer=3 must be 1 or 2"),
    ({"batch": 0}, "batch=0 must be positive"),
    ({"singleCoreM": -8}, "singleCoreM=-8 is not an integer in"),
])
def test_validate_says_what_a_hand_made_tile_breaks(changes: dict[str, int], reason: str) -> None:
    good = ascendc.find_tiling(described()).with_(baseM=64, baseN=16, baseK=144, stepKa=1, stepKb=1, al1Pbuffer=2,
                                                  bl1Pbuffer=2)
    good.validate()
    with pytest.raises(ValueError, match=reason):
        good.with_(**changes).validate()


def test_kernel_depths() -> None:
    t = ascendc.find_tiling(described(**PUBLISHED))
    assert [len(t.kernel_depths(d)) for d in range(11)] == [1, 2, 3, 3, 3, 3, 3, 3, 3, 2, 1]


def test_filter_host_refuses_with_reasons() -> None:
    with pytest.raises(Unsupported, match=r"height: input 8 with pads 0, 0, kernel 3.* gives 6 outputs, dY has 7"):
        ascendc.find_filter_tiling((1, 16, 1, 7, 6), (1, 16, 1, 8, 8), (1, 3, 3), ascendc.half)
    host = ascendc.Conv3dBpFilterTiling()
    assert host.SetWeightShape(16, 16, 1, 1, 1) is None  # unlike the Input's setters
    host.SetWeightType(TPosition.GM, ConvFormat.FRACTAL_Z_3D, ConvDtype.FLOAT16)
    assert host.GetTiling(ascendc.TConv3DBpFilterTiling()) == -1
    assert "weight type is FLOAT16, dW is always FLOAT32" in host.explain()
    assert "input (0, 0, 0, 0, 0) must be positive in every place" in host.explain()


def test_filter_tiles_fit() -> None:
    for channels, size, kernel in ((16, 8, 1), (256, 64, 3), (512, 14, 3), (64, 128, 7)):
        shape, pad = (1, channels, 2, size, size), kernel // 2
        tiling = ascendc.find_filter_tiling(shape, shape, (1, kernel, kernel), ascendc.bfloat16_t,
                                            padding=(0, pad, pad))
        t = tiling.dwTiling
        assert t.problems() == []
        assert tiling.params.totalL1Size == sum(t.memory_use()[queue] for queue in ("L1A", "L1B")) <= 524160
        assert tiling.basicBlockTiling.singleCoreK == t.singleCoreHo * t.wo
