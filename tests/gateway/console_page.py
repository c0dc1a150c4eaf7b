"""A page of the console in a real browser, on a gateway with a fake engine, accounts, files and batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from batch_fakes import batch_options
from fakes import ACME, BASE, GLOBEX, CountingLimiter, key_ring
from redis.asyncio import Redis
from served import Served, served

from gateway.accounts.registry import AccountRegistry
from gateway.batches.service import Batches
from gateway.files.service import Files

PATIENCE = 60
"""Seconds; a browser on a busy machine takes a few for what is done at once on an idle one."""
OFTEN = """
const wait = window.setTimeout;
window.setTimeout = (call, ms, ...rest) => wait(call, call.name === "refresh" ? ms / 10 : ms, ...rest);
"""
"""Script that lets a page ask the gateway ten times as often: each question that a test waits for comes after two
seconds otherwise."""
AFTERWARDS = "/health"
"""What the page shows when a test is over: nothing that goes on asking, and of the same site, so that the browser keeps
its process."""
SIZE = {"width": 1280, "height": 720}
"""Size of a page unless a test sets another: Playwright's default."""
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}


@dataclass
class Console:
    """A page of the console, with the errors that it reported and the URLs that it requested."""

    gateway: Served
    page: Any
    redis: Redis
    accounts: AccountRegistry
    files: Files
    batches: Batches
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Urls."""

    def enter(self, key: str = "sk-admin", view: str = "overview", *, keep: bool = False) -> None:
        self.page.goto(f"{self.gateway.url}/console#{view}")
        self.page.get_by_label("Admin key").fill(key)
        self.page.get_by_label("Keep it").set_checked(keep)
        self.page.get_by_role("button", name="Open the console").click()

    def enter_playground(self, key: str = "sk-acme", most_tokens: int = 64) -> None:
        """Open the playground with a tenant's key, and wait until it knows the models."""
        self.enter(view="playground")
        self.page.get_by_label("Tenant key").fill(key)
        self.page.get_by_label("Tenant key").press("Tab")
        self.page.locator("#model option").first.wait_for(state="attached")
        self.page.get_by_label("Most tokens").fill(str(most_tokens))

    def chat(self, key: str = "sk-acme", **fields: Any) -> httpx.Response:
        """Send a chat to the API, past the console, and return the response."""
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(
            f"{self.gateway.url}/v1/chat/completions", headers=headers, json=CHAT | fields, timeout=PATIENCE
        )

    def usage(self) -> str:
        """The usage by adapter that the admin API reports, as JSON."""
        headers = {"authorization": "Bearer sk-admin"}
        url = f"{self.gateway.url}/admin/v1/usage?group_by=adapter"
        return httpx.get(url, headers=headers, timeout=PATIENCE).text


@contextmanager
def opened_page(browser: Any) -> Iterator[Any]:
    """Open a page for the consoles of several tests, one after the other, for the browser starts three processes for
    each new one. What one gateway's console keeps in the browser no other sees, because their ports differ."""
    context = browser.new_context(reduced_motion="reduce")
    context.set_default_timeout(1000 * PATIENCE)
    context.add_init_script(OFTEN)
    yield context.new_page()
    context.close()


@contextmanager
def opened_console(page: Any, root: Path, redis_url: str, **app_options: Any) -> Iterator[Console]:
    """Everything that the console asks for is there: tenants can be created, and batches listed. `app_options` go to
    `build_gateway_app`."""
    redis, limiter = Redis.from_url(redis_url), CountingLimiter()
    accounts = key_ring(changed=lambda tenants: limiter.configure_lazily([ACME, GLOBEX, *tenants]))
    options = batch_options(redis, root / "stored")
    with served(root, limiter=limiter, accounts=accounts, **options, **app_options) as gateway:
        gateway.run(redis.flushall())
        gateway.run(accounts.start())
        found = Console(gateway, page, redis, accounts, **options)
        with _heard(found):
            yield found
            page.goto(f"{gateway.url}{AFTERWARDS}")
        page.unroute_all()
        page.set_viewport_size(SIZE)
        page.emulate_media(color_scheme="light")
        assert found.errors == []
        gateway.run(gateway.gateway_app.assert_empty())
        gateway.run(accounts.close())
        gateway.run(redis.aclose())


@contextmanager
def _heard(console: Console) -> Iterator[None]:
    """Note what a console's page reports and requests while the block runs."""
    listeners = {
        "pageerror": lambda error: console.errors.append(str(error)),
        "console": lambda message: console.errors.append(message.text) if is_wrong(message) else None,
        "request": lambda request: console.asked.append(request.url),
    }
    for event, listener in listeners.items():
        console.page.on(event, listener)
    try:
        yield
    finally:
        for event, listener in listeners.items():
            console.page.remove_listener(event, listener)


def is_wrong(message: Any) -> bool:
    """What a browser says by itself of an answer that is an error is part of some tests."""
    return message.type == "error" and "Failed to load resource" not in message.text


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)
