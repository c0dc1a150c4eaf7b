"""`loralane chat`: a conversation in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated

import httpx
import typer
from rich.markup import escape

from gateway.cli.http import open_http, refusal, unreachable
from gateway.cli.options import DEMO_TENANT_KEY, LOCAL_URL, ServerUrl, UserKey
from gateway.terminal.console import Console
from gateway.terminal.output import exit_with_error


def chat(
    model: Annotated[str | None, typer.Option(help="Name of a model or adapter; default: the base model.")] = None,
    url: ServerUrl = LOCAL_URL,
    key: UserKey = DEMO_TENANT_KEY,
    system: Annotated[str | None, typer.Option(help="System prompt; default: none.")] = None,
) -> None:
    """Chat with the base model or an adapter in the terminal.

    - `loralane chat --model pirate`
    - `loralane --ca ca.pem chat --url https://gateway:8000`
    """
    from gateway.cli.chat import ChatClient, ChatError

    try:
        ChatClient(url, key, model, system).run(Console())
    except ChatError as error:
        exit_with_error(str(error))


LANES = {"interactive": "priority", "batch": "flex"}
"""Lane -> the `service_tier` sent with questions."""
HELP = """\
/model         list the models
/model NAME    go on with another model, and the same conversation
/lane          show the lane that questions go to
/lane NAME     send questions to a lane: interactive or batch
/help          show this
/exit          leave, as Ctrl-D and Ctrl-C do; during an answer Ctrl-C stops the answer"""


class ChatError(Exception):
    """The gateway could not be reached or refused a request, or a command is invalid; the message is shown to users."""


class ChatClient:
    """A conversation in the terminal: stores its messages, sends questions to the gateway, and prints each answer as it
    streams. A `model` of None means the base model."""

    def __init__(self, url: str, key: str, model: str | None, system: str | None) -> None:
        self._http = open_http(url, key)
        self._model = model or ""
        self._lane = ""
        """Lane that questions go to. Empty means the tenant's default lane."""
        self._messages = [{"role": "system", "content": system}] if system else []

    def run(self, console: Console) -> None:
        """Read questions and /commands from the console and print the answers, until end of input, /exit or Ctrl-C,
        which during an answer stops only the answer. Later errors are printed; ChatError is raised only if at the start
        no gateway answers, the key is refused or the model is unknown."""
        models = self._models()
        self._model = checked_model(self._model or models[0], models)
        _tell(console, f"{self._model}; models: {', '.join(models)}; /help lists the commands")
        while True:
            try:
                text = console.input("[bold]you[/bold] ").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if text == "/exit":
                return
            try:
                if text.startswith("/"):
                    _tell(console, self._command(text))
                elif text:
                    self._turn(console, text)
            except ChatError as error:
                console.print(f"[red]{escape(str(error))}[/red]", highlight=False)

    def _command(self, text: str) -> str:
        """Run a command and return the text to show. Raises ChatError: the command is invalid, or the gateway fails."""
        name, _, given = text.partition(" ")
        given = given.strip()
        if name == "/help":
            return HELP
        if name == "/model":
            models = self._models()
            if given:
                self._model = checked_model(given, models)
                return f"now {self._model}"
            return f"{self._model}; models: {', '.join(models)}"
        if name == "/lane":
            if given and given not in LANES:
                raise ChatError(f"there is no lane {given!r}; there are: {', '.join(LANES)}")
            self._lane = given or self._lane
            return f"lane: {self._lane or 'the default of this key'}"
        raise ChatError(f"there is no command {name}; /help lists those that there are")

    def _turn(self, console: Console, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        console.print(f"[bold green]{escape(self._model)}[/bold green] ", end="")
        answer = ""
        try:
            for piece in self._stream():
                answer += piece
                console.print(piece, end="", markup=False, highlight=False)
        except KeyboardInterrupt:
            console.print(" [dim](stopped)[/dim]", end="")
        except ChatError as error:
            console.print(f"[red]{escape(str(error))}[/red]", end="")
        console.print()
        if answer:
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._messages.pop()  # drop an unanswered question, so that it can be asked again

    def _stream(self) -> Iterator[str]:
        body = {"model": self._model, "messages": self._messages, "stream": True}
        if self._lane:
            body["service_tier"] = LANES[self._lane]
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise ChatError(refusal(response))
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        yield _delta(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as error:
            raise ChatError(unreachable(self._http, error)) from error

    def _models(self) -> list[str]:
        try:
            response = self._http.get("/v1/models")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ChatError(unreachable(self._http, error)) from error
        if response.is_error:
            raise ChatError(refusal(response))
        return [model["id"] for model in response.json()["data"]]


def checked_model(name: str, models: list[str]) -> str:
    """Return `name`. Raises ChatError if it is not one of `models`, the models that the key may use; the message lists
    them and suggests the nearest."""
    if name in models:
        return name
    nearest = get_close_matches(name, models, 1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ChatError(f"there is no model {name!r}; {hint}there are: {', '.join(models)}")


def _tell(console: Console, text: str) -> None:
    console.print(text, style="dim", markup=False, highlight=False)


def _delta(frame: dict) -> str:
    if "error" in frame:
        raise ChatError(frame["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in frame["choices"])
