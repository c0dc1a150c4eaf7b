"""The command `loralane`, which imports each subcommand only when it is called."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup
from typer.main import get_group

from gateway.terminal.output import print_error
from gateway.terminal.tls import CHOSEN, TlsFileError, TlsFiles

COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("gateway.cli.serve", "serve"),
    "engine": ("gateway.cli.engine", "engine"),
    "check": ("gateway.cli.check", "check"),
    "chat": ("gateway.cli.chat", "chat"),
    "simulate": ("gateway.cli.simulate", "simulate"),
    "analyze": ("gateway.cli.analyze", "analyze"),
    "plan": ("gateway.cli.plan", "plan"),
    "usage": ("gateway.cli.usage", "usage"),
    "adapters": ("gateway.cli.adapters", "app"),
    "limits": ("gateway.cli.limits", "app"),
    "engines": ("gateway.cli.engines", "app"),
    "lanes": ("gateway.cli.operations", "lanes"),
    "requests": ("gateway.cli.operations", "requests"),
    "tenants": ("gateway.cli.tenants", "tenants"),
    "keys": ("gateway.cli.tenants", "keys"),
    "batch": ("gateway.cli.batch", "app"),
    "bench": ("gateway.bench.command", "app"),
    "eval": ("gateway.cli.eval", "app"),
    "route": ("gateway.cli.route", "app"),
}
"""Subcommand -> its module, and the name in that module of a function or of a typer app with further commands."""
MARKUP: Literal["markdown"] = "markdown"
PEM = "PEM file of"


class Commands(TyperGroup):
    """Command group that imports a subcommand's module only when it is called: to import all takes a third of a
    second."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands = names  # the base class lists these names, and suggests one for a mistyped name

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return the click command of that name; None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        found, holder = getattr(import_module(module), name), typer.Typer(rich_markup_mode=MARKUP)
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=cmd_name)
        else:
            holder.command(cmd_name)(found)
        return get_group(holder).commands[cmd_name]


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
