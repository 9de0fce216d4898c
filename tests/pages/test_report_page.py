"""The benchmark report in a browser: it loads, sorts, filters, copies; by keyboard, on a phone, in the dark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from convgrad.benchmark.commands import main
from convgrad.pages.report import report_page


def row(layer: str, ratio: float | None, kind: str = "dense", gradient: str = "input_grad",
        **more: Any) -> dict[str, Any]:
    ours = {"channels_last": {"backend": "native", "kernel": "gemm", "workspace_bytes": 0, "verified": "every element",
                              "worst_error": 0.5, "median_s": 1e-3, "q1_s": 1e-3, "q3_s": 1e-3, "best_s": 1e-3,
                              "gflops": 100.0, "of_ceiling": 0.5}}
    peer = {"name": "torch", "ways": {"channels_last": {"median_s": 1e-3 * (ratio or 1), "best_s": 1e-3}}, "notes": [],
            "best": "channels_last", "estimated": False}
    return {"layer": layer, "class": kind, "model": "</script><b>Model", "gradient": gradient, "dtype": "f32",
            "problem": f"{gradient} f32 n1 c8 k8 i9x9 w3x3 {layer}", "flops": 1e8, "min_bytes": 1e6, "ceiling_s": 5e-4,
            "ours": ours, "peer": peer, "ratio": ratio, "ratio_layout": "channels_last", **more}


def results() -> dict[str, Any]:
    rows = [row("alpha", 2.0), row("beta", 0.8), row("gamma", 1.5, "depthwise", "weight_grad", untuned_ratio=0.9),
            row("delta", None)]
    return {"schema": "convgrad-bench/1", "set": "core", "date": "2026-01-01T00:00:00", "commit": "abc", "versions": {},
            "machine": {"cpu": "Some <CPU>", "cores": 2, "instructions": ["avx2"]}, "threads": 2, "clock": "wall",
            "ceilings": {"f32_flops": 2e11, "bf16_flops": 0, "copy_bytes": 5e10, "how": "FMA"},
            "peer": {"name": "torch", "version": "2"}, "rows": rows, "skipped": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    models = [{"model": "resnet50", "dtype": "f32", "layout": "nchw", "peer_s": 1.3, "ours_s": 1.0, "ratio": 1.3}]
    made = tmp_path / "report.html"
    made.write_text(report_page(results(), models), encoding="utf-8")
    return made


def layers(page: Any) -> list[str]:
    found: list[str] = page.locator("#rows tbody td.layer").all_inner_texts()
    return found


def test_loads_with_every_row_and_the_lost_ones_marked(opened: Any, path: Path) -> None:
    page = opened().show(path)
    assert page.title() == "convgrad on Some <CPU>"
    assert layers(page) == ["beta", "gamma", "alpha", "delta"]  # by ratio, those without one last
    assert page.locator("#count").inner_text() == "4 of 4, 1 lost"
    assert "0.9" in page.locator("#classes").inner_text()
    assert "resnet50" in page.locator("#models").inner_text()
    assert page.locator("#rows td.lost").first.inner_text() == "0.8"
    assert page.locator("#ratios").locator("circle, path").count() >= 3


def test_sorts_by_any_column(opened: Any, path: Path) -> None:
    page = opened().show(path)
    page.locator("[data-sort=layer]").click()
    assert layers(page) == ["alpha", "beta", "delta", "gamma"]
    page.locator("[data-sort=layer]").click()
    assert layers(page) == ["gamma", "delta", "beta", "alpha"]
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("layer")


def test_filters(opened: Any, path: Path) -> None:
    page = opened().show(path)
    page.locator("#filter-class").select_option("depthwise")
    assert layers(page) == ["gamma"]
    page.locator("#filter-class").select_option("")
    page.locator("#filter-lost").check()
    assert layers(page) == ["beta"]
    page.locator("#filter-lost").uncheck()
    page.locator("#filter-text").fill("ALPH")
    assert layers(page) == ["alpha"]
    assert page.locator("#ratios").locator("circle").count() >= 1


def test_copies_a_problem_string(opened: Any, path: Path) -> None:
    page = opened(permissions=["clipboard-read", "clipboard-write"]).show(path)
    page.locator("#rows tbody tr").first.locator("button").click()
    page.wait_for_function("document.getElementById('copied').textContent.startsWith('copied')")
    assert page.locator("#copied").inner_text() == "copied: input_grad f32 n1 c8 k8 i9x9 w3x3 beta"


def test_works_by_keyboard(opened: Any, path: Path) -> None:
    page = opened().show(path)
    page.locator("#ratios").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#ratios-live").inner_text().startswith("beta f32 input_grad: ratio 0.8")
    page.locator("[data-sort=layer]").focus()
    page.keyboard.press("Enter")
    assert layers(page)[0] == "alpha"
    assert page.evaluate("document.activeElement.dataset.sort") == "layer"  # sorting keeps the focus


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_follows_the_colour_scheme(opened: Any, path: Path, scheme: str) -> None:
    page = opened(color_scheme=scheme).show(path)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_fits_a_phone(opened: Any, path: Path) -> None:
    page = opened(viewport={"width": 360, "height": 740}).show(path)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_commands_write_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, page = tmp_path / "results.json", tmp_path / "sub" / "page.html"
    saved.write_text(json.dumps(results()))
    assert main(["report", str(saved), "--html", str(page)]) == 0
    assert "<title>convgrad on Some &lt;CPU&gt;</title>" in page.read_text()
    assert main(["report", str(tmp_path / "none.json"), "--html", str(page)]) == 2
