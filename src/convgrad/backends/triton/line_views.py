"""How lines see problems and tensors: taps of last axes as channels, or images as the last axis."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...problem import Problem
from .geometry import Geometry, Three
from .padding import up8

FEWEST_IMAGES = 5  # of 8 that a line has side by side


def padded_bytes(geo: Geometry) -> tuple[int, int]:
    """Bytes of the copies of dy and x that are made where rows of channels are no multiples of 16 bytes."""
    return (2 * geo.pixels * up8(geo.group_out) if geo.group_out % 8 else 0,
            2 * geo.batch * math.prod(geo.x) * up8(geo.group_in) if geo.group_in % 8 else 0)


def folded_axes(problem: Problem, geo: Geometry) -> int:
    """How many last axes have windows side by side, so that their taps and the channels are one row of channels."""
    if geo.groups > 1 or geo.group_in >= 64 or not problem.layout.endswith(("LC", "WC")):
        return 0
    count = 0
    for axis in (2, 1, 0):
        kernel, alone = geo.kernel[axis], geo.y[axis] == 1
        if geo.pad[axis] or (kernel > 1 and geo.dilation[axis] > 1) or kernel * geo.y[axis] > geo.x[axis] or \
                not (alone or kernel == geo.stride[axis]):
            break
        count += 1
        if not alone or kernel != geo.x[axis]:
            break
    return count if math.prod(geo.kernel[3 - count:]) > 1 else 0


def folded(geo: Geometry, count: int) -> Geometry:
    """The same sums with the taps of the last `count` axes as channels."""
    if count == 0:
        return geo
    keep = 3 - count
    ones = (1,) * count
    changes: dict[str, Any] = {name: getattr(geo, name)[:keep] + ones
                               for name in ("kernel", "stride", "dilation", "common")}
    changes["x"] = geo.x[:keep] + geo.y[keep:]
    changes["inverse"] = geo.inverse[:keep] + (0,) * count
    return replace(geo, group_in=geo.group_in * math.prod(geo.kernel[keep:]), **changes)


def folded_view(x: Any, geo: Geometry, count: int) -> Any | None:
    """x (canonical view) as `folded` sees it; None where its pixels do not follow each other without gaps."""
    if count == 0:
        return x
    row = x.shape[1]
    if row > 1 and x.stride(1) != 1:
        return None
    for axis in range(1, min(count, x.dim() - 2) + 1):
        if x.stride(-axis) != row:
            return None
        row *= geo.kernel[3 - axis]
    shape, steps = list(x.shape), list(x.stride())
    outer = 3 - min(count, x.dim() - 2)
    for axis in range(outer, 3):
        shape[axis - 3], steps[axis - 3] = geo.y[axis], steps[axis - 3] * geo.kernel[axis]
    shape[1], steps[1] = row, 1
    return x.as_strided(shape, steps)


def images_fit(geo: Geometry) -> bool:
    """Whether images can be the last axis: problems with one axis, without a stride, of which taps share copies."""
    return (geo.x[0] == geo.x[1] == geo.kernel[0] == geo.kernel[1] == 1 and max(geo.pad[:2]) == 0
            and geo.y[:2] == (1, 1) and max(geo.stride) == 1 and geo.taps > 2 and geo.batch >= FEWEST_IMAGES
            and min(geo.group_in, geo.group_out) >= 32 and geo.group_in % 8 == geo.group_out % 8 == 0)


def images_last(geo: Geometry) -> Geometry:
    """The same sums with the only axis before that of the images."""
    def before(values: Three, images: int) -> Three:
        return values[1], values[2], images

    names = {"x": geo.batch, "y": geo.batch, "kernel": 1, "stride": 1, "dilation": 1, "pad": 0, "common": 1,
             "inverse": 0}
    changes: dict[str, Any] = {name: before(getattr(geo, name), value) for name, value in names.items()}
    return replace(geo, batch=1, **changes)


def images_last_view(tensor: Any) -> Any:
    """A tensor (canonical view) as `images_last` sees it."""
    channels, extent = tensor.shape[1:]
    images, _, step = tensor.stride()
    return tensor.as_strided((1, channels, extent, tensor.shape[0]), (images, tensor.stride(1), step, images))
