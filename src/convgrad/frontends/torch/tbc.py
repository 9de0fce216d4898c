"""aten::conv_tbc_backward: gradients of `torch.conv_tbc`, whose tensors are (time, batch, channels)."""

from __future__ import annotations

import time
from typing import Any

import torch

from ... import api
from .serving import row_of

OPERATOR = torch.ops.aten.conv_tbc_backward.default
NARROW = (torch.bfloat16, torch.float16)


def why_torch_serves(tensors: tuple[torch.Tensor, ...]) -> str | None:
    """torch computes it tap by tap as products of matrices, which are as fast as ours in wide formats only."""
    dtype = tensors[0].dtype
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype != dtype for tensor in tensors):
        return "tensor subclasses or several number formats"
    if any(tensor.numel() == 0 for tensor in tensors):
        return "an empty tensor"
    if dtype not in NARROW:
        return f"faster in torch: {str(dtype).removeprefix('torch.')} of conv_tbc, as products of matrices"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "to be differentiated again"
    return None


def backward(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor,
             pad: int) -> tuple[torch.Tensor, ...]:
    """The registered kernel: gradients of input, weight and bias."""
    why = why_torch_serves((dy, x, w, bias))
    geometry = (f"conv_tbc {str(dy.dtype).removeprefix('torch.')} dy{list(dy.shape)} x{list(x.shape)} "
                f"w{list(w.shape)} pad {pad}")
    row = row_of(geometry, "torch" if why else "native", why or "layout TBC")
    start = time.perf_counter()
    if why:
        results: Any = OPERATOR.decompose(dy, x, w, bias, pad)
    else:
        results = api.conv_backward(dy.detach(), x.detach(), w.detach(), padding=pad, layout="TBC", weight_layout="LIO")
    row.tally.calls += 1
    row.tally.seconds += time.perf_counter() - start
    return tuple(results)
