"""Keeps the adapters of all engines of a pool the same: each adapter is loaded into every engine, also into engines
that join later."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import structlog

from engine.core.messages.requests import AdapterHash
from engine.pb import engine_pb2 as pb
from engine.rpc.api import AdapterRejected
from engine.rpc.stream import EngineUnavailable
from gateway.engines.asking import first_refusal
from gateway.engines.replica import PooledEngine

log = structlog.get_logger("engines")

CONCURRENT_LOADS = 4
"""Maximum number of concurrent loads into an engine that joins."""


class PoolAdapters:
    """Records the adapters of a pool, and loads and pins them in its engines."""

    def __init__(self) -> None:
        self._paths: dict[AdapterHash, str] = {}
        self._infos: dict[AdapterHash, pb.AdapterInfo] = {}
        self._pinned: set[AdapterHash] = set()

    @property
    def infos(self) -> Mapping[AdapterHash, pb.AdapterInfo]:
        """Description of each loaded adapter, as an engine gave it when it loaded the adapter, by the adapter's
        hash."""
        return MappingProxyType(self._infos)

    def clear(self) -> None:
        """Forget all adapters, because no engine holds any."""
        self._paths.clear()
        self._infos.clear()
        self._pinned.clear()

    async def load(self, reachable: Callable[[], Sequence[PooledEngine]], path: str) -> pb.AdapterInfo:
        """Load the adapter at `path` into all engines that `reachable` returns, now or later, and return the first
        description. Engines that refuse it get no requests for it. Raises AdapterRejected or EngineUnavailable if none
        took it."""
        engines = [(engine, engine.client.info.life) for engine in reachable()]
        results = await asyncio.gather(*(one.client.load_adapter(path) for one, _ in engines), return_exceptions=True)
        loaded = [result for result in results if isinstance(result, pb.AdapterInfo)]
        if not loaded:
            raise first_refusal(results)
        info = loaded[0]
        self._paths[info.adapter], self._infos[info.adapter] = path, info
        settled = set()
        for (engine, life), result in zip(engines, results, strict=True):
            if isinstance(result, EngineUnavailable) or not engine.is_reachable or engine.client.info.life != life:
                continue  # the process is gone, and the next one, if it is there already, does not have the adapter
            settled.add(engine)
            if isinstance(result, pb.AdapterInfo) and result.adapter == info.adapter:
                engine.held.add(info.adapter)
            else:
                reason = str(result) if isinstance(result, BaseException) else "it found other content in the folder"
                log.warning("adapter_missing", engine=engine.name, path=path, reason=reason)
        late = [engine for engine in reachable() if engine not in settled and info.adapter not in engine.held]
        await asyncio.gather(*(self._load_late(engine, info.adapter, path) for engine in late))
        return info

    async def _load_late(self, engine: PooledEngine, adapter_hash: AdapterHash, path: str) -> None:
        try:
            await self._load_into(engine, adapter_hash, path)
        except EngineUnavailable as error:
            log.warning("adapter_missing", engine=engine.name, path=path, reason=str(error))

    def note_unloaded(self, engines: Iterable[PooledEngine], adapter_hash: AdapterHash) -> None:
        """Forget an adapter that is about to be unloaded from the engines."""
        self._paths.pop(adapter_hash, None)
        self._infos.pop(adapter_hash, None)
        self._pinned.discard(adapter_hash)
        for engine in engines:
            engine.held.discard(adapter_hash)

    async def pin(self, engines: Sequence[PooledEngine], adapter_hash: AdapterHash, pinned: bool) -> None:
        """Pin an adapter in all engines, or unpin it. If an engine refuses to pin it, it is pinned in none. Raises what
        `EngineApi.pin_adapter` raises."""
        pins = (engine.client.pin_adapter(adapter_hash, pinned) for engine in engines)
        results = await asyncio.gather(*pins, return_exceptions=True)
        refused = any(isinstance(result, AdapterRejected) for result in results)
        if pinned and refused:
            undone = (engine.client.pin_adapter(adapter_hash, False) for engine in engines)
            await asyncio.gather(*undone, return_exceptions=True)
        if refused or all(isinstance(result, EngineUnavailable) for result in results):
            raise first_refusal(results)
        (self._pinned.add if pinned else self._pinned.discard)(adapter_hash)

    async def fill(self, engine: PooledEngine) -> None:
        """Load all adapters of the pool into an engine that joins, and pin pinned ones; refused ones are logged, and
        those added meanwhile come through `load`. Raises EngineUnavailable if the engine is gone."""
        turns = asyncio.Semaphore(CONCURRENT_LOADS)

        async def load(adapter_hash: AdapterHash, path: str) -> None:
            async with turns:
                await self._load_into(engine, adapter_hash, path)

        missing = [item for item in self._paths.items() if item[0] not in engine.held]
        results = await asyncio.gather(*(load(*item) for item in missing), return_exceptions=True)
        if failures := [result for result in results if isinstance(result, BaseException)]:
            raise failures[0]
        for adapter_hash in self._pinned & engine.held:
            with contextlib.suppress(AdapterRejected):
                await engine.client.pin_adapter(adapter_hash, True)

    async def _load_into(self, engine: PooledEngine, adapter_hash: AdapterHash, path: str) -> None:
        """Load an adapter into one engine, unless it has been unloaded from the pool meanwhile."""
        if adapter_hash not in self._paths:
            return
        try:
            found = (await engine.client.load_adapter(path)).adapter
        except AdapterRejected as error:
            log.warning("adapter_missing", engine=engine.name, path=path, reason=str(error))
            return
        if found == adapter_hash and adapter_hash in self._paths:
            engine.held.add(adapter_hash)
            return
        if found not in self._paths:
            await engine.client.unload_adapter(found, 0.0)
        if found != adapter_hash:
            log.warning("adapter_missing", engine=engine.name, path=path, reason="it found other content in the folder")
