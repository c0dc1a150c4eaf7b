"""A minimal HTTP client that streams each completion over its own socket and times bytes before it parses them, in a
few microseconds: a general one spends 100 us on a chunk, and would see some milliseconds late."""

from __future__ import annotations

import asyncio
import errno
import time
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from gateway.terminal.tls import chosen_tls_files
from lab.bench.dataset import plain_text
from lab.bench.plan import BenchRequest
from lab.bench.stream import Chunk, Stream

LANE_FIELDS: dict[str, dict[str, Any]] = {
    "interactive": {"service_tier": "priority", "priority": 0},
    "batch": {"service_tier": "flex", "priority": 10},
}
"""Request fields that name a lane: `service_tier` for loralane and OpenAI, `priority` for vLLM's scheduler."""
MAX_ERROR_BYTES = 65_536
CONNECT_SECONDS = 10.0
"""Maximum seconds for the first connection, which only checks that the server accepts connections."""

_decode = msgspec.json.Decoder(Chunk).decode


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure, the API key for it, and the optional request fields that it accepts."""

    url: str
    """Base URL, with or without /v1."""
    key: str = ""
    tiers: bool = True
    """True means that requests name their lane, by service_tier and priority."""
    extensions: bool = True
    """True means that requests have ignore_eos and return_token_ids. vLLM, SGLang and loralane know them; strict
    servers may refuse them."""
    chat: bool = False
    """True means that conversations go to /v1/chat/completions, instead of texts or ids to /v1/completions."""

    @property
    def address(self) -> tuple[str, int, bool]:
        """Return host, port and whether to use TLS. Raises ValueError if the URL has no host or another scheme than
        HTTP(S)."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the URL must begin with http:// or https:// and name a host, not {self.url!r}")
        tls = parts.scheme == "https"
        return parts.hostname, parts.port or (443 if tls else 80), tls

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def message(self, item: BenchRequest) -> bytes:
        """Return the bytes of a whole HTTP request, headers and body, for a streamed greedy answer to `item`."""
        body = msgspec.json.encode(self._body(item))
        headers = {"host": urlsplit(self.url).netloc, "content-type": "application/json", **self.headers}
        headers |= {"accept": "text/event-stream", "connection": "close", "content-length": str(len(body))}
        endpoint = "chat/completions" if self.chat else "completions"
        lines = [f"POST {urlsplit(self.base).path}/v1/{endpoint} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def _body(self, item: BenchRequest) -> dict[str, Any]:
        body = {
            "model": item.model,
            **self._prompt(item),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        lane = LANE_FIELDS.get(item.lane, {}) if self.tiers else {}
        return body | lane | ({"ignore_eos": True, "return_token_ids": True} if self.extensions else {})

    def _prompt(self, item: BenchRequest) -> dict[str, Any]:
        if self.chat:
            return {"messages": item.messages, "max_completion_tokens": item.max_tokens}
        return {
            "prompt": plain_text(item.messages) if item.messages else list(item.prompt),
            "max_tokens": item.max_tokens,
        }


class Exchange(asyncio.Protocol):
    """Protocol of one connection: sends `message` once connected, and fills in `stream` as the answer arrives, in
    seconds since `began` (of `time.perf_counter`). `done` is set when the answer has ended or failed."""

    def __init__(self, message: bytes, stream: Stream, began: float) -> None:
        self._message = message
        self._stream = stream
        self._began = began
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._tokens = 0
        self._finished = False
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from asyncio's
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter() - self._began
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            self._end("unreadable event")
        except httptools.HttpParserError:
            self._end("not HTTP")
        if self._tokens:
            self._stream.times.append(now)
            self._stream.chunk_tokens.append(self._tokens)
            self._tokens = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("connection lost")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._rest = (self._rest + body)[:MAX_ERROR_BYTES]
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # such as 100 Continue: the final response follows
            return
        self._end(
            None if self._finished else f"http {status}{error_code(self._rest)}" if status != 200 else "cut short"
        )

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._end(None)
            return
        chunk = _decode(data)
        if chunk.error is not None:
            self._end("stream error" + error_code(msgspec.json.encode(chunk)))
        for choice in chunk.choices:
            self._tokens += choice.tokens
            self._finished |= choice.finish_reason is not None
        self._stream.usage = chunk.usage or self._stream.usage

    def _end(self, error: str | None) -> None:
        """Record the end and its error (None for success), set `done` and close the connection. Later calls have no
        effect."""
        if not self.done.done():
            self._stream.error = error
            self._stream.ended = time.perf_counter() - self._began
            self.done.set_result(None)
            assert self._transport is not None
            self._transport.close()


def error_code(body: bytes) -> str:
    """Return the error code of an OpenAI-style body, or else its type, after a space; empty if neither is a text."""
    try:
        error = msgspec.json.decode(body)["error"]
        names = [name for key in ("code", "type") if isinstance(name := error.get(key), str) and name]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return ""
    return f" {names[0]}" if names else ""


class Client:
    """Sends requests to one target. An async context manager, which first opens a connection and resolves the host.
    Raises OSError if there is none, ValueError for an invalid URL, TlsFileError for unusable certificate files."""

    def __init__(self, target: Target, timeout_s: float = 600.0) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._host, self._port, tls = target.address
        self._tls = chosen_tls_files().context() if tls else None
        self._address = self._host

    async def __aenter__(self) -> Client:
        limit = min(self._timeout_s, CONNECT_SECONDS)
        try:
            async with asyncio.timeout(limit):
                _, writer = await asyncio.open_connection(self._host, self._port)
        except TimeoutError as error:
            raise TimeoutError(f"no connection within {limit:g} s") from error
        self._address = writer.get_extra_info("peername")[0]
        writer.close()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Do nothing: every request has closed its own connection."""

    async def send(self, item: BenchRequest, began: float) -> Stream:
        """Send a request over its own connection and return its outcome, perhaps a failure, after at most `timeout_s`.
        `began` is time.perf_counter() at the beginning of the run."""
        stream = Stream(item, sent=time.perf_counter() - began)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(stream, began)
        except TimeoutError:
            stream.error = "timeout"
        except OSError as error:
            stream.error = f"connect {_name(error)}"
        stream.ended = stream.ended or time.perf_counter() - began
        return stream

    async def _exchange(self, stream: Stream, began: float) -> None:
        message = self._target.message(stream.item)
        transport, protocol = await asyncio.get_running_loop().create_connection(
            lambda: Exchange(message, stream, began),
            self._address,
            self._port,
            ssl=self._tls,
            server_hostname=self._host if self._tls else None,
        )
        try:
            await protocol.done
        finally:
            transport.close()


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
