"""The Ascend C dialect: Conv3DBackpropInput and Conv3DBackpropFilter as an executable model on packed memory.

The names and argument orders are those of the vendor's pages. `run` and `run_filter` compute a whole problem from
plain arrays; the objects below run the same sequence of calls that a kernel makes, and say which call is wrong.
"""

from ...blocked import pack_fractal_z_3d, pack_ndc1hwc0, unpack_fractal_z_3d, unpack_ndc1hwc0
from .compare import Difference, check_against_reference
from .conv_types import (
    B2Condition,
    ConvDtype,
    ConvFormat,
    ConvType,
    IterateOrder,
    TPosition,
    bfloat16_t,
    float32,
    half,
    int32_t,
)
from .cpp import to_cpp_filter_stub, to_cpp_host, to_cpp_stub
from .duration import LongRun, model_seconds
from .filter_kernel import Conv3DBackpropFilter, FilterBlock
from .filter_operator import FilterPiece, filter_types, find_filter_tiling, run_filter, split_filter_pieces
from .filter_picture import draw_filter
from .filter_tiling import Conv3dBpFilterTiling, DwTiling, TConv3DBpFilterTiling
from .global_tensor import GlobalTensor
from .kernel import Conv3DBackpropInput, conv_types
from .kernel_object import EndMissing
from .misuse import MISTAKES, Misuse, OutOfBounds
from .namespaces import AscendC, ConvBackpropApi, ConvCommonApi, optiling, platform_ascendc
from .operator import Conv3DTranspose, TransposeBlock, describe, find_tiling, run
from .picture import draw
from .piece_checks import check_coverage
from .pieces import Piece, split_pieces
from .platform import PRODUCTS, PlatformInfo
from .tile_search import fit_cores
from .tiling import Conv3DBpInputTiling
from .tiling_struct import Conv3DBackpropInputTilingData, TConv3DBackpropInputTiling
from .trace import to_json_lines, to_table, to_text
from .traffic import Traffic, estimate
from .walk import Block

__all__ = [
    "MISTAKES", "PRODUCTS", "AscendC", "B2Condition", "Block", "Conv3DBackpropFilter", "Conv3DBackpropInput",
    "Conv3DBackpropInputTilingData", "Conv3DBpInputTiling", "Conv3DTranspose", "Conv3dBpFilterTiling",
    "ConvBackpropApi", "ConvCommonApi", "ConvDtype", "ConvFormat", "ConvType", "Difference", "DwTiling", "EndMissing",
    "FilterBlock", "FilterPiece", "GlobalTensor", "IterateOrder", "LongRun", "Misuse", "OutOfBounds", "Piece",
    "PlatformInfo", "TConv3DBackpropInputTiling", "TConv3DBpFilterTiling", "TPosition", "Traffic", "TransposeBlock",
    "bfloat16_t", "check_against_reference", "check_coverage", "conv_types", "describe", "draw", "draw_filter",
    "estimate", "filter_types", "find_filter_tiling", "find_tiling", "fit_cores", "float32", "half", "int32_t",
    "model_seconds", "optiling", "pack_fractal_z_3d", "pack_ndc1hwc0", "platform_ascendc", "run", "run_filter",
    "split_filter_pieces", "split_pieces", "to_cpp_filter_stub", "to_cpp_host", "to_cpp_stub", "to_json_lines",
    "to_table", "to_text", "unpack_fractal_z_3d", "unpack_ndc1hwc0",
]
