"""Every listed deviation is executed, and the table in the documentation is the one that the list gives."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convgrad import onednn
from convgrad.numbers import storage_dtype

sys.path.insert(0, str(Path(__file__).parents[1] / "deviations"))
import onednn_table

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
CASES = [pytest.param(case, id=re.sub(r"\W+", "_", f"{entry['what']}_{place}").strip("_"))
         for entry in onednn_table.load() for place, case in enumerate(entry.get("case", []))]


def execute(case: dict[str, Any]) -> tuple[Any, Any]:
    """Run a case with ones; the compiled operator and the result."""
    axes = len(case["inputs"][0]) - 2
    attributes = {"strides": [1] * axes, "pads_begin": [0] * axes, "pads_end": [0] * axes, "dilations": [1] * axes,
                  **case["attributes"]}
    operator = onednn.OPERATORS[case["operator"]](**attributes)
    arrays = [np.ones(shape, storage_dtype(DTYPES[case.get("dtype", "f32")])) for shape in case["inputs"]]
    extra = [np.array(case["shape_input"], np.int32)] if "shape_input" in case else []
    compiled = operator.compile(*arrays, *extra)
    assert operator.infer_shape(*case["inputs"], *extra) == compiled.output.shape
    assert operator.pads(*case["inputs"], *extra) == (compiled.pads_begin, compiled.pads_end)
    return compiled, compiled(*arrays)


@pytest.mark.parametrize("case", CASES)
def test_deviation(case: dict[str, Any], engine: str) -> None:
    known = {"operator", "attributes", "inputs", "shape_input", "dtype", "error", "match", "shape", "pads", "warning"}
    assert set(case) <= known and {"error", "shape", "pads"} & set(case)
    if "error" in case:
        with pytest.raises(onednn.GraphError, match=case["match"]) as caught:
            execute(case)
        assert type(caught.value).__name__ == case["error"]
        return
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        compiled, result = execute(case)
    assert [type(warning.message).__name__ for warning in heard] == ([case["warning"]] if "warning" in case else [])
    assert result.shape == compiled.output.shape == tuple(case.get("shape", result.shape))
    if "pads" in case:
        assert [list(compiled.pads_begin), list(compiled.pads_end)] == case["pads"]
    assert np.isfinite(result.astype(np.float32)).all() and result.astype(np.float32).sum() > 0


def test_every_entry_is_tested_once() -> None:
    entries = onednn_table.load()
    assert len({entry["what"] for entry in entries}) == len(entries)
    for entry in entries:
        assert set(entry) in ({"what", "document", "library", "here", "case"},
                              {"what", "document", "library", "here", "tested_by"}), entry["what"]
        if "tested_by" in entry:
            file, _, name = entry["tested_by"].partition("::")
            assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")


def test_documentation_table_is_current() -> None:
    page = onednn_table.PAGE.read_text(encoding="utf-8")
    assert onednn_table.BEGIN in page and onednn_table.END in page
    assert page == onednn_table.page_with_table(page), "run python tests/deviations/onednn_table.py"


def test_documentation_examples_run(engine: str) -> None:
    page = onednn_table.PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert names["diff_src"].tolist() == [[[[0, 1, 0, 1], [2, 3, 3, 3], [0, 3, 3, 1], [2, 3, 2, 3]]]]
