"""Fixtures of tests of the dashboard in a browser."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, running_browser
from tests.dashboard import RECORDED, served


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.resize(1360, 1000)
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """A page that must log no complaints."""
    browser.complaints.clear()
    yield browser
    assert browser.complaints == []


@pytest.fixture(scope="module")
def recorded():
    with served(RECORDED) as server:
        yield server


@contextmanager
def shown(page: Browser, folder: Path | None, **options: Any) -> Iterator[str]:
    """Serves a dashboard, of which the page is left before it ends. Yields its URL. options: as of `served`."""
    with served(folder, **options) as server:
        yield server.url
        page.open("about:blank#left")


def open_tab(page: Browser, url: str, tab: str, shows: str) -> None:
    page.open(f"{url}&tab={tab}")
    page.until(f"document.querySelector('#view-{tab}').innerText.includes({json.dumps(shows)})")
