"""Watches the embedded Valkey and the disk that it writes to: restarts it when it gives no answer, says what is wrong
when it answers with an error, and frees space for it."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from gateway.core.space import Disk, SpaceUse

CHECK_SECONDS = 0.5
CHECKS = 3
"""Number of consecutive checks without an answer, CHECK_SECONDS apart, after which the server is restarted."""
ANSWER_SECONDS = 1.0
MAX_ANSWER = 4096
"""Maximum bytes of an answer that are read. Errors of Valkey have some hundred."""
PING = b"*1\r\n$4\r\nPING\r\n"
OUT_OF_MEANS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
"""Errors of connecting that are a lack of this process or machine and say nothing about the server."""
BALLAST_BYTES = 32 * 2**20
"""Size of the ballast file: the store writes some kilobytes for a request, so that this lasts for thousands of them,
and among them the deletions that free more."""
BALLAST_PARTS = 32
"""The ballast has at most the disk's size divided by this."""
RELEASE_PARTS = 4
"""The ballast is deleted when less than its size divided by this is free."""

log = structlog.get_logger("redis")


class Pulse:
    """Asks the embedded server whether it is well, over one connection that stays open: a check needs no descriptor,
    which this process or the server may lack. Methods block for at most about 2 s."""

    def __init__(self, socket_path: Path) -> None:
        self._path = str(socket_path)
        self._socket: socket.socket | None = None

    def ping(self) -> str:
        """Return the error with which the server answers PING, such as `MISCONF ...` if it cannot write its file, or
        `LOADING ...`; empty if it is well. Raises OSError if it gives no answer."""
        if self._socket is not None:
            try:
                return self._exchange(self._socket)
            except TimeoutError:
                self.close()
                raise
            except OSError:  # the server was restarted, or has closed the connection
                self.close()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(ANSWER_SECONDS)
            self._socket.connect(self._path)
            return self._exchange(self._socket)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, connection: socket.socket) -> str:
        connection.sendall(PING)
        answer = b""
        while not answer.endswith(b"\r\n"):
            piece = connection.recv(MAX_ANSWER)
            answer += piece
            if not piece or len(answer) > MAX_ANSWER:
                raise ConnectionResetError(errno.ECONNRESET, "the server hung up")
        return answer[1:].decode(errors="replace").strip() if answer.startswith(b"-") else ""


class Ballast:
    """A file that occupies some of the store's disk, and is deleted when there is no room, so that the store can still
    write, and with it what tenants delete. Methods block."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path, self._disk = path, disk
        self._had_room = True

    def look(self) -> None:
        """Delete the file if the disk is almost full; make it if there is a whole reserve of room beside it. Log when
        uploads begin or cease to be refused. Does nothing if the disk fails."""
        with suppress(OSError):
            self._tell(self._disk.has_room(SpaceUse.UPLOAD))
            if self._path.exists():
                if self._disk.free < self._size // RELEASE_PARTS:
                    self._path.unlink()
                    log.warning("ballast_released", reason="the disk of the store is full", free_bytes=self._disk.free)
            elif self._disk.has_room(SpaceUse.RESULT, self._size):
                self._make()

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _tell(self, has_room: bool) -> None:
        if has_room != self._had_room:
            say = log.info if has_room else log.warning
            event = "disk_has_room" if has_room else "disk_almost_full"
            say(event, free_bytes=self._disk.free, reserve_bytes=self._disk.reserve, folder=str(self._disk.folder))
        self._had_room = has_room

    @property
    def _size(self) -> int:
        return min(BALLAST_BYTES, self._disk.total // BALLAST_PARTS)

    def _make(self) -> None:
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, self._size)
        finally:
            os.close(handle)


@dataclass(slots=True)
class Watchdog:
    """Checks the embedded server, in `keep_running`, for as long as the server is to run."""

    pulse: Pulse
    ballast: Ballast
    restart: Callable[[], None]
    """Blocks until the server runs again, or has failed to."""
    _silent: int = 0
    """Number of checks in a row without an answer."""
    _trouble: str = ""
    """What was logged last; empty means that the server is well."""

    async def keep_running(self) -> None:
        """Check the server every CHECK_SECONDS, and restart it after CHECKS checks without an answer. One that answers
        with an error is logged, once for each: a restart would lose what it has not written."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            checking = asyncio.ensure_future(asyncio.to_thread(self.check))
            try:
                await asyncio.shield(checking)
            except asyncio.CancelledError:
                await asyncio.wait([checking])  # a thread cannot be cancelled, and must not restart a stopped server
                raise

    def check(self) -> None:
        """Check the disk and then the server once, and restart that if it is due. Blocks."""
        self.ballast.look()
        try:
            self._tell(self.pulse.ping())
            self._silent = 0
        except OSError as error:
            if error.errno in OUT_OF_MEANS:
                self._tell(f"it cannot be asked: {error.strerror}")
                return
            self._silent += 1
        if self._silent >= CHECKS:
            log.error("valkey_restarted", reason="it stopped answering")
            self.pulse.close()
            self.restart()
            self._silent = 0

    def _tell(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            log.error("valkey_ill", reason=trouble)
        elif self._trouble and not trouble:
            log.info("valkey_well")
        self._trouble = trouble
