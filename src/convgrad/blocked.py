"""Blocked storage formats: NDC1HWC0 for activations and FRACTAL_Z_3D for weights, packed and unpacked with NumPy.

Both cut the channels into blocks of C0 = 32 bytes and put the position inside the block last. Nothing here computes:
one packing or unpacking is one copy of the tensor, and whatever the blocks have too much is zero.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 32  # one block row of the matrix unit
BLOCK_OUT = 16  # N0: output channels of one FRACTAL_Z_3D fractal, for every number format


def block_channels(itemsize: int) -> int:
    """Return C0, the channels of one block, for elements of `itemsize` bytes: 16 for 2, 8 for 4, 32 for 1."""
    if itemsize not in (1, 2, 4):
        raise ValueError(f"blocked formats hold elements of 1, 2 or 4 bytes, got {itemsize}")
    return BLOCK_BYTES // itemsize


def ndc1hwc0_shape(shape: tuple[int, ...], c0: int) -> tuple[int, ...]:
    """Return (N, D, C1, H, W, C0) for the logical shape (N, C, D, H, W)."""
    n, c, d, h, w = five(shape, "the activation", "(N, C, D, H, W)")
    return n, d, -(-c // c0), h, w, c0


def pack_ndc1hwc0(array: Array, *, c0: int | None = None) -> Array:
    """Pack an activation into NDC1HWC0.

    Parameters
    ----------
    array : (N, C, D, H, W) array, any strides
    c0 : int, optional
        Channels of one block; 32 bytes of the array's number format unless given.

    Returns
    -------
    C-ordered (N, D, C1, H, W, C0) array: channel c lies at [:, :, c // C0, :, :, c % C0], missing channels are 0.
    """
    c0 = c0 or block_channels(array.dtype.itemsize)
    n, d, c1, h, w, _ = ndc1hwc0_shape(array.shape, c0)
    padded = zero_padded(array, (n, c1 * c0, d, h, w))
    return np.ascontiguousarray(padded.reshape(n, c1, c0, d, h, w).transpose(0, 3, 1, 4, 5, 2))


def unpack_ndc1hwc0(blocked: Array, channels: int) -> Array:
    """Return the (N, C, D, H, W) array with C = `channels` that `pack_ndc1hwc0` made into `blocked`."""
    if blocked.ndim != 6:
        raise ValueError(f"NDC1HWC0 storage has 6 axes (N, D, C1, H, W, C0), got shape {blocked.shape}")
    n, d, c1, h, w, c0 = blocked.shape
    if not 0 <= channels <= c1 * c0 or c1 != -(-channels // c0):
        raise ValueError(f"NDC1HWC0 storage of shape {blocked.shape} holds {c1} blocks of {c0} channels, "
                         f"which is not the storage of {channels} channels")
    out = np.empty((n, channels, d, h, w), blocked.dtype)
    for block, first in enumerate(range(0, channels, c0)):
        part = out[:, first:first + c0]
        part[...] = np.moveaxis(blocked[:, :, block], -1, 1)[:, :part.shape[1]]
    return out


class Fractal(NamedTuple):
    """How FRACTAL_Z_3D cuts a grouped weight: `merged` groups share one block, `blocks` of them follow each other."""

    merged: int
    blocks: int
    c1: int
    n1: int
    group_in: int
    group_out: int


def fractal(shape: tuple[int, ...], groups: int, c0: int) -> Fractal:
    """Return the cut of the logical weight shape (Cout, Cin/groups, kD, kH, kW)."""
    c_out, group_in, *_ = five(shape, "the weight", "(Cout, Cin/groups, kD, kH, kW)")
    if groups < 1 or c_out % groups:
        raise ValueError(f"groups={groups} does not divide the {c_out} output channels of the weight")
    group_out = c_out // groups
    if not group_in or not group_out:
        raise ValueError(f"FRACTAL_Z_3D cannot hold a weight without channels, got shape {shape}")
    # Groups are merged until both channel counts fill whole blocks, at most all of them.
    fill_in = math.lcm(group_in, c0) // group_in
    fill_out = math.lcm(group_out, BLOCK_OUT) // group_out
    merged = min(math.lcm(fill_in, fill_out), groups)
    return Fractal(merged, -(-groups // merged), -(-merged * group_in // c0), -(-merged * group_out // BLOCK_OUT),
                   group_in, group_out)


def fractal_z_3d_shape(shape: tuple[int, ...], groups: int, c0: int) -> tuple[int, int, int, int]:
    """Return the 4-axis storage shape (G'·kD·C1·kH·kW, N1, 16, C0) of a weight (Cout, Cin/groups, kD, kH, kW)."""
    cut = fractal(shape, groups, c0)
    return cut.blocks * cut.c1 * math.prod(shape[2:]), cut.n1, BLOCK_OUT, c0


def pack_fractal_z_3d(weight: Array, groups: int = 1, *, c0: int | None = None) -> Array:
    """Pack a weight into FRACTAL_Z_3D.

    Parameters
    ----------
    weight : (Cout, Cin/groups, kD, kH, kW) array, any strides
    groups : int
    c0 : int, optional
        Input channels of one fractal; 32 bytes of the array's number format unless given.

    Returns
    -------
    C-ordered (G'·kD·C1·kH·kW, N1, 16, C0) array. The merged groups of a block lie on its diagonal, the rest is 0.
    """
    c0 = c0 or block_channels(weight.dtype.itemsize)
    cut = fractal(weight.shape, groups, c0)
    kernel = weight.shape[2:]
    if groups == 1:
        dense = zero_padded(weight, (cut.n1 * BLOCK_OUT, cut.c1 * c0, *kernel))[None]
    else:
        dense = np.zeros((cut.blocks, cut.n1 * BLOCK_OUT, cut.c1 * c0, *kernel), weight.dtype)
        by_group = weight.reshape(groups, cut.group_out, cut.group_in, *kernel)
        for place, rows, columns, members in diagonal(cut, groups):
            dense[:members, rows, columns] = by_group[place::cut.merged]
    split = dense.reshape(cut.blocks, cut.n1, BLOCK_OUT, cut.c1, c0, *kernel)
    ordered = np.ascontiguousarray(split.transpose(0, 5, 3, 6, 7, 1, 2, 4))  # G' kD C1 kH kW N1 N0 C0
    return ordered.reshape(fractal_z_3d_shape(weight.shape, groups, c0))


def unpack_fractal_z_3d(blocked: Array, shape: tuple[int, ...], groups: int = 1) -> Array:
    """Return the weight (Cout, Cin/groups, kD, kH, kW) of `shape` that `pack_fractal_z_3d` made into `blocked`."""
    if blocked.ndim != 4:
        raise ValueError(f"FRACTAL_Z_3D storage has 4 axes (G'·kD·C1·kH·kW, N1, 16, C0), got shape {blocked.shape}")
    c0 = blocked.shape[3]
    cut = fractal(shape, groups, c0)
    kernel = tuple(shape[2:])
    expected = fractal_z_3d_shape(shape, groups, c0)
    if blocked.shape != expected:
        raise ValueError(f"FRACTAL_Z_3D storage of a weight {tuple(shape)} with groups={groups} has the shape "
                         f"{expected}, got {blocked.shape}")
    ordered = blocked.reshape(cut.blocks, kernel[0], cut.c1, kernel[1], kernel[2], cut.n1, BLOCK_OUT, c0)
    split = ordered.transpose(0, 5, 6, 2, 7, 1, 3, 4)  # G' N1 N0 C1 C0 kD kH kW
    dense = split.reshape(cut.blocks, cut.n1 * BLOCK_OUT, cut.c1 * c0, *kernel)
    out = np.empty(shape, blocked.dtype)
    by_group = out.reshape(groups, cut.group_out, cut.group_in, *kernel)
    for place, rows, columns, members in diagonal(cut, groups):
        by_group[place::cut.merged] = dense[:members, rows, columns]
    return out


def diagonal(cut: Fractal, groups: int) -> list[tuple[int, slice, slice, int]]:
    """For each place in a block: its output rows, its input columns, and how many blocks have a group there."""
    return [(place, slice(place * cut.group_out, (place + 1) * cut.group_out),
             slice(place * cut.group_in, (place + 1) * cut.group_in), len(range(place, groups, cut.merged)))
            for place in range(cut.merged)]


def zero_padded(array: Array, shape: tuple[int, ...]) -> Array:
    """Return `array` itself when it has the shape, else a copy extended by zeros at the end of its axes."""
    if array.shape == shape:
        return array
    out = np.zeros(shape, array.dtype)
    out[tuple(slice(extent) for extent in array.shape)] = array
    return out


def five(shape: tuple[int, ...], what: str, axes: str) -> tuple[int, ...]:
    if len(shape) != 5:
        raise ValueError(f"{what} must have 5 axes {axes}, got shape {tuple(shape)}")
    return tuple(shape)
