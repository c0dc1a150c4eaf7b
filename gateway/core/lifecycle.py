"""The life of one gateway process: it serves until it drains, and a drain never ends in serving again."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.core.errors import ApiError, Fault

DRAINING = "draining"
"""Reason that readiness gives while a gateway drains."""
DRAINING_HEADER = "x-loralane-draining"
"""Response header of requests that were refused because the gateway drains: another gateway would serve them."""
RETRY_SECONDS = 1.0


def new_gateway_id() -> str:
    """Return an id for this process that no other gateway process has, not even one before it in the same container."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def machine_of(gateway: str) -> str:
    """Return the name of the machine on which the gateway with this id runs."""
    return gateway.rsplit("-", 2)[0]


class Lifecycle:
    """State of one gateway process: it serves, then drains, and at last refuses what tenants send. Counts the requests
    in progress at its HTTP ports, so that the drain ends with the last of them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns the Unix time in seconds."""
        self.id = new_gateway_id()
        self.since = clock()
        """Unix time at which the gateway began to serve or, once it drains, to drain."""
        self.draining = asyncio.Event()
        """Set when the gateway begins to drain."""
        self.ending = asyncio.Event()
        """Set when an administrator asks that the process end after the drain."""
        self.refuses = False
        """True once new requests of tenants are refused."""
        self.is_alone = False
        """True if the gateway drains alone: others that share its ports, if there are any, take its new connections."""
        self._clock = clock
        self._num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_draining(self) -> bool:
        return self.draining.is_set()

    def drain(self, *, alone: bool = False) -> None:
        """Begin to drain, unless the gateway drains already. `alone` means that gateways on the same ports go on."""
        if not self.is_draining:
            self.since, self.is_alone = self._clock(), alone
            self.draining.set()

    def refuse(self) -> None:
        """Refuse new requests of tenants from now on."""
        self.refuses = True

    def check(self) -> None:
        """Raise ApiError (ENGINE_UNAVAILABLE) if new requests of tenants are refused."""
        if self.refuses:
            message = "the gateway is draining; try again, on a new connection"
            headers = {DRAINING_HEADER: "true"}
            raise ApiError(Fault.ENGINE_UNAVAILABLE, message, retry_after=RETRY_SECONDS, extra_headers=headers)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a request in progress during the block."""
        self._num_requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no request is in progress."""
        await self._idle.wait()
