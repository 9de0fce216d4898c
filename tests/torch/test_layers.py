"""Layers, functions beyond `torch.nn.functional`'s, `torch.nn.grad`'s gradients, autocast, per-sample gradients."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import convgrad  # noqa: E402
import convgrad.torch as cg  # noqa: E402

nn, F = torch.nn, torch.nn.functional
LAYERS = [(kind + f"{axes}d", axes) for kind in ("Conv", "ConvTranspose") for axes in (1, 2, 3)]


def pair_of_layers(name: str, *arguments, **keywords):
    """Ours and torch's with one state."""
    ours, theirs = (getattr(module, name)(*arguments, **keywords).double() for module in (cg, nn))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def gradients(layer, x, *arguments):
    x = x.clone().requires_grad_()
    y = layer(x, *arguments)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize(("name", "axes"), LAYERS)
def test_layers_are_those_of_torch(name: str, axes: int) -> None:
    torch.manual_seed(0)
    ours, theirs = pair_of_layers(name, 4, 6, 3, stride=2, padding=1, groups=2)
    assert isinstance(ours, getattr(nn, name)) and list(ours.state_dict()) == list(theirs.state_dict())
    batch = torch.randn(2, 4, *range(5, 5 + axes), dtype=torch.float64)
    for x in (batch, batch[0]):
        for a, e in zip(gradients(copy.deepcopy(ours), x), gradients(theirs, x)):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("keywords", [dict(padding="same"), dict(padding="valid"), dict(padding=(2, 1)),
                                      dict(padding=2, padding_mode="circular"), dict(padding=1, padding_mode="reflect"),
                                      dict(dilation=(2, 1), bias=False)], ids=str)
def test_what_conv2d_takes(keywords) -> None:
    ours, theirs = pair_of_layers("Conv2d", 3, 4, (2, 3), **keywords)
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    for a, e in zip(gradients(ours, x), gradients(theirs, x)):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("batch", [(2,), ()], ids=["batched", "unbatched"])
def test_output_size_of_transposed_layers(batch) -> None:
    ours, theirs = pair_of_layers("ConvTranspose2d", 3, 4, 3, stride=(2, 3), padding=1)
    x = torch.randn(*batch, 3, 4, 5, dtype=torch.float64)
    for size in ([8, 14], [*batch, 4, 7, 15]):
        for a, e in zip(gradients(ours, x, size), gradients(theirs, x, size)):
            torch.testing.assert_close(a, e)


def test_one_sided_padding_is_a_padded_copy_of_torch() -> None:
    layer = cg.Conv2d(3, 4, 3, padding=[(2, 0), (1, 3)]).double()
    plain = nn.Conv2d(3, 4, 3).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    for a, e in zip(gradients(layer, x), gradients(nn.Sequential(nn.ZeroPad2d((1, 3, 2, 0)), plain), x)):
        torch.testing.assert_close(a, e)
    assert "padding=((2, 0), (1, 3))" in repr(layer)
    circular = cg.Conv1d(1, 1, 2, padding=[(1, 0)], padding_mode="circular").double()
    x = torch.arange(4.0, dtype=torch.float64).reshape(1, 1, 4)
    torch.testing.assert_close(circular(x), F.conv1d(torch.cat([x[..., -1:], x], -1), circular.weight, circular.bias))
    cut = cg.ConvTranspose1d(2, 3, 4, stride=2, padding=[(3, 1)]).double()
    whole = nn.ConvTranspose1d(2, 3, 4, stride=2).double()
    whole.load_state_dict(cut.state_dict())
    x = torch.randn(1, 2, 5, dtype=torch.float64)
    torch.testing.assert_close(cut(x), whole(x)[..., 3:-1])


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_causal_layers_see_no_future(axes: int) -> None:
    keywords = dict(padding="same") if axes > 1 else {}
    layer = getattr(cg, f"CausalConv{axes}d")(2, 3, 3, dilation=2, **keywords)
    x = torch.randn(1, 2, 7, *[4] * (axes - 1), requires_grad=True)
    y = layer(x)
    assert y.shape == (1, 3, *x.shape[2:])
    (dx,) = torch.autograd.grad(y[:, :, 3].sum(), x)
    assert (dx[:, :, 4:] == 0).all() and (dx[:, :, 3] != 0).any() and (dx[:, :, 1] != 0).any()
    strided = getattr(cg, f"CausalConv{axes}d")(2, 3, 3, stride=(2,) + (1,) * (axes - 1))
    assert strided(x).shape[2] == 4


