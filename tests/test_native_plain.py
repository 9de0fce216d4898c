"""Planning is bounded: no list as long as a stride or a kernel, and a family for what cannot be planned with tiles."""

from __future__ import annotations

import os
import subprocess
import sys

import oracle
import pytest

if "native" not in oracle.available_backends():
    pytest.skip("the native module is not built", allow_module_level=True)

# Each took gigabytes or minutes to plan: lists as long as a stride, a kernel, or the phases of an input gradient.
ENDLESS = ["input_grad f32 n1 c3 k4 i8 w3 s10000000", "weight_grad f32 n1 c1 k1 i100000000 w100000000",
           "conv bf16 n1 c1 k1 i100000000 w100000000", "input_grad f32 n1 c3 k4 i900000000 w3 s10000000",
           "input_grad f32 n1 c8 k8 i60000x60000 w500x500 s500x500", "conv f32 n1 c64 k64 i90000 w30000 g64",
           "weight_grad+bias_grad f64 n1 c2 k2 i40000000 w40000000", "input_grad f16 n2 c2 k2 i50000 w50000 d3 s2 p9"]


def test_planning_needs_little_memory() -> None:
    script = f"""
import resource
from convgrad import plan
plan("conv f32 n1 c8 k8 i9x9 w3x3", backend="native")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for text in {ENDLESS!r}:
    plan(text, backend="native")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024)
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert answer.stdout.strip() == "True", answer.stderr


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "e5m2>f32"])
@pytest.mark.parametrize("text", ["conv n1 c2 k2 i33000 w32900 p5:9", "input_grad n1 c2 k4 i33000 w32900 d2 s3 p7 g2",
                                  "weight_grad n1 c2 k2 i33000 w32950 s2 p3 d1", "input_grad n2 c3 k4 i8 w3 s10000000"])
def test_problems_that_need_no_tiles(text: str, dtype: str, seed: int) -> None:
    result, sizes = text.split(" ", 1)
    assert oracle.check_exact(f"{result} {dtype} {sizes}", "native", seed=seed)
