"""Scaled operators and FP8 layers; gradients added to a main gradient in float32."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

import convgrad  # noqa: E402
import convgrad.torch as cg  # noqa: E402

ops = torch.ops.convgrad
E4M3 = torch.float8_e4m3fn
TAIL = ([1, 1], [1, 1, 0, 1], [1, 1], 1)


def whole(shape, seed: int, dtype=torch.float32):
    return torch.tensor(np.random.default_rng(seed).integers(-2, 3, shape)).to(dtype)


def test_opcheck_of_scaled_operators() -> None:
    """In float32: PyTorch cannot compare FP8 tensors, as opcheck does."""
    x, w, dy = (whole(shape, seed) for seed, shape in enumerate([(2, 3, 4, 5), (4, 3, 2, 3), (2, 4, 5, 4)]))
    one, half = torch.tensor(1.0), torch.tensor([0.5])
    torch.library.opcheck(ops.scaled_convolution, (x, one, w, half, *TAIL, torch.bfloat16, "tf32"))
    torch.library.opcheck(ops.scaled_input_grad, (dy, one, w, half, [4, 5], *TAIL, torch.float32))
    torch.library.opcheck(ops.scaled_weight_grad, (dy, one, x, half, [2, 3], *TAIL, torch.float32))
    x, w = x.to(E4M3), w.to(E4M3)
    exact = cg.conv2d(x.double(), w.double(), padding=[(1, 1), (0, 1)]) * 0.5
    assert torch.equal(ops.scaled_convolution(x, one, w, half, *TAIL, torch.float32).double(), exact)


def test_opcheck_of_accumulation() -> None:
    x, dy = whole((2, 3, 4, 5), 1, torch.bfloat16), whole((2, 4, 5, 4), 2, torch.bfloat16)
    torch.library.opcheck(ops.add_weight_grad_, (torch.ones(4, 3, 2, 3), dy, x, *TAIL))
    torch.library.opcheck(ops.add_bias_grad_, (torch.ones(4), dy))


def test_fp8_layer_is_exact_for_numbers_that_fp8_has() -> None:
    """Whole numbers with a largest magnitude that makes the scale a power of two."""
    layer = cg.Fp8Conv2d(3, 4, (2, 3), padding=[(1, 0), (1, 1)])
    with torch.no_grad():
        layer.weight.copy_(whole(layer.weight.shape, 1))
        layer.weight.view(-1)[0] = 7.0
        layer.bias.copy_(whole(layer.bias.shape, 2))
    x = whole((2, 3, 4, 5), 3)
    x.view(-1)[0] = 14.0
    x.requires_grad_()
    y = layer(x)
    plain = cg.Conv2d(3, 4, (2, 3), padding=[(1, 0), (1, 1)])
    plain.load_state_dict(layer.state_dict())
    expected = plain(x)
    assert torch.equal(y, expected)
    dy = whole(y.shape, 4)
    dy.view(-1)[0] = 3.5
    found = torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)
    for a, e in zip(found, torch.autograd.grad(expected, [x, plain.weight, plain.bias], dy)):
        assert torch.equal(a, e)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_fp8_training_follows_float32(axes: int) -> None:
    torch.manual_seed(0)
    layer = getattr(cg, f"Fp8Conv{axes}d")(4, 4, 3, padding="same", history=4)
    plain = getattr(torch.nn, f"Conv{axes}d")(4, 4, 3, padding="same")
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 4, *[5] * axes)
    target = torch.randn(4, 4, *[5] * axes)
    losses = []
    for model in (layer, plain):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(12):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_delayed_scales() -> None:
    layer = cg.Fp8Conv1d(1, 1, 1, bias=False, history=2, margin=1)
    history = layer.amax_history
    for largest in (1.0, 4.0, 2.0):
        layer(torch.tensor([[[largest, -0.5]]])).sum().backward()
    assert history[0].tolist() == [2.0, 4.0] and history[2].tolist() == [1.0, 1.0]
    layer.eval()
    layer(torch.full((1, 1, 2), 9.0))
    assert history[0].tolist() == [2.0, 4.0]
    layer.train()
    layer(torch.tensor([[[float("inf"), 1.0]]]))
    assert layer.amax_history[0].tolist() == [0.0, 2.0]
    assert list(layer.state_dict()) == ["weight"]
    assert layer.bfloat16().amax_history.dtype == torch.float32
    same = copy.deepcopy(layer)
    assert same(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16  # unbatched


def test_main_grad_sums_what_bf16_would_round() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(cg.Conv2d(3, 4, 3, padding=[(2, 0), (1, 1)]), torch.nn.ReLU(),
                                cg.ConvTranspose2d(4, 2, 2, stride=2, groups=2)).bfloat16()
    cg.accumulate_main_grad(model)
    batches = [torch.randn(2, 3, 5, 6).bfloat16().requires_grad_() for _ in range(3)]
    wide = copy.deepcopy(model).float()
    for layer in wide:
        layer.adds_to_main_grad = False
    for x in batches:
        model(x).float().sum().backward()
        wide(x.detach().float()).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and parameter.main_grad.dtype == torch.float32
        torch.testing.assert_close(parameter.main_grad, wide.get_parameter(name).grad, rtol=0.02, atol=0.1)
    assert all(x.grad is not None for x in batches)


def test_main_grad_is_added_exactly_and_under_autocast() -> None:
    layer = cg.accumulate_main_grad(cg.Conv1d(2, 3, 3))
    with torch.no_grad():
        layer.weight.copy_(whole(layer.weight.shape, 5))
    x = whole((2, 2, 7), 6)
    for expected in (1.0, 2.0):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        gradient = convgrad.weight_grad(torch.ones(2, 3, 5), x, 3)
        assert torch.equal(layer.weight.main_grad, expected * gradient)
        assert torch.equal(layer.bias.main_grad, torch.full((3,), 10 * expected))
    with torch.no_grad():
        assert layer(x).shape == (2, 3, 5)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_accumulate_of_the_public_functions(kind: str) -> None:
    x, dy, w = whole((2, 3, 6), 1), whole((2, 4, 4), 2), whole((4, 3, 3), 3)
    arrays = [t if kind == "torch" else t.numpy() for t in (x, dy, w)]
    make = torch.ones if kind == "torch" else lambda shape: np.ones(shape, np.float32)
    for function, operands, shape in ((convgrad.weight_grad, (arrays[1], arrays[0], 3), (4, 3, 3)),
                                      (convgrad.input_grad, (arrays[1], arrays[2], 6), (2, 3, 6)),
                                      (convgrad.bias_grad, (arrays[1],), (4,))):
        out = make(shape)
        assert function(*operands, out=out, accumulate=True) is out
        assert (out == 1 + function(*operands)).all()


def test_accumulate_into_float32_of_16_bit_operands() -> None:
    x, dy = whole((2, 3, 6), 1, torch.bfloat16), whole((2, 4, 4), 2, torch.bfloat16)
    out = torch.full((4, 3, 3), 2.0**-12)
    convgrad.weight_grad(dy, x, 3, out=out, accumulate=True)
    assert torch.equal(out, convgrad.weight_grad(dy.float(), x.float(), 3) + 2.0**-12)


x, dy = torch.ones(2, 3, 6), torch.ones(2, 4, 4)
REFUSALS = [
    (lambda out: convgrad.weight_grad(dy, x, 3, accumulate=True), ValueError, "accumulate=True adds to out"),
    (lambda out: convgrad.weight_grad(dy, x, 3, out=out.half(), accumulate=True), TypeError, "out is float16"),
    (lambda out: convgrad.weight_grad(dy, x, 3, out=out[:3], accumulate=True), ValueError, r"out has shape \(3, 3"),
    (lambda out: convgrad.weight_grad(dy, x, 3, out=out, out_dtype="float64", accumulate=True), TypeError, "out has"),
    (lambda out: convgrad.weight_grad(dy.clone().requires_grad_(), x, 3, out=out, accumulate=True), ValueError,
     "the arrays are recorded .* does not go with accumulate=True"),
    (lambda out: ops.add_weight_grad_(out.bfloat16(), dy, x, [1], [0], [1], 1), TypeError, "main_grad must be float32"),
    (lambda out: ops.add_weight_grad_(out[:3], dy, x, [1], [0], [1], 1), ValueError, r"main_grad has shape \(3, 3"),
    (lambda out: ops.add_weight_grad_(out, dy.clone().requires_grad_(), x, [1], [0], [1], 1), RuntimeError,
     "convgrad.add_weight_grad_.default has no derivative"),
    (lambda out: ops.scaled_convolution(x.to(E4M3), torch.ones(2), out.to(E4M3), torch.ones(1), [1], [0], [1], 1,
                                        torch.float32), TypeError, r"input_scale must be one float32 number.*\(2,\)"),
    (lambda out: cg.accumulate_main_grad(torch.nn.Linear(1, 1)), ValueError, "the model has no convolution layer"),
    (lambda out: cg.Fp8Conv1d(1, 1, 1, padding_mode="circular"), ValueError, "padding_mode='circular': FP8 layers pad"),
    (lambda out: cg.Fp8Conv1d(1, 1, 1, history=0), ValueError, "history must be at least 1, got 0"),
    (lambda out: cg.Fp8Conv1d(3, 1, 1)(torch.ones(2, 2)), ValueError, "weight has 3 input channels per group"),
]


@pytest.mark.parametrize(("call", "error", "sentence"), REFUSALS, ids=[case[2][:30] for case in REFUSALS])
def test_refusals_leave_the_sum_alone(call, error, sentence) -> None:
    out = torch.full((4, 3, 3), 5.0)
    with pytest.raises(error, match=sentence):
        call(out)
    assert (out == 5).all()


def test_a_main_grad_that_is_gone_is_noticed() -> None:
    layer = cg.accumulate_main_grad(cg.Conv1d(1, 1, 1))
    layer.weight.main_grad = None
    with pytest.raises(ValueError, match=r"weight\.main_grad is gone"):
        layer(torch.ones(1, 1, 3))
