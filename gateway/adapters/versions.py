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

from engine.core.messages.requests import AdapterHash
from engine.pb import engine_pb2 as pb
from engine.rpc.api import AdapterRejected, EngineApi
from engine.rpc.stream import EngineUnavailable
from gateway.core.errors import Fault, invalid_request, unavailable

log = structlog.get_logger("adapters")


@dataclass(frozen=True, slots=True)
class VersionHold:
    """A reference that keeps a version in the engine process number `engine`; void after a restart of the engine. Every
    hold must be given to `AdapterVersions.release` once."""

    adapter_hash: AdapterHash
    engine: int
    """Number of the engine process, which each restart increments. A hold on an earlier engine is void."""


class AdapterVersions:
    """Counts the holds and requests of each version in the engine. A version is unloaded when its last hold is released
    and its requests have ended or their drain time is over."""

    def __init__(self, engine: EngineApi) -> None:
        self._engine = engine
        self._engine_number = 0
        self._holds: Counter[AdapterHash] = Counter()
        self._users: Counter[AdapterHash] = Counter()
        self._unused: dict[AdapterHash, asyncio.Event] = {}
        """Event of each version that a release waits for. The end of the version's last request sets and removes it."""
        self._draining: Counter[AdapterHash] = Counter()
        """Number of releases, by version, that wait for the version's requests to end."""
        self._drain_until: dict[AdapterHash, float] = {}
        """Latest drain deadline of the releases of each version, on the monotonic clock."""
        self._reading: dict[object, set[AdapterHash]] = {}
        """For each load under way, the versions that were being unloaded at some time during it. If the load's own
        version is among them, it must be loaded again."""
        self._dropping: dict[AdapterHash, asyncio.Event] = {}
        self._pinned: set[AdapterHash] = set()
        self._pinning = asyncio.Lock()

    def is_pinned(self, adapter_hash: AdapterHash) -> bool:
        return adapter_hash in self._pinned

    def hold(self, adapter_hash: AdapterHash) -> VersionHold | None:
        """Add a hold to a version that has holds already, and return it. None means that the version has no hold, so
        that it must be loaded first."""
        if not self._holds[adapter_hash]:
            return None
        self._holds[adapter_hash] += 1
        return VersionHold(adapter_hash, self._engine_number)

    async def release(self, hold: VersionHold, drain_seconds: float) -> int:
        """Release a hold. After the last, wait up to `drain_seconds` for the version's requests, and unload it from
        every tier, unless it got a new hold. Return the number of aborted requests."""
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
        """Load the adapter in `folder` into the engine, yield what the engine says of it, and on exit unload it if
        nothing else holds it. Raises ApiError: INVALID_REQUEST, ENGINE_UNAVAILABLE."""
        info = await self._load(folder)
        self._holds[info.adapter] += 1
        hold = VersionHold(info.adapter, self._engine_number)
        try:
            yield info
        finally:
            await self.release(hold, 0.0)

    @contextmanager
    def using(self, adapter_hash: AdapterHash | None) -> Iterator[None]:
        """Context manager that counts its body as a request that uses a version, for which `release` waits. None, the
        base model, is not counted."""
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
        """Pin or unpin a version in the engine. Raises ApiError: INVALID_REQUEST, the engine refuses;
        ENGINE_UNAVAILABLE."""
        async with self._pinning:
            if pinned == (adapter_hash in self._pinned):
                return
            with _refusals("pinned"):
                await self._engine.pin_adapter(adapter_hash, pinned)
            (self._pinned.add if pinned else self._pinned.discard)(adapter_hash)

    def forget(self) -> None:
        """Void all holds and pins, because a new engine has started."""
        self._engine_number += 1
        self._holds.clear()
        self._pinned.clear()

    async def _load(self, folder: Path) -> pb.AdapterInfo:
        """Load the adapter in `folder` and return what the engine says of it. If an unload of the same version ran
        meanwhile, wait for its end and load again. Raises ApiError: INVALID_REQUEST, ENGINE_UNAVAILABLE."""
        while True:
            info, gone = await self._read(folder)
            if info.adapter not in gone:
                for warning in info.warnings:
                    log.warning("adapter_warning", path=str(folder), version=info.adapter, reason=warning)
                return info
            if dropped := self._dropping.get(info.adapter):
                await dropped.wait()

    async def _read(self, folder: Path) -> tuple[pb.AdapterInfo, set[AdapterHash]]:
        """Load an adapter once. Return what the engine says of it, and the versions that were being unloaded
        meanwhile."""
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
