"""Several engines of one base model as one: each request goes to the engine that the router chooses, adapters go to
all of them, and the requests of an engine that ends or is drained move to the others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

import structlog

from engine.core.config import LaneGoals
from engine.core.types import AdapterHash, Lane, LaneMode, Request
from engine.pb import engine_pb2 as pb
from engine.rpc.api import EngineMismatch
from engine.rpc.client import LOAD_SECONDS, EngineClient
from engine.rpc.stream import Arrivals, EngineDrained, EngineUnavailable
from engine.rpc.target import EngineTarget
from engine.rpc.wire import lane_mode_from_pb
from gateway.engines.adapters import PoolAdapters, first_refusal
from gateway.engines.merge import merge_info, merge_requests, merge_stats
from gateway.engines.replica import EngineOverview, PooledEngine
from gateway.routing.news import Ask, Replica
from gateway.routing.prefixes import PREFIX_TOKENS, prefix_keys
from gateway.routing.router import NoReplica, Reason, Router

log = structlog.get_logger("engines")

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""Seconds between two looks for engines that hang."""
FIRST_NEWS_SECONDS = 5.0
"""Seconds to wait for the first news of an engine that has connected."""
ECHO_SECONDS = 2.0
"""Seconds within which the news of an engine show that it began or ended to drain."""
MAX_FATES = 4096
"""Maximum number of engine processes of which is remembered how they ended."""


async def _nothing() -> None:
    """Do nothing."""


