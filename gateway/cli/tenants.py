"""`loralane tenants`: shows and changes tenants on a running gateway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from gateway.api_schema import accounts as api
from gateway.cli.http import admin
from gateway.cli.options import (
    DEMO_KEY,
    LOCAL_URL,
    AdminKey,
    AsJson,
    ServerUrl,
    Yes,
    confirm,
    console,
    show_answers,
)
from gateway.client.account_calls import ClassSettings, TenantSettings
from gateway.client.client import Client

tenants = typer.Typer(help="Show and change the tenants of a running gateway.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the tenant.")]
Lane = Annotated[str | None, typer.Option(metavar="LANE", help="Name of a lane: interactive or batch.")]
Adapters = Annotated[list[str] | None, typer.Option("--adapter", help="Pattern of permitted adapters; repeatable.")]
Upstreams = Annotated[
    list[str] | None, typer.Option("--upstream", help="Pattern of upstreams its data may be sent to; repeatable.")
]
Weight = Annotated[float | None, typer.Option(help="Relative share of a lane, 0.001 to 1000; built in: 1.")]

UnknownFields = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY", help="Treatment of request fields that the gateway does not know: ignore or refuse."
    ),
]
Classes = Annotated[
    list[str] | None,
    typer.Option(
        "--class",
        metavar="NAME[:SETTING=VALUE,...]",
        help="All classes of its requests, such as gold:weight=3,ttft_s=0.3; NAME alone: weight 1; '': none. "
        "Settings: weight, priority, ttft_s, itl_s.",
    ),
]


@tenants.command("create")
def create_tenant(
    name: Name,
    default_lane: Lane = None,
    highest_lane: Lane = None,
    adapters: Adapters = None,
    upstreams: Upstreams = None,
    weight: Weight = None,
    unknown_fields: UnknownFields = None,
    classes: Classes = None,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Create a tenant: `loralane tenants create initech --adapter 'support-*' --default-lane batch`."""
    settings = _settings(locals())
    with admin(url, key) as client:
        tenant = client.create_tenant(name, **settings)
    show_answers(_tenant_table([tenant]), [tenant], False)


@tenants.command("set")
def set_tenant(
    name: Name,
    default_lane: Lane = None,
    highest_lane: Lane = None,
    adapters: Adapters = None,
    upstreams: Upstreams = None,
    weight: Weight = None,
    unknown_fields: UnknownFields = None,
    classes: Classes = None,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Change a tenant's settings; without an option its setting stays unchanged. For limits see `loralane limits`."""
    settings = _settings(locals())
    with admin(url, key) as client:
        tenant = client.change_tenant(name, **settings)
    show_answers(_tenant_table([tenant]), [tenant], False)


@tenants.command("ls")
def list_tenants(as_json: AsJson = False, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """List all tenants with their settings."""
    with admin(url, key) as client:
        found = client.tenants()
    show_answers(_tenant_table(found), found, as_json)


@tenants.command("show")
def show_tenant(name: Name, as_json: AsJson = False, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Show the settings of one tenant."""
    with admin(url, key) as client:
        tenant = client.tenant(name)
    show_answers(_tenant_table([tenant]), [tenant], as_json)


@tenants.command("disable")
def disable_tenant(name: Name, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Disable a tenant: its requests are refused, from the next one on."""
    with admin(url, key) as client:
        client.disable_tenant(name)
    console.print(f"[green]{name}[/green] is disabled")


@tenants.command("enable")
def enable_tenant(name: Name, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Enable a disabled tenant: its requests are accepted again."""
    with admin(url, key) as client:
        client.enable_tenant(name)
    console.print(f"[green]{name}[/green] is enabled")


@tenants.command("delete")
def delete_tenant(name: Name, yes: Yes = False, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Delete a tenant with its API keys and limits, after confirmation: `loralane tenants delete initech --yes`."""
    with admin(url, key) as client:
        if not yes:
            confirm(_deleted_with(client, name))
        count = client.delete_tenant(name)
    keys = "1 key" if count == 1 else f"{count} keys"
    console.print(f"[green]{name}[/green] is deleted, with {keys}")


def _deleted_with(client: Client, name: str) -> str:
    """Return what goes when a tenant is deleted, and what becomes of the rest."""
    client.tenant(name)  # an unknown one is reported before anything is asked
    held, batches = client.keys(name), client.batches(name)
    changed = [entry for entry in client.limits(name) if entry.source == "live"]
    return (
        f"Tenant {name} goes with {len(held)} keys, and {len(changed)} scopes of limits that were changed live, for "
        f"good. Requests and {len(batches)} unfinished batches of its keys are refused from then on; files and stored "
        "responses stay until they end, and belong to the next tenant of that name."
    )


def _settings(given: Mapping[str, Any]) -> TenantSettings:
    """Return those of a command's arguments, by name, that are settings of a tenant and are not left out."""
    settings = {name: given[name] for name in TenantSettings.__annotations__ if given.get(name) not in (None, [])}
    if "classes" in settings:
        settings["classes"] = dict(_class(text) for text in settings["classes"] if text)
    return cast(TenantSettings, settings)


def _class(text: str) -> tuple[str, ClassSettings]:
    """Return a class's name and its settings, from a text such as gold:weight=3,ttft_s=0.3. Ends the command with an
    error if a setting is unknown or is no number."""
    name, _, settings = text.partition(":")
    own: dict[str, Any] = {}
    known = api.ClassBody.__struct_fields__
    for setting in filter(None, settings.split(",")):
        field, _, value = setting.partition("=")
        if field not in known:
            raise typer.BadParameter(f"{field!r} is none of {', '.join(known)}", None, None, "--class")
        try:
            own[field] = int(value) if field == "priority" else float(value)
        except ValueError:
            raise typer.BadParameter(f"{field} must be a number, not {value!r}", None, None, "--class") from None
    return name, cast(ClassSettings, own)


def _tenant_table(found: Iterable[api.Tenant]) -> Table:
    table = Table("tenant", "lane", "highest", "adapters", "weight", "classes", "unknown fields", "", box=None)
    for one in found:
        state = "disabled" if one.disabled else ""
        adapters = ", ".join(one.adapters) or "none"
        classes = ", ".join(f"{name} {own.weight:g}" for name, own in sorted(one.classes.items()))
        lanes = (one.default_lane, one.highest_lane)
        table.add_row(one.name, *lanes, adapters, f"{one.weight:g}", classes, one.unknown_fields, state)
    return table
