"""What /metrics exposes, what docs/metrics.md says of it, what dashboards and alerts make of it: one and the same."""

import asyncio
import json
import re
from collections import Counter
from decimal import Decimal
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from fakes import GatewayApp, build_gateway_app, grammar_pool
from prometheus_client.parser import text_string_to_metric_families

from engine.core.config import BATCH_GOALS, INTERACTIVE_GOALS
from engine.core.messages.requests import Lane, ProposalCount
from engine.pb import engine_pb2 as pb
from gateway.batches.setup import BatchMetrics
from gateway.batches.webhooks.setup import WebhookMetrics
from gateway.core.limits import Scope
from gateway.core.space import Disk
from gateway.observe.engine_metrics import EngineSnapshot
from gateway.observe.metrics import FIRST_TOKEN, TOKEN
from gateway.observe.process_metrics import DiskMetrics, GrammarMetrics, LoopMetrics, UsageMetrics
from gateway.requests.record import RequestRecord
from gateway.requests.route_outcome import MemberTokens, RouteOutcome
from gateway.requests.times import RequestTimes
from gateway.virtual_models.cost import Costs

ROOT = Path(__file__).resolve().parents[3]
CHAT = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}]}
LABELLED = re.compile(r"`([a-z_]+)`")
NAMED = re.compile(r"`([a-z_:0-9]+)`(?: \((histogram|summary)\))?")
CELL_EDGE = re.compile(r"(?<!\\)\|")
NAME, LABELS = range(2)

BY_LANE = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds"),
    *("request_duration_seconds", "queue_time_seconds", "requests_running", "requests_waiting"),
    *("slo_attainment", "vtc_gap_seconds", "vtc_bound_seconds"),
)
PROMISED = (
    *("kv_pages", "adapter_pages", "free_pages", "preemptions_total", "recomputed_tokens_total"),
    *("adapter_loads_total", "adapter_evictions_total", "adapter_load_seconds_total"),
    *("step_predicted_seconds_total", "step_actual_seconds_total"),
    *("tokens_total", "limiter_decisions_total", "limiter_mode"),
)
ROUTERS = (
    *("lora_requests_info", "lora_adapter_loaded", "num_gpu_loaded_lora_adapters", "max_gpu_lora_adapters"),
    *("lora_adapter_load_seconds", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
)


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    """A gateway in which every event has happened that a metric counts, so that every series exists."""
    gateway_app = await build_gateway_app(tmp_path)
    gateway_app.metrics.register(UsageMetrics(SimpleNamespace(undelivered_tokens=0, lost_tokens=0)))
    gateway_app.metrics.register(DiskMetrics(Disk(tmp_path)))
    gateway_app.metrics.register(
        BatchMetrics(SimpleNamespace(leases={}, open=0, backlog=Counter()), {"tiny": SimpleNamespace(in_flight=0)})
    )
    gateway_app.metrics.register(LoopMetrics(asyncio.get_running_loop()))
    gateway_app.metrics.register(GrammarMetrics(grammar_pool()))
    gateway_app.metrics.register(WebhookMetrics(()))
    gateway_app.engine.picture = pb.EngineStats(
        lanes=[pb.LaneStats(lane=pb.LANE_INTERACTIVE), pb.LaneStats(lane=pb.LANE_BATCH)],
        tenants=[pb.TenantStats(tenant="acme", device_seconds=1.0)],
        preemptions_by_cause={"pages": 3},
        kv_fetches={"done": 1},
        steps=1,
        step_sequences=pb.Buckets(counts=[1]),
        step_tokens=pb.Buckets(counts=[1]),
        yield_seconds=pb.Buckets(bounds=[0.1], counts=[0, 1], sum=0.2),
        adapter_loads=2,
        adapters=[
            pb.AdapterStats(adapter=version, state="resident", loads=2, fetches=1)
            for version in gateway_app.engine.paths
        ],
    )
    for record in (moved_record(), broken_record()):
        gateway_app.metrics.finished(record)
    tokens, price = MemberTokens("tiny", 1, 1), Costs(Decimal(1), Decimal(2))
    gateway_app.metrics.routed(RouteOutcome("auto", "tiny", "first", [tokens], price))
    await gateway_app.limiter.set_limits(Scope("acme"), {"tokens_per_day": 1, "shadow": ["tokens_per_day"]})
    async with gateway_app.client() as client:
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/chat/completions", content=b"{")
    async with gateway_app.client("sk-globex") as client:
        await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 200})
    return gateway_app


def moved_record() -> RequestRecord:
    """A request that went on in another engine process, which proposed tokens."""
    record = RequestRecord("id", "id", "acme", "key", "tiny", None, Lane.INTERACTIVE, RequestTimes(0.0))
    record.note_move(0.5)
    record.proposals[0] = (ProposalCount("prompt", 2, 1),)
    record.end("stop", 200)
    return record


