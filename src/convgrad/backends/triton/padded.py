"""Copies of tensors as rows of channels, padded with zeros to a multiple of 16 bytes, for the copy engine to read."""

# mypy: ignore-errors
import triton
import triton.language as tl

from .elements import position

PAD_ROWS = 4096  # elements that a program copies, in whole rows


@triton.jit
def pad_kernel(source, target, rows, channels, J0, J1, J2, s_n, s_c, s_0, s_1, s_2, CHANNELS: tl.constexpr,
               WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Rows (n, j0, j1, j2) of `channels` elements, from any strides to rows of CHANNELS elements."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n, j0, j1, j2 = position(row, J0, J1, J2)
    where = n * s_n + j0 * s_0 + j1 * s_1 + j2 * s_2
    for first in range(0, CHANNELS, WIDTH):
        c = first + tl.arange(0, WIDTH)
        value = tl.load(source + where[:, None] + (c * s_c)[None, :],
                        mask=(row < rows)[:, None] & (c < channels)[None, :], other=0.0)
        tl.store(target + row[:, None] * CHANNELS + c[None, :], value,
                 mask=(row < rows)[:, None] & (c < CHANNELS)[None, :])
