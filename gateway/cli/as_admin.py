"""Options and output shared by the commands that administer a running gateway."""

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
    """Print messages as JSON if `as_json`, otherwise `table`, which shows the same."""
    if as_json:
        print(json.dumps([message_json(message) for message in messages], indent=2))
    else:
        print_wide(table)


@contextmanager
def until_interrupted() -> Iterator[None]:
    """End the block without an error on Ctrl-C, which is the normal way to stop watching."""
    try:
        yield
    except KeyboardInterrupt:
        return