def broken_record() -> RequestRecord:
    record = RequestRecord("id", "id", "acme", "key", "tiny", None, Lane.INTERACTIVE, RequestTimes(0.0))
    record.end("error", 500, "model_output_invalid")
    return record


async def families(gateway_app: GatewayApp):
    async with gateway_app.client("sk-admin") as client:
        text = (await client.get("/metrics")).text
    return list(text_string_to_metric_families(text))


def exposed_name(family) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def exposed(family) -> tuple[str, str, frozenset[str]]:
    labels = {label for sample in family.samples for label in sample.labels}
    return exposed_name(family), family.type, frozenset(labels - {"le"})


def documented() -> list[tuple[str, str, frozenset[str]]]:
    """Name, type and labels of every metric: those of its row, and those that its table's head names for all rows.

    The type is the one in brackets behind the name, else a counter if the name ends in `_total`, else a gauge.
    """
    found, common = [], frozenset[str]()
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in CELL_EDGE.split(line)]
        if line.startswith("name |"):
            common = frozenset(LABELLED.findall(cells[LABELS]))
        elif line.startswith("`") and " | " in line:
            labels = common | frozenset(LABELLED.findall(cells[LABELS]))
            name, kind = NAMED.fullmatch(cells[NAME]).groups()
            found.append((name, kind or ("counter" if name.endswith("_total") else "gauge"), labels))
    return found


async def test_the_document_lists_what_is_exposed_and_nothing_else(gateway_app):
    rows = documented()
    assert len(rows) == len(set(rows))
    told = {exposed(family) for family in await families(gateway_app)}
    assert set(rows) - told == set()
    assert told - set(rows) == set()


def test_names_of_durations_end_in_seconds():
    for name, kind, _ in documented():
        if not name.startswith("vllm:"):
            assert name.endswith(("_seconds", "_sequences")) or kind not in ("histogram", "summary"), name


