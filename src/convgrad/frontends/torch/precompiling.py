"""`precompile(model, example_input)`: all GPU kernels of a model's gradients, compiled in parallel processes ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ...plan import load
from ...problem import Problem, Unsupported
from .aten_backward import BackwardCall, compute_on_cuda, question, result_format
from .cuda_backward import lies_as_the_results, wanted_calls

CONVOLUTION = torch.ops.aten.convolution.default


class Precompiled(NamedTuple):
    """What `precompile` did."""

    calls: int  # convolutions of the model
    problems: int  # distinct ones among them
    seconds: float
    errors: tuple[str, ...]  # kernels that did not compile, and calls that torch will serve


def precompile(model: torch.nn.Module, example_input: Any) -> Precompiled:
    """Compile all GPU kernels of the gradients of a model's convolutions, in as many processes as processors.

    Call it before the first training step, under the same autocast. The model is walked through with tensors that have
    shapes but no memory, so nothing is computed and no parameter, statistic or random state changes.

    Parameters
    ----------
    model : torch.nn.Module
        The model, on the GPU, in the memory format in which it is trained.
    example_input : tensor, or a tuple of arguments
        What the model is called with; sizes matter, values do not.

    Returns
    -------
    Precompiled
        Numbers of calls and distinct problems, seconds, and errors. On the CPU there is nothing to compile.

    Examples
    --------
    >>> import torch, convgrad.torch
    >>> convgrad.torch.precompile(torch.nn.Conv2d(3, 8, 3), torch.ones(1, 3, 5, 5)).calls
    1
    """
    arguments = tuple(example_input) if isinstance(example_input, (tuple, list)) else (example_input,)
    calls = backward_calls(model, arguments)
    wanted: dict[tuple[Problem, tuple[tuple[int, ...], ...]], None] = {}
    errors = []
    for device, call in calls:
        if device != "cuda":
            continue
        try:
            wanted.update(dict.fromkeys(wanted_problems(call)))
        except Unsupported as error:
            errors.append(f"{call.text()}: {error}")
    if not wanted:
        return Precompiled(len(calls), 0, 0.0, tuple(errors))
    seconds, failures = load("triton").precompile(list(wanted))
    return Precompiled(len(calls), len(wanted), seconds, (*errors, *failures))


class Convolutions(TorchDispatchMode):
    """Notes the gradients that every convolution will be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, BackwardCall]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is CONVOLUTION:
            x, weight, bias, *rest = args
            mask = [x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad]
            if any(mask):
                tensors = [without_memory(tensor) for tensor in (result, x, weight)]
                sizes = None if bias is None else [result.shape[1]]
                self.calls.append((x.device.type, BackwardCall._make((*tensors, sizes, *rest, mask))))
        return result


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same sizes and strides that has neither memory nor a mode."""
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.empty_strided(tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device="meta")


def backward_calls(model: torch.nn.Module, arguments: Sequence[Any]) -> list[tuple[str, BackwardCall]]:
    """The calls of aten::convolution_backward, with their devices, that a training step of the model will make."""
    fake = FakeTensorMode()
    state = {name: fake.from_tensor(tensor) for name, tensor in
             (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))}
    inputs = tree_map_only(torch.Tensor, fake.from_tensor, tuple(arguments))
    convolutions = Convolutions()
    with torch.enable_grad(), fake, convolutions:
        torch.func.functional_call(model, state, inputs)
    return convolutions.calls


def wanted_problems(call: BackwardCall) -> list[tuple[Problem, tuple[tuple[int, ...], ...]]]:
    """The problems of a call on CUDA tensors, with the strides of their operands and results."""
    asked = question(call)._replace(device="cuda", compute=compute_on_cuda(call))
    if not lies_as_the_results(call):  # such a dy is copied first
        call = call._replace(grad_output=call.grad_output.contiguous(memory_format=result_format(call)))
    return [(plan.problem, tuple(strides)) for plan, _, strides in wanted_calls(call, asked)]
