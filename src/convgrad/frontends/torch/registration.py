"""`install()`: our kernel behind aten::convolution_backward, for every program in the process."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import tbc
from .serving import Desk
from .tensors import has_c_exchange, native, threads

NAME = "aten::convolution_backward"
OPERATOR = torch.ops.aten.convolution_backward.default
MARK = "convgrad"  # in the metadata of autograd nodes that belong to a patched model
MOST_ENTRIES = 8192  # programs with ever new shapes: begin anew
Kernel = Callable[..., Any]


class Registration:
    """The state of torch's dispatcher: who asked for our kernel, and what lies beneath it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.installs = 0
        self.patched_models = 0
        self.library: Any = None
        self.registered: str | None = None  # "everywhere", "patched models", or None
        self.originals: dict[str, Kernel] = {}
        self.desk = Desk(self.by_torch, self.serve)
        self.kernel = new_table(self.desk.prepare)

    def by_torch(self, keys: Any, *arguments: Any) -> Any:
        device = "CUDA" if arguments[1].is_cuda else "CPU"
        return self.originals[device](keys, *arguments)

    def serve(self, keys: Any, *arguments: Any) -> Any:
        return self.kernel(keys, *arguments)

    def serve_marked(self, keys: Any, *arguments: Any) -> Any:
        """Only calls of patched models are ours."""
        node = torch._C._current_autograd_node()
        if belongs_to_patched_model(node):
            return self.kernel(keys, *arguments)
        if node is not None and "CompiledFunction" in node.name():
            warnings.warn("compiled code runs convolutions' gradients by torch's kernels: if it belongs to a patched "
                          "model, patch the compiled model or use convgrad.torch.install()", stacklevel=2)
        return self.by_torch(keys, *arguments)

    def tbc_if_marked(self, *arguments: Any) -> Any:
        ours = belongs_to_patched_model(torch._C._current_autograd_node())
        return (tbc.backward if ours else tbc.OPERATOR.decompose)(*arguments)

    def check_on_top(self) -> None:
        """What another library registered later may hand calls on to our kernel: that one has to go first."""
        entries = torch._C._dispatch_dump(NAME)
        for device in self.originals:
            if f"\n{device}: registered at {__file__}:" not in entries:
                raise RuntimeError(f"another kernel of {NAME} has been registered for {device} after convgrad's: undo "
                                   "that first (last in, first out)")

    def update(self) -> None:
        """Bring the dispatcher to what is asked for."""
        wanted = "everywhere" if self.installs else "patched models" if self.patched_models else None
        if wanted == self.registered:
            return
        if self.library is not None:
            self.library._destroy()
            self.library = None
        self.registered = wanted
        if wanted is None:
            return
        devices = ("CPU", "CUDA") if torch.version.cuda else ("CPU",)
        self.originals = {device: original(device) for device in devices}
        self.library = torch.library.Library("aten", "IMPL")
        kernel = self.kernel if wanted == "everywhere" else self.serve_marked
        for device in devices:
            self.library.impl("convolution_backward", kernel, device, with_keyset=True)
        # Composite in torch: autograd's key decides, and with a graph to record the composition stays.
        self.library.impl("conv_tbc_backward", tbc.backward if wanted == "everywhere" else self.tbc_if_marked,
                          "AutogradCPU")


class Inside(threading.local):
    """How many forward calls of patched models this thread is in."""

    depth = 0
    marking: Any = None


inside = Inside()


def belongs_to_patched_model(node: Any) -> bool:
    """Whether a call from an autograd node, or from none, is one of a patched model."""
    return inside.depth > 0 or (node is not None and MARK in node.metadata)


def original(device: str) -> Kernel:
    """What serves the operator on a device now."""
    if hasattr(torch.library, "get_kernel"):  # torch 2.9
        kernel: Kernel = torch.library.get_kernel(NAME, device).call_boxed
        return kernel
    composite = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    return lambda keys, *arguments: OPERATOR.redispatch(composite, *arguments)


class PythonTable:
    """`native.TorchBackward` where that cannot serve: no native module, or a torch without DLPack's C interface."""

    def __init__(self, prepare: Kernel) -> None:
        self.prepare = prepare
        self.entries: dict[Any, tuple[Kernel, Any]] = {}

    def __call__(self, keys: Any, *arguments: Any) -> Any:
        tensors = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in arguments[:3]]
        key = (threads(), *map(type, arguments[:3]), *tensors, *[str(rest) for rest in arguments[4:]])
        found = self.entries.get(key)
        if found is None:
            if len(self.entries) >= MOST_ENTRIES:
                self.entries.clear()
            found = self.entries[key] = self.prepare(keys, *arguments)
        handler, tally = found
        start = time.perf_counter()
        results = handler(keys, *arguments)
        tally.calls += 1
        tally.seconds += time.perf_counter() - start
        return results

    def clear(self) -> None:
        self.entries.clear()


def new_table(prepare: Kernel) -> Any:
    if has_c_exchange():
        return native.TorchBackward(prepare, torch.Tensor, torch.nn.Parameter)
    return PythonTable(prepare)


registration = Registration()


def install() -> None:
    """Serve the gradients of every convolution of this process, on the CPU and on CUDA.

    Functional calls, layers of any class, weight norm, compiled and exported code: whatever ends in PyTorch's own
    operator. The forward, autograd, autocast and sharding stay PyTorch's, and so does any call that we do not know, or
    would serve slower: `report()` says which. May be nested; every call wants its own `uninstall()`.

    Examples
    --------
    >>> import torch, convgrad.torch
    >>> convgrad.torch.install()
    >>> layer = torch.nn.Conv2d(3, 8, 3)
    >>> layer(torch.ones(1, 3, 5, 5)).sum().backward()
    >>> layer.weight.grad[0, 0, 0, 0].item()
    9.0
    >>> convgrad.torch.uninstall()
    """
    with registration.lock:
        registration.installs += 1
        registration.update()


def uninstall() -> None:
    """Undo one `install()`; the last one gives the operator back to PyTorch."""
    with registration.lock:
        if registration.installs == 0:
            raise RuntimeError("uninstall() without an install() before it")
        registration.check_on_top()
        registration.installs -= 1
        registration.update()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`install` inside a with block."""
    install()
    try:
        yield
    finally:
        uninstall()
