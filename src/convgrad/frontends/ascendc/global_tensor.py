"""GlobalTensor: a flat view of global memory with an offset; every access is bounds-checked and counted."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import numpy as np

from .misuse import Misuse, OutOfBounds

Array = np.ndarray[Any, Any]


class Buffer:
    """The memory behind one or more GlobalTensors, with its counters."""

    def __init__(self, array: Array) -> None:
        array = np.asarray(array)
        if not array.flags.c_contiguous:
            raise ValueError(f"a GlobalTensor needs C-ordered memory, got an array of shape {array.shape} with strides "
                             f"{array.strides}")
        self.array: Array = array.reshape(-1)
        self.bytes_read = 0
        self.bytes_written = 0
        self.reads = 0
        self.writes = 0
        self.zero_checked = False
        self._write_counts: Array | None = None
        self.writers: list[weakref.ref[Any]] = []  # call orders of the objects that wrote here
        self.slots: dict[int, tuple[int, object]] = {}  # first element -> (length, owner) of blocks to be transposed

    @staticmethod
    def of(array: Array) -> Buffer:
        """The buffer of a memory: the one that another GlobalTensor of the same memory has, or a new one."""
        array = np.asarray(array)
        key = (array.__array_interface__["data"][0], array.nbytes, array.dtype.str)
        known = _buffers.get(key)
        if known is None or not array.size:
            known = _buffers[key] = Buffer(array)
        return known

    @property
    def write_counts(self) -> Array:
        """How often each element was written (stops at 255)."""
        if self._write_counts is None:
            self._write_counts = np.zeros(self.array.size, np.uint8)
        return self._write_counts

    @property
    def untouched(self) -> bool:
        return self.writes == 0

    def forget_writes(self) -> None:
        """Start a new launch: the coverage is counted anew and the memory is checked again for zeros."""
        self._write_counts = None
        self.writes = 0
        self.zero_checked = False
        self.writers.clear()


_buffers: weakref.WeakValueDictionary[tuple[int, int, str], Buffer] = weakref.WeakValueDictionary()


class GlobalTensor:
    """A pointer into global memory: `gm[offset]` is the same memory, `offset` elements further.

    Parameters
    ----------
    array : C-ordered NumPy array of any shape, optional
        The memory; it is shared, not copied. `SetGlobalBuffer` gives it later. Reads and writes are counted for the
        memory, by all GlobalTensors of it together.
    offset : int
        Elements from its start.
    """

    def __init__(self, array: Array | Buffer | None = None, offset: int = 0) -> None:
        self._buffer = array if isinstance(array, Buffer) or array is None else Buffer.of(array)
        self.offset = operator.index(offset)
        if self._buffer is not None and not 0 <= self.offset <= self._buffer.array.size:
            raise OutOfBounds(f"GlobalTensor offset {self.offset} lies outside its {self._buffer.array.size} elements")

    def SetGlobalBuffer(self, array: Array, size: int | None = None) -> None:
        """Point to the start of `array`, or of its first `size` elements."""
        array = np.asarray(array)
        if size is not None:
            if not 0 <= size <= array.size:
                raise OutOfBounds(f"SetGlobalBuffer: size={size}, the array has {array.size} elements")
            array = np.ascontiguousarray(array).reshape(-1)[:size] if array.flags.c_contiguous else array
        self._buffer, self.offset = Buffer.of(array), 0

    @property
    def buffer(self) -> Buffer:
        if self._buffer is None:
            raise ValueError("the GlobalTensor has no memory yet: call SetGlobalBuffer first")
        return self._buffer

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self.buffer.array.dtype
        return dtype

    def GetSize(self) -> int:
        """Return the number of elements from the offset to the end of the memory."""
        return self.buffer.array.size - self.offset

    def __getitem__(self, offset: int) -> GlobalTensor:
        return GlobalTensor(self.buffer, self.offset + operator.index(offset))

    def __repr__(self) -> str:
        if self._buffer is None:
            return "GlobalTensor()"
        return f"GlobalTensor({self.buffer.array.size} x {self.dtype}, offset={self.offset})"

    def _first(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], what: str) -> int:
        """Return the absolute first element of a strided window after checking that all of it lies inside."""
        first = self.offset + start
        last = first + sum((extent - 1) * stride for extent, stride in zip(shape, strides))
        if first < 0 or last >= self.buffer.array.size:
            raise OutOfBounds(f"{what} elements {first}..{last} of a buffer of {self.buffer.array.size} elements "
                              f"(pointer offset {self.offset})")
        return first

    def _window(self, first: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
        size = self.dtype.itemsize
        return np.lib.stride_tricks.as_strided(self.buffer.array[first:], shape, tuple(s * size for s in strides))

    def peek(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], what: str = "reads") -> Array:
        """Return a read-only window, `start` elements after the pointer (strides in elements), without counting it."""
        if 0 in shape:
            return np.empty(shape, self.dtype)
        window = self._window(self._first(start, shape, strides, what), shape, strides)
        window.flags.writeable = False
        return window

    def read(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], what: str = "reads") -> Array:
        """Return a window as `peek` does and count it as one read."""
        window = self.peek(start, shape, strides, what)
        self.count_read(window.size)
        return window

    def count_read(self, elements: int) -> None:
        """Count a load of `elements` elements."""
        self.buffer.reads += 1
        self.buffer.bytes_read += elements * self.dtype.itemsize

    def write(self, start: int, values: Array, strides: tuple[int, ...], *, atomic: bool = False,
              check: bool = True, what: str = "writes") -> None:
        """Write `values` (already in the tensor's number format) to a window, or add them to it.

        With `check`, a plain write to an element that was written before raises Misuse.
        """
        if not values.size:
            return
        first = self._first(start, values.shape, strides, what)
        counts = np.lib.stride_tricks.as_strided(self.buffer.write_counts[first:], values.shape, strides)
        if check and not atomic and counts.any():
            where = tuple(int(index[0]) for index in np.nonzero(counts))
            element = first + sum(index * stride for index, stride in zip(where, strides))
            raise Misuse("written-twice", f"{what} element {element}, which an earlier block wrote already; without "
                         "enAtomic the later block wins")
        window = self._window(first, values.shape, strides)
        if atomic:
            with np.errstate(over="ignore", invalid="ignore"):
                window += values
        else:
            window[...] = values
        np.minimum(counts, np.uint8(254), out=counts)
        counts += np.uint8(1)
        self.buffer.writes += 1
        self.buffer.bytes_written += values.size * self.dtype.itemsize
