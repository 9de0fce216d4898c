"""Problems that a GPU once computed wrongly or not at all, all three gradients in one call, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from convgrad import Problem, conv_backward

torch = pytest.importorskip("torch")

from triton_here import needs_gpu  # noqa: E402

from convgrad.backends.triton.box_plans import tensors_fit  # noqa: E402

ONCE = {
    # ptxas dropped the constant of a packed addition (packed_adds.py): sums missed a row of x
    "bf16 n7 c85 k15 i16x28 w3x5 s2x2 p2:0x0:1 d1x2 g5": "xwy",
    # one pass for all gradients took the first plane for the whole image
    "f16 n2 c24 k24 i8x9x9 w1x3x3 d1x3x3 g24": "xwy",
    "bf16 n8 c64 k64 i4x9x8 w1x3x3 d2x1x1 g64": "xwy",
    "bf16 n3 c64 k64 i9x9x14 w1x1x2 g64": "xwy",
    "f32 n8 c54 k54 i8x9x4 w1x1x3 s1x1x2 d1x3x1 g54": "xy",
    "bf16 n7 c96 k96 i5x14x8 w1x3x3 p1x1x6 d1x1x3 g96": "xwy",
    "f16 n16 c128 k128 i7x7x28 w1x3x3 p0:0x1:2x0:1 d2x2x1 g128": "xwy",
    # a stride of 1 was a constant without a type, and strips did not compile
    "f16 n7 c8 k8 i8x5 w2x3 s3x3 p1x1 g8": "xwy",
    "bf16 n8 c16 k16 i8x7 w7x3 p1x0 d1x3 g16": "xwy",
    "f16 n3 c8 k8 i14x33 w1x3 p0x1 d3x2 g8": "xwy",
    "f16 n2 c8 k8 i5x5 w3x3 s2x2 p1x0 g8": "xwy",
    "f16 n17 c8 k8 i14x28 w1x3 d3x2 g8": "xwy",
    "bf16 n8 c8 k8 i56x80 w1x3 s1x3 p1:1x0:2 d3x1 g8": "wy",
    # products of 256 columns in half of the registers did not compile
    "bf16 n1 c64 k2 i9x14x9 w1x3x3 s2x1x2 p1x0x0 d3x1x1": "xwy",
    "f16 n16 c384 k64 i14x16x4 w1x3x2 s3x2x2 d1x3x1 g16": "xwy",
    "f16 n16 c64 k128 i7x16x14 w3x1x3 s3x3x3 p2x0x6 d1x3x3 g64": "wy",
}


def whole_numbers(shape: tuple[int, ...], dtype: Any, last: bool, seed: int) -> Any:
    """Small whole numbers on the GPU, channels last in memory or first."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(-2, 3, shape, generator=generator).to("cuda", dtype)
    order = (0, *range(2, len(shape)), 1)
    return tensor.permute(order).contiguous().permute(0, -1, *range(1, len(shape) - 1)) if last else tensor


def exact(problem: Problem, grad: Any, x: Any, weight: Any) -> tuple[Any, ...]:
    """The gradients in float64; padding is cut off that only one side has."""
    conv, axes = problem.conv, range(problem.conv.axes)
    pads = [pad for axis in reversed(axes) for pad in conv.padding[axis]]
    padded = torch.nn.functional.pad(x.double(), pads)
    found = torch.ops.aten.convolution_backward(
        grad.double(), padded, weight.double(), [conv.out_channels], conv.stride, [0] * conv.axes, conv.dilation, False,
        [0] * conv.axes, conv.groups, [True] * 3)
    inner = [slice(low, low + extent) for (low, _), extent in zip(conv.padding, conv.in_size)]
    return found[0][(slice(None), slice(None), *inner)], found[1], found[2]


@needs_gpu
@pytest.mark.parametrize("text", ONCE)
def test_problems_that_were_wrong_once(text: str) -> None:
    problem = Problem.parse(f"input_grad+weight_grad+bias_grad {text} cuda")
    conv, dtype = problem.conv, getattr(torch, problem.dtype)
    grad = whole_numbers(conv.output_shape, dtype, "y" in ONCE[text], 1)
    x = whole_numbers(conv.input_shape, dtype, "x" in ONCE[text], 2)
    weight = whole_numbers(conv.weight_shape, dtype, "w" in ONCE[text], 3)
    for _ in range(3):  # a first call, and calls that repeat its launches
        results = conv_backward(grad, x, weight, stride=conv.stride, padding=conv.padding, dilation=conv.dilation,
                                groups=conv.groups)
        for result, wanted in zip(results, exact(problem, grad, x, weight)):
            assert torch.equal(result, wanted.to(dtype))
            result.fill_(float("nan"))


BROADCAST = {  # the batch of dy, or its batch and rows, with a stride of 0: descriptors took it for an extent of 1
    "f16 n2 c8 k64 i56x14 w5x5 p2x2": (0,),
    "bf16 n1 c192 k64 i14x56 w2x2 p1x1": (0, 2),
    "bf16 n4 c64 k64 i14x16 w3x3 p1x1": (0,),
    "bf16 n4 c32 k32 i14x16 w3x3 p1x1 g8": (0, 3),
    "f16 n8 c3 k64 i28x28 w7x7 s2x2 p3x3": (0,),
    "bf16 n8 c64 k64 i14x14 w3x3 p1x1 g64": (0, 2),
}


@needs_gpu
@pytest.mark.parametrize("text", BROADCAST)
def test_broadcast_gradients(text: str) -> None:
    problem = Problem.parse(f"input_grad+weight_grad+bias_grad {text} cuda")
    conv, dtype = problem.conv, getattr(torch, problem.dtype)
    shape = tuple(1 if axis in BROADCAST[text] else extent for axis, extent in enumerate(conv.output_shape))
    grad = whole_numbers(shape, dtype, True, 1).expand(conv.output_shape)
    x = whole_numbers(conv.input_shape, dtype, True, 2)
    weight = whole_numbers(conv.weight_shape, dtype, True, 3)
    results = conv_backward(grad, x, weight, stride=conv.stride, padding=conv.padding, dilation=conv.dilation,
                            groups=conv.groups)
    for result, wanted in zip(results, exact(problem, grad, x, weight)):
        assert torch.equal(result, wanted.to(dtype))


def test_the_copy_engine_is_given_no_broadcast_tensors() -> None:
    plain = torch.empty(2, 5, 6, 8).permute(0, 3, 1, 2)
    assert tensors_fit(plain)
    for axis in (0, 2, 3):
        assert not tensors_fit(plain.narrow(axis, 0, 1).expand(plain.shape))
