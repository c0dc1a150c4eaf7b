"""Limits as arithmetic on plain values. The Lua beside the Redis limiter computes the same.

Requests and tokens a minute are token buckets with debt. A meter counts what is in use and drains at `limit` a minute,
down to zero. A reservation fits while use stays within the limit. Settling may take use above the limit (debt), which
must drain away before anything else fits. Because use is counted, not what is left, a change of limit means what it
says at once, and an absent meter equals an unused one. Requests at once and tokens a day are plain counts, kept where
nothing limits them too; a day is a calendar day in UTC.

A limit in shadow refuses nobody. Its meter is charged with what it would have admitted, so that the share it would
refuse is true.

Times are whole microseconds, as Redis tells them, so that both implementations agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gateway.core.limits import LIMIT_NAMES, LimitName, Limits, Policy

MINUTE = 60_000_000
"""In microseconds."""
DAY = 1440 * MINUTE

SLACK = 1e-6
"""Forgiveness for rounding when comparing use with a limit, in requests or tokens."""
SLOT_WAIT = 1.0
"""Seconds to wait for one of the requests at once to end: nobody knows when it will."""

Kind = Literal["requests", "tokens"]


class Allowance(Struct, frozen=True):
    """What a caller is told about one limit."""

    limit: int
    remaining: int
    reset: float
    """Seconds until nothing is in use."""


class Meter(Struct, frozen=True):
    """One limit a minute of one scope at one instant."""

    limit: int | None = None
    """A minute, and at most at once; None: not limited, not counted."""
    used: float = 0.0
    shadow: bool = False
    away: Policy | None = None
    """What becomes of it while Redis is away, if that was said of it."""

    def drained(self, elapsed: int) -> Meter:
        """`elapsed` microseconds later."""
        if self.limit is None:
            return replace(self, used=0.0)
        return replace(self, used=max(0.0, self.used - float(max(0, elapsed)) * self.limit / MINUTE))

    def charged(self, amount: int) -> Meter:
        """A negative amount gives back, never beyond nothing in use."""
        return self if self.limit is None else replace(self, used=max(0.0, self.used + amount))

    def fits(self, amount: int) -> bool:
        return self.limit is None or self.used + amount <= self.limit + SLACK

    def counts(self, amount: int) -> bool:
        """Whether a request that is admitted is charged to it."""
        return self.limit is not None and (not self.shadow or self.fits(amount))

    def wait(self, amount: int) -> float | None:
        """Seconds until `amount` fits, if nothing else is charged; None: it never will."""
        if self.limit is None:
            return 0.0
        return None if amount > self.limit else max(0.0, self.used + amount - self.limit) / self.limit * 60

    @property
    def allowance(self) -> Allowance | None:
        if self.limit is None or self.shadow:
            return None
        remaining = max(0, math.floor(self.limit - self.used + SLACK))
        return Allowance(self.limit, remaining, self.used / self.limit * 60)


class Count(Struct, frozen=True):
    """Requests at once, or tokens today."""

    limit: int | None = None
    used: int = 0
    shadow: bool = False
    away: Policy | None = None

    def charged(self, amount: int) -> Count:
        return replace(self, used=max(0, self.used + amount))

    def fits(self, amount: int) -> bool:
        return self.limit is None or self.used + amount <= self.limit


MeterOrCount = TypeVar("MeterOrCount", Meter, Count)


class Bucket(Struct, frozen=True):
    """Everything counted for one scope, as of `at` microseconds."""

    requests: Meter
    tokens: Meter
    at: int = 0
    running: Count = Count(None)
    today: Count = Count(None)

    @classmethod
    def empty(cls, limits: Limits) -> Bucket:
        return cls(Meter(None), Meter(None)).limited(limits)

    @property
    def limits(self) -> Limits:
        shadow = tuple(name for name, meter in self.meters() if meter.shadow)
        away = {name: meter.away for name, meter in self.meters() if meter.away}
        return Limits(**{name: meter.limit for name, meter in self.meters()}, shadow=shadow, when_redis_is_away=away)

    def meters(self) -> tuple[tuple[LimitName, Meter | Count], ...]:
        return tuple(zip(LIMIT_NAMES, (self.requests, self.tokens, self.running, self.today), strict=True))

    def limited(self, limits: Limits) -> Bucket:
        """The same use under other limits."""
        pairs = zip(("requests", "tokens", "running", "today"), LIMIT_NAMES, strict=True)
        return replace(self, **{field: _limited(getattr(self, field), limits, name) for field, name in pairs})

    def drained(self, now: int) -> Bucket:
        elapsed = now - self.at
        today = self.today if now // DAY == self.at // DAY else replace(self.today, used=0)
        return Bucket(self.requests.drained(elapsed), self.tokens.drained(elapsed), now, self.running, today)

    def misses(self, tokens: int) -> tuple[LimitName, ...]:
        """Limits in which one more request of so many tokens does not fit, those in shadow included."""
        return tuple(name for name, meter in self.meters() if not meter.fits(_amount(name, tokens)))

    def admits(self, tokens: int) -> bool:
        return all(meter.shadow or meter.fits(_amount(name, tokens)) for name, meter in self.meters())

    def charge(self, tokens: int) -> Charge:
        """What a request that is admitted puts on it."""
        return Charge(
            1 if self.requests.counts(1) else None,
            tokens if self.tokens.counts(tokens) else None,
            tokens,
            self.at // DAY,
        )

    def is_roomy(self, tokens: int, share: float) -> bool:
        """Whether one more request of so many tokens keeps all limits but those in shadow within `share` of them."""
        return all(
            meter.limit is None or meter.shadow or meter.used + _amount(name, tokens) <= meter.limit * share
            for name, meter in self.meters()
        )

    def charged(self, requests: int, tokens: int, running: int, today: int) -> Bucket:
        return replace(
            self,
            requests=self.requests.charged(requests),
            tokens=self.tokens.charged(tokens),
            running=self.running.charged(running),
            today=self.today.charged(today),
        )


def _limited(meter: MeterOrCount, limits: Limits, name: LimitName) -> MeterOrCount:
    shadow = name in limits.shadow
    away = None if shadow else limits.when_redis_is_away.get(name)
    return replace(meter, limit=limits.of(name), shadow=shadow, away=away)


def _amount(name: LimitName, tokens: int) -> int:
    """What one request of so many tokens takes of a limit."""
    return tokens if name.startswith("tokens") else 1


class Charge(Struct, frozen=True):
    """What one reservation put on one bucket; None where there was nothing to count against."""

    requests: int | None
    tokens: int | None
    today: int
    day: int
    """Since 1970: a day that is over is not corrected any more."""

    def put_on(self, bucket: Bucket) -> Bucket:
        return bucket.charged(self.requests or 0, self.tokens or 0, 1, self.today)


class Decision(Struct, frozen=True):
    """About one reservation, bucket by bucket."""

    admitted: bool
    buckets: tuple[Bucket, ...]
    """As of now: charged, if it was admitted."""
    charges: tuple[Charge, ...]
    """None if it was refused."""
    misses: tuple[tuple[LimitName, ...], ...]
    """Limits that did not fit it, enforced or not."""
    tokens: int
    """What was asked for, or what became of a guess."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which limit said no, and for how long."""

    name: LimitName
    scope: int
    """Index among the buckets asked."""
    limit: int
    wait: float | None
    """Seconds; None: no wait helps."""

    @property
    def kind(self) -> Kind:
        return "tokens" if self.name.startswith("tokens") else "requests"


