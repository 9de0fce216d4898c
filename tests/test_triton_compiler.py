"""Faults of the compilers below our kernels: each is asked for here, with what stands in its way.

These compile for an H200 and need no GPU. A test that fails because a fault is gone names what may then be removed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from triton import knobs  # noqa: E402

from convgrad.backends.triton.packed_adds import PACKED_ADD, taken_apart  # noqa: E402

PACKED = """.version 8.4
.target sm_90a
.address_size 64
.visible .entry half(.param .u32 a, .param .u32 b, .param .u64 out)
{
\t.reg .b16 %rs<8>;
\t.reg .b32 %r<16>;
\t.reg .b64 %rd<4>;
\tld.param.b32 %r1, [a];
\tld.param.b32 %r2, [b];
\tld.param.b64 %rd1, [out];
\tcvt.u16.u32 %rs1, %r1;
\tcvt.u16.u32 %rs2, %r2;
\tmov.b32 %r4, {%rs2, %rs1};
\tmov.b32 %r5, -65538;
\tadd.s16x2 \t%r6, %r4, %r5;
\tmov.b32 {%rs4, %rs5}, %r6;
\tcvt.s32.s16 %r9, %rs5;
\tst.global.b32 [%rd1], %r9;
\tret;
}
"""


def machine_code(ptx: str, folder: Path) -> str:
    """What Triton's ptxas makes of PTX, as text."""
    source, binary = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    subprocess.run([knobs.nvidia.ptxas.path, "--gpu-name=sm_90a", str(source), "-o", str(binary)], check=True)
    return subprocess.run([knobs.nvidia.nvdisasm.path, "-c", str(binary)], check=True, capture_output=True,
                          text=True).stdout


def additions(code: str) -> list[str]:
    return [line.split("*/")[1].strip() for line in code.splitlines() if "IADD" in line]


def test_ptxas_drops_the_constant_of_a_packed_addition(tmp_path: Path) -> None:
    """Where this fails, ptxas is mended: packed_adds.py may go once no older one is in use."""
    assert any(line.split(",")[-1].strip(" ;") == "0x0" for line in additions(machine_code(PACKED, tmp_path)))


def test_packed_additions_are_taken_apart(tmp_path: Path) -> None:
    ptx = taken_apart(PACKED)
    assert not PACKED_ADD.search(ptx)
    found = additions(machine_code(ptx, tmp_path))
    assert found and all("-0x2" in line or "0xfffffffe" in line or "0xfffe" in line for line in found)


COMPILE = """
import json, re, sys
from triton.runtime.driver import driver
from convgrad.backends.triton import ahead, launch, no_gpu
from convgrad.backends.triton.packed_adds import PACKED_ADD

driver.set_active(no_gpu.NoDriver(("cuda", 90, 32)))
REGISTERS = re.compile(r"warp_group_dot %.*: tensor<")  # a product whose first operand is in registers
WAIT = re.compile(r"warp_group_dot_wait.*pendings = (\\d+)")
packed, waits = [], []
compiled = launch.Step.compiled
def noted(step, *arguments):
    kernel = compiled(step, *arguments)
    if PACKED_ADD.search(kernel.asm["ptx"]):
        packed.append(kernel.name)
    if REGISTERS.search(kernel.asm["ttgir"]):
        waits.extend(WAIT.findall(kernel.asm["ttgir"]))
    return kernel
launch.Step.compiled = noted
print(json.dumps([[text, ahead.compile_job((text, None))[2], packed, waits] for text in sys.argv[1:]]))
"""
ALL = "input_grad+weight_grad+bias_grad"
COMPILED = [
    # ptxas dropped a constant of a packed addition: 248 of 3825 sums missed a row
    "weight_grad bf16 n7 c85 k15 i16x28 w3x5 s2x2 p2:0x0:1 d1x2 g5 NHWC OHWI",
    # an extent of 1, the same in segments of lines
    "weight_grad f32 n1 c1 k1 i200x2x1 w1x1x3 s4x1x2 p0x1x0:2 d1x2x1 NDHWC",
    # a stride of 1, which Triton makes a constant without a type: 'int' object has no attribute 'to'
    f"{ALL} f16 n7 c8 k8 i8x5 w2x3 s3x3 p1x1 g8 NHWC OHWI",
    # one pass of strips was planned for an input and a bias gradient, which has no x
    "input_grad+bias_grad f32 n2 c64 k64 i23x21 w6x3 p0x0:2 g64 NHWC",
    # products of 256 columns in half of the registers: ptxas wanted 154 of 128
    "input_grad bf16 n1 c64 k2 i9x14x9 w1x3x3 s2x1x2 p1x0x0 d3x1x1 NDHWC ODHWI",
]


def test_problems_compile_that_once_did_not(tmp_path: Path) -> None:
    """What compiles also has no packed additions, and products wait before their operand in registers is overwritten.

    Triton 3.6 waits so itself. Where it does not, ptxas may overwrite them early (triton-lang/triton 9433).
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE, *COMPILED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for text, error, packed, _ in found:
        assert not error and not packed, (text, error, packed)
    assert found[-1][3] and set(found[-1][3]) == {"0"}
