"""The operators `torch.ops.convgrad.*`: schemas, kernels, and what each result looks like before it is computed.

`convolution` and `convolution_backward` have the arguments of aten's; `padding` may also give low and high of every
axis. `input_grad`, `weight_grad` and `bias_grad` are single gradients. Derivatives, batching and autocast rules are in
files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from ... import api
from .geometry import Geometry, Ints, Transposed, checked_shapes, plain
from .tensors import FORMATS

TAIL = "SymInt[] stride, SymInt[] padding, SymInt[] dilation"
TRANSPOSED_TAIL = f"{TAIL}, bool transposed, SymInt[] output_padding, SymInt groups"
SCHEMAS = (
    f"convolution(Tensor input, Tensor weight, Tensor? bias, {TRANSPOSED_TAIL}) -> Tensor",
    "convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, "
    f"{TRANSPOSED_TAIL}, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    f"input_grad(Tensor grad_output, Tensor weight, SymInt[] input_size, {TAIL}, SymInt groups, "
    "ScalarType? out_dtype=None) -> Tensor",
    f"weight_grad(Tensor grad_output, Tensor input, SymInt[] kernel_size, {TAIL}, SymInt groups, "
    "ScalarType? out_dtype=None) -> Tensor",
    "bias_grad(Tensor grad_output, ScalarType? out_dtype=None) -> Tensor",
)
library = torch.library.Library("convgrad", "DEF")
for schema in SCHEMAS:
    library.define(schema, tags=torch.Tag.pt2_compliant_tag)
ops = torch.ops.convgrad


def on_devices(name: str, *keys: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a kernel, for the CPU and for CUDA where nothing else is said."""
    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        for key in keys or ("CPU", "CUDA"):
            library.impl(name, kernel, key)
        return kernel

    return register


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what an operator returns for tensors without data."""
    return torch.library.register_fake(f"convgrad::{name}", lib=library)  # type: ignore[no-any-return]


# --- results ----------------------------------------------------------------------------------------------------------

def memory_format_of(*operands: torch.Tensor) -> torch.memory_format:
    """Channels last where an operand is: PyTorch's rule for the results of its convolutions."""
    for operand in operands:
        if not operand.is_contiguous():
            found = suggest_memory_format(operand)
            if found is not torch.contiguous_format:
                return found
    return torch.contiguous_format


def new_result(shape: Ints, dtype: torch.dtype | None, *operands: torch.Tensor) -> torch.Tensor:
    """An empty result of some operands; the first has the default dtype."""
    return torch.empty(tuple(shape), dtype=dtype or result_dtype(operands[0]), device=operands[0].device,
                       memory_format=memory_format_of(*operands))


def result_dtype(operand: torch.Tensor) -> torch.dtype:
    """That of the operands, float32 for 8-bit ones."""
    return torch.float32 if operand.dtype.itemsize == 1 else operand.dtype


def placed(result: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """A computed result in the memory format that `new_result` promises."""
    return result.contiguous(memory_format=memory_format_of(*operands))


def check_dtypes(**operands: torch.Tensor | None) -> None:
    """Refuse mixtures: each operator computes in one number format and one place."""
    (first_name, first), *rest = [(name, operand) for name, operand in operands.items() if operand is not None]
    for name, operand in rest:
        if operand.dtype != first.dtype:
            raise TypeError(f"{first_name} is {first.dtype}, but {name} is {operand.dtype}: all must have one dtype")
        if operand.device != first.device:
            raise TypeError(f"{first_name} is on {first.device}, but {name} is on {operand.device}")


def check_wide(operand: torch.Tensor, name: str) -> None:
    """Refuse 8-bit operands, whose results autograd could not give back in their own type."""
    if operand.dtype in FORMATS and operand.dtype.itemsize == 1:
        raise TypeError(f"{name} is {operand.dtype}: 8-bit tensors have scales; use convgrad.torch.Fp8Conv2d and its "
                        "siblings, torch.ops.convgrad.scaled_convolution, or convgrad.conv")


def check_bias(bias: torch.Tensor | None, channels: int) -> None:
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != channels):
        raise ValueError(f"bias must have one value for each of the {channels} output channels, got shape "
                         f"{tuple(bias.shape)}")


