"""`loralane adapters`: lists and changes the adapters that a running gateway serves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from engine.process.adapter_files import is_place
from gateway.api_schema.adapters import AdapterStatus
from gateway.cli.http import admin
from gateway.cli.options import DEMO_KEY, LOCAL_URL, AdminKey, AsJson, ServerUrl, console, until_interrupted
from gateway.terminal.console import Console
from gateway.terminal.output import exit_with_error, print_wide

TIERS = ("disk", "fetching", "host", "resident")
VERSION_CHARS = 12


class SortKey(StrEnum):
    """Sort keys of `adapters ls`. Names and tiers (disk first) ascend, numbers descend; `last-use`: latest first."""

    name = "name"
    tier = "tier"
    rank = "rank"
    bytes = "bytes"
    pages = "pages"
    running = "running"
    waiting = "waiting"
    hits = "hits"
    loads = "loads"
    load_ms = "load-ms"
    last_use = "last-use"


ORDERS: dict[SortKey, Callable[[AdapterStatus], Any]] = {
    SortKey.name: lambda adapter: adapter.name,
    SortKey.tier: lambda adapter: TIERS.index(adapter.tier),
    SortKey.rank: lambda adapter: -adapter.rank,
    SortKey.bytes: lambda adapter: -adapter.bytes,
    SortKey.pages: lambda adapter: -adapter.pages,
    SortKey.running: lambda adapter: -adapter.running,
    SortKey.waiting: lambda adapter: -adapter.waiting,
    SortKey.hits: lambda adapter: -adapter.hits,
    SortKey.loads: lambda adapter: -adapter.loads,
    SortKey.load_ms: lambda adapter: -adapter.last_load_seconds,
    SortKey.last_use: lambda adapter: inf if adapter.idle_seconds is None else adapter.idle_seconds,
}


app = typer.Typer(help="Show and change which adapters a running gateway serves.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Name of the adapter.")]


@app.command("ls")
def list_adapters(
    pattern: Annotated[str, typer.Argument(help="Pattern of names or aliases, as in 'team/*'.")] = "*",
    tier: Annotated[str | None, typer.Option(help=f"Only adapters in this tier: {', '.join(TIERS)}.")] = None,
    sort: Annotated[SortKey, typer.Option(help="Column to sort by; numbers descend.")] = SortKey.name,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh the table every second until Ctrl-C.")] = False,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """List adapters with their tier, size, requests, and loads."""
    if tier not in (None, *TIERS):
        raise typer.BadParameter(f"{tier!r} is none of {', '.join(TIERS)}", param_hint="--tier")
    with admin(url, key) as client:
        adapters = matching_adapters(client.adapters(), pattern, tier, sort)
        if as_json:
            print(json.dumps([adapter_json(adapter) for adapter in adapters], indent=2))
        elif not watch:
            print_wide(adapter_table(adapters))
        else:
            with Live(adapter_table(adapters), console=Console()) as live, until_interrupted():
                while True:
                    time.sleep(1.0)
                    live.update(adapter_table(matching_adapters(client.adapters(), pattern, tier, sort)))


@app.command()
def show(name: Name, as_json: AsJson = False, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Show all fields of one adapter, found by its name or an alias."""
    with admin(url, key) as client:
        found = [adapter for adapter in client.adapters() if name in (adapter.name, *adapter.aliases)]
    if not found:
        exit_with_error(f"there is no adapter {name!r}")
    if as_json:
        print(json.dumps(adapter_json(found[0]), indent=2))
    else:
        Console().print(adapter_facts(found[0]))


