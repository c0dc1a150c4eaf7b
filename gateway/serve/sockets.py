"""Binds ports, for one process or for several that share them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.serve.launch import StartError


@contextmanager
def reserved(host: str, port: int) -> Iterator[int]:
    """Reserve a port, without listening, for processes that will share it; yields its number, also for port 0.

    The port is bound without SO_REUSEPORT first, which fails if another server has it: two servers that both share a
    port would each silently get half of the other's connections.

    Raises:
        StartError: another process has the port.
    """
    with bound(host, port) as probe:
        port = probe.getsockname()[1]
    with bound(host, port, shared=True) as kept:
        yield kept.getsockname()[1]


def bound(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a TCP socket bound to an address. `shared` sets SO_REUSEPORT. Raises StartError if that fails."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}; use another port") from error
    return listener
