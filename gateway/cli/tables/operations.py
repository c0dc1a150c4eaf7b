"""Renders lanes and live requests for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from gateway.pb import operations_pb2 as pb

ID_CHARS = 12


def lanes_table(lanes: Iterable[pb.LaneStatus]) -> Table:
    """Return a table with a row for each lane. Latencies are 50th / 95th / 99th percentiles in milliseconds."""
    table = Table(box=None)
    for title in ("lane", "mode"):
        table.add_column(title, no_wrap=True)
    for title in ("running", "waiting", "oldest wait", "TTFT ms", "ITL ms", "TTFT in time", "ITL in time", "preempted"):
        table.add_column(title, justify="right", no_wrap=True)
    for lane in lanes:
        table.add_row(*_lane_cells(lane))
    return table


def requests_table(requests: Iterable[pb.LiveRequest]) -> Table:
    table = Table(box=None)
    for title in ("id", "tenant", "key", "model", "lane", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("prompt", "cached", "generated", "of", "age"):
        table.add_column(title, justify="right", no_wrap=True)
    for request in requests:
        table.add_row(*_request_cells(request))
    return table


def _lane_cells(lane: pb.LaneStatus) -> Iterable[Text | str]:
    yield lane.lane
    yield Text(lane.mode, style="" if lane.mode == "open" else "yellow")
    yield f"{lane.running:,}"
    yield f"{lane.waiting:,}"
    yield f"{lane.oldest_wait_seconds:.1f} s" if lane.waiting else "-"
    yield _percentiles(lane.ttft_seconds)
    yield _percentiles(lane.itl_seconds)
    yield f"{lane.slo_ttft_attainment:.1%}"
    yield f"{lane.slo_itl_attainment:.1%}"
    yield f"{lane.preemptions:,}"


def _percentiles(seconds: pb.Percentiles) -> str:
    if not seconds.count:
        return "-"
    return " / ".join(f"{value * 1000:.0f}" for value in (seconds.p50, seconds.p95, seconds.p99))


def _request_cells(request: pb.LiveRequest) -> Iterable[Text]:
    texts = (request.id[:ID_CHARS], request.tenant, request.key, request.model, request.lane, request.state)
    counts = (request.prompt_tokens, request.cached_tokens, request.generated_tokens, request.max_tokens)
    yield from map(Text, texts)  # not parsed as markup: callers choose some of these texts
    yield from (Text(f"{count:,}") for count in counts)
    yield Text(f"{request.age_seconds:.1f} s")
