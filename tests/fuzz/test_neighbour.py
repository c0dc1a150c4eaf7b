"""The fuzzer's neighbour: a stream that is not whole, or none at all, is a failure of the run."""

import asyncio

import pytest

from tests.fuzz.neighbour import Neighbour, stream_beside

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
WHOLE = HEAD + b"data: {}\n\ndata: [DONE]\n\n"


async def beside(answer, hang_seconds=30.0):
    """Return what the neighbour has seen of a server that answers each request with these bytes; None: with nothing."""
    answered = asyncio.Event()

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        if answer is not None:
            writer.write(answer)
            writer.close()
        else:
            await reader.read()  # until the neighbour has given up
        answered.set()

    seen = Neighbour()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with stream_beside(f"http://127.0.0.1:{port}", seen, hang_seconds):
            await answered.wait()
    return seen


async def test_whole_streams_are_timed():
    seen = await beside(WHOLE)
    assert seen.ttft and not seen.failures


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (HEAD, "status 200, and at its end []"),
        (HEAD + b"data: {}\n\n", "data: {}"),
        (HEAD + b"\xff", "status 200"),
        (b"HTTP/1.1 503 Busy\r\nconnection: close\r\n\r\nbusy", "status 503"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", "RemoteProtocolError"),
        (b"", "RemoteProtocolError"),
    ],
)
async def test_streams_that_are_not_whole_are_failures(answer, words):
    seen = await beside(answer)
    assert not seen.ttft and words in seen.failures[0]
    assert seen.failures[-1] == "none of the neighbour's streams was whole"


async def test_a_stream_that_hangs_is_a_failure():
    seen = await beside(None, hang_seconds=0.2)
    assert not seen.ttft and "Timeout" in seen.failures[0]
