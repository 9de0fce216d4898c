"""What programs do around a convolution, under `install()` and without it: the same results everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import convgrad.torch

torch = pytest.importorskip("torch")
pytest.importorskip("convgrad._native")
from opinfo import NAMES, operators, samples  # noqa: E402
from torch import nn  # noqa: E402
from torch._inductor import config as inductor  # noqa: E402
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402

F = nn.functional
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.complex64: 2e-4, torch.bfloat16: 0.05,
             torch.float16: 0.01}


@pytest.fixture(autouse=True)
def fresh_report() -> None:
    convgrad.torch.report(reset=True)


def ours() -> int:
    return sum(line.calls for line in convgrad.torch.report() if line.served_by == "native")


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from leaves(one)


def agree(program: Any, tolerance: float = 1e-9) -> int:
    """Run a program with and without `install()`, compare all tensors, and say how many calls were ours."""
    theirs = list(leaves(program()))
    with convgrad.torch.installed():
        found = list(leaves(program()))
    assert len(found) == len(theirs) > 0
    for one, other in zip(found, theirs):
        assert one.dtype == other.dtype and one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    return ours()


# --- PyTorch's own samples --------------------------------------------------------------------------------------------

def gradients(operator: Any, sample: Any, order: int) -> list[torch.Tensor]:
    """Results and gradients of one sample; of second order those of the sum of the first ones' squares."""
    result = operator.op(sample.input, *sample.args, **sample.kwargs)
    inputs = [tensor for tensor in (sample.input, *sample.args) if isinstance(tensor, torch.Tensor)]
    dy = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).reshape(result.shape).to(result.dtype)
    first = torch.autograd.grad(result, inputs, dy, create_graph=order > 1)
    if order == 1:
        return [result, *first]
    total = sum((one * one.conj()).real.sum() for one in first)
    return [result, *first, *torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_samples_of_pytorch(name: str, dtype: Any) -> None:
    operator = operators()[name]
    order = 2 if dtype in (torch.float64, torch.float32, torch.complex64) else 1
    found = samples(operator, dtype)
    assert len(found) > 5
    for sample in found:
        theirs = gradients(operator, sample, order)
        with convgrad.torch.installed():
            got = gradients(operator, sample, order)
        for one, other in zip(got, theirs):
            assert one.shape == other.shape and one.dtype == other.dtype
            if one.numel():
                error, largest = (one - other).abs().max().item(), other.abs().max().item()
                assert error <= TOLERANCE[dtype] * max(1.0, largest), sample
    assert ours() > 0  # complex ones arrive as real ones


# --- autograd and torch.func ------------------------------------------------------------------------------------------

def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=draw, dtype=torch.double).requires_grad_()
                 for shape in ((2, 2, 4, 3), (4, 1, 2, 2), (4,)))  # type: ignore[return-value]


def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, w, b, stride=(2, 1), padding=(1, 0), groups=2)


def transposed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.conv_transpose2d(x, w.reshape(2, 2, 2, 2), b, stride=(1, 2), padding=1, output_padding=(0, 1), groups=2)


@pytest.mark.parametrize("function", [layer, transposed])
def test_finite_differences(function: Any) -> None:
    with convgrad.torch.installed():
        assert torch.autograd.gradcheck(function, tensors(), check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, tensors(), check_fwd_over_rev=True)
    assert ours() > 0


