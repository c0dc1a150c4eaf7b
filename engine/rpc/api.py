"""What a gateway needs from an engine: the operations, and the errors that they raise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from engine.core.config import LaneGoals
from engine.core.messages.requests import AdapterHash, Lane, LaneMode, Request
from engine.pb import engine_pb2 as pb
from engine.rpc.stream import Handover, PlacedStream


class AdapterRejected(Exception):
    """The engine refused an adapter, or took too long to read it; the message tells the operator why."""


class EngineMismatch(Exception):
    """The engine cannot be used by this gateway, and will not be usable until it is started differently."""


class EngineApi(Protocol):
    """The operations that the gateway needs from an engine, whether it is in another process or in this one."""

    info: pb.EngineInfo

    @property
    def ready(self) -> bool:
        """Return whether the client is connected to an engine whose model is loaded."""

    async def wait_ready(self) -> None:
        """Wait until `ready` is true, without a time limit."""

    def generate(self, request: Request, session: str = "", handover: Handover | None = None) -> PlacedStream:
        """Submit a request at once and return the stream of its events, which the caller must close, dropping its
        handover unless it passes that on. Raises EngineUnavailable if the engine is not ready.

        Args:
            session: requests with the same one, unless empty, go to the same engine.
            handover: of the stream that has ended with the request's first token: its engine continues, if it can.
        """

    def fate(self, life: str) -> pb.PreviousLife | None:
        """Return how the engine process with the id `life` ended and which requests it was computing, as its successor
        reports. None means that no report has come yet."""

    async def learn_fate(self, life: str) -> pb.PreviousLife:
        """Wait, without a time limit, until `fate` knows how the engine process ended, and return that."""

    async def load_adapter(self, path: str) -> pb.AdapterInfo:
        """Load the adapter folder at `path`, so that requests may use it, and return its hash, rank and sizes. Raises
        AdapterRejected if it cannot be served or took too long, EngineUnavailable if the engine does not answer."""

    async def unload_adapter(self, adapter_hash: AdapterHash, drain_seconds: float) -> int:
        """Release an adapter. If no other gateway holds it, the engine unloads it once its requests have ended, and
        aborts those left after `drain_seconds`. Return the number of aborted ones. Raises EngineUnavailable if the
        engine does not answer."""

    async def pin_adapter(self, adapter_hash: AdapterHash, pinned: bool) -> None:
        """Pin an adapter, so that it stays on the device once it has been loaded there, or unpin it. Raises
        AdapterRejected if there is none or too little room for others, EngineUnavailable if the engine does not
        answer."""

    async def stats(self, *, check: bool = False) -> pb.EngineStats:
        """Return the engine's statistics. `check` adds the integrity check of every page, which delays steps, as
        `violations`. Raises EngineUnavailable if the engine does not answer, with `check` also if no step ends in
        time."""

    async def live_requests(self, limit: int) -> pb.RequestsResponse:
        """Return the number of live requests of all gateways, the tokens reserved by tenant, and at most `limit`
        requests in full. Raises EngineUnavailable if the engine is gone or does not answer."""

    async def cancel(self, request_ids: Iterable[str]) -> int:
        """End requests of any gateway, given their engine request ids, with an error; return how many were still live.
        Raises EngineUnavailable if the engine is gone or does not answer."""

    async def set_lane(self, lane: Lane, mode: LaneMode) -> None:
        """Set a lane's mode for all gateways, until the engine restarts. Raises EngineUnavailable if the engine is
        gone or does not answer."""

    async def set_goals(self, lane: Lane, goals: LaneGoals) -> None:
        """Set a lane's goals for all gateways, until the engine restarts. Raises EngineUnavailable if the engine is
        gone or does not answer."""
