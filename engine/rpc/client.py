"""EngineClient: the gateway's side of `engine.proto`. It is async because it runs in the gateway's event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import grpc

from engine.core.config import LaneGoals
from engine.core.messages.requests import AdapterHash, Lane, LaneMode, Request
from engine.pb import engine_pb2 as pb
from engine.rpc.api import AdapterRejected
from engine.rpc.link import EngineLink
from engine.rpc.stream import Arrivals, EngineDrained, EngineUnavailable, Handover
from engine.rpc.target import EngineTarget, EngineTls
from engine.rpc.wire import LANE_MODES, LANES

STATS_SECONDS = 10.0
"""Timeout in seconds of calls that the engine answers between two steps: an engine whose step takes longer is treated
as unavailable."""
LOAD_SECONDS = 300.0
"""Default timeout in seconds for loading an adapter: for a large model on a slow disk, reading one takes minutes."""
UNLOAD_MARGIN_SECONDS = 30.0
"""Seconds that unloading may take beyond the drain time, to abort the remaining requests and free the adapter."""
REJECTED = dict.fromkeys(
    (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNKNOWN), AdapterRejected
)
"""Status codes that mean that the engine rejects this adapter. UNKNOWN is an unexpected exception while the adapter was
read; the engine keeps running."""


class EngineClient(EngineLink):
    """An `EngineApi` over one `EngineLink` to `address`, e.g. `unix:/path/to/socket`. `load_seconds` bounds
    `load_adapter`. Without `tls`, only this machine is reached. Raises ValueError for a bad address or TLS files."""

    def __init__(
        self,
        address: str,
        *,
        tls: EngineTls | None = None,
        load_seconds: float = LOAD_SECONDS,
        on_news: Callable[[pb.EngineNews], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(EngineTarget(address, tls), on_news=on_news, on_lost=on_lost)
        self.load_seconds = load_seconds

    def generate(self, request: Request, session: str = "", handover: Handover | None = None) -> Arrivals:
        return self.submit(request)

    async def check_connected(self) -> None:
        """Raise EngineUnavailable if the engine does not answer, or if another process has taken the place of the one
        that this client has connected to."""
        info = await self.ask("Describe", pb.DescribeRequest(), STATS_SECONDS)
        if info.life != self.info.life:
            raise EngineUnavailable("another engine process has taken the place of this one")

    def fate(self, life: str) -> pb.PreviousLife | None:
        if not self.ready:
            return None
        previous = self.info.previous
        # Otherwise the connection broke, or more processes have ended since; the request is not blamed.
        return previous if previous.life == life else pb.PreviousLife(life=life)

    async def learn_fate(self, life: str) -> pb.PreviousLife:
        while (fate := self.fate(life)) is None:
            await self.wait_ready()
        return fate

    async def drain(self, draining: bool, *, stop: bool = False, seconds: float = 0.0) -> None:
        """Begin or end draining the engine, for all gateways. With `stop`, its process ends once it has no requests
        left, or after `seconds`. Raises EngineUnavailable if the engine is gone or does not answer; EngineDrained, its
        drain cannot be ended."""
        request = pb.DrainRequest(draining=draining, stop=stop, seconds=seconds)
        await self.ask("Drain", request, STATS_SECONDS, {grpc.StatusCode.FAILED_PRECONDITION: EngineDrained})

    async def load_adapter(self, path: str) -> pb.AdapterInfo:
        refusals = REJECTED | {grpc.StatusCode.DEADLINE_EXCEEDED: TimeoutError}
        try:
            return await self.ask("LoadAdapter", pb.LoadAdapterRequest(path=path), self.load_seconds, refusals)
        except TimeoutError as error:
            raise AdapterRejected(f"the engine had not read it after {self.load_seconds:g} s") from error

    async def unload_adapter(self, adapter_hash: AdapterHash, drain_seconds: float) -> int:
        request = pb.UnloadAdapterRequest(adapter=adapter_hash, drain_seconds=drain_seconds)
        return (await self.ask("UnloadAdapter", request, drain_seconds + UNLOAD_MARGIN_SECONDS)).aborted

    async def pin_adapter(self, adapter_hash: AdapterHash, pinned: bool) -> None:
        request = pb.PinAdapterRequest(adapter=adapter_hash, pinned=pinned)
        await self.ask("PinAdapter", request, STATS_SECONDS, REJECTED)

    async def stats(self, *, check: bool = False) -> pb.EngineStats:
        return await self.ask("Stats", pb.StatsRequest(check=check), STATS_SECONDS)

    async def live_requests(self, limit: int) -> pb.RequestsResponse:
        return await self.ask("Requests", pb.RequestsRequest(limit=limit), STATS_SECONDS)

    async def cancel(self, request_ids: Iterable[str]) -> int:
        return (await self.ask("Cancel", pb.CancelRequest(request_ids=request_ids), STATS_SECONDS)).cancelled

    async def set_lane(self, lane: Lane, mode: LaneMode) -> None:
        request = pb.SetLaneRequest(lane=LANES[lane], mode=LANE_MODES[mode])
        await self.ask("SetLane", request, STATS_SECONDS)

    async def set_goals(self, lane: Lane, goals: LaneGoals) -> None:
        request = pb.SetGoalsRequest(
            lane=LANES[lane],
            ttft_seconds=goals.ttft_s,
            itl_seconds=goals.itl_s,
            attainment=goals.attainment,
            max_wait_seconds=goals.max_wait_s,
        )
        await self.ask("SetGoals", request, STATS_SECONDS)
