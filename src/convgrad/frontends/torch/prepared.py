"""`torch.ops.convgrad.convolution_backward` on the CPU, from its arguments to the native core by one look into a table.

The table is the one behind `install()`; calls that the native core does not serve alone go to the operator's kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from ...problem import Conv, Unsupported
from .aten_backward import SERVED_DTYPES, BackwardCall, Question, parts_of, prepared_on_cpu
from .geometry import Geometry, Transposed
from .operators import checked_backward, convolution_backward, library, memory_format_of
from .registration import new_table
from .serving import new_tally
from .tensors import CHANNELS_LAST, FORMATS, PLAIN_TYPES, has_c_exchange


def prepare(keys: Any, *arguments: Any) -> tuple[Any, Any]:
    """What serves all calls of one signature, and who counts them."""
    call = BackwardCall(*arguments)
    geometry = Geometry(*arguments[4:10])
    checked_backward(call.grad_output, call.input, call.weight, geometry)
    return native_call(call, geometry) or by_kernel, new_tally()


def by_kernel(keys: Any, *arguments: Any) -> Any:
    return convolution_backward(*arguments)


def native_call(call: BackwardCall, geometry: Geometry) -> Any:
    """The call as the native core runs it, None where it does not."""
    plain = all(type(tensor) in PLAIN_TYPES and tensor.numel() and not tensor.is_neg() for tensor in call.tensors)
    if not has_c_exchange() or not plain or call.input.dtype not in SERVED_DTYPES or not any(call.output_mask):
        return None
    inner = Transposed.of(geometry)
    if geometry.transposed and any(inner.cut):
        return None
    small, large = (call.input, call.grad_output) if geometry.transposed else (call.grad_output, call.input)
    pairs = (inner.geometry if geometry.transposed else geometry).pairs
    conv = Conv(small.shape[0], large.shape[1], small.shape[1], tuple(large.shape[2:]), tuple(call.weight.shape[2:]),
                tuple(geometry.stride), tuple(geometry.dilation), pairs, geometry.groups)
    memory_format = memory_format_of(call.input, call.weight)
    layout = "" if memory_format is torch.contiguous_format else CHANNELS_LAST[large.dim()][1]
    dx, dw, db = call.output_mask
    weight_layout = layout.replace("C", "").replace("N", "O") + "I" if layout else ""
    asked = Question(conv, FORMATS[call.input.dtype], "cpu", layout, weight_layout, geometry.transposed, (dx, dw, db))
    try:
        parts = parts_of(asked)
    except Unsupported:
        return None
    if any(part.plan.backend != "native" for part in parts):
        return None
    return prepared_on_cpu(call, parts, memory_format)


table = new_table(prepare)
library.impl("convolution_backward", table, "CPU", with_keyset=True)