def reserve(buckets: Sequence[Bucket], tokens: int, now: int, least: int | None = None) -> Decision:
    """Charges one request and `tokens` to every bucket, or to none.

    `least`: `tokens` is a guess, which yields to the smallest bucket, but not below this.
    """
    current = tuple(bucket.drained(now) for bucket in buckets)
    tokens = tokens if least is None else max(least, int(min(tokens, _smallest(current))))
    misses = tuple(bucket.misses(tokens) for bucket in current)
    if not all(bucket.admits(tokens) for bucket in current):
        return Decision(False, current, (), misses, tokens)
    charges = tuple(bucket.charge(tokens) for bucket in current)
    charged = tuple(charge.put_on(bucket) for charge, bucket in zip(charges, current, strict=True))
    return Decision(True, charged, charges, misses, tokens)


def _smallest(buckets: Sequence[Bucket]) -> float:
    """Tokens that fit the smallest of the buckets that may refuse somebody."""
    meters = [meter for bucket in buckets for meter in (bucket.tokens, bucket.today) if not meter.shadow]
    return min((meter.limit for meter in meters if meter.limit is not None), default=math.inf)


def settle(bucket: Bucket, charge: Charge, requests: int, tokens: int, now: int) -> Bucket:
    """Corrects what was charged to what was used. Without debt that never happened: an uncounted charge stays so."""
    today = tokens - charge.today if now // DAY == charge.day else 0
    return bucket.drained(now).charged(
        _correction(charge.requests, requests), _correction(charge.tokens, tokens), -1, today
    )


def _correction(charged: int | None, actual: int) -> int:
    return 0 if charged is None else actual - charged


def explain(buckets: Sequence[Bucket], tokens: int) -> Refusal:
    """Why a reservation was refused, given the buckets as `reserve` left them: the longest wait of all limits."""
    refusals = [
        Refusal(name, scope, meter.limit, _wait(meter, name, tokens))
        for scope, bucket in enumerate(buckets)
        for name, meter in bucket.meters()
        if meter.limit is not None and not meter.shadow and not meter.fits(_amount(name, tokens))
    ]
    return max(refusals, key=lambda refusal: math.inf if refusal.wait is None else refusal.wait)


def _wait(meter: Meter | Count, name: LimitName, tokens: int) -> float | None:
    """A day that is spent is not waited for: nobody's client should try for hours."""
    if isinstance(meter, Meter):
        return meter.wait(_amount(name, tokens))
    return SLOT_WAIT if name == "concurrent_requests" else None


def tightest(allowances: Sequence[Allowance | None]) -> Allowance | None:
    """The one with least remaining, of several such the one that takes longest; None if no limit applies."""
    present = [allowance for allowance in allowances if allowance is not None]
    return min(present, key=lambda allowance: (allowance.remaining, -allowance.reset), default=None)
