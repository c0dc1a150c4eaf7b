"""Options that commands share: the gateway's HTTP address, which names the gRPC port, keys and JSON output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated
from urllib.parse import urlsplit

import typer
from google.protobuf.message import Message
from rich.table import Table

from gateway.terminal.console import Console
from gateway.terminal.output import LOCAL_URL as LOCAL_URL
from gateway.terminal.output import exit_with_error, message_json, no_gateway_message, print_wide
from gateway.terminal.tls import TLS_TARGET, chosen_tls_files

ASK_SECONDS = 10.0

ServerUrl = Annotated[
    str, typer.Option("--url", envvar="LORALANE_URL", help="HTTP address of the gateway: http:// or https://HOST:PORT.")
]
AdminUrl = Annotated[
    str,
    typer.Option(
        "--url",
        "--target",
        envvar="LORALANE_URL",
        help="HTTP address of the gateway: http:// or https://HOST:PORT. HOST:PORT alone is its gRPC address.",
    ),
]


def grpc_target(url: str) -> str:
    """Ask the gateway at the HTTP address `url` for its gRPC port, and return its gRPC address, in the form for
    `TlsFiles.channel`. An address without a scheme is a gRPC address already and is returned unchanged. Ends the
    command with an error if no gateway with a gRPC port answers. Raises TlsFileError if a TLS file cannot be used."""
    if "://" not in url:
        return url
    import httpx

    try:
        with httpx.Client(timeout=ASK_SECONDS, verify=chosen_tls_files().context()) as http:
            answer = http.get(url.rstrip("/") + "/", headers={"accept": "application/json"})
        grpc = answer.json()["grpc"]
        host, port = urlsplit(url).hostname or "", int(grpc["port"])
        scheme = TLS_TARGET if grpc["tls"] else ""
    except (httpx.TransportError, httpx.InvalidURL) as error:
        exit_with_error(no_gateway_message(url, str(error)))
    except (ValueError, KeyError, TypeError):
        exit_with_error(
            f"What answers at {url} is no gateway, or does not serve gRPC; name another with --url or LORALANE_URL."
        )
    return f"{scheme}[{host}]:{port}" if ":" in host else f"{scheme}{host}:{port}"


console = Console(stderr=True)

DEMO_KEY = "sk-demo-admin"

AdminKey = Annotated[str, typer.Option("--key", envvar="LORALANE_ADMIN_KEY", help="API key of an administrator.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with the fields of the HTTP API.")]


def show_messages(table: Table, messages: Iterable[Message], as_json: bool) -> None:
    """Print `messages` as a JSON array if `as_json` is True, otherwise the table that the caller made of them."""
    if as_json:
        print(json.dumps([message_json(message) for message in messages], indent=2))
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

UserKey = Annotated[str, typer.Option("--key", envvar="LORALANE_API_KEY", help="API key of a tenant.")]
