"""Planning for a GPU: any problem, any limit of workspace, in bounded work; no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

# A GPU's plans are made where Triton does not interpret, in a process of its own. Work is counted in function calls,
# which are the same on a busy machine.
COUNT = """
import sys
from convgrad import Problem, Unsupported, plan

plan("weight_grad bf16 n2 c8 k8 i9x9 w3x3 NHWC OHWI cuda")
plan("input_grad+weight_grad bf16 n2 c8 k8 i9x9 w3x3 g8 NHWC OHWI cuda")
for line in sys.stdin:
    text, limit = line.strip().split("|")
    calls = 0

    def count(frame, event, argument):
        global calls
        calls += 1

    problem = Problem.parse(f"{text} cuda")
    sys.setprofile(count)
    try:
        kernel = plan(problem, max_workspace_bytes=int(limit) if limit else None).kernel
    except Unsupported:
        kernel = "none"
    finally:
        sys.setprofile(None)
    print(calls, kernel, text)
"""
MOST_CALLS = 1_500_000  # what the search for depthwise strips takes at most; most problems need some thousands
ONCE = [
    # divisions by zero: no workspace, or nothing but padding
    "weight_grad e4m3>f32 n2 c16 k16 i9x9 w3x3 NHWC OHWI|0",
    "weight_grad f16 n8 c16 k1 i0 w1 p3 NLC|",
    "weight_grad f16 n8 c16 k128 i0 w3 p2 NLC|",
    "input_grad+weight_grad f16 n64 c8 k3 i0x31 w3x2 p2x1 NHWC|",
    # pieces, chunks, widths, schedules and lines of taps in proportion to an extent
    "weight_grad e4m3>f32 n8 c1 k64 i160000 w3 p1 NLC|",
    "weight_grad e4m3>f32 n8 c8 k64 i160000 w3 p1 NLC OLI|100000",
    "weight_grad bf16 n5000 c64 k16 i19x2 w7x3 p0x5:0 d3x3 g4 OHWI|100000",
    "input_grad f16 n64 c8 k64 i1005x26 w3x31 s3x7 p0x5:0|4096",
    "weight_grad f32 n5000 c256 k2048 i2136657 w3 p0:5 OLI|",
    "weight_grad f16 n1000000 c64 k1000000 i793 w400 p5:1 d2 NLC|10000000",
    "weight_grad f16 n5000 c2048 k100000 i9997x31 w5000x31 s1000000x1 p2:0x0 d2x1 NHWC|",
    "input_grad bf16 n64 c4096 k4096 i200000x9994 w3x5000 p0:2x0:5 d100000x2 g4096 NHWC OHWI|",
    "input_grad+weight_grad+bias_grad bf16 n1 c64 k64 i5x1000000 w3x3 g64 NHWC OHWI|",
    "weight_grad+bias_grad f16 n1 c8 k8 i999998 w1000000 s2 p0:2 g8 NLC|",
]


def test_planning_is_bounded_for_any_problem() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], input="\n".join(ONCE), capture_output=True, text=True,
                          env={**os.environ, "TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr
    counted = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert len(counted) == len(ONCE)
    assert not [line for line in counted if int(line[0]) > MOST_CALLS]
