"""What one request has the engine do: begun once, before or after its reservation is granted, and ended for sure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.arrivals import EventStream
from engine.client import EngineApi
from gateway.failures import engine_failures
from gateway.intake import Job
from gateway.request_record import RequestRecord


class Submission:
    """To be closed (`contextlib.aclosing`): that aborts what has not come to its end."""

    def __init__(self, engine: EngineApi, job: Job, record: RequestRecord, clock: Callable[[], float]) -> None:
        """`clock`: the record's."""
        self._engine = engine
        self._job = job
        self._record = record
        self._clock = clock
        self._streams: list[EventStream] = []

    def begin(self) -> Sequence[EventStream]:
        """One stream for each answer, the same however often it is called. Raises ApiError: ENGINE_UNAVAILABLE."""
        if not self._streams:
            now = self._record.submitted = self._clock()
            with engine_failures(self._record):
                for index in range(self._job.num_answers):
                    self._streams.append(self._engine.generate(self._job.engine_request(self._record, index, now)))
        return self._streams

    async def aclose(self) -> None:
        for stream in self._streams:
            await stream.aclose()
