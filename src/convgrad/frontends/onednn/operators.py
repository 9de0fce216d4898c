"""The six convolution operators of oneDNN Graph: their tensors, attributes and auto_pad rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from .errors import AutoPadWarning, InvalidShape
from .geometry import Geometry
from .operator import Operator
from .padding import RULES, Axis, Pads, document_pads, library_pads, transpose_pads

COMMON = {"auto_pad": "none", "groups": 1, "data_format": "NXC"}


class ConvolutionBackwardData(Operator):
    """diff_src from diff_dst and weights: `op(diff_dst, weights, dst_shape=None) -> diff_src`.

    dst_shape is the full shape of diff_src in data_format order. As input it wins over the attribute; with neither
    it is inferred: stride * (extent - 1) + span - pads + output_padding.

    Attributes: strides, pads_begin, pads_end, dilations; auto_pad, output_padding, groups, data_format,
    weights_format, dst_shape, auto_pad_rule.
    """

    inputs = ("diff_dst", "weights")
    optional_input = "dst_shape"
    result = "diff_src"
    names: ClassVar = {"small": "diff_dst", "large": "diff_src", "weights": "weights"}
    wrt = "input"
    defaults: ClassVar = {"auto_pad": "none", "output_padding": None, "groups": 1, "data_format": "NXC",
                          "weights_format": "XIO", "dst_shape": None, "auto_pad_rule": "document"}
    output_padding: tuple[int, ...]
    dst_shape: tuple[int, ...] | None
    auto_pad_rule: str

    def axis_pads(self, index: int, axis: Axis, large: int | None, small: int | None) -> Pads:
        if self.auto_pad == "none":
            return (self.pads_begin[index], self.pads_end[index])
        if self.auto_pad == "valid":
            return (0, 0)
        if large is None:
            raise InvalidShape(f"auto_pad={self.auto_pad!r} computes the pads from dst_shape, which is given neither "
                               "as input nor as attribute")
        assert small is not None
        return self._ruled_pads(self.auto_pad_rule, axis, large, small)

    def _ruled_pads(self, rule: str, axis: Axis, large: int, small: int) -> Pads:
        if rule == "library":
            return library_pads(self.auto_pad, axis, large)
        return document_pads(self.auto_pad, axis, large, small)

    def remarks(self, geometry: Geometry) -> Iterator[tuple[str, type[Warning]]]:
        """Say so where the two auto_pad rules give different pads."""
        yield from super().remarks(geometry)
        if not self.auto_pad.startswith("same"):
            return
        sizes = zip(geometry.shapes["weights"][2:], self.strides, self.dilations, self.output_padding,
                    geometry.shapes["large"][2:], geometry.shapes["small"][2:])
        axes = [(Axis(*numbers), large, small) for *numbers, large, small in sizes]
        document, library = ([self._ruled_pads(rule, *axis) for axis in axes] for rule in RULES)
        if document != library:
            yield (f"auto_pad={self.auto_pad!r}: the document's formula gives the pads (begin, end) {document}, the "
                   f"library's code {library}; auto_pad_rule={self.auto_pad_rule!r} is used"), AutoPadWarning


class ConvolutionBackwardWeights(Operator):
    """diff_weights from src and diff_dst: `op(src, diff_dst, weights_shape=None) -> diff_weights`.

    weights_shape is (O, I/groups, spatial) or (spatial, I/groups, O) by weights_format; as input it wins over the
    attribute.

    Attributes: strides, pads_begin, pads_end, dilations; auto_pad, groups, data_format, weights_format, weights_shape.
    """

    inputs = ("src", "diff_dst")
    optional_input = "weights_shape"
    result = "diff_weights"
    names: ClassVar = {"small": "diff_dst", "large": "src", "weights": "diff_weights"}
    wrt = "weight"
    defaults: ClassVar = {**COMMON, "weights_format": "XIO", "weights_shape": None}
    weights_shape: tuple[int, ...] | None


class Convolution(Operator):
    """dst from src and weights: `op(src, weights, bias=None) -> dst`.

    Attributes: strides, pads_begin, pads_end, dilations; auto_pad, groups, data_format, weights_format.
    """

    inputs = ("src", "weights")
    optional_input = "bias"
    result = "dst"
    names: ClassVar = {"small": "dst", "large": "src", "weights": "weights"}
    wrt = "output"
    defaults: ClassVar = {**COMMON, "weights_format": "XIO"}
    channel_error = InvalidShape


class ConvTranspose(Operator):
    """dst from src and weights, src being the small tensor: `op(src, weights, bias=None) -> dst`.

    Weights are (I, O/groups, spatial) for IOX and (spatial, O/groups, I) for XOI.

    Attributes: strides, pads_begin, pads_end, dilations; auto_pad, output_padding, groups, data_format,
    weights_format.
    """

    inputs = ("src", "weights")
    optional_input = "bias"
    result = "dst"
    names: ClassVar = {"small": "src", "large": "dst", "weights": "weights"}
    wrt = "input"
    defaults: ClassVar = {**COMMON, "weights_format": "XOI", "output_padding": None}
    weights_formats = ("XOI", "IOX")
    output_padding: tuple[int, ...]

    def axis_pads(self, index: int, axis: Axis, large: int | None, small: int | None) -> Pads:
        if self.auto_pad == "none":
            return (self.pads_begin[index], self.pads_end[index])
        return transpose_pads(self.auto_pad, axis)


class ConvTransposeBackwardData(Operator):
    """diff_src from diff_dst and weights, diff_dst being the large tensor: `op(diff_dst, weights) -> diff_src`.

    Attributes: strides, pads_begin, pads_end, dilations; auto_pad, groups, data_format, weights_format.
    """

    inputs = ("diff_dst", "weights")
    optional_input = ""
    result = "diff_src"
    names: ClassVar = {"small": "diff_src", "large": "diff_dst", "weights": "weights"}
    wrt = "output"
    defaults: ClassVar = {**COMMON, "weights_format": "XOI"}
    weights_formats = ("XOI", "IOX")
    channel_error = InvalidShape


class ConvTransposeBackwardWeights(Operator):
    """diff_weights from src and diff_dst: `op(src, diff_dst, weights_shape=None) -> diff_weights`.

    Attributes: strides, pads_begin, pads_end, dilations; auto_pad, groups, data_format, weights_format, weights_shape.
    """

    inputs = ("src", "diff_dst")
    optional_input = "weights_shape"
    result = "diff_weights"
    names: ClassVar = {"small": "src", "large": "diff_dst", "weights": "diff_weights"}
    wrt = "weight"
    defaults: ClassVar = {**COMMON, "weights_format": "XOI", "weights_shape": None}
    weights_formats = ("XOI", "IOX")
    weights_shape: tuple[int, ...] | None


OPERATORS: dict[str, type[Operator]] = {
    operator.__name__: operator
    for operator in (Convolution, ConvolutionBackwardData, ConvolutionBackwardWeights, ConvTranspose,
                     ConvTransposeBackwardData, ConvTransposeBackwardWeights)
}
