"""`make screenshots`: takes screenshots of every view of the console, under traffic.

    python -m benchmarks.screenshots [--folder build/screenshots] [--minutes 3]

Starts the demo in a temporary data directory, sends chats of both tenants and a batch for a while, and captures every
view in light and dark mode, in a wide window and on a phone. Needs Chromium in the PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count, product
from pathlib import Path
from threading import Event
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.runner import Run, benchmark, option
from benchmarks.server import demo, running

ADMIN_KEY = "sk-demo-admin"
TENANT_KEYS = ("sk-demo-acme", "sk-demo-globex")
MODELS = ("pirate", "cheer", "json", "smollm2-135m-instruct")
WINDOWS = {"wide": (1280, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")
VIEWS = ("overview", "tenants", "adapters", "batches", "usage", "playground")
CHATTERS = 3
BATCH_LINES = 60
SETTLE_MS = 7000
"""How long to wait for figures and charts, in milliseconds; the slowest are updated every five seconds."""
PROMPTS = ("Tell me about the sea.", "What should I cook tonight?", "Describe a sunrise.", "Why is the sky blue?")


@benchmark(
    option("--folder", Path("build/screenshots"), "where the pictures are written"),
    option("--minutes", 3.0, "how long traffic runs before the first picture"),
)
def bench(run: Run) -> None:
    """Run the demo under traffic and, after some minutes, take all pictures. Raises RuntimeError if Chromium is missing
    or the demo does not become ready."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise RuntimeError("no Chromium in the path: apt-get install chromium")
    folder, minutes = run.options.folder, run.options.minutes
    folder.mkdir(parents=True, exist_ok=True)
    with running(demo(run.scratch), folder / "server.log") as url, _traffic(url):
        run.console.print(f"traffic runs at {url} for {minutes:g} minutes")
        time.sleep(60 * minutes)
        _take_all(url, chromium, folder)
    run.console.print(f"the pictures are in {folder}")


@contextmanager
def _traffic(url: str) -> Iterator[None]:
    """Submit two batch jobs, and send chats until the block ends."""
    stop = Event()
    with ThreadPoolExecutor(CHATTERS) as threads:
        _submit_batch(url)
        for number in range(CHATTERS):
            threads.submit(_chat_on, url, number, stop)
        try:
            yield
        finally:
            stop.set()


def _client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=300)


def _chat_on(url: str, number: int, stop: Event) -> None:
    for turn in count(number):
        if stop.is_set():
            return
        with _client(url, TENANT_KEYS[turn % 2]) as client, suppress(httpx.HTTPError):
            model = "unheard-of" if turn % 9 == 8 else MODELS[turn % len(MODELS)]
            client.post("/v1/chat/completions", json=_body(model, PROMPTS[turn % len(PROMPTS)]))
        stop.wait(1 + turn % 4)


def _body(model: str, prompt: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 48}


def _submit_batch(url: str) -> None:
    target = "/v1/chat/completions"
    lines = [
        {"custom_id": str(n), "method": "POST", "url": target, "body": _body("pirate", f"Count from {n}.")}
        for n in range(BATCH_LINES)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    with _client(url, TENANT_KEYS[0]) as client:
        for piece, window in ((text, "24h"), (text.split(b"\n")[0], "1h")):
            sent = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", piece)})
            job = {"input_file_id": sent.json()["id"], "endpoint": target, "completion_window": window}
            client.post("/v1/batches", json=job).raise_for_status()


def _take_all(url: str, chromium: str, folder: Path) -> None:
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=sandbox)
        for window, scheme in product(WINDOWS, SCHEMES):
            _take(browser, url, window, scheme, folder)
        browser.close()


def _take(browser: Browser, url: str, window: str, scheme: Any, folder: Path) -> None:
    """Take a picture of every view, and of some of their states, in one window size and one colour scheme."""
    width, height = WINDOWS[window]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{url}/console")
    page.get_by_label("Admin key").wait_for()

    def shoot(name: str, *, whole: bool = True) -> None:
        page.evaluate("scrollTo(0, 0)")
        page.mouse.move(0, 0)
        page.screenshot(path=folder / f"{name}-{scheme}-{window}.png", full_page=whole)

    shoot("door")
    page.goto(f"{url}/console#key={ADMIN_KEY}")
    for view in VIEWS:
        page.get_by_role("link", name=view.capitalize()).click()
        _prepare(page, view)
        page.wait_for_timeout(SETTLE_MS)
        shoot(view)
        if view == "overview":
            shoot("overview-top", whole=False)
    page.get_by_role("link", name="Overview").click()
    page.get_by_role("button", name="Failed").click()
    page.wait_for_timeout(SETTLE_MS)
    shoot("overview-failed")
    page.route("**/admin/v1/overview**", lambda route: route.abort())
    page.get_by_role("alert").filter(has_text="old").wait_for()
    shoot("overview-stale")
    context.close()


def _prepare(page: Page, view: str) -> None:
    if view == "batches":
        page.get_by_role("button", name="Newest").click()
    if view == "tenants":
        for title in page.locator("summary").filter(has_text="Keys").all():
            title.click()
    if view == "playground":
        page.get_by_label("Tenant key").fill(TENANT_KEYS[0])
        page.get_by_label("Tenant key").press("Tab")
        page.get_by_role("option", name="pirate").wait_for(state="attached")
        page.get_by_label("Model").select_option("pirate")
        page.get_by_label("Message").fill("Where is the treasure?")
        page.get_by_label("Message").press("Enter")
        page.get_by_text("Copy as curl").wait_for(timeout=120_000)


if __name__ == "__main__":
    bench.main()
