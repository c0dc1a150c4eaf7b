"""The dashboard of several gateways and engines shows metrics that gateways expose, by labels that they have."""

import json
import re

import pytest
from fakes import build_gateway_app
from objects import CHART
from prometheus_client.parser import text_string_to_metric_families
from records import make_record

from engine.pb import engine_pb2 as pb
from gateway.core.limits import Scope

CHAT = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}]}
SERIES = re.compile(r"\b((?:loralane_|vllm:)\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
FOR_EVERY_TARGET = {"instance", "job", "le"}
SELECTORS = {"instance": "instance", "model": "model_name"}
"""Variable of the dashboard -> label that it selects by."""


@pytest.fixture
async def exposed(tmp_path) -> dict[str, set[str]]:
    """Labels of every series of a gateway in which all has happened that the dashboard shows, by the series' name."""
    gateway_app = await build_gateway_app(tmp_path)
    gateway_app.engine.picture = pb.EngineStats(
        lanes=[pb.LaneStats(lane=pb.LANE_INTERACTIVE), pb.LaneStats(lane=pb.LANE_BATCH)],
        adapters=[pb.AdapterStats(adapter=version, state="resident") for version in gateway_app.engine.paths],
    )
    gateway_app.metrics.finished(make_record(base_model="tiny", routes=["home"], moves=[0.5], finish="stop"))
    await gateway_app.limiter.set_limits(Scope("acme"), {"tokens_per_day": 1})
    async with gateway_app.client() as client:
        await client.post("/v1/chat/completions", json=CHAT)
    async with gateway_app.client("sk-globex") as client:
        await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 200})
    async with gateway_app.client("sk-admin") as client:
        text = (await client.get("/metrics")).text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, {"instance"}).update(sample.labels)
    return labels


def dashboard():
    return json.loads((CHART / "dashboards" / "cluster.json").read_text())


def expressions():
    """Return (title, expression) of every line of every panel."""
    return [(panel["title"], target["expr"]) for panel in dashboard()["panels"] for target in panel.get("targets", ())]


async def test_every_panel_shows_metrics_and_labels_that_exist(exposed):
    for title, expr in expressions():
        series = SERIES.findall(expr)
        assert series, title
        assert {name for name, _ in series} - exposed.keys() == set(), title
        known = FOR_EVERY_TARGET.union(*(exposed[name] for name, _ in series))
        grouped = {label.strip() for found in GROUPED.findall(expr) for label in found.split(",")}
        assert grouped - known == set(), title
        for name, matchers in series:
            assert set(re.findall(r"(\w+)\s*[=!]", matchers)) - exposed[name] == set(), (title, name)


async def test_every_panel_obeys_the_selectors_whose_labels_its_series_have(exposed):
    for title, expr in expressions():
        for name, matchers in SERIES.findall(expr):
            for variable, label in SELECTORS.items():
                if label in exposed[name]:
                    assert f'{label}=~"${variable}"' in matchers, (title, name)


async def test_autoscaling_asks_for_metrics_that_exist(exposed):
    values = (CHART / "values.yaml").read_text()
    asked = {name for name, _ in SERIES.findall(values)}
    assert {"loralane_requests_waiting", "loralane_oldest_wait_seconds"} <= asked
    assert asked - exposed.keys() == set()


def test_it_shows_what_operators_of_a_cluster_look_for():
    shown = " ".join(expr for _, expr in expressions())
    for name in (
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "slo_goal_seconds", "slo_attainment"),
        *("requests_waiting", "generated_tokens_total", "kv_pages", "adapters", "routing_decisions_total"),
        "limiter_refusals_total",
    ):
        assert f"loralane_{name}" in shown


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        assert grid["x"] + grid["w"] <= 24
        taken |= cells
