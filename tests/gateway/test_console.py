"""The console in a real browser, over a real port, on a gateway with a fake engine."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import httpx
import pytest
from browser import chromium
from fakes import BASE, write_adapter
from served import Served, served

from engine.core.types import Lane, LaneMode
from engine.pb import engine_pb2 as pb

FILLED = {"tenants": ".tenant", "adapters": "tbody b", "usage": "tbody tr", "playground": ".talk", "overview": ".lane"}
UNNAMED = "button:not([aria-label]):empty, svg:not([role], [aria-hidden]), input:not([aria-label], [id], label input)"
PARSES_TEXT = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|https?://(?!www\.w3)"
PATIENCE = 60
"""Seconds; a browser on a busy machine takes a few for what is done at once on an idle one."""
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}


@dataclass
class Console:
    """A page of the console, and what it did behind our backs."""

    gateway: Served
    page: Any
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Urls."""

    def enter(self, key: str = "sk-admin", view: str = "overview", *, keep: bool = False) -> None:
        self.page.goto(f"{self.gateway.url}/console#{view}")
        self.page.get_by_label("Admin key").fill(key)
        self.page.get_by_label("Keep it").set_checked(keep)
        self.page.get_by_role("button", name="Open the console").click()

    def chat(self, key: str = "sk-acme", **fields: Any) -> httpx.Response:
        """As any client would."""
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(
            f"{self.gateway.url}/v1/chat/completions", headers=headers, json=CHAT | fields, timeout=PATIENCE
        )

    def usage(self) -> str:
        """The usage by adapter that the admin API reports, as JSON."""
        headers = {"authorization": "Bearer sk-admin"}
        url = f"{self.gateway.url}/admin/v1/usage?group_by=adapter"
        return httpx.get(url, headers=headers, timeout=PATIENCE).text


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture
def console(browser, tmp_path):
    with served(tmp_path) as gateway:
        context = browser.new_context(reduced_motion="reduce")
        context.set_default_timeout(1000 * PATIENCE)
        found = Console(gateway, context.new_page())
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        found.page.on("console", lambda message: found.errors.append(message.text) if is_wrong(message) else None)
        found.page.on("request", lambda request: found.asked.append(request.url))
        yield found
        context.close()
        assert found.errors == []
        gateway.run(gateway.house.assert_empty())


def is_wrong(message: Any) -> bool:
    """What a browser says by itself of an answer that is an error is part of some tests."""
    return message.type == "error" and "Failed to load resource" not in message.text


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def test_a_stranger_sees_nothing(console):
    page = console.page
    for key in ("sk-wrong", "sk-acme"):
        console.enter(key)
        page.get_by_text("That is no administrator").wait_for()
    assert page.locator("#content").text_content() == "" and not page.locator("#house").is_visible()
    assert not [url for url in console.asked if "v1/overview" in url]
    console.enter()
    page.get_by_role("region", name="Lane interactive").wait_for()
    stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
    assert "sk-" not in stored + "".join(console.asked)
    page.reload()
    page.get_by_label("Admin key").wait_for()


def as_administrator(route: Any) -> None:
    """The demo's key, as a gateway of the demo takes it."""
    shown = route.request.headers["authorization"]
    route.continue_(headers={**route.request.headers, "authorization": shown.replace("sk-demo-admin", "sk-admin")})


def test_the_demos_link_opens_the_console_and_leaves_no_key_in_the_address(console):
    page, url = console.page, console.gateway.url
    page.route("**/admin/**", as_administrator)
    page.goto(f"{url}/#key=sk-demo-admin")  # the root leads to the console
    page.get_by_role("region", name="Lane interactive").wait_for()
    assert page.evaluate("[location.pathname, location.hash, history.length]") == ["/console", "", 2]
    assert page.evaluate("sessionStorage.length") == 0


def test_a_link_with_any_other_key_signs_nobody_in(console):
    page = console.page
    page.goto(f"{console.gateway.url}/console#key=sk-admin")
    page.get_by_label("Admin key").wait_for()
    assert page.evaluate("location.href") == f"{console.gateway.url}/console"
    assert not [url for url in console.asked if "/admin/" in url]


