"""What the commands that administer a running gateway share: options, and how results are shown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from gateway.outputs import message_json, print_wide

console = Console(stderr=True)

DEMO_KEY = "sk-demo-admin"

AdminKey = Annotated[str, typer.Option("--key", envvar="LORALANE_ADMIN_KEY", help="Admin key.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with the fields of the HTTP API.")]


def show_messages(table: Table, messages: Iterable[Message], as_json: bool) -> None:
    """Messages as JSON, or the table that says the same."""
    if as_json:
        print(json.dumps([message_json(message) for message in messages], indent=2))
    else:
        print_wide(table)


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Ctrl-C is how watching ends, not an error."""
    try:
        yield
    except KeyboardInterrupt:
        return
