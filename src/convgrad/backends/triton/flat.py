"""Windows that cover their whole image (patches cut out before): the same numbers as a plain matrix product.

With channels last, an image and a weight row are one row of taps x channels each, so the problem is a convolution of
1-tap windows over as many channels, which every kernel does best.
"""

from __future__ import annotations

import math
from typing import Any

from ...problem import Conv, Problem

CHANNELS_LAST = ("NLC", "NHWC", "NDHWC")
INPUTS_LAST = ("OLI", "OHWI", "ODHWI")


def flattened(problem: Problem) -> Problem | None:
    """The same sums with all taps as channels; None where windows do not cover whole images."""
    conv = problem.conv
    if (conv.kernel_size != conv.in_size or math.prod(conv.kernel_size) == 1 or conv.groups > 1
            or any(low or high for low, high in conv.padding)
            or any(dilation > 1 for dilation, kernel in zip(conv.dilation, conv.kernel_size) if kernel > 1)
            or problem.layout not in CHANNELS_LAST or problem.weight_layout not in INPUTS_LAST
            or "bias" in problem.results):
        return None
    channels = conv.in_channels * math.prod(conv.kernel_size)
    return problem.with_(conv=Conv(conv.batch, channels, conv.out_channels, (1,), (1,)), layout="NLC",
                         weight_layout="OLI")


def flat_view(tensor: Any) -> Any | None:
    """A canonical tensor as (outer, all taps and channels, 1); None where they lie otherwise."""
    row = tensor[:1].permute(0, *range(2, tensor.dim()), 1)
    width = math.prod(tensor.shape[1:])
    if not row.is_contiguous():
        return None
    outer = tensor.stride(0) if tensor.shape[0] > 1 else width
    return tensor.as_strided((tensor.shape[0], width, 1), (outer, 1, width))
