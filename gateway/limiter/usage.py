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
    refused_at: float | None = None
    """When a request was last refused, in Unix seconds; None: not for as long as anything is remembered."""
    refused_by: tuple[LimitName, ...] = ()
    """Limits of this scope that it did not fit."""


def usage_of(
    scope: Scope, bucket: Bucket, refused: Sequence[int], last: tuple[int, tuple[LimitName, ...]] | None
) -> ScopeUsage:
    """`refused`: today, for each limit in order. `last`: of refusals, in microseconds, with the limits missed."""
    uses = zip(bucket.meters(), refused, strict=True)
    limits = (_usage(name, meter, bucket.at, count) for (name, meter), count in uses)
    shown = tuple(usage for usage in limits if usage.limit is not None or usage.used)
    enforced = {name for name, meter in bucket.meters() if not meter.shadow}
    missed = tuple(name for name in last[1] if name in enforced) if last else ()
    return ScopeUsage(scope, shown, last[0] / 1e6 if last and missed else None, missed)


def _usage(name: LimitName, meter: Meter | Count, now: int, refused: int) -> LimitUsage:
    remaining = None if meter.limit is None else round(max(0.0, meter.limit - meter.used), 3)
    return LimitUsage(
        name, meter.limit, round(meter.used, 3), remaining, _reset(meter, name, now), meter.shadow, refused
    )


def _reset(meter: Meter | Count, name: LimitName, now: int) -> float | None:
    if isinstance(meter, Meter):
        return 0.0 if meter.limit is None else round(meter.used / meter.limit * 60, 3)
    return round((DAY - now % DAY) / 1e6, 3) if name == "tokens_per_day" else None
