"""A kernel that does not compile: the next one runs, one warning names the problem, and later plans say so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

# A GPU's plan is prepared without one, in a process where Triton does not interpret.
PREPARE = """
import sys, warnings
from triton.runtime.driver import driver
from triton.runtime.errors import PTXASError
from convgrad import Problem, explain, plan
from convgrad.backends.triton import ahead, launch, no_gpu

driver.set_active(no_gpu.NoDriver(("cuda", 90, 32)))
text, unfit = sys.argv[1:]
compiled, names = launch.Step.compiled, []

def refused(step, *arguments):
    names.append(step.kernel.__name__)
    if step.kernel.__name__ == unfit:
        raise PTXASError("too few registers")
    return compiled(step, *arguments)

launch.Step.compiled = refused
problem = Problem.parse(text)
tensors = [*(ahead.empty_tensor(problem, name, problem.dtype, "meta") for name in problem.operands),
           *(ahead.empty_tensor(problem, name, problem.out_dtype, "meta") for name in problem.results)]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        call = plan(problem).prepared([tensor.stride() for tensor in tensors], 0)
print([str(one.message) for one in caught if one.category is RuntimeWarning])
print(names)
print(call is not None)
print("; ".join(str(explain(problem)).splitlines()))
"""


@pytest.mark.parametrize(("text", "unfit", "instead"), [
    ("input_grad bf16 n1 c64 k2 i9x14 w3x3 p1x0 NHWC OHWI cuda", "cell_gather_kernel", "gather_kernel"),
    ("input_grad+weight_grad+bias_grad bf16 n4 c16 k16 i9x8 w3x3 s2x2 p1x0 g16 NHWC OHWI cuda", "slide_both_kernel",
     "slide_box_kernel"),
])
def test_the_next_kernel_runs_where_one_does_not_compile(text: str, unfit: str, instead: str) -> None:
    done = subprocess.run([sys.executable, "-c", PREPARE, text, unfit], capture_output=True, text=True,
                          env={**os.environ, "TRITON_INTERPRET": "0", "CONVGRAD_COMPILE_PROCESSES": "0"})
    assert done.returncode == 0, done.stderr
    warned, names, prepared, notes = done.stdout.splitlines()[-4:]
    assert warned.count("please report") == 1 and text in warned and "too few registers" in warned
    assert unfit in names and f"'{instead}'" in names and prepared == "True"
    assert "does not compile here" in notes and "too few registers" in notes
