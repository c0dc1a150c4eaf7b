"""A connection between two engines, over a Unix socket or TCP with mutual TLS, on which every call has one deadline."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from engine.core.messages.moves import FetchEnd, MoveReport, PageMemory
from engine.rpc.pem import show, trust
from engine.rpc.target import UNIX, EngineTarget, EngineTls

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """The parts of this process's engine that moves of KV pages from and to other engines use."""

    identity: str
    """Hash that two engines share only if their KV pages are interchangeable."""
    memory: PageMemory
    """The host pages."""
    report: Callable[[MoveReport], None]
    """Passes a report to the engine."""
    clock: Clock
    """The engine's clock, in seconds."""


class MoveFailed(Exception):
    """Raised if a move of KV pages between engines cannot go on. `end` is how the fetch ends; the message says why."""

    def __init__(self, end: FetchEnd, message: str) -> None:
        super().__init__(message)
        self.end = end


class Line:
    """A connection to another engine, for moving KV pages. Calls raise MoveFailed: LATE at the deadline, CUT if the
    connection ended. Only `cut` may be called from other threads."""

    def __init__(self, raw: socket.socket, clock: Clock, deadline: float) -> None:
        """All calls together must be done by `deadline`, in seconds on `clock`, unless `extend` replaces it."""
        self._socket = raw
        self._clock = clock
        self._deadline = deadline

    def secure(self, context: ssl.SSLContext, *, server: bool) -> None:
        """Begin to use TLS on this connection, in the role of the TLS server or client."""
        with self._call(self.left()):
            self._socket = context.wrap_socket(self._socket, server_side=server)

    def send(self, data: memoryview | bytes) -> None:
        with self._call(self.left()):
            self._socket.sendall(data)

    def send_file(self, data: bytes, file: int) -> None:
        """Send bytes and, with them, a file descriptor. Only for Unix sockets."""
        with self._call(self.left()):
            socket.send_fds(self._socket, [data], [file])

    def receive(self, count: int) -> bytes:
        data = bytearray(count)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_into(self, view: memoryview) -> None:
        """Receive bytes until all of `view` is filled."""
        while view:
            with self._call(self.left()):
                count = self._socket.recv_into(view)
            view = view[_not_ended(count) :]

    def receive_file(self, count: int) -> tuple[bytes, int | None]:
        """Receive `count` bytes and the file descriptor that came with the first of them, if any."""
        with self._call(self.left()):
            data, files, _, _ = socket.recv_fds(self._socket, count, 1)
        try:
            return data + self.receive(count - len(data)), files[0] if files else None
        except MoveFailed:
            for file in files:
                os.close(file)
            raise

    def poll(self) -> int:
        """Receive and discard up to 4,096 bytes that have come already, without waiting, and return their number. Each
        is a receiver's acknowledgement of a page."""
        with self._call(0):
            try:
                data = self._socket.recv(1 << 12)
            except (BlockingIOError, ssl.SSLWantReadError):
                return 0
        return _not_ended(len(data))

    def cut(self) -> None:
        """End the connection: calls under way, and later ones, raise MoveFailed."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def extend(self, deadline: float) -> None:
        """Replace the deadline of all further calls (seconds on the connection's clock)."""
        self._deadline = deadline

    def left(self) -> float:
        """Return the seconds until the deadline. Raises MoveFailed (LATE) if it has passed."""
        if (left := self._deadline - self._clock()) <= 0:
            raise MoveFailed(FetchEnd.LATE, "the deadline passed")
        return left

    @contextmanager
    def _call(self, seconds: float) -> Iterator[None]:
        """Context manager that sets the socket's timeout to `seconds` for the call in its body. Raises MoveFailed if
        the call fails or times out."""
        self._socket.settimeout(seconds)
        try:
            yield
        except TimeoutError as error:
            raise MoveFailed(FetchEnd.LATE, "the deadline passed") from error
        except OSError as error:
            raise MoveFailed(FetchEnd.CUT, str(error) or type(error).__name__) from error


def _not_ended(count: int) -> int:
    """Return `count`, the number of bytes that a call received. Raises MoveFailed (CUT) if it is 0, which means that
    the other engine has closed the connection."""
    if not count:
        raise MoveFailed(FetchEnd.CUT, "the other engine closed the connection")
    return count


def connect(target: EngineTarget, clock: Clock, deadline: float) -> Line:
    """Connect to another engine, to fetch KV pages from it. Raises MoveFailed if it cannot be reached, ValueError if
    the TLS files cannot be used."""
    left = max(0.001, deadline - clock())
    try:
        if target.address.startswith(UNIX):
            raw = socket.socket(socket.AF_UNIX)
            raw.settimeout(left)
            raw.connect(target.address.removeprefix(UNIX))
        else:
            host, _, port = target.address.rpartition(":")
            raw = socket.create_connection((host.strip("[]"), int(port)), left)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise MoveFailed(FetchEnd.CUT, f"no connection to {target.address}: {error}") from error
    line = Line(raw, clock, deadline)
    if target.is_secure and target.tls is not None:
        line.secure(client_context(target.tls), server=False)
    return line


def listen(address: str) -> tuple[socket.socket, str]:
    """Listen for other engines at `unix:PATH`, which only this user may connect to, or `HOST:PORT`. Return the socket
    and the address for other engines, without a host if it listens on all interfaces. Raises OSError."""
    if address.startswith(UNIX):
        path = Path(address.removeprefix(UNIX))
        server = socket.socket(socket.AF_UNIX)
        _clear(path)
        server.bind(str(path))
        path.chmod(0o600)
        server.listen()
        return server, address
    host, _, port = address.rpartition(":")
    name = host.strip("[]")
    server = socket.create_server((name, int(port)), family=socket.AF_INET6 if ":" in name else socket.AF_INET)
    shown = "" if name in ("0.0.0.0", "::", "") else host
    return server, f"{shown}:{server.getsockname()[1]}"


def _clear(path: Path) -> None:
    """Remove the socket file at `path` that a killed process has left. Raises OSError if a process still listens
    there."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, f"another process listens at {path}")


def server_context(tls: EngineTls) -> ssl.SSLContext:
    """Return the TLS context of a listener that serves only engines with a certificate of the same authority. Files are
    read anew for each connection. Raises ValueError if they cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _filled(context, tls)


def client_context(tls: EngineTls) -> ssl.SSLContext:
    """Return the TLS context of a connection to another engine. Any certificate of the authority will do, as for
    gateways that connect to an engine: it certifies only the operator's own processes, whose machines may have any
    names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return _filled(context, tls)


def _filled(context: ssl.SSLContext, tls: EngineTls) -> ssl.SSLContext:
    trust(context, tls.ca)
    show(context, tls.certificate, tls.key)
    return context
