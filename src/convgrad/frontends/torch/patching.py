"""`patch(model)`: what `install()` does, for the convolutions of one model only.

While a patched model computes its forward, the autograd nodes of its convolutions are marked; the registered kernel
serves the calls of marked nodes and leaves all others to torch. So the classes of layers do not matter, nor whether a
forward calls functions or layers.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .registration import MARK, inside, registration

NODES = ("ConvolutionBackward", "ConvTbcBackward")  # what autograd calls the nodes, with a number after it
DEPTH = 4  # a batch axis, a cast or the parts of a complex number may lie between a result and its convolution
CONVOLUTIONS = frozenset({
    torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
    torch.conv_tbc, torch.convolution, torch._convolution})
patched_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Marking(TorchFunctionMode):
    """Marks the nodes of all convolutions that are called while it is active."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CONVOLUTIONS:
            mark(getattr(result, "grad_fn", None), DEPTH)
        return result


def mark(node: Any, depth: int) -> None:
    if node is None or depth == 0:
        return
    if node.name().startswith(NODES):
        node.metadata[MARK] = True
        return
    for earlier, _ in node.next_functions:
        mark(earlier, depth - 1)


def enter(module: nn.Module, arguments: Any) -> None:
    """Before the forward of a module of a patched model; modules inside of it find the mode active."""
    if torch.compiler.is_compiling():
        return
    if registration.registered is None:  # a copy of a patched model outlives it
        remember(module)
    inside.depth += 1
    if inside.depth == 1:
        inside.marking = Marking()
        inside.marking.__enter__()


def leave(module: nn.Module, arguments: Any, result: Any) -> None:
    """After the forward. Results of autograd functions written in Python, compiled graphs too, are marked as well."""
    if torch.compiler.is_compiling() or inside.depth == 0:
        return
    inside.depth -= 1
    if inside.depth == 0:
        inside.marking.__exit__(None, None, None)
    for tensor in result if isinstance(result, (tuple, list)) else (result,):
        node = getattr(tensor, "grad_fn", None)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            node.metadata[MARK] = True  # type: ignore[attr-defined]


def remember(model: nn.Module) -> None:
    with registration.lock:
        patched_models.add(model)
        registration.patched_models = len(patched_models)
        registration.update()


def is_patched(module: nn.Module) -> bool:
    return enter in module._forward_pre_hooks.values()


def patch(model: nn.Module) -> nn.Module:
    """Serve the gradients of one model's convolutions as `install()` does those of all. Returns the model.

    Layers of any class, functional calls, weight norm and lazy layers are served alike; parameters, state dict and
    forward stay as they are. Code that `torch.compile` made of a patched model is out of reach: patch the compiled
    model, or use `install()`. `report()` tells what became of every call.

    Examples
    --------
    >>> import torch, convgrad.torch
    >>> model = convgrad.torch.patch(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()))
    >>> model(torch.ones(1, 3, 5, 5)).sum().backward()
    >>> model = convgrad.torch.unpatch(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a scripted model runs without its Python hooks: use convgrad.torch.install()")
    if not any(True for _ in model.parameters()):
        warnings.warn("patch: the model has no parameters, so no gradients of its own", stacklevel=2)
    for module in model.modules():
        if not is_patched(module) and not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave, always_call=True)
    remember(model)
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Undo `patch`."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [number for number, hook in hooks.items() if hook in (enter, leave)]:
                del hooks[number]
                module._forward_hooks_always_called.pop(number, None)
    with registration.lock:
        patched_models.discard(model)
        registration.patched_models = len(patched_models)
        registration.update()
    return model


@contextlib.contextmanager
def patched(model: nn.Module) -> Iterator[nn.Module]:
    """`patch` inside a with block; a model that was patched before stays so."""
    before = model in patched_models
    patch(model)
    try:
        yield model
    finally:
        if not before:
            unpatch(model)