@app.command()
def load(
    name: Annotated[str, typer.Argument(help="Name to serve the adapter under.")],
    path: Annotated[str, typer.Argument(help="PEFT folder or GGUF file below an adapter root, or a hub id or URL.")],
    replace_loaded: Annotated[bool, typer.Option("--replace", help="Replace the version served now.")] = False,
    tenant: Annotated[list[str] | None, typer.Option(help="Tenant that may use it; repeatable; default: all.")] = None,
    base_model: Annotated[
        str, typer.Option(help="Base model that it is for; default: the one that its adapter_config.json names.")
    ] = "",
    chat_template: Annotated[
        str, typer.Option(help="What renders its chats: auto (the one in its folder), model (the base's), or a file.")
    ] = "",
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Load an adapter while serving: `loralane adapters load support ./loras/support`."""
    folder = str(Path(path).resolve()) if is_place(Path(path)) else path
    template = _template(chat_template) or None
    with admin(url, key) as client:
        adapter = client.load_adapter(
            name, folder, base_model=base_model, replace=replace_loaded, tenants=tenant or (), chat_template=template
        )
    console.print(f"[green]{name}[/green] serves {adapter.version} (rank {adapter.rank}, {adapter.bytes / 1e6:.1f} MB)")
    for warning in adapter.warnings:
        console.print(Text(warning, style="yellow"))


@app.command()
def reload(name: Name, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Read an adapter's files again; running requests finish on the version they started with."""
    with admin(url, key) as client:
        answer = client.reload_adapter(name)
    word = "serves" if answer.changed else "has not changed: it serves"
    console.print(f"[green]{name}[/green] {word} {answer.adapter.version}")


@app.command()
def unload(
    name: Annotated[str, typer.Argument(help="Adapter to take out of service.")],
    drain: Annotated[float, typer.Option(help="Seconds that running requests have; 0: adapters.drain_seconds.")] = 0.0,
    base_model: Annotated[str, typer.Option(help="Base model of the adapter, if two have one of this name.")] = "",
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Unload an adapter. Requests still live after --drain, or else adapters.drain_seconds, are aborted."""
    with admin(url, key) as client:
        aborted = client.unload_adapter(name, drain_seconds=drain or None, base_model=base_model)
    console.print(f"[green]{name}[/green] is unloaded; {aborted} requests were aborted")


@app.command()
def pin(name: Name, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Pin an adapter: once it is on the device, it is not evicted."""
    with admin(url, key) as client:
        client.pin_adapter(name)
    console.print(f"[green]{name}[/green] is pinned")


@app.command()
def unpin(name: Name, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Unpin an adapter, so that it may be evicted from the device again."""
    with admin(url, key) as client:
        client.unpin_adapter(name)
    console.print(f"[green]{name}[/green] is not pinned")


@app.command()
def alias(
    name: Name,
    other: Annotated[str, typer.Argument(metavar="ALIAS", help="Other name to add.")],
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias in place of adding it.")] = False,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Give an adapter another name, or remove it with --remove: `loralane adapters alias support helpdesk`."""
    with admin(url, key) as client:
        aliases = client.alias_adapter(name, other, remove=remove).aliases
    console.print(f"[green]{name}[/green] has the aliases: {', '.join(aliases) or 'none'}")


@app.command()
def allow(
    name: Name,
    tenants: Annotated[list[str] | None, typer.Argument(help="The only tenants that may use it; none: all.")] = None,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Reserve an adapter for some tenants; without any, allow every tenant."""
    with admin(url, key) as client:
        allowed = client.allow_adapter(name, tenants or ()).tenants
    console.print(f"[green]{name}[/green] is for {', '.join(allowed) or 'every tenant that may name it'}")


def _template(asked: str) -> str:
    """Return what `--chat-template` asks for as the gateway reads it: the text of a file in place of its name."""
    from gateway.text.chat_template import read_template  # Imported here: it takes Jinja.

    if asked in ("", "auto", "model"):
        return asked
    try:
        return read_template(Path(asked))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--chat-template") from error


def matching_adapters(
    adapters: Iterable[AdapterStatus], pattern: str, tier: str | None, sort: SortKey
) -> list[AdapterStatus]:
    """Return the adapters in `tier` (None: any) whose name or an alias matches the shell pattern, sorted by `sort`."""
    found = [
        adapter
        for adapter in adapters
        if tier in (None, adapter.tier) and any(fnmatchcase(name, pattern) for name in (adapter.name, *adapter.aliases))
    ]
    return sorted(found, key=lambda adapter: (ORDERS[sort](adapter), adapter.name))


def adapter_table(adapters: Iterable[AdapterStatus]) -> Table:
    table = Table(box=None)
    for title in ("name", "base model", "aliases", "tier", "version"):
        table.add_column(title, no_wrap=True)
    for title in ("rank", "MB", "pages", "running", "waiting", "hits", "loads", "load ms", "last use"):
        table.add_column(title, justify="right", no_wrap=True)
    for adapter in adapters:
        table.add_row(*_cells(adapter))
    return table


def adapter_facts(adapter: AdapterStatus) -> Table:
    """Return a table with a row for each field of one adapter: its name and its value."""
    table = Table.grid(padding=(0, 2))
    for name, value in adapter_json(adapter).items():
        table.add_row(Text(name, style="dim"), Text(_fact(name, value)))
    return table


def adapter_json(adapter: AdapterStatus) -> dict[str, Any]:
    """Return the fields of an adapter as JSON values, with the names of the HTTP API."""
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(adapter))
    return fields


def _cells(adapter: AdapterStatus) -> Iterable[Text | str]:
    yield Text(adapter.name, style="red" if adapter.error else "yellow" if adapter.warnings else "")
    yield Text(adapter.base_model)
    yield ", ".join(adapter.aliases)
    yield f"{adapter.tier}, pinned" if adapter.pinned else adapter.tier
    yield adapter.version[:VERSION_CHARS]
    yield str(adapter.rank)
    yield f"{adapter.bytes / 1e6:.1f}"
    for count in (adapter.pages, adapter.running, adapter.waiting, adapter.hits, adapter.loads):
        yield str(count)
    yield f"{adapter.last_load_seconds * 1000:.1f}" if adapter.last_load_seconds else "-"
    yield "never" if adapter.idle_seconds is None else _ago(adapter.idle_seconds)


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _fact(name: str, value: Any) -> str:
    if name in ("created", "updated"):
        return datetime.fromtimestamp(value).astimezone().isoformat(timespec="seconds")
    return ", ".join(value) if isinstance(value, list) else "-" if value in (None, "") else str(value)
