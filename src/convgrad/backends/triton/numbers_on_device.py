"""Number formats and tensors on the device: rounding modes, decoding tables, arrays as tensors, the workspace."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton.language as tl

from ...numbers import hifloat8_tables
from ...problem import DTYPES, Problem
from .launch import INTERPRETED
from .replay import Run, constant_tensor, new_scratch

# Rounding of operands by (number format, compute mode): see elements.as_operand. Formats that a mode does not change
# are not listed.
ROUNDS = {
    ("float32", "tf32"): "away:10", ("float32", "hf32_10"): "away:10", ("float32", "hf32_10_even"): "even:10",
    ("float32", "hf32"): "away:11", ("float32", "hf32_even"): "even:11",
    ("float32", "bf16"): "bf16", ("float32", "f16"): "f16", ("float16", "bf16"): "bf16", ("bfloat16", "f16"): "f16",
}
# 8-bit operands enter products as 16-bit numbers that hold them exactly.
STORED_8BIT = {"float8_e4m3fn": "exact_f16", "float8_e5m2": "exact_f16", "hifloat8": "table"}
TORCH_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16,
                "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
                "hifloat8": torch.uint8}
_tables: dict[Any, Any] = {}


def rounding(problem: Problem) -> str:
    """How operands are rounded on load."""
    if problem.dtype in STORED_8BIT:
        # bf16 keeps at least as many bits as any 8-bit format, f16 loses only HiFloat8's range: both exact for ours
        return STORED_8BIT[problem.dtype]
    return ROUNDS.get((problem.dtype, problem.compute), "")


def sixteen_bits(problem: Problem) -> bool:
    """Whether tensor cores multiply the operands as they are stored: bfloat16 or float16, not rounded further."""
    return problem.dtype in ("bfloat16", "float16") and rounding(problem) == ""


def arithmetic(problem: Problem) -> dict[str, Any]:
    """ROUND, PRECISION and ACC of a problem."""
    rounded = rounding(problem)
    precision = "ieee"
    if problem.dtype == "float32" and rounded not in ("bf16", "f16"):
        precision = "tf32" if rounded.endswith(":10") else "tf32x3"
    if INTERPRETED:
        precision = "ieee"
    return {"ROUND": rounded, "PRECISION": precision, "ACC": tl.float64 if problem.dtype == "float64" else tl.float32}


def table_for(problem: Problem, like: Any) -> Any:
    """Decoding table of an 8-bit format on the tensor's device (any tensor where none is needed)."""
    if problem.dtype != "hifloat8":
        return like
    return constant_tensor(_tables, like, lambda device: torch.from_numpy(
        np.asarray(hifloat8_tables()[0], dtype=np.float32)).to(device).to(torch.bfloat16))


def on_tensors(problem: Problem, run: Run) -> Run:
    """Wrap a runner so that it takes CUDA tensors as they are and, when interpreted, NumPy arrays as tensors."""
    if not INTERPRETED:
        return run

    def run_on_arrays(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any = None) -> None:
        taken = tuple(as_tensor(operand, problem.dtype) for operand in operands)
        given = tuple(as_tensor(result, problem.out_dtype) for result in results)
        scratch = torch.from_numpy(workspace) if isinstance(workspace, np.ndarray) else workspace
        run(taken, given, scratch)
        for result, tensor in zip(results, given):
            if isinstance(result, np.ndarray) and not shares(result, tensor):
                result[...] = as_array(tensor, result.dtype)

    return run_on_arrays


def as_tensor(array: Any, dtype: str) -> Any:
    if isinstance(array, torch.Tensor):
        return array
    size = DTYPES[dtype][1]
    if any(step < 0 or step % size for step in array.strides) or not array.flags.writeable:
        array = array.copy()
    bits = {1: np.uint8, 2: np.int16}.get(size)
    if bits is None:
        stored = array
    elif array.flags.c_contiguous or array.ndim == 0:
        stored = array.view(bits)
    else:
        first = array[(slice(0, 1),) * array.ndim].reshape(-1).view(bits)
        stored = np.lib.stride_tricks.as_strided(first, array.shape, array.strides)
    return torch.from_numpy(stored).view(TORCH_DTYPES[dtype])


def shares(array: Any, tensor: Any) -> bool:
    return bool(array is tensor or array.size == 0 or array.__array_interface__["data"][0] == tensor.data_ptr())


def as_array(tensor: Any, dtype: Any) -> Any:
    size = tensor.element_size()
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).numpy().view(dtype)


def operand_bytes(problem: Problem) -> int:
    """Bytes of an operand as it enters a product."""
    narrow = rounding(problem) in ("bf16", "f16", "exact_f16", "table")
    return 2 if narrow else DTYPES[problem.dtype][1]


def scratch(problem: Problem, workspace: Any, shape: tuple[int, ...], like: Any) -> Any:
    """The workspace as sums of `shape`: the caller's memory, or new memory of the stream's allocator."""
    dtype = torch.float64 if problem.dtype == "float64" else torch.float32
    if workspace is None:
        return new_scratch(shape, dtype, like)
    size = math.prod(shape) * dtype.itemsize
    start = -workspace.data_ptr() % 16
    if workspace.numel() < start + size:
        raise ValueError(f"workspace has {workspace.numel()} bytes, but the plan needs {size} from a 16-byte boundary")
    return workspace[start:start + size].view(dtype).view(shape)
