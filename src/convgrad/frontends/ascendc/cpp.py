"""The calls of a launch as C++ text, to carry over into a kernel: host side, input gradient, weight gradient."""

from __future__ import annotations

from .conv_types import HOST_TYPE, ConvFormat, half, type_name
from .filter_operator import split_filter_pieces
from .filter_tiling import C0, TConv3DBpFilterTiling
from .pieces import split_pieces
from .tiling_struct import TConv3DBackpropInputTiling, ceil_div


def element_name(t: TConv3DBackpropInputTiling) -> str:
    return type_name(t.element_type) if t.element_type is not None else type_name(half) if t.c0 == 16 else "float"


def to_cpp_host(tiling: TConv3DBackpropInputTiling) -> str:
    """Return the host side of this problem: every setter, then GetTiling."""
    t = tiling
    host = HOST_TYPE[t.element_type if t.element_type is not None else half].name
    return f"""\
#include "lib/conv_backprop/conv3d_bp_input_tiling.h"
optiling::Conv3DBackpropInputTilingData tilingData;
ConvBackpropApi::Conv3DBpInputTiling host(ascendcPlatform);  // platform_ascendc::PlatformAscendC
const auto dtype = ConvCommonApi::ConvDtype::{host};
host.SetWeightType(ConvCommonApi::TPosition::GM, ConvCommonApi::ConvFormat::FRACTAL_Z_3D, dtype);
host.SetInputType(ConvCommonApi::TPosition::GM, ConvCommonApi::ConvFormat::NDC1HWC0, dtype);
host.SetGradOutputType(ConvCommonApi::TPosition::GM, ConvCommonApi::ConvFormat::NDC1HWC0, dtype);
bool agreed = host.SetWeightShape({t.cout}, {t.cin}, {t.dk}, {t.hk}, {t.wk});
agreed = host.SetInputShape({t.batch}, {t.cin}, {t.di}, {t.hi}, {t.wi}) && agreed;
agreed = host.SetGradOutputShape({t.batch}, {t.cout}, {t.dout}, {t.ho}, {t.wo}) && agreed;
host.SetPadding({t.padFront}, {t.padBack}, {t.padUp}, {t.padDown}, {t.padLeft}, {t.padRight});
host.SetStride({t.strideD}, {t.strideH}, {t.strideW});
host.SetDilation({t.dilationD}, {t.dilationH}, {t.dilationW});
if (!agreed || host.GetTiling(tilingData) == -1) {{
    return -1;
}}
"""


# Moves a block of [useN / c0][useM][c0] from the core's workspace slot into NCDHW. The padding channels stay behind.
TRANSPOSE = """\
        const uint64_t useM = mIdx + 1 == mIter ? rows * {wi} - mIdx * {base_m} : {base_m};
        const uint64_t useN = nIdx + 1 == nIter ? (channels + {c0} - 1) / {c0} * {c0} - nIdx * {base_n} : {base_n};
        for (uint64_t c = 0; c < useN && j * {core_cin} + nIdx * {base_n} + c < {cin}; ++c) {{
            const uint64_t channel = j * {core_cin} + nIdx * {base_n} + c;
            const uint64_t to = ((n * {cin} + channel) * {di} + d) * {plane} + row0 * {wi} + mIdx * {base_m};
            const uint64_t from = slot + c / {c0} * useM * {c0} + c % {c0};
            for (uint64_t pixel = 0; pixel < useM; ++pixel) {{
                gradInputGm.SetValue(to + pixel, workspaceGm.GetValue(from + pixel * {c0}));
            }}
        }}
        {advance}
"""


