"""`loralane limits`: shows and changes the limits of tenants, keys and adapters on a running gateway."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table

from gateway.cli.http import AdminClient
from gateway.cli.options import (
    DEMO_KEY,
    LOCAL_URL,
    AdminKey,
    AdminUrl,
    AsJson,
    grpc_target,
    show_messages,
    until_interrupted,
)
from gateway.core.counts import parse_count
from gateway.core.limits import LIMIT_NAMES
from gateway.pb import limits_pb2 as pb
from gateway.pb import limits_pb2_grpc as pb_grpc
from gateway.terminal.console import Console
from gateway.terminal.output import message_json, print_wide

app = typer.Typer(help="Show and change the limits of tenants on a running gateway.", no_args_is_help=True)

NONE = "none"

Tenant = Annotated[str, typer.Argument(help="Name of the tenant.")]
Tenants = Annotated[str, typer.Argument(help="Name of a tenant; default: all tenants.")]
KeyId = Annotated[str, typer.Option("--key-id", help="Id of one API key; '*': each key without its own limits.")]
Adapter = Annotated[str, typer.Option("--adapter", help="One adapter or the base model; '*': each without its own.")]
Value = Annotated[str | None, typer.Option(metavar="NUMBER", help="New limit, as in 600, 100k or 1.5m; none lifts it.")]


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
    used: Annotated[bool, typer.Option("--used", help="Set the counted use to zero, keep the limits.")] = False,
    key_id: KeyId = "",
    adapter: Adapter = "",
    url: AdminUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Restore the configured limits or, with --used, keep the limits and set the counted use to zero."""
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
    """Parse LIMIT=POLICY pairs into limit -> policy, without `none`. None means that the option was not given."""
    if pairs is None:
        return None
    split = [pair.partition("=") for pair in pairs if pair != NONE]
    return {name.replace("-", "_"): policy for name, _, policy in split}


def _admin(url: str, key: str) -> AbstractContextManager[LimitsClient]:
    from gateway.cli.http import reporting_errors

    return reporting_errors(LimitsClient(grpc_target(url), key), url)


class LimitsClient(AdminClient):
    def __init__(self, target: str, key: str) -> None:
        super().__init__(target, key)
        self._stub = pb_grpc.LimitAdminStub(self._channel)

    def get(self, tenant: str) -> Sequence[pb.LimitEntry]:
        return self._stub.Get(pb.GetLimitsRequest(tenant=tenant), metadata=self._metadata).entries

    def set(
        self,
        scope: pb.LimitScope,
        values: Mapping[str, int | None],
        shadow: Sequence[str] | None,
        away: Mapping[str, str] | None = None,
    ) -> pb.LimitEntry:
        """Change the limits of a scope on the gateway; returns the scope's limits after the change.

        Args:
            values: limit -> new value; None lifts the limit. Limits that are not in it stay unchanged.
            shadow: limits that only count. None leaves the setting unchanged.
            away: limit -> policy while Redis is away. None leaves the setting unchanged.
        """
        given = {name: value for name, value in values.items() if value is not None}
        request = pb.SetLimitsRequest(
            scope=scope,
            limits=pb.Limits(**given, shadow=shadow or (), when_redis_is_away=away or {}),
            lift=[name for name, value in values.items() if value is None],
            set_shadow=shadow is not None,
            set_when_redis_is_away=away is not None,
        )
        return self._stub.Set(request, metadata=self._metadata)

    def reset(self, scope: pb.LimitScope, *, used: bool) -> pb.Limits:
        return self._stub.Reset(pb.ResetLimitsRequest(scope=scope, used=used), metadata=self._metadata).limits

    def usage(self, tenant: str) -> Sequence[pb.ScopeUsage]:
        return self._stub.Usage(pb.LimitUsageRequest(tenant=tenant), metadata=self._metadata).scopes

    def watch(self, tenant: str) -> Iterator[Sequence[pb.ScopeUsage]]:
        """Yield the usage of all scopes of a tenant (empty: of all tenants) first, and then, whenever usage changes,
        that of the scopes whose usage has changed."""
        for response in self._stub.Watch(pb.WatchLimitsRequest(tenant=tenant), metadata=self._metadata):
            yield response.scopes


TITLES = ("requests/min", "tokens/min", "at once", "tokens/day")


def limits_table(entries: Iterable[pb.LimitEntry]) -> Table:
    """Return a table with a row for each scope. A limit in shadow, which only counts, is in brackets."""
    table = Table(box=None)
    for title in ("tenant", "scope"):
        table.add_column(title, no_wrap=True)
    for title in TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("source")
    table.add_column("while Redis is away")
    for entry in entries:
        cells = (_limit(entry.limits, name) for name in LIMIT_NAMES)
        away = ", ".join(f"{name} {policy}" for name, policy in sorted(entry.limits.when_redis_is_away.items()))
        table.add_row(entry.scope.tenant, scope_text(entry.scope), *cells, entry.source, away)
    return table


def usage_table(scopes: Iterable[pb.ScopeUsage]) -> Table:
    table = Table(box=None)
    for title in ("tenant", "scope", "limit"):
        table.add_column(title, no_wrap=True)
    for title in ("used", "of", "left", "free in", "refused today", "last refused"):
        table.add_column(title, justify="right", no_wrap=True)
    for scope in scopes:
        for limit in scope.limits:
            table.add_row(
                scope.scope.tenant, scope_text(scope.scope), *_usage_cells(limit), _refused(scope, limit.name)
            )
    return table


def scope_text(scope: pb.LimitScope) -> str:
    if scope.key:
        return f"key {scope.key}"
    return f"adapter {scope.adapter}" if scope.adapter else "all"


def _limit(limits: pb.Limits, name: str) -> str:
    if not limits.HasField(name):
        return "-"
    return f"({getattr(limits, name):,})" if name in limits.shadow else f"{getattr(limits, name):,}"


def _refused(scope: pb.ScopeUsage, name: str) -> str:
    """Return the local time (HH:MM:SS) of the scope's last refusal if the limit `name` caused it, otherwise `-`."""
    if name not in scope.refused_by:
        return "-"
    return datetime.fromtimestamp(scope.refused_at).astimezone().strftime("%H:%M:%S")


def _usage_cells(usage: pb.LimitUsage) -> Iterable[str]:
    yield f"({usage.name})" if usage.shadow else usage.name
    yield f"{usage.used:,.0f}"
    yield f"{usage.limit:,}" if usage.HasField("limit") else "-"
    yield f"{usage.remaining:,.0f}" if usage.HasField("remaining") else "-"
    yield f"{usage.reset_seconds:,.0f} s" if usage.HasField("reset_seconds") else "-"
    yield f"{usage.refused_today:,}"
