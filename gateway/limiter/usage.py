"""How much of each limit is used: what operators see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.core.budget import DAY, Bucket, Count, Meter
from gateway.core.limits import LimitName, Scope


@dataclass(frozen=True, slots=True)
class LimitUsage:
    """One limit of one scope, or, without a limit, what is counted all the same."""

    name: LimitName
    limit: int | None
    used: float
    """Requests or tokens: in the bucket, at once, or today. Above the limit: debt."""
    remaining: float | None
    reset_seconds: float | None
    """Until nothing is in use; None: nobody knows."""
    shadow: bool
    refused_today: int
    """Requests that did not fit it; in shadow they were admitted all the same."""


@dataclass(frozen=True, slots=True)
class ScopeUsage:
    scope: Scope
    limits: tuple[LimitUsage, ...]


def usage_of(scope: Scope, bucket: Bucket, refused: Sequence[int]) -> ScopeUsage:
    """`refused`: today, for each limit in order."""
    uses = zip(bucket.meters(), refused, strict=True)
    limits = (_usage(name, meter, bucket.at, count) for (name, meter), count in uses)
    return ScopeUsage(scope, tuple(usage for usage in limits if usage.limit is not None or usage.used))


def _usage(name: LimitName, meter: Meter | Count, now: int, refused: int) -> LimitUsage:
    remaining = None if meter.limit is None else round(max(0.0, meter.limit - meter.used), 3)
    return LimitUsage(
        name, meter.limit, round(meter.used, 3), remaining, _reset(meter, name, now), meter.shadow, refused
    )


def _reset(meter: Meter | Count, name: LimitName, now: int) -> float | None:
    if isinstance(meter, Meter):
        return 0.0 if meter.limit is None else round(meter.used / meter.limit * 60, 3)
    return round((DAY - now % DAY) / 1e6, 3) if name == "tokens_per_day" else None
