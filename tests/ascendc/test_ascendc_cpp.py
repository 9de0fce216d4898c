"""The C++ text of a launch, compiled against a stand-in of the API that prints its calls."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from ascendc_problems import random_case

from convgrad import ascendc

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

# Enough of the API to compile the text: every setter prints its arguments, a pointer prints its offset.
STAND_IN = r"""
#pragma once
#include <cstdint>
#include <cstdio>
struct half {}; struct bfloat16_t {};
struct Gm { uint64_t offset = 0; Gm operator[](uint64_t more) const { return {offset + more}; } };
static uint64_t blockIdx; static uint64_t GetBlockIdx() { return blockIdx; }
namespace ConvCommonApi {
enum class TPosition { GM }; enum class ConvFormat { ND, NDC1HWC0, FRACTAL_Z_3D };
}
namespace ConvBackpropApi {
template <ConvCommonApi::TPosition P, ConvCommonApi::ConvFormat F, typename T> struct ConvType {};
struct Context { bool isFirstIter_ = true; };
template <typename A, typename B, typename C, typename D> struct Conv3DBackpropInput {
    Context ctx;
    int left = 0;
    void Init(const int*) { std::printf("Init\n"); }
    void SetSingleShape(uint64_t m, uint64_t k, uint32_t n) {
        std::printf("%llu %llu %u ", (unsigned long long)m, (unsigned long long)k, n);
    }
    void SetStartPosition(uint32_t d, int32_t row) { std::printf("%u %d ", d, row); }
    void SetGradOutput(Gm gm) { std::printf("%llu ", (unsigned long long)gm.offset); }
    void SetWeight(Gm gm) { std::printf("%llu ", (unsigned long long)gm.offset); }
    bool Iterate() { if (ctx.isFirstIter_) { left = 1; ctx.isFirstIter_ = false; } return left-- > 0; }
    void GetTensorC(Gm gm) { std::printf("%llu\n", (unsigned long long)gm.offset); }
    void End() { std::printf("End\n"); }
};
}
"""
MAIN = """
struct TilingData {{ int conv3DDxTiling = 0; }};
int main() {{
    Gm gradOutputGm, weightGm, gradInputGm;
    TilingData data, *tilingData = &data;
    for (blockIdx = 0; blockIdx < {cores}; ++blockIdx) {{
{body}
    }}
}}
"""


def compiled_calls(folder: Path, tiling: ascendc.TConv3DBackpropInputTiling, cores: int) -> list[str]:
    header = folder / "lib" / "conv_backprop" / "conv3d_bp_input_api.h"
    header.parent.mkdir(parents=True)
    header.write_text(STAND_IN)
    lines = ascendc.to_cpp_stub(tiling, cores).splitlines()
    body = "\n".join(line for line in lines if not line.startswith("#include"))
    source = folder / "kernel.cpp"
    source.write_text('#include "lib/conv_backprop/conv3d_bp_input_api.h"\n' + MAIN.format(cores=cores, body=body))
    program = folder / "kernel"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-std=c++17", f"-I{folder}", str(source), "-o", str(program)], check=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("seed", [1, 4, 22])
def test_the_text_makes_the_calls_of_every_piece(seed: int, tmp_path: Path) -> None:
    case = random_case(seed)
    tiling, cores = case.tiling(), 3
    expected = []
    pieces = ascendc.split_pieces(tiling, cores)
    for core in range(cores):
        expected.append("Init")
        expected += [f"{p.singleShapeM} {p.singleShapeK} {p.singleShapeN} {p.d} {p.curHoStartIdx} {p.offsetA} "
                     f"{p.offsetB} {p.offsetC}" for p in pieces if p.core == core and not p.skipped]
        expected.append("End")
    assert compiled_calls(tmp_path, tiling, cores) == expected
