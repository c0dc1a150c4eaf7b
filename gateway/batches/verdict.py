"""What becomes of a line that was refused: another try, after a while, or an answer that says so."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime, time, timedelta

from gateway.core.errors import ApiError, Fault

FEW_TRIES: Mapping[Fault, int] = {Fault.MODEL_NOT_FOUND: 4, Fault.INTERNAL: 5}
"""Faults that may pass, and are believed after so many tries: a gateway may hear of an adapter a moment after another
has checked the line, and a bug may be met only beside other requests."""
FINAL = (Fault.CANCELLED, Fault.ENGINE_CRASHED)
"""Faults that another try would not change, or would make worse."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
QUOTA_PAUSE_S = 60.0
"""Until a spent day is asked about again: an operator may have changed it."""


def is_limit(error: ApiError) -> bool:
    """Whether it is the tenant's own allowance that ran out: other tenants' lines may go on."""
    return error.fault in (Fault.RATE_LIMIT_EXCEEDED, Fault.INSUFFICIENT_QUOTA)


def pause(error: ApiError, tries: int, now: float, left: float) -> float | None:
    """Seconds until a line is worth another try; None: this is its answer.

    Args:
        tries: how many have ended with this fault.
        now: Unix time.
        left: seconds of the batch's window.
    """
    if error.fault is Fault.RATE_LIMIT_EXCEEDED:
        return error.retry_after or FIRST_PAUSE_S
    if error.fault is Fault.INSUFFICIENT_QUOTA:
        return QUOTA_PAUSE_S if "renews" in error.metadata and tomorrow(now) < now + left else None
    if error.fault in FINAL or tries >= FEW_TRIES.get(error.fault, tries + 1):
        return None
    if error.http_status < 500 and error.fault not in FEW_TRIES:
        return None
    return max(error.retry_after or 0.0, _backoff(tries))


def tomorrow(now: float) -> float:
    """When the day of a Unix time is over, in UTC, as limits count days."""
    today = datetime.fromtimestamp(now, UTC).date()
    return datetime.combine(today + timedelta(days=1), time(), UTC).timestamp()


def _backoff(tries: int) -> float:
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries, 10)) * random.uniform(0.5, 1.0)
