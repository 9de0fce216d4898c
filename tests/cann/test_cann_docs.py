"""docs/cann.md: its tables are up to date and its Python runs."""

from __future__ import annotations

import doctest
import re

import pytest
from cann_tables import PAGE, rendered

from convgrad import cann
from convgrad.plan import clear_plan_cache


@pytest.fixture
def default_backend(backend, monkeypatch):
    """Documentation names no backend: without the engine the reference stands in."""
    if backend is not None:
        monkeypatch.setenv("CONVGRAD_BACKEND", backend)
    clear_plan_cache()
    yield
    clear_plan_cache()


def test_tables_are_current():
    text = PAGE.read_text(encoding="utf-8")
    assert text == rendered(text), "run: python tests/cann/cann_tables.py"


def test_the_python_of_the_page_runs(default_backend, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 5
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
    printed = capsys.readouterr().out
    for line in re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        assert line.strip() in printed


@pytest.mark.parametrize("name", ["aclTensor", "transdata", "infer_shape", "Conv3DBackpropInputV2"])
def test_docstring_examples(name, default_backend):
    examples = doctest.DocTestFinder(recurse=False).find(getattr(cann, name), name, globs={})
    assert examples and examples[0].examples
    for example in examples:
        assert doctest.DocTestRunner().run(example).failed == 0