def test_the_key_is_kept_for_the_tab_if_wanted_and_forgotten_at_the_door(console):
    page = console.page
    console.enter(keep=True)
    page.get_by_role("region", name="Lane batch").wait_for()
    page.reload()
    page.get_by_role("region", name="Lane batch").wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Admin key").wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_lane_is_paused_at_the_second_press_and_opened_again(console):
    page, engine = console.page, console.gateway.house.engine
    console.enter()
    lane = page.get_by_role("region", name="Lane batch")
    lane.get_by_role("button", name="Pause").click()
    assert engine.modes[Lane.BATCH] is LaneMode.OPEN
    lane.get_by_role("button", name="Pause batch?").click()
    lane.get_by_text("paused", exact=True).wait_for()
    assert engine.modes == {Lane.INTERACTIVE: LaneMode.OPEN, Lane.BATCH: LaneMode.PAUSED}
    lane.get_by_role("button", name="Resume").click()
    lane.get_by_role("button", name="Drain").wait_for()
    assert engine.modes[Lane.BATCH] is LaneMode.OPEN


def test_a_limit_edited_in_place_binds_on_the_next_request(console):
    page = console.page
    console.enter(view="tenants")
    limit = page.get_by_label("tokens a day of acme")
    assert console.chat().status_code == 200
    limit.fill("3")
    limit.press("Enter")
    page.get_by_text("tokens a day of acme: 3").wait_for()
    refused = console.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    page.get_by_role("region", name="Tenant acme").get_by_text("Last refused").wait_for()
    limit.fill("many")
    limit.press("Enter")
    page.get_by_text("“many” is no limit").wait_for()
    limit.press("Escape")
    assert limit.input_value() == "3"
    limit.fill("")
    limit.press("Enter")
    page.get_by_text("tokens a day of acme: no limit").wait_for()
    assert console.chat().status_code == 200


def test_a_live_request_is_cancelled_and_its_caller_is_told(console):
    page, house = console.page, console.gateway.house
    house.engine.go_on = asyncio.Event()
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(console.chat, stream=True)
        console.enter()
        table = page.get_by_role("region", name="Live requests")
        table.get_by_text("1 of 20").wait_for()
        table.get_by_role("button", name="Cancel request").click()
        table.get_by_text("Really cancel?").click()
        told = answer.result(PATIENCE).text
        table.get_by_text("Nothing is running").wait_for()
    assert '"code":"preempted"' in told and "an administrator cancelled" in told
    until(lambda: house.watcher.records and house.limiter.ends)
    (record,) = house.watcher.records
    assert (record.status, record.completion_tokens) == (503, 1)
    assert list(house.limiter.ends.values()) == [[record.prompt_tokens + 1]]


def test_the_playground_streams_as_a_tenant_and_never_as_the_administrator(console):
    page, engine = console.page, console.gateway.house.engine
    engine.go_on, engine.reply = asyncio.Event(), lambda request: "A<b>bold</b> answer"
    console.enter(view="playground")
    key = page.get_by_label("Tenant key")
    key.fill("sk-admin")
    key.press("Tab")
    page.get_by_text("That is the administrator").wait_for()
    assert key.input_value() == "" and not [url for url in console.asked if "/v1/models" in url]
    key.fill("sk-globex")
    key.press("Tab")
    page.get_by_role("option", name="captain").wait_for(state="attached")
    assert page.get_by_label("Model").inner_text().split() == [BASE, "pirate", "captain"]
    page.get_by_label("Model").select_option("pirate")
    page.get_by_label("Lane").select_option("batch")
    page.get_by_label("Most tokens").fill("64")
    page.get_by_label("Message").fill("hello")
    page.get_by_label("Message").press("Enter")
    said = page.locator(".said.assistant")
    until(lambda: said.inner_text() == "A")
    assert engine.open == 1, "the first words are there while the engine still writes"
    engine.go_on.set()
    page.get_by_text("batch lane").wait_for()
    assert said.inner_text() == "A<b>bold</b> answer"
    (request,) = engine.requests
    assert (request.tenant, request.lane, request.origin.model) == ("globex", Lane.BATCH, "pirate")


def test_stopping_the_playground_aborts(console):
    page, engine = console.page, console.gateway.house.engine
    engine.go_on = asyncio.Event()
    console.enter(view="playground")
    page.get_by_label("Tenant key").fill("sk-acme")
    page.get_by_label("Tenant key").press("Tab")
    page.get_by_role("option", name="poet").wait_for(state="attached")
    page.get_by_label("Most tokens").fill("64")
    page.get_by_label("Message").fill("hello")
    page.get_by_role("button", name="Send").click()
    until(lambda: page.locator(".said.assistant").inner_text() == "H")
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped", exact=True).wait_for()
    until(lambda: engine.ends)
    assert list(engine.ends.values()) == ["aborted"]