class EnginePool:
    """An `EngineApi` over several engines. Engines may join and leave while requests run.

    Adapters that are loaded into the pool are loaded into every engine, also into those that join later. The first
    engine that joins while no other one serves is filled by `on_first` instead.
    """

    def __init__(
        self, on_first: Callable[[], Awaitable[None]] = _nothing, *, load_seconds: float = LOAD_SECONDS
    ) -> None:
        """
        Args:
            on_first: awaited when an engine joins while no other one serves, before it gets requests; it loads the
                adapters again, as none is in memory any more.
            load_seconds: timeout of `load_adapter` in seconds, for each engine.
        """
        self.info = pb.EngineInfo()
        self.on_first = on_first
        self.decisions: dict[Reason, int] = dict.fromkeys(Reason, 0)
        """Number of requests by the reason for which the router chose their engine."""
        self._load_seconds = load_seconds
        self._engines: dict[str, PooledEngine] = {}
        self._router = Router()
        self._clock = time.monotonic
        self._serving = asyncio.Event()
        self._changed = asyncio.Event()
        """Set, and replaced, when an engine begins or ceases to serve."""
        self._joining = asyncio.Lock()
        """Held while an engine that has connected gets the adapters, so that one is filled after the other."""
        self._adapters = PoolAdapters()
        self._fates: OrderedDict[str, pb.PreviousLife] = OrderedDict()
        """How engine processes ended, by their ids."""
        self._fate_told = asyncio.Event()
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

    async def wait_ready(self) -> None:
        await self._serving.wait()

    async def wait_serving(self, count: int) -> None:
        """Wait until so many engines serve, without a time limit."""
        while sum(engine.serving for engine in self._engines.values()) < count:
            await self._changed.wait()

    async def start(self) -> None:
        """Begin to look for engines that hang, in a background task."""
        self._task = asyncio.create_task(self._look_forever(), name="engine-pool")

    async def close(self) -> None:
        """Close the connections to all engines. The engines go on."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*(self.remove(name) for name in tuple(self._engines)))

    async def add(self, name: str, target: EngineTarget) -> None:
        """Connect to an engine, which serves as soon as it has the adapters. Raises ValueError if the name is
        taken, or if the TLS files of `target` cannot be used."""
        if name in self._engines:
            raise ValueError(f"there is an engine with the name {name!r} already")
        client = EngineClient(target.address, tls=target.tls, load_seconds=self._load_seconds)
        engine = self._engines[name] = PooledEngine(name, client, target.address)
        client.on_connect = partial(self._connected, engine)
        client.on_news = partial(self._heard, engine)
        client.on_lost = partial(self._lost, engine)
        await client.start()

    async def remove(self, name: str) -> None:
        """Disconnect from an engine. Its requests move to others. Raises KeyError if there is none of this name."""
        engine = self._engines.pop(name)
        engine.client.hand_over(EngineDrained(f"the engine {name} was removed"))
        await engine.client.close()

    def overviews(self) -> list[EngineOverview]:
        """Return all engines, also those that do not serve, in the order in which they were added."""
        return [engine.overview() for engine in self._engines.values()]

    async def drain(self, name: str, draining: bool, *, restart: bool = False, seconds: float = 0.0) -> None:
        """Begin or end draining an engine, for all gateways: it gets no new requests, and its requests move to others
        if there are any. Return when this gateway has heard of it from the engine. `restart` also ends its process,
        once it has no requests left or after `seconds`, so that its supervisor starts another. Raises KeyError if there
        is no such engine, EngineUnavailable if it does not answer."""
        engine = self._engines[name]
        await engine.client.drain(draining, stop=restart, seconds=seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ECHO_SECONDS):
                while engine.is_reachable and engine.draining is not draining:
                    await self._changed.wait()

    def generate(self, request: Request, session: str = "") -> Arrivals:
        if len(self._engines) == 1:
            return next(iter(self._engines.values())).client.submit(request)
        ask = self._ask_for(request, session)
        engine, replica, reason = self._choose(ask)
        arrivals = engine.client.submit(request, ask.prefix_keys, partial(self._router.finish, replica, request.lane))
        arrivals.engine, arrivals.reason = engine.name, reason.value
        self.decisions[reason] += 1
        return arrivals

    def fate(self, life: str) -> pb.PreviousLife | None:
        return self._fates.get(life)

    async def learn_fate(self, life: str) -> pb.PreviousLife:
        while life not in self._fates:
            await self._fate_told.wait()
        return self._fates[life]

    async def load_adapter(self, path: str) -> pb.AdapterInfo:
        return await self._adapters.load(self._reachable, path)

    async def unload_adapter(self, adapter_hash: AdapterHash, drain_seconds: float) -> int:
        self._adapters.note_unloaded(self._engines.values(), adapter_hash)
        return sum(await self._ask_all(lambda client: client.unload_adapter(adapter_hash, drain_seconds)))

    async def pin_adapter(self, adapter_hash: AdapterHash, pinned: bool) -> None:
        await self._adapters.pin(self._reachable(), adapter_hash, pinned)

    async def stats(self, *, check: bool = False) -> pb.EngineStats:
        return merge_stats(await self._ask_all(lambda client: client.stats(check=check)))

    async def live_requests(self, limit: int) -> pb.RequestsResponse:
        return merge_requests(await self._ask_all(lambda client: client.live_requests(limit)), limit)

    async def cancel(self, request_ids: Iterable[str]) -> int:
        ids = list(request_ids)
        return sum(await self._ask_all(lambda client: client.cancel(ids)))

    async def set_lane(self, lane: Lane, mode: LaneMode) -> None:
        await self._ask_all(lambda client: client.set_lane(lane, mode))

    async def set_goals(self, lane: Lane, goals: LaneGoals) -> None:
        await self._ask_all(lambda client: client.set_goals(lane, goals))

    def _reachable(self) -> list[PooledEngine]:
        """Return the engines that have a connection, also those that are being filled. Raises EngineUnavailable if
        there is none."""
        engines = [engine for engine in self._engines.values() if engine.is_reachable]
        if not engines:
            raise EngineUnavailable("no engine is connected")
        return engines

    async def _ask_all(self, call: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
        """Call every reachable engine at once, and return the answers of those that gave one. Raises the error of an
        engine that refused, or EngineUnavailable if none answered."""
        results = await asyncio.gather(*(call(engine.client) for engine in self._reachable()), return_exceptions=True)
        answers = [result for result in results if not isinstance(result, BaseException)]
        failures = [result for result in results if isinstance(result, BaseException)]
        if not answers or any(not isinstance(failure, EngineUnavailable) for failure in failures):
            raise first_refusal(failures)
        return answers

    def _ask_for(self, request: Request, session: str) -> Ask:
        """Return what the router has to know about a request."""
        adapter_hash, expected = request.adapter_hash, request.expected_tokens
        realm = "" if self.info.share_prefixes else request.tenant
        return Ask(
            prompt_tokens=len(request.prompt_ids) + len(request.produced),
            lane=request.lane,
            adapter_hash=adapter_hash,
            adapter_bytes=self._adapters.sizes.get(adapter_hash or "", 0),
            prefix_keys=prefix_keys(request.prompt_ids, adapter_hash, realm),
            session=session or None,
            output_tokens=request.params.max_tokens if expected is None else expected,
        )

    def _choose(self, ask: Ask) -> tuple[PooledEngine, Replica, Reason]:
        """Choose an engine that has the request's adapter, one that drains if no other has. Raises EngineUnavailable if
        none has, or none takes requests."""
        try:
            decision = self._router.choose(ask, self._clock())
        except NoReplica as error:
            raise EngineUnavailable(str(error)) from error
        chosen = self._engines[decision.replica.name]
        if ask.adapter_hash is None or ask.adapter_hash in chosen.held:
            return chosen, decision.replica, decision.reason
        self._router.finish(decision.replica, ask.lane)
        for engine in sorted(self._engines.values(), key=lambda engine: engine.draining):
            if ask.adapter_hash in engine.held and (replica := engine.replica) is not None:
                replica.send(ask, 0)
                return engine, replica, Reason.HOLDER
        raise EngineUnavailable("no engine that takes requests has the adapter")

    async def _connected(self, engine: PooledEngine) -> None:
        """Hand the adapters to an engine that has connected, and tell the router of it. Raises EngineMismatch if it
        does not serve what the others serve, EngineUnavailable if it is gone again."""
        info = engine.client.info
        self._note_fate(info)
        async with self._joining:
            others = [other for other in self._engines.values() if other.replica is not None and other is not engine]
            if others and (difference := differences(others[0].client.info, info)):
                raise EngineMismatch(f"{engine.name} cannot serve beside {others[0].name}: {difference}")
            engine.is_reachable = True
            if others:
                await self._adapters.fill(engine)
                await _copy_lane_modes(others[0].client, engine.client)
            else:
                self._adapters.clear()
                await self.on_first()
            with contextlib.suppress(TimeoutError):  # without news, the router treats the engine as one long silent
                await asyncio.wait_for(engine.told.wait(), FIRST_NEWS_SECONDS)
            engine.replica = self._router.join(engine.name, info.num_pages * info.block_size // PREFIX_TOKENS)
            engine.replica.hear(engine.news, self._clock() if engine.told.is_set() else float("-inf"))
            self._refresh()

    def _heard(self, engine: PooledEngine, message: pb.EngineNews) -> None:
        was_draining, now = engine.draining, self._clock()
        engine.hear(message)
        if (replica := engine.replica) is not None:
            replica.hear(engine.news, now)
            self._router.learn(replica, message.prefix_keys)
        self._router.tick(now)
        if engine.draining != was_draining:
            log.info("engine_draining" if engine.draining else "engine_serves_again", engine=engine.name)
            self._refresh()

    def _lost(self, engine: PooledEngine) -> None:
        if engine.replica is not None:
            self._router.leave(engine.replica)
            engine.replica = None
        self._fates.pop(engine.client.info.life, None)  # a process that was reached again before it ended
        engine.lose()
        self._refresh()

    def _refresh(self) -> None:
        """Take note that an engine has joined, left, or begun or ended to drain, and move requests off the engines that
        drain if another one serves."""
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

    def _note_fate(self, info: pb.EngineInfo) -> None:
        """Remember how the process before this one ended, and that this one has not ended."""
        self._fates[info.life] = pb.PreviousLife(life=info.life)
        if info.previous.life:
            self._fates[info.previous.life] = info.previous
        while len(self._fates) > MAX_FATES:
            self._fates.popitem(last=False)
        told, self._fate_told = self._fate_told, asyncio.Event()
        told.set()

    async def _look_forever(self) -> None:
        """Once a second, look for engines that hang, and move their requests to others, if there are any."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            hanging = [engine for engine in self._engines.values() if engine.hangs()]
            if any(engine.serving and engine not in hanging for engine in self._engines.values()):
                for engine in hanging:
                    log.error("engine_hangs", engine=engine.name)
                    engine.client.disconnect()


def differences(known: pb.EngineInfo, other: pb.EngineInfo) -> str:
    """Return in which way an engine differs from the others so that it cannot continue their answers; empty if not."""
    names = ("model_hash", "dtype", "vocab_size", "max_model_len")
    pairs = [(name, getattr(known, name), getattr(other, name)) for name in names]
    return "; ".join(f"it has another {name} ({theirs}, not {ours})" for name, ours, theirs in pairs if ours != theirs)


async def _copy_lane_modes(source: EngineClient, target: EngineClient) -> None:
    """Pause or drain the lanes of an engine that joins as those of another engine are."""
    with contextlib.suppress(EngineUnavailable):
        for lane in (await source.stats()).lanes:
            if (mode := lane_mode_from_pb(lane.mode)) is not LaneMode.OPEN:
                await target.set_lane(Lane(lane.lane), mode)