def moves(t: TConv3DBackpropInputTiling, output_format: ConvFormat) -> str:
    """The loop over the blocks of a piece: straight to dX, or through the workspace slot of the core."""
    if output_format != ConvFormat.NCDHW:
        return f"""\
    // No depth in the output pointer: the object adds it.
    const uint64_t offsetC = n * {t.output_sample} + j * {t.singleCoreCin * t.hi * t.wi} + row0 * {t.wi * t.c0};
    while (gradInput_.Iterate()) {{
        gradInput_.GetTensorC(gradInputGm[offsetC]);
    }}
"""
    advance = ("if (++mIdx == mIter) { mIdx = 0; ++nIdx; }" if t.iterateOrder == 1 else
               "if (++nIdx == nIter) { nIdx = 0; ++mIdx; }")
    cleared = f"""\
        for (uint64_t i = 0; i < {t.baseM * t.baseN}; ++i) {{
            workspaceGm.SetValue(slot + i, 0);  // a block that no dY row reaches is not written
        }}
""" if t.initOutputFlag else ""
    move = TRANSPOSE.format(wi=t.wi, base_m=t.baseM, base_n=t.baseN, c0=t.c0, cin=t.cin, di=t.di, plane=t.hi * t.wi,
                            core_cin=t.singleCoreCin, advance=advance)
    return f"""\
    // NCDHW: GetTensorC puts every block into the slot of this core; it must be moved before the next one.
    const uint64_t slot = core * {t.baseM * t.baseN}, mIter = (rows * {t.wi} + {t.baseM - 1}) / {t.baseM};
    const uint64_t nIter = ((channels + {t.c0 - 1}) / {t.c0} * {t.c0} + {t.baseN - 1}) / {t.baseN};
    uint64_t mIdx = 0, nIdx = 0;
    while (gradInput_.Iterate()) {{
{cleared}        gradInput_.GetTensorC(workspaceGm);
{move}    }}
"""


def to_cpp_filter_stub(tiling: TConv3DBpFilterTiling, cores: int = 1) -> str:
    """Return the kernel loop of the weight gradient: a table of the pieces, and the page's calls for each."""
    t = tiling.dwTiling
    name = type_name(t.element_type if t.element_type is not None else half)
    pieces = split_filter_pieces(tiling, cores)
    rows = "\n".join(f"    {{{p.core}, {p.singleShapeM}, {p.singleShapeN}, {p.singleShapeK}, {p.hoStartIdx}, "
                     f"{p.offsetInput}, {p.offsetGradOutput}, {p.offsetOutput}}}," for p in pieces)
    return f"""\
// dW {t.cout}x{t.cin}x{t.dk}x{t.hk}x{t.wk}, {len(pieces)} pieces on {cores} core(s)
// Zero gradWeightGm first: blocks are added.
#include "lib/conv_backprop/conv3d_bp_filter_api.h"
using ConvCommonApi::ConvFormat;
using ConvCommonApi::TPosition;
using inputType = ConvBackpropApi::ConvType<TPosition::GM, ConvFormat::NDC1HWC0, {name}>;
using weightSizeType = ConvBackpropApi::ConvType<TPosition::GM, ConvFormat::ND, int32_t>;
using gradOutputType = ConvBackpropApi::ConvType<TPosition::GM, ConvFormat::NDC1HWC0, {name}>;
using gradWeightType = ConvBackpropApi::ConvType<TPosition::GM, ConvFormat::FRACTAL_Z_3D, float>;

struct FilterPiece {{
    uint64_t core, m, n, k;
    uint32_t row;
    uint64_t input, gradOutput, output;
}};
static const FilterPiece pieces[] = {{  // M, N, K, first dY row, pointers; c0 = {C0}
{rows}
}};
ConvBackpropApi::Conv3DBackpropFilter<inputType, weightSizeType, gradOutputType, gradWeightType> gradWeight_;
gradWeight_.Init(&(tilingData->dwTiling));
for (const FilterPiece& piece : pieces) {{
    if (piece.core != GetBlockIdx()) continue;
    gradWeight_.SetSingleShape(piece.m, piece.n, piece.k);  // M, N, K
    gradWeight_.SetStartPosition(piece.row);
    gradWeight_.SetInput(inputGm[piece.input]);
    gradWeight_.SetGradOutput(gradOutputGm[piece.gradOutput]);
    while (gradWeight_.Iterate()) {{
        gradWeight_.GetTensorC(gradWeightGm[piece.output]);  // adds
    }}
    gradWeight_.ctx.isFirstIter_ = true;
}}
gradWeight_.End();
"""


def to_cpp_stub(tiling: TConv3DBackpropInputTiling, cores: int = 1,
                output_format: ConvFormat = ConvFormat.NDC1HWC0) -> str:
    """Return the kernel loop of one core with the numbers of this problem, our own text around the page's calls."""
    t, name = tiling, element_name(tiling)
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
using gradInputDxType = ConvBackpropApi::ConvType<TPosition::GM, ConvFormat::{output_format.name}, {name}>;

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
{moves(t, output_format)}    gradInput_.ctx.isFirstIter_ = true;
}}
gradInput_.End();
"""
