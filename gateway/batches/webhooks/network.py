"""Connections to checked addresses only: the host name is resolved here, and the connection goes to the address that
was checked. TLS still verifies the host name. No other code resolves the name, so it cannot change to another address
between the check and the connection (DNS rebinding)."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpcore

from gateway.core.safe_url import Address, SafeUrl, check_addresses


class Resolver:
    """Resolves host names for one tenant's deliveries, in a thread of its own. A name server that does not answer holds
    a thread for half a minute, and would hold all threads that the process's other work shares."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "webhook-names")

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host. Raises OSError if there are none."""
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        answers = await asyncio.get_running_loop().run_in_executor(self._thread, ask)
        return [str(place[0]) for *_, place in answers]

    def close(self) -> None:
        """Accept no more names. One that is being resolved goes on in the background."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Network backend of httpcore that resolves and checks host names. Raises UnsafeUrl if a request must not go to one
    of a host's addresses."""

    def __init__(self, resolver: Resolver, *, inner: bool) -> None:
        """`inner` also allows addresses of this machine and of private networks."""
        self._resolver, self._inner = resolver, inner
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the interface is httpcore's
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        *others, last = await self._resolve(host, port)
        for address in others:
            try:
                return await self._network.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except httpcore.ConnectError:
                continue
        return await self._network.connect_tcp(str(last), port, timeout, local_address, socket_options)

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.UnsupportedProtocol("requests go to addresses")

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)

    async def _resolve(self, host: str, port: int) -> list[Address]:
        try:
            addresses = await self._resolver.addresses(host, port)
        except OSError as error:
            raise httpcore.ConnectError(f"{host} cannot be resolved: {error}") from error
        return check_addresses(host, addresses, inner=self._inner)


async def post(
    url: SafeUrl, headers: Mapping[str, str], body: bytes, tls: ssl.SSLContext, resolver: Resolver, *, inner: bool
) -> int:
    """Send a POST request and return the status code of the response. The body of the response is not read, and
    redirects are not followed. `tls` verifies the server; `inner` allows addresses of this machine and of private
    networks.

    Raises UnsafeUrl, without sending, if an address of the host is not allowed; httpcore's exceptions if there is no
    response.
    """
    place = httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)
    sent = {"host": url.authority, "content-length": str(len(body)), "connection": "close", **headers}
    network = CheckedNetwork(resolver, inner=inner)
    async with (
        httpcore.AsyncConnectionPool(tls, max_connections=1, network_backend=network) as pool,
        pool.stream("POST", place, headers=list(sent.items()), content=body) as answer,
    ):
        return answer.status
