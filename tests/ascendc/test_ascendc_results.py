"""The model against the plain gradients: bitwise on integers, within the contract on real data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ascendc_problems import Case, random_case, small_tile

import convgrad
from convgrad import Problem, Unsupported, ascendc
from convgrad.verify import exact_results, integer_operands, magnitudes, real_operands, wrong_bits, wrong_bound

CASES = [random_case(seed) for seed in range(240)]
TRANSPOSED = range(40)


def run_case(case: Case, operands: dict[str, np.ndarray], trace: list[ascendc.Block] | None = None) -> np.ndarray:
    return ascendc.run(operands["grad_output"], operands["weight"], **case.geometry, cores=case.cores,
                       tiling=case.tiling(), output_format=case.output_format, fidelity=case.fidelity,
                       allow_undocumented=True, trace=trace)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_integer_data_agree_bitwise(case: Case, seed: int) -> None:
    operands = integer_operands(case.problem, seed)
    got = run_case(case, operands)
    expected = convgrad.input_grad(operands["grad_output"], operands["weight"], case.problem.conv.in_size,
                                   stride=case.problem.conv.stride, padding=case.problem.conv.padding,
                                   dilation=case.problem.conv.dilation, backend="reference")
    assert got.dtype == expected.dtype
    assert got.tobytes() == expected.tobytes(), str(wrong_bits(case.problem, "input", got,
                                                              exact_results(case.problem, operands)[0]))


def test_the_random_cases_cover_what_they_should() -> None:
    convs = [case.problem.conv for case in CASES]
    assert len({str(case) for case in CASES}) >= 200
    assert sum(max(conv.stride) > 1 for conv in convs) > 50
    assert sum(conv.stride[1] > conv.kernel_size[1] for conv in convs) > 20
    assert sum(max(conv.dilation) > 1 for conv in convs) > 50
    assert sum(any(low != high for low, high in conv.padding) for conv in convs) > 50
    assert sum(conv.in_channels % 16 != 0 for conv in convs) > 50
    assert sum(case.cores > 1 for case in CASES) > 50
    assert {case.order for case in CASES} == {0, 1}
    blocks = [block for case in CASES[:40] for piece in ascendc.split_pieces(case.tiling(), case.cores)
              for block in piece.walk(case.tiling()).blocks()]
    assert any(block.first[1] for block in blocks), "no block starts in mid-row"
    assert any(block.n for block in blocks), "no piece has two blocks of channels"
    assert any(case.tiling().initOutputFlag for case in CASES)


@pytest.mark.parametrize("case", CASES[::16], ids=str)
def test_real_data_stay_within_the_contract(case: Case, seed: int) -> None:
    operands = real_operands(case.problem, seed)
    got = run_case(case, operands)
    wrong = wrong_bound(case.problem, "input", got, exact_results(case.problem, operands)[0],
                        magnitudes(case.problem, operands)[0])
    assert wrong is None, str(wrong)


@pytest.mark.parametrize("case", CASES[:20], ids=str)
def test_same_bits_for_any_number_of_cores(case: Case) -> None:
    operands = real_operands(case.problem)
    arrays, tiling = (operands["grad_output"], operands["weight"]), case.tiling()
    results = [ascendc.run(*arrays, **case.geometry, cores=cores, tiling=tiling, allow_undocumented=True)
               for cores in (1, 3, 24)]
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()


@pytest.mark.parametrize("seed_", TRANSPOSED)
def test_transposed_convolution_with_output_padding(seed_: int) -> None:
    rng = np.random.default_rng([seed_, 7])
    kernel = tuple(int(k) for k in rng.integers(1, 4, 3))
    stride = (int(rng.integers(1, kernel[0] + 1)), *(int(s) for s in rng.integers(1, 4, 2)))
    dilation = tuple(int(d) for d in rng.integers(1, 3, 3))
    padding = tuple(int(rng.integers(0, k)) for k in kernel)
    output_padding = tuple(int(rng.integers(0, s)) for s in stride)
    shape = tuple(int(s) for s in rng.integers(2, 8, 3))
    x = rng.integers(-1, 2, (2, 19, *shape)).astype(np.float16)
    w = rng.integers(-1, 2, (19, 21, *kernel)).astype(np.float16)
    size = [(o - 1) * s - 2 * p + d * (k - 1) + e + 1
            for o, s, p, d, k, e in zip(shape, stride, padding, dilation, kernel, output_padding, strict=True)]
    if min(size) < 1:
        with pytest.raises(Unsupported, match="transposed: inferred dX"):
            ascendc.run(x, w, stride=stride, padding=padding, dilation=dilation, output_padding=output_padding)
        return
    got = ascendc.run(x, w, stride=stride, padding=padding, dilation=dilation, output_padding=output_padding, cores=3)
    expected = convgrad.conv_transpose(x, w, stride=stride, padding=padding, dilation=dilation,
                                       output_padding=output_padding, backend="reference")
    assert got.shape == (2, 21, *size)
    assert got.tobytes() == expected.tobytes()
    assert got.tobytes() == convgrad.input_grad(x, w, size, stride=stride, padding=padding, dilation=dilation,
                                                backend="reference").tobytes()


@pytest.mark.parametrize("case", [random_case(seed, "weight") for seed in range(80)], ids=str)
def test_filter_equals_weight_grad(case: Case, seed: int) -> None:
    conv, operands = case.problem.conv, integer_operands(case.problem, seed)
    got = ascendc.run_filter(operands["grad_output"], operands["input"], kernel_size=conv.kernel_size,
                             stride=conv.stride, padding=conv.padding, dilation=conv.dilation, cores=case.cores,
                             fidelity=case.fidelity)
    expected = convgrad.weight_grad(operands["grad_output"], operands["input"], conv.kernel_size, stride=conv.stride,
                                    padding=conv.padding, dilation=conv.dilation, out_dtype="float32",
                                    backend="reference")
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("order", [0, 1])
def test_filter_with_small_tiles_and_split_channels(order: int) -> None:
    problem = Problem.parse("weight_grad f16>f32 n2 c40 k50 i3x9x11 w2x3x3 s1x2x1 p1:0x1x0:2")
    conv = problem.conv
    operands = integer_operands(problem)
    tiling = ascendc.find_filter_tiling(conv.output_shape, conv.input_shape, conv.kernel_size,
                                        np.dtype(np.float16), stride=conv.stride, padding=conv.padding)
    tiling.dwTiling = tiling.dwTiling.with_(baseM=16, baseN=32, baseK=16, singleCoreHo=2, singleCoreCin=16,
                                            singleCoreCout=32, iterateOrder=order)
    trace: list[ascendc.FilterBlock] = []
    got = ascendc.run_filter(operands["grad_output"], operands["input"], kernel_size=conv.kernel_size,
                             stride=conv.stride, padding=conv.padding, cores=5, tiling=tiling, trace=trace,
                             fidelity="slice")
    assert wrong_bits(problem, "weight", got, exact_results(problem, operands)[0]) is None
    first = [(block.m, block.n) for block in trace[:3]]
    assert first == ([(0, 0), (0, 1), (0, 2)] if order == 0 else [(0, 0), (1, 0), (0, 1)])
    assert {block.core for block in trace} == set(range(5))


def test_filter_real_data_within_the_contract() -> None:
    problem = Problem.parse("weight_grad bf16>f32 n2 c20 k30 i4x12x13 w3x3x3 p1x1x1")
    operands = real_operands(problem)
    got = ascendc.run_filter(operands["grad_output"], operands["input"], kernel_size=3, padding=1, cores=4)
    wrong = wrong_bound(problem, "weight", got, exact_results(problem, operands)[0], magnitudes(problem, operands)[0])
    assert wrong is None, str(wrong)


def test_slices_sum_in_the_order_of_k() -> None:
    """A large value cancels only after a small one was lost: the order of the slices shows in the bits."""
    dy = np.zeros((1, 48, 1, 1, 1), np.float32)
    dy[0, [0, 16, 32], 0, 0, 0] = [2.0**24, 1.0, -(2.0**24)]
    w = np.ones((48, 1, 1, 1, 1), np.float32)
    host = ascendc.describe(dy.shape, w.shape, dy.dtype, input_size=1)
    tiling = ascendc.find_tiling(host).with_(baseK=8, stepKa=6, stepKb=6)
    got = ascendc.run(dy, w, input_size=1, tiling=tiling, fidelity="slice", allow_undocumented=True)
    assert got.item() == 0.0  # (2^24 + 1) - 2^24 in float32
    dy[0, [16, 32], 0, 0, 0] = [-(2.0**24), 1.0]
    got = ascendc.run(dy, w, input_size=1, tiling=tiling, fidelity="slice", allow_undocumented=True)
    assert got.item() == 1.0


def test_block_is_rounded_once() -> None:
    """Partial sums of 2048 + 1 + 1 are no halfs; rounded after every product the ones would be lost."""
    dy = np.zeros((1, 3, 1, 1, 1), np.float16)
    dy[0, :, 0, 0, 0] = [2048, 1, 1]
    w = np.ones((3, 1, 1, 1, 1), np.float16)
    assert ascendc.run(dy, w, input_size=1).item() == 2050.0


def test_hf32_flag_rounds_float32_operands() -> None:
    dy, w = np.full((1, 1, 1, 1, 1), 1 + 2.0**-12, np.float32), np.ones((1, 1, 1, 1, 1), np.float32)
    tiling = ascendc.find_tiling(ascendc.describe(dy.shape, w.shape, dy.dtype, input_size=1))
    plain = ascendc.run(dy, w, input_size=1, tiling=tiling, allow_undocumented=True)
    rounded = ascendc.run(dy, w, input_size=1, tiling=tiling.with_(hf32Flag=1), allow_undocumented=True)
    assert (plain.item(), rounded.item()) == (1 + 2.0**-12, 1 + 2.0**-11)


def test_wrong_result_is_traced_to_its_block() -> None:
    problem = Problem.parse("input_grad f16 n2 c20 k18 i3x7x9 w2x3x3 p0x1x1")
    operands = integer_operands(problem)
    arrays = (operands["grad_output"], operands["weight"])
    tiling = small_tile(ascendc.find_tiling(ascendc.describe(
        arrays[0].shape, arrays[1].shape, arrays[0].dtype, input_size=(3, 7, 9), padding=(0, 1, 1))))
    trace: list[ascendc.Block] = []
    got = ascendc.run(*arrays, input_size=(3, 7, 9), padding=(0, 1, 1), tiling=tiling, cores=4, trace=trace)
    assert ascendc.check_against_reference(got, *arrays, tiling, trace) is None
    spoiled = got.copy()
    spoiled[1, 19, 2, 6, 8] += 64
    difference = ascendc.check_against_reference(spoiled, *arrays, tiling, trace)
    assert difference is not None and difference.block is not None
    block = difference.block
    assert (block.batch, block.depth, block.last, block.channels) == (1, 2, (6, 8), (16, 31))
    assert "curHo 5" in str(difference) and "1 elements wrong" in str(difference)


def test_output_padding_of_a_whole_stride() -> None:
    """Less than the dilation is allowed, so the extra row can lie beyond every forward position."""
    rng = np.random.default_rng(3)
    x = rng.integers(-1, 2, (1, 4, 2, 3, 4)).astype(np.float16)
    w = rng.integers(-1, 2, (4, 5, 1, 2, 2)).astype(np.float16)
    got = ascendc.run(x, w, dilation=(1, 3, 3), output_padding=(0, 2, 1), cores=2)
    expected = np.zeros((1, 5, 2, 3 + 3 + 2, 4 + 3 + 1))
    for kh in range(2):
        for kw in range(2):
            part = np.einsum("nodhw,oi->nidhw", x.astype(float), w[:, :, 0, kh, kw].astype(float))
            expected[:, :, :, 3 * kh:3 * kh + 3, 3 * kw:3 * kw + 4] += part
    assert np.array_equal(got, expected)
    assert not got[:, :, :, -2:].any()
    with pytest.raises(Unsupported, match="output padding of a whole stride has no plain gradient"):
        ascendc.check_against_reference(got, x, w, ascendc.find_tiling(ascendc.describe(
            x.shape, w.shape, x.dtype, dilation=(1, 3, 3), output_padding=(0, 2, 1))))


def test_arguments_of_run_are_checked() -> None:
    dy, w = np.zeros((1, 4, 2, 5, 5), np.float16), np.zeros((4, 3, 1, 3, 3), np.float16)
    with pytest.raises(TypeError, match="not documented for this API"):
        ascendc.run(dy.astype(np.float32), w.astype(np.float32), input_size=(2, 7, 7))
    with pytest.raises(TypeError, match="dtype float64 is none of half"):
        ascendc.run(dy.astype(np.float64), w.astype(np.float64), input_size=(2, 7, 7))
    with pytest.raises(TypeError, match="dy is half and w is bfloat16_t"):
        ascendc.run(dy, w.astype(ascendc.bfloat16_t), input_size=(2, 7, 7))
    with pytest.raises(ValueError, match=r"dy must be \(N, C, D, H, W\)"):
        ascendc.run(dy[0], w, input_size=(2, 7, 7))
    with pytest.raises(ValueError, match="dy has 3 channels, w has 4 output channels"):
        ascendc.run(dy[:, :3], w, input_size=(2, 7, 7))
    with pytest.raises(ValueError, match=r"input_size=\(2, 7, 7\): .* output_padding=1 gives \(3, 8, 8\)"):
        ascendc.run(dy, w, input_size=(2, 7, 7), output_padding=1)
    with pytest.raises(ValueError, match="cores must be at least 1, got 0"):
        ascendc.run(dy, w, input_size=(2, 7, 7), cores=0)
    with pytest.raises(Unsupported, match=r"height: input 9 with pads 0, 0, kernel 3.* gives 7 outputs, dY has 5"):
        ascendc.run(dy, w, input_size=(2, 9, 7))
    other = ascendc.find_tiling(ascendc.describe((1, 4, 2, 6, 5), w.shape, dy.dtype, input_size=(2, 8, 7)))
    with pytest.raises(ValueError, match="tiling: ho=6, the arrays and arguments say 5"):
        ascendc.run(dy, w, input_size=(2, 7, 7), tiling=other)
    with pytest.raises(ValueError, match="cores must be at least 1, got 0"):
        ascendc.split_pieces(small_tile(other), 0)


def test_a_long_run_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    dy, w = np.zeros((1, 4, 2, 5, 5), np.float16), np.zeros((4, 3, 1, 3, 3), np.float16)
    from convgrad.frontends.ascendc import duration

    monkeypatch.setattr(duration, "SAY_HOW_LONG", 0.0)
    with pytest.warns(ascendc.LongRun, match=r"this run will take about \d+ s"):
        ascendc.run(dy, w, input_size=(2, 7, 7))
    with pytest.warns(ascendc.LongRun, match=r"this run will take about \d+ s"):
        ascendc.run_filter(dy, np.zeros((1, 3, 2, 7, 7), np.float16), kernel_size=(1, 3, 3))


def spellings() -> list[dict[str, Any]]:
    """The same problem: input 4x6x8, kernel 1x3x3, stride 1, height and width padded by 1."""
    return [
        {"input_size": [4, 6, 8], "padding": [0, 1, 1]},
        {"input_size": np.array([4, 6, 8]), "padding": (np.int64(0), np.int32(1), 1), "stride": np.int64(1)},
        {"input_size": (4, 6, 8), "padding": ((0, 0), (1, 1), (1, 1)), "dilation": [1, 1, 1], "cores": np.int64(3)},
        {"input_size": (4, 6, 8), "padding": (0, 0, 1, 1, 1, 1)},
        {"input_size": (4, 6, 8), "padding": np.array([0, 0, 1, 1, 1, 1])},
        {"input_size": (4, 6, 8), "padding": (0, 1, 1), "output_padding": (0, 0, 0)},
        {"padding": (0, 1, 1), "output_padding": 0},
        {"padding": (0, 1, 1)},
    ]


@pytest.mark.parametrize("arguments", spellings(), ids=str)
def test_arguments_may_be_spelt_in_several_ways(arguments: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    dy = rng.integers(-2, 3, (1, 20, 4, 6, 8)).astype(np.float16)
    w = rng.integers(-2, 3, (20, 18, 1, 3, 3)).astype(np.float16)
    exact = convgrad.input_grad(dy, w, (4, 6, 8), padding=(0, 1, 1), backend="reference")
    assert np.array_equal(ascendc.run(dy, w, **arguments), exact)


def test_transposed_convolution_by_name_and_with_its_size() -> None:
    rng = np.random.default_rng(5)
    x = rng.integers(-2, 3, (1, 5, 2, 3, 4)).astype(np.float16)
    w = rng.integers(-2, 3, (5, 7, 2, 3, 3)).astype(np.float16)
    geometry: dict[str, Any] = {"stride": 2, "padding": (0, 1, 1), "output_padding": (0, 1, 0)}
    expected = convgrad.conv_transpose(x, w, **geometry, backend="reference")
    assert np.array_equal(ascendc.Conv3DTranspose(x, w, **geometry, cores=2), expected)
    assert np.array_equal(ascendc.run(x, w, input_size=expected.shape[2:], **geometry), expected)
