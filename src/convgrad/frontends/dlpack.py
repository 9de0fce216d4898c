"""Arrays of other libraries that show their memory: CuPy, JAX, Numba, ... Results come back as their own kind.

They show it through DLPack, or through __cuda_array_interface__ alone. On the CPU they are read as NumPy views, on CUDA
as torch tensors (torch is how kernels are launched there).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..numbers import dtype_name, storage_dtype
from .numpy import checked_format, from_line, overlaps_itself
from .numpy import execute as execute
from .numpy import record as record
from .numpy import recorded as recorded
from .numpy import threads as threads

DLPACK_CPU, DLPACK_CUDA = 1, 2


def signature(arrays: dict[str, Any]) -> Any:
    return home(arrays), tuple([(array.shape, array.dtype) for array in arrays.values()])


def home(arrays: dict[str, Any]) -> tuple[str, str | None]:
    places = {name: _place(array) for name, array in arrays.items()}
    (first_name, first), *rest = places.items()
    for name, place in rest:
        if place != first:
            raise TypeError(f"all arrays must be on one device: {first_name} is on DLPack device {first}, "
                            f"{name} on {place}")
    if first[0] not in (DLPACK_CPU, DLPACK_CUDA):
        raise TypeError(f"arrays must be on the cpu or on cuda, got DLPack device {first}")
    return ("cuda" if first[0] == DLPACK_CUDA else "cpu"), None


def _place(array: Any) -> tuple[int, int]:
    """DLPack's kind and number of the device that holds an array."""
    if hasattr(array, "__dlpack_device__"):
        kind, number = array.__dlpack_device__()
        return int(kind), int(number)
    return DLPACK_CUDA, _seen(array).get_device()


def format_of(array: Any, name: str, dtype: str | None) -> str:
    stored = np.dtype(array.dtype)
    return checked_format(dtype_name(stored), stored == np.uint8, str(stored), name, dtype)


def operand(array: Any, name: str, order: tuple[int, ...] | None, format_name: str) -> Any:
    view = _seen(array)
    if not isinstance(view, np.ndarray):
        return view if order is None else view.permute(order)
    if view.dtype != storage_dtype(format_name):
        view = view.view(storage_dtype(format_name))
    return view if order is None else view.transpose(order)


def _seen(array: Any) -> Any:
    """The array's memory as a NumPy array (CPU) or a torch tensor (CUDA)."""
    if isinstance(array, np.ndarray):  # a result that `empty` made
        return array
    if not hasattr(array, "__dlpack_device__") or int(array.__dlpack_device__()[0]) == DLPACK_CUDA:
        import torch

        if isinstance(array, torch.Tensor):
            return array
        return torch.from_dlpack(array) if hasattr(array, "__dlpack__") else torch.as_tensor(array, device="cuda")
    # NOTE: NumPy's DLPack has no bfloat16 or float8; __array__ of JAX gives an ml_dtypes view of the same memory.
    return np.asarray(array) if hasattr(array, "__array__") else np.from_dlpack(array)


def empty(shape: tuple[int, ...], format_name: str, like: Any) -> Any:
    device, index = _place(like)
    if device == DLPACK_CPU:
        return from_line(shape, storage_dtype(format_name))
    import torch

    dtype = torch.uint8 if format_name == "hifloat8" else getattr(torch, format_name)
    return torch.empty(shape, dtype=dtype, device=f"cuda:{index}")


def add(out: Any, result: Any) -> Any:
    view = _seen(out)
    view += _seen(result)
    return out


def returned(result: Any, like: Any) -> Any:
    """The result in the library of the operands: their own from_dlpack, or asarray where that cannot carry the type."""
    if type(result) is type(like):
        return result
    library = sys.modules[type(like).__module__.partition(".")[0]]
    if library.__name__ in ("jax", "jaxlib"):
        import jax

        return jax.numpy.asarray(result) if isinstance(result, np.ndarray) else jax.numpy.from_dlpack(result)
    if library.__name__ == "numba":
        from numba import cuda  # type: ignore[import-not-found]

        return cuda.as_cuda_array(result)
    # NOTE: a library that cannot take memory from others gets the torch tensor, which shows its memory in both ways.
    return library.from_dlpack(result) if hasattr(library, "from_dlpack") else result


def check_out(out: Any, shape: tuple[int, ...], format_name: str, name: str, operands: dict[str, Any]) -> None:
    if type(out) is not type(next(iter(operands.values()))):
        raise TypeError(f"{name} must be an array like the operands, got {type(out).__name__}")
    if type(out).__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise TypeError(f"{name}: JAX arrays cannot be written to; take the returned array")
    found = dtype_name(np.dtype(out.dtype))
    if found != format_name:
        raise TypeError(f"{name} has dtype {out.dtype}, but the result is {format_name}")
    if tuple(out.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(out.shape)}, but the result has shape {shape}")
    view = _seen(out)
    if isinstance(view, np.ndarray) and not view.flags.writeable:
        raise ValueError(f"{name} is read-only")
    low, high, strides, size = _span(view)
    if overlaps_itself(shape, strides, size):
        raise ValueError(f"{name} has elements that overlap each other (strides {strides} bytes, shape {shape})")
    for other, array in operands.items():
        other_low, other_high, _, _ = _span(_seen(array))
        if low < other_high and other_low < high:
            raise ValueError(f"{name} overlaps {other} in memory")


def _span(view: Any) -> tuple[int, int, tuple[int, ...], int]:
    """First address, address after the last element, strides in bytes and element size of a NumPy or torch view."""
    if isinstance(view, np.ndarray):
        address, strides, size = int(view.ctypes.data), tuple(view.strides), view.itemsize
    else:
        size = view.element_size()
        address, strides = view.data_ptr(), tuple(step * size for step in view.stride())
    if 0 in view.shape:
        return address, address, strides, size
    reach = [(extent - 1) * step for extent, step in zip(view.shape, strides)]
    return (address + sum(step for step in reach if step < 0), address + sum(step for step in reach if step > 0) + size,
            strides, size)


def check_workspace(workspace: Any, needed: int, operands: dict[str, Any]) -> None:
    raise TypeError("workspace is taken with NumPy arrays and torch tensors only")


def workspace_view(workspace: Any) -> Any:
    return workspace


def again(plan: Any, operands: tuple[Any, ...], targets: tuple[Any, ...], results: tuple[Any, ...]) -> None:
    """No shorter way."""
