"""Arguments that make no sense: every refusal names the argument, the rule and the numbers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

import convgrad.torch as cg  # noqa: E402

x, w = torch.ones(2, 4, 6, 5), torch.ones(3, 4, 3, 3)
y = torch.ones(2, 3, 4, 3)
wt = torch.ones(4, 3, 3, 3)
c = torch.ones(1, 1, 3, dtype=torch.complex64)
ops = torch.ops.convgrad

REFUSALS = [
    (lambda: cg.Conv2d(4, 3, 3)(torch.ones(1, 1, 4, 6, 5)), ValueError, r"input must have 3 or 4 axes .*got 5"),
    (lambda: cg.Conv2d(4, 3, 3)(torch.ones(6, 5)), ValueError, r"input must have 3 or 4 axes .*got 2: shape \(6, 5\)"),
    (lambda: cg.conv2d(x, torch.ones(3, 4, 3)), ValueError, "weight must have 4 axes"),
    (lambda: cg.conv(x, torch.ones(3, 4)), ValueError, "weight must have 3 or 4 or 5 axes"),
    (lambda: cg.conv2d(x, w, stride=2.9), TypeError, r"stride must be an integer.*2\.9"),
    (lambda: cg.conv2d(x, w, stride=(1, 2.5)), TypeError, r"stride\[1\] must be an integer, got 2\.5"),
    (lambda: cg.conv2d(x, w, stride=0), ValueError, "stride must be at least 1, got 0"),
    (lambda: cg.conv2d(x, w, stride=(1, 1, 1)), ValueError, r"stride must have one value per .*\(2\), got 3"),
    (lambda: cg.conv2d(x, w, padding=-1), ValueError, "padding must be at least 0, got -1"),
    (lambda: cg.conv2d(x, w, padding="full"), ValueError, "padding='full' is neither 'same' nor 'valid'"),
    (lambda: cg.conv2d(x, w, padding="same", stride=2), ValueError, r"padding='same' goes with stride 1.*\(2, 2\)"),
    (lambda: cg.conv2d(x, w, groups=3), ValueError, "weight has 4 input channels per group.*4 channels in 3"),
    (lambda: cg.conv2d(torch.ones(2, 8, 6, 5), w, groups=2), ValueError, "groups=2 does not divide the 3 output"),
    (lambda: cg.conv2d(x, w, torch.ones(1)), ValueError, r"bias must have one value for each of the 3 .*\(1,\)"),
    (lambda: cg.conv2d(x, w, torch.ones(3, 1)), ValueError, r"bias must have one value for each of the 3"),
    (lambda: cg.conv2d(np.ones((2, 4, 6, 5)), w), TypeError, r"input must be a torch tensor, got numpy\.ndarray"),
    (lambda: cg.conv2d(x, None), TypeError, "weight must be a torch tensor, got NoneType"),
    (lambda: cg.conv2d(x, w, 1.0), TypeError, "bias must be a torch tensor, got float"),
    (lambda: cg.conv2d(x, w.double()), TypeError, "input is torch.float32, but weight is torch.float64"),
    (lambda: cg.conv2d(x, w.to("meta")), TypeError, "input is on cpu, but weight is on meta"),
    (lambda: cg.conv2d(x.to(torch.float8_e5m2), w.to(torch.float8_e5m2)), TypeError, "8-bit tensors have scales"),
    (lambda: ops.convolution_backward(*[t.to(torch.float8_e5m2) for t in (y, x, w)], None, [1, 1], [0, 0], [1, 1],
                                      False, [0, 0], 1, [True] * 3), TypeError, "input is torch.float8_e5m2"),
    (lambda: cg.conv2d(x, torch.ones(3, 4, 9, 3)), ValueError, "the output would have -2 positions on spatial axis 0"),
    (lambda: cg.conv_transpose2d(x, w), ValueError, "weight has 3 input channels, but input has 4"),
    (lambda: cg.conv_transpose2d(x, wt, groups=3), ValueError, "groups=3 does not divide the 4 input"),
    (lambda: cg.conv_transpose2d(x, wt, padding="same"), TypeError, "padding='same': a transposed"),
    (lambda: cg.conv_transpose2d(x, wt, output_padding=-1), ValueError, "output_padding must be at"),
    (lambda: cg.conv_transpose2d(x, wt, padding=9), ValueError, "the output would have -10 positions"),
    (lambda: cg.ConvTranspose2d(4, 3, 3, stride=2)(x, [13, 20]), ValueError, "axis 1 can have 11 to 12 positions"),
    (lambda: cg.ConvTranspose2d(4, 3, 3, stride=2)(x, [13]), ValueError, "output_size must have 2 values, or 4 with"),
    (lambda: cg.Conv2d(4, 3, 3, padding=[(1, 0)]), ValueError, r"padding must have one value or one"),
    (lambda: cg.CausalConv1d(4, 3, 3, padding=1), ValueError, "padding=1: CausalConv1d pads the beginning of time"),
    (lambda: cg.CausalConv2d(4, 3, 3, stride=2, padding="same"), ValueError, "stride 1 on the axes behind time"),
    (lambda: cg.conv_tbc(x, w), ValueError, r"input must have 3 axes \(time, batch, channels\), got 4"),
    (lambda: cg.conv2d_input((2, 5, 6, 5), w, y), ValueError, r"input_size=\(2, 5, 6, 5\) has batch and ch"),
    (lambda: cg.conv2d_input((6, 5), w, y), ValueError, r"input_size must have one value per .*\(4\), got 2"),
    (lambda: cg.conv2d_input((2, 4, 7, 5), w, y), ValueError, r"grad_output has shape \(2, 3, 4, 3\), but the output"),
    (lambda: cg.conv2d_weight(x, (3, 2, 3, 3), y), ValueError, r"weight_size=\(3, 2, 3, 3\) has channels \(3, 2\)"),
    (lambda: cg.conv2d_weight(x[0], (3, 4, 3, 3), y), ValueError, "input must have 4 axes"),
    (lambda: cg.per_sample_weight_grad(y[:1], x, 3), ValueError, "grad_output has batch 1, but input has 2"),
    (lambda: cg.per_sample_weight_grad(y, x, 3, groups=2), ValueError, "groups=2 does not divide the 4 chann"),
    (lambda: ops.convolution(x, w, None, [1, 1], [1, 1, 1], [1, 1], False, [0, 0], 1), ValueError,
     r"padding must have one number per axis \(2\), or low and high of each \(4\), got 3"),
    (lambda: ops.convolution(x, w, None, [1], [1], [1], False, [0], 1), ValueError, "input must have 3 axes for 1 str"),
    (lambda: cg.conv_transpose1d(c, c, padding=[(1, 0)]), TypeError, "input is torch.complex64, which PyTorch"),
]


@pytest.mark.parametrize(("call", "error", "sentence"), REFUSALS, ids=[case[2][:40] for case in REFUSALS])
def test_refusal(call, error, sentence) -> None:
    with pytest.raises(error, match=sentence):
        call()


def test_numbers_that_mean_one_thing_are_taken() -> None:
    expected = torch.nn.functional.conv2d(x, w, stride=2, padding=1)
    for stride, padding in ((2, 1), ((2,), (1,)), ([2, 2], [1, 1]), (np.int64(2), torch.tensor(1))):
        assert torch.equal(cg.conv2d(x, w, stride=stride, padding=padding), expected)
