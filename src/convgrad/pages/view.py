"""The interactive drawing of the gradients of a convolution, with an Ascend C tiling of it where there is one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..numbers import storage_dtype
from ..problem import RESULT_NAMES, Problem, Unsupported
from .page import page

MOST_BLOCKS = 2000  # of one plane of dX; a page with more would be slow


def view_page(problem: Problem, *, cores: int = 1, product: str = "Ascend910B") -> str:
    """The page that draws `problem`, with sliders for its geometry."""
    conv = problem.conv
    axes = [{"size": size, "kernel": kernel, "stride": stride, "dilation": dilation, "low": low, "high": high}
            for size, kernel, stride, dilation, (low, high) in zip(conv.in_size, conv.kernel_size, conv.stride,
                                                                   conv.dilation, conv.padding)]
    words = str(problem).split()
    rest = [word for word in words[2:] if not (word[0] in "nckiwspdg" and word[1:2].isdecimal())]
    data = {"result": RESULT_NAMES[problem.results[0]] if len(problem.results) == 1 else words[0], "dtype": words[1],
            "rest": rest, "tiling": tiling_data(problem, cores, product),
            "conv": {"batch": conv.batch, "inChannels": conv.in_channels, "outChannels": conv.out_channels,
                     "groups": conv.groups, "axes": axes}}
    return page("view", str(problem), data)


def tiling_data(problem: Problem, cores: int, product: str) -> dict[str, Any] | None:
    """The blocks of the first plane of dX that the tiling computes; None where Ascend C does not take the problem."""
    from ..frontends import ascendc
    from ..frontends.ascendc.commands import three_axes

    if problem.wrt != "input" or problem.conv.groups != 1:
        return None
    conv = three_axes(problem.conv)
    try:
        host = ascendc.describe(conv.output_shape, conv.weight_shape, storage_dtype(problem.dtype),
                                input_size=conv.in_size, stride=conv.stride, padding=conv.padding,
                                dilation=conv.dilation, platform=ascendc.PlatformInfo.of(product))
        tiling = ascendc.find_tiling(host, cores)
    except (Unsupported, ValueError, TypeError):
        return None
    blocks = []
    for piece in ascendc.split_pieces(tiling, cores):
        if piece.skipped or piece.n or piece.d:
            continue
        walk = piece.walk(tiling)
        blocks += [asdict(walk.block(walk.place(index), index, piece.core, with_loads=True))
                   for index in range(len(walk))]
    for block in blocks:
        block["loads"] = [load._asdict() if hasattr(load, "_asdict") else load for load in block["loads"]]
    if not blocks or len(blocks) > MOST_BLOCKS:
        return None
    facts = [f"{name}={getattr(tiling, name)}" for name in ("baseM", "baseK", "baseN", "stepKa", "stepKb", "al1Pbuffer",
                                                           "bl1Pbuffer", "singleCoreM", "singleCoreCin")]
    facts += ascendc.estimate(tiling, cores).lines()
    return {"facts": facts, "blocks": blocks, "rows": tiling.hi, "columns": tiling.wi, "dyRows": tiling.ho,
            "dyColumns": tiling.wo}
