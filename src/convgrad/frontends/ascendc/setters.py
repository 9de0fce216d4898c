"""The setters that the host sides of both gradients share: types, pads, strides, dilations."""

from __future__ import annotations

from .conv_types import ConvDtype, ConvFormat, TPosition, member, whole_numbers
from .platform import PlatformInfo, check_known, has_api

TENSOR_NAMES = {"weight": "weight", "input": "input", "grad_output": "GradOutput"}
AXES = ("depth", "height", "width")
PAD_NAMES = ("padFront", "padBack", "padUp", "padDown", "padLeft", "padRight")


class TilingSetters:
    """What a problem is described by, apart from its shapes; `explain()` gives the reasons of the last refusal."""

    def __init__(self, platform: PlatformInfo | None = None) -> None:
        self.platform = getattr(platform, "info", platform) or PlatformInfo.ascend910b()  # or a PlatformAscendC
        check_known(self.platform)
        self._padding: tuple[int, ...] = (0,) * 6
        self._stride: tuple[int, ...] = (1, 1, 1)
        self._dilation: tuple[int, ...] = (1, 1, 1)
        self._formats = {"weight": ConvFormat.FRACTAL_Z_3D, "input": ConvFormat.NDC1HWC0,
                         "grad_output": ConvFormat.NDC1HWC0}
        self._dtypes: dict[str, ConvDtype] = {}
        self._positions: dict[str, TPosition] = {}
        # Setter that returned False -> why. GetTiling repeats it, unless a later call of that setter succeeded.
        self._contradictions: dict[str, str] = {}
        self._refusals: list[str] = []

    def _set_type(self, tensor: str, pos: TPosition, format: ConvFormat, dtype: ConvDtype) -> None:
        self._positions[tensor] = member(TPosition, pos, "pos")
        format, dtype = member(ConvFormat, format, "format"), member(ConvDtype, dtype, "dtype")
        self._formats[tensor], self._dtypes[tensor] = format, dtype

    def SetWeightType(self, pos: TPosition, format: ConvFormat, dtype: ConvDtype) -> None:
        self._set_type("weight", pos, format, dtype)

    def SetInputType(self, pos: TPosition, format: ConvFormat, dtype: ConvDtype) -> None:
        self._set_type("input", pos, format, dtype)

    def SetGradOutputType(self, pos: TPosition, format: ConvFormat, dtype: ConvDtype) -> None:
        self._set_type("grad_output", pos, format, dtype)

    def SetPadding(self, padFront: int, padBack: int, padUp: int, padDown: int, padLeft: int, padRight: int) -> None:
        """Give the forward padding of the input."""
        self._padding = whole_numbers("SetPadding", padFront=padFront, padBack=padBack, padUp=padUp, padDown=padDown,
                                      padLeft=padLeft, padRight=padRight)

    def SetStride(self, strideD: int, strideH: int, strideW: int) -> None:
        """Give the forward strides."""
        self._stride = whole_numbers("SetStride", strideD=strideD, strideH=strideH, strideW=strideW)

    def SetDilation(self, dilationD: int, dilationH: int, dilationW: int) -> None:
        """Give the forward dilations (1, 1, 1 unless called)."""
        self._dilation = whole_numbers("SetDilation", dilationD=dilationD, dilationH=dilationH, dilationW=dilationW)

    def _first_refusals(self, formats: dict[str, tuple[ConvFormat, ...]]) -> list[str]:
        """What both host sides refuse: products without the API, contradicting setters, positions, formats."""
        found = []
        if not has_api(self.platform):
            found.append(f"the API does not exist on {self.platform.socVersion} (Atlas A2 and A3 only)")
        found += self._contradictions.values()
        found += [f"{TENSOR_NAMES[tensor]} lies in {pos.name}, it must be GM" for tensor, pos in self._positions.items()
                  if pos is not TPosition.GM]
        found += [f"{TENSOR_NAMES[tensor]} format is {self._formats[tensor].name}, it must be "
                  f"{' or '.join(form.name for form in wanted)}" for tensor, wanted in formats.items()
                  if self._formats[tensor] not in wanted]
        return found

    def explain(self) -> str:
        """Return the reasons of the last refusal, one rule per line with its numbers; empty after a success."""
        return "\n".join(self._refusals)
