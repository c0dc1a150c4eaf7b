"""`loralane admins` and `loralane audit`: administrators of a running gateway, and what they changed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from time import sleep as wait
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from gateway.api_schema import admins as api
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
from gateway.client.client import Client

admins = typer.Typer(help="Show and change the administrators of a running gateway.", no_args_is_help=True)
audit = typer.Typer(help="Show what administrators changed on a running gateway.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the administrator.")]
Role = Annotated[str, typer.Option(help="What the administrator may do: viewer, operator, accounts or owner.")]
Since = Annotated[str, typer.Option(metavar="TIME", help="Only changes from then on, such as 2026-07-01T12:00Z (UTC).")]
By = Annotated[str, typer.Option(help="Only changes of the administrator of this name.")]
Object = Annotated[
    str, typer.Option("--object", help="Only changes of this object, as tenants/acme, or of all below it: tenants.")
]
Limit = Annotated[int, typer.Option(min=1, help="Number of changes, the newest.")]
POLL_SECONDS = 1.0


@admins.command("ls")
def list_admins(as_json: AsJson = False, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """List all administrators with their roles."""
    with admin(url, key) as client:
        found = client.admins()
    show_answers(_admin_table(found), found, as_json)


@admins.command("create")
def create_admin(
    name: Name,
    role: Role,
    tenant: Annotated[str, typer.Option(help="The only tenant to administer; default: the whole installation.")] = "",
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Create an administrator: `loralane admins create ci --role operator`. The key is printed only this once."""
    with admin(url, key) as client:
        _print_once(client.create_admin(name, role, tenant=tenant))


@admins.command("set")
def set_admin(name: Name, role: Role, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Give an administrator another role: `loralane admins set ci --role viewer`."""
    with admin(url, key) as client:
        found = client.change_admin(name, role)
    show_answers(_admin_table([found]), [found], False)


@admins.command("rotate")
def rotate_admin(name: Name, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Replace an administrator's key: the new one is printed only this once, and the old one is refused at once."""
    with admin(url, key) as client:
        _print_once(client.rotate_admin(name))


@admins.command("delete")
def delete_admin(name: Name, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Delete an administrator, whose key is refused at once."""
    with admin(url, key) as client:
        client.delete_admin(name)
    console.print(f"[green]{name}[/green] is deleted")


@audit.command("ls")
def list_audit(
    since: Since = "",
    by: By = "",
    object_name: Object = "",
    limit: Limit = 100,
    as_json: AsJson = False,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """List changes, the newest first: `loralane audit ls --by ci --object tenants --since 2026-07-01`."""
    with admin(url, key) as client:
        found = list(_pages(client, since, by, object_name, limit))
    show_answers(_audit_table(found), found, as_json)


@audit.command("follow")
def follow_audit(
    by: By = "",
    object_name: Object = "",
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Print each change from now on as a line of JSON, until Ctrl-C: `loralane audit follow --object keys`."""
    with admin(url, key) as client, until_interrupted():
        newest = client.audit(limit=1).entries
        place = newest[0].id if newest else "0"
        while True:
            page = client.audit(by=by, object=object_name, after=place, limit=api.MAX_PAGE)
            for entry in page.entries:
                print(json.dumps(msgspec.to_builtins(entry)), flush=True)
                place = entry.id
            place = page.next or place
            if page.next is None:
                wait(POLL_SECONDS)


def _pages(client: Client, since: str, by: str, object_name: str, limit: int) -> Iterator[api.AuditEntry]:
    """Yield up to `limit` entries, page by page."""
    before = ""
    while limit > 0:
        size = min(limit, api.MAX_PAGE)
        page = client.audit(since=since, by=by, object=object_name, limit=size, before=before)
        yield from page.entries
        limit -= len(page.entries)
        if page.next is None:
            return
        before = page.next


def _print_once(new: api.NewAdministrator) -> None:
    """Print the key alone on standard output, so that it can be piped, and its description on standard error."""
    console.print(f"key [green]{new.key_id}[/green] of {new.name}, {new.role}; it is not shown again:")
    print(new.key)


def _admin_table(found: Iterable[api.ShownAdministrator]) -> Table:
    table = Table("administrator", "role", "tenant", "key", "added by", box=None)
    for one in found:
        table.add_row(one.name, one.role, one.tenant or "all", one.key_id, one.added_by)
    return table


def _audit_table(found: Iterable[api.AuditEntry]) -> Table:
    table = Table("time (UTC)", "by", "action", "object", "result", "change", box=None)
    for entry in found:
        moment = datetime.fromtimestamp(entry.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(moment, entry.by, entry.action, entry.object, entry.result, _change(entry))
    return table


def _change(entry: api.AuditEntry) -> str:
    names = {**entry.before, **entry.after}
    return ", ".join(f"{name}: {_shown(entry.before, name)} -> {_shown(entry.after, name)}" for name in names)


def _shown(fields: dict[str, Any], name: str) -> str:
    return json.dumps(fields[name]) if name in fields else "none"
