"""Tracks the adapter versions in one engine: the names and requests that need each, and when it can be unloaded."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from engine.core.types import AdapterHash
from engine.pb import engine_pb2 as pb
from engine.rpc.client import AdapterRejected, EngineApi
from engine.rpc.stream import EngineUnavailable
from gateway.core.errors import Fault, invalid_request, unavailable

log = structlog.get_logger("adapters")


@dataclass(frozen=True, slots=True)
class VersionHold:
    """A reference that keeps a version in the engine."""

    adapter_hash: AdapterHash
    engine: int
    """Number of the engine, which each restart increments. A hold on an earlier engine ended with it."""


class AdapterVersions:
    """Counts holds and requests of versions. A version is unloaded when no name serves it any more and its requests
    have ended or their drain time is over."""

    def __init__(self, engine: EngineApi) -> None:
        self._engine = engine
        self._engine_number = 0
        self._holds: Counter[AdapterHash] = Counter()
        self._users: Counter[AdapterHash] = Counter()
        self._unused: dict[AdapterHash, asyncio.Event] = {}
        """Events by version, each set and removed when the last request of its version has ended."""
        self._draining: Counter[AdapterHash] = Counter()
        """Number of releases that wait for a version's requests, by version."""
        self._drain_until: dict[AdapterHash, float] = {}
        """Latest drain deadline of a version's releases, on the monotonic clock."""
        self._reading: dict[object, set[AdapterHash]] = {}
        """Versions that the engine may have unloaded since a load began, for each load under way."""
        self._dropping: dict[AdapterHash, asyncio.Event] = {}
        self._pinned: set[AdapterHash] = set()
        self._pinning = asyncio.Lock()

    def is_pinned(self, adapter_hash: AdapterHash) -> bool:
        return adapter_hash in self._pinned

    def hold(self, adapter_hash: AdapterHash) -> VersionHold | None:
        """Take a hold on a version. None means that the engine does not have it, so it must be loaded."""
        if not self._holds[adapter_hash]:
            return None
        self._holds[adapter_hash] += 1
        return VersionHold(adapter_hash, self._engine_number)

    async def release(self, hold: VersionHold, drain_seconds: float) -> int:
        """Release a hold. After the last one, requests get `drain_seconds` to end; then the version is removed from
        every tier.

        Returns:
            The number of requests that were aborted.
        """
        adapter_hash = hold.adapter_hash
        if hold.engine != self._engine_number:
            return 0
        self._holds[adapter_hash] -= 1
        if self._holds[adapter_hash]:
            return 0
        until = time.monotonic() + drain_seconds
        if self._draining[adapter_hash] and until <= self._drain_until.get(adapter_hash, 0.0):
            return 0  # the release with the later deadline unloads it
        self._drain_until[adapter_hash] = max(until, self._drain_until.get(adapter_hash, 0.0))
        self._draining[adapter_hash] += 1
        try:
            await self._drained(adapter_hash)
        finally:
            self._draining[adapter_hash] -= 1
        if self._holds[adapter_hash] or adapter_hash in self._dropping or hold.engine != self._engine_number:
            return 0
        return await self._drop(adapter_hash)

    @asynccontextmanager
    async def loaded(self, folder: Path) -> AsyncIterator[pb.AdapterInfo]:
        """Load an adapter into the engine and hold it until the context is left.

        Raises:
            ApiError: INVALID_REQUEST, the engine refuses it; ENGINE_UNAVAILABLE.
        """
        info = await self._load(folder)
        self._holds[info.adapter] += 1
        hold = VersionHold(info.adapter, self._engine_number)
        try:
            yield info
        finally:
            await self.release(hold, 0.0)

    @contextmanager
    def using(self, adapter_hash: AdapterHash | None) -> Iterator[None]:
        """Count a request as a user of a version from its choice on. None means the base model, which is never
        unloaded."""
        if adapter_hash is None:
            yield
            return
        self._users[adapter_hash] += 1
        try:
            yield
        finally:
            self._users[adapter_hash] -= 1
            if not self._users[adapter_hash]:
                del self._users[adapter_hash]
                if unused := self._unused.pop(adapter_hash, None):
                    unused.set()

    async def pin(self, adapter_hash: AdapterHash, pinned: bool) -> None:
        """Pin or unpin a version. Raises ApiError: INVALID_REQUEST, the engine refuses; ENGINE_UNAVAILABLE."""
        async with self._pinning:
            if pinned == (adapter_hash in self._pinned):
                return
            with _refusals("pinned"):
                await self._engine.pin_adapter(adapter_hash, pinned)
            (self._pinned.add if pinned else self._pinned.discard)(adapter_hash)

    def forget(self) -> None:
        """Forget all holds and pins, because a new engine has started."""
        self._engine_number += 1
        self._holds.clear()
        self._pinned.clear()

    async def _load(self, folder: Path) -> pb.AdapterInfo:
        """Load an adapter, and return what the engine says of it. If an unload of the same version began or was under
        way meanwhile, wait for its end and load again. Raises the refusals of `_refusals`."""
        while True:
            info, gone = await self._read(folder)
            if info.adapter not in gone:
                return info
            if dropped := self._dropping.get(info.adapter):
                await dropped.wait()

    async def _read(self, folder: Path) -> tuple[pb.AdapterInfo, set[AdapterHash]]:
        """Load an adapter once. Return it, and the versions that the engine was told to unload meanwhile."""
        token, gone = object(), set(self._dropping)
        self._reading[token] = gone
        try:
            with _refusals("served"):
                return await self._engine.load_adapter(str(folder)), gone
        finally:
            del self._reading[token]

    async def _drained(self, adapter_hash: AdapterHash) -> None:
        """Wait until a version has no requests, has a hold again, or its latest drain deadline has passed."""
        while self._users[adapter_hash] and not self._holds[adapter_hash]:
            left = self._drain_until.get(adapter_hash, 0.0) - time.monotonic()
            if left <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._unused.setdefault(adapter_hash, asyncio.Event()).wait()

    async def _drop(self, adapter_hash: AdapterHash) -> int:
        dropped = self._dropping[adapter_hash] = asyncio.Event()
        for gone in self._reading.values():
            gone.add(adapter_hash)
        self._pinned.discard(adapter_hash)
        try:
            return await self._engine.unload_adapter(adapter_hash, 0.0)
        except EngineUnavailable as error:
            log.warning("adapter_not_unloaded", version=adapter_hash, reason=str(error))
            return 0  # an engine that is gone holds nothing, and the next one loads only what is held
        finally:
            del self._dropping[adapter_hash]
            self._drain_until.pop(adapter_hash, None)
            dropped.set()


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    try:
        yield
    except AdapterRejected as error:
        raise invalid_request(f"the adapter cannot be {what}: {error}", "lora_path") from error
    except EngineUnavailable as error:
        raise unavailable(Fault.ENGINE_UNAVAILABLE, "the engine is not available") from error
