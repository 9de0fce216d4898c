"""Hypothesis strategies: geometries, layouts, number formats and whole problems, all small."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from convgrad import Conv, Problem
from convgrad.problem import DTYPES, SPATIAL_LETTERS, default_compute

LONGEST = {1: 24, 2: 9, 3: 6}  # spatial extent by number of axes


@st.composite
def geometries(draw: st.DrawFn, axes: int | None = None, empty: bool = False, max_channels: int = 5) -> Conv:
    """Any geometry with outputs: strides, dilations, asymmetric pads, groups. `empty` also allows extents of zero."""
    axes = axes or draw(st.integers(1, 3))
    least = 0 if empty else 1
    groups = draw(st.sampled_from([1, 1, 2, 3, 4]))
    group_in, group_out = draw(st.integers(least, max_channels)), draw(st.integers(least, max_channels))

    def per_axis(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    size = per_axis(least, LONGEST[axes])
    kernel, stride, dilation = per_axis(1, 4 if axes < 3 else 3), per_axis(1, 4), per_axis(1, 3)
    low, high = per_axis(0, 4), list(per_axis(0, 4))
    for axis in range(axes):  # enough padding for at least one output
        span = dilation[axis] * (kernel[axis] - 1) + 1
        if not empty:
            high[axis] = max(high[axis], span - size[axis] - low[axis])
    return Conv(draw(st.integers(least, 3)), groups * group_in, groups * group_out, size, kernel, stride, dilation,
                tuple(zip(low, high, strict=True)), groups)


def layouts(axes: int) -> st.SearchStrategy[str]:
    return st.sampled_from(["".join(order) for order in itertools.permutations("NC" + SPATIAL_LETTERS[axes])])


def weight_layouts(axes: int) -> st.SearchStrategy[str]:
    return st.sampled_from(["".join(order) for order in itertools.permutations("OI" + SPATIAL_LETTERS[axes])])


RESULTS = st.sampled_from(["output", "input", "weight", "bias", "input+weight", "weight+bias", "input+weight+bias"])
FLOATS = st.sampled_from(list(DTYPES))
MODES = ["", "", "tf32", "hf32", "hf32_even", "hf32_10", "hf32_10_even", "bf16", "f16"]


@st.composite
def problems(draw: st.DrawFn, wrt: str | None = None, dtype: str | None = None, empty: bool = False,
             modes: bool = True) -> Problem:
    """Any problem on the cpu: geometry, result, operand and result formats, compute mode, layouts."""
    conv = draw(geometries(empty=empty))
    dtype = dtype or draw(FLOATS)
    out_dtype = draw(st.sampled_from(["", dtype, "float32"]))
    offered = MODES + ["fp8"] * dtype.startswith("float8")
    compute = draw(st.sampled_from(offered)) if modes and default_compute(dtype) == "f32" else ""
    return Problem(conv, wrt or draw(RESULTS), dtype, out_dtype, compute, draw(layouts(conv.axes)),
                   draw(weight_layouts(conv.axes)))
