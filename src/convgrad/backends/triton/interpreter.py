"""Corrections to Triton's interpreter (TRITON_INTERPRET=1) for what the kernels use: 16- and 8-bit floats, loop bounds.

NOTE: Triton 3.6 multiplies the bits of bfloat16 operands as integers in `dot`, does not round to nearest when it
narrows floats, and with NumPy 2.4 cannot take a scalar tensor as a loop bound. Seen with the project's own oracle.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

STORED = {"bf16": ml_dtypes.bfloat16, "fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2,
          "fp16": np.float16, "fp32": np.float32, "fp64": np.float64}


def values(data: Any, dtype: Any) -> Any:
    """The numbers an interpreter array stands for, in a NumPy dtype that computes with them."""
    stored = STORED[dtype.scalar.name]
    return np.ascontiguousarray(data).view(stored).reshape(data.shape)


def convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Convert between float formats, to nearest even; the result is in the interpreter's storage."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = values(data, source).astype(np.float64 if source.scalar.name == "fp64" else np.float32)
        result = wide.astype(STORED[target.scalar.name])
    storage = interpreter._get_np_dtype(target)
    return result.view(storage) if result.dtype.itemsize == storage.itemsize else result


def correct_interpreter() -> None:
    """Install the corrections; called once when the backend is imported under the interpreter."""
    builder = interpreter.InterpreterBuilder
    patch_tensor = interpreter._patch_lang_tensor
    cast = builder.cast_impl

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        kind = d.data.dtype
        with np.errstate(all="ignore"):
            product = np.matmul(values(a.data, a.dtype).astype(kind), values(b.data, b.dtype).astype(kind))
            return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar.name in STORED and target.scalar.name in STORED:
            data = convert_float(source.data, source.dtype, target, None)
            return interpreter.TensorHandle(data, target.scalar)
        return cast(self, source, target)

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._convert_float = convert_float
    interpreter._patch_lang_tensor = patched_tensor
    builder.create_dot = dot
    builder.cast_impl = cast_impl
    assert tl.float32.name == "fp32"
