"""Taking ports of the machine, for one process or for several that share them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.serve.launch import StartError


@contextmanager
def reserved(host: str, port: int) -> Iterator[int]:
    """Keeps a port for processes that will share it, without listening; yields it, which tells what port 0 became.

    Raises:
        StartError: somebody else has it. Sharing is asked for only after that: two servers that both share would each
            get half of the other's connections, without a word.
    """
    with bound(host, port) as probe:
        port = probe.getsockname()[1]
    with bound(host, port, shared=True) as kept:
        yield kept.getsockname()[1]


def bound(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Raises StartError."""
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
