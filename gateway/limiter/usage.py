"""Usage of each limit, as operators see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.api_schema.limits import LimitUse
from gateway.core.bucket import DAY, Bucket, CountMeter, Meter
from gateway.core.limits import LimitName, Scope


@dataclass(frozen=True, slots=True)
class ScopeUsage:
    scope: Scope
    limits: tuple[LimitUse, ...]
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


def _usage(name: LimitName, meter: Meter | CountMeter, now: int, refused: int) -> LimitUse:
    remaining = None if meter.limit is None else round(max(0.0, meter.limit - meter.used), 3)
    return LimitUse(name, meter.limit, round(meter.used, 3), remaining, _reset(meter, name, now), meter.shadow, refused)


def _reset(meter: Meter | CountMeter, name: LimitName, now: int) -> float | None:
    if isinstance(meter, Meter):
        return 0.0 if meter.limit is None else round(meter.used / meter.limit * 60, 3)
    return round((DAY - now % DAY) / 1e6, 3) if name == "tokens_per_day" else None
