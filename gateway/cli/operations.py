"""`loralane lanes` and `loralane requests`: show, pause and drain lanes, and show and cancel live requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, TypeVar

import typer
from google.protobuf.message import Message
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.cli.http import AdminClient
from gateway.cli.options import (
    DEMO_KEY,
    LOCAL_URL,
    AdminKey,
    AdminUrl,
    AsJson,
    console,
    grpc_target,
    show_messages,
    until_interrupted,
)
from gateway.pb import operations_pb2 as pb
from gateway.pb import operations_pb2_grpc as pb_grpc
from gateway.terminal.console import Console

lanes = typer.Typer(help="Show a running gateway's lanes, and pause or drain them.", no_args_is_help=True)
requests = typer.Typer(help="Show a running gateway's live requests, and cancel them.", no_args_is_help=True)
T = TypeVar("T", bound=Message)

Lane = Annotated[str, typer.Argument(help="Name of the lane: interactive or batch.")]
Model = Annotated[str, typer.Option(help="Name of a base model; default: all.")]
OneModel = Annotated[str, typer.Option(help="Base model whose lane it is; needed if the gateway serves several.")]
Watch = Annotated[bool, typer.Option("--watch", help="Refresh the table every second until Ctrl-C.")]


@lanes.command("ls")
def list_lanes(
    model: Model = "",
    as_json: AsJson = False,
    watch: Watch = False,
    url: AdminUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """List lanes with their depth, oldest wait, latencies and goals met: `loralane lanes ls --watch`."""
    with admin(url, key) as client:
        show(lambda: client.lanes(model), lanes_table, as_json, watch)


@lanes.command()
def pause(lane: Lane, model: OneModel = "", url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Pause a lane: running requests go on, all others wait: `loralane lanes pause batch`."""
    _set(lane, "pause", model, url, key)


@lanes.command()
def resume(lane: Lane, model: OneModel = "", url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Open a lane again after a pause or a drain: `loralane lanes resume batch`."""
    _set(lane, "resume", model, url, key)


@lanes.command()
def drain(lane: Lane, model: OneModel = "", url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Drain a lane: refuse new requests, and let accepted ones finish: `loralane lanes drain batch`."""
    _set(lane, "drain", model, url, key)


@requests.command("ls")
def list_requests(
    model: Model = "",
    as_json: AsJson = False,
    watch: Watch = False,
    url: AdminUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """List live requests of all gateways that share the engine: `loralane requests ls --watch`."""
    with admin(url, key) as client:
        show(lambda: client.requests(model), requests_table, as_json, watch)


@requests.command()
def cancel(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Request id, or at least its first 6 characters.")],
    url: AdminUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Cancel a request. Its client gets an error; tokens so far are charged: `loralane requests cancel 3f9a1c`."""
    with admin(url, key) as client:
        ended = client.cancel(request_id)
    tokens = f"{ended.generated_tokens:,} of {ended.max_tokens:,} tokens"
    console.print(f"[green]{ended.id}[/green] of {ended.tenant} is cancelled, after {tokens}", highlight=False)


def _set(lane: str, action: str, model: str, url: str, key: str) -> None:
    with admin(url, key) as client:
        status = client.set_lane(lane, action, model)
    left = f"{status.running:,} running, {status.waiting:,} waiting"
    console.print(f"[green]{status.lane}[/green] is {status.mode}: {left}", highlight=False)


def show(look: Callable[[], Sequence[T]], table: Callable[[Sequence[T]], Table], as_json: bool, watch: bool) -> None:
    """Print what `look` returns as a table or as JSON; with `watch`, refresh the table every second until Ctrl-C."""
    seen = look()
    if as_json or not watch:
        show_messages(table(seen), seen, as_json)
        return
    with Live(table(seen), console=Console()) as live, until_interrupted():
        while True:
            time.sleep(1.0)
            live.update(table(look()))


def admin(url: str, key: str) -> AbstractContextManager[OperationsClient]:
    """Return a context manager that connects to a gateway's admin services, and reports errors to the user."""
    from gateway.cli.http import reporting_errors

    return reporting_errors(OperationsClient(grpc_target(url), key), url)


class OperationsClient(AdminClient):
    def __init__(self, target: str, key: str) -> None:
        super().__init__(target, key)
        self._engines = pb_grpc.EngineAdminStub(self._channel)
        self._lanes = pb_grpc.LaneAdminStub(self._channel)
        self._requests = pb_grpc.RequestAdminStub(self._channel)

    def lanes(self, model: str = "") -> Sequence[pb.LaneStatus]:
        return self._lanes.List(pb.ListLanesRequest(model=model), metadata=self._metadata).lanes

    def set_lane(self, lane: str, action: str, model: str = "") -> pb.LaneStatus:
        """Change a lane's mode on the gateway, and return its new status. `action` is pause, drain or resume; `model`
        is needed only if the gateway serves several base models."""
        return self._lanes.Set(pb.SetLaneRequest(lane=lane, action=action, model=model), metadata=self._metadata)

    def engines(self, model: str = "") -> Sequence[pb.EngineOverview]:
        return self._engines.List(pb.ListEnginesRequest(model=model), metadata=self._metadata).engines

    def set_engine(self, request: pb.SetEngineRequest) -> pb.EngineOverview:
        """Change an engine's state on the gateway, and return its new state."""
        return self._engines.Set(request, metadata=self._metadata)

    def add_engine(self, name: str, address: str, model: str, role: str = "") -> pb.EngineOverview:
        """Add an engine for all gateways, and return its state."""
        request = pb.AddEngineRequest(engine=name, address=address, model=model, role=role)
        return self._engines.Add(request, metadata=self._metadata)

    def remove_engine(self, name: str, model: str) -> None:
        self._engines.Remove(pb.RemoveEngineRequest(engine=name, model=model), metadata=self._metadata)

    def requests(self, model: str = "") -> Sequence[pb.LiveRequest]:
        return self._requests.List(pb.ListRequestsRequest(model=model), metadata=self._metadata).requests

    def cancel(self, request_id: str) -> pb.LiveRequest:
        return self._requests.Cancel(pb.CancelRequestRequest(id=request_id), metadata=self._metadata)


ID_CHARS = 12


def lanes_table(lanes: Iterable[pb.LaneStatus]) -> Table:
    """Return a table with a row for each lane. Latencies are shown as p50 / p95 / p99, in milliseconds."""
    table = Table(box=None)
    for title in ("model", "lane", "mode"):
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
