"""Decides whether a line that failed is tried again after a pause or gets its error as the answer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime, time, timedelta

from gateway.core.errors import ApiError, Fault

FEW_TRIES: Mapping[Fault, int] = {Fault.MODEL_NOT_FOUND: 4, Fault.INTERNAL: 5}
"""Faults that may be transient, with the number of tries after which they are final. A gateway may learn of an adapter
a moment after the gateway that validated the line, and a bug may occur only beside other requests."""
FINAL = (Fault.CANCELLED, Fault.ENGINE_CRASHED, Fault.MODEL_OUTPUT_INVALID)
"""Faults that are never tried again, because another try would change nothing or do more harm."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
QUOTA_PAUSE_S = 60.0
"""Seconds until a spent daily quota is tried again, because an operator may have raised it."""


def is_tenant_limit(error: ApiError) -> bool:
    """Return whether a rate limit or quota of the tenant refused the line, so that other tenants' lines may go on."""
    return error.fault in (Fault.RATE_LIMIT_EXCEEDED, Fault.INSUFFICIENT_QUOTA)


def retry_delay(error: ApiError, tries: int, now: float, left: float) -> float | None:
    """Return the seconds until a line is tried again: what a limit asks for, else a random, growing backoff, or the
    error's `retry_after` if longer. None means that the error is the line's answer: it cannot pass, has had its few
    tries, or is a quota that does not renew within the window.

    Args:
        error: the failure of the last try.
        tries: number of tries that ended with the same fault.
        now: Unix time in seconds.
        left: seconds left in the batch's window.
    """
    if error.fault is Fault.RATE_LIMIT_EXCEEDED:
        return error.retry_after or FIRST_PAUSE_S
    if error.fault is Fault.INSUFFICIENT_QUOTA:
        return QUOTA_PAUSE_S if "renews" in error.metadata and next_utc_day(now) < now + left else None
    if error.fault in FINAL or tries >= FEW_TRIES.get(error.fault, tries + 1):
        return None
    if error.http_status < 500 and error.fault not in FEW_TRIES:
        return None
    return max(error.retry_after or 0.0, _backoff(tries))


def next_utc_day(now: float) -> float:
    """Return the Unix time of the first midnight UTC after `now` (Unix seconds), when daily limits renew."""
    today = datetime.fromtimestamp(now, UTC).date()
    return datetime.combine(today + timedelta(days=1), time(), UTC).timestamp()


def _backoff(tries: int) -> float:
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries, 10)) * random.uniform(0.5, 1.0)
