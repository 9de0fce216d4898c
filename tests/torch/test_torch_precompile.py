"""precompile: the problems of a model's gradients, found without computing anything."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from convgrad.frontends.torch.aten_backward import BackwardCall  # noqa: E402
from convgrad.torch import precompile  # noqa: E402

nn = torch.nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)

    def forward(self, x: Any) -> Any:
        x = self.depthwise(torch.relu(self.norm(self.first(x))))
        return self.frozen(nn.functional.dropout(self.up(x)))


class Backwards(TorchDispatchMode):
    """The calls of aten::convolution_backward that torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.calls.append(BackwardCall(*args))
        return func(*args, **(kwargs or {}))


def said(call: Any) -> Any:
    """What decides which kernels a call needs."""
    lies = [(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype) for tensor in call.tensors]
    return (*lies, *(list(part) if isinstance(part, (list, tuple)) else part for part in call[4:]))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_calls_are_those_of_a_training_step(last: bool, autocast: bool) -> None:
    from convgrad.frontends.torch.precompiling import backward_calls

    model, x = Model(), torch.randn(2, 3, 8, 8)
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = backward_calls(model, (x,))
        assert torch.equal(torch.random.get_rng_state(), state)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "as it was"
        y = model(x)
    with Backwards() as backwards:
        y.backward(torch.empty_like(y))
    assert [device for device, _ in found] == ["cpu"] * 4
    assert [said(call) for _, call in reversed(found)] == [said(call) for call in backwards.calls]


def test_problems_on_cuda() -> None:
    from convgrad.frontends.torch.precompiling import backward_calls, wanted_problems

    layer = nn.Conv2d(8, 16, 3, padding=1).bfloat16().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 6, 6).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
    ((_, call),) = backward_calls(layer, (x,))
    (problem, strides), = wanted_problems(call)
    assert str(problem) == "input_grad+weight_grad+bias_grad bf16 n2 c8 k16 i6x6 w3x3 p1x1 NHWC OHWI cuda"
    image, weight = (288, 1, 48, 8), (72, 1, 24, 8)
    assert strides == ((576, 1, 96, 16), image, weight, image, weight, (1,))


def test_nothing_to_do_on_the_cpu() -> None:
    done = precompile(Model(), torch.randn(2, 3, 8, 8))
    assert (done.calls, done.problems, done.errors) == (4, 0, ())
