"""Random problems inside the limits of Conv3DBackpropInput, each with a tile and a number of cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from convgrad import Conv, Problem, ascendc
from convgrad.numbers import storage_dtype


@dataclass(frozen=True)
class Case:
    """A problem, and how the model shall run it."""

    problem: Problem
    cores: int
    small_tile: bool  # a tile that starts blocks in mid-row, with several blocks along both axes
    order: int
    output_format: ascendc.ConvFormat
    fidelity: str

    def __str__(self) -> str:
        return (f"{self.problem} cores{self.cores} {'small' if self.small_tile else 'searched'} order{self.order} "
                f"{self.output_format.name} {self.fidelity}")

    @property
    def geometry(self) -> dict[str, Any]:
        conv = self.problem.conv
        return {"input_size": conv.in_size, "stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}

    def tiling(self) -> ascendc.TConv3DBackpropInputTiling:
        conv = self.problem.conv
        host = ascendc.describe(conv.output_shape, conv.weight_shape, storage_dtype(self.problem.dtype),
                                **self.geometry)
        tiling = ascendc.find_tiling(host, self.cores)
        if self.small_tile:
            tiling = small_tile(tiling)
        return tiling.with_(iterateOrder=self.order)


def small_tile(t: ascendc.TConv3DBackpropInputTiling, base_m: int = 16) -> ascendc.TConv3DBackpropInputTiling:
    """A tile of 16 pixels and one group of channels; a piece has a few rows and two blocks of channels."""
    rows = max(1, min(t.hi, 3))
    changed = t.with_(baseM=base_m, baseN=t.c0, baseK=t.kernel_column, stepKa=1, stepKb=1, al1Pbuffer=2, bl1Pbuffer=2,
                      singleCoreM=rows * t.wi, singleCoreCin=2 * t.c0)
    changed.validate()
    return changed


def random_case(seed: int, wrt: str = "input") -> Case:
    """A problem that GetTiling accepts, drawn from a seed: strides, dilations, asymmetric pads, channel tails."""
    rng = np.random.default_rng([seed, 20])
    while True:
        kernel = [int(k) for k in rng.integers(1, 4, 3)]
        stride = [int(rng.integers(1, kernel[0] + 1)), int(rng.integers(1, 5)), int(rng.integers(1, 5))]
        dilation = [int(d) for d in rng.choice([1, 1, 2, 3], 3)]
        padding = [(int(rng.integers(0, k)), int(rng.integers(0, k))) for k in kernel]
        size = (int(rng.integers(1, 8)), int(rng.integers(1, 14)), int(rng.integers(1, 22)))
        conv = Conv(int(rng.integers(1, 3)), int(rng.integers(1, 50)), int(rng.integers(1, 50)), size, tuple(kernel),
                    tuple(stride), tuple(dilation), tuple(padding))
        if min(conv.out_size) >= 1:
            break
    dtypes = ("float16", "bfloat16", "float16", "float32" if wrt == "input" else "bfloat16")
    return Case(Problem(conv, wrt, dtypes[seed % 4], "float32" if wrt == "weight" else ""), int(rng.integers(1, 7)),
                bool(seed % 3), seed // 2 % 2,
                ascendc.ConvFormat.NCDHW if seed % 5 == 4 else ascendc.ConvFormat.NDC1HWC0,
                "slice" if seed % 7 == 3 else "block")
