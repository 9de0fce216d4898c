"""The functions of `convgrad.torch` beside PyTorch's, on PyTorch's own samples: values and two orders of gradients."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from opinfo import NAMES, operators, samples  # noqa: E402

import convgrad  # noqa: E402

# torch's sum of gradients in 16 bits rounds in its own places
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.02, torch.complex64: 2e-4}


def outcome(function, sample, orders: int):
    """Output, gradients and gradients of gradients of a sample."""
    tensors = [t for t in (sample.input, *sample.args, *sample.kwargs.values()) if isinstance(t, torch.Tensor)]
    y = function(sample.input, *sample.args, **sample.kwargs)
    dy = whole(y).requires_grad_()
    first = torch.autograd.grad(y, tensors, dy, create_graph=orders > 1)
    if orders == 1:
        return [y, *first]
    second = torch.autograd.grad(first, [dy, *tensors], [whole(g) for g in first], allow_unused=True)
    return [y, *first, *second]


def whole(like):
    """Small whole numbers, the same in every format."""
    return (torch.arange(like.numel()).reshape(like.shape) * 7 % 5 - 2).to(like.dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).rpartition(".")[2])
@pytest.mark.parametrize("name", NAMES)
def test_every_sample_of_torch(name: str, dtype) -> None:
    ours = getattr(convgrad.torch, name)
    found = samples(operators()[name], dtype)
    assert len(found) > 5
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for sample in found:
        exact = sample.transform(lambda t: t.detach().to(wide).requires_grad_() if isinstance(t, torch.Tensor) else t)
        orders = 2 if dtype in (torch.float64, torch.bfloat16) else 1
        theirs = outcome(getattr(torch.nn.functional, name), exact, orders)
        for mine, right in zip(outcome(ours, sample, orders), theirs):
            assert (mine is None) == (right is None), sample
            if mine is not None:
                assert mine.dtype == dtype and mine.shape == right.shape
                scale = max(1.0, float(right.detach().abs().max())) if right.numel() else 1.0
                assert torch.allclose(mine.to(wide), right, rtol=0, atol=TOLERANCE[dtype] * scale), sample
