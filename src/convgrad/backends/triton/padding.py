"""Launches that copy tensors for the copy engine: rows padded to 16 bytes, weights with outputs last."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from .geometry import strides_of
from .launch import Launch, Step, power_of_two
from .padded import PAD_ELEMENTS, pad_kernel, turn_kernel


def up8(channels: int) -> int:
    """Channels of a row whose length is a multiple of 16 bytes."""
    return -(-channels // 8) * 8


def padded(tensor: Any, memory: Any, dtype: Any, shuffled: str = "") -> Any:
    """A copy of a tensor (canonical view) in given memory, its channels last and padded to 16 bytes."""
    outer, channels, *spatial = tensor.shape
    copy = memory.view(dtype).view(outer, *spatial, up8(channels)).permute(0, -1, *range(1, tensor.dim() - 1))
    PAD[shuffled](tensor, copy)
    return copy


def pad_launch(tensor: Any, copy: Any, shuffled: str) -> Launch:
    outer, channels, *spatial = tensor.shape
    rows = outer * math.prod(spatial)
    width = min(128, power_of_two(copy.shape[1]))
    few = max(1, PAD_ELEMENTS // width)
    extents = (*(1,) * (3 - len(spatial)), *spatial)
    return Launch((-(-rows // few), -(-copy.shape[1] // width)), (rows, channels, *extents, *strides_of(tensor)),
                  {"CHANNELS": copy.shape[1], "WIDTH": width, "ROWS": few, "SHUFFLED": shuffled}, 4, 1)


PAD = {shuffled: Step(pad_kernel, partial(pad_launch, shuffled=shuffled)) for shuffled in ("", "rows", "channels")}


def turned(weight: Any, memory: Any) -> Any:
    """A copy of a weight in given memory, its input channels first and its output channels last: (I, O, taps)."""
    outs, ins, *kernel = weight.shape
    copy = memory.view(weight.dtype).view(ins, *kernel, outs).permute(0, -1, *range(1, weight.dim() - 1))
    turn(weight, copy)
    return copy


def turn_launch(weight: Any, copy: Any) -> Launch:
    outs, ins, *kernel = weight.shape
    taps = math.prod(kernel)
    extents = (*(1,) * (3 - len(kernel)), *kernel)
    return Launch((taps, -(-outs // TURN), -(-ins // TURN)), (outs, ins, *extents[1:], *strides_of(weight)),
                  {"TAPS": taps, "FEW": TURN}, 4, 1)


TURN = 64  # channels of a program's square
turn = Step(turn_kernel, turn_launch)