FUNCTIONAL = {
    "grad": lambda x, w, b: grad(lambda w: layer(x, w, b).square().sum())(w),
    "vjp": lambda x, w, b: vjp(layer, x, w, b)[1](torch.ones_like(layer(x, w, b))),
    "jvp": lambda x, w, b: jvp(grad(lambda w: layer(x, w, b).square().sum()), (w,), (torch.ones_like(w),)),
    "hessian": lambda x, w, b: hessian(lambda w: layer(x, w, b).square().sum())(w),
    "jacfwd of jacrev": lambda x, w, b: jacfwd(jacrev(lambda w: layer(x, w, b).square().sum()))(w),
    "jacrev": lambda x, w, b: jacrev(layer, argnums=(0, 1, 2))(x, w, b),
    "per sample": lambda x, w, b: vmap(grad(lambda w, one: layer(one[None], w, b).square().sum()),
                                       in_dims=(None, 0))(w, x),
    "vmap over weights": lambda x, w, b: vmap(grad(lambda w: layer(x, w, b).square().sum()))(torch.stack([w, 2 * w])),
    "vmap over both": lambda x, w, b: vmap(grad(lambda x, w: layer(x, w, b).square().sum(), argnums=(0, 1)))(
        torch.stack([x, -x]), torch.stack([w, 2 * w])),
    "batched": lambda x, w, b: torch.autograd.grad(layer(x, w, b), (x, w, b), torch.ones(3, 2, 4, 3, 2).double(),
                                                   is_grads_batched=True),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_transforms(name: str) -> None:
    x, w, b = tensors()
    assert agree(lambda: FUNCTIONAL[name](x, w, b)) > 0


def test_hessian_vector_product_of_a_model() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 2)).double()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    x = tensors()[0].detach().repeat(1, 1, 2, 2)

    def loss(weights: Any) -> torch.Tensor:
        return functional_call(model, weights, (x,)).square().sum()

    assert agree(lambda: jvp(grad(loss), (weights,), (weights,))) > 0


# --- tracing and compiling --------------------------------------------------------------------------------------------

def test_make_fx_records_the_operator() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x, w, b = (tensor.detach() for tensor in tensors())

    def gradient(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w = w.requires_grad_()
        return torch.autograd.grad(layer(x, w, b).square().sum(), [w])

    with convgrad.torch.installed():
        graph = make_fx(gradient)(x, w, b)
        assert "aten.convolution_backward.default" in graph.code
        assert agree(lambda: graph(2 * x, w, b)) > 0


def test_fake_and_meta_tensors_compute_nothing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def step(device: str) -> list[torch.Tensor]:
        x = torch.ones(2, 3, 8, 8, device=device).contiguous(memory_format=torch.channels_last).requires_grad_()
        w = torch.ones(4, 3, 3, 3, device=device, requires_grad=True)
        return list(torch.autograd.grad(F.conv2d(x, w).square().sum(), (x, w)))

    with convgrad.torch.installed():
        with FakeTensorMode():
            fake = step("cpu")
        meta = step("meta")
        assert ours() == 0
        real = step("cpu")
    for one in (fake, meta):
        assert [(g.shape, g.stride()) for g in one] == [(g.shape, g.stride()) for g in real]


class Net(nn.Module):
    """A bit of everything that Inductor must find as it expects it: strides, groups, transposed, bias."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8),
                                  nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(4, 4, 1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return y


@pytest.mark.parametrize(("backend", "channels_last"), [("aot_eager", False), ("inductor", True)])
def test_compiled_in_one_graph(backend: str, channels_last: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 4, 8, 8)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)

    def step(forward: Any) -> list[torch.Tensor]:
        model.zero_grad()
        forward(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    eager = step(model)
    # NOTE: in this process; Inductor's own workers would outlive the test
    with inductor.patch(compile_threads=1), convgrad.torch.installed():
        compiled = step(torch.compile(model, backend=backend, fullgraph=True))
    assert ours() == 4
    for one, other in zip(compiled, eager):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_graphs_compiled_before_follow() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(nn.Conv2d(2, 3, 3), backend="aot_eager", fullgraph=True)
    x = torch.ones(1, 2, 5, 5)
    compiled(x).sum().backward()
    assert ours() == 0
    with convgrad.torch.installed():
        compiled(x).sum().backward()
    assert ours() == 1
    compiled(x).sum().backward()
    assert ours() == 1


def test_exported_programs() -> None:
    model, x = Net(), torch.randn(2, 4, 8, 8)
    with convgrad.torch.installed():
        program = torch.export.export(model, (x,)).module()
        program(x).sum().backward()
    assert ours() == 4


def test_autocast() -> None:
    model, x = Net(), torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    assert agree(step, 0.05) == 4
    assert any(" bf16 " in line.geometry for line in convgrad.torch.report())
