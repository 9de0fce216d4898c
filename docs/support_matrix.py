"""Write the support matrix into README.md, from the code: `python docs/support_matrix.py`. A test keeps it current."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # plans can be asked for without a GPU; nothing runs here

from convgrad import Problem, Unsupported, plan
from convgrad.frontends import KINDS
from convgrad.machine import backend_states, device_of
from convgrad.plan import BACKENDS
from convgrad.problem import COMPUTE_MODES, DTYPES, RESULT_NAMES, SPATIAL_LETTERS, WRT

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- support matrix: made by docs/support_matrix.py -->\n", "<!-- end of the support matrix -->"
GEOMETRIES = {1: "i9 w3 s2 p1", 2: "i9x8 w3x2 p1x0", 3: "i5x6x4 w3x1x2 s1x2x1"}


def cell(backend: str, dtype: str) -> str:
    """Which results a backend computes from operands of a format, over all ranks."""
    able = [wrt for wrt in WRT if all(can_plan(backend, dtype, wrt, axes) for axes in SPATIAL_LETTERS)]
    if len(able) == len(WRT):
        return "yes"
    return ", ".join(RESULT_NAMES[wrt] for wrt in able) or "no"


def can_plan(backend: str, dtype: str, wrt: str, axes: int) -> bool:
    """Whether a backend takes a problem of this kind, for every format of the result."""
    problem = Problem.parse(f"conv {dtype} n2 c4 k6 {GEOMETRIES[axes]} g2").with_(wrt=wrt, device=device_of(backend))
    try:
        for out_dtype in DTYPES:
            plan(problem.with_(out_dtype=out_dtype), backend=backend)
    except Unsupported:
        return False
    return True


def columns() -> dict[str, list[str]]:
    """For every backend that is part of the package its cells, one per number format; none where it cannot load."""
    states = backend_states()
    return {name: [cell(name, dtype) for dtype in DTYPES] if states[name] is None else []
            for name, module in BACKENDS.items() if find_spec(module) is not None}


def matrix(cells: dict[str, list[str]]) -> str:
    """The text between the markers of README.md."""
    head = [f"{backend} ({'CUDA' if device_of(backend) == 'cuda' else 'CPU'})" for backend in cells]
    lines = ["| operands | " + " | ".join(head) + " |", "|---|" + "---|" * len(head)]
    lines += [f"| {dtype} (`{short}`) | " + " | ".join(column[row] for column in cells.values()) + " |"
              for row, (dtype, (short, _)) in enumerate(DTYPES.items())]
    packages = ", ".join(dict.fromkeys(["numpy", *(name for name in KINDS if name != "jaxlib")]))
    lines += [
        "", "\"yes\" means every result, with 1, 2 and 3 spatial axes, and any of these formats for the result.", "",
        f"- results: {', '.join(f'`{name}`' for name in RESULT_NAMES.values())}; transposed convolutions by the same",
        "- rounding of operands before products (`compute=`):",
        f"  {', '.join(f'`{mode}`' for mode in COMPUTE_MODES)}",
        "- scales, one per tensor (`scales=`): every result, any format",
        "- layouts: every axis order of activations (`NCHW`, `NHWC`, `TBC`, ...) and of weights (`OIHW`, `HWIO`, ...)",
        f"- arrays: {packages}, and anything with `__dlpack__` or `__cuda_array_interface__`",
    ]
    return "\n".join(lines) + "\n"


def written() -> str:
    """What README.md says now."""
    text = README.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN):text.index(END)]


if __name__ == "__main__":
    found = columns()
    if not all(found.values()):
        raise SystemExit(f"cannot load {', '.join(name for name, cells in found.items() if not cells)} here")
    text = README.read_text(encoding="utf-8")
    README.write_text(text.replace(BEGIN + written() + END, BEGIN + matrix(found) + END), encoding="utf-8")
