"""The console's memory: figures over time, requests that have ended, and what tenants used."""

import asyncio
from datetime import date

import pytest
from fakes import build_gateway_app
from records import make_record

from engine.core.messages.requests import Lane
from gateway.core.usage import Counts, RowName, UsageRow
from gateway.observe.history import COARSE_POINTS, FINE_KEPT, FINE_SECONDS, History
from gateway.observe.recent import KEPT, RecentRequestStore
from gateway.serve.sampling import HistorySampler
from gateway.usage import last_minute


class Clock:
    def __init__(self, now=1_000_000.0):
        self.now = now

    def __call__(self):
        return self.now


def test_half_an_hour_is_kept_point_by_point_and_a_day_by_the_minute():
    clock = Clock()
    history = History(clock)
    for number in range(3 * FINE_KEPT):
        clock.now += FINE_SECONDS
        history.add({"rate": float(number), "ttft": None if number % 2 else 1.0})
    fine, coarse = history.read(10), history.read(24 * 60)
    assert fine.step_seconds == FINE_SECONDS and len(fine.times) == 10 * 60 / FINE_SECONDS + 1
    assert fine.series["rate"][-1] == 3 * FINE_KEPT - 1 and fine.series["ttft"][-2:] == [1.0, None]
    assert coarse.step_seconds == FINE_SECONDS * COARSE_POINTS
    assert len(coarse.times) == 3 * FINE_KEPT // COARSE_POINTS
    assert coarse.series["rate"][0] == pytest.approx((COARSE_POINTS - 1) / 2)
    assert set(coarse.series["ttft"]) == {1.0}


def test_a_long_range_begins_with_the_first_point_and_ends_with_the_last():
    clock = Clock()
    history = History(clock)
    assert (history.latest("rate"), history.read(1440).times) == (None, [])
    for number in range(COARSE_POINTS + 2):
        clock.now += FINE_SECONDS
        history.add({"rate": float(number)})
    points = history.read(1440)
    assert points.times == [clock.now - 2 * FINE_SECONDS, clock.now]
    assert points.series["rate"] == [(COARSE_POINTS - 1) / 2, COARSE_POINTS + 0.5]
    assert (history.latest("rate"), history.latest("other")) == (COARSE_POINTS + 1, None)
    clock.now += 3 * FINE_SECONDS
    assert history.latest("rate") is None, "it is not current any more"


def test_history_is_bounded():
    clock = Clock()
    history = History(clock)
    for _ in range(1441 * COARSE_POINTS):
        clock.now += FINE_SECONDS
        history.add({"rate": 1.0})
    assert len(history._fine) == FINE_KEPT and len(history._coarse) == 1440


def test_a_figure_that_appears_later_is_unknown_before():
    history = History(Clock())
    history.add({"a": 1.0})
    history.add({"a": 2.0, "b": 3.0})
    assert history.read(1).series == {"a": [1.0, 2.0], "b": [None, 3.0]}


def record(status=200, code=""):
    return make_record(lane=Lane.BATCH, status=status, error_code=code)


def test_failures_are_remembered_behind_any_number_of_answers():
    recent = RecentRequestStore(Clock())
    recent.finished(record(429, "rate_limit_exceeded"))
    recent.finished(record(499))
    for _ in range(2 * KEPT):
        recent.finished(record())
    (failed,) = recent.read("failed", 10)
    assert (failed.status, failed.code, failed.tenant, failed.lane) == (429, "rate_limit_exceeded", "acme", "batch")
    assert failed.failed
    assert len(recent.read("all", 10_000)) == KEPT
    assert {request.status for request in recent.read("all", KEPT)} == {200}
    recent.finished(record(499))
    assert [(one.status, one.failed) for one in recent.read("all", 1)] == [(499, False)], "its client left"


class Books:
    """Usage books whose rows a test sets."""

    def __init__(self):
        self.found = {}

    async def rows(self, tenant, since, until):
        name = RowName("key", "", "interactive")
        yield [
            UsageRow(tenant, day, name, counts) for (tenant, day), counts in self.found.items() if since <= day <= until
        ]


