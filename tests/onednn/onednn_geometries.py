"""Geometries for the dialect: a list of the kinds that go wrong, and a Hypothesis strategy for everything between."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from onednn_definition import Case


def case(batch: int, large_channels: int, small_channels: int, large: tuple[int, ...], kernel: tuple[int, ...],
         strides: tuple[int, ...] = (), dilations: tuple[int, ...] = (), pads_begin: tuple[int, ...] = (),
         pads_end: tuple[int, ...] = (), groups: int = 1) -> Case:
    """A case whose small extents follow from the large ones."""
    ones, zeros = (1,) * len(large), (0,) * len(large)
    strides, dilations = strides or ones, dilations or ones
    pads_begin, pads_end = pads_begin or zeros, pads_end or zeros
    small = tuple((size + begin + end - (k - 1) * d - 1) // s + 1 for size, begin, end, k, d, s
                  in zip(large, pads_begin, pads_end, kernel, dilations, strides))
    return Case(batch, large_channels, small_channels, large, small, kernel, strides, dilations, pads_begin, pads_end,
                groups)


LISTED = {
    "1d": case(2, 3, 4, (9,), (3,)),
    "1d_strided": case(2, 3, 4, (11,), (4,), (3,), pads_begin=(2,), pads_end=(1,)),
    "1d_dilated_beyond_stride": case(1, 2, 3, (12,), (3,), (2,), (4,), (3,), (2,)),
    "2d_same": case(2, 4, 6, (7, 6), (3, 3), pads_begin=(1, 1), pads_end=(1, 1)),
    "2d_pointwise": case(2, 5, 7, (6, 5), (1, 1)),
    "2d_stride_beyond_kernel": case(1, 3, 2, (9, 10), (1, 2), (3, 4)),
    "2d_stride_leaves_rest": case(1, 3, 2, (8, 9), (3, 2), (2, 3), pads_begin=(1, 0), pads_end=(0, 1)),
    "2d_asymmetric": case(2, 3, 5, (6, 8), (3, 5), (1, 2), pads_begin=(2, 0), pads_end=(0, 3)),
    "2d_dilated": case(1, 3, 4, (10, 11), (3, 2), (1, 2), (2, 3), (2, 1), (1, 2)),
    "2d_grouped": case(2, 6, 4, (6, 6), (3, 3), (2, 1), pads_begin=(1, 1), pads_end=(1, 1), groups=2),
    "2d_depthwise": case(2, 6, 6, (7, 7), (3, 3), (1, 2), pads_begin=(1, 1), pads_end=(1, 1), groups=6),
    "2d_depthwise_multiplier": case(1, 4, 12, (6, 5), (3, 3), pads_begin=(1, 1), pads_end=(1, 1), groups=4),
    "2d_padding_beyond_kernel": case(1, 2, 3, (4, 3), (2, 2), (2, 2), pads_begin=(4, 3), pads_end=(3, 5)),
    "2d_kernel_covers_padding_only": case(1, 2, 2, (1, 1), (3, 3), pads_begin=(3, 3), pads_end=(3, 3)),
    "3d": case(1, 3, 4, (5, 6, 4), (2, 3, 3), pads_begin=(0, 1, 1), pads_end=(1, 1, 1)),
    "3d_strided_grouped": case(2, 4, 6, (6, 5, 7), (3, 1, 2), (2, 2, 3), (1, 1, 2), (1, 0, 1), (1, 0, 2), 2),
    "3d_depthwise": case(1, 5, 5, (4, 5, 6), (3, 3, 3), (1, 2, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1), 5),
    "empty_batch": case(0, 3, 4, (5, 5), (3, 3)),
}


@st.composite
def cases(draw: Any) -> Case:
    """Any geometry with 1 to 3 axes whose forward convolution has at least one output."""
    axes = draw(st.integers(1, 3))
    most = (14, 9, 6)[axes - 1]
    groups = draw(st.sampled_from([1, 1, 2, 3, 4]))
    group_large, group_small = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    columns: list[tuple[int, ...]] = []
    for _ in range(axes):
        kernel, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
        begin, end = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        span = (kernel - 1) * dilation + 1
        large = draw(st.integers(max(1, span - begin - end), max(most, span)))
        columns.append((large, kernel, stride, dilation, begin, end))
    large, kernel, strides, dilations, begins, ends = zip(*columns)
    return case(draw(st.integers(1, 3)), group_large * groups, group_small * groups, large, kernel, strides, dilations,
                begins, ends, groups)
