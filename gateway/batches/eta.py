"""Estimates when the last line of a batch will have ended, from the other open batches and the speed of batch work."""

from __future__ import annotations

from collections.abc import Sequence

from engine.pb import engine_pb2 as pb
from engine.rpc.client import EngineApi
from engine.rpc.stream import EngineUnavailable
from gateway.batches.record import Batch
from gateway.batches.service import Batches
from gateway.core.errors import ApiError
from gateway.core.eta import BatchSpeed, OpenJob, eta_seconds
from gateway.core.shared_poll import SharedPoll

MOST_OPEN = 256
"""Maximum number of open batches in an estimate, those with the earliest deadlines."""


class EtaEstimator:
    """Estimates the ends of batches, for all requests of a gateway. It reads the open batches and the engine's
    statistics at most once a second each."""

    def __init__(self, batches: Batches, engine: EngineApi) -> None:
        self._batches = batches
        self._jobs = SharedPoll(self._open_jobs)
        self._stats = SharedPoll(engine.stats)

    async def eta(self, batch: Batch) -> float | None:
        """Return the estimated seconds until the batch's last line has ended. None means that the batch is not in
        progress or that no estimate is possible, also because Redis or the engine is away."""
        if batch.status != "in_progress":
            return None
        try:
            now, jobs = await self._jobs.get()
            speed = batch_speed(await self._stats.get())
        except (ApiError, EngineUnavailable):
            return None
        others = [other for other in jobs if other.id != batch.id]
        return None if speed is None else eta_seconds(_open_job(batch, now), others, speed)

    async def _open_jobs(self) -> tuple[float, Sequence[OpenJob]]:
        """Return Redis's time in Unix seconds and the up to MOST_OPEN open batches due first. Raises ApiError."""
        now, found = await self._batches.open(MOST_OPEN)
        return now, [_open_job(batch, now) for batch in found]


def batch_speed(stats: pb.EngineStats) -> BatchSpeed | None:
    """Return the share of the device and the number of running lines of batch work, from the engine's statistics. None
    means that the engine has no batch lane, or it is not open because an operator has stopped it."""
    lane = next((lane for lane in stats.lanes if lane.lane == pb.LANE_BATCH), None)
    if lane is None or lane.mode != pb.LANE_MODE_OPEN:
        return None
    return BatchSpeed(stats.batch_share, lane.running)


def _open_job(batch: Batch, now: float) -> OpenJob:
    tally = batch.tally
    ended = tally.completed + tally.failed
    line_seconds = tally.device_us / 1e6 / ended if ended else None
    return OpenJob(batch.id, batch.tenant, batch.expires_at - now, batch.total - ended, line_seconds)
