"""The gateway processes that share one Redis: each tells of itself there, and drains when another asks it to.

Keys begin with the configured prefix and share one hash tag, hence one slot of a cluster; `*` is `gateways:{all}:`:

    *ids         set of the ids of all gateways, some of which may have ended
    *one:ID      a `GatewayOverview` as JSON; expires AWAY_SECONDS after the gateway has last told of itself
    *order:ID    `drain` or `stop`: what an administrator asks of a gateway; expires ORDER_SECONDS after that
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any, Literal

import msgspec
import structlog
from redis.asyncio import Redis

from gateway.api_schema.gateways import GatewayOverview
from gateway.core.errors import Fault, invalid_request, unavailable
from gateway.core.lifecycle import Lifecycle, machine_of
from gateway.registry.store import StoreAway, answering

BEAT_SECONDS = 1.0
"""Seconds between two times that a gateway tells of itself and reads what it is asked."""
AWAY_SECONDS = 10
"""Seconds after which a gateway that tells nothing is taken for one that has ended."""
ORDER_SECONDS = 30
ECHO_SECONDS = 5.0
"""Maximum seconds to wait until another gateway tells that it drains."""
LOOK_SECONDS = 0.1

log = structlog.get_logger("gateways")


class GatewayDirectory:
    """Knows the gateways that share one Redis, and tells them of this one. Times are in seconds."""

    def __init__(self, client: Redis, life: Lifecycle, running: Callable[[], int], prefix: str = "loralane:") -> None:
        """
        Args:
            client: of the Redis that the gateways share.
            life: the state of this gateway.
            running: returns the number of requests in progress on this gateway.
            prefix: prefix of all keys.
        """
        self._client = client
        self._life = life
        self._running = running
        self._space = f"{prefix}gateways:{{all}}:"
        self._is_away = False
        self._left = asyncio.Event()
        self.address = ""
        """URL of this gateway's HTTP port. Empty until it listens; other gateways do not see it before."""

    @property
    def own(self) -> GatewayOverview:
        """This gateway, as it is now."""
        life = self._life
        state: Literal["serving", "draining"] = "draining" if life.is_draining else "serving"
        return GatewayOverview(life.id, self.address, version("loralane"), state, self._running(), life.since)

    async def gateways(self) -> list[GatewayOverview]:
        """Return all gateways, by address and id. Raises ApiError (REGISTRY_UNAVAILABLE)."""
        own = self.own
        try:
            others = await self._read()
        except StoreAway as error:
            raise unavailable(Fault.REGISTRY_UNAVAILABLE, "the list of gateways is not available") from error
        found = {each.id: each for each in (*others, own)}
        return sorted(found.values(), key=lambda each: (each.address, each.id))

    async def drain(self, gateway: str, *, stop: bool) -> GatewayOverview:
        """Drain the gateway with this id, and return its new state. With `stop`, its process ends after the drain.

        Raises ApiError: INVALID_REQUEST, there is no such gateway; REGISTRY_UNAVAILABLE, it is another one, and Redis
        is away or it does not tell that it drains.
        """
        if gateway == self._life.id:
            self._obey("stop" if stop else "drain")
            await self.beat()  # so that no other gateway takes it for one that serves
            return self.own
        if gateway not in {each.id for each in await self.gateways()}:
            raise invalid_request(f"there is no gateway {gateway[:80]!r}; see `loralane gateways ls`", "gateway")
        try:
            async with answering():
                await self._client.set(self._key("order", gateway), "stop" if stop else "drain", ex=ORDER_SECONDS)
            async with asyncio.timeout(ECHO_SECONDS):
                return await self._echo(gateway)
        except (StoreAway, TimeoutError) as error:
            message = f"the gateway {gateway} has not told yet that it drains; look again with `loralane gateways ls`"
            raise unavailable(Fault.REGISTRY_UNAVAILABLE, message) from error

    async def has_peer(self) -> bool:
        """Return whether another gateway on this machine serves at the same address; False while Redis is away. It
        tells of this gateway first: of two that begin to drain together, neither takes the other for one that serves.
        """
        await self.beat()
        try:
            known = await self._read()
        except StoreAway:
            return False
        place = (self.address, machine_of(self._life.id), "serving")
        others = [each for each in known if each.id != self._life.id]
        return any((each.address, machine_of(each.id), each.state) == place for each in others)

    async def keep(self) -> None:
        """Tell of this gateway every BEAT_SECONDS, and do what it is asked, until `close` is called. The call should
        not be cancelled: the Redis client may swallow a cancellation that coincides with a reply."""
        while not self._left.is_set():
            await self.beat()
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await self._left.wait()

    async def beat(self) -> None:
        """Tell of this gateway once, if it listens, and do what it is asked. Does nothing while Redis is away."""
        if not self.address:
            return
        own, order = self.own, self._key("order", self._life.id)
        try:
            async with answering(), self._client.pipeline(transaction=True) as pipe:
                pipe.sadd(self._key("ids"), own.id)
                pipe.set(self._key("one", own.id), msgspec.json.encode(own), ex=AWAY_SECONDS)
                pipe.getdel(order)
                asked = (await pipe.execute())[-1]
        except StoreAway as error:
            if not self._is_away:
                log.warning("gateway_not_told", reason=str(error))
            self._is_away = True
            return
        self._is_away = False
        if asked:
            self._obey(asked.decode())
            await self.beat()

    def close(self) -> None:
        """End `keep`, after the call to Redis that is under way."""
        self._left.set()

    async def leave(self) -> None:
        """Tell that this gateway has ended, if Redis answers."""
        try:
            async with answering(), self._client.pipeline(transaction=True) as pipe:
                pipe.srem(self._key("ids"), self._life.id)
                pipe.delete(self._key("one", self._life.id), self._key("order", self._life.id))
                await pipe.execute()
        except StoreAway as error:
            log.info("gateway_not_told", reason=str(error))  # its record expires

    def _obey(self, order: str) -> None:
        self._life.drain(alone=True)
        if order == "stop":
            self._life.ending.set()

    async def _echo(self, gateway: str) -> GatewayOverview:
        while True:
            for each in await self._read():
                if each.id == gateway and each.state == "draining":
                    return each
            await asyncio.sleep(LOOK_SECONDS)

    async def _read(self) -> list[GatewayOverview]:
        """Return the gateways that tell of themselves, and forget those that have ended. Raises StoreAway."""
        async with answering():
            known: Any = await self._client.smembers(self._key("ids"))
            ids = sorted(each.decode() for each in known)
            values = await self._client.mget([self._key("one", each) for each in ids]) if ids else []
            if ended := [each for each, value in zip(ids, values, strict=True) if value is None]:
                await self._client.srem(self._key("ids"), *ended)
        return [msgspec.json.decode(value, type=GatewayOverview) for value in values if value is not None]

    def _key(self, kind: str, gateway: str = "") -> str:
        return f"{self._space}{kind}:{gateway}" if gateway else f"{self._space}{kind}"


@asynccontextmanager
async def gateway_directory(
    client: Redis, life: Lifecycle, running: Callable[[], int], prefix: str
) -> AsyncIterator[GatewayDirectory]:
    """Yield a directory, which tells of this gateway until the block ends. The arguments are those of
    `GatewayDirectory`."""
    directory = GatewayDirectory(client, life, running, prefix)
    telling = asyncio.create_task(directory.keep(), name="gateway-directory")
    try:
        yield directory
    finally:
        directory.close()
        await telling
        await directory.leave()
