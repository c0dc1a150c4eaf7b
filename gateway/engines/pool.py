"""Several engines of one base model as one: each request goes to the engine that the router chooses, adapters go to
all of them, and the requests of an engine that ends or is drained move to the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

import structlog

from engine.core.config import LaneGoals
from engine.core.messages.requests import AdapterHash, Lane, LaneMode, Request
from engine.pb import engine_pb2 as pb
from engine.process.tasks import end_task
from engine.rpc.api import EngineMismatch
from engine.rpc.client import LOAD_SECONDS, EngineClient
from engine.rpc.stream import Arrivals, EngineDrained, Handover
from engine.rpc.target import EngineTarget
from gateway.api_schema.engines import EngineOverview
from gateway.engines.adapters import PoolAdapters
from gateway.engines.asking import ask_all, reachable
from gateway.engines.dispatch import Dispatch
from gateway.engines.fates import Fates
from gateway.engines.lanes import PoolLanes
from gateway.engines.merge import merge_info, merge_requests, merge_stats
from gateway.engines.replica import CONFIGURED, PooledEngine, mismatch
from gateway.routing.news import Role
from gateway.routing.split import SplitMode

log = structlog.get_logger("engines")

LOOK_SECONDS = 1.0
"""Seconds between two looks for engines that hang."""
FIRST_NEWS_SECONDS = 5.0
"""Seconds to wait for the first news of an engine that has connected."""
ECHO_SECONDS = 2.0
"""Maximum seconds to wait until the news of an engine confirm that it began or ended to drain."""


class EnginePool:
    """An `EngineApi` over several engines, which may join and leave while requests run. Adapters are loaded into every
    engine, also into later ones."""

    def __init__(self, *, load_seconds: float = LOAD_SECONDS, split: SplitMode = SplitMode.AUTO) -> None:
        """Args:
        load_seconds: timeout of `load_adapter` for each engine.
        split: which requests are split between engines that exchange KV.
        """
        self.info = pb.EngineInfo()
        self.on_first: Callable[[], Awaitable[None]] | None = None
        """Awaited when an engine joins while no other serves, before it gets requests; loads the adapters again."""
        self._load_seconds = load_seconds
        self._engines: dict[str, PooledEngine] = {}
        self._serving = asyncio.Event()
        self._changed = asyncio.Event()
        """Set, and replaced, when an engine begins or ceases to serve."""
        self._joining = asyncio.Lock()
        """Held while an engine that has connected gets the adapters, so that one is filled after the other."""
        self._adapters = PoolAdapters()
        self._lanes = PoolLanes()
        self._fates = Fates()
        self._dispatch = Dispatch(self._engines, self._adapters.infos, split)
        self.decisions = self._dispatch.decisions
        self._task: asyncio.Task[None] | None = None

    @property
    def load_seconds(self) -> float:
        """Timeout of loading an adapter into one engine, in seconds. Can be set."""
        return self._load_seconds

    @load_seconds.setter
    def load_seconds(self, seconds: float) -> None:
        self._load_seconds = seconds
        for engine in self._engines.values():
            engine.client.load_seconds = seconds

    @property
    def ready(self) -> bool:
        return self._serving.is_set()

    @property
    def predicted_wait(self) -> float:
        """Predicted TTFT, in seconds, of an interactive request with an empty prompt that arrives now, at the engine
        with the shortest wait; 0 if no engine serves."""
        return min((engine.news.wait_s for engine in self._engines.values() if engine.serving), default=0.0)

    async def wait_ready(self) -> None:
        await self._serving.wait()

    async def wait_serving(self, count: int) -> None:
        """Wait until at least `count` engines serve, without a time limit."""
        while sum(engine.serving for engine in self._engines.values()) < count:
            await self._changed.wait()

    async def start(self) -> None:
        """Begin to look for engines that hang, in a background task."""
        self._task = asyncio.create_task(self._look_forever(), name="engine-pool")

    async def close(self) -> None:
        """Close the connections to all engines. The engines go on."""
        await end_task(self._task)
        await asyncio.gather(*(self.remove(name) for name in tuple(self._engines)))

    @property
    def addresses(self) -> Mapping[str, str]:
        """The addresses of all engines by their names, in the order in which they were added."""
        return {engine.name: engine.address for engine in self._engines.values()}

    async def add(self, name: str, target: EngineTarget, added_by: str = CONFIGURED, role: Role = Role.BOTH) -> None:
        """Connect to an engine, which serves as soon as it has the adapters. Raises ValueError if the name is
        taken, or if the TLS files of `target` cannot be used."""
        if name in self._engines:
            raise ValueError(f"there is an engine with the name {name!r} already")
        client = EngineClient(target.address, tls=target.tls, load_seconds=self._load_seconds)
        engine = self._engines[name] = PooledEngine(name, client, target.address, added_by, role)
        client.on_connect = partial(self._connected, engine)
        client.on_news = partial(self._heard, engine)
        client.on_lost = partial(self._lost, engine)
        await client.start()

    async def remove(self, name: str) -> None:
        """Disconnect from an engine. Its requests move to others. Raises KeyError if there is none of this name."""
        engine = self._engines.pop(name)
        self._dispatch.leave(engine)  # before its requests look for another engine
        self._refresh()
        engine.client.hand_over(EngineDrained(f"the engine {name} was removed"))
        await engine.client.close()
        self._fates.note_untold(engine.life)

    def overviews(self) -> list[EngineOverview]:
        """Return all engines, also those that do not serve, in the order in which they were added."""
        return [engine.overview() for engine in self._engines.values()]

    async def drain(self, name: str, draining: bool, *, restart: bool = False, seconds: float = 0.0) -> None:
        """Begin or end draining an engine for all gateways, until its news confirm it, or for ECHO_SECONDS. `restart`
        ends its process once it is empty or after `seconds`. Raises KeyError for an unknown engine,
        EngineUnavailable; EngineDrained, the drain cannot be ended."""
        engine = self._engines[name]
        await engine.client.drain(draining, stop=restart, seconds=seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ECHO_SECONDS):
                while engine.is_reachable and engine.draining is not draining:
                    await self._changed.wait()

    def generate(self, request: Request, session: str = "", handover: Handover | None = None) -> Arrivals:
        if handover is not None and (arrivals := self._dispatch.go_on(request, handover)) is not None:
            return arrivals
        if len(self._engines) == 1:
            return next(iter(self._engines.values())).client.submit(request)
        return self._dispatch.submit(request, session, share_prefixes=self.info.share_prefixes)

    def fate(self, life: str) -> pb.PreviousLife | None:
        return self._fates.of(life)

    async def learn_fate(self, life: str) -> pb.PreviousLife:
        return await self._fates.learn(life)

    async def load_adapter(self, path: str) -> pb.AdapterInfo:
        return await self._adapters.load(self._reachable, path)

    async def unload_adapter(self, adapter_hash: AdapterHash, drain_seconds: float) -> int:
        self._adapters.note_unloaded(self._engines.values(), adapter_hash)
        unloaded = await ask_all(self._reachable(), lambda client: client.unload_adapter(adapter_hash, drain_seconds))
        return sum(unloaded.values())

    async def pin_adapter(self, adapter_hash: AdapterHash, pinned: bool) -> None:
        await self._adapters.pin(self._reachable(), adapter_hash, pinned)

    async def stats(self, *, check: bool = False) -> pb.EngineStats:
        changes = self._lanes.changes
        reports = await ask_all(self._reachable(), lambda client: client.stats(check=check))
        self._lanes.learn((stats for engine, stats in reports.items() if engine.replica is not None), changes)
        return merge_stats(list(reports.values()))

    async def live_requests(self, limit: int) -> pb.RequestsResponse:
        answers = await ask_all(self._reachable(), lambda client: client.live_requests(limit))
        return merge_requests(list(answers.values()), limit)

    async def cancel(self, request_ids: Iterable[str]) -> int:
        ids = list(request_ids)
        return sum((await ask_all(self._reachable(), lambda client: client.cancel(ids))).values())

    async def set_lane(self, lane: Lane, mode: LaneMode) -> None:
        with self._lanes.changing(lane, mode):
            await ask_all(self._reachable(), lambda client: client.set_lane(lane, mode))

    async def set_goals(self, lane: Lane, goals: LaneGoals) -> None:
        self._lanes.note_goals(lane, goals)
        await ask_all(self._reachable(), lambda client: client.set_goals(lane, goals))

    def _reachable(self) -> Sequence[PooledEngine]:
        return reachable(self._engines.values())

    async def _connected(self, engine: PooledEngine) -> None:
        """Hand the adapters to an engine that has connected, and tell the router of it. Raises EngineMismatch if it
        does not serve what the others serve, EngineUnavailable if it is gone again."""
        info = engine.client.info
        self._fates.note_successor(info, engine.life)
        engine.life = info.life
        while engine.hangs:  # it holds no lock meanwhile, so that others may join
            await asyncio.sleep(LOOK_SECONDS)
            await engine.client.check_connected()
        self._fates.note_running(info.life)
        async with self._joining:
            others = [other for other in self._engines.values() if other.replica is not None and other is not engine]
            if others and (difference := mismatch(engine, others)):
                raise EngineMismatch(difference)
            engine.is_reachable = True
            await self._prepare(engine, others)
            self._dispatch.join(engine)
            self._refresh()

    async def _prepare(self, engine: PooledEngine, others: Sequence[PooledEngine]) -> None:
        """Make an engine ready to join: load the pool's adapters (`on_first` does without `others`), and set the lanes'
        modes and goals. Raises EngineUnavailable if it is gone again, so that it never joins in part."""
        if others:
            await self._adapters.fill(engine)
            changes = self._lanes.changes
            reports = await asyncio.gather(*(other.client.stats() for other in others), return_exceptions=True)
            self._lanes.learn((report for report in reports if isinstance(report, pb.EngineStats)), changes)
        else:
            self._adapters.clear()
            if self.on_first is not None:
                await self.on_first()
        if engine.life != engine.known_life:  # one that was only out of reach may have been set by another gateway
            await self._lanes.apply(engine.client)
            engine.known_life = engine.life
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_NEWS_SECONDS):
                await engine.told.wait()
        await engine.client.check_connected()

    def _heard(self, engine: PooledEngine, message: pb.EngineNews) -> None:
        was_draining = engine.draining
        engine.hear(message)
        self._dispatch.hear(engine, message)
        if engine.draining != was_draining:
            log.info("engine_draining" if engine.draining else "engine_serves_again", engine=engine.name)
            self._refresh()

    def _lost(self, engine: PooledEngine) -> None:
        self._fates.forget(engine.client.info.life)
        self._dispatch.leave(engine)
        engine.lose()
        self._refresh()

    def _refresh(self) -> None:
        """Update the pool after an engine has joined, left, or begun or ended to drain, and move requests off engines
        that drain if another engine serves."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for engine in self._engines.values():
            if engine.replica is not None:
                engine.replica.draining = engine.draining
        serving = [engine for engine in self._engines.values() if engine.serving]
        if not serving:
            self._serving.clear()
            return
        self.info.CopyFrom(merge_info([engine.client.info for engine in serving]))
        self._serving.set()
        for engine in self._engines.values():
            if engine.draining and engine.client.num_streams:
                engine.client.hand_over(EngineDrained(f"the engine {engine.name} is being drained"))

    async def _look_forever(self) -> None:
        """Once a second, look for engines that hang, and move their requests to others, if there are any. An engine
        joins again once it makes progress."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            hanging = [engine for engine in self._engines.values() if engine.progress.look(engine.client.ready)]
            if any(engine.serving and engine not in hanging for engine in self._engines.values()):
                for engine in hanging:
                    log.error("engine_hangs", engine=engine.name)
                    engine.progress.give_up(engine.life)
                    engine.client.disconnect()
