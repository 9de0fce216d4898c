"""A headless Chromium for the tests of pages: the one that the system has, without a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if not path:
        # `make test-pages` sets this: there, a missing browser is a failure.
        reason = "needs Chromium and the Python package playwright"
        (pytest.fail if os.environ.get("CONVGRAD_TEST_PAGES") else pytest.skip)(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


class Opened:
    """A page in the browser, with all that it asked of a network and all errors of its console."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def show(self, path: Path) -> Any:
        self.page.goto(path.as_uri())
        return self.page


@pytest.fixture
def opened(chromium: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Opened]]:
    contexts = []
    shown: list[Opened] = []

    def open_page(**options: Any) -> Opened:
        contexts.append(chromium.new_context(**options))
        shown.append(Opened(contexts[-1]))
        return shown[-1]

    yield open_page
    for found in shown:  # of every page, whatever its test looked at
        assert found.errors == []
        assert all(url.startswith(("file:", "data:")) for url in found.requests), found.requests
    for context in contexts:
        context.close()
