"""`loralane gateways`: shows the gateways that share one Redis, and drains them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from gateway.api_schema.gateways import GatewayOverview
from gateway.cli.http import admin
from gateway.cli.operations import Watch, show
from gateway.cli.options import DEMO_KEY, LOCAL_URL, AdminKey, AsJson, ServerUrl, console

app = typer.Typer(help="Show running gateways, and drain them.", no_args_is_help=True)

Gateway = Annotated[str, typer.Argument(metavar="ID", help="Id of the gateway, as `loralane gateways ls` shows it.")]
Stop = Annotated[bool, typer.Option("--stop", help="End its process, too, once nothing runs on it any more.")]


@app.command("ls")
def list_gateways(
    as_json: AsJson = False, watch: Watch = False, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY
) -> None:
    """List the gateways that share one Redis, with their state and load: `loralane gateways ls --watch`."""
    with admin(url, key) as client:
        show(client.gateways, gateways_table, as_json, watch)


@app.command()
def drain(gateway: Gateway, stop: Stop = False, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Drain a gateway as SIGTERM does: it is not ready, hands its batches over, and refuses new requests after some
    seconds. Its process goes on, without serving again, unless `--stop` is given.

    - `loralane gateways drain node1-4711-0a1b2c3d --stop`
    """
    with admin(url, key) as client:
        overview = client.drain_gateway(gateway, stop=stop)
    left = f"{overview.requests:,} requests running"
    console.print(f"[green]{overview.id}[/green] is {overview.state}: {left}", highlight=False)


def gateways_table(gateways: Iterable[GatewayOverview]) -> Table:
    table = Table(box=None)
    for title in ("gateway", "address", "version", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("requests", "since"):
        table.add_column(title, justify="right", no_wrap=True)
    for gateway in gateways:
        style = "" if gateway.state == "serving" else "yellow"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(gateway.since))
        table.add_row(
            *(Text(gateway.id), Text(gateway.address), Text(gateway.version), Text(gateway.state, style=style)),
            *(f"{gateway.requests:,}", since),
        )
    return table