@pytest.mark.parametrize("padding", [1, (2, 0)], ids=str)
def test_conv_tbc(padding) -> None:
    layer = cg.ConvTBC(3, 4, 3, padding=padding).double()
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {"weight": (3, 3, 4),
                                                                                         "bias": (4,)}
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    low, high = padding if isinstance(padding, tuple) else (padding, padding)

    def theirs(x):
        return torch.conv_tbc(F.pad(x, (0, 0, 0, 0, low, high)), layer.weight, layer.bias, 0)

    theirs.parameters = layer.parameters
    for a, e in zip(gradients(layer, x), gradients(theirs, x)):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_the_gradients_of_torch_nn_grad(axes: int) -> None:
    x = torch.randn(2, 4, *[6] * axes, dtype=torch.float64)
    w = torch.randn(6, 2, *[3] * axes, dtype=torch.float64)
    arguments = dict(stride=2, padding=1, dilation=1, groups=2)
    dy = torch.randn_like(getattr(F, f"conv{axes}d")(x, w, **arguments))
    torch.testing.assert_close(getattr(cg, f"conv{axes}d_input")(x.shape, w, dy, **arguments),
                               getattr(torch.nn.grad, f"conv{axes}d_input")(x.shape, w, dy, **arguments))
    torch.testing.assert_close(getattr(cg, f"conv{axes}d_weight")(x, w.shape, dy, **arguments),
                               getattr(torch.nn.grad, f"conv{axes}d_weight")(x, w.shape, dy, **arguments))


def test_per_sample_weight_gradients() -> None:
    x, dy = torch.randn(3, 4, 5, 6), torch.randn(3, 6, 5, 3)
    keywords = dict(stride=(1, 2), padding=[(2, 0), (1, 1)], groups=2)
    found = cg.per_sample_weight_grad(dy, x, (3, 3), **keywords)
    assert found.shape == (3, 6, 2, 3, 3)
    for one, image, grad in zip(found, x, dy):
        w = torch.zeros(6, 2, 3, 3, requires_grad=True)
        (expected,) = torch.autograd.grad(cg.conv(image, w, **keywords), w, grad)
        torch.testing.assert_close(one, expected)


def test_autocast_is_torchs() -> None:
    x, w, b = torch.randn(2, 3, 5), torch.randn(4, 3, 3, requires_grad=True), torch.randn(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = cg.conv1d(x, w, b, padding=[(2, 0)])
        wide = cg.Conv1d(3, 4, 3).double()(x.double())
    assert y.dtype == torch.bfloat16 and wide.dtype == torch.float64
    y.float().sum().backward()
    assert w.grad.dtype == torch.float32
    theirs = F.conv1d(F.pad(x.bfloat16().double(), (2, 0)), w.bfloat16().double(), b.bfloat16().double())
    torch.testing.assert_close(y.double(), theirs, rtol=0.02, atol=0.05)


def test_inductor_compiles_causal_layers() -> None:
    """Nothing between the layers: no C++ is generated, which would take most of a minute."""
    torch.manual_seed(0)
    block = nn.Sequential(cg.CausalConv1d(2, 4, 3), cg.Conv1d(4, 2, 3, padding="same"))
    x = torch.randn(2, 2, 9)
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True)
    for a, e in zip(gradients(compiled, x), gradients(block, x)):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


class Marked(torch.Tensor):
    """A subclass that leaves its operations to torch."""


def test_subclasses_negative_views_and_no_channels() -> None:
    x, w = torch.randn(2, 4, 6, 5), torch.randn(3, 4, 3, 3)
    padding = [(2, 0), (1, 1)]
    expected = cg.conv2d(x, w, padding=padding)
    marked = x.as_subclass(Marked).requires_grad_()
    y = cg.conv2d(marked, w, padding=padding)
    assert type(y) is Marked and torch.equal(y.detach().as_subclass(torch.Tensor), expected)
    (dx,) = torch.autograd.grad(y.sum(), marked)
    assert torch.equal(dx.as_subclass(torch.Tensor), cg.conv2d_input(x.shape, w, torch.ones_like(expected), 1, padding))
    assert torch.equal(convgrad.conv(x.as_subclass(Marked), w, padding=padding).as_subclass(torch.Tensor), expected)
    negative = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negative.is_neg()
    for function in (cg.conv2d, convgrad.conv):
        torch.testing.assert_close(function(negative, w, padding=padding), expected)
    nothing, taps = torch.ones(2, 0, 5, requires_grad=True), torch.ones(3, 0, 2, requires_grad=True)
    y = cg.conv1d(nothing, taps, torch.ones(3))
    assert y.shape == (2, 3, 4) and (y == 1).all()
    assert [g.shape for g in torch.autograd.grad(y.sum(), (nothing, taps))] == [nothing.shape, taps.shape]


def test_layers_leave_storages_free() -> None:
    layer = cg.Conv1d(2, 3, 3, padding=[(1, 0)])
    x = torch.randn(2, 2, 6, requires_grad=True)
    layer(x).sum().backward()
    for tensor in (layer.weight, layer.weight.grad, x):
        tensor.untyped_storage().resize_(0)
