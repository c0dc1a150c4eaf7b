"""Which adapters are served, under which names, and in which version."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import structlog

from engine.client import AdapterRejected, EngineApi, EngineUnavailable
from engine.core.types import AdapterId
from engine.pb import engine_pb2 as pb
from gateway.core.errors import ApiError, Fault, invalid_request, model_not_found, unavailable

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")
"""No colon: `base:adapter` is how a request may spell it."""

log = structlog.get_logger("adapters")


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """One adapter being served."""

    name: str
    path: Path
    version: AdapterId
    """Content hash: reloading a name with other files gives another version."""
    rank: int
    """The largest of its modules."""
    target_modules: tuple[str, ...]
    pages: int
    bytes: int
    loaded: bool = True
    """False after an engine restart that could not read it again."""


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """A record and what the engine says about it now."""

    record: AdapterRecord
    tier: str
    """disk, host, loading, or resident."""
    running: int = 0
    waiting: int = 0


class AdapterRegistry:
    """Names to adapters, over an engine that knows content hashes only."""

    def __init__(
        self,
        engine: EngineApi,
        roots: Collection[Path],
        *,
        reserved: Collection[str] = (),
        drain_seconds: float = 30.0,
    ) -> None:
        """
        Args:
            roots: folders below which adapters may lie; nothing else is ever read.
            reserved: names an adapter cannot have, those of the base model.
            drain_seconds: how long running requests may go on after an unload.
        """
        self._engine = engine
        self._roots = tuple(root.resolve() for root in roots)
        self._reserved = frozenset(reserved)
        self._drain_seconds = drain_seconds
        self._records: dict[str, AdapterRecord] = {}
        self._changing: set[str] = set()
        self._background: set[asyncio.Task[int]] = set()

    @property
    def records(self) -> Mapping[str, AdapterRecord]:
        """By name."""
        return MappingProxyType(self._records)

    async def load(self, name: str, path: str, *, replace: bool = False) -> AdapterRecord:
        """Serves the adapter at `path` (absolute, or relative to a root) under `name`.

        A replaced version finishes its running requests in the background.

        Raises:
            ApiError: INVALID_REQUEST, the name, the path or the adapter is not acceptable; ADAPTER_EXISTS, the name is
                taken and `replace` is off; ADAPTER_CONFLICT, another change of this name is going on;
                ENGINE_UNAVAILABLE.
        """
        self._check_name(name)
        folder = self._confine(path)
        with self._change(name):
            previous = self._records.get(name)
            if previous is not None and not replace:
                raise ApiError(Fault.ADAPTER_EXISTS, f"the adapter {name!r} is already loaded", "lora_name")
            record = _record(name, folder, await self._read(folder))
            self._records[name] = record
            if previous is not None:
                self._spawn(self._release(previous.version, self._drain_seconds))
        return record

    async def unload(self, name: str, drain_seconds: float | None = None) -> int:
        """Takes no new requests from now on; returns the number of requests aborted after the drain time.

        Raises:
            ApiError: MODEL_NOT_FOUND, ADAPTER_CONFLICT.
        """
        with self._change(name):
            record = self._records.pop(name, None)
            if record is None:
                raise model_not_found(name)
            return await self._release(record.version, self._drain_seconds if drain_seconds is None else drain_seconds)

    async def statuses(self) -> list[AdapterStatus]:
        """In order of names. Without an engine everything is on disk."""
        try:
            stats = {adapter.adapter: adapter for adapter in (await self._engine.stats()).adapters}
        except EngineUnavailable:
            stats = {}
        return [_status(record, stats.get(record.version)) for _, record in sorted(self._records.items())]

    async def reload_all(self) -> None:
        """Gives a restarted engine its adapters back. One that cannot be read any more stays listed, not loaded."""
        for record in tuple(self._records.values()):
            try:
                reloaded = _record(record.name, record.path, await self._engine.load_adapter(str(record.path)))
            except AdapterRejected as error:
                log.error("adapter_lost", adapter=record.name, path=str(record.path), reason=str(error))
                reloaded = _unloaded(record)
            except EngineUnavailable as error:
                log.warning("adapter_reload_interrupted", reason=str(error))
                return
            if self._records.get(record.name) is record:
                self._records[record.name] = reloaded
            elif reloaded.loaded:  # unloaded or replaced meanwhile
                await self._release(reloaded.version, 0.0)

    async def close(self) -> None:
        """Waits for replaced versions to be gone."""
        await asyncio.gather(*self._background)

    def _check_name(self, name: str) -> None:
        if not NAME.fullmatch(name):
            message = (
                "lora_name must be 1 to 128 letters, digits, '_', '.', '-' or '/', beginning with a letter or digit"
            )
            raise invalid_request(message, "lora_name")
        if name in self._reserved:
            raise invalid_request(f"{name!r} is the name of the base model", "lora_name")

    def _confine(self, path: str) -> Path:
        """The real folder, after symbolic links, which has to lie below a root."""
        with suppress(OSError, ValueError, RuntimeError):  # too long a name, a null byte, a loop of links
            for root in self._roots:
                folder = (root / path).resolve()
                if folder.is_relative_to(root) and (folder.is_dir() or Path(path).is_absolute()):
                    return folder
        raise invalid_request(f"{path!r} is not a folder below a configured adapter root", "lora_path")

    @contextmanager
    def _change(self, name: str) -> Iterator[None]:
        if name in self._changing:
            message = f"the adapter {name!r} is being loaded or unloaded by another request"
            raise ApiError(Fault.ADAPTER_CONFLICT, message, "lora_name")
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.discard(name)

    async def _read(self, folder: Path) -> pb.AdapterInfo:
        try:
            return await self._engine.load_adapter(str(folder))
        except AdapterRejected as error:
            raise invalid_request(f"the adapter cannot be served: {error}", "lora_path") from error
        except EngineUnavailable as error:
            raise unavailable(Fault.ENGINE_UNAVAILABLE, "the engine is not available") from error

    async def _release(self, version: AdapterId, drain_seconds: float) -> int:
        """Frees a version in the engine, unless some name still serves it."""
        if self._serving(version):
            return 0
        try:
            aborted = await self._engine.unload_adapter(version, drain_seconds)
        except EngineUnavailable:
            return 0  # an engine that is gone holds nothing, and `reload_all` will not bring this one back
        if record := self._serving(version):  # loaded under another name just before the engine let it go
            await self._read(record.path)
        return aborted

    def _serving(self, version: AdapterId) -> AdapterRecord | None:
        return next((record for record in self._records.values() if record.version == version), None)

    def _spawn(self, work: Coroutine[None, None, int]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _record(name: str, path: Path, info: pb.AdapterInfo) -> AdapterRecord:
    return AdapterRecord(name, path, info.adapter, info.rank, tuple(info.target_modules), info.pages, info.bytes)


def _unloaded(record: AdapterRecord) -> AdapterRecord:
    return replace(record, loaded=False)


def _status(record: AdapterRecord, stats: pb.AdapterStats | None) -> AdapterStatus:
    if stats is None:
        return AdapterStatus(record, "disk")
    return AdapterStatus(record, stats.state, stats.running, stats.waiting)
