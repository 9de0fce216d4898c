"""Is a result on a GPU right? Samples of it are compared with float64 sums over the same operands, on the device.

Problems for a GPU are too large for the reference. An input gradient or output is compared at a few hundred positions,
the corners among them, in all channels; a weight gradient in a few output channels and taps of two groups, in all their
input channels; a bias gradient everywhere. Each sampled element is its whole sum, judged by the contract's error bound.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

from ..problem import Conv, Problem
from .judge import Verified, WrongResult, bound_coefficients

POSITIONS = 256
OUTPUT_CHANNELS = 4  # of a group
TAPS = 6
ELEMENTS = 2**26     # of x that become float64 at a time


def check_samples(problem: Problem, operands: dict[str, Any], result: Any, wrt: str, kernel: str,
                  seed: int = 0) -> Verified:
    """Compare samples of one result (canonical views all); raise WrongResult where one breaks the error bound."""
    choose = random.Random(seed)
    if wrt == "bias":
        dy = operands["grad_output"]
        axes = [0, *range(2, dy.dim())]
        got, exact, magnitude = result.double(), dy.sum(axes, dtype=_double()), dy.abs().sum(axes, dtype=_double())
    elif wrt == "weight":
        got, exact, magnitude = weight_samples(problem.conv, operands, result, choose)
    else:
        got, exact, magnitude = position_samples(problem.conv, operands, result, wrt, choose)
    constant, of_size, of_magnitude = bound_coefficients(problem.with_(wrt=wrt))
    units = (got - exact).abs() / (constant + of_size * exact.abs() + of_magnitude * magnitude)
    units[units != units] = math.inf
    worst = float(units.max()) if units.numel() else 0.0
    how = f"{units.numel()} of {result.numel()} elements"
    if worst > 1:
        place = int(units.argmax())
        raise WrongResult(f"{kernel} is off by {worst:.3g} times the error bound ({wrt}, {how}): got "
                          f"{float(got.reshape(-1)[place]):.9g}, exact {float(exact.reshape(-1)[place]):.9g}")
    return Verified(worst, how)


def _double() -> Any:
    import torch

    return torch.float64


def position_samples(conv: Conv, operands: dict[str, Any], result: Any, wrt: str,
                     choose: random.Random) -> tuple[Any, Any, Any]:
    """Result, exact value and sum of magnitudes at sampled positions, as (positions, channels)."""
    import torch

    forward = wrt == "output"
    source, weight = operands["input" if forward else "grad_output"], operands["weight"]
    extents = (result.shape[0], *result.shape[2:])
    picked = {tuple(0 for _ in extents), tuple(extent - 1 for extent in extents)}
    picked |= {tuple(choose.randrange(extent) for extent in extents) for _ in range(POSITIONS)}
    places = torch.tensor(sorted(picked), device=source.device)
    shape = (len(places), conv.groups, conv.group_out if forward else conv.group_in)
    exact = torch.zeros(shape, dtype=torch.float64, device=source.device)
    magnitude = torch.zeros_like(exact)
    letters = "pgc,gkc->pgk" if forward else "pgk,gkc->pgc"
    for tap in itertools.product(*map(range, conv.kernel_size)):
        there = torch.ones(len(places), dtype=torch.bool, device=source.device)
        where = []
        for axis, t in enumerate(tap):
            at, stride, shift = places[:, 1 + axis], conv.stride[axis], t * conv.dilation[axis] - conv.padding[axis][0]
            if forward:
                at = at * stride + shift
            else:
                there &= (at - shift) % stride == 0
                at = torch.div(at - shift, stride, rounding_mode="floor")
            there &= (at >= 0) & (at < source.shape[2 + axis])
            where.append(at.clamp(0, source.shape[2 + axis] - 1))
        seen: tuple[Any, ...] = (places[:, 0], slice(None), *where)
        values = source[seen].double().reshape(len(places), conv.groups, -1) * there[:, None, None]
        of_tap = (slice(None), slice(None), *tap)
        taps = weight[of_tap].double().reshape(conv.groups, conv.group_out, conv.group_in)
        exact += torch.einsum(letters, values, taps)
        magnitude += torch.einsum(letters, values.abs(), taps.abs())
    sampled: tuple[Any, ...] = (places[:, 0], slice(None), *(places[:, 1 + axis] for axis in range(conv.axes)))
    got = result[sampled].double()
    return got.reshape(shape), exact, magnitude


def weight_samples(conv: Conv, operands: dict[str, Any], result: Any, choose: random.Random) -> tuple[Any, Any, Any]:
    """Result, exact value and sum of magnitudes of sampled output channels and taps, as (samples, input channels)."""
    import torch

    dy, x = operands["grad_output"], operands["input"]
    taps = list(itertools.product(*map(range, conv.kernel_size)))
    picked = {taps[0], taps[-1], taps[len(taps) // 2], *choose.sample(taps, min(TAPS, len(taps)))}
    got, exact, magnitude = [], [], []
    for group in sorted({0, conv.groups - 1}):
        first = group * conv.group_out
        channels = sorted({first, first + conv.group_out - 1,
                           *(first + choose.randrange(conv.group_out) for _ in range(OUTPUT_CHANNELS))})
        inputs = slice(group * conv.group_in, (group + 1) * conv.group_in)
        for tap in sorted(picked):
            sums = torch.zeros(2, len(channels), conv.group_in, dtype=torch.float64, device=x.device)
            spans = [conv.tap_range(axis, t) for axis, t in enumerate(tap)]
            if any(first >= last for first, last in spans):
                spans = [(0, 0)] * conv.axes  # the tap reads padding alone
            (begin, end), *others = spans
            rows = max(1, ELEMENTS // max(1, conv.group_in * math.prod(last - first for first, last in others)))
            images = max(1, rows // max(1, end - begin))
            for n, row in itertools.product(range(0, conv.batch, images), range(begin, end, rows)):
                piece = [(row, min(row + rows, end)), *others]
                at_dy = (slice(None), slice(None), *(slice(first, last) for first, last in piece))
                at_x = (slice(None), inputs, *(slice(first * s + t * d - low, (last - 1) * s + t * d - low + 1, s)
                                               for (first, last), t, s, d, (low, _) in
                                               zip(piece, tap, conv.stride, conv.dilation, conv.padding)))
                wanted = dy[n:n + images][at_dy][:, channels].double().movedim(1, 0).reshape(len(channels), -1)
                seen = x[n:n + images][at_x].double().movedim(1, -1).reshape(-1, conv.group_in)
                sums[0] += wanted @ seen
                sums[1] += wanted.abs() @ seen.abs()
            of_tap: tuple[Any, ...] = (channels, slice(None), *tap)
            got.append(result[of_tap].double())
            exact.append(sums[0])
            magnitude.append(sums[1])
    return torch.cat(got), torch.cat(exact), torch.cat(magnitude)
