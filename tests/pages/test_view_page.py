"""The drawing of a gradient in a browser: what it highlights is what the definition links."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from convgrad.cli import main
from convgrad.pages.view import view_page
from convgrad.problem import Problem

STRIDED = "input_grad f32 n1 c4 k8 i9x8 w3x3 s2x1 p1:0x1:1 d1x2 g2"


@pytest.fixture
def show(opened: Any, tmp_path: Path) -> Any:
    def opened_page(problem: str, **options: Any) -> Any:
        path = tmp_path / "view.html"
        path.write_text(view_page(Problem.parse(problem)), encoding="utf-8")
        return opened(**options).show(path)
    return opened_page


def marked(page: Any, tensor: str) -> set[str]:
    cells = page.locator(f"#grid-{tensor} rect.on, #grid-{tensor} rect.picked").all()
    return {cell.get_attribute("data-at") for cell in cells}


def linked(problem: str, tensor: str, at: tuple[int, ...]) -> dict[str, set[str]]:
    """What the definition i = o*stride + k*dilation - low links with an element, by tensor."""
    conv = Problem.parse(problem).conv
    found: dict[str, set[str]] = {"dx": set(), "dw": set(), "dy": set()}
    for o in itertools.product(*map(range, conv.out_size)):
        for k in itertools.product(*map(range, conv.kernel_size)):
            i = tuple(a * s + b * d - low for a, s, b, d, (low, _) in
                      zip(o, conv.stride, k, conv.dilation, conv.padding))
            inside = all(0 <= place < size for place, size in zip(i, conv.in_size))
            if inside and {"dx": i, "dw": k, "dy": o}[tensor] == at:
                for name, index in (("dx", i), ("dw", k), ("dy", o)):
                    found[name].add(",".join(map(str, index)))
    return found


@pytest.mark.parametrize(("tensor", "at"), [("dx", (3, 4)), ("dx", (0, 0)), ("dx", (8, 7)), ("dw", (0, 2)),
                                            ("dy", (1, 3))])
def test_picking_an_element_shows_what_is_linked(show: Any, tensor: str, at: tuple[int, ...]) -> None:
    page = show(STRIDED)
    page.locator(f"#grid-{tensor} rect[data-at='{at[0]},{at[1]}']").click()
    expected = linked(STRIDED, tensor, at)
    for name in ("dx", "dw", "dy"):
        assert marked(page, name) == expected[name] | ({f"{at[0]},{at[1]}"} if name == tensor else set())
    if tensor != "dy":
        assert f"({len(expected['dy'])} terms" in page.locator("#said").inner_text()


def test_an_element_that_no_tap_reaches_is_zero(show: Any) -> None:
    page = show("input_grad f32 n1 c1 k1 i6 w1 s2")
    page.locator("#grid-dx rect[data-at='1']").click()
    assert "+0: no tap reaches it" in page.locator("#said").inner_text()


def test_phases_have_their_own_colours(show: Any) -> None:
    page = show("input_grad f32 n1 c1 k1 i7 w3 s3 p1")
    colours = [cell.get_attribute("class").split()[1] for cell in page.locator("#grid-dx rect[data-at]").all()]
    assert colours == [f"phase{(i + 1) % 3}" for i in range(7)]


def test_sliders_change_the_problem_and_refuse_nonsense(show: Any) -> None:
    page = show(STRIDED)
    page.locator("#stride-W").fill("3")
    assert page.locator("#problem").inner_text() == "input_grad f32 n1 c4 k8 i9x8 w3x3 s2x3 p1:0x1 d1x2 g2"
    Problem.parse(page.locator("#problem").inner_text())
    page.locator("#groups").fill("3")
    assert page.locator("#refusal").inner_text() == "groups=3 does not divide in_channels=4"
    page.locator("#groups").fill("4")
    page.locator("#rank").select_option("3")
    assert Problem.parse(page.locator("#problem").inner_text()).conv.axes == 3


def test_works_by_keyboard(show: Any) -> None:
    page = show(STRIDED, color_scheme="dark")
    page.locator("#grid-dx").focus()
    for key in ("Enter", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.locator("#said").inner_text().startswith("dx[1,1] = ")


def test_an_ascend_c_tiling_block_by_block(show: Any) -> None:
    page = show("input_grad f16 n1 c17 k15 i2x60x90 w2x3x3 s1x2x2 p0x1x1")
    assert page.locator("#tiling").is_visible()
    assert "baseM=" in page.locator("#tiling-facts").inner_text()
    before = page.locator("#tiling-said").inner_text()
    page.locator("#next").click()
    after = page.locator("#tiling-said").inner_text()
    assert before.startswith("core 0, Iterate 0") and after.startswith("core 0, Iterate 1")
    assert page.locator("#loads tbody tr").count() >= 1


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "view.html"
    assert main(["view", STRIDED, "--output", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path)
    assert main(["view", "input_grad f32 n1", "--output", str(path)]) == 2
    assert "missing" in capsys.readouterr().err
    assert main(["view", STRIDED, "--cores", "0", "--output", str(path)]) == 2
