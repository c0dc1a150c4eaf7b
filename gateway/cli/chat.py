"""`loralane chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from gateway.cli.address import LOCAL_URL, ServerUrl
from gateway.cli.as_tenant import DEMO_KEY, UserKey
from gateway.outputs import fail


def chat(
    model: Annotated[str | None, typer.Option(help="Base or adapter name; default: the base.")] = None,
    url: ServerUrl = LOCAL_URL,
    key: UserKey = DEMO_KEY,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
) -> None:
    """Chat in the terminal.

    - `loralane chat --model pirate`
    - `loralane --ca ca.pem chat --url https://gateway:8000`
    """
    from gateway.cli.clients.chat import ChatClient, ChatError

    try:
        ChatClient(url, key, model, system).run(Console())
    except ChatError as error:
        fail(str(error))
