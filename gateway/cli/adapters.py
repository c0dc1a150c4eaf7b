"""`loralane adapters`: lists and changes the adapters that a running gateway serves."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from gateway.cli.address import LOCAL_URL, AdminUrl, grpc_target
from gateway.cli.as_admin import DEMO_KEY, AdminKey, AsJson, console, until_interrupted
from gateway.cli.tables.adapters import TIERS, SortKey, adapter_facts, adapter_json, adapter_table, chosen
from gateway.outputs import fail, print_wide

if TYPE_CHECKING:
    from gateway.cli.clients.adapters import AdaptersClient

app = typer.Typer(help="See and change which adapters a running gateway serves.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Name of the adapter.")]


@app.command("ls")
def list_adapters(
    pattern: Annotated[str, typer.Argument(help="Names or aliases to list, as in 'team/*'.")] = "*",
    tier: Annotated[str | None, typer.Option(help=f"Only those in one tier: {', '.join(TIERS)}.")] = None,
    sort: Annotated[SortKey, typer.Option(help="What to sort by.")] = SortKey.name,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, once a second, until Ctrl-C.")] = False,
    url: AdminUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """List adapters with their tier, size, requests, and loads."""
    if tier not in (None, *TIERS):
        raise typer.BadParameter(f"{tier!r} is none of {', '.join(TIERS)}", param_hint="--tier")
    with _admin(url, key) as client:
        adapters = chosen(client.list(), pattern, tier, sort)
        if as_json:
            print(json.dumps([adapter_json(adapter) for adapter in adapters], indent=2))
        elif not watch:
            print_wide(adapter_table(adapters))
        else:
            with Live(adapter_table(adapters), console=Console()) as live, until_interrupted():
                while True:
                    time.sleep(1.0)
                    live.update(adapter_table(chosen(client.list(), pattern, tier, sort)))


@app.command()
def show(name: Name, as_json: AsJson = False, url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Show all fields of one adapter, found by its name or an alias."""
    with _admin(url, key) as client:
        found = [adapter for adapter in client.list() if name in (adapter.name, *adapter.aliases)]
    if not found:
        fail(f"there is no adapter {name!r}")
    if as_json:
        print(json.dumps(adapter_json(found[0]), indent=2))
    else:
        Console().print(adapter_facts(found[0]))


@app.command()
def load(
    name: Annotated[str, typer.Argument(help="Name to serve it under.")],
    path: Annotated[str, typer.Argument(help="PEFT folder below a root of the gateway, or a hub id or URL it allows.")],
    replace_loaded: Annotated[bool, typer.Option("--replace", help="Replace the version served now.")] = False,
    tenant: Annotated[list[str] | None, typer.Option(help="Keep it for this tenant; repeatable.")] = None,
    url: AdminUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Load an adapter while serving: `loralane adapters load support ./loras/support`."""
    folder = str(Path(path).resolve()) if Path(path).is_dir() else path
    with _admin(url, key) as client:
        adapter = client.load(name, folder, replace=replace_loaded, tenants=tenant or ())
    console.print(f"[green]{name}[/green] serves {adapter.version} (rank {adapter.rank}, {adapter.bytes / 1e6:.1f} MB)")


@app.command()
def reload(name: Name, url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Read an adapter's files again; running requests finish on the version they started with."""
    with _admin(url, key) as client:
        answer = client.reload(name)
    word = "serves" if answer.changed else "has not changed: it serves"
    console.print(f"[green]{name}[/green] {word} {answer.adapter.version}")


@app.command()
def unload(
    name: Annotated[str, typer.Argument(help="Adapter to take out of service.")],
    drain: Annotated[float, typer.Option(help="Seconds running requests may go on; 0: the gateway's default.")] = 0.0,
    url: AdminUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Unload an adapter, after running requests have had time to finish."""
    with _admin(url, key) as client:
        aborted = client.unload(name, drain)
    console.print(f"[green]{name}[/green] is unloaded; {aborted} requests were aborted")


@app.command()
def pin(name: Name, url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Keep an adapter on the device once it is there."""
    with _admin(url, key) as client:
        client.pin(name, pinned=True)
    console.print(f"[green]{name}[/green] is pinned")


@app.command()
def unpin(name: Name, url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Let an adapter be evicted from the device again."""
    with _admin(url, key) as client:
        client.pin(name, pinned=False)
    console.print(f"[green]{name}[/green] is not pinned")


@app.command()
def alias(
    name: Name,
    other: Annotated[str, typer.Argument(metavar="ALIAS", help="Another name for it.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take the alias away.")] = False,
    url: AdminUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Give an adapter another name: `loralane adapters alias support helpdesk`."""
    with _admin(url, key) as client:
        aliases = client.alias(name, other, remove=remove).aliases
    console.print(f"[green]{name}[/green] has the aliases: {', '.join(aliases) or 'none'}")


@app.command()
def allow(
    name: Name,
    tenants: Annotated[list[str] | None, typer.Argument(help="It is for these alone; none: for every tenant.")] = None,
    url: AdminUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Reserve an adapter for some tenants; without any, allow every tenant."""
    with _admin(url, key) as client:
        allowed = client.allow(name, tenants or ()).tenants
    console.print(f"[green]{name}[/green] is for {', '.join(allowed) or 'every tenant that may name it'}")


def _admin(url: str, key: str) -> AbstractContextManager[AdaptersClient]:
    from gateway.cli.clients.adapters import AdaptersClient
    from gateway.cli.clients.admin import told

    return told(AdaptersClient(grpc_target(url), key), url)
