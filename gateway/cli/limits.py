"""`loralane limits`: shows and changes the limits of tenants, keys and adapters on a running gateway."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from engine.core.counts import parse_count
from gateway.cli.address import LOCAL_URL, AdminUrl, grpc_target
from gateway.cli.as_admin import DEMO_KEY, AdminKey, AsJson, show_messages, until_interrupted
from gateway.cli.tables.limits import limits_table, usage_table
from gateway.core.limits import LIMIT_NAMES
from gateway.outputs import message_json, print_wide
from gateway.pb import limits_pb2 as pb

if TYPE_CHECKING:
    from gateway.cli.clients.limits import LimitsClient

app = typer.Typer(help="See and change the limits of a running gateway's tenants.", no_args_is_help=True)

NONE = "none"

Tenant = Annotated[str, typer.Argument(help="Name of the tenant.")]
Tenants = Annotated[str, typer.Argument(help="Name of a tenant; without it, all of them.")]
KeyId = Annotated[str, typer.Option("--key-id", help="Of one key, by its id; *: of each without its own.")]
Adapter = Annotated[str, typer.Option("--adapter", help="Of one adapter or the base; *: of each without its own.")]
Value = Annotated[str | None, typer.Option(metavar="NUMBER", help="600, 100k or 1.5m, or none to lift it.")]


@app.command()
def get(tenant: Tenants = "", as_json: AsJson = False, url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Show the limits of tenants, their keys and adapters; limits that only count (shadow) are in brackets."""
    with _admin(url, key) as client:
        entries = client.get(tenant)
    show_messages(limits_table(entries), entries, as_json)


@app.command("set")
def set_limits(
    tenant: Tenant,
    requests_per_minute: Value = None,
    tokens_per_minute: Value = None,
    concurrent_requests: Value = None,
    tokens_per_day: Value = None,
    shadow: Annotated[
        list[str] | None, typer.Option(help="A limit that only counts; repeatable, or none: all are in force.")
    ] = None,
    when_redis_is_away: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT=POLICY", help="degraded, closed or open; repeatable, or none: as the installation."
        ),
    ] = None,
    key_id: KeyId = "",
    adapter: Adapter = "",
    as_json: AsJson = False,
    url: AdminUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Change limits, effective from the next request on: `loralane limits set acme --tokens-per-minute 100k`."""
    texts = (requests_per_minute, tokens_per_minute, concurrent_requests, tokens_per_day)
    values: dict[str, int | None] = {
        name: _number(text) for name, text in zip(LIMIT_NAMES, texts, strict=True) if text is not None
    }
    names = None if shadow is None else [name.replace("-", "_") for name in shadow if name != NONE]
    with _admin(url, key) as client:
        scope = pb.LimitScope(tenant=tenant, key=key_id, adapter=adapter)
        entry = client.set(scope, values, names, _policies(when_redis_is_away))
    show_messages(limits_table([entry]), [entry], as_json)


@app.command()
def reset(
    tenant: Tenant,
    used: Annotated[bool, typer.Option("--used", help="Forget what is in use, and leave the limits.")] = False,
    key_id: KeyId = "",
    adapter: Adapter = "",
    url: AdminUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Restore the configured limits; with --used, keep the limits and forget what is in use."""
    scope = pb.LimitScope(tenant=tenant, key=key_id, adapter=adapter)
    with _admin(url, key) as client:
        limits = client.reset(scope, used=used)
    print_wide(limits_table([pb.LimitEntry(scope=scope, limits=limits, source="in force")]))


@app.command()
def usage(tenant: Tenants = "", as_json: AsJson = False, url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Show how much of each limit is used, and how many of today's requests did not fit it."""
    with _admin(url, key) as client:
        scopes = client.usage(tenant)
    show_messages(usage_table(scopes), scopes, as_json)


@app.command()
def watch(tenant: Tenants = "", as_json: AsJson = False, url: AdminUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Follow usage as it changes, until Ctrl-C; --json prints a line for each scope that has changed."""
    with _admin(url, key) as client, until_interrupted():
        if as_json:
            for changed in client.watch(tenant):
                for scope in changed:
                    print(json.dumps(message_json(scope)), flush=True)
            return
        scopes: dict[tuple[str, str, str], pb.ScopeUsage] = {}
        with Live(console=Console()) as live:
            for changed in client.watch(tenant):
                scopes.update(((used.scope.tenant, used.scope.key, used.scope.adapter), used) for used in changed)
                live.update(usage_table(scopes[place] for place in sorted(scopes)))


def _number(text: str) -> int | None:
    if text == NONE:
        return None
    try:
        return parse_count(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, or {NONE} to lift the limit") from error


def _policies(pairs: list[str] | None) -> dict[str, str] | None:
    """Parse LIMIT=POLICY pairs into limit -> policy. None means that the option was not given."""
    if pairs is None:
        return None
    split = [pair.partition("=") for pair in pairs if pair != NONE]
    return {name.replace("-", "_"): policy for name, _, policy in split}


def _admin(url: str, key: str) -> AbstractContextManager[LimitsClient]:
    from gateway.cli.clients.admin import told
    from gateway.cli.clients.limits import LimitsClient

    return told(LimitsClient(grpc_target(url), key), url)
