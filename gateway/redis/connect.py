"""Clients of the server, the cluster, or the primary that Sentinels name, at an address. They leave a server that a
failover has demoted, and run scripts with EVAL where they may not use SCRIPT."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar, cast

import redis
from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import AbstractConnection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError, ResponseError

from gateway.redis.address import store_address
from gateway.redis.client import FAILURES
from gateway.redis.states import answer_of, elsewhere_of

MAX_CONNECTIONS = 32
CONNECT_SECONDS = 2.0
SENTINEL_SECONDS = 1.0
"""Maximum seconds to connect to a Sentinel, and to wait for its answer."""

C = TypeVar("C", bound=AbstractConnection)


def redis_client(url: str, *, cluster: bool = False) -> AbstractAsyncContextManager[Redis]:
    """Return a context manager that yields a client of the Redis at `url` (see `store_address`) and closes it on exit.
    With `cluster`, the client is one of the whole cluster that the servers at `url` belong to."""
    return connect_cluster(url) if cluster else connect_server(url)


@asynccontextmanager
async def connect_server(url: str) -> AsyncGenerator[Redis, None]:
    """Yield a client of one server, or of the primary that Sentinels name. At most MAX_CONNECTIONS calls run at once;
    others wait up to 20 s. A lost connection, or one in ELSEWHERE, is retried once."""
    address = store_address(url)
    options: dict[str, Any] = {"socket_connect_timeout": CONNECT_SECONDS, "max_connections": MAX_CONNECTIONS}
    options |= parse_url(address.server)

    async def leave() -> None:
        await pool.update_active_connections_for_reconnect()
        await pool.disconnect(inuse_connections=False)

    kind = with_connection_errors(options.pop("connection_class", Connection), leave)
    async with AsyncExitStack() as stack:
        if address.service:
            names = {name.removeprefix("sentinel_"): options.pop(name) for name in SENTINEL_OPTIONS & options.keys()}
            ssl_options = {name: value for name, value in options.items() if name.startswith("ssl_")} | names
            is_tls = issubclass(kind, SSLConnection)
            sentinels = Sentinels([_sentinel(*node, is_tls, ssl_options) for node in address.nodes], address.service)
            stack.push_async_callback(sentinels.close)
            kind = following(kind, sentinels)
        pool = BlockingConnectionPool(connection_class=kind, retry=Retry(NoBackoff(), 1), **options)
        yield await stack.enter_async_context(ScriptingRedis.from_pool(pool))


@asynccontextmanager
async def connect_cluster(url: str) -> AsyncGenerator[Redis, None]:
    """Yield a client of all nodes of a cluster, found from the first node of `url` that answers, typed like a
    single-server client, which suffices because each call's keys share a hash tag."""
    # The connection pools are not bounded: a cluster's full pool raises an error where a single server's waits.
    address = store_address(url)
    options: dict[str, Any] = {"socket_connect_timeout": CONNECT_SECONDS, **parse_url(address.server)}
    options["ssl"] = options.pop("connection_class", None) is SSLConnection
    client = ScriptingCluster(startup_nodes=[ClusterNode(*node) for node in address.nodes[1:]], **options)
    kind = with_connection_errors(client.connection_kwargs["connection_class"])
    client.connection_kwargs["connection_class"] = kind
    for node in client.nodes_manager.startup_nodes.values():
        node.connection_class = kind
    try:
        with suppress(*FAILURES):
            await client.initialize()
        yield cast(Redis, client)
    finally:
        await client.aclose()


def with_connection_errors(kind: type[C], leave: Callable[[], Awaitable[None]] | None = None) -> type[C]:
    """Return a subclass of the connection class `kind` that raises redis.ConnectionError, so that the client retries,
    on a broken connection or in a state of ELSEWHERE, in which it also calls `leave` to close others to the server."""

    # With uvloop, writing to a connection that the server has reset raises RuntimeError, which redis-py does not
    # convert.
    class WithConnectionErrors(kind):  # type: ignore[valid-type, misc]
        async def send_packed_command(self, *args: Any, **options: Any) -> None:
            try:
                await super().send_packed_command(*args, **options)
            except RuntimeError as error:
                raise redis.ConnectionError(f"the connection is gone: {error}") from error

        async def read_response(self, *args: Any, **options: Any) -> Any:
            try:
                return await super().read_response(*args, **options)
            except ResponseError as error:
                if not (state := elsewhere_of(error)):
                    raise
                await self.disconnect(nowait=True)
                if leave is not None:
                    await leave()
                said = answer_of(error).removeprefix(state).strip()
                raise redis.ConnectionError(said, status_code=state) from error

    return WithConnectionErrors


class Sentinels:
    """Some Sentinels, one of which must answer to connect to the primary that they watch as `service`."""

    def __init__(self, clients: Sequence[Redis], service: str) -> None:
        self._clients = clients
        self._service = service

    async def primary(self) -> tuple[str, int]:
        """Return the host and port of the primary, as the first Sentinel says that knows it. All are asked at once,
        because callers may have little time. Raises redis.ConnectionError if none knows it."""
        questions = [asyncio.ensure_future(self._ask(client)) for client in self._clients]
        try:
            for answer in asyncio.as_completed(questions):
                with suppress(*FAILURES):
                    if address := await answer:
                        host, port = address
                        return host.decode(), int(port)
        finally:
            for question in questions:
                question.cancel()
        raise redis.ConnectionError(f"no Sentinel knows a primary named {self._service!r}")

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def _ask(self, client: Redis) -> Any:
        return await client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)


SENTINEL_OPTIONS = frozenset(("sentinel_username", "sentinel_password"))
"""Options of a URL for the Sentinels alone. They have no user otherwise; options of TLS are for both."""


def _sentinel(host: str, port: int, is_tls: bool, options: dict[str, Any]) -> Redis:
    seconds: dict[str, Any] = {"socket_timeout": SENTINEL_SECONDS, "socket_connect_timeout": SENTINEL_SECONDS}
    return Redis(host=host, port=port, ssl=is_tls, retry=Retry(NoBackoff(), 0), **seconds, **options)


def following(kind: type[C], sentinels: Sentinels) -> type[C]:
    """Return a subclass of the connection class `kind` that connects to the primary that `sentinels` name then."""

    class Following(kind):  # type: ignore[valid-type, misc]
        async def connect(self) -> None:
            if not self.is_connected:
                self.host, self.port = await sentinels.primary()
            await super().connect()

    return Following


class EvalScript(AsyncScript):
    """A script, for registries and locks, that runs also where the user may not SCRIPT LOAD, as redis-py would."""

    async def __call__(self, keys: Any = None, args: Any = None, client: Any = None) -> Any:
        client, keys = client or self.registered_client, keys or ()
        try:
            return await client.evalsha(self.sha, len(keys), *keys, *(args or ()))
        except NoScriptError:
            return await client.eval(self.script, len(keys), *keys, *(args or ()))


class ScriptingRedis(Redis):
    def register_script(self, script: Any) -> Any:
        return EvalScript(self, script)


class ScriptingCluster(RedisCluster):
    def register_script(self, script: Any) -> Any:
        return EvalScript(self, script)
