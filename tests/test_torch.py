"""PyTorch tensors through the public functions, autograd of every order, and patched models."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import convgrad  # noqa: E402

nn = torch.nn
CASES = [
    ((2, 6, 9), (8, 3, 3), dict(stride=2, padding=1, groups=2)),
    ((2, 4, 7, 8), (6, 4, 3, 2), dict(stride=(2, 1), padding=(1, 0), dilation=(1, 2))),
    ((1, 4, 5, 6, 4), (4, 1, 3, 1, 2), dict(padding=1, groups=4)),
]


@pytest.fixture(autouse=True)
def _fast_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end is under test here, not an engine: the reference serves where no engine is built."""
    try:
        convgrad.plan("input_grad f64 n1 c1 k1 i3 w1")
    except convgrad.Unsupported:
        monkeypatch.setenv("CONVGRAD_BACKEND", "reference")


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).integers(-2, 3, shape)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case[0]) - 2}d")
def test_same_values_as_torch_for_integer_data(case, dtype) -> None:
    x_shape, w_shape, parameters = case
    x, w = integers(x_shape, dtype, 1), integers(w_shape, dtype, 2)
    forward = getattr(nn.functional, f"conv{len(x_shape) - 2}d")
    y = forward(x.double(), w.double(), **parameters)
    ours = convgrad.conv(x, w, **parameters)
    assert type(ours) is torch.Tensor and ours.dtype == dtype
    assert torch.equal(ours.double(), y)
    dy = integers(tuple(y.shape), dtype, 3)
    axes = len(x_shape) - 2
    theirs = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), w.double(), [w_shape[0]],
        *(list(parameters.get(name, default)) if isinstance(parameters.get(name, default), tuple)
          else [parameters.get(name, default)] * axes for name, default in
          (("stride", 1), ("padding", 0), ("dilation", 1))),
        False, [0] * axes, parameters.get("groups", 1), [True] * 3)
    for mine, exact in zip(convgrad.conv_backward(dy, x, w, **parameters), theirs):
        assert mine.dtype == dtype
        assert torch.equal(mine.double(), exact.to(dtype).double())


@pytest.mark.parametrize("rank", [4, 5])
def test_channels_last_memory_is_kept(rank: int) -> None:
    memory = {4: torch.channels_last, 5: torch.channels_last_3d}[rank]
    x = integers((2, 4, *[5] * (rank - 2)), torch.float32, 1)
    w = integers((3, 4, *[3] * (rank - 2)), torch.float32, 2)
    plain = convgrad.conv(x, w)
    last = convgrad.conv(x.to(memory_format=memory), w)
    assert last.is_contiguous(memory_format=memory) and torch.equal(plain, last)
    dx = convgrad.input_grad(last, w, x.shape[2:])
    assert dx.is_contiguous(memory_format=memory)
    assert torch.equal(dx, convgrad.input_grad(plain, w, x.shape[2:]))


def test_float8_and_hifloat8_tensors() -> None:
    x, w = integers((1, 2, 6), torch.float32, 1), integers((3, 2, 3), torch.float32, 2)
    exact = convgrad.conv(x, w)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert torch.equal(convgrad.conv(x.to(dtype), w.to(dtype)), exact)
    from convgrad.numbers import encode

    x8, w8 = (torch.from_numpy(encode(t.numpy().astype(np.float64), "hifloat8")) for t in (x, w))
    assert torch.equal(convgrad.conv(x8, w8, dtype="hifloat8"), exact)
    with pytest.raises(TypeError, match="input is uint8; say dtype='hifloat8'"):
        convgrad.conv(x8, w8)


def test_out_and_workspace_rules() -> None:
    x, w = integers((1, 2, 6), torch.float32, 1), integers((3, 2, 3), torch.float32, 2)
    out = torch.full((1, 3, 4), 7.0)
    assert convgrad.conv(x, w, out=out) is out
    for bad, sentence in (
        (torch.full((1, 3, 5), 7.0), r"out has shape \(1, 3, 5\), but the result has shape \(1, 3, 4\)"),
        (torch.full((1, 3, 4), 7.0).double(), "out has dtype torch.float64, but the result is float32"),
        (torch.full((1, 3, 4), 7.0, requires_grad=True), "out requires grad"),
        (torch.full((1, 1, 1), 7.0).expand(1, 3, 4), "out has elements that overlap each other"),
        (np.full((1, 3, 4), 7.0, np.float32), "out must be a torch tensor like the operands, got ndarray"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            convgrad.conv(x, w, out=bad)
        assert (np.asarray(bad.detach() if isinstance(bad, torch.Tensor) else bad) == 7).all()
    with pytest.raises(TypeError, match="all arrays of a call must be of one kind"):
        convgrad.conv(x, w.numpy())
    memory = torch.ones(1, 1, 5)
    with pytest.raises(ValueError, match="overlaps input in memory"):
        convgrad.conv(memory[..., :4], torch.ones(1, 1, 1), out=memory[..., 1:])


def test_first_and_second_derivatives_by_finite_differences() -> None:
    x = torch.randn(2, 2, 4, 5, dtype=torch.double, requires_grad=True)
    w = torch.randn(4, 1, 2, 3, dtype=torch.double, requires_grad=True)
    b = torch.randn(4, dtype=torch.double, requires_grad=True)

    def layer(x, w, b):
        return convgrad.torch.conv(x, w, b, stride=(1, 2), padding=[(1, 0), (0, 2)], groups=2)

    assert torch.autograd.gradcheck(layer, (x, w, b))
    assert torch.autograd.gradgradcheck(layer, (x, w, b))
    wt = torch.randn(2, 2, 2, 3, dtype=torch.double, requires_grad=True)

    def transposed(x, w, b):
        return convgrad.torch.conv_transpose(x, w, b, stride=(1, 2), padding=1, output_padding=(0, 1), groups=2)

    assert torch.autograd.gradcheck(transposed, (x, wt, b))
    assert torch.autograd.gradgradcheck(transposed, (x, wt, b))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, (2, 3), padding="same", groups=4, dilation=2),
        nn.ConvTranspose2d(8, 4, 4, stride=3, padding=1, output_padding=1),
        nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular")).double()


def test_patched_model_has_the_same_gradients_of_first_and_second_order() -> None:
    theirs = model()
    ours = convgrad.torch.patch(copy.deepcopy(theirs))
    x = torch.randn(2, 3, 11, 10, dtype=torch.double)
    second = []
    for net in (theirs, ours):
        x_in = x.clone().requires_grad_()
        first = torch.autograd.grad(net(x_in).square().sum(), [x_in, *net.parameters()], create_graph=True)
        second.append((first, torch.autograd.grad(sum(g.square().sum() for g in first), [x_in, *net.parameters()])))
    for a, b in zip(second[0][0] + second[0][1], second[1][0] + second[1][1]):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-10)
    plain = [p.grad for net in (theirs, ours) if net(x).sum().backward() is None for p in net.parameters()]
    half = len(plain) // 2
    for a, b in zip(plain[:half], plain[half:]):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-10)
    convgrad.torch.unpatch(ours)


def test_autocast_and_unbatched_input() -> None:
    with convgrad.torch.patched(model().float()) as net:
        check_autocast_and_unbatched_input(net)


def check_autocast_and_unbatched_input(net: nn.Module) -> None:
    x = torch.randn(2, 3, 11, 10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())
    torch.testing.assert_close(net(x[0]), net(x)[0])
