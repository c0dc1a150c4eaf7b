"""`loralane keys`: shows and changes tenants' API keys on a running gateway, and finds whose a key is."""

from __future__ import annotations

import getpass
import re
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated

import typer
from msgspec import UNSET, UnsetType
from rich.table import Table

from gateway.api_schema import accounts as api
from gateway.api_schema.limits import LimitEntry
from gateway.cli.http import admin
from gateway.cli.limits import entries_table
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
from gateway.client.account_calls import KeySettings
from gateway.client.client import Client, ClientError
from gateway.core.tenants import hash_key
from gateway.core.times import duration_s, unix_time
from gateway.terminal.output import exit_with_error, print_wide

keys = typer.Typer(help="Show and change tenants' API keys on a running gateway.", no_args_is_help=True)

HASH = re.compile(r"(?:sha256:)?([0-9a-f]{6,64})")
NEVER, ANY = "never", "any"

Tenant = Annotated[str, typer.Argument(help="Name of the tenant.")]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="Id of the API key, or at least its first 6 digits.")]
Expires = Annotated[
    str | None,
    typer.Option(
        "--expires", metavar="TIME", help="End, as in 90d (from now), 2027-01-31 or 2027-01-31T12:00Z; never: none."
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="Pattern of base and virtual models it may name; repeatable; '': none."),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option("--adapter", help="Pattern of adapters it may name, among the tenant's; repeatable; '': none."),
]
Networks = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="CIDR", help="Network it may be used from; repeatable; any: anywhere."),
]


