"""Options that commands share: the gateway's address, keys and JSON output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer
from msgspec import Struct
from rich.table import Table

from gateway.terminal.console import Console
from gateway.terminal.output import LOCAL_URL as LOCAL_URL
from gateway.terminal.output import exit_with_error, print_wide

ADDRESS_HELP = "HTTP address of the gateway: http:// or https://HOST:PORT."
ServerUrl = Annotated[str, typer.Option("--url", envvar="LORALANE_URL", help=ADDRESS_HELP)]

console = Console(stderr=True)

DEMO_KEY = "sk-demo-admin"


def _plain_key(key: str) -> str:
    """Return an API key without white space around it, which files and copies add. A key that no header can carry is
    a wrong value, and is not shown."""
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise typer.BadParameter("it has characters that no API key has; copy the key again")
    return key


AdminKey = Annotated[
    str,
    typer.Option("--key", envvar="LORALANE_ADMIN_KEY", help="API key of an administrator.", callback=_plain_key),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with the fields of the HTTP API.")]


Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation, as in scripts.")]


def is_terminal() -> bool:
    """Return whether an operator can be asked."""
    return sys.stdin.isatty()


def confirm(what: str) -> None:
    """Say what goes, and ask on the terminal whether it may. End the command with status 1 if the operator declines or
    cannot be asked."""
    console.print(what, highlight=False, markup=False)
    if not is_terminal():
        exit_with_error("there is no terminal to ask on; say --yes to go on")
    if console.input("Go on? [y/N] ", markup=False).strip().lower() not in ("y", "yes"):
        exit_with_error("nothing was changed")


def show_answers(table: Table, answers: Iterable[Struct], as_json: bool) -> None:
    """Print `answers` as a JSON array if `as_json` is True, otherwise the table that the caller made of them."""
    if as_json:
        print(json.dumps(msgspec.to_builtins(list(answers)), indent=2))
    else:
        print_wide(table)


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Suppress the KeyboardInterrupt of Ctrl-C, which ends the block: the normal way to stop watching."""
    try:
        yield
    except KeyboardInterrupt:
        return


DEMO_TENANT_KEY = "sk-demo-acme"

UserKey = Annotated[
    str, typer.Option("--key", envvar="LORALANE_API_KEY", help="API key of a tenant.", callback=_plain_key)
]
