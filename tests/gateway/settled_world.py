"""A gateway whose edges (engines, an upstream, the limiter) do only what a test says, and what is left of its requests.

Everything between is real: the service, virtual models, the pools of engines with router and hand-over, the engine
links, the upstream client and the local limiter.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fakes import Watcher, grammar_pool, tiny_tokenizer
from scripted_edges import ScriptedLimiter, ScriptedUpstream
from virtual_loop import VirtualLoop
from wire_engine import WireChannels, WireEngine, Work

from engine.core.messages.requests import Lane
from engine.rpc.target import EngineTarget
from gateway.adapters.admin import AdapterAdmin
from gateway.adapters.record import ADAPTERS
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.sources import LocalSources
from gateway.config.upstreams import UpstreamConfig
from gateway.core.errors import ApiError
from gateway.core.tenants import Principal, Tenant
from gateway.engines.pool import EnginePool
from gateway.registry.memory import MemoryRecordStore
from gateway.requests.route_outcome import RouteOutcome
from gateway.requests.route_runner import RouteTable
from gateway.requests.served_model import ServedModel, ServedModels
from gateway.requests.service import Gateway
from gateway.requests.settings import ServiceSettings
from gateway.requests.types import GenerateRequest, GenerationChunk
from gateway.routing.split import SplitMode
from gateway.upstreams.client import UpstreamClient
from gateway.virtual_models.acceptance import Acceptance, Verifier
from gateway.virtual_models.cascade import Cascade
from gateway.virtual_models.fallback import Fallback
from gateway.virtual_models.policy import Policy, Shadow
from gateway.virtual_models.split import Split

BASE, SMALL, CLOUD, ADAPTER = "tiny", "small", "cloud", "pirate"
JUDGED = Acceptance(valid=False, verifier=Verifier(SMALL, "{answer}?"))
ROUTES: dict[str, Policy] = {
    "fallback": Fallback((SMALL, BASE), max_wait_s=9.0),
    "cloud first": Fallback((CLOUD, BASE), max_wait_s=9.0),
    "cloud alone": Split({CLOUD: 1}),
    "cascade": Cascade((SMALL, BASE), Acceptance(valid=False, agreement=True)),
    "cascade of the cloud": Cascade((CLOUD, SMALL, BASE), Acceptance(valid=True)),
    "judged": Cascade((BASE, SMALL), JUDGED),
    "shadowed": Split({BASE: 1}, shadow=Shadow(SMALL, at_once=1)),
}
"""The virtual models."""
TENANT = Tenant("acme", upstreams=("*",))
OWNER = Principal(TENANT, "key-1")
SETTINGS = ServiceSettings(
    max_choices=2, request_timeout=60.0, first_token_timeout=20.0, engine_wait=5.0, lane_capacity={Lane.BATCH: 4}
)
ROUNDS = 100
"""Rounds in which every request ends once nothing holds it up."""


@dataclass
class Visit:
    """One caller, from its request to the end of its stream."""

    request: GenerateRequest
    slow: bool = False
    """True means that it takes a chunk only when it is told to."""
    leaving: bool = False
    """True means that it leaves at its next chunk, or that the test has cancelled it."""
    chunks: list[GenerationChunk] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """How its stream ended: `complete`, `left`, `cancelled` or the name of a fault."""
    turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    task: asyncio.Task[None] | None = None
    begun: int = 0
    has_started: bool = False

    @property
    def answers(self) -> int:
        return len(self.request.prompts) * self.request.n

    @property
    def is_direct(self) -> bool:
        """Return whether an engine serves it, and no virtual model."""
        return self.request.model.model not in ROUTES

    async def run(self, gateway: Gateway) -> None:
        self.has_started = True
        try:
            async with gateway.generate(OWNER, self.request, self._begin) as generation:
                async for chunk in generation:
                    self.chunks.append(chunk)
                    if self.slow:
                        await self.turn.acquire()
                    if self.leaving:
                        self.ends.append("left")
                        return
                self.ends.append("complete")
        except ApiError as error:
            self.ends.append(error.fault.name)
        except asyncio.CancelledError:
            self.ends.append("cancelled")

    def _begin(self) -> None:
        self.begun += 1

    def check(self) -> None:
        """Check that the stream, which is over, had one end, and the chunks that belong to it."""
        assert not self.has_started or self.ends, "a stream without an end"
        # A caller that leaves, or that the test cancels, may also be told that its request was ended meanwhile.
        is_told = self.ends[:1] == ["left"] or self.ends[1:] == ["cancelled"]
        assert len(self.ends) <= 1 + (is_told and self.leaving), f"a stream with several ends: {self.ends}"
        assert self.begun <= 1, "it began more than once"
        finishes = Counter(chunk.answer for chunk in self.chunks if chunk.finish_reason is not None)
        assert not finishes or max(finishes.values()) == 1, f"an answer that finished twice: {finishes}"
        for at, chunk in enumerate(self.chunks):
            is_over = chunk.finish_reason is not None
            assert not is_over or all(other.answer != chunk.answer for other in self.chunks[at + 1 :]), "text after it"
            assert chunk.usage is None or at == len(self.chunks) - 1, "usage before the last chunk"
        if self.ends[:1] == ["complete"]:
            assert len(finishes) == self.answers
            assert self.chunks[-1].usage is not None, "a complete answer without usage"

    @property
    def delivered(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class World:
    """The gateway, its edges, and its callers."""

    def __init__(self, loop: VirtualLoop, folder: Path) -> None:
        self.loop = loop
        self.limiter, self.watcher, self.cloud = ScriptedLimiter(loop), Watcher(), ScriptedUpstream()
        self.engines = [WireEngine("a"), WireEngine("b"), WireEngine("c", SMALL)]
        self.outcomes: list[RouteOutcome] = []
        self.visits: list[Visit] = []
        self.is_stopping = False
        self._folder = folder

    async def start(self) -> None:
        WireChannels.engines = {f"unix:/{engine.name}": engine for engine in self.engines}
        a, b, c = self.engines
        self.pools = [await self._pool(a, b), await self._pool(c)]
        await self.limiter.configure([TENANT])
        sources = LocalSources([self._folder])
        self.models = [
            await self._served(pool, name, sources) for pool, name in zip(self.pools, (BASE, SMALL), strict=True)
        ]
        await self.models[0].adapters.load(ADAPTER, str(self._folder / ADAPTER))
        config = UpstreamConfig("http://127.0.0.1:1/v1", "big", max_requests=2, failures=3)
        self.client = UpstreamClient(CLOUD, config, transport=self.cloud, clock=self.loop.time)
        self.gateway = Gateway(
            ServedModels(self.models),
            AdapterAdmin([model.adapters for model in self.models], sources, {}),
            self.limiter,
            settings=SETTINGS,
            observers=(self.watcher,),
            clock=self.loop.time,
            routes=RouteTable(ROUTES, upstreams={CLOUD: self.client}, observe=self.outcomes.append),
        )

    async def _pool(self, *engines: WireEngine) -> EnginePool:
        pool = EnginePool(split=SplitMode.ALWAYS)
        pool._dispatch._clock = self.loop.time
        await pool.start()
        for engine in engines:
            await pool.add(engine.name, EngineTarget(f"unix:/{engine.name}"))
        await pool.wait_serving(len(engines))
        return pool

    async def _served(self, pool: EnginePool, name: str, sources: LocalSources) -> ServedModel:
        virtual = frozenset(ROUTES if name == BASE else ())
        store = MemoryRecordStore(ADAPTERS)
        registry = AdapterRegistry(pool, store, sources, base_names=(name,), virtual_names=virtual)
        await registry.start()
        pool.on_first = registry.restore
        return ServedModel(pool, tiny_tokenizer(), registry, grammars=grammar_pool(), settings=SETTINGS)

    def begin(self, visit: Visit) -> None:
        self.visits.append(visit)
        visit.task = self.loop.create_task(visit.run(self.gateway))

    @property
    def running(self) -> list[Visit]:
        return [visit for visit in self.visits if visit.task is not None and not visit.task.done()]

    @property
    def works(self) -> list[tuple[WireEngine, Work]]:
        return [(engine, work) for engine in self.engines for work in engine.works.values()]

    def news(self) -> None:
        for engine in self.engines:
            engine.tell()

    def wind_up(self, token: int) -> None:
        """Let every request end: nothing holds it up any more, and engines answer with `token`. Fails if one does
        not."""
        limiter = self.limiter
        limiter.manner = "at once"
        for engine in self.engines:
            engine.draining = engine.hangs = False
            if not engine.up:
                engine.restart()
        for _ in range(ROUNDS):
            for visit in self.running:
                visit.slow = False
                visit.turn.release()
            for engine, work in self.works:
                if work.submit.params.max_tokens:
                    engine.tokens(work, 2, token, stop=True)
                else:
                    engine.pool(work)
            for exchange in self.cloud.open:
                if not exchange.status.done():
                    exchange.status.set_result(200)
                exchange.finish()
            limiter.release(99)
            self.news()
            self.loop.passes(0.5)
            if not self.running and not self.gateway.active:
                return
        raise AssertionError(f"these never end: {[visit.request.request_id for visit in self.running]}")

    async def close(self) -> None:
        """End the gateway and everything below it."""
        await self.gateway.close()
        await self.client.close()
        for model in self.models:
            await model.adapters.close()
        for pool in self.pools:
            await pool.close()