@keys.command("create")
def create_key(
    tenant: Tenant,
    label: Annotated[str, typer.Option(help="Remark on the key, such as its use.")] = "",
    expires: Expires = None,
    models: Models = None,
    adapters: Adapters = None,
    networks: Networks = None,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Create an API key for a tenant: `loralane keys create acme --label ci --expires 90d --from 10.0.0.0/8`. It is
    printed only this once."""
    settings = _settings(expires, models, adapters, networks)
    with admin(url, key) as client:
        _print_once(client.create_key(tenant, label, **settings))


@keys.command("set")
def set_key(
    key_id: KeyId,
    label: Annotated[str | None, typer.Option(help="Remark on the key, such as its use.")] = None,
    expires: Expires = None,
    models: Models = None,
    adapters: Adapters = None,
    networks: Networks = None,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Change an API key from the next request on: `loralane keys set 3f9a1c --expires never --model 'small*'`."""
    settings = _settings(expires, models, adapters, networks)
    with admin(url, key) as client:
        changed = client.change_key(key_id, label=label, **settings)
    show_answers(key_table([changed]), [changed], False)


@keys.command("ls")
def list_keys(
    tenant: Annotated[str, typer.Argument(help="Name of a tenant; default: all tenants.")] = "",
    as_json: AsJson = False,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """List the ids of API keys, with their tenants, labels and rules, and when each was used last."""
    with admin(url, key) as client:
        found = client.keys(tenant)
    show_answers(key_table(found), found, as_json)


@keys.command("find")
def find_key(as_json: AsJson = False, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Say whose a key is, how it is limited and when it was used last, for a key that has leaked. It is read from a
    prompt or from standard input, never from the command line; its SHA-256, or an id, does too.

    - `loralane keys find` asks for the key, and does not show it
    - `loralane keys find < leaked.txt`
    """
    told = _asked()
    with admin(url, key) as client:
        found = _found(client, told)
        limits = [entry for entry in client.limits(found.tenant) if _concerns(entry, found)]
    if as_json:
        show_answers(Table(), [found], True)
        return
    print_wide(key_table([found]))
    print_wide(entries_table(limits))
    console.print(f"To end it: loralane keys disable {found.id}", highlight=False)


@keys.command("rotate")
def rotate_key(
    key_id: KeyId,
    keep: Annotated[bool, typer.Option("--keep", help="Do not disable the old key.")] = False,
    overlap: Annotated[
        str, typer.Option(metavar="DURATION", help="How long the old key still works, as in 1h; default: not at all.")
    ] = "0s",
    expires: Expires = None,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Replace an API key: `loralane keys rotate 3f9a1c --overlap 1h`. The new key, with the same rules, limits and use,
    is printed only this once; the old one ends at once unless --overlap or --keep is given."""
    seconds = _seconds(overlap)
    ends: float | UnsetType | None = UNSET if expires is None else _end(expires)
    with admin(url, key) as client:
        _print_once(client.rotate_key(key_id, keep=keep, overlap_s=seconds, expires_at=ends))


@keys.command("disable")
def disable_key(key_id: KeyId, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Disable an API key: requests with it are refused, from the next one on: `loralane keys disable 3f9a1c`."""
    with admin(url, key) as client:
        console.print(f"[green]{client.disable_key(key_id).id}[/green] is disabled")


@keys.command("enable")
def enable_key(key_id: KeyId, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Enable a disabled API key: `loralane keys enable 3f9a1c`."""
    with admin(url, key) as client:
        console.print(f"[green]{client.enable_key(key_id).id}[/green] is enabled")


@keys.command("delete")
def delete_key(key_id: KeyId, yes: Yes = False, url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Delete an API key, after confirmation: `loralane keys delete 3f9a1c --yes`."""
    with admin(url, key) as client:
        found = client.key(key_id)
        if not yes:
            label = f", {found.label!r}," if found.label else ""
            confirm(
                f"Key {found.id} of {found.tenant}{label} goes for good, and lines that are left of its batches end "
                "with an error. To be able to undo it, disable the key instead."
            )
        client.delete_key(found.id)
    console.print(f"[green]{found.id}[/green] is deleted")


def key_table(found: Iterable[api.Key]) -> Table:
    table = Table("key", "tenant", "label", "models", "adapters", "from", "last used", "ends", "", box=None)
    for one in found:
        table.add_row(
            *(one.id, one.tenant, one.label, _listed(one.models), _listed(one.adapters)),
            *(", ".join(one.networks) or "anywhere", _time(one.last_used) or "-", _time(one.expires_at) or NEVER),
            _state(one),
        )
    return table


def _state(key: api.Key) -> str:
    if key.disabled:
        return "disabled"
    return "expired" if key.expires_at is not None and key.expires_at <= time.time() else ""


def _listed(patterns: list[str]) -> str:
    return ", ".join(patterns) or "none"


def _time(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%MZ")


def _settings(
    expires: str | None, models: list[str] | None, adapters: list[str] | None, networks: list[str] | None
) -> KeySettings:
    """Return those of a command's options that are given, as settings of a key."""
    settings: KeySettings = {}
    if expires is not None:
        settings["expires_at"] = _end(expires)
    if models:
        settings["models"] = [one for one in models if one]
    if adapters:
        settings["adapters"] = [one for one in adapters if one]
    if networks:
        settings["networks"] = [one for one in networks if one != ANY]
    return settings


def _end(text: str) -> float | None:
    """Return when a key ends, in Unix seconds, of a duration from now, a date or a time; None for `never`."""
    if text == NEVER:
        return None
    try:
        return time.time() + duration_s(text)
    except ValueError:
        pass
    try:
        return unix_time(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, a duration such as 90d, or {NEVER}", None, None, "--expires") from error


def _seconds(text: str) -> float:
    try:
        return duration_s(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), None, None, "--overlap") from error


def _asked() -> str:
    """Return what is typed at a prompt that does not show it or, without a terminal, the first line of standard
    input."""
    if sys.stdin.isatty():
        return getpass.getpass("Key (not shown): ").strip()
    return sys.stdin.readline().strip()


def _found(client: Client, text: str) -> api.Key:
    """Return the key that a text is, or else whose hash it is or begins. Of a key only the hash leaves this process.
    Raises ClientError if there is none."""
    if not text:
        exit_with_error("no key was given: type it, or pass it on standard input")
    try:
        return client.key(hash_key(text))
    except ClientError as error:
        if error.code != "key_not_found":
            raise
    if (hashed := HASH.fullmatch(text)) is None:
        exit_with_error("no tenant has this key")
    return client.key(hashed[1])


def _concerns(entry: LimitEntry, key: api.Key) -> bool:
    """Return whether limits apply to all requests with a key: its own, or those of the tenant."""
    return entry.key in ("", "*", key.counts_as) and not entry.adapter


def _print_once(new: api.NewKey) -> None:
    """Print the key alone on standard output, so that it can be piped, and its description on standard error."""
    ends = f", until {_time(new.expires_at)}" if new.expires_at is not None else ""
    console.print(f"key [green]{new.id}[/green] of {new.tenant}{ends}; it is not shown again:", highlight=False)
    print(new.key)
