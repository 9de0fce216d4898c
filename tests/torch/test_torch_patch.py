"""`patch(model)`: the gradients of one model's convolutions, whatever its layers are, and of no other."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator

import pytest

import convgrad.torch

torch = pytest.importorskip("torch")
pytest.importorskip("convgrad._native")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

F = nn.functional


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    convgrad.torch.report(reset=True)
    before = torch._C._dispatch_dump("aten::convolution_backward")
    yield
    assert torch._C._dispatch_dump("aten::convolution_backward") == before


def calls() -> int:
    """How many calls our backends have served since the last question."""
    return sum(line.calls for line in convgrad.torch.report(reset=True) if line.served_by == "native")


class Subclass(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(2, 3, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.kernel, stride=2, padding=1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return y


class Handmade(torch.autograd.Function):
    """A convolution that somebody has written as an autograd function."""

    @staticmethod
    def forward(ctx, x, w):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, w)
        return F.conv2d(x, w)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, w = ctx.saved_tensors
        return torch.nn.grad.conv2d_input(x.shape, w, dy), torch.nn.grad.conv2d_weight(x, w.shape, dy)


class HandmadeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(2, 3, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Handmade.apply(x, self.kernel)
        return y


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (lambda: nn.Conv2d(3, 2, 3), 1),
    "subclass": (lambda: Subclass(3, 2, 3), 1),
    "functional": (Functional, 1),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 2, 3)), 1),
    "lazy": (lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyConvTranspose2d(2, 3)), 2),
    "same": (lambda: nn.Conv2d(3, 2, (2, 3), padding="same"), 1),
    "circular": (lambda: nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"), 1),
    "checkpointed": (Checkpointed, 1),
    "autograd function": (HandmadeLayer, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_layer_is_served(name: str) -> None:
    build, expected = MODELS[name]
    model = build()
    x = torch.ones(1, 3, 7, 7, requires_grad=True)
    model(x)  # lazy layers take their shape
    model(x).sum().backward()
    assert calls() == 0
    theirs = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with convgrad.torch.patched(model):
        model(x).sum().backward()
    assert calls() == expected
    for parameter, before in zip(model.parameters(), theirs):
        torch.testing.assert_close(parameter.grad, before)
    model(x).sum().backward()
    assert calls() == 0


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.ones(3, 4, 6)), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.conv_tbc(x, self.kernel, self.bias, 1)


def test_conv_tbc() -> None:
    model, other = TimeFirst().bfloat16(), TimeFirst().bfloat16()
    with convgrad.torch.patched(model):
        other(torch.ones(7, 2, 4, dtype=torch.bfloat16)).sum().backward()
        assert calls() == 0
        model(torch.ones(7, 2, 4, dtype=torch.bfloat16)).sum().backward()
        assert calls() == 1


def test_a_lazy_model_may_be_patched_first() -> None:
    model = convgrad.torch.patch(nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU()))
    model(torch.ones(1, 3, 7, 7)).sum().backward()
    assert calls() == 1
    convgrad.torch.unpatch(model)


def test_unbatched_input_and_a_part_of_a_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Conv2d(2, 2, 3))
    with convgrad.torch.patched(model):
        model(torch.ones(3, 9, 9)).sum().backward()
        assert calls() == 2
        model[0](torch.ones(1, 3, 9, 9)).sum().backward()
        assert calls() == 1


def test_other_models_stay_torchs() -> None:
    ours, theirs = convgrad.torch.patch(nn.Conv2d(3, 2, 3)), nn.Conv2d(2, 2, 3)
    theirs(ours(torch.ones(1, 3, 9, 9))).sum().backward()
    assert calls() == 1
    convgrad.torch.unpatch(ours)


def test_patched_keeps_what_was_patched_before() -> None:
    model = convgrad.torch.patch(nn.Conv2d(3, 2, 3))
    with convgrad.torch.patched(model):
        pass
    model(torch.ones(1, 3, 9, 9)).sum().backward()
    assert calls() == 1
    convgrad.torch.unpatch(model)


def test_state_copies_and_pickles() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU())
    keys, types = list(model.state_dict()), [type(layer) for layer in model]
    convgrad.torch.patch(model)
    assert list(model.state_dict()) == keys and [type(layer) for layer in model] == types
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    convgrad.torch.unpatch(model)
    for other in copies:  # a copy of a patched model is patched, whatever became of the original
        other(torch.ones(1, 3, 9, 9)).sum().backward()
        assert calls() == 1
        convgrad.torch.unpatch(other)
        other(torch.ones(1, 3, 9, 9)).sum().backward()
        assert calls() == 0
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks


def test_a_forward_that_fails_leaves_nothing_open() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Conv2d(5, 2, 3))
    with convgrad.torch.patched(model), pytest.raises(RuntimeError):
        model(torch.ones(1, 3, 9, 9))
    nn.Conv2d(3, 2, 3)(torch.ones(1, 3, 9, 9)).sum().backward()
    with convgrad.torch.patched(nn.Conv2d(3, 2, 3)):
        nn.Conv2d(3, 2, 3)(torch.ones(1, 3, 9, 9)).sum().backward()
    assert calls() == 0


def test_compiled_code_is_served_or_warned_about() -> None:
    torch._dynamo.reset()
    x = torch.ones(1, 3, 9, 9)
    compiled = convgrad.torch.patch(torch.compile(nn.Conv2d(3, 2, 3), backend="aot_eager"))
    compiled(x).sum().backward()
    assert calls() == 1
    convgrad.torch.unpatch(compiled)
    model = convgrad.torch.patch(nn.Conv2d(3, 2, 3))
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    with pytest.warns(UserWarning, match="patch the compiled model or use convgrad.torch.install"):
        out.sum().backward()
    assert calls() == 0
    convgrad.torch.unpatch(model)


def test_what_cannot_be_patched_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        convgrad.torch.patch([nn.Conv2d(3, 2, 3)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Conv2d(3, 2, 3))
    with pytest.raises(TypeError, match=r"use convgrad.torch.install\(\)"):
        convgrad.torch.patch(scripted)


def test_the_report_is_a_table() -> None:
    assert "no gradient of a convolution" in str(convgrad.torch.report())
    with convgrad.torch.installed():
        nn.Conv2d(3, 2, 3)(torch.ones(1, 3, 9, 9)).sum().backward()
        nn.Conv2d(3, 2, 3)(torch.ones(0, 3, 9, 9)).sum().backward()
    text = str(convgrad.torch.report())
    assert "weight+bias f32 n1 c3 k2 i9x9 w3x3" in text and "native" in text and "an empty tensor" in text
    assert text.splitlines()[0].split()[:2] == ["geometry", "calls"] and text.splitlines()[-1].startswith("2 calls")