def test_adapters_are_loaded_pinned_and_unloaded(console, tmp_path):
    page, house = console.page, console.gateway.house
    write_adapter(tmp_path, "bard")
    console.enter(view="adapters")
    form = page.get_by_role("form", name="Load an adapter")
    form.get_by_label("Name").fill("team/bard")
    form.get_by_label("Folder or hub id").fill("/etc")
    form.get_by_role("button", name="Load").click()
    page.locator(".toast.bad").wait_for()
    form.get_by_label("Folder or hub id").fill("bard")
    form.get_by_label("Only for these tenants").fill("globex, acme")
    form.get_by_role("button", name="Load").click()
    page.get_by_text("only acme · only globex").wait_for()
    assert house.adapters.records["team/bard"].tenants == ("acme", "globex")
    pin = page.get_by_role("button", name="Pin team/bard")
    for pinned in (True, False):
        pin.click()
        page.get_by_role("button", name="Pin team/bard", pressed=pinned).wait_for()
        assert house.adapters.records["team/bard"].pinned is pinned
    page.get_by_label("Find adapters").fill("globex")
    assert page.locator("tbody tr:visible b").all_inner_texts() == ["team/bard"]
    page.get_by_role("button", name="Unload team/bard").click()
    page.get_by_text("Really unload?").click()
    page.get_by_text("No adapter is like that").wait_for()
    assert list(house.adapters.records) == ["pirate", "poet"]


def test_what_others_wrote_is_shown_as_text(console):
    page, evil = console.page, "<img src=x onerror=document.title='owned'>"
    console.enter(view="adapters")
    form = page.get_by_role("form", name="Load an adapter")
    form.get_by_label("Name").fill("x")
    form.get_by_label("Folder or hub id").fill(evil)
    form.get_by_role("button", name="Load").click()
    page.get_by_text(evil).wait_for()
    assert page.locator("#toasts img, #content img").count() == 0 and page.title() == "loralane console"


def test_an_engine_that_is_away_is_said_and_what_is_shown_counts_as_old(console):
    page, engine = console.page, console.gateway.house.engine
    console.enter()
    page.get_by_role("region", name="Lane batch").wait_for()
    engine.ready = False
    page.get_by_text("What you see is old: the engine is not available").wait_for()
    engine.ready = True
    page.get_by_role("alert").filter(has_text="old").wait_for(state="hidden")


def test_a_phone_and_a_keyboard_are_enough(console):
    page = console.page
    page.set_viewport_size({"width": 375, "height": 812})
    console.enter()
    page.get_by_role("region", name="Lane batch").wait_for()
    assert console.chat().status_code == 200  # which the view of usage shows
    for view in ("tenants", "adapters", "usage", "playground", "overview"):
        link = page.get_by_role("link", name=view.capitalize())
        link.focus()
        page.keyboard.press("Enter")
        page.locator("#content h1").filter(has_text=view.capitalize()).wait_for(state="attached")
        assert link.get_attribute("aria-current") == "page"
        page.locator(FILLED[view]).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == 375, view
    assert page.locator(f"#house :is({UNNAMED})").count() == 0


def test_charts_have_axes_a_goal_and_values_under_the_keys(console):
    page, operations = console.page, console.gateway.house.operations
    for rate in (100.0, 250.0):
        point = {"tokens_per_second": rate, "interactive.ttft_p95": 0.4, "interactive.running": 3.0}
        operations.history.add(point)
    console.enter()
    chart = page.get_by_role("img", name="Generated tokens a second")
    until(lambda: "Now: generated 250" in (chart.get_attribute("aria-label") or ""))
    assert chart.locator(".ticks text").all_text_contents()[:3] == ["0", "100", "200"]
    first = page.get_by_role("img", name="First token, interactive lane")
    assert (first.locator(".goal-text").text_content() or "").startswith("goal 500 ms")
    chart.focus()
    page.keyboard.press("ArrowLeft")
    page.get_by_text("generated 250").wait_for()
    page.keyboard.press("ArrowLeft")
    page.get_by_text("generated 100").wait_for()
    with page.expect_request(lambda request: "minutes=1440" in request.url):
        page.get_by_label("Time range").select_option("1440")


def test_a_lane_is_coloured_by_its_own_promise(console):
    page, engine = console.page, console.gateway.house.engine
    console.enter()
    meter = page.get_by_role("region", name="Lane interactive").get_by_role("meter", name="First token in time")
    meter.wait_for()
    for attained, colour in ((0.979, "poor"), (0.985, "fair"), (0.991, "good")):
        engine.picture = pb.EngineStats(
            lanes=[pb.LaneStats(lane=pb.LANE_INTERACTIVE, mode=pb.LANE_MODE_OPEN, slo_ttft_attainment=attained)]
        )
        until(lambda: meter.get_attribute("aria-valuenow") == str(attained))  # noqa: B023
        assert meter.get_attribute("class") == f"use {colour}"


