"""Usage of each limit, as operators see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.core.bucket import DAY, Bucket, CountMeter, Meter
from gateway.core.limits import LimitName, Scope


@dataclass(frozen=True, slots=True)
class LimitUsage:
    """Usage of one limit of one scope. `limit` and `remaining` are None if use is counted although no limit is set."""

    name: LimitName
    limit: int | None
    used: float
    """Requests or tokens that count against the limit: in the bucket (limits per minute), running now, or today. A
    value above the limit is debt."""
    remaining: float | None
    reset_seconds: float | None
    """Seconds until the use is zero if nothing is added. None means that this is unknown."""
    shadow: bool
    refused_today: int
    """Requests of today that did not fit this limit. If the limit is in shadow, they were admitted anyway."""


@dataclass(frozen=True, slots=True)
class ScopeUsage:
    scope: Scope
    limits: tuple[LimitUsage, ...]
    refused_at: float | None = None
    """Unix time in seconds of the last refusal. None means that no refusal is remembered."""
    refused_by: tuple[LimitName, ...] = ()
    """Limits of this scope that the request refused last did not fit."""


def usage_of(
    scope: Scope, bucket: Bucket, refused: Sequence[int], last: tuple[int, tuple[LimitName, ...]] | None
) -> ScopeUsage:
    """Return the usage of a scope, computed from its bucket: one entry for each limit that is set or in use.

    Args:
        refused: number of requests that did not fit each limit today, in the order of LIMIT_NAMES.
        last: time of the last refusal in microseconds since 1970, with the limits that the request did not fit; None
            means that there was none. Limits in shadow are left out, as they did not refuse it.
    """
    uses = zip(bucket.meters(), refused, strict=True)
    limits = (_usage(name, meter, bucket.at, count) for (name, meter), count in uses)
    shown = tuple(usage for usage in limits if usage.limit is not None or usage.used)
    enforced = {name for name, meter in bucket.meters() if not meter.shadow}
    missed = tuple(name for name in last[1] if name in enforced) if last else ()
    return ScopeUsage(scope, shown, last[0] / 1e6 if last and missed else None, missed)


def _usage(name: LimitName, meter: Meter | CountMeter, now: int, refused: int) -> LimitUsage:
    remaining = None if meter.limit is None else round(max(0.0, meter.limit - meter.used), 3)
    return LimitUsage(
        name, meter.limit, round(meter.used, 3), remaining, _reset(meter, name, now), meter.shadow, refused
    )


def _reset(meter: Meter | CountMeter, name: LimitName, now: int) -> float | None:
    if isinstance(meter, Meter):
        return 0.0 if meter.limit is None else round(meter.used / meter.limit * 60, 3)
    return round((DAY - now % DAY) / 1e6, 3) if name == "tokens_per_day" else None
