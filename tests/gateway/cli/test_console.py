"""What a server, a file or a model says cannot command the terminal that a command prints it on."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

import gateway
from gateway.cli.batch_watch import batch_facts, batches_table, errors_table
from gateway.terminal.console import Console, plain

EVIL = "a\x1b]0;title\x07b\x1b[2J\x9b31m\x08\r\x7fc"
FOREIGN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
COUNTS = {"total": 3, "completed": 1, "failed": 1}
BATCH = {
    "id": EVIL,
    "status": EVIL,
    "endpoint": EVIL,
    "created_at": 1,
    "expires_at": 2,
    "metadata": {EVIL: EVIL},
    "request_counts": COUNTS,
    "errors": {"data": [{"line": 1, "code": EVIL, "message": EVIL}]},
}


def printed(*things: object, **options) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=200, highlight=False)
    for thing in things:
        console.print(thing, **options)
    return console.file.getvalue()


def test_plain_text_keeps_what_is_text():
    assert plain("a\tb\nc ä € 🎉 \x1b[31m") == "a\tb\nc ä € 🎉 [31m"


@pytest.mark.parametrize("wrap", [str, Text, lambda text: Text(text, "bold red")])
def test_no_control_character_of_a_text_is_printed(wrap):
    assert not FOREIGN.search(printed(wrap(EVIL), markup=False))


def test_tables_of_batches_are_clean():
    table = Table(EVIL)
    table.add_row(Text(EVIL))
    out = printed(table, batch_facts(BATCH), batches_table([BATCH]), errors_table(BATCH))
    assert not FOREIGN.search(out)
    assert "title" in out


def test_styles_and_bars_of_the_console_itself_still_work():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard")
    console.print(Text("red", "red"))
    assert file.getvalue() == "\x1b[31mred\x1b[0m\n"
    with Progress(TextColumn("{task.description}"), console=console) as progress:
        progress.add_task(EVIL)
    assert not re.search(r"\x1b\]|\x1b\[2J|\x9b|\x07|\x08|\x7f", file.getvalue())


def test_all_commands_print_on_this_console():
    sources = Path(gateway.__file__).parent.rglob("*.py")
    users = [path for path in sources if "from rich.console import Console\n" in path.read_text()]
    assert users == []
