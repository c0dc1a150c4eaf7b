"""An OpenAI-compatible server that takes no time, for measuring proxies in front of it: raw ASGI with fixed bytes.

    python -m benchmarks.instant_upstream --port 9000

A streamed answer has `max_tokens` chunks with a word, between a first and a last one without, each its own server-sent
event, written as fast as the socket accepts them. An answer that is not streamed has all words in one body.
"""

from __future__ import annotations

import argparse
from itertools import cycle, islice
from typing import Any

import msgspec
import uvicorn

Send = Any
WORDS = tuple(f" word{number}" for number in range(16))
"""Words that answers cycle through: LiteLLM takes a hundred equal chunks in a row for a model stuck in a loop."""
HEAD = {"id": "chatcmpl-instant", "created": 1_700_000_000, "model": "instant"}
JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream")]


class Asked(msgspec.Struct):
    """The request fields that this server uses."""

    max_tokens: int = 1
    stream: bool = False


async def app(scope: dict[str, Any], receive: Any, send: Send) -> None:
    if scope["type"] != "http":
        return
    if scope["path"] == "/health":
        await _respond(send, b"{}")
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    asked = msgspec.json.decode(body, type=Asked)
    await (_stream if asked.stream else _whole)(send, asked.max_tokens)


async def _whole(send: Send, count: int) -> None:
    message = {"role": "assistant", "content": "".join(islice(cycle(WORDS), count))}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 20, "completion_tokens": count, "total_tokens": 20 + count}
    await _respond(
        send, msgspec.json.encode({**HEAD, "object": "chat.completion", "choices": [choice], "usage": usage})
    )


async def _respond(send: Send, body: bytes) -> None:
    headers = [*JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _stream(send: Send, count: int) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
    await _body(send, _event({"role": "assistant", "content": ""}))
    # Many events per write, so that this server writes faster than any proxy can read.
    words = [_event({"content": word}) for word in WORDS]
    for begin in range(0, count, len(words)):
        await _body(send, b"".join(words[: count - begin]))
    await _body(send, _event({}, "length") + b"data: [DONE]\n\n")
    await send({"type": "http.response.body", "body": b""})


async def _body(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    body = {**HEAD, "object": "chat.completion.chunk", "choices": [choice]}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instant_upstream", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    uvicorn.run(app, port=port, log_level="error", access_log=False, lifespan="off", http="httptools", loop="uvloop")


if __name__ == "__main__":
    main()
