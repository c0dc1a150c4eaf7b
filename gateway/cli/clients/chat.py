"""A terminal chat over the gateway's own HTTP API."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
from rich.console import Console
from rich.markup import escape

from gateway.cli.clients.http import open_http, refusal, unreachable


class ChatError(Exception):
    """The server could not be reached or refused; the message is for people."""


class ChatClient:
    """Keeps the conversation and streams each answer as it comes."""

    def __init__(self, url: str, key: str, model: str | None, system: str | None) -> None:
        self._http = open_http(url, key)
        self._model = model
        self._messages = [{"role": "system", "content": system}] if system else []

    def run(self, console: Console) -> None:
        """Until end of input, Ctrl-C or /exit. Raises ChatError before the first question if nobody answers."""
        model = self._model or self._models()[0]
        console.print(f"[dim]{model}; models: {', '.join(self._models())}; /model NAME switches, /exit leaves[/dim]")
        while True:
            try:
                text = console.input("[bold]you[/bold] ").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if text == "/exit":
                return
            if text.startswith("/model "):
                model = text.removeprefix("/model ").strip()
            elif text:
                self._turn(console, model, text)

    def _turn(self, console: Console, model: str, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        console.print(f"[bold green]{model}[/bold green] ", end="")
        answer = ""
        try:
            for piece in self._stream(model):
                answer += piece
                console.print(piece, end="", markup=False, highlight=False)
        except KeyboardInterrupt:
            console.print(" [dim](stopped)[/dim]", end="")
        except ChatError as error:
            console.print(f"[red]{escape(str(error))}[/red]", end="")
        console.print()
        self._messages.append({"role": "assistant", "content": answer})

    def _stream(self, model: str) -> Iterator[str]:
        body = {"model": model, "messages": self._messages, "stream": True}
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
        except httpx.TransportError as error:
            raise ChatError(unreachable(self._http, error)) from error
        if response.is_error:
            raise ChatError(refusal(response))
        return [model["id"] for model in response.json()["data"]]


def _delta(frame: dict) -> str:
    if "error" in frame:
        raise ChatError(frame["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in frame["choices"])
