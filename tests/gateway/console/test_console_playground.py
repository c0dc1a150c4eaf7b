"""The console's playground in a real browser: a chat as a tenant has it."""

from __future__ import annotations

import asyncio
from typing import Any

from console_page import until
from fakes import BASE

from engine.core.messages.requests import Lane


def copied_command(page: Any) -> str:
    """What the one button that copies a command puts on the clipboard."""
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.wasCopied = text; }")
    page.get_by_role("button", name="Copy as curl").click()
    return page.evaluate("window.wasCopied")


def test_the_playground_streams_as_a_tenant_and_never_as_the_administrator(console):
    page, engine = console.page, console.gateway.gateway_app.engine
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
    assert page.locator("#model").inner_text().split() == [BASE, "pirate", "captain"]
    page.locator("#model").select_option("pirate")
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
    page, engine = console.page, console.gateway.gateway_app.engine
    engine.go_on = asyncio.Event()
    console.enter_playground()
    page.get_by_label("Message").fill("hello")
    page.get_by_role("button", name="Send").click()
    until(lambda: page.locator(".said.assistant").inner_text() == "H")
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped", exact=True).wait_for()
    until(lambda: engine.ends)
    assert list(engine.ends.values()) == ["aborted"]
    assert '"content":"hello"' in copied_command(page), "what was stopped can be repeated, too"


def test_answers_are_formatted_and_can_be_repeated_with_curl(console):
    page, engine = console.page, console.gateway.gateway_app.engine
    engine.reply = lambda request: "# Ahoy\n- **one**\n- `two`\n\n```py\nx = '<b>'\n```"
    console.enter_playground()
    page.get_by_label("Message").fill("it's")
    page.get_by_label("Message").press("Enter")
    said = page.locator(".said.assistant")
    said.locator("pre code").wait_for()
    assert said.locator("pre code").inner_text() == "x = '<b>'" and said.locator("li").all_inner_texts() == [
        "one",
        "two",
    ]
    assert said.get_by_role("heading", name="Ahoy").count() == 1 and said.locator("li b").count() == 1
    command = copied_command(page)
    assert "sk-" not in command and "it'\\''s" in command and "$LORALANE_API_KEY" in command


def test_a_request_that_is_refused_can_be_repeated_with_curl(console):
    page = console.page
    console.enter_playground()
    page.get_by_label("Temperature").evaluate("field => { field.type = 'text'; field.value = '9'; }")
    page.get_by_label("Message").fill("hello")
    page.get_by_label("Message").press("Enter")
    page.locator(".facts .error").wait_for()
    assert '"temperature":9' in copied_command(page)


TABLE = "| Name | Price |\n|:-----|------:|\n| `a\\|b` | **3** |\n| <b>c</b> | 4 | five |\nafterwards"
LISTS = "1. one\n   goes on\n   - deep\n     * deeper\n   - again\n\n2. two\n\n- other\n\t- <i>inner</i>\n- last"


def test_tables_and_lists_inside_lists_keep_their_shape(console):
    page, engine = console.page, console.gateway.gateway_app.engine
    engine.reply = lambda request: f"{TABLE}\n\n{LISTS}"
    console.enter_playground(most_tokens=250)
    page.get_by_label("Message").fill("hello")
    page.get_by_label("Message").press("Enter")
    said = page.locator(".said.assistant.formatted")
    said.locator("table").wait_for()
    assert said.locator("th").all_inner_texts() == ["Name", "Price"]
    assert said.locator("td").all_inner_texts() == ["a|b", "3", "<b>c</b>", "4"]
    assert (
        said.locator("td b").count() == 1
        and said.locator("td").nth(1).evaluate("cell => cell.style.textAlign") == "right"
    )
    assert [item.split("\n")[0] for item in said.locator("ol > li").all_inner_texts()] == ["one", "two"]
    assert said.locator("ol > li > ul > li > ul > li").all_inner_texts() == ["deeper"]
    assert said.locator("ol > li:first-child > ul > li").count() == 2
    assert said.locator(":scope > ul > li").count() == 2
    assert said.locator(":scope > ul > li > ul > li").all_inner_texts() == ["<i>inner</i>"]
