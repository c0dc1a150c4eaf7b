"""The command `loralane`, which imports each subcommand only when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from gateway.cli.subcommands import SUBCOMMANDS
from gateway.terminal.output import print_error
from gateway.terminal.tls import CHOSEN, TlsFileError, TlsFiles

MARKUP: Literal["markdown"] = "markdown"
PEM = "PEM file of"


class Commands(TyperGroup):
    """Command group that imports a subcommand's module only when it is called. For help and completion, the table's
    summaries stand in for the commands: to import all takes two seconds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=entry.summary) for name, entry in SUBCOMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of the command that is called, the command itself, and its arguments."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, imported(name) if name else None, rest


def imported(name: str) -> Any:
    """Import and return the subcommand of that name."""
    entry = SUBCOMMANDS[name]
    found, holder = getattr(import_module(entry.module), entry.name), typer.Typer(rich_markup_mode=MARKUP)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name)(found)
    return get_group(holder).commands[name]


app = typer.Typer(
    cls=Commands,
    help="A multi-LoRA, priority-lane serving gateway.",
    no_args_is_help=True,
    rich_markup_mode=MARKUP,
    pretty_exceptions_show_locals=False,  # local variables hold keys
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("loralane"))
        raise typer.Exit


@app.callback()
def root(
    _: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show version.")] = False,
    ca: Annotated[
        Path | None, typer.Option(envvar="LORALANE_CA", help=f"{PEM} the CAs to trust; default: the system's.")
    ] = None,
    cert: Annotated[Path | None, typer.Option(envvar="LORALANE_CERT", help=f"{PEM} the client certificate.")] = None,
    cert_key: Annotated[
        Path | None, typer.Option(envvar="LORALANE_CERT_KEY", help="PEM file of the key of --cert; default: that file.")
    ] = None,
) -> None:
    """A multi-LoRA, priority-lane serving gateway.

    For a gateway with TLS, name the certificates before the command:
    `loralane --ca ca.pem --cert me.pem --cert-key me.key adapters ls --url https://gateway:8443`.
    """
    CHOSEN.set(TlsFiles(ca, cert, cert_key))


def main() -> None:
    try:
        app()
    except TlsFileError as error:
        print_error(str(error))
        sys.exit(1)
