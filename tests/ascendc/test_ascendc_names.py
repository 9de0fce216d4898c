"""The names of the page in all the spellings that a caller may use, and the memory behind a GlobalTensor."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ascendc_mistakes import Launch, small_tiling

from convgrad import ascendc
from convgrad.ascendc import ConvDtype, ConvFormat, ConvType, GlobalTensor, TPosition


@pytest.mark.parametrize(("spelling", "dtype"), [
    (ascendc.half, np.float16), ("half", np.float16), ("float16", np.float16), (np.float16, np.float16),
    (ConvDtype.FLOAT16, np.float16), ("bfloat16_t", ml_dtypes.bfloat16), ("bfloat16", ml_dtypes.bfloat16),
    (ml_dtypes.bfloat16, ml_dtypes.bfloat16), (ConvDtype.BF16, ml_dtypes.bfloat16), ("float", np.float32),
    (ConvDtype.INT32, np.int32), ("int32_t", np.int32)], ids=str)
def test_conv_type_takes_every_name_of_a_number_format(spelling: Any, dtype: Any) -> None:
    named = ConvType(TPosition.GM, ConvFormat.NDC1HWC0, dtype=spelling)
    assert named == ConvType[TPosition.GM, ConvFormat.NDC1HWC0, np.dtype(dtype)]
    assert named.Type == named.dtype == np.dtype(dtype)


def test_conv_type_refuses_what_is_none() -> None:
    with pytest.raises(TypeError, match="dtype must be half, bfloat16_t, float32 or int32_t, got 'fp19'"):
        ConvType(TPosition.GM, ConvFormat.ND, "fp19")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dtype must be .* got <ConvDtype\.INT4: 3>"):
        ConvType(TPosition.GM, ConvFormat.ND, ConvDtype.INT4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ConvType pos must be a TPosition, got <ConvFormat\.ND: 0>"):
        ConvType(ConvFormat.ND, TPosition.GM, ascendc.half)  # type: ignore[arg-type]


def test_global_tensor_is_a_pointer() -> None:
    memory = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    gm = GlobalTensor(memory, offset=4)
    assert (gm.GetSize(), gm[6].GetSize(), gm[np.int64(6)][3].GetSize(), gm[20].GetSize()) == (20, 14, 11, 0)
    assert type(gm[np.int64(6)].GetSize()) is int
    with pytest.raises(ascendc.OutOfBounds, match="offset 25 lies outside its 24 elements"):
        GlobalTensor(memory, 25)
    later = GlobalTensor()
    later.SetGlobalBuffer(memory, 10)
    assert later.GetSize() == 10
    with pytest.raises(ascendc.OutOfBounds, match="size=25, the array has 24 elements"):
        later.SetGlobalBuffer(memory, 25)


def test_python_spellings_of_the_calls_do_the_same() -> None:
    run, expected = Launch(), Launch()
    run.op.init(run.tiling)
    expected.op.Init(expected.tiling)
    for piece in run.pieces():
        expected.finish(expected.set(piece))
        expected.op.ctx.isFirstIter_ = True
        run.op.set_single_shape(piece.singleShapeM, piece.singleShapeK, piece.singleShapeN)
        run.op.set_start_position(piece.d, piece.curHoStartIdx)
        run.op.set_grad_output(run.grad_output[piece.offsetA])
        run.op.set_weight(run.weight[piece.offsetB])
        seen = []
        for block in run.op.blocks():
            run.op.get_tensor_c(run.output[piece.offsetC])
            seen.append((block.m, block.n))
        assert seen == [(block.m, block.n) for block in piece.walk(run.tiling).blocks()]
    run.op.end()
    assert run.memory.tobytes() == expected.memory.tobytes()


def test_atomic_flag_is_zero_or_one() -> None:
    run = Launch()
    piece = run.begin()
    run.op.Iterate()
    with pytest.raises(ValueError, match=r"enAtomic=2 is neither 0 \(overwrite\) nor 1 \(add\)"):
        run.op.GetTensorC(run.output[piece.offsetC], 2)


def test_tiling_fields_may_be_numpy_integers() -> None:
    tiling = small_tiling()
    plain = tiling.to_bytes()
    tiling.baseM, tiling.singleCoreM = np.int64(16), np.uint32(24)  # type: ignore[assignment]
    assert tiling.problems() == [] and tiling.to_bytes() == plain
    tiling.baseM = 16.0  # type: ignore[assignment]
    assert tiling.problems() == ["baseM=16.0 is not an integer in [0, 4294967295]"]


def test_types_that_were_not_given_follow_the_others() -> None:
    """A transposed convolution has no input to describe, so SetInputType is not called."""
    host = ascendc.Conv3DBpInputTiling()
    host.SetWeightShape(16, 16, 1, 3, 3)
    host.SetGradOutputShape(1, 16, 1, 6, 6)
    host.SetWeightType(TPosition.GM, ConvFormat.FRACTAL_Z_3D, ConvDtype.BF16)
    host.SetGradOutputType(TPosition.GM, ConvFormat.NDC1HWC0, ConvDtype.BF16)
    tiling = ascendc.TConv3DBackpropInputTiling()
    assert host.GetTiling(tiling) == 0, host.explain()
    assert tiling.element_type == ascendc.bfloat16_t
    host.SetInputType(TPosition.GM, ConvFormat.NDC1HWC0, ConvDtype.FLOAT16)
    assert host.GetTiling(tiling) == -1
    assert host.explain() == "the types differ: weight BF16, grad_output BF16, input FLOAT16"


def test_host_setters_refuse_members_of_another_enumeration() -> None:
    for host in (ascendc.Conv3DBpInputTiling(), ascendc.Conv3dBpFilterTiling()):
        with pytest.raises(TypeError, match=r"pos must be a TPosition, got <ConvFormat\.ND: 0>"):
            host.SetWeightType(ConvFormat.ND, TPosition.GM, ConvDtype.FLOAT16)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"GetTiling fills a .*, got dict"):
            host.GetTiling({})  # type: ignore[arg-type]


def test_chips_of_a_product_have_its_memories_and_its_api() -> None:
    assert ascendc.PlatformInfo.of("Ascend910B3") == ascendc.PlatformInfo.of("Atlas A2")
    described = ascendc.describe((1, 16, 1, 6, 6), (16, 16, 1, 3, 3), ascendc.half, input_size=(1, 8, 8),
                                 platform=ascendc.PlatformInfo("Ascend910B3"))
    assert described.GetTiling(ascendc.TConv3DBackpropInputTiling()) == 0
    with pytest.raises(ValueError, match="product 'Ascend310' is none of"):
        ascendc.PlatformInfo.of("Ascend310")


def test_namespaces_and_templates_of_the_original() -> None:
    api, common = ascendc.ConvBackpropApi, ascendc.ConvCommonApi
    half = ascendc.half
    weight = api.ConvType[common.TPosition.GM, common.ConvFormat.FRACTAL_Z_3D, half]
    size = api.ConvType[common.TPosition.GM, common.ConvFormat.ND, ascendc.int32_t]
    activation = api.ConvType[common.TPosition.GM, common.ConvFormat.NDC1HWC0, half]
    op = api.Conv3DBackpropInput[weight, size, activation, activation]()
    assert type(op) is ascendc.Conv3DBackpropInput and op.SrcT == half
    assert type(api.Conv3DBackpropFilter[ascendc.filter_types(half)]()) is ascendc.Conv3DBackpropFilter
    host = api.Conv3DBpInputTiling(ascendc.platform_ascendc.PlatformAscendC("Ascend910B"))
    host.SetWeightShape(16, 16, 1, 1, 1)
    host.SetInputShape(1, 16, 1, 2, 2)
    host.SetGradOutputShape(1, 16, 1, 2, 2)
    data = ascendc.optiling.Conv3DBackpropInputTilingData()
    assert host.GetTiling(data) == 0, host.explain()
    op.Init(data.conv3DDxTiling)
    piece, = ascendc.split_pieces(data.conv3DDxTiling)
    op.SetSingleShape(piece.singleShapeM, piece.singleShapeK, piece.singleShapeN)
    op.SetStartPosition(0, 0)
    op.SetGradOutput(ascendc.AscendC.GlobalTensor(np.ones(64, half)))
    op.SetWeight(ascendc.AscendC.GlobalTensor(np.ones(256, half)))
    memory = np.zeros(64, half)
    while op.Iterate(sync=True):
        op.GetTensorC(ascendc.AscendC.GlobalTensor(memory), sync=True)
    op.End()
    assert (memory == 16).all()


def test_an_object_that_is_given_up_without_end_says_so() -> None:
    tiling = ascendc.find_tiling(ascendc.describe((1, 16, 1, 2, 2), (16, 16, 1, 1, 1), ascendc.half,
                                                  input_size=(1, 2, 2)))
    piece, = ascendc.split_pieces(tiling)
    op = ascendc.Conv3DBackpropInput(*ascendc.conv_types(ascendc.half))
    op.Init(tiling)
    op.SetSingleShape(piece.singleShapeM, piece.singleShapeK, piece.singleShapeN)
    op.SetStartPosition(0, 0)
    op.SetGradOutput(ascendc.GlobalTensor(np.ones(64, ascendc.half)))
    op.SetWeight(ascendc.GlobalTensor(np.ones(256, ascendc.half)))
    op.IterateAll(ascendc.GlobalTensor(np.zeros(64, ascendc.half)))
    with pytest.warns(ascendc.EndMissing, match="was given up without End"):
        del op


def test_two_global_tensors_of_one_memory_count_together() -> None:
    memory = np.zeros(64, np.float16)
    first, second = ascendc.GlobalTensor(memory), ascendc.GlobalTensor(memory)
    first.write(0, np.ones(4, np.float16), (1,))
    with pytest.raises(ascendc.Misuse, match="which an earlier block wrote already"):
        second.write(2, np.ones(4, np.float16), (1,))