async def test_all_that_was_promised_is_there(gateway_app):
    labels = {name: labels for name, _, labels in map(exposed, await families(gateway_app))}
    promised = {f"loralane_{name}" for name in (*PROMISED, *BY_LANE)} | {f"vllm:{name}" for name in ROUTERS}
    assert promised - labels.keys() == set()
    assert [name for name in BY_LANE if "lane" not in labels[f"loralane_{name}"]] == []
    wanted = {"model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    assert labels["vllm:lora_requests_info"] == wanted


async def test_every_histogram_is_whole_and_every_sample_has_happened(gateway_app):
    told = await families(gateway_app)
    assert [family.name for family in told if not family.samples] == []
    for family in told:
        if family.type == "histogram":
            counts = {s.labels.get("lane"): s.value for s in family.samples if s.name.endswith("_count")}
            ends = {s.labels.get("lane"): s.value for s in family.samples if s.labels.get("le") == "+Inf"}
            assert counts == ends
            assert sum(counts.values()) > 0


def test_goals_are_bounds_so_that_attainment_can_be_read_off():
    for goals in (INTERACTIVE_GOALS, BATCH_GOALS):
        assert goals.ttft_s in FIRST_TOKEN
        assert goals.itl_s in TOKEN


# PromQL, as far as needed to find the metrics in it

GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
KEYWORDS = {"and", "or", "unless", "bool", "offset", "group_left", "group_right", "on", "by"}


def metrics_of(expression: str) -> set[str]:
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', "", GROUPING.sub(" ", expression))
    words = re.findall(r"[A-Za-z_:][\w:]*(?!\s*\(|[\w:])", bare)
    return set(words) - KEYWORDS


def labels_of(expression: str) -> set[str]:
    grouped = {label.strip() for found in GROUPING.findall(expression) for label in found.split(",")}
    matched = {
        label for braces in re.findall(r"\{[^}]*\}", expression) for label in re.findall(r"(\w+)\s*[=!]", braces)
    }
    return grouped | matched


def rules():
    groups = yaml.safe_load((ROOT / "configs" / "prometheus" / "loralane.rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels():
    dashboard = json.loads((ROOT / "configs" / "grafana" / "loralane.json").read_text())
    return dashboard, dashboard["panels"]


def expressions():
    alerts = {rule["alert"]: [rule["expr"]] for rule in rules()}
    drawn = {
        f"{panel['id']} {panel['title']}": [target["expr"] for target in panel.get("targets", ())]
        for panel in panels()[1]
    }
    return [(name, expr) for name, exprs in [*alerts.items(), *drawn.items()] for expr in exprs]


async def test_dashboards_and_alerts_name_only_metrics_and_labels_that_exist(gateway_app):
    labels = {}
    for family in await families(gateway_app):
        for name in {sample.name for sample in family.samples}:
            labels[name] = exposed(family)[2] | {"le", "instance", "job"}
    labels["up"] = {"job", "instance"}
    for where, expr in expressions():
        named = metrics_of(expr)
        assert named, where
        assert named - labels.keys() == set(), where
        assert labels_of(expr) - {""} - set().union(*(labels[name] for name in named)) == set(), where


SELECTORS = {"instance": "instance", "tenant": "tenant", "adapter": "adapter", "model": "model_name"}
"""Variable of the dashboard -> label that it selects by."""
SERIES = re.compile(r"([A-Za-z_][\w:]*)\{([^}]*)\}")


async def test_every_panel_obeys_the_selectors_whose_labels_its_series_have(gateway_app):
    labels = {}
    for family in await families(gateway_app):
        for sample in family.samples:
            labels.setdefault(sample.name, {"instance"}).update(sample.labels)
    used = set()
    for panel in panels()[1]:
        for target in panel.get("targets", ()):
            series = SERIES.findall(target["expr"])
            assert {name for name, _ in series} == metrics_of(target["expr"]), panel["title"]
            for name, matchers in series:
                wanted = {variable for variable, label in SELECTORS.items() if label in labels[name]}
                missed = {one for one in wanted if f'{SELECTORS[one]}=~"${one}"' not in matchers}
                assert not missed, (panel["title"], name)
                used |= wanted
    assert used == SELECTORS.keys()


CHART_DASHBOARD = ROOT / "deploy" / "helm" / "loralane" / "dashboards" / "cluster.json"
AGGREGATED = re.compile(r"(?:(\w+)(?: by \([^)]*\))? ?\((?:(?:rate|deriv)\()?)?((?:loralane_|vllm:)\w+)\{")
"""The aggregation right around a series, if there is one, and the name of the series."""


@pytest.mark.parametrize(
    "path", [ROOT / "configs" / "grafana" / "loralane.json", CHART_DASHBOARD], ids=["one", "chart"]
)
def test_dashboards_do_not_count_an_engine_once_for_each_gateway_that_uses_it(path):
    stats = pb.EngineStats(
        lanes=[pb.LaneStats()], tenants=[pb.TenantStats(tenant="acme")], adapters=[pb.AdapterStats(adapter="a")]
    )
    told = EngineSnapshot("tiny", pb.EngineInfo(), stats, {"a": ["pirate"]}).families()
    of_engines = {exposed_name(family) for family in told}
    found = [
        (aggregation, name, expr)
        for panel in json.loads(path.read_text())["panels"]
        for expr in (target["expr"] for target in panel.get("targets", ()))
        for aggregation, name in AGGREGATED.findall(expr)
        if name in of_engines
    ]
    assert len(found) >= 10
    assert [one for one in found if one[0] not in ("max", "min")] == []


async def test_the_values_of_every_selector_are_labels_of_a_series_that_exists(gateway_app):
    told = {sample.name: sample.labels for family in await families(gateway_app) for sample in family.samples}
    dashboard, _ = panels()
    chosen = {item["name"]: item["query"]["query"] for item in dashboard["templating"]["list"][1:]}
    assert chosen.keys() == SELECTORS.keys()
    for variable, query in chosen.items():
        name, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()
        assert label == SELECTORS[variable] and label in told[name].keys() | {"instance"}


async def test_panels_of_adapters_draw_no_more_than_the_busiest():
    _, drawn = panels()
    rows = [index for index, panel in enumerate(drawn) if panel["type"] == "row"]
    first = next(index for index in rows if drawn[index]["title"] == "Adapters' traffic")
    traffic = drawn[first + 1 : min(index for index in rows if index > first)]
    exprs = [target["expr"] for panel in traffic for target in panel["targets"]]
    assert len(exprs) >= 4 and all("topk(10, " in expr for expr in exprs)


def test_the_reader_of_promql_sees_what_is_there():
    expr = 'sum by (lane, le) (rate(a_bucket{x="b", y!~"c"}[5m])) / on (z) group_left sum(vllm:d) > 0.5 and e{} == 1'
    assert metrics_of(expr) == {"a_bucket", "vllm:d", "e"}
    assert labels_of(expr) == {"lane", "le", "x", "y", "z"}


def test_every_alert_is_explained_and_no_other():
    text = (ROOT / "docs" / "observability.md").read_text()
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    assert re.findall(r"^### (Loralane\w+)$", text, re.M) == names
    assert {rule["labels"]["severity"] for rule in rules()} == {"page", "ticket"}
    assert all(rule["annotations"]["summary"] for rule in rules())
    runbooks = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules()}
    assert runbooks == {name: f"docs/observability.md#{name.lower()}" for name in names}


def test_the_dashboard_fits_together():
    dashboard, drawn = panels()
    assert len({panel["id"] for panel in drawn}) == len(drawn)
    assert {item["name"] for item in dashboard["templating"]["list"]} == {"datasource", *SELECTORS}
    for panel in drawn:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["description"] and panel["datasource"]["uid"] == "${datasource}"
    assert not [pair for pair in combinations(drawn, 2) if overlap(*(panel["gridPos"] for panel in pair))]


def overlap(one, other) -> bool:
    spans = (("x", "w"), ("y", "h"))
    return all(one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in spans)
