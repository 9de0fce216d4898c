"""Kernels in C++ compile against the headers with warnings as errors and run on the CPU with the model's checks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from convgrad import ascendc
from convgrad.frontends.cann.native_library import INCLUDE

COMPILERS = [name for name in ("g++", "clang++") if shutil.which(name)]
pytestmark = pytest.mark.skipif(not COMPILERS, reason="no C++ compiler")
FOLDER = Path(__file__).parent
EXAMPLE = FOLDER.parents[1] / "examples" / "ascendc" / "kernel.cpp"


def ran(source, folder, *flags, compiler=COMPILERS[0] if COMPILERS else "", arguments=()):
    program = folder / "program"
    subprocess.run([compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", *flags, f"-I{INCLUDE}", str(source), "-o",
                    str(program)], check=True)
    done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_code_of_the_page_runs(compiler, tmp_path):
    """Host and kernel as the page writes them, on several cores, under the address sanitizer."""
    said = ran(EXAMPLE, tmp_path, "-fsanitize=address", compiler=compiler)
    assert [line.rsplit(",", 1)[1] for line in said.splitlines()] == [" 0 wrong elements"] * 4


MISTAKES = {
    "Iterate before Init": "init-missing", "Init twice": "init-twice", "a tile over L0C": "tiling-invalid",
    "a tiling of another type": "types", "Iterate before the setters": "piece-incomplete",
    "M is not whole rows": "rows", "SetSingleShape(M, N, K)": "argument-order",
    "K of half the channels": "single-shape", "a depth that dX does not have": "start-position",
    "the start row itself": "start-row-pad",
    "more rows than are left": "rows", "the dY pointer of another row": "grad-output-offset",
    "a weight pointer inside a group": "weight-offset", "the output pointer of another group": "output-offset",
    "the depth in the output pointer": "depth-twice", "Iterate twice": "block-lost",
    "GetTensorC before Iterate": "no-block", "GetTensorC twice": "block-taken",
    "Iterate after the last block": "first-iter", "the next piece without isFirstIter_": "first-iter",
    "GetTensorC into dY": "operand-overwritten", "initOutputFlag, not zeroed": "not-zeroed",
    "enAtomic, not zeroed": "not-zeroed", "the same piece twice": "written-twice", "Init, then End": "end-early",
    "End in mid-piece": "end-early", "End with a block": "block-lost", "End twice": "after-end",
    "coverage before End": "end-missing", "a piece left out": "never-written", "NCDHW into dX": "workspace",
    "NCDHW, not moved": "not-transposed", "NCDHW, End without moving": "not-transposed",
    "outside the memory": "out of range"}


def test_mistakes_have_the_names_of_the_model(tmp_path):
    said = dict(line.rsplit(": ", 1) for line in ran(FOLDER / "mistakes.cpp", tmp_path).splitlines())
    assert said == MISTAKES
    assert set(MISTAKES.values()) - {"out of range"} <= set(ascendc.MISTAKES)


CASES = [  # dY, W, options, type, output format, cores
    ((1, 20, 2, 5, 6), (20, 17, 2, 3, 3), dict(input_size=(3, 5, 6), padding=(0, 1, 1)), "half", "NDC1HWC0", 2),
    ((2, 9, 2, 4, 3), (9, 24, 2, 2, 2), dict(input_size=(4, 9, 6), stride=2), "bfloat16_t", "NCDHW", 3),
    ((1, 9, 1, 5, 6), (9, 10, 1, 3, 2), dict(input_size=(1, 7, 7)), "float", "NCDHW", 1),
]
MAIN = """
#include <cstdio>
#include <string>
#include <vector>
#include "lib/conv_backprop/conv3d_bp_input_api.h"
{kernels}
template <typename T> std::vector<T> Load(const std::string& path) {{
    std::FILE* file = std::fopen(path.c_str(), "rb");
    std::fseek(file, 0, SEEK_END);
    std::vector<T> values(std::ftell(file) / sizeof(T));
    std::rewind(file);
    if (std::fread(values.data(), sizeof(T), values.size(), file) != values.size()) std::exit(3);
    std::fclose(file);
    return values;
}}
template <typename T, typename Kernel> void Run(const std::string& folder, int cores, Kernel kernel) {{
    auto dy = Load<T>(folder + "/dy"), w = Load<T>(folder + "/w"), dx = Load<T>(folder + "/dx");
    auto data = Load<optiling::Conv3DBackpropInputTilingData>(folder + "/tiling");
    std::vector<T> workspace(cores * data[0].conv3DDxTiling.baseM * data[0].conv3DDxTiling.baseN + 1);
    GlobalTensor<T> dyGm, wGm, dxGm, workspaceGm;
    dyGm.SetGlobalBuffer(dy.data(), dy.size()), wGm.SetGlobalBuffer(w.data(), w.size());
    dxGm.SetGlobalBuffer(dx.data(), dx.size()), workspaceGm.SetGlobalBuffer(workspace.data(), workspace.size());
    for (AscendC::BlockIdx() = 0; AscendC::BlockIdx() < cores; ++AscendC::BlockIdx()) {{
        kernel(dyGm, wGm, dxGm, workspaceGm, data.data());
    }}
    AscendC::BlockIdx() = 0;
    ConvBackpropApi::CheckCoverage(dxGm, data[0].conv3DDxTiling);
    std::FILE* file = std::fopen((folder + "/result").c_str(), "wb");
    std::fwrite(dx.data(), sizeof(T), dx.size(), file);
    std::fclose(file);
}}
int main(int, char** argv) {{
    const std::string folder = argv[1];
{runs}
}}
"""
KERNEL = """
void Kernel{number}(GlobalTensor<{type}>& gradOutputGm, GlobalTensor<{type}>& weightGm,
    GlobalTensor<{type}>& gradInputGm, GlobalTensor<{type}>& workspaceGm,
    const optiling::Conv3DBackpropInputTilingData* tilingData) {{
    (void)workspaceGm;
{body}
}}
"""


def test_the_text_of_a_launch_computes_what_the_model_computes(tmp_path):
    """`to_cpp_stub`, compiled: straight into NDC1HWC0 and through the workspace into NCDHW."""
    kernels, runs, expected = [], [], []
    for number, (dy_shape, w_shape, options, name, form, cores) in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        dtype = {"half": ascendc.half, "bfloat16_t": ascendc.bfloat16_t, "float": ascendc.float32}[name]
        rng = np.random.default_rng(number)
        dy, w = (rng.integers(-2, 3, shape).astype(dtype) for shape in (dy_shape, w_shape))
        tiling = ascendc.find_tiling(ascendc.describe(dy_shape, w_shape, dtype, **options), cores)
        if number == 1:
            tiling = tiling.with_(baseM=16, baseN=16)
        output = ascendc.ConvFormat[form]
        body = ascendc.to_cpp_stub(tiling, cores, output)
        kernels.append(KERNEL.format(number=number, type=name, body="\n".join(
            line for line in body.splitlines() if not line.startswith("#include"))))
        runs.append(f'    Run<{name}>(folder + "/{number}", {cores}, Kernel{number});')
        (folder / "dy").write_bytes(ascendc.pack_ndc1hwc0(dy).tobytes())
        (folder / "w").write_bytes(ascendc.pack_fractal_z_3d(w).tobytes())
        (folder / "tiling").write_bytes(tiling.to_bytes())
        t = tiling
        shape = (t.batch, t.cin, t.di, t.hi, t.wi) if form == "NCDHW" else (t.batch, t.di, t.cin1, t.hi, t.wi, t.c0)
        (folder / "dx").write_bytes(np.full(shape, 0 if t.initOutputFlag else np.nan, dtype).tobytes())
        dx = ascendc.run(dy, w, **options, cores=cores, tiling=tiling, output_format=output, allow_undocumented=True)
        expected.append((folder / "result", dx, dtype, form, shape))
    source = tmp_path / "launch.cpp"
    source.write_text(MAIN.format(kernels="".join(kernels), runs="\n".join(runs)))
    ran(source, tmp_path, "-O1", arguments=[tmp_path])
    for path, dx, dtype, form, shape in expected:
        found = np.frombuffer(path.read_bytes(), dtype).reshape(shape)
        found = found if form == "NCDHW" else ascendc.unpack_ndc1hwc0(found, dx.shape[1])
        assert found.tobytes() == dx.tobytes()


def test_the_host_agrees_with_the_model(tmp_path):
    """The C++ host fills the same numbers as the Python one, the tile aside, and its tile is one that Init takes."""
    calls = """SetWeightShape(20, 17, 2, 3, 3);
    host.SetInputShape(1, 17, 5, 9, 8);
    host.SetGradOutputShape(1, 20, 2, 5, 4);
    host.SetPadding(0, 0, 1, 1, 1, 0);
    host.SetStride(2, 2, 2);"""
    source = tmp_path / "host.cpp"
    text = '''#include <cstdio>
#include "lib/conv_backprop/conv3d_bp_input_tiling.h"
int main() {
    ConvBackpropApi::Conv3DBpInputTiling host;
    host.CALLS
    optiling::Conv3DBackpropInputTilingData data;
    if (host.GetTiling(data) == -1) return 1;
    std::fwrite(&data, sizeof(data), 1, stdout);
    ConvBackpropApi::Conv3DBpInputTiling wrong;
    wrong.SetWeightShape(20, 17, 2, 3, 3);
    return wrong.SetInputShape(1, 18, 5, 9, 8) || wrong.GetTiling(data) != -1;
}
'''
    source.write_text(text.replace("CALLS", calls))
    program = tmp_path / "host"
    subprocess.run([COMPILERS[0], "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", str(source), "-o",
                    str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, check=True)
    found = ascendc.TConv3DBackpropInputTiling.from_bytes(done.stdout)
    found.validate()
    host = ascendc.Conv3DBpInputTiling()
    for line in calls.replace("host.", "").split(";")[:-1]:
        name, _, arguments = line.strip().partition("(")
        getattr(host, name)(*map(int, arguments.rstrip(")").split(",")))
    model = ascendc.TConv3DBackpropInputTiling()
    assert host.GetTiling(model) == 0
    tile = {"baseM": model.baseM, "baseK": model.baseK, "baseN": model.baseN, "stepKa": model.stepKa,
            "stepKb": model.stepKb, "al1Pbuffer": model.al1Pbuffer, "bl1Pbuffer": model.bl1Pbuffer,
            "singleCoreM": model.singleCoreM, "singleCoreCin": model.singleCoreCin}
    assert found.with_(**tile) == model
