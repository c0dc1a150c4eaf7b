"""Memory of the last requests that ended and the last that failed in this gateway process, shown by the console."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from engine.core.messages.requests import Lane
from gateway.api_schema.traffic import KEPT, RecentRequest
from gateway.core.lanes import lane_name
from gateway.requests.record import RequestRecord

CLIENT_LEFT = 499


class RecentRequestStore:
    """An `Observer` that remembers the last `KEPT` requests that ended and, in a list of their own, the last `KEPT`
    failures, as on a busy gateway successes would soon push them out. `clock` returns Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._all: deque[RecentRequest] = deque(maxlen=KEPT)
        self._failed: deque[RecentRequest] = deque(maxlen=KEPT)

    def inter_token(self, base_model: str, lane: Lane, seconds: float) -> None:
        """Do nothing: single tokens are not remembered."""

    def finished(self, record: RequestRecord) -> None:
        """Remember a request that has ended, and also among the failures if it failed."""
        request = _recent(record, self._clock())
        self._all.append(request)
        if request.failed:
            self._failed.append(request)

    def read(self, which: Literal["all", "failed"], limit: int) -> list[RecentRequest]:
        """Return at most `limit` of the remembered requests, or of the failures, the newest first."""
        kept = self._failed if which == "failed" else self._all
        return list(reversed(kept))[:limit]


def _recent(record: RequestRecord, now: float) -> RecentRequest:
    return RecentRequest(
        id=record.id,
        request_id=record.request_id,
        tenant=record.tenant,
        key=record.key_id,
        model=record.model,
        lane="" if record.lane is None else lane_name(record.lane),
        status=record.status,
        failed=record.status >= 400 and record.status != CLIENT_LEFT,
        code=record.error_code,
        finish=record.finish,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        ended=round(now, 3),
        duration_seconds=record.times.duration_seconds,
        ttft_seconds=record.times.ttft_seconds,
        tpot_seconds=record.tpot_seconds,
    )
