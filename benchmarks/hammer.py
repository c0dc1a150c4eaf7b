"""A load generator that takes a few microseconds per request: it sends fixed bytes and counts the answers' lines.

`lab/bench` sends realistic requests and times every token. This load generator only has to be faster than any
gateway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from gateway.serve.process import run_loop

NUMBER = "########"
"""Placeholder in a request that is replaced by different digits each time the request is sent."""
_numbers = count()


class HammerError(RuntimeError):
    """The server closed a connection, or its status was not 200; then the message quotes the answer."""


def numbered(message: bytes) -> bytes:
    """Return the message with `NUMBER` replaced by a new number."""
    return message.replace(NUMBER.encode(), b"%0*d" % (len(NUMBER), next(_numbers)))


@dataclass(frozen=True, slots=True)
class Shot:
    """The bytes of a request, with the placeholder `NUMBER`, and the server's address."""

    host: str
    port: int
    message: bytes


def shot(url: str, body: Mapping[str, Any], key: str = "") -> Shot:
    """Return the request for a chat completion with `body`, authorized by the API key unless it is empty."""
    place, text = urlsplit(url), msgspec.json.encode(body)
    headers = {"host": place.netloc, "content-type": "application/json", "content-length": str(len(text))}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    lines = ["POST /v1/chat/completions HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return Shot(place.hostname or "", place.port or 80, "\r\n".join(lines).encode() + text)


@dataclass(slots=True)
class Tally:
    """Results of one measuring interval."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """Latency in seconds of each request that ended in the interval."""
    events: int = 0
    """Number of server-sent events that carry a token."""

    @property
    def requests_per_second(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def events_per_second(self) -> float:
        return self.events / self.seconds


class Connection(asyncio.Protocol):
    """A keep-alive connection that sends the next request when an answer has ended, until `leave` is called. The future
    `done` ends then, or with HammerError when the server closes the connection or answers another status than 200."""

    def __init__(self, hammer: Hammer) -> None:
        self._hammer = hammer
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._sent = 0.0
        self._failure = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(HammerError(f"the server closed a connection: {exc or 'without a word'}"))

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._failure += body
        self._hammer.newlines += body.count(b"\n")

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._end(HammerError(f"http {status}: {self._failure[:500].decode(errors='replace')}"))
            return
        self._hammer.ended(time.perf_counter() - self._sent)
        asyncio.get_running_loop().call_soon(self._send)

    def leave(self) -> None:
        """Close the connection, possibly in the middle of an answer."""
        self._end(None)

    def _send(self) -> None:
        if self.done.done():
            return
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._sent = time.perf_counter()
        self._transport.write(self._hammer.next_message())

    def _end(self, error: HammerError | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
        assert self._transport is not None
        self._transport.close()


class Hammer:
    """Provides the requests of all connections and counts their answers since the last `reset`."""

    def __init__(self, target: Shot) -> None:
        self._message = target.message
        self.newlines = 0
        self._latencies: list[float] = []

    def next_message(self) -> bytes:
        return numbered(self._message)

    def ended(self, seconds: float) -> None:
        self._latencies.append(seconds)

    def reset(self) -> None:
        self.newlines = 0
        self._latencies = []

    def tally(self, seconds: float, silent_events: int) -> Tally:
        """Return the results of the `seconds` since `reset`. `silent_events` is the number of events per stream that
        carry no token, which are subtracted for each stream that has ended."""
        events = self.newlines // 2 - silent_events * len(self._latencies)
        return Tally(seconds, self._latencies, max(0, events))


async def _strike(target: Shot, connections: int, warmup_s: float, seconds: float, silent_events: int) -> Tally:
    hammer, loop = Hammer(target), asyncio.get_running_loop()
    links = [
        (await loop.create_connection(lambda: Connection(hammer), target.host, target.port))[1]
        for _ in range(connections)
    ]
    await _until_done_or(links, warmup_s)
    hammer.reset()
    began = time.perf_counter()
    await _until_done_or(links, seconds)
    found = hammer.tally(time.perf_counter() - began, silent_events)
    for link in links:
        link.leave()
    return found


async def _until_done_or(links: Sequence[Connection], seconds: float) -> None:
    """Wait `seconds`. Raises HammerError as soon as a connection fails."""
    done, _ = await asyncio.wait([link.done for link in links], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for link in done:
        link.result()


def strike(
    target: Shot, connections: int, *, warmup_s: float = 1.0, seconds: float = 5.0, silent_events: int = 0
) -> Tally:
    """Keep `connections` requests in flight for `warmup_s`, then measure for `seconds`. `silent_events` is the number
    of events of each stream that carry no token. Raises HammerError if a request fails, OSError without a server."""
    return run_loop(_strike(target, connections, warmup_s, seconds, silent_events))
