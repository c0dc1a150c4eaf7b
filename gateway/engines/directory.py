"""The engines that operators add and remove while gateways run: a registry in Redis that every gateway follows, without
those that the configuration names."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager

import structlog

from engine.process.tasks import end_task
from engine.rpc.target import EngineTarget, EngineTls
from gateway.core.errors import invalid_request
from gateway.engines.member import AddedBy, EngineMember, check_member, check_role, engine_conflict, member_name
from gateway.engines.pool import EnginePool
from gateway.engines.replica import CONFIGURED
from gateway.registry.log import RegistryLog
from gateway.registry.record import RecordChange, RegistrySnapshot
from gateway.registry.store import RecordStore
from gateway.routing.news import Role
from gateway.routing.router import MAX_REPLICAS

log = structlog.get_logger("engines")


class MemberMirror:
    """This gateway's in-memory copy of the engine directory, which the registry's log keeps up to date (`Mirror`)."""

    def __init__(self) -> None:
        self.generation = 0
        self.records: dict[str, EngineMember] = {}

    def apply_change(self, change: RecordChange[EngineMember]) -> None:
        self.generation = max(self.generation, change.generation)
        if change.record is None:
            self.records.pop(change.name, None)
        else:
            self.put(change.record)

    def apply_snapshot(self, snapshot: RegistrySnapshot[EngineMember]) -> None:
        self.records, self.generation = dict(snapshot.records), snapshot.generation

    def put(self, record: EngineMember) -> None:
        self.records[record.name] = record


class EngineDirectory:
    """Reads and changes the directory, and keeps this gateway's pools as it says. A change is in effect here when the
    call returns, and on other gateways as soon as they have received it."""

    def __init__(
        self,
        store: RecordStore[EngineMember],
        pools: Mapping[str, EnginePool],
        tls: Mapping[str, EngineTls | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        pools: this gateway's engines by base model; members of other models are unused here.
        tls: files for connections to engines, by base model; None or a missing one means this machine only.
        clock: returns the Unix time in seconds.
        """
        self._mirror = MemberMirror()
        self._log = RegistryLog(store, self._mirror, "engine")
        self._pools = pools
        self._tls = tls
        self._clock = clock
        self._applying = asyncio.Lock()
        self._problems: dict[str, str] = {}
        """Why this gateway does not use a member, by the name of its record."""
        self._task: asyncio.Task[None] | None = None

    @property
    def members(self) -> list[EngineMember]:
        """All members as this gateway knows them, also those of base models that it does not serve, by name."""
        return [self._mirror.records[name] for name in sorted(self._mirror.records)]

    def member(self, model: str, engine: str) -> EngineMember:
        """Return the record of an engine. Raises ApiError (INVALID_REQUEST) if it is not in the directory."""
        if (member := self._mirror.records.get(member_name(model, engine))) is None:
            raise invalid_request(f"no engine {engine!r} was added to {model!r}", "engine")
        return member

    async def start(self) -> None:
        """Connect to the members and follow the directory in a background task. While Redis is away, there are none."""
        await self._log.start()
        await self._apply()
        self._task = asyncio.create_task(self._follow(), name="engine-directory")

    async def close(self) -> None:
        """Stop following the directory. The pools stay as they are."""
        await end_task(self._task)
        await self._log.close()

    async def add(
        self, model: str, engine: str, address: str, added_by: AddedBy = "operator", role: str = ""
    ) -> EngineMember:
        """Add an engine of a base model for all gateways, and return its record. Raises ApiError: INVALID_REQUEST, an
        argument is malformed, TLS files are missing or there are too many engines; ENGINE_CONFLICT, name or address are
        taken; REGISTRY_UNAVAILABLE."""
        check_member(engine, address)
        self._check_room(model, engine, address)
        member = EngineMember(model, engine, address, added_by, self._clock(), role=check_role(role))
        with _as_request("address"):
            self._target(member)
        await self._log.put(member, None)
        await self._apply()
        if problem := self._problems.get(member.name):
            await self._log.remove(self._mirror.records[member.name], None)
            raise invalid_request(problem, "address")
        log.info("engine_added", model=model, engine=engine, address=address, added_by=added_by)
        return self._mirror.records.get(member.name, member)

    async def remove(self, model: str, engine: str, by: AddedBy = "operator") -> None:
        """Remove an engine for all gateways; its requests move, its process runs on. Raises ApiError: INVALID_REQUEST,
        there is none; ENGINE_CONFLICT, it was changed meanwhile or Ray runs it; REGISTRY_UNAVAILABLE."""
        member = self.member(model, engine)
        if by == "operator" and member.added_by == "ray" and self._is_connected(member):
            raise engine_conflict(f"Ray runs {engine!r} and would add it again: drain it, or lower cluster.ray.max")
        await self._log.remove(member, None)
        await self._apply()
        log.info("engine_removed", model=model, engine=engine, address=member.address, added_by=member.added_by)

    def _is_connected(self, member: EngineMember) -> bool:
        """Return whether this gateway is connected to a member. If it is not, the record may be a stale one that its
        owner left behind."""
        pool = self._pools.get(member.model)
        known = pool.overviews() if pool is not None else []
        return any(one.name == member.engine and one.state in ("serving", "draining") for one in known)

    def _check_room(self, model: str, engine: str, address: str) -> None:
        pool = self._pools.get(model)
        if member_name(model, engine) in self._mirror.records or (pool is not None and engine in pool.addresses):
            raise engine_conflict(f"there is an engine {engine!r} of {model!r} already")
        if owner := next((owner for owner, known in self._addresses() if known == address), None):
            raise engine_conflict(f"the engine at {address} is {owner!r} already")
        if pool is not None and len(pool.addresses) >= MAX_REPLICAS:
            raise invalid_request(f"a base model has at most {MAX_REPLICAS} engines; remove one first")

    def _addresses(self) -> Iterator[tuple[str, str]]:
        """Yield (engine, address) for each engine of any base model."""
        for pool in self._pools.values():
            yield from pool.addresses.items()
        for member in self._mirror.records.values():
            yield member.engine, member.address

    def _target(self, member: EngineMember) -> EngineTarget:
        """Return how this gateway connects to a member. Raises ValueError if it needs TLS files that are missing."""
        return EngineTarget(member.address, self._tls.get(member.model))

    async def _follow(self) -> None:
        while True:
            changed = self._log.next_change
            try:
                await self._apply()
            except Exception:  # a bug: without another attempt, this gateway would never see a change again
                log.exception("engine_directory_not_followed")
            await changed.wait()

    async def _apply(self) -> None:
        """Let the pools have exactly those members that the directory has, besides the configured engines. Members that
        this gateway cannot use are logged, once for each reason."""
        async with self._applying:
            problems = {}
            for model, pool in self._pools.items():
                wanted = {member.engine: member for member in self._mirror.records.values() if member.model == model}
                present = {one.name: one.address for one in pool.overviews() if one.added_by != CONFIGURED}
                for name, address in tuple(present.items()):
                    if name not in wanted or wanted[name].address != address:
                        await pool.remove(name)
                        del present[name]
                for member in wanted.values():
                    if member.engine not in present and (problem := await self._join(pool, member)):
                        problems[member.name] = problem
            for name in problems.keys() - self._problems.keys():
                log.error("engine_not_added", member=name, reason=problems[name])
            self._problems = problems

    async def _join(self, pool: EnginePool, member: EngineMember) -> str:
        """Add a member to its pool. Return the reason if this gateway cannot use it, for example because the
        configuration names an engine with the same name or address by now; empty if it was added."""
        if member.address in pool.addresses.values():
            return f"the engine at {member.address} has another name in the configuration"
        try:
            await pool.add(member.engine, self._target(member), member.added_by, Role(member.role))
        except ValueError as error:
            return str(error)
        return ""


@contextlib.contextmanager
def _as_request(param: str) -> Iterator[None]:
    """Convert a ValueError of the body into ApiError (INVALID_REQUEST)."""
    try:
        yield
    except ValueError as error:
        raise invalid_request(str(error), param) from error


@asynccontextmanager
async def engine_directory(
    store: RecordStore[EngineMember], pools: Mapping[str, EnginePool], tls: Mapping[str, EngineTls | None]
) -> AsyncIterator[EngineDirectory]:
    """Yield a directory that the pools follow until the context is left. The arguments are those of
    `EngineDirectory`."""
    directory = EngineDirectory(store, pools, tls)
    await directory.start()
    try:
        yield directory
    finally:
        await directory.close()
