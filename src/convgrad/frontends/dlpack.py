"""Arrays of other libraries that exchange memory through DLPack: CuPy, JAX, ... Results come back as their own kind.

On the CPU they are read as NumPy views, on CUDA as torch tensors (torch is how kernels are launched there).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..numbers import dtype_name, storage_dtype
from ..problem import DTYPES, LONG_DTYPE

DLPACK_CPU, DLPACK_CUDA = 1, 2


def signature(arrays: dict[str, Any]) -> Any:
    return home(arrays), tuple([(array.shape, array.dtype) for array in arrays.values()])


def home(arrays: dict[str, Any]) -> tuple[str, str | None]:
    places = {name: tuple(int(part) for part in array.__dlpack_device__()) for name, array in arrays.items()}
    (first_name, first), *rest = places.items()
    for name, place in rest:
        if place != first:
            raise TypeError(f"all arrays must be on one device: {first_name} is on DLPack device {first}, "
                            f"{name} on {place}")
    if first[0] not in (DLPACK_CPU, DLPACK_CUDA):
        raise TypeError(f"arrays must be on the cpu or on cuda, got DLPack device {first}")
    return ("cuda" if first[0] == DLPACK_CUDA else "cpu"), None


def format_of(array: Any, name: str, dtype: str | None) -> str:
    found = dtype_name(np.dtype(array.dtype))
    if found is None and np.dtype(array.dtype) == np.uint8 and dtype is not None \
            and DTYPES.get(LONG_DTYPE.get(dtype, ""), ("", 0))[1] == 1:
        return LONG_DTYPE[dtype]
    if found is None:
        raise TypeError(f"{name} has dtype {array.dtype}; known are {', '.join(DTYPES)}")
    if dtype is not None and LONG_DTYPE.get(dtype) != found:
        raise TypeError(f"{name} has dtype {found}, but dtype={dtype!r} was asked for")
    return found


def operand(array: Any, name: str, order: tuple[int, ...] | None, format_name: str) -> Any:
    if isinstance(array, np.ndarray):  # a result that `empty` made
        return array if order is None else array.transpose(order)
    if int(array.__dlpack_device__()[0]) == DLPACK_CUDA:
        import torch

        tensor = array if isinstance(array, torch.Tensor) else torch.from_dlpack(array)
        return tensor if order is None else tensor.permute(order)
    # NOTE: NumPy's DLPack has no bfloat16 or float8; __array__ of JAX gives an ml_dtypes view of the same memory.
    view = np.asarray(array) if hasattr(array, "__array__") else np.from_dlpack(array)
    if view.dtype != storage_dtype(format_name):
        view = view.view(storage_dtype(format_name))
    return view if order is None else view.transpose(order)


def empty(shape: tuple[int, ...], format_name: str, like: Any) -> Any:
    device, index = (int(part) for part in like.__dlpack_device__())
    if device == DLPACK_CPU:
        return np.empty(shape, storage_dtype(format_name))
    import torch

    dtype = torch.uint8 if format_name == "hifloat8" else getattr(torch, format_name)
    return torch.empty(shape, dtype=dtype, device=f"cuda:{index}")


def returned(result: Any, like: Any) -> Any:
    """The result in the library of the operands: their own from_dlpack, or asarray where that cannot carry the type."""
    if type(result) is type(like):
        return result
    library = sys.modules[type(like).__module__.partition(".")[0]]
    if library.__name__ in ("jax", "jaxlib"):
        import jax

        return jax.numpy.asarray(result) if isinstance(result, np.ndarray) else jax.numpy.from_dlpack(result)
    return library.from_dlpack(result)


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


def check_workspace(workspace: Any, needed: int, operands: dict[str, Any]) -> None:
    raise TypeError("workspace is taken with NumPy arrays and torch tensors only")


def workspace_view(workspace: Any) -> Any:
    return workspace
