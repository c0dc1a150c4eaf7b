"""`loralane limits`: shows and changes the limits of tenants, keys and adapters on a running gateway."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Annotated, cast

import msgspec
import typer
from rich.live import Live
from rich.table import Table

from gateway.api_schema.limits import LimitEntry, LimitScope, LimitUse, ScopeLimits, ScopeUse
from gateway.cli.http import admin
from gateway.cli.options import DEMO_KEY, LOCAL_URL, AdminKey, AsJson, ServerUrl, show_answers, until_interrupted
from gateway.client.account_calls import LimitChanges
from gateway.core.counts import parse_count
from gateway.core.limits import LIMIT_NAMES
from gateway.terminal.console import Console
from gateway.terminal.output import print_wide

app = typer.Typer(help="Show and change the limits of tenants on a running gateway.", no_args_is_help=True)

NONE = "none"
WATCH_SECONDS = 1.0

Tenant = Annotated[str, typer.Argument(help="Name of the tenant.")]
Tenants = Annotated[str, typer.Argument(help="Name of a tenant; default: all tenants.")]
KeyId = Annotated[str, typer.Option("--key-id", help="Id of one API key; '*': each key without its own limits.")]
Adapter = Annotated[str, typer.Option("--adapter", help="One adapter or the base model; '*': each without its own.")]
Value = Annotated[str | None, typer.Option(metavar="NUMBER", help="New limit, as in 600, 100k or 1.5m; none lifts it.")]


@app.command()
def get(tenant: Tenants = "", as_json: AsJson = False, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Show the limits of tenants, their keys and adapters; limits that only count (shadow) are in brackets."""
    with admin(url, key) as client:
        entries = client.limits(tenant)
    show_answers(_entries_table(entries), entries, as_json)


@app.command("set")
def set_limits(
    tenant: Tenant,
    requests_per_minute: Value = None,
    tokens_per_minute: Value = None,
    concurrent_requests: Value = None,
    tokens_per_day: Value = None,
    shadow: Annotated[
        list[str] | None, typer.Option(help="Limit that only counts misses; repeatable. none: enforce all limits.")
    ] = None,
    when_redis_is_away: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT=POLICY", help="Policy of a limit: degraded, closed or open; repeatable. none: the default."
        ),
    ] = None,
    key_id: KeyId = "",
    adapter: Adapter = "",
    as_json: AsJson = False,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Change limits, effective from the next request on: `loralane limits set acme --tokens-per-minute 100k`."""
    texts = (requests_per_minute, tokens_per_minute, concurrent_requests, tokens_per_day)
    values: dict[str, int | None] = {
        name: _number(text) for name, text in zip(LIMIT_NAMES, texts, strict=True) if text is not None
    }
    changes = cast(LimitChanges, values)
    if shadow is not None:
        changes["shadow"] = [name.replace("-", "_") for name in shadow if name != NONE]
    if when_redis_is_away is not None:
        changes["when_redis_is_away"] = _policies(when_redis_is_away)
    with admin(url, key) as client:
        entry = client.set_limits(tenant, key=key_id, adapter=adapter, **changes)
    show_answers(_entries_table([entry]), [entry], as_json)


@app.command()
def reset(
    tenant: Tenant,
    used: Annotated[bool, typer.Option("--used", help="Set the counted use to zero, keep the limits.")] = False,
    key_id: KeyId = "",
    adapter: Adapter = "",
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Restore the configured limits or, with --used, keep the limits and set the counted use to zero."""
    with admin(url, key) as client:
        limits = client.reset_limits(tenant, key=key_id, adapter=adapter, used=used)
    print_wide(limits_table([(limits, "in force")]))


