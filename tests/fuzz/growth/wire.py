"""Sends requests as the bytes that they are, and says how each ended: with an answer, or with the connection's end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import NamedTuple

import grpc

from tests.fuzz import attack
from tests.fuzz.cases import GrpcCase
from tests.fuzz.growth.requests import GrpcCall, HttpRequest, Request

MOST_WATCHED = 1
"""Messages of an answer without an end, after which the caller leaves."""
MOST_KEPT = 16 * 2**20
"""Bytes of an answer that are kept; the rest is read and dropped."""
FAULTY = (500, 502)
FAULTY_CODES = ("INTERNAL", "UNKNOWN", "DATA_LOSS")
CLOSED = "closed"


class Ending(NamedTuple):
    words: str
    """As in `http 200`, `grpc INVALID_ARGUMENT`, `closed`."""
    wrong: bool = False
    answer: bytes = b""
    """Head and body of an HTTP answer, at most MOST_KEPT bytes of it."""


async def send(http: str, channel: grpc.aio.Channel, request: Request, seconds: float) -> Ending:
    """Send a request and read the whole answer. An answer that says that the gateway failed is wrong, and so is none
    within this time."""
    try:
        async with asyncio.timeout(seconds):
            return await (_http(http, request) if isinstance(request, HttpRequest) else _grpc(channel, request))
    except TimeoutError:
        return Ending(f"no answer within {seconds:g} s", True)


async def _http(url: str, request: HttpRequest) -> Ending:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**18)
    sending = asyncio.create_task(_write(writer, request.to_bytes()))
    try:
        return _ending(await _read(reader))
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    with suppress(ConnectionError):  # the server has refused the request before its end
        await writer.drain()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Return the beginning of an answer once all of it has arrived. An answer that is followed by the connection's
    reset has arrived, too."""
    kept = bytearray()
    with suppress(ConnectionError):
        while data := await reader.read(2**18):
            kept += data if len(kept) < MOST_KEPT else b""
    return bytes(kept)


def _ending(answer: bytes) -> Ending:
    first = answer.split(b"\r\n", 1)[0].split(b" ")
    if len(first) < 2 or not first[1].isdigit():
        return Ending(CLOSED)
    status = int(first[1])
    return Ending(f"http {status}", status in FAULTY, answer)


async def _grpc(channel: grpc.aio.Channel, call: GrpcCall) -> Ending:
    watches = MOST_WATCHED if "/Watch" in call.method else None
    case = GrpcCase(call.method, call.metadata, call.messages, call.client_streams, call.server_streams, watches)
    try:
        outcome, trouble = await attack.send_grpc(channel, case)
    except (ValueError, UnicodeError, TypeError, grpc.aio.UsageError) as error:
        return Ending(f"not sent: {type(error).__name__}")  # grpcio refuses some metadata itself
    return Ending(outcome, trouble.startswith(FAULTY_CODES) and attack.LOST_STATUS not in trouble)
