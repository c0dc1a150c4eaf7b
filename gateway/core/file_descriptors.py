"""File descriptors of a gateway process: as many as the system allows, of which clients' connections leave some free.

A gateway needs descriptors of its own to ask the store, to write files and to reach engines. Clients whose connections
have used all of them up stop it.
"""

from __future__ import annotations

import sys
from contextlib import suppress

if sys.platform != "win32":
    import resource

MOST = 2**16
"""Maximum limit that is asked for, because each connection may hold some 300 KiB for a minute. Systems without a limit
report a number that they refuse to set."""
RESERVED = 128
"""Descriptors that connections leave free: 32 of connections to the store, 8 of files, 6 for each check of a batch, and
those of engines, upstreams, downloads and listeners."""
SMALL_PARTS = 4
"""Where few descriptors are allowed, this part of them is left free."""
GRPC_PARTS = 8
"""A gRPC port may have this part of the connections. There are at most two, and HTTP ports have the rest together."""
USUAL = 1024
"""Limit that is assumed where the system does not say."""


def raise_limit() -> None:
    """Raise this process's limit of descriptors, which its later children inherit, as far as the system allows. Shells
    and services often start programs with 1,024 where half a million are allowed."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS allows fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def grpc_connections() -> int:
    """Return the maximum number of connections of one gRPC port."""
    return _for_clients() // GRPC_PARTS


def http_descriptors() -> int:
    """Return the number of this process's descriptors from which on no HTTP connection is accepted. The kernel gives
    each new descriptor the lowest free number, so that one with this number means that there are as many."""
    return _for_clients() - 2 * grpc_connections()


def _for_clients() -> int:
    limit = _limit()
    return limit - min(RESERVED, limit // SMALL_PARTS)


def _limit() -> int:
    if sys.platform == "win32":
        return USUAL
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)