@app.command()
def usage(tenant: Tenants = "", as_json: AsJson = False, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Show how much of each limit is used, and how many of today's requests did not fit it."""
    with admin(url, key) as client:
        scopes = client.limits_used(tenant)
    show_answers(usage_table(scopes), scopes, as_json)


@app.command()
def watch(tenant: Tenants = "", as_json: AsJson = False, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Follow usage as it changes, until Ctrl-C; --json prints a line for each scope that has changed."""
    with admin(url, key) as client, until_interrupted():
        changes = _changes(lambda: client.limits_used(tenant))
        if as_json:
            for changed in changes:
                for scope in changed:
                    print(json.dumps(msgspec.to_builtins(scope)), flush=True)
            return
        scopes: dict[tuple[str, str, str], ScopeUse] = {}
        with Live(console=Console()) as live:
            for changed in changes:
                scopes.update((_place(used), used) for used in changed)
                live.update(usage_table(scopes[place] for place in sorted(scopes)))


def _number(text: str) -> int | None:
    if text == NONE:
        return None
    try:
        return parse_count(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, or {NONE} to lift the limit") from error


def _policies(pairs: list[str]) -> dict[str, str]:
    """Parse LIMIT=POLICY pairs into limit -> policy, without `none`."""
    split = [pair.partition("=") for pair in pairs if pair != NONE]
    return {name.replace("-", "_"): policy for name, _, policy in split}


def _changes(look: Callable[[], Sequence[ScopeUse]]) -> Iterator[Sequence[ScopeUse]]:
    """Yield what `look` returns and then, every second, what has changed since, if anything has."""
    seen = {_place(used): used for used in look()}
    yield list(seen.values())
    while True:
        time.sleep(WATCH_SECONDS)
        now = {_place(used): used for used in look()}
        if changed := [used for place, used in now.items() if seen.get(place) != used]:
            yield changed
        seen = now


def _place(scope: LimitScope) -> tuple[str, str, str]:
    return scope.tenant, scope.key, scope.adapter


TITLES = ("requests/min", "tokens/min", "at once", "tokens/day")


def _entries_table(entries: Iterable[LimitEntry]) -> Table:
    return limits_table((entry, entry.source) for entry in entries)


def limits_table(scopes: Iterable[tuple[ScopeLimits, str]]) -> Table:
    """Return a table with a row for each scope and the source of its limits. A limit in shadow, which only counts, is
    in brackets."""
    table = Table(box=None)
    for title in ("tenant", "scope"):
        table.add_column(title, no_wrap=True)
    for title in TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("source")
    table.add_column("while Redis is away")
    for limits, source in scopes:
        cells = (_limit(limits, name) for name in LIMIT_NAMES)
        away = ", ".join(f"{name} {policy}" for name, policy in sorted(limits.when_redis_is_away.items()))
        table.add_row(limits.tenant, scope_text(limits), *cells, source, away)
    return table


def usage_table(scopes: Iterable[ScopeUse]) -> Table:
    table = Table(box=None)
    for title in ("tenant", "scope", "limit"):
        table.add_column(title, no_wrap=True)
    for title in ("used", "of", "left", "free in", "refused today", "last refused"):
        table.add_column(title, justify="right", no_wrap=True)
    for scope in scopes:
        for limit in scope.limits:
            table.add_row(scope.tenant, scope_text(scope), *_usage_cells(limit), _refused(scope, limit.name))
    return table


def scope_text(scope: LimitScope) -> str:
    if scope.key:
        return f"key {scope.key}"
    return f"adapter {scope.adapter}" if scope.adapter else "all"


def _limit(limits: ScopeLimits, name: str) -> str:
    value = getattr(limits, name)
    if value is None:
        return "-"
    return f"({value:,})" if name in limits.shadow else f"{value:,}"


def _refused(scope: ScopeUse, name: str) -> str:
    """Return the local time (HH:MM:SS) of the scope's last refusal if the limit `name` caused it, otherwise `-`."""
    if name not in scope.refused_by or scope.refused_at is None:
        return "-"
    return datetime.fromtimestamp(scope.refused_at).astimezone().strftime("%H:%M:%S")


def _usage_cells(usage: LimitUse) -> Iterable[str]:
    yield f"({usage.name})" if usage.shadow else usage.name
    yield f"{usage.used:,.0f}"
    yield "-" if usage.limit is None else f"{usage.limit:,}"
    yield "-" if usage.remaining is None else f"{usage.remaining:,.0f}"
    yield "-" if usage.reset_seconds is None else f"{usage.reset_seconds:,.0f} s"
    yield f"{usage.refused_today:,}"
