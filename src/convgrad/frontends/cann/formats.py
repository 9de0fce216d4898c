"""transdata: between plain axis orders and the blocked formats NDC1HWC0 and FRACTAL_Z_3D (and their 2-D kin)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...blocked import pack_fractal_z_3d, pack_ndc1hwc0, unpack_fractal_z_3d, unpack_ndc1hwc0
from .descriptors import FORMAT_NAMES, aclTensor, as_format

Array = npt.NDArray[Any]

PLAIN = {"NCDHW": "NCDHW", "NDHWC": "NCDHW", "DHWCN": "NCDHW", "NCHW": "NCHW", "NHWC": "NCHW", "HWCN": "NCHW"}
BLOCKED = {"NDC1HWC0": "NCDHW", "FRACTAL_Z_3D": "NCDHW", "NC1HWC0": "NCHW", "FRACTAL_Z": "NCHW"}


def canonical_order(form: str) -> tuple[int, ...]:
    """For each axis of NCDHW (or NCHW) its place in the plain format `form`."""
    return tuple(form.index(letter) for letter in PLAIN[form])


def from_canonical_order(form: str) -> tuple[int, ...]:
    """For each axis of the plain format `form` its place in NCDHW (or NCHW)."""
    return tuple(PLAIN[form].index(letter) for letter in form)


def reordered(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[axis] for axis in order)


def transdata(array: Any, src_format: object, dst_format: object, groups: int = 1, *,
              shape: tuple[int, ...] | None = None) -> Array:
    """Convert a tensor from one storage format to another.

    Parameters
    ----------
    array : array or aclTensor
    src_format, dst_format : name or aclFormat
        Plain: NCDHW, NDHWC, DHWCN, NCHW, NHWC, HWCN. Blocked: NDC1HWC0 and NC1HWC0 for activations, FRACTAL_Z_3D and
        FRACTAL_Z for weights. C0 is 32 bytes: 8 for FLOAT, 16 for 16-bit, 32 for 8-bit formats.
    groups : int
        Groups of the weight, for the fractal formats.
    shape : tuple of int, optional
        The logical shape in the axis order of dst_format, when a blocked format is unpacked.
        Required to unpack a fractal format; NDC1HWC0 without it keeps all C1*C0 channels.

    Returns
    -------
    A new C-ordered array.

    Examples
    --------
    >>> import numpy as np
    >>> from convgrad import cann
    >>> x = np.ones((1, 20, 2, 4, 4), np.float16)
    >>> blocked = cann.transdata(x, "NCDHW", "NDC1HWC0")
    >>> blocked.shape
    (1, 2, 2, 4, 4, 16)
    >>> bool((cann.transdata(blocked, "NDC1HWC0", "NCDHW", shape=x.shape) == x).all())
    True
    """
    source, target = FORMAT_NAMES[as_format(src_format)], FORMAT_NAMES[as_format(dst_format)]
    stored: Array | None = array.array if isinstance(array, aclTensor) else np.asarray(array)
    if stored is None:
        raise ValueError("array is an aclTensor without data")
    for name, form in (("src_format", source), ("dst_format", target)):
        if form not in PLAIN and form not in BLOCKED:
            raise ValueError(f"{name}={form} is none of {', '.join((*PLAIN, *BLOCKED))}")
    if (PLAIN | BLOCKED)[source] != (PLAIN | BLOCKED)[target]:
        raise ValueError(f"src_format={source} and dst_format={target} have different numbers of spatial axes")
    if source in BLOCKED and target in BLOCKED:
        if source == target:
            return np.array(stored, order="C")
        raise ValueError(f"src_format={source} and dst_format={target} are both blocked; go through a plain format")
    canonical = unpacked(stored, source, target, groups, shape) if source in BLOCKED else \
        plain(stored, source).transpose(canonical_order(source))
    if target in PLAIN:
        return np.ascontiguousarray(canonical.transpose(from_canonical_order(target)))
    return packed(canonical, target, groups)


def plain(array: Array, form: str) -> Array:
    if array.ndim != len(form):
        raise ValueError(f"a {form} array has {len(form)} axes, got shape {array.shape}")
    return array


def packed(canonical: Array, form: str, groups: int) -> Array:
    """Pack an NCDHW or NCHW array."""
    if form == "NDC1HWC0":
        return pack_ndc1hwc0(canonical)
    if form == "FRACTAL_Z_3D":
        return pack_fractal_z_3d(canonical, groups)
    with_depth = canonical[:, :, None]
    return pack_ndc1hwc0(with_depth)[:, 0] if form == "NC1HWC0" else pack_fractal_z_3d(with_depth, groups)


def unpacked(stored: Array, form: str, target: str, groups: int, shape: tuple[int, ...] | None) -> Array:
    """Unpack into an NCDHW or NCHW array; `shape` is the logical shape in the axis order of `target`."""
    if shape is not None and len(shape) != len(target):
        raise ValueError(f"shape={tuple(shape)} must have the {len(target)} axes of {target}")
    logical = None if shape is None else reordered(tuple(shape), canonical_order(target))
    if form in ("FRACTAL_Z_3D", "FRACTAL_Z"):
        if logical is None:
            raise ValueError(f"shape is required to unpack {form}: the storage does not tell its extents")
        deep = logical if form == "FRACTAL_Z_3D" else (*logical[:2], 1, *logical[2:])
        weight = unpack_fractal_z_3d(stored, deep, groups)
        return weight if form == "FRACTAL_Z_3D" else weight[:, :, 0]
    six = stored if form == "NDC1HWC0" else stored[:, None]
    channels = logical[1] if logical is not None else six.shape[2] * six.shape[-1] if six.ndim == 6 else 0
    array = unpack_ndc1hwc0(six, channels)
    array = array if form == "NDC1HWC0" else array[:, :, 0]
    if logical is not None and array.shape != logical:
        raise ValueError(f"{form} storage of shape {stored.shape} does not hold a tensor of shape {tuple(shape or ())} "
                         f"({target})")
    return array
