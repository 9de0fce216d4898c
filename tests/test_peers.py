"""The same problems through PyTorch, in float64 on integers: a difference of one bit is somebody's mistake."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import geometries
from test_reference import integers

import convgrad
from convgrad import Conv, Problem
from convgrad.backends.reference import solve
from convgrad.verify import geometry_sets

torch = pytest.importorskip("torch")

# Shared ground: torch pads both ends alike and wants at least one element of everything.
SHARED = [problem.conv for problems in geometry_sets().values() for problem in problems
          if all(low == high for low, high in problem.conv.padding)
          and all((problem.conv.batch, problem.conv.in_channels, problem.conv.out_channels,
                   *problem.conv.in_size, *problem.conv.out_size))]


def torch_backward(conv: Conv, values: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    dy, x, w = (torch.from_numpy(values[name]) for name in ("grad_output", "input", "weight"))
    gradients = torch.ops.aten.convolution_backward(
        dy, x, w, [conv.out_channels], conv.stride, [low for low, _ in conv.padding], conv.dilation, False,
        [0] * conv.axes, conv.groups, [True, True, True])
    return tuple(gradient.numpy() for gradient in gradients)


def test_backward_on_the_list() -> None:
    assert len(SHARED) > 300
    for seed, conv in enumerate(SHARED):
        values = integers(conv, seed)
        for wrt, theirs in zip(("input", "weight", "bias"), torch_backward(conv, values), strict=True):
            assert np.array_equal(solve(conv, wrt, values), theirs), str(Problem(conv, wrt, "float64"))


def test_forward_on_the_list() -> None:
    for seed, conv in enumerate(SHARED):
        values = integers(conv, seed)
        forward = getattr(torch.nn.functional, f"conv{conv.axes}d")
        theirs = forward(torch.from_numpy(values["input"]), torch.from_numpy(values["weight"]), None, conv.stride,
                         [low for low, _ in conv.padding], conv.dilation, conv.groups)
        assert np.array_equal(solve(conv, "output", values), theirs.numpy()), str(Problem(conv, "output", "float64"))


@st.composite
def transposed_calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments that torch's transposed convolutions take too."""
    axes = draw(st.integers(1, 3))
    groups, channels, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(axes))
    size = tuple(draw(st.integers(1, 5)) for _ in range(axes))
    extra = tuple(draw(st.integers(0, step - 1)) for step in stride)
    padding = []
    for axis in range(axes):
        full = (size[axis] - 1) * stride[axis] + dilation[axis] * (kernel[axis] - 1) + 1 + extra[axis]
        padding.append(draw(st.integers(0, min(3, (full - 1) // 2))))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    x = random.integers(-3, 4, (draw(st.integers(1, 2)), groups * channels, *size)).astype(np.float64)
    w = random.integers(-3, 4, (groups * channels, outputs, *kernel)).astype(np.float64)
    return {"x": x, "w": w, "groups": groups, "stride": stride, "padding": tuple(padding), "dilation": dilation,
            "output_padding": extra}


@given(call=transposed_calls())
@settings(max_examples=150, deadline=None)
def test_transposed_convolution_and_its_gradients(call: dict[str, Any]) -> None:
    x, w, axes = call["x"], call["w"], call["x"].ndim - 2
    parameters = {name: call[name] for name in ("stride", "padding", "output_padding", "dilation", "groups")}
    ours = convgrad.conv_transpose(x, w, backend="reference", **parameters)
    forward = getattr(torch.nn.functional, f"conv_transpose{axes}d")
    theirs = forward(torch.from_numpy(x), torch.from_numpy(w), None, call["stride"], call["padding"],
                     call["output_padding"], call["groups"], call["dilation"]).numpy()
    assert np.array_equal(ours, theirs)
    dy = np.random.default_rng(1).integers(-3, 4, ours.shape).astype(np.float64)
    gradients = torch.ops.aten.convolution_backward(
        torch.from_numpy(dy), torch.from_numpy(x), torch.from_numpy(w), [ours.shape[1]], call["stride"],
        call["padding"], call["dilation"], True, call["output_padding"], call["groups"], [True, True, True])
    for mine, other in zip(convgrad.conv_transpose_backward(dy, x, w, backend="reference", **parameters), gradients,
                           strict=True):
        assert np.array_equal(mine, other.numpy())


@given(conv=geometries())
@settings(max_examples=100, deadline=None)
def test_conv_backward_of_the_public_function(conv: Conv) -> None:
    """Any pads: the input is padded by hand for torch and its gradient cropped."""
    values = integers(conv, 3)
    pads = [pad for pair in reversed(conv.padding) for pad in pair]
    padded = torch.nn.functional.pad(torch.from_numpy(values["input"]), pads)
    gradients = torch.ops.aten.convolution_backward(
        torch.from_numpy(values["grad_output"]), padded, torch.from_numpy(values["weight"]), [conv.out_channels],
        conv.stride, [0] * conv.axes, conv.dilation, False, [0] * conv.axes, conv.groups, [True, True, True])
    inner = (slice(None), slice(None), *(slice(low, low + size) for (low, _), size in
                                         zip(conv.padding, conv.in_size, strict=True)))
    theirs = (gradients[0].numpy()[inner], gradients[1].numpy(), gradients[2].numpy())
    ours = convgrad.conv_backward(values["grad_output"], values["input"], values["weight"], stride=conv.stride,
                                  padding=conv.padding, dilation=conv.dilation, groups=conv.groups, backend="reference")
    for mine, other in zip(ours, theirs, strict=True):
        assert np.array_equal(mine, other)
