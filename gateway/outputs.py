"""What commands put out: files, looked at before the work that fills them begins, tables, and why they failed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape
from rich.table import Table

LOCAL_URL = "http://127.0.0.1:8000"
"""Where commands look for a gateway unless they are told otherwise."""
WIDEST = 10_000
"""Columns: more than any table needs."""


def check_writable(path: Path, option: str) -> None:
    """Whether a file could be written there now. Raises ValueError: the message names the option."""
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: this file cannot be written")


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is at `path`, whole and durable, when the block has ended well; else what was there before stays."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def print_wide(table: Table) -> None:
    """Prints a table at the width it needs: a terminal wraps long lines, and cells squeezed to it cannot be read."""
    console = Console()
    needed = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
    Console(width=max(console.width, needed)).print(table)


def message_json(message: Message) -> dict[str, Any]:
    """Every field by its name; None where an optional one is absent."""
    return {field.name: _plain(message, field) for field in message.DESCRIPTOR.fields}


def _plain(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.is_repeated:
        return [message_json(item) if field.message_type else item for item in value]
    return message_json(value) if field.message_type else value


def no_gateway(url: str, reason: str = "") -> str:
    """The message of every command that finds no gateway; `reason` is what the library says, where that helps."""
    found = f"No gateway answers at {url}"
    found += f" ({reason})" if reason and "refused" not in reason.lower() else ""
    return f"{found}. Start one with `loralane serve`, or name another with --url or LORALANE_URL."


def complain(message: str) -> None:
    """Says on standard error what went wrong."""
    Console(stderr=True).print(f"[red]error:[/red] {escape(message)}", highlight=False)


def fail(message: str) -> NoReturn:
    """Ends the command with status 1."""
    complain(message)
    raise typer.Exit(1)
