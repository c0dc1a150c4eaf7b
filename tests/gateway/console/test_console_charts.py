"""The console's charts in a real browser."""

from __future__ import annotations

import time

from console_page import until

from engine.pb import engine_pb2 as pb


def test_charts_have_axes_a_goal_and_values_under_the_keys(console):
    page, operations = console.page, console.gateway.gateway_app.operations
    for rate in (100.0, 250.0):
        point = {
            "tokens_per_second": rate,
            "interactive.ttft_at_goal": 0.4,
            "batch.ttft_at_goal": 1.5,
            "interactive.running": 3.0,
        }
        operations.of("").history.add(point)
    console.enter()
    chart = page.get_by_role("img", name="Generated tokens a second")
    until(lambda: "Now: generated 250" in (chart.get_attribute("aria-label") or ""))
    assert chart.locator(".ticks text").all_text_contents()[:3] == ["0", "100", "200"]
    first = page.get_by_role("img", name="First token, interactive lane")
    assert (first.locator(".goal-text").text_content() or "").startswith("goal 500 ms")
    assert "Now: p99 400 ms." in first.get_attribute("aria-label"), "the percentile that the lane promises"
    batch = page.get_by_role("img", name="First token, batch lane")
    assert "Now: p95 1.5 s." in batch.get_attribute("aria-label"), "no share is promised there"
    chart.focus()
    page.keyboard.press("ArrowLeft")
    page.get_by_text("generated 250").wait_for()
    page.keyboard.press("ArrowLeft")
    page.get_by_text("generated 100").wait_for()
    with page.expect_request(lambda request: "minutes=1440" in request.url):
        page.get_by_label("Time range").select_option("1440")


def test_a_lane_is_coloured_by_its_own_promise(console):
    page, engine = console.page, console.gateway.gateway_app.engine
    console.enter()
    meter = page.get_by_role("region", name="Lane interactive").get_by_role("meter", name="First token in time")
    meter.wait_for()
    for attained, colour in ((0.979, "poor"), (0.985, "fair"), (0.991, "good")):
        engine.picture = pb.EngineStats(
            lanes=[pb.LaneStats(lane=pb.LANE_INTERACTIVE, mode=pb.LANE_MODE_OPEN, slo_ttft_attainment=attained)]
        )
        until(lambda: meter.get_attribute("aria-valuenow") == str(attained))  # noqa: B023
        assert meter.get_attribute("class") == f"use {colour}"


def test_a_value_that_is_pointed_at_stays_while_time_goes_on(console):
    page, history = console.page, console.gateway.gateway_app.operations.of("").history
    begun = time.time()
    for age, rate in ((60, 100.0), (30, 250.0), (0, 300.0)):
        history._clock = lambda: begun - age  # noqa: B023
        history.add({"tokens_per_second": rate})
    history._clock = time.time
    console.enter()
    chart = page.get_by_role("img", name="Generated tokens a second")
    until(lambda: "Now: generated 300" in (chart.get_attribute("aria-label") or ""))
    box = chart.bounding_box()
    inner = box["width"] - 54  # of ten minutes, between the margins
    page.mouse.move(box["x"] + 46 + inner * (1 - 31 / 600), box["y"] + box["height"] / 2)
    tip = page.locator(".plot", has=chart).locator(".tip")
    assert "generated 250" in tip.inner_text()
    history.add({"tokens_per_second": 400.0})
    until(lambda: "Now: generated 400" in chart.get_attribute("aria-label"))
    assert "generated 250" in tip.inner_text(), "not what has moved below the pointer"
    page.mouse.move(box["x"] + 46 + inner * 0.2, box["y"] + 5)
    assert "generated 100" in tip.inner_text(), "the nearest point"
    page.mouse.move(box["x"], box["y"] + box["height"] + 60)
    tip.wait_for(state="hidden")


def test_the_headline_is_of_now_on_every_range(console):
    page, history = console.page, console.gateway.gateway_app.operations.of("").history
    for rate in (100.0, 200.0):
        history.add({"tokens_per_second": rate})
    console.enter()
    figure = page.get_by_role("region", name="Machine").locator(".figure")
    until(lambda: figure.inner_text() == "200")
    page.get_by_label("Time range").select_option("1440")
    chart = page.get_by_role("img", name="Generated tokens a second")
    until(lambda: "last 1440 minutes. Now: generated 150" in chart.get_attribute("aria-label"))
    history.add({"tokens_per_second": 900.0})
    until(lambda: figure.inner_text() == "900")
