"""Redis behind TLS: a real Valkey behind a port that speaks it, by redis-py's clients and by our own line."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis.exceptions
from certificates import Authority

from gateway.redis.connect import connect_server
from gateway.redis.pipeline import Pipeline

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority.at(tmp_path_factory.mktemp("authority"))


async def pour(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while piece := await source.read(65536):
            sink.write(piece)
            await sink.drain()
    except (ConnectionError, ssl.SSLError):
        return
    finally:
        sink.close()


@asynccontextmanager
async def behind_tls(port: int, authority: Authority) -> AsyncIterator[int]:
    """A port before another one, which lets in who shows a certificate."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pour(reader, inner[1]), pour(inner[0], writer))

    config = authority.issue("redis")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.file)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(config.cert, config.key)
    server = await asyncio.start_server(carry, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_redis_over_tls(valkey, valkey_server, authority, tmp_path):
    shown = authority.issue("gateway")
    proof = f"ssl_certfile={shown.cert}&ssl_keyfile={shown.key}"
    async with behind_tls(valkey_server.port, authority) as port:
        url = f"rediss://127.0.0.1:{port}?{proof}"
        async with connect_server(f"{url}&ssl_ca_certs={authority.file}") as client:
            assert await client.set("spoken", "in secret")
            assert await Pipeline(client, 10.0).call("GET", "spoken") == b"in secret"
        other = Authority.at(tmp_path)
        for unbelieved in (url, f"{url}&ssl_ca_certs={other.file}"):
            async with connect_server(unbelieved) as client:
                with pytest.raises(redis.exceptions.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                    await client.ping()
