"""Where torch's own kernels are faster than ours: who serves a gradient under `convgrad.torch.install()`.

A rule by geometry and instruction set, never by time: two trainings on one machine give the same bits. It was fitted on
the layers of seven models at 128 pixels and judged on those at 224 and on the benchmark's layers (docs/torch.md).
"""

from __future__ import annotations

from math import prod

from .problem import Problem

SMALL_ROW, SHORT_ROW, LONG_ROW = 20, 44, 1600  # pixels


def why_torch(problem: Problem, kernel: str, threads: int) -> str | None:
    """Why torch's kernel is to serve one gradient of a problem that `kernel` of ours would compute, or None."""
    conv = problem.conv
    least = min(conv.in_channels, conv.out_channels)
    if problem.device != "cpu" or problem.dtype != "float32" or "avx512" not in kernel:
        return None  # not measured, or ours wins
    if conv.groups > 1 or least < 16 or conv.batch < 2 * threads:
        return None  # torch needs whole images for every thread
    taps, row = prod(conv.kernel_size), conv.in_size[-1]
    if problem.wrt == "weight" and kernel.startswith("few_weight") and conv.axes == 3 and least >= 32 \
            and row <= SMALL_ROW:
        return f"faster in torch: f32 weight gradient of {least} channels or more over rows of {row} pixels in volumes"
    if problem.wrt != "input" or set(conv.stride) != {1} or not problem.layout.startswith("NC"):
        return None  # with channels last ours is as fast or faster
    if taps >= 9 and row <= SHORT_ROW and kernel.startswith("gemm"):
        return f"faster in torch: f32 input gradient of {taps} taps with rows of {row} pixels, {SHORT_ROW} or fewer"
    if conv.axes == 1 and 1 < taps < 9 and row >= LONG_ROW and least < 128:
        return f"faster in torch: f32 input gradient of {taps} taps with a row of {row} pixels, {LONG_ROW} or more"
    return None
