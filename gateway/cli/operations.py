"""`loralane lanes` and `loralane requests`: show, pause and drain lanes, and show and cancel live requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.live import Live
from rich.table import Table

from gateway.cli.address import LOCAL_URL, AdminUrl, grpc_target
from gateway.cli.as_admin import (
    DEMO_KEY,
    AdminKey,
    AsJson,
    console,
    show_messages,
    until_interrupted,
)
from gateway.cli.tables.operations import lanes_table, requests_table

if TYPE_CHECKING:
    from gateway.cli.clients.operations import OperationsClient

lanes = typer.Typer(help="See a running gateway's lanes, and pause or drain them.", no_args_is_help=True)
requests = typer.Typer(help="See a running gateway's live requests, and cancel them.", no_args_is_help=True)
T = TypeVar("T", bound=Message)

Lane = Annotated[str, typer.Argument(help="interactive or batch.")]
Watch = Annotated[bool, typer.Option("--watch", help="Go on, once a second, until Ctrl-C.")]


@lanes.command("ls")
def list_lanes(
    as_json: AsJson = False, watch: Watch = False, url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY
) -> None:
    """List lanes with their depth, oldest wait, latencies and goals met: `loralane lanes ls --watch`."""
    with _admin(url, key) as client:
        _show(client.lanes, lanes_table, as_json, watch)


@lanes.command()
def pause(lane: Lane, url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Pause a lane: running requests go on, all others wait: `loralane lanes pause batch`."""
    _set(lane, "pause", url, key)


@lanes.command()
def resume(lane: Lane, url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Open a lane again after a pause or a drain: `loralane lanes resume batch`."""
    _set(lane, "resume", url, key)


@lanes.command()
def drain(lane: Lane, url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Take no new requests into a lane, and let those it has taken finish: `loralane lanes drain batch`."""
    _set(lane, "drain", url, key)


@requests.command("ls")
def list_requests(
    as_json: AsJson = False, watch: Watch = False, url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY
) -> None:
    """List live requests of all gateways that share the engine: `loralane requests ls --watch`."""
    with _admin(url, key) as client:
        _show(client.requests, requests_table, as_json, watch)


@requests.command()
def cancel(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="As `ls` shows it, or its first six digits or more.")],
    url: AdminUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Cancel a request. The caller gets an error and pays for tokens generated: `loralane requests cancel 3f9a1c`."""
    with _admin(url, key) as client:
        ended = client.cancel(request_id)
    tokens = f"{ended.generated_tokens:,} of {ended.max_tokens:,} tokens"
    console.print(f"[green]{ended.id}[/green] of {ended.tenant} is cancelled, after {tokens}", highlight=False)


def _set(lane: str, action: str, url: str, key: str) -> None:
    with _admin(url, key) as client:
        status = client.set_lane(lane, action)
    left = f"{status.running:,} running, {status.waiting:,} waiting"
    console.print(f"[green]{status.lane}[/green] is {status.mode}: {left}", highlight=False)


def _show(look: Callable[[], Sequence[T]], table: Callable[[Sequence[T]], Table], as_json: bool, watch: bool) -> None:
    seen = look()
    if as_json or not watch:
        show_messages(table(seen), seen, as_json)
        return
    with Live(table(seen), console=Console()) as live, until_interrupted():
        while True:
            time.sleep(1.0)
            live.update(table(look()))


def _admin(url: str, key: str) -> AbstractContextManager[OperationsClient]:
    from gateway.cli.clients.admin import told
    from gateway.cli.clients.operations import OperationsClient

    return told(OperationsClient(grpc_target(url), key), url)
