"""Reads answers of the gateway: the tokens that their usage counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

IN = ("prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
"""Names of what is read, by protocol. Anthropic's counts what was cached apart from the rest."""
OUT = ("completion_tokens", "output_tokens")


class Tokens(NamedTuple):
    prompt: int = 0
    completion: int = 0

    def __add__(self, other: Tokens) -> Tokens:  # type: ignore[override]
        return Tokens(self.prompt + other.prompt, self.completion + other.completion)


def http_body(answer: bytes) -> bytes:
    """Return the body of a whole answer of HTTP/1.1, without the lengths of its chunks."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    pieces = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size or b"0", 16)
        pieces.append(rest[:length])
        rest = rest[length + 2 :]
    return b"".join(pieces)


def counted(body: bytes) -> Tokens:
    """Return the usage that a JSON answer or the events of a stream speak of; each later count of a stream includes the
    earlier ones."""
    prompt = completion = 0
    for said in _documents(body):
        for usage in _usages(said):
            prompt = max(prompt, sum(usage.get(name) or 0 for name in IN))
            completion = max(completion, sum(usage.get(name) or 0 for name in OUT))
    return Tokens(prompt, completion)


def _documents(body: bytes) -> Iterator[Any]:
    if body.startswith(b"{"):
        yield json.loads(body)
        return
    for line in body.splitlines():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def _usages(said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for place in (said, said.get("response"), said.get("message")):
        if isinstance(place, dict) and isinstance(place.get("usage"), dict):
            yield place["usage"]
