"""The arguments of `torch.nn.functional`'s convolutions, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...problem import checked_ints, checked_padding
from .geometry import Ints


def check_tensor(value: object, name: str) -> None:
    if not isinstance(value, torch.Tensor):
        kind = type(value)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        raise TypeError(f"{name} must be a torch tensor, got {module}{kind.__name__}")


def check_rank(tensor: torch.Tensor, name: str, ranks: Sequence[int], what: str) -> None:
    if tensor.dim() not in ranks:
        raise ValueError(f"{name} must have {' or '.join(map(str, ranks))} axes ({what}), got {tensor.dim()}: shape "
                         f"{tuple(tensor.shape)}")


def ints(value: Any, name: str, axes: int, minimum: int) -> tuple[int, ...]:
    """One number per axis from a number, or from a sequence of one or of one per axis, as PyTorch takes them."""
    if type(value) is tuple and len(value) == axes and all([type(one) is int and one >= minimum for one in value]):
        return value  # what layers hold
    if isinstance(value, (tuple, list)) and len(value) == 1:
        value = value[0]
    if type(value) is int and value >= minimum:
        return (value,) * axes
    return checked_ints(value, name, axes, minimum)


def pads(value: Any, axes: int, kernel: Ints, stride: Ints, dilation: Ints) -> list[int]:
    """`padding` as the operators take it, from numbers, (low, high) pairs or a word."""
    if isinstance(value, str):
        return worded(value, kernel, stride, dilation)
    if type(value) is int or (isinstance(value, (tuple, list)) and all([type(one) is int for one in value])):
        return list(ints(value, "padding", axes, 0))
    pairs = checked_padding(value, axes)
    if all(low == high for low, high in pairs):
        return [low for low, _ in pairs]
    return [pad for pair in pairs for pad in pair]


def worded(word: str, kernel: Ints, stride: Ints, dilation: Ints) -> list[int]:
    """"valid", or "same" with the odd element at the high end, as in PyTorch."""
    if word == "valid":
        return [0] * len(kernel)
    if word != "same":
        raise ValueError(f"padding={word!r} is neither 'same' nor 'valid'")
    if any(step != 1 for step in stride):
        raise ValueError(f"padding='same' goes with stride 1 only, got stride={tuple(stride)}")
    totals = [spread * (taps - 1) for taps, spread in zip(kernel, dilation)]
    if all(total % 2 == 0 for total in totals):
        return [total // 2 for total in totals]
    return [pad for total in totals for pad in (total // 2, total - total // 2)]