def test_requests_that_have_ended_are_filtered_and_grouped(console):
    page = console.page
    assert console.chat().status_code == 200
    assert console.chat(model="none").status_code == 404
    assert console.chat("sk-globex", model="pirate").status_code == 200
    console.enter()
    panel = page.get_by_role("region", name="Live requests")
    panel.get_by_role("button", name="Failed").click()
    panel.get_by_text("model_not_found").wait_for()
    assert panel.locator("tbody tr:visible").count() == 1
    panel.get_by_role("button", name="Recent").click()
    until(lambda: panel.locator("tbody tr:visible").count() == 3)
    panel.get_by_label("Filter requests").fill("globex pirate")
    until(lambda: panel.locator("tbody tr:visible").count() == 1)
    panel.get_by_label("Filter requests").fill("")
    panel.get_by_label("Group requests by").select_option("tenant")
    until(lambda: panel.locator("tbody tr:visible th").all_inner_texts() == ["acme", "globex"])


def test_a_limit_that_is_wrong_stays_red_until_it_is_corrected(console):
    page = console.page
    console.enter(view="tenants")
    limit = page.get_by_label("tokens a day of acme")
    limit.fill("many")
    limit.press("Enter")
    page.get_by_text("“many” is no limit").wait_for()
    page.get_by_label("requests a minute of acme").focus()
    assert (limit.input_value(), limit.get_attribute("aria-invalid")) == ("many", "true")
    limit.fill("")
    limit.press("Enter")
    until(lambda: limit.get_attribute("aria-invalid") is None)


def test_usage_is_summed_up_and_saved(console):
    page = console.page
    assert console.chat(model="pirate").status_code == 200
    until(lambda: "pirate" in console.usage())  # written when the request has been settled
    console.enter(view="usage")
    page.get_by_label("Sum up by").select_option("adapter")
    page.get_by_role("cell", name="pirate").wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as CSV").click()
    assert "pirate" in download.value.path().read_text()


def test_answers_are_formatted_and_can_be_repeated_with_curl(console):
    page, engine = console.page, console.gateway.house.engine
    engine.reply = lambda request: "# Ahoy\n- **one**\n- `two`\n\n```py\nx = '<b>'\n```"
    console.enter(view="playground")
    page.get_by_label("Tenant key").fill("sk-acme")
    page.get_by_label("Tenant key").press("Tab")
    page.get_by_role("option", name="poet").wait_for(state="attached")
    page.get_by_label("Most tokens").fill("64")
    page.get_by_label("Message").fill("it's")
    page.get_by_label("Message").press("Enter")
    said = page.locator(".said.assistant")
    said.locator("pre code").wait_for()
    assert said.locator("pre code").inner_text() == "x = '<b>'" and said.locator("li").all_inner_texts() == [
        "one",
        "two",
    ]
    assert said.get_by_role("heading", name="Ahoy").count() == 1 and said.locator("li b").count() == 1
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.wasCopied = text; }")
    page.get_by_role("button", name="Copy as curl").click()
    command = page.evaluate("window.wasCopied")
    assert "sk-" not in command and "it'\\''s" in command and "$LORALANE_API_KEY" in command


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_borders_placeholders_and_banners_can_be_told_apart(scheme):
    """WCAG 2.2 AA: 4.5 to 1 for text, 3 to 1 for the borders of what can be typed into or pressed."""
    css = resources.files("gateway.console").joinpath("style.css").read_text()
    pairs = re.findall(r"--([a-z-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", css)
    colour = {name: (light if scheme == "light" else dark) for name, light, dark in pairs}
    for text in ("text", "muted", "accent", "warn", "bad", "good", "interactive", "batch"):
        for ground in ("ground", "surface"):
            assert contrast(colour[text], colour[ground]) >= 4.5, (text, ground)
    assert contrast(colour["muted"], colour["raised"]) >= 4.5
    assert contrast(colour["warn"], mixed(colour["warn"], colour["ground"], 0.12)) >= 4.5
    for ground in ("ground", "surface", "raised"):
        assert contrast(colour["strong-line"], colour[ground]) >= 3, ground


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def mixed(one: str, other: str, share: float) -> str:
    pairs = [(int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)


def test_no_file_of_the_page_can_make_code_of_text():
    files = [entry for entry in resources.files("gateway.console").iterdir() if entry.name.endswith((".js", ".html"))]
    assert len(files) > 8
    for entry in files:
        text = entry.read_text()
        found = re.search(PARSES_TEXT, text)
        assert found is None, (entry.name, found)
    page = resources.files("gateway.console").joinpath("index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", page)
