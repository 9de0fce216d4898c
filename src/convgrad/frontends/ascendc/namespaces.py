"""The namespaces of the original: ConvBackpropApi, ConvCommonApi, optiling, platform_ascendc, AscendC."""

from __future__ import annotations

from types import SimpleNamespace

from .conv_types import B2Condition, ConvDtype, ConvFormat, ConvType, IterateOrder, TPosition
from .filter_kernel import Conv3DBackpropFilter
from .filter_tiling import Conv3dBpFilterTiling, TConv3DBpFilterTiling
from .global_tensor import GlobalTensor
from .kernel import Conv3DBackpropInput
from .platform import PlatformInfo
from .tiling import Conv3DBpInputTiling
from .tiling_struct import Conv3DBackpropInputTilingData, TConv3DBackpropInputTiling


class PlatformAscendC:
    """What the host side asks about the chip it runs for; `PlatformAscendC("Ascend910B3")` stands in for the driver."""

    def __init__(self, socVersion: str = "Ascend910B") -> None:
        self.info = PlatformInfo.of(socVersion)

    def GetSocVersion(self) -> str:
        return self.info.socVersion

    def GetCoreNumAic(self) -> int:
        """Cube cores of the product that the published examples use."""
        return 24


ConvCommonApi = SimpleNamespace(TPosition=TPosition, ConvFormat=ConvFormat, ConvDtype=ConvDtype,
                                IterateOrder=IterateOrder)
ConvBackpropApi = SimpleNamespace(
    ConvType=ConvType, Conv3DBackpropInput=Conv3DBackpropInput, Conv3DBackpropFilter=Conv3DBackpropFilter,
    Conv3DBpInputTiling=Conv3DBpInputTiling, Conv3dBpFilterTiling=Conv3dBpFilterTiling, B2Condition=B2Condition,
    PlatformInfo=PlatformInfo)
optiling = SimpleNamespace(Conv3DBackpropInputTilingData=Conv3DBackpropInputTilingData,
                           TConv3DBackpropInputTiling=TConv3DBackpropInputTiling,
                           TConv3DBpFilterTiling=TConv3DBpFilterTiling)
platform_ascendc = SimpleNamespace(PlatformAscendC=PlatformAscendC)
AscendC = SimpleNamespace(GlobalTensor=GlobalTensor,
                          tiling=SimpleNamespace(Conv3DBackpropInputTilingData=Conv3DBackpropInputTilingData))