def keywords(geometry: Geometry) -> dict[str, Any]:
    """A geometry as the public functions take it."""
    return {"stride": tuple(geometry.stride), "padding": geometry.pairs, "dilation": tuple(geometry.dilation),
            "groups": geometry.groups}


def name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


# --- convolution ------------------------------------------------------------------------------------------------------

def checked_convolution(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                        geometry: Geometry) -> None:
    check_dtypes(input=input, weight=weight, bias=bias)
    check_wide(input, "input")
    checked_shapes({"input": input.shape, "weight": weight.shape}, geometry)
    check_bias(bias, weight.shape[1] * geometry.groups if geometry.transposed else weight.shape[0])


def served_by_torch(input: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> bool:
    """Whether the forward is PyTorch's: where it has one. Without input channels it forgets the output channels."""
    return geometry.torch_takes_it and input.dim() == len(geometry.stride) + 2 and weight.numel() != 0


def aten_convolution(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                     geometry: Geometry) -> torch.Tensor:
    padding = geometry.padding if len(geometry.padding) == len(geometry.stride) else [low for low, _ in geometry.pairs]
    result: torch.Tensor = torch.convolution(input, weight, bias, geometry.stride, padding, geometry.dilation,
                                             geometry.transposed, geometry.output_padding, geometry.groups)
    return result


@on_devices("convolution")
def convolution(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *arguments: Any) -> torch.Tensor:
    geometry = Geometry(*arguments)
    if served_by_torch(input, weight, geometry):
        try:
            return aten_convolution(input, weight, bias, geometry)
        except RuntimeError:
            checked_convolution(input, weight, bias, geometry)  # says it in our words
            raise
    checked_convolution(input, weight, bias, geometry)
    if geometry.transposed:
        inner = Transposed.of(geometry)
        size = inner.kept_size(geometry.output_size(input.shape[2:], weight.shape[2:]))
        result = inner.filled(api.input_grad(input, weight, size, **keywords(inner.geometry)))
    else:
        result = api.conv(input, weight, **keywords(geometry))
    if bias is not None:
        result += bias.reshape(-1, *[1] * len(geometry.stride))
    return placed(result, input, weight)


@fake("convolution")
def convolution_fake(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                     *arguments: Any) -> torch.Tensor:
    geometry = Geometry(*arguments)
    checked_convolution(input, weight, bias, geometry)
    if served_by_torch(input, weight, geometry):
        return aten_convolution(input, weight, bias, geometry)
    channels = weight.shape[1] * geometry.groups if geometry.transposed else weight.shape[0]
    return new_result((input.shape[0], channels, *geometry.output_size(input.shape[2:], weight.shape[2:])), None,
                      input, weight)


@on_devices("convolution_backward", "CUDA")  # prepared.py has the CPU's
def convolution_backward(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias_sizes: Ints | None,
                         *arguments: Any) -> tuple[torch.Tensor | None, ...]:
    *rest, mask = arguments
    geometry = Geometry(*rest)
    checked_backward(grad_output, input, weight, geometry)
    results: tuple[torch.Tensor | None, ...]
    if geometry.transposed:
        results = transposed_backward(grad_output, input, weight, geometry, mask)
    else:
        results = api.conv_backward(grad_output, input, weight, output_mask=mask, **keywords(geometry))
    return tuple(None if result is None else placed(result, input, weight) if result.dim() > 1 else result
                 for result in results)


def transposed_backward(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, geometry: Geometry,
                        mask: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
    inner = Transposed.of(geometry)
    reached, rest = inner.kept(grad_output), keywords(inner.geometry)
    return (api.conv(reached, weight, **rest) if mask[0] else None,
            api.weight_grad(input, reached, tuple(weight.shape[2:]), **rest) if mask[1] else None,
            api.bias_grad(grad_output) if mask[2] else None)


@fake("convolution_backward")
def convolution_backward_fake(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor,
                              bias_sizes: Ints | None, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
    *rest, mask = arguments
    checked_backward(grad_output, input, weight, Geometry(*rest))
    return (new_result(input.shape, None, input, weight) if mask[0] else None,
            new_result(weight.shape, None, input, weight) if mask[1] else None,
            grad_output.new_empty((grad_output.shape[1],)) if mask[2] else None)


def checked_backward(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor,
                     geometry: Geometry) -> None:
    check_dtypes(grad_output=grad_output, input=input, weight=weight)
    check_wide(input, "input")
    checked_shapes({"input": input.shape, "weight": weight.shape, "grad_output": grad_output.shape}, geometry,
                   "grad_output")


# --- single gradients -------------------------------------------------------------------------------------------------

def checked_input_grad(grad_output: torch.Tensor, weight: torch.Tensor, size: Ints, geometry: Geometry) -> Ints:
    """The shape of an input gradient, when all shapes fit each other."""
    check_dtypes(grad_output=grad_output, weight=weight)
    shape = (grad_output.shape[0], weight.shape[1] * geometry.groups, *size)
    checked_shapes({"input": shape, "weight": weight.shape, "grad_output": grad_output.shape}, geometry, "grad_output")
    return shape


def checked_weight_grad(grad_output: torch.Tensor, input: torch.Tensor, size: Ints, geometry: Geometry) -> Ints:
    """The shape of a weight gradient, when all shapes fit each other."""
    check_dtypes(grad_output=grad_output, input=input)
    shape = (grad_output.shape[1], input.shape[1] // geometry.groups, *size)
    checked_shapes({"input": input.shape, "weight": shape, "grad_output": grad_output.shape}, geometry, "grad_output")
    return shape


@on_devices("input_grad")
def input_grad(grad_output: torch.Tensor, weight: torch.Tensor, input_size: Ints, stride: Ints, padding: Ints,
               dilation: Ints, groups: int, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    geometry = plain(stride, padding, dilation, groups)
    checked_input_grad(grad_output, weight, input_size, geometry)
    result = api.input_grad(grad_output, weight, tuple(input_size), out_dtype=name_of(out_dtype), **keywords(geometry))
    return placed(result, grad_output, weight)


@fake("input_grad")
def input_grad_fake(grad_output: torch.Tensor, weight: torch.Tensor, input_size: Ints, stride: Ints, padding: Ints,
                    dilation: Ints, groups: int, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    shape = checked_input_grad(grad_output, weight, input_size, plain(stride, padding, dilation, groups))
    return new_result(shape, out_dtype, grad_output, weight)


@on_devices("weight_grad")
def weight_grad(grad_output: torch.Tensor, input: torch.Tensor, kernel_size: Ints, stride: Ints, padding: Ints,
                dilation: Ints, groups: int, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    geometry = plain(stride, padding, dilation, groups)
    checked_weight_grad(grad_output, input, kernel_size, geometry)
    result = api.weight_grad(grad_output, input, tuple(kernel_size), out_dtype=name_of(out_dtype), **keywords(geometry))
    return placed(result, grad_output, input)


@fake("weight_grad")
def weight_grad_fake(grad_output: torch.Tensor, input: torch.Tensor, kernel_size: Ints, stride: Ints, padding: Ints,
                     dilation: Ints, groups: int, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    shape = checked_weight_grad(grad_output, input, kernel_size, plain(stride, padding, dilation, groups))
    return new_result(shape, out_dtype, grad_output, input)


@on_devices("bias_grad")
def bias_grad(grad_output: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    result: torch.Tensor = api.bias_grad(grad_output, out_dtype=name_of(out_dtype))
    return result


@fake("bias_grad")
def bias_grad_fake(grad_output: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return grad_output.new_empty((grad_output.shape[1],), dtype=out_dtype or result_dtype(grad_output))
