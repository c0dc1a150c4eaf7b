"""A real browser for the console: Debian's Chromium, driven by Playwright. Tests are skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
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


class Blank(BaseHTTPRequestHandler):
    """Serves an empty page."""

    def do_GET(self) -> None:
        body = b"<!doctype html><title>page</title>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@contextmanager
def pages() -> Iterator[int]:
    """The port of a web server of another origin than the gateway's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Blank) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()
