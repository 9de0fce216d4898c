"""Small problems for the operators: plain, one-sided, transposed, output padding beyond stride and dilation."""

from __future__ import annotations

from typing import Any

import torch

# input, weight, and the arguments behind the bias of `convolution`
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = {
    "1d": ((2, 4, 6), (6, 2, 3), ([2], [1], [1], False, [0], 2)),
    "causal": ((2, 3, 5), (4, 3, 3), ([1], [4, 0], [2], False, [0], 1)),
    "2d": ((2, 4, 4, 5), (6, 2, 2, 3), ([1, 2], [1, 0, 0, 2], [2, 1], False, [0, 0], 2)),
    "3d": ((1, 2, 3, 3, 2), (2, 1, 2, 1, 2), ([1, 2, 1], [1, 0, 1], [1, 1, 1], False, [0, 0, 0], 2)),
    "transposed": ((2, 4, 3, 3), (4, 3, 2, 3), ([1, 2], [1, 0], [1, 1], True, [0, 1], 2)),
    "beyond": ((2, 4, 3, 2), (4, 1, 2, 3), ([1, 2], [1, 0, 0, 2], [2, 1], True, [3, 5], 2)),
}


def operands(case: str, dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> tuple[Any, ...]:
    """Input, weight, bias and the other arguments of `convolution`."""
    x_shape, w_shape, rest = CASES[case]
    channels = w_shape[1] * rest[5] if rest[3] else w_shape[0]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
               for shape in (x_shape, w_shape, (channels,))]
    return (*tensors, *rest)
