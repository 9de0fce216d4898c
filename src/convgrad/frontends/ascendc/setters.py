"""The setters that the host sides of both gradients share: types, pads, strides, dilations."""

from __future__ import annotations

from .conv_types import ConvDtype, ConvFormat, TPosition, member, whole_numbers
from .platform import PlatformInfo

AXES = ("depth", "height", "width")
PAD_NAMES = ("padFront", "padBack", "padUp", "padDown", "padLeft", "padRight")


class TilingSetters:
    """What a problem is described by, apart from its shapes; `explain()` gives the reasons of the last refusal."""

    def __init__(self, platform: PlatformInfo | None = None) -> None:
        self.platform = platform or PlatformInfo.ascend910b()
        self._padding: tuple[int, ...] = (0,) * 6
        self._stride: tuple[int, ...] = (1, 1, 1)
        self._dilation: tuple[int, ...] = (1, 1, 1)
        self._formats = {"weight": ConvFormat.FRACTAL_Z_3D, "input": ConvFormat.NDC1HWC0,
                         "grad_output": ConvFormat.NDC1HWC0}
        self._dtypes: dict[str, ConvDtype] = {}
        self._refusals: list[str] = []

    def _set_type(self, tensor: str, pos: TPosition, format: ConvFormat, dtype: ConvDtype) -> None:
        member(TPosition, pos, "pos")  # where the tensor lies changes nothing
        format, dtype = member(ConvFormat, format, "format"), member(ConvDtype, dtype, "dtype")
        self._formats[tensor], self._dtypes[tensor] = format, dtype

    def SetWeightType(self, pos: TPosition, format: ConvFormat, dtype: ConvDtype) -> None:
        self._set_type("weight", pos, format, dtype)

    def SetInputType(self, pos: TPosition, format: ConvFormat, dtype: ConvDtype) -> None:
        self._set_type("input", pos, format, dtype)

    def SetGradOutputType(self, pos: TPosition, format: ConvFormat, dtype: ConvDtype) -> None:
        self._set_type("grad_output", pos, format, dtype)

    def SetPadding(self, front: int, back: int, up: int, down: int, left: int, right: int) -> None:
        """Give the forward padding of the input."""
        self._padding = whole_numbers("SetPadding", front=front, back=back, up=up, down=down, left=left, right=right)

    def SetStride(self, d: int, h: int, w: int) -> None:
        """Give the forward strides."""
        self._stride = whole_numbers("SetStride", d=d, h=h, w=w)

    def SetDilation(self, d: int, h: int, w: int) -> None:
        """Give the forward dilations (1, 1, 1 unless called)."""
        self._dilation = whole_numbers("SetDilation", d=d, h=h, w=w)

    def explain(self) -> str:
        """Return the reasons of the last refusal, one rule per line with its numbers; empty after a success."""
        return "\n".join(self._refusals)
