"""`loralane lanes` and `loralane requests`: show, pause and drain lanes, and show and cancel live requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar, cast

import typer
from msgspec import Struct
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.api_schema.traffic import LaneStatus, LiveRequest, Percentiles
from gateway.cli.http import admin
from gateway.cli.options import (
    DEMO_KEY,
    LOCAL_URL,
    AdminKey,
    AsJson,
    ServerUrl,
    console,
    show_answers,
    until_interrupted,
)
from gateway.core.lanes import LaneName
from gateway.terminal.console import Console

lanes = typer.Typer(help="Show a running gateway's lanes, and pause or drain them.", no_args_is_help=True)
requests = typer.Typer(help="Show a running gateway's live requests, and cancel them.", no_args_is_help=True)
T = TypeVar("T", bound=Struct)

Lane = Annotated[str, typer.Argument(help="Name of the lane: interactive or batch.")]
Model = Annotated[str, typer.Option(help="Name of a base model; default: all.")]
OneModel = Annotated[str, typer.Option(help="Base model whose lane it is; needed if the gateway serves several.")]
Watch = Annotated[bool, typer.Option("--watch", help="Refresh the table every second until Ctrl-C.")]


@lanes.command("ls")
def list_lanes(
    model: Model = "",
    as_json: AsJson = False,
    watch: Watch = False,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """List lanes with their depth, oldest wait, latencies and goals met: `loralane lanes ls --watch`."""
    with admin(url, key) as client:
        show(lambda: client.lanes(model), lanes_table, as_json, watch)


@lanes.command()
def pause(lane: Lane, model: OneModel = "", url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Pause a lane: running requests go on, all others wait: `loralane lanes pause batch`."""
    _set(lane, "pause", model, url, key)


@lanes.command()
def resume(lane: Lane, model: OneModel = "", url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Open a lane again after a pause or a drain: `loralane lanes resume batch`."""
    _set(lane, "resume", model, url, key)


@lanes.command()
def drain(lane: Lane, model: OneModel = "", url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Drain a lane: refuse new requests, and let accepted ones finish: `loralane lanes drain batch`."""
    _set(lane, "drain", model, url, key)


@requests.command("ls")
def list_requests(
    model: Model = "",
    as_json: AsJson = False,
    watch: Watch = False,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """List live requests of all gateways that share the engine: `loralane requests ls --watch`."""
    with admin(url, key) as client:
        show(lambda: client.live_requests(model).requests, requests_table, as_json, watch)


@requests.command()
def cancel(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Request id, or at least its first 6 characters.")],
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Cancel a request. Its client gets an error; tokens so far are charged: `loralane requests cancel 3f9a1c`."""
    with admin(url, key) as client:
        ended = client.cancel_request(request_id)
    tokens = f"{ended.generated_tokens:,} of {ended.max_tokens:,} tokens"
    console.print(f"[green]{ended.id}[/green] of {ended.tenant} is cancelled, after {tokens}", highlight=False)


def _set(lane: str, action: str, model: str, url: str, key: str) -> None:
    with admin(url, key) as client:
        change = {"pause": client.pause_lane, "resume": client.resume_lane, "drain": client.drain_lane}[action]
        status = change(cast(LaneName, lane), model)  # the gateway refuses what is no lane
    left = f"{status.running:,} running, {status.waiting:,} waiting"
    console.print(f"[green]{status.lane}[/green] is {status.mode}: {left}", highlight=False)


def show(look: Callable[[], Sequence[T]], table: Callable[[Sequence[T]], Table], as_json: bool, watch: bool) -> None:
    """Print what `look` returns as a table or as JSON; with `watch`, refresh the table every second until Ctrl-C."""
    seen = look()
    if as_json or not watch:
        show_answers(table(seen), seen, as_json)
        return
    with Live(table(seen), console=Console()) as live, until_interrupted():
        while True:
            time.sleep(1.0)
            live.update(table(look()))


ID_CHARS = 12


def lanes_table(lanes: Iterable[LaneStatus]) -> Table:
    """Return a table with a row for each lane. Latencies are shown as p50 / p95 / p99, in milliseconds."""
    table = Table(box=None)
    for title in ("model", "lane", "mode"):
        table.add_column(title, no_wrap=True)
    for title in ("running", "waiting", "oldest wait", "TTFT ms", "ITL ms", "TTFT in time", "ITL in time", "preempted"):
        table.add_column(title, justify="right", no_wrap=True)
    for lane in lanes:
        table.add_row(*_lane_cells(lane))
    return table


def requests_table(requests: Iterable[LiveRequest]) -> Table:
    table = Table(box=None)
    for title in ("id", "tenant", "key", "model", "lane", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("prompt", "cached", "generated", "of", "age"):
        table.add_column(title, justify="right", no_wrap=True)
    for request in requests:
        table.add_row(*_request_cells(request))
    return table


def _lane_cells(lane: LaneStatus) -> Iterable[Text | str]:
    yield Text(lane.model)
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


def _percentiles(seconds: Percentiles) -> str:
    values = [value for value in (seconds.p50, seconds.p95, seconds.p99) if value is not None]
    return " / ".join(f"{value * 1000:.0f}" for value in values) or "-"


def _request_cells(request: LiveRequest) -> Iterable[Text]:
    texts = (request.id[:ID_CHARS], request.tenant, request.key, request.model, request.lane, request.state)
    counts = (request.prompt_tokens, request.cached_tokens, request.generated_tokens, request.max_tokens)
    yield from map(Text, texts)  # not parsed as markup: callers choose some of these texts
    yield from (Text(f"{count:,}") for count in counts)
    yield Text(f"{request.age_seconds:.1f} s")
