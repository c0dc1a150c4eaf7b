"""Estimates when the last line of a batch will have ended, from the other open batches and the speed of batch work."""

from __future__ import annotations

from collections.abc import Sequence

from engine.pb import engine_pb2 as pb
from engine.rpc.stream import EngineUnavailable
from gateway.batches.record import Batch
from gateway.batches.service import Batches
from gateway.core.errors import ApiError
from gateway.core.eta import BatchSpeed, OpenJob, eta_seconds
from gateway.core.shared_poll import SharedPoll
from gateway.requests.service import Gateway

MOST_OPEN = 256
"""Maximum number of open batches in an estimate, those with the earliest deadlines."""


class EtaEstimator:
    """Estimates the ends of batches, for all requests of a gateway. It reads the open batches and the
    statistics of the engines at most once a second each."""

    def __init__(self, batches: Batches, gateway: Gateway) -> None:
        self._batches = batches
        self._gateway = gateway
        self._jobs = SharedPoll(self._open_batches)
        self._stats = {model.name: SharedPoll(model.engine.stats) for model in gateway.models}

    async def eta(self, batch: Batch) -> float | None:
        """Return the estimated seconds until the batch's last line has ended. None means that the batch is not in
        progress or that no estimate is possible, also because Redis or the engine is away, or because the batch may
        need the engines of several base models."""
        if batch.status != "in_progress" or (model := self._model_of(batch)) is None:
            return None
        try:
            now, jobs = await self._jobs.get()
            speed = batch_speed(await self._stats[model].get())
        except (ApiError, EngineUnavailable):
            return None
        # Batches of several models are counted in full: they may use this engine.
        others = [_open_job(other, now) for other in jobs if self._model_of(other) in (model, None)]
        others = [other for other in others if other.id != batch.id]
        return None if speed is None else eta_seconds(_open_job(batch, now), others, speed)

    def _model_of(self, batch: Batch) -> str | None:
        """Return the name of the base model that all lines of a batch need; None means that there may be several."""
        if len(self._stats) == 1:
            return self._gateway.models.default.name
        homes = [self._homes(name) for name, _ in batch.lines.model_lines]
        models = {home for each in homes for home in each}
        return models.pop() if all(homes) and len(models) == 1 and models <= self._stats.keys() else None

    def _homes(self, name: str) -> Sequence[str]:
        """Return the names of the base models that may answer lines for the base model or virtual model `name`. Empty
        means that the name is unknown."""
        is_virtual = name in self._gateway.virtual_models
        return self._gateway.batch_homes(name, None) if is_virtual else [name] if name in self._stats else []

    async def _open_batches(self) -> tuple[float, Sequence[Batch]]:
        """Return Redis's time in Unix seconds and the up to MOST_OPEN open batches due first. Raises ApiError."""
        return await self._batches.open(MOST_OPEN)


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
    return OpenJob(batch.id, batch.tenant, batch.expires_at - now, batch.lines.total - ended, line_seconds)
