"""The documents: every Python snippet runs, every figure of the README comes from the committed results."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEEDS = {"docs/torch.md": "torch", "docs/jax.md": "jax"}
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("docs/*.md"), ROOT / "README.md")
               if "```python" in path.read_text(encoding="utf-8"))
TESTED_ELSEWHERE = {"docs/cann.md", "docs/ascendc.md", "docs/torch.md", "README.md"}  # with what surrounds them


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in TESTED_ELSEWHERE])
def test_the_snippets_of_a_page_run_one_after_the_other(page: str, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """A page reads like one program: names of an earlier snippet are there in a later one."""
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for code in snippets(page):
        exec(compile(code, page, "exec"), names)


def load(name: str) -> object:
    folder = ROOT / "docs" / "site"
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_drawings_follow_the_index_rule() -> None:
    pictures = load("drawings").pictures()  # type: ignore[attr-defined]
    assert set(pictures) == {"images/phases.svg", "images/halo.svg", "images/blocked_sum.svg"}
    # 11 inputs, 4 taps, stride 2, one pad: each tap links 5 or 6 outputs, as Conv.landing_taps counts
    from convgrad import Conv

    lines = pictures["images/phases.svg"].count("<line ")
    assert lines == Conv(1, 1, 1, (11,), (4,), (2,), (1,), ((1, 1),)).landing_taps()


def test_every_deviation_is_on_the_page() -> None:
    page = load("deviations").page(ROOT / "tests" / "deviations")  # type: ignore[attr-defined]
    for title in ("oneDNN Graph", "CANN", "Ascend C"):
        assert f"## {title}\n" in page
    assert page.count("\n| ") > 40


def test_the_performance_page_is_made_of_the_results() -> None:
    pages = load("performance").pages(ROOT / "bench" / "results")  # type: ignore[attr-defined]
    assert "reports/h200.html" in pages and "| dense | bf16 | input_grad |" in pages["performance.md"]
