"""Input and output of commands: numbers such as `100k`, checks of output files, tables and error messages."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn

import typer
from rich.markup import escape
from rich.table import Table

from gateway.core.counts import parse_count
from gateway.terminal.console import Console

LOCAL_URL = "http://127.0.0.1:8000"
"""Default address of the gateway that commands connect to."""
WIDEST = 10_000
"""Table width in columns, more than any table needs, that `print_wide` allows when it measures a table."""


def check_writable(path: Path, option: str) -> None:
    """Raise ValueError if no file can be created or overwritten at `path`, without writing it. The message names
    `option`, the command-line option that gave the path."""
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: this file cannot be written")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file atomically: yields a temporary file in the same folder, which is synced to disk and replaces `path`
    when the block ends without an error. After an error the temporary file is removed, and `path` stays as it was."""
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
    """Print a table to standard output at the width that its cells need, even if the terminal is narrower and wraps."""
    console = Console()
    needed = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
    Console(width=max(console.width, needed)).print(table)


def command_as_called() -> str:
    """Return what calls this command again: `loralane` if the PATH has the script that runs, otherwise the script or
    `python -m gateway` as it was called. A process of another kind gets `loralane`."""
    script = Path(sys.argv[0])
    if (script.parent.name, script.name) == ("gateway", "__main__.py"):
        return f"{shlex.quote(sys.orig_argv[0])} -m gateway"
    if script.name != "loralane":
        return "loralane"
    known = shutil.which("loralane")
    return "loralane" if known and os.path.samefile(known, script) else shlex.quote(str(script))


def no_gateway_message(url: str, reason: str = "") -> str:
    """Return the error message of a command that cannot reach a gateway at `url`. It contains `reason`, the message of
    the HTTP library, unless the connection was refused."""
    found = f"No gateway answers at {url}"
    found += f" ({reason})" if reason and "refused" not in reason.lower() else ""
    return f"{found}. Start one with `loralane serve`, or name another with --url or LORALANE_URL."


def print_error(message: str) -> None:
    """Print `error:` and a message, not parsed as markup, to standard error."""
    Console(stderr=True).print(f"[red]error:[/red] {escape(message)}", highlight=False)


def exit_with_error(message: str) -> NoReturn:
    """Print an error message to standard error and end the command with status 1, by raising typer.Exit."""
    print_error(message)
    raise typer.Exit(1)


def integer_parser(least: int | None = None, most: int | None = None) -> Callable[[str | int], int]:
    """Return a parser for whole numbers such as `100k`, from `least` to `most`; None means no bound. The parser raises
    typer.BadParameter. The help text shows its name, `integer`, as the type of the option."""

    def integer(value: str | int) -> int:
        number = _parsed(value) if isinstance(value, str) else value  # a default is a number already
        if (least is not None and number < least) or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise typer.BadParameter(f"it must be {bounds}, not {number}")
        return number

    return integer


def _parsed(text: str) -> int:
    try:
        return -parse_count(text[1:]) if text.startswith("-") else parse_count(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
