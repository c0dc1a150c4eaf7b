"""The engines of one base model on a Ray cluster: their number, where they listen, and which is removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import structlog

from engine.core.config import LaneGoals
from engine.core.messages.requests import Lane
from engine.pb import engine_pb2 as pb
from engine.rpc.client import EngineClient
from engine.rpc.stream import EngineUnavailable
from engine.rpc.target import EngineTls
from gateway.cluster.reports import EngineReport, Reports, WantedEngine
from gateway.cluster.scaling import EngineLoad, Scaler
from gateway.config.cluster import RayConfig

log = structlog.get_logger("cluster")

LEAVE_SECONDS = 60.0
"""Seconds that an engine which is no longer needed has to hand its requests to the others, before it is stopped."""


@dataclass
class WatchedEngine:
    """One engine on the cluster, its connection and its last news."""

    orders: str
    """Instructions for the actor that hosts the engine, as text that only the actor reads."""
    address: str = ""
    client: EngineClient | None = None
    news: pb.EngineNews | None = None
    leaves_by: float | None = None
    """Time on the monotonic clock, in seconds, at which an engine that is scaled down is stopped even if it still has
    requests. None means that the engine stays."""
    problem: str = ""

    async def connect(self, address: str, tls: EngineTls | None) -> None:
        """Connect to the engine at `address`, and follow its news. An empty address ends the connection; an unchanged
        one has no effect."""
        if address == self.address:
            return
        await self.close()
        self.address = address
        if address:
            self.client = EngineClient(address, tls=tls, on_news=self._hear, on_lost=self._lose)
            await self.client.start()

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
        self.client = self.news = None

    @property
    def load(self) -> EngineLoad | None:
        """How busy the engine is; None means that it does not serve."""
        if self.client is None or self.news is None or self.news.draining:
            return None
        waits = {Lane(lane.lane): lane.wait_seconds for lane in self.news.lanes}
        return EngineLoad(waits, self.requests, self.client.info.max_seqs)

    @property
    def is_drained(self) -> bool:
        """Return whether an operator drains the engine, which goes on running."""
        return self.news is not None and self.news.draining and self.leaves_by is None

    @property
    def requests(self) -> int:
        """Running and waiting requests, of all gateways."""
        return sum(lane.running + lane.waiting for lane in self.news.lanes) if self.news is not None else 0

    @property
    def is_empty(self) -> bool:
        """Return whether the engine has no requests, and gets none because it drains or does not run."""
        return self.news is None or (self.news.draining and not self.requests)

    def _hear(self, news: pb.EngineNews) -> None:
        self.news = news

    def _lose(self) -> None:
        self.news = None


class ModelOnRay:
    """The engines of one base model. `look` keeps their number as the load needs it."""

    def __init__(
        self,
        name: str,
        config: RayConfig,
        goals: Mapping[Lane, LaneGoals],
        orders: Callable[[str], str],
        tls: EngineTls | None,
    ) -> None:
        """Args:
        goals: of the model's lanes, which the number of engines is to keep.
        orders: returns the instructions for the actor that hosts an engine, given the engine's name.
        tls: files for the connections to the engines.
        """
        self.name = name
        self.scaler = Scaler(config.min, config.max, goals)
        self._resources = dict(config.resources)
        self._orders = orders
        self._tls = tls
        self._engines: dict[str, WatchedEngine] = {}

    @property
    def addresses(self) -> dict[str, str]:
        """Where the engines listen, by name. Engines that start or are started again are missing."""
        return {name: engine.address for name, engine in self._engines.items() if engine.address}

    @property
    def wanted(self) -> dict[str, WantedEngine]:
        """The engines that Ray should run, by MODEL/ENGINE, their names in Ray's reports."""
        return {self._id(name): WantedEngine(self._resources, engine.orders) for name, engine in self._engines.items()}

    async def look(self, reports: Reports, now: float) -> None:
        """Take in what Ray reports of the engines, and add or remove one as their loads need it. `now` is in seconds on
        a monotonic clock."""
        for name, engine in self._engines.items():
            await self._note(name, engine, reports.engines.get(self._id(name), EngineReport()))
        await self._let_go(now)
        staying = {name: engine for name, engine in self._engines.items() if engine.leaves_by is None}
        loads = [load for engine in staying.values() if (load := engine.load) is not None]
        wanted = self.scaler.wanted(loads, now, sum(engine.is_drained for engine in staying.values()))
        for _ in range(wanted - len(staying)):
            self._add()
        for _ in range(len(staying) - wanted):
            await self._send_away(staying, now)

    async def close(self) -> None:
        """Forget all engines, and end the connections to them."""
        engines, self._engines = self._engines, {}
        await asyncio.gather(*(engine.close() for engine in engines.values()))

    def _id(self, name: str) -> str:
        return f"{self.name}/{name}"

    async def _note(self, name: str, engine: WatchedEngine, report: EngineReport) -> None:
        if report.problem and report.problem != engine.problem:
            log.warning("engine_does_not_run", model=self.name, engine=name, reason=report.problem)
        engine.problem = report.problem
        if report.address != engine.address:
            log.info("engine_moved", model=self.name, engine=name, address=report.address)
        await engine.connect(report.address, self._tls)

    def _add(self) -> None:
        name = next(name for name in map("ray-{}".format, count()) if name not in self._engines)
        self._engines[name] = WatchedEngine(self._orders(name))
        log.info("engine_wanted", model=self.name, engine=name)

    async def _send_away(self, staying: dict[str, WatchedEngine], now: float) -> None:
        """Remove one engine from `staying`, and begin to drain it: preferably one that does not serve, otherwise the
        one with the fewest requests."""
        name = min(staying, key=lambda name: (staying[name].load is not None, staying[name].requests))
        engine = staying.pop(name)
        engine.leaves_by = now + LEAVE_SECONDS
        log.info("engine_not_needed", model=self.name, engine=name)
        if engine.client is not None:
            with suppress(EngineUnavailable):  # it has no requests then
                await engine.client.drain(True)

    async def _let_go(self, now: float) -> None:
        """Forget the engines that are scaled down, so that Ray stops them, once they have no requests or `leaves_by`
        has passed."""
        for name, engine in tuple(self._engines.items()):
            if engine.leaves_by is not None and (engine.is_empty or now >= engine.leaves_by):
                del self._engines[name]
                await engine.close()
