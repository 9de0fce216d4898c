"""Operators, layers and training loops on a GPU, beside PyTorch in float64."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from cases import CASES, operands  # noqa: E402
from torch.func import functional_call, grad, vmap  # noqa: E402

import convgrad.torch as cg  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ops = torch.ops.convgrad


def on_gpu(arguments, dtype):
    return [a.detach().to("cuda", dtype).requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients_are_those_of_the_cpu(case: str, dtype) -> None:
    arguments = operands(case)
    ours, exact = on_gpu(arguments, dtype), [a.detach().to(dtype).double().requires_grad_()
                                             if isinstance(a, torch.Tensor) else a for a in arguments]
    y, e = ops.convolution(*ours), ops.convolution(*exact)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    torch.testing.assert_close(y.double().cpu(), e, rtol=tolerance, atol=tolerance)
    for a, b in zip(torch.autograd.grad(y.sum(), ours[:3]), torch.autograd.grad(e.sum(), exact[:3])):
        torch.testing.assert_close(a.double().cpu(), b, rtol=tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("case", ["2d", "3d", "beyond"])
def test_opcheck(case: str) -> None:
    arguments = on_gpu(operands(case), torch.float32)
    torch.library.opcheck(ops.convolution, arguments, rtol=1e-3, atol=1e-4)
    x, w, _, *rest = arguments
    dy = torch.ones_like(ops.convolution(*arguments))
    torch.library.opcheck(ops.convolution_backward, (dy, x, w, [dy.shape[1]], *rest, [True] * 3), rtol=1e-3, atol=1e-4)
    last = x.detach().to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d).requires_grad_()
    torch.library.opcheck(ops.convolution_backward, (dy, last, w, None, *rest, [True] * 3), rtol=1e-3, atol=1e-4)


def test_inductor_and_second_order() -> None:
    torch.manual_seed(0)
    block = torch.nn.Sequential(cg.CausalConv3d(4, 8, 3, padding="same"), torch.nn.SiLU(),
                                cg.Conv3d(8, 4, 3, padding=1)).cuda()
    x = torch.randn(2, 4, 5, 6, 6, device="cuda", requires_grad=True)
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True)
    eager = torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])
    for a, e in zip(torch.autograd.grad(compiled(x).square().sum(), [x, *compiled.parameters()]), eager):
        torch.testing.assert_close(a, e, rtol=1e-2, atol=1e-2)
    (g,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(g.square().sum(), block[0].weight)
    wide = copy.deepcopy(block).double().cpu()
    xd = x.detach().double().cpu().requires_grad_()
    (gd,) = torch.autograd.grad(wide(xd).square().sum(), xd, create_graph=True)
    (exact,) = torch.autograd.grad(gd.square().sum(), wide[0].weight)
    torch.testing.assert_close(second.double().cpu(), exact, rtol=1e-2, atol=1e-2 * float(exact.abs().max()))


def test_per_sample_gradients() -> None:
    torch.manual_seed(0)
    model = cg.Conv2d(4, 8, 3, padding=[(2, 0), (1, 1)], groups=2).cuda()
    x = torch.randn(5, 4, 6, 7, device="cuda")
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    found = vmap(grad(lambda p, x: functional_call(model, p, (x[None],)).square().sum()), (None, 0))(parameters, x)
    for image, one in zip(x, found["weight"]):
        alone = grad(lambda p, image=image: functional_call(model, p, (image[None],)).square().sum())(parameters)
        torch.testing.assert_close(one, alone["weight"], rtol=1e-3, atol=1e-3)


def test_fp8_training_follows_float32() -> None:
    torch.manual_seed(0)
    layer = cg.Fp8Conv2d(16, 32, 3, padding=1).cuda()
    plain = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
    plain.load_state_dict(layer.state_dict())
    x, target = torch.randn(4, 16, 12, 12, device="cuda"), torch.randn(4, 32, 12, 12, device="cuda")
    losses = []
    for model in (layer, plain):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(10):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_main_grad() -> None:
    layer = cg.accumulate_main_grad(cg.Conv2d(8, 8, 3, dtype=torch.bfloat16, device="cuda"))
    x = torch.randn(2, 8, 6, 6, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        layer(x).sum().backward()
    exact = torch.nn.functional.conv2d(x.double().transpose(0, 1), torch.ones(1, 2, 4, 4, device="cuda").double())
    torch.testing.assert_close(layer.weight.main_grad.double(), 2 * exact.transpose(0, 1).expand(8, 8, 3, 3), rtol=1e-4,
                               atol=1e-4)
