"""The console in a real browser, over a real port, on a gateway with a fake engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from console_page import PATIENCE, until
from fakes import write_adapter

from engine.core.messages.requests import Lane, LaneMode
from gateway.core.counts import parse_count

FILLED = {
    "tenants": ".tenant",
    "adapters": "tbody b",
    "batches": "table.batches",
    "usage": "tbody tr",
    "playground": ".talk",
    "overview": ".lane",
}
UNNAMED = "button:not([aria-label]):empty, svg:not([role], [aria-hidden]), input:not([aria-label], [id], label input)"


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
    before = page.evaluate("history.length")
    page.goto(f"{url}/#key=sk-demo-admin")  # the root leads to the console
    page.get_by_role("region", name="Lane interactive").wait_for()
    assert page.evaluate("[location.pathname, location.hash, history.length]") == ["/console", "", before + 1]
    assert page.evaluate("sessionStorage.length") == 0


def test_a_link_with_any_other_key_signs_no_operator_in(console):
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
    page, engine = console.page, console.gateway.gateway_app.engine
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
    page, gateway_app = console.page, console.gateway.gateway_app
    gateway_app.engine.go_on = asyncio.Event()
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
    until(lambda: gateway_app.watcher.records and gateway_app.limiter.ends)
    (record,) = gateway_app.watcher.records
    assert (record.outcome.status, record.work.completion_tokens) == (503, 1)
    assert list(gateway_app.limiter.ends.values()) == [[record.work.prompt_tokens + 1]]


def test_adapters_are_loaded_pinned_and_unloaded(console, tmp_path):
    page, gateway_app = console.page, console.gateway.gateway_app
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
    assert gateway_app.adapters.records["team/bard"].tenants == ("acme", "globex")
    pin = page.get_by_role("button", name="Pin team/bard")
    for pinned in (True, False):
        pin.click()
        page.get_by_role("button", name="Pin team/bard", pressed=pinned).wait_for()
        assert gateway_app.adapters.records["team/bard"].pinned is pinned
    page.get_by_label("Find adapters").fill("globex")
    assert page.locator("tbody tr:visible b").all_inner_texts() == ["team/bard"]
    page.get_by_role("button", name="Unload team/bard").click()
    page.get_by_text("Really unload?").click()
    page.get_by_text("No adapter is like that").wait_for()
    assert list(gateway_app.adapters.records) == ["pirate", "poet"]


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
    page, engine = console.page, console.gateway.gateway_app.engine
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
    for view in FILLED:
        link = page.get_by_role("link", name=view.capitalize())
        link.focus()
        page.keyboard.press("Enter")
        page.locator("#content h1").filter(has_text=view.capitalize()).wait_for(state="attached")
        assert link.get_attribute("aria-current") == "page"
        page.locator(FILLED[view]).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == 375, view
    assert page.locator(f"#house :is({UNNAMED})").count() == 0


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


def test_a_limit_is_read_as_the_command_line_reads_it(console):
    """Loads the module of the page by itself: what a field does with it is tested above."""
    page = console.page
    console.enter(view="tenants")
    texts = [
        "600",
        " 1_000 ",
        "1,000,000",
        "100k",
        "100K",
        "1.5m",
        "0.001k",
        "100 k",
        "1 000",
        "1__0",
        "_1",
        "1.5",
        "k",
    ]
    read = "async texts => { const { parseLimit } = await import('/console/format.js'); return texts.map(attempt);"
    read += " function attempt(text) { try { return parseLimit(text); } catch { return 'refused'; } } }"

    def attempt(text):
        try:
            return parse_count(text)
        except ValueError:
            return "refused"

    assert page.evaluate(read, texts) == [attempt(text) for text in texts]
    assert page.evaluate(read, ["", "none", "No limit", "0", "-1"]) == [None, None, None, "refused", "refused"]


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
