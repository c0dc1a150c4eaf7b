"""Ensures that a name of an adapter belongs to at most one base model, across all gateways of one Redis. A name is
looked up in this gateway's copies of registries, and again in Redis, locked until written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Protocol

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.lock import Lock
from redis.exceptions import LockError

from gateway.adapters.record import AdapterRecord, check_name, name_conflict
from gateway.core.errors import ApiError, invalid_request
from gateway.core.routing import Catalog
from gateway.registry.log import writing
from gateway.registry.store import StoreAway, answering

LOCK_SECONDS = 15.0
"""Seconds after which the lock of a gateway that died expires. To look up a name and to write it takes less, because
each call to Redis has a timeout of its own."""
WAIT_SECONDS = 20.0
"""Maximum seconds to wait for the lock of a name: longer than a lock can outlive its gateway."""
POLL_SECONDS = 0.02


class NameOwner(Protocol):
    """The registry of one base model's adapters, as the registries of other base models see it."""

    @property
    def base_model(self) -> str: ...

    @property
    def catalog(self) -> Catalog: ...

    @property
    def records(self) -> Mapping[str, AdapterRecord]: ...

    async def has_stored(self, name: str) -> bool:
        """Return whether the registry in Redis has an adapter or an alias of this name. Raises StoreAway."""

    async def seed_of(self, name: str) -> str | None:
        """Return the source from which the configuration last had the adapter `name` loaded. None means that the
        configuration never listed the adapter. Raises StoreAway."""

    async def give_up(self, record: AdapterRecord, taker: str) -> None:
        """Remove an adapter that the configuration now names for another base model, `taker`. Raises ApiError."""


class NameLocks:
    """Locks on names of adapters, in the Redis that all gateways share."""

    def __init__(self, client: Redis | RedisCluster, prefix: str = "loralane:") -> None:
        """`prefix` begins the keys of all locks."""
        self._client = client
        self._prefix = prefix

    @asynccontextmanager
    async def locked(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of a name during the block. Raises ApiError: ADAPTER_CONFLICT, another gateway does not release
        it; REGISTRY_UNAVAILABLE."""
        lock = self._client.lock(f"{self._prefix}adapter-name:{name}", timeout=LOCK_SECONDS, thread_local=False)
        with writing("adapter"):
            await self._acquire(lock, name)
        try:
            yield
        finally:
            with suppress(LockError, StoreAway):  # the lock expires by itself
                async with answering():
                    await lock.release()

    async def _acquire(self, lock: Lock, name: str) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while True:
            async with answering():
                if await lock.acquire(blocking=False):
                    return
            if time.monotonic() > until:
                raise name_conflict(f"the adapter name {name!r} is being changed by another gateway")
            await asyncio.sleep(POLL_SECONDS)


class AdapterNames:
    """Keeps names of adapters unique over the base models of one gateway. All registries of the gateway share one
    instance."""

    def __init__(self, owners: Sequence[NameOwner], locks: NameLocks | None = None) -> None:
        """`owners` are the registries, one for each base model. None for `locks` means that no other gateway changes
        them."""
        self._owners = tuple(owners)
        self._locks = locks
        self._changing: set[str] = set()

    def others(self, owner: NameOwner) -> list[NameOwner]:
        return [other for other in self._owners if other is not owner]

    def check(self, owner: NameOwner, name: str, param: str) -> None:
        """Raise ApiError, which names `param`, if a new adapter or alias cannot have a name: INVALID_REQUEST, it is
        malformed or a base or virtual model's; ADAPTER_CONFLICT, another base model's adapter has it."""
        check_name(name, param)
        for other in self._owners:
            if name in other.catalog.bases or name in other.catalog.virtual:
                kind = "base" if name in other.catalog.bases else "virtual"
                raise invalid_request(f"{name!r} is the name of a {kind} model", param)
            if other is not owner and other.catalog.knows(name):
                raise _taken(name, other, param)

    async def seeded_elsewhere(self, owner: NameOwner, name: str) -> NameOwner | None:
        """Return the registry of the other base model that the configuration moves the adapter `name` away from; None
        if there is none. Raises ApiError (ADAPTER_CONFLICT), if an operator gave the name to another base model;
        StoreAway."""
        for other in self.others(owner):
            record = other.records.get(name)
            if record is not None and record.source == await other.seed_of(name):
                return other
            if (adapter := other.catalog.adapter(name)) is not None:
                raise name_conflict(_freeing(name, adapter, other.base_model))
        return None

    @contextmanager
    def changing(self, *names: str) -> Iterator[None]:
        """Context manager in whose block this gateway refuses other changes of adapters with these names or aliases, of
        any base model. Raises ApiError (ADAPTER_CONFLICT) if such a change is under way already."""
        for name in names:
            if name in self._changing:
                raise name_conflict(f"the adapter {name!r} is being changed by another request")
        self._changing.update(names)
        try:
            yield
        finally:
            self._changing.difference_update(names)

    @asynccontextmanager
    async def reserved(self, owner: NameOwner, names: Collection[str]) -> AsyncIterator[None]:
        """Reserve new names for the registry `owner` during the block: it may write a record with them, and no gateway
        gives them to another base model meanwhile. Raises ApiError: ADAPTER_CONFLICT, another base model has one of the
        names; REGISTRY_UNAVAILABLE."""
        others = self.others(owner)
        async with AsyncExitStack() as stack:
            for name in sorted(names) if others else ():  # sorted, so that two gateways do not wait for each other
                if self._locks is not None:
                    await stack.enter_async_context(self._locks.locked(name))
                await self._check_stored(name, others)
            yield

    async def _check_stored(self, name: str, others: Sequence[NameOwner]) -> None:
        with writing("adapter"):
            has = await asyncio.gather(*(other.has_stored(name) for other in others))
        for other, taken in zip(others, has, strict=True):
            if taken:
                raise _taken(name, other, "lora_name")


def _taken(name: str, owner: NameOwner, param: str) -> ApiError:
    return name_conflict(f"{name!r} is the name of an adapter of the base model {owner.base_model!r}", param)


def _freeing(name: str, adapter: str, base_model: str) -> str:
    """Return the error message for a configured adapter whose name is taken: an operator gave the name to the adapter
    `adapter` of `base_model`, or made it an alias of that adapter. The message has the command that frees the name."""
    what = "an adapter" if name == adapter else f"an alias of {adapter!r}"
    command = f"unload {name} --base-model {base_model}" if name == adapter else f"alias {adapter} {name} --remove"
    return (
        f"an operator made {name!r} {what} of the base model {base_model!r}; take it out of the configuration, "
        f"run `loralane adapters {command}`, and put it in again"
    )