async def test_the_last_minute_is_the_difference_of_two_looks_across_midnight(monkeypatch):
    days = [date(2026, 11, 23)]
    monkeypatch.setattr(last_minute, "today", lambda: days[-1])
    clock, books = Clock(), Books()
    seen = last_minute.LastMinute(books, clock)
    books.found[("acme", days[0])] = Counts(2, 100, 0, 50)
    first = (await seen.read())["acme"]
    assert (first.today.tokens, first.recently.tokens, first.window_seconds) == (150, 0, 0)
    clock.now += 30
    books.found[("acme", days[0])] = Counts(3, 110, 0, 60)
    days.append(date(2026, 11, 24))
    books.found[("acme", days[1])] = Counts(1, 5, 0, 5)
    books.found[("globex", days[1])] = Counts(1, 1, 0, 1)
    found = await seen.read()
    assert (found["acme"].today.tokens, found["acme"].recently.tokens, found["acme"].recently.requests) == (10, 30, 2)
    assert (found["globex"].recently.tokens, found["globex"].window_seconds) == (2, 30)
    clock.now += 45
    later = (await seen.read())["acme"]
    assert (later.recently.tokens, later.window_seconds) == (30, 75)
    clock.now += 10
    assert (await seen.read())["acme"].window_seconds == 85
    clock.now += 100
    assert (await seen.read())["acme"].window_seconds == 0, "no minute is 100 seconds long"
    clock.now += 5
    assert (await seen.read())["acme"].window_seconds == 5
    clock.now += 3600
    assert (await seen.read())["acme"].window_seconds == 0, "looks of an hour ago say nothing of the last minute"


async def test_sampled_figures_and_ended_requests_are_served_to_administrators(tmp_path):
    gateway_app = await build_gateway_app(tmp_path)
    sampler = HistorySampler(gateway_app.operations.of())
    await sampler.sample(1.0)
    gateway_app.operations.forget()
    async with gateway_app.client() as tenant, gateway_app.client("sk-admin") as admin:
        body = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert (await tenant.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await tenant.post("/v1/chat/completions", json={**body, "model": "none"})).status_code == 404
        await sampler.sample(2.0)
        history = (await admin.get("/admin/v1/history?minutes=5")).json()
        assert len(history["times"]) == 2 and history["series"]["tokens_per_second"][0] is None
        assert history["series"]["interactive.running"] == [2.0, 2.0]
        assert set(history["series"]) >= {"interactive.ttft_at_goal", "batch.itl_at_goal"}
        for _ in range(100):
            ended = (await admin.get("/admin/v1/requests/recent")).json()["requests"]
            if len(ended) == 2:
                break
            await asyncio.sleep(0.01)
        assert [(one["model"], one["status"]) for one in ended] == [("none", 404), ("pirate", 200)]
        failed = (await admin.get("/admin/v1/requests/recent?which=failed&limit=1")).json()["requests"]
        assert [one["code"] for one in failed] == ["model_not_found"]
        lanes = (await admin.get("/admin/v1/lanes")).json()["lanes"]
        assert [(lane["lane"], lane["attainment_goal"]) for lane in lanes] == [("interactive", 0.99), ("batch", 0.0)]
        engine = (await admin.get("/admin/v1/overview?sections=engine,tenants")).json()
        assert engine["engine"]["tokens_per_second"] == history["series"]["tokens_per_second"][1]
        assert engine["engine"]["served_name"] and {one["tenant"] for one in engine["tenants"]} >= {"acme"}
        for path in ("history?minutes=0", "history?minutes=1441", "history?hours=1", "requests/recent?which=some"):
            assert (await admin.get(f"/admin/v1/{path}")).status_code == 400, path
        assert (await tenant.get("/admin/v1/history")).status_code == 403
    await gateway_app.assert_empty()
