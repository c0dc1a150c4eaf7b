"""A real browser for the console: Debian's Chromium, driven by Playwright. Tests are skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATH = next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser."""
    if PATH is None:
        pytest.skip("no Chromium in the path: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install 'loralane[dev]'")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=PATH, args=sandbox)
        yield browser
        browser.close()
