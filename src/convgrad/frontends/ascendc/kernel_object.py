"""What the two kernel-side objects share: call order, ctx, the loop in Python spellings, End."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from ...problem import Unsupported
from .call_order import CallOrder, Context
from .conv_types import type_name
from .global_tensor import GlobalTensor
from .misuse import Misuse

BlockT = TypeVar("BlockT")


class EndMissing(UserWarning):
    """A convolution object that computed blocks went away without End."""


class KernelObject(ABC, Generic[BlockT]):
    """An object whose Iterate computes one block and whose GetTensorC moves it to global memory.

    `IterateAll`, `blocks()`, the `with` statement and the names in snake_case are extensions of this model.
    """

    def __init__(self, name: str, setters: tuple[str, ...], *, strict: bool, fidelity: str, block_idx: int,
                 trace: list[BlockT] | None) -> None:
        if fidelity not in ("block", "slice"):
            raise ValueError(f"fidelity={fidelity!r} is neither 'block' nor 'slice'")
        self.fidelity, self.block_idx, self.trace = fidelity, block_idx, trace
        self.ctx = Context()
        self.order = CallOrder(name, setters, strict)
        self.block: BlockT | None = None

    @abstractmethod
    def Iterate(self, enPartialSum: bool = False, *, sync: bool = True) -> bool:
        """Compute the next block; False, and nothing computed, when the piece is finished. `sync` is reserved."""

    @abstractmethod
    def GetTensorC(self, output: GlobalTensor, enAtomic: int = 0, enSequentialWrite: bool = False, *,
                   sync: bool = True) -> None:
        """Move the block to its place in `output`. `sync` is reserved."""

    def _next_iterate(self, enPartialSum: bool) -> None:
        """Check that Iterate may be called now."""
        self.order.iterate(self.ctx)
        if enPartialSum:
            raise Unsupported(f"{self.order.name}: enPartialSum is reserved")

    def _computed(self, block: BlockT) -> None:
        """Note that `block` lies in L0C."""
        self.block = block
        if self.trace is not None:
            self.trace.append(block)
        self.order.computed()

    def _take(self, output: GlobalTensor, expected: np.dtype[Any], enAtomic: int) -> None:
        """Check that GetTensorC may be called now with these arguments."""
        self.order.take()
        self._same_type("GetTensorC", output, expected)
        if enAtomic not in (0, 1):
            raise ValueError(f"GetTensorC: enAtomic={enAtomic!r} is neither 0 (overwrite) nor 1 (add)")
        output.buffer.writers.append(weakref.ref(self.order))

    def _check_apart(self, output: GlobalTensor, operands: dict[str, GlobalTensor | None]) -> None:
        """Refuse an output that lies on an operand: later blocks would read results as data."""
        for name, tensor in operands.items():
            if tensor is not None and np.may_share_memory(output.buffer.array, tensor.buffer.array):
                raise Misuse("operand-overwritten", f"{self.order.name}: GetTensorC into the memory of {name}; the "
                             "blocks that follow would read what it wrote")

    def _check_added(self, output: GlobalTensor, result: str) -> None:
        """Refuse to add to memory that is not zero before the first block."""
        buffer = output.buffer
        if buffer.untouched and not buffer.zero_checked:
            if buffer.array.any():
                first = int(np.flatnonzero(buffer.array)[0])
                raise Misuse("not-zeroed", f"{self.order.name}: GetTensorC adds to {result}, so {result} must be zero "
                             f"before the first block; element {first} is {float(buffer.array[first])}")
            buffer.zero_checked = True

    def _same_type(self, method: str, tensor: GlobalTensor, expected: np.dtype[Any]) -> None:
        if not isinstance(tensor, GlobalTensor):
            raise TypeError(f"{method} takes a GlobalTensor, got {type(tensor).__name__}")
        if tensor.dtype != expected:
            raise Misuse("types", f"{self.order.name}: {method} with a GlobalTensor of {type_name(tensor.dtype)}, it "
                         f"must be {type_name(expected)}")

    def blocks(self) -> Iterator[BlockT]:
        """Yield each block of the piece for the caller's GetTensorC, then set `ctx.isFirstIter_` (an extension)."""
        while self.Iterate():
            assert self.block is not None
            yield self.block
        self.ctx.isFirstIter_ = True

    def _iterate_all(self, output: GlobalTensor, enAtomic: int) -> None:
        for _ in self.blocks():
            self.GetTensorC(output, enAtomic)

    def End(self) -> None:
        """Free the queues; once, last."""
        self.order.end()

    end = End

    def __del__(self) -> None:
        order = getattr(self, "order", None)
        if order is not None and order.strict and order.finished and not order.ended:
            warnings.warn(f"{order.name} was given up without End", EndMissing, stacklevel=2)

    def __enter__(self: SelfT) -> SelfT:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if self.order.leave(error):
            self.End()


SelfT = TypeVar("SelfT", bound="KernelObject[Any]")
