"""The calls of a launch as C++ text, to carry over into a kernel."""

from __future__ import annotations

from .conv_types import half, type_name
from .pieces import split_pieces
from .tiling_struct import TConv3DBackpropInputTiling, ceil_div


def to_cpp_stub(tiling: TConv3DBackpropInputTiling, cores: int = 1) -> str:
    """Return the kernel loop of one core with the numbers of this problem, our own text around the page's calls."""
    t = tiling
    name = type_name(t.element_type) if t.element_type is not None else type_name(half) if t.c0 == 16 else "float"
    pieces = split_pieces(t, cores)
    total, channels = len(pieces), ceil_div(t.cin1 * t.c0, t.singleCoreCin)
    rows = t.singleCoreM // t.wi
    zero = "zero gradInputGm first: initOutputFlag is 1" if t.initOutputFlag else "no zeroing needed"
    last_rows = max(0, min(rows, t.hi - (ceil_div(t.hi, rows) - 1) * rows) - t.unreached_rows)
    return f"""\
// dX {t.batch}x{t.cin}x{t.di}x{t.hi}x{t.wi}, {total} pieces on {cores} core(s); {zero}
#include "lib/conv_backprop/conv3d_bp_input_api.h"
using ConvCommonApi::ConvFormat;
using ConvCommonApi::TPosition;
using weightDxType = ConvBackpropApi::ConvType<TPosition::GM, ConvFormat::FRACTAL_Z_3D, {name}>;
using inputSizeDxType = ConvBackpropApi::ConvType<TPosition::GM, ConvFormat::ND, int32_t>;
using gradOutputDxType = ConvBackpropApi::ConvType<TPosition::GM, ConvFormat::NDC1HWC0, {name}>;
using gradInputDxType = ConvBackpropApi::ConvType<TPosition::GM, ConvFormat::NDC1HWC0, {name}>;

ConvBackpropApi::Conv3DBackpropInput<weightDxType, inputSizeDxType, gradOutputDxType, gradInputDxType> gradInput_;
gradInput_.Init(&(tilingData->conv3DDxTiling));
const uint64_t share = {total} / {cores}, more = {total} % {cores}, core = GetBlockIdx();
const uint64_t begin = core * share + (core < more ? core : more), end = begin + share + (core < more ? 1 : 0);
for (uint64_t p = begin; p < end; ++p) {{
    const uint64_t m = p / {t.batch * t.di * channels}, j = p % {channels};
    const uint64_t n = p / {t.di * channels} % {t.batch}, d = p / {channels} % {t.di};
    const int32_t row0 = m * {rows}, startRow = row0 - {t.backpropPadUp};  // minus backpropPadUp
    const uint64_t dyRow = startRow < 0 ? 0 : (startRow + {t.strideH - 1}) / {t.strideH};
    const uint64_t rows = m == {ceil_div(t.hi, rows) - 1} ? {last_rows} : {rows};
    if (rows == 0 || dyRow >= {t.ho}) continue;  // no dY row reaches this piece
    const uint32_t channels = j == {channels - 1} ? {t.cin - (channels - 1) * t.singleCoreCin} : {t.singleCoreCin};
    gradInput_.SetSingleShape(rows * {t.wi}, {t.full_k}, channels);  // M, K, N
    gradInput_.SetStartPosition(d, startRow);
    gradInput_.SetGradOutput(gradOutputGm[n * {t.grad_output_sample} + dyRow * {t.wo * t.c0}]);
    gradInput_.SetWeight(weightGm[j * {t.singleCoreCin // t.c0 * t.weight_group}]);
    // No depth in the output pointer: the object adds it.
    const uint64_t offsetC = n * {t.output_sample} + j * {t.singleCoreCin * t.hi * t.wi} + row0 * {t.wi * t.c0};
    while (gradInput_.Iterate()) {{
        gradInput_.GetTensorC(gradInputGm[offsetC]);
    }}
    gradInput_.ctx.isFirstIter_ = true;
}}
gradInput_.End();
"""
