"""NumPy arrays as operands and results: checks, number formats, axis orders. Nothing is ever copied here."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ..numbers import dtype_name, storage_dtype
from ..problem import DTYPES, LONG_DTYPE

Array = npt.NDArray[Any]
LINE, SMALL = 64, 4096  # bytes: of a cache line, of a result that is not worth the time to align


def signature(arrays: dict[str, Array]) -> Any:
    return tuple([(array.shape, array.dtype) for array in arrays.values()])


def home(arrays: dict[str, Array]) -> tuple[str, str | None]:
    return "cpu", None


def threads() -> None:
    """Our default."""


def execute(run: Callable[..., Any], operands: tuple[Any, ...], targets: tuple[Any, ...], workspace: Any) -> None:
    run(operands, targets, workspace)


def accepts(array: object, name: str) -> bool:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array: a convolution has no use for a mask; pass {name}.filled(0)")
    return isinstance(array, np.ndarray)


def format_of(array: Array, name: str, dtype: str | None) -> str:
    """Name of the number format of an operand; `dtype` says what uint8 storage holds."""
    swapped = "" if array.dtype.isnative else " (byte-swapped: convert it with .astype(dtype.newbyteorder('=')))"
    return checked_format(dtype_name(array.dtype), array.dtype == np.uint8, f"{array.dtype}{swapped}", name, dtype)


def checked_format(found: str | None, is_uint8: bool, shown: str, name: str, dtype: str | None) -> str:
    """The number format `found` of an array of any library, or what `dtype` says about uint8; `shown` is its dtype."""
    if found is None and is_uint8:
        if dtype is None:
            raise TypeError(f"{name} is uint8; say dtype='hifloat8' (or an 8-bit float format) to tell what it holds")
        if dtype not in LONG_DTYPE or DTYPES[LONG_DTYPE[dtype]][1] != 1:
            raise TypeError(f"{name} is uint8, so dtype must be one of the 8-bit formats float8_e4m3fn, float8_e5m2, "
                            f"hifloat8, got dtype={dtype!r}")
        return LONG_DTYPE[dtype]
    if found is None:
        raise TypeError(f"{name} has dtype {shown}; known are {', '.join(DTYPES)}")
    if dtype is not None and LONG_DTYPE.get(dtype) != found:
        raise TypeError(f"{name} has dtype {found}, but dtype={dtype!r} was asked for")
    return found


def operand(array: Array, name: str, order: tuple[int, ...] | None, format_name: str) -> Array:
    """A view in canonical axis order that a backend can read by address and strides."""
    if not array.flags.aligned:
        raise ValueError(f"{name} is not aligned to its {array.itemsize}-byte elements (strides {array.strides}); "
                         "pass a copy")
    stored = storage_dtype(format_name)
    if array.dtype != stored:  # uint8 storage of a float8, or en_dtypes' hifloat8
        array = array.view(stored)
    return array if order is None else array.transpose(order)


def empty(shape: tuple[int, ...], format_name: str, like: Array) -> Array:
    """A new result array; hifloat8 results have the dtype of hifloat8 operands (en_dtypes or uint8)."""
    if format_name == "hifloat8" and dtype_name(like.dtype) == "hifloat8":
        return from_line(shape, like.dtype)
    return from_line(shape, storage_dtype(format_name))


def from_line(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A new array that starts at a cache line, as torch's do; NumPy's own start a quarter or a half of one later.

    A vector that crosses a line costs two accesses, and only whole lines can be written around the caches.
    """
    size = prod(shape) * dtype.itemsize
    if size < SMALL:
        return np.empty(shape, dtype)
    memory = np.empty(size + LINE, np.uint8)
    array: Array = np.ndarray(shape, dtype, memory, -memory.ctypes.data % LINE)
    return array


def recorded(arrays: dict[str, Any]) -> bool:
    """NumPy, like what DLPack shows, follows nothing."""
    return False


def record(asked: Any, arrays: dict[str, Any]) -> Any:
    raise NotImplementedError("arrays that follow nothing are never recorded")


def add(out: Array, result: Array) -> Array:
    return np.add(out, result, out=out)


def returned(result: Array, like: Array) -> Array:
    return result


def check_out(out: object, shape: tuple[int, ...], format_name: str, name: str, operands: dict[str, Array]) -> None:
    """Refuse an output array that cannot receive the result."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{name} must be a numpy array like the operands, got {type(out).__name__}")
    if isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array: a result has no mask; pass {name}.data")
    found = dtype_name(out.dtype)
    if found != format_name and not (out.dtype == np.uint8 and DTYPES[format_name][1] == 1):
        raise TypeError(f"{name} has dtype {out.dtype}, but the result is {format_name}")
    if out.shape != shape:
        raise ValueError(f"{name} has shape {out.shape}, but the result has shape {shape}")
    if not out.flags.writeable:
        raise ValueError(f"{name} is read-only")
    if not out.flags.c_contiguous and overlaps_itself(out.shape, out.strides, out.itemsize):
        raise ValueError(f"{name} has elements that overlap each other (strides {out.strides}, shape {out.shape})")
    for other_name, other in operands.items():
        if np.may_share_memory(out, other) and _share_an_element(out, other):
            raise ValueError(f"{name} overlaps {other_name} in memory")


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    """Whether two indices may name one element: in order of stride, each step must pass over all smaller axes.

    `strides` and the `size` of an element are in one unit, bytes or elements.
    """
    if 0 in shape:
        return False
    reach = 0
    for step, extent in sorted((abs(step), extent) for step, extent in zip(strides, shape) if extent > 1):
        if step < reach + size:
            return True
        reach += step * (extent - 1)
    return False


def _share_an_element(a: Array, b: Array) -> bool:
    try:
        return np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:  # strides too tangled to decide: refuse rather than risk a wrong result
        return True


def check_workspace(workspace: object, needed: int, operands: dict[str, Array]) -> None:
    """Refuse a workspace that is not a writable, contiguous run of enough bytes."""
    if not isinstance(workspace, np.ndarray) or workspace.dtype != np.uint8 or workspace.ndim != 1:
        what = f"{workspace.dtype} of shape {workspace.shape}" if isinstance(workspace, np.ndarray) \
            else type(workspace).__name__
        raise TypeError(f"workspace must be a 1-D uint8 numpy array, got {what}")
    if not workspace.flags.c_contiguous:
        raise ValueError(f"workspace must be contiguous, got strides {workspace.strides}")
    if not workspace.flags.writeable:
        raise ValueError("workspace is read-only")
    if workspace.size < needed:
        raise ValueError(f"workspace has {workspace.size} bytes, but the plan needs {needed}")
    for name, array in operands.items():
        if np.may_share_memory(workspace, array):
            raise ValueError(f"workspace overlaps {name} in memory")


def workspace_view(workspace: Array) -> Array:
    return workspace


def again(plan: Any, operands: tuple[Any, ...], targets: tuple[Any, ...], results: tuple[Any, ...]) -> None:
    """No shorter way."""
