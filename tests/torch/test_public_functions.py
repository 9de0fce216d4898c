"""`convgrad.conv` and its siblings on tensors that PyTorch follows, and on PyTorch's own samples."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from opinfo import NAMES, operators, samples  # noqa: E402

import convgrad  # noqa: E402


def tensor(*shape: int, seed: int = 0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)


x, w, dy = tensor(2, 4, 5, 4), tensor(6, 2, 3, 2, seed=1), tensor(2, 6, 5, 3, seed=2)
OPTIONS = {"padding": [(2, 0), (0, 0)], "groups": 2}


@pytest.mark.parametrize("name", NAMES)
def test_the_backward_functions_take_every_sample_of_torch(name: str) -> None:
    transposed = "transpose" in name
    backward = convgrad.conv_transpose_backward if transposed else convgrad.conv_backward
    places = ("stride", "padding", "output_padding", "groups", "dilation") if transposed else \
        ("stride", "padding", "dilation", "groups")
    for sample in samples(operators()[name], torch.float64):
        weight, bias, *rest = (*sample.args, *[None] * (2 - len(sample.args)))
        options = {**dict(zip(places, rest)), **sample.kwargs}
        bias = options.pop("bias", bias)
        axes = weight.dim() - 2
        options = {key: value[0] if isinstance(value, (tuple, list)) and len(value) == 1 < axes else value
                   for key, value in options.items()}  # here a sequence has one value per axis
        y = getattr(torch.nn.functional, name)(sample.input, weight, bias, **options)
        grad = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape) % 5 - 2
        inputs = [sample.input, weight] + ([] if bias is None else [bias])
        expected = torch.autograd.grad(y, inputs, grad)
        found = backward(grad, sample.input.detach(), weight.detach(), **options)
        for a, e in zip(found, expected):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("name", ["conv", "input_grad", "weight_grad", "bias_grad", "conv_backward", "conv_transpose",
                                  "conv_transpose_backward"])
def test_every_function_is_differentiable(name: str) -> None:
    function, operands = {
        "conv": (lambda x, w: convgrad.conv(x, w, **OPTIONS), (x, w)),
        "input_grad": (lambda dy, w: convgrad.input_grad(dy, w, (5, 4), **OPTIONS), (dy, w)),
        "weight_grad": (lambda dy, x: convgrad.weight_grad(dy, x, (3, 2), **OPTIONS), (dy, x)),
        "bias_grad": (convgrad.bias_grad, (dy,)),
        "conv_backward": (lambda *a: convgrad.conv_backward(*a, **OPTIONS), (dy, x, w)),
        "conv_transpose": (lambda dy, w: convgrad.conv_transpose(dy, w, output_padding=(0, 2), **OPTIONS), (dy, w)),
        "conv_transpose_backward": (lambda x, dy, w: convgrad.conv_transpose_backward(x, dy, w, **OPTIONS), (x, dy, w)),
    }[name]
    assert torch.autograd.gradcheck(function, operands, check_forward_ad=name != "conv_transpose", fast_mode=True)
    assert torch.autograd.gradgradcheck(function, operands, fast_mode=True)


def test_layouts_are_differentiable_too() -> None:
    last, taps = x.detach().permute(0, 2, 3, 1).contiguous().requires_grad_(), w.detach().permute(2, 3, 1, 0)
    y = convgrad.conv(last, taps, layout="NHWC", weight_layout="HWIO", **OPTIONS)
    expected = convgrad.torch.conv(x, w, **OPTIONS)
    torch.testing.assert_close(y, expected.permute(0, 2, 3, 1))
    (found,) = torch.autograd.grad(y.square().sum(), last)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), x)[0].permute(0, 2, 3, 1))


def test_traces_and_torch_func_see_operators() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    plain = [t.detach() for t in (dy, x, w)]
    graph = make_fx(lambda *a: convgrad.conv_backward(*a, **OPTIONS))(*plain)
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert {f"convgrad.{name}_grad.default" for name in ("input", "weight", "bias")} <= names
    assert not any("empty" in name for name in names)
    many = torch.stack([plain[1], 2 * plain[1]])
    mapped = torch.func.vmap(lambda x: convgrad.conv(x, plain[2], **OPTIONS))(many)
    torch.testing.assert_close(mapped, torch.stack([convgrad.conv(x, plain[2], **OPTIONS) for x in many]))


def test_nothing_is_recorded_without_need() -> None:
    assert not convgrad.conv(x.detach(), w.detach(), **OPTIONS).requires_grad
    with torch.no_grad():
        assert not convgrad.conv(x, w, **OPTIONS).requires_grad
        out = torch.empty(2, 6, 5, 3, dtype=torch.float64)
        assert convgrad.conv(x, w, out=out, **OPTIONS) is out


@pytest.mark.parametrize(("options", "named"), [
    ({"out": torch.empty(2, 6, 5, 3, dtype=torch.float64)}, "out"), ({"backend": "reference"}, "backend='reference'"),
    ({"scales": {"input": 2.0}}, "input"), ({"workspace": torch.empty(64, dtype=torch.uint8)}, "workspace"),
    ({"out_dtype": "float32"}, "out_dtype='float32'")], ids=["out", "backend", "scales", "workspace", "out_dtype"])
def test_what_cannot_be_differentiated_says_so(options, named: str) -> None:
    with pytest.raises(ValueError, match=f"recorded .* which does not go with .*{named}.*: detach them first"):
        convgrad.conv(x, w, **OPTIONS, **options)
    with pytest.raises(ValueError, match="does not go with compute='tf32'"):
        convgrad.conv(x.float(), w.float(), compute="tf32", **OPTIONS)


def test_one_image_without_its_batch_axis() -> None:
    arrays = [t.detach().numpy() for t in (dy, x, w)]
    whole = convgrad.conv_backward(arrays[0][:1], arrays[1][:1], arrays[2], **OPTIONS)
    out = (np.empty_like(whole[0][0]), None, None)
    single = convgrad.conv_backward(arrays[0][0], arrays[1][0], arrays[2], out=out, **OPTIONS)
    assert single[0].base is out[0] or np.shares_memory(single[0], out[0])
    for a, e in zip(single, (whole[0][0], *whole[1:])):
        assert (a == e).all()
    masked = convgrad.conv_backward(arrays[0][0], arrays[1][0], arrays[2], output_mask=(False, True, False), **OPTIONS)
    assert masked[0] is None and (masked[1] == whole[1]).all()


def test_same_is_for_stride_1() -> None:
    y = convgrad.conv(x.detach(), w.detach(), padding="same", groups=2)
    torch.testing.assert_close(y, torch.nn.functional.conv2d(x.detach(), w.detach(), padding="same", groups=2))
    with pytest.raises(ValueError, match=r"padding='same' goes with stride 1, got \(2, 2\): say 'same_upper'"):
        convgrad.conv(x.detach(), w.detach(), padding="same", stride=2, groups=2)
