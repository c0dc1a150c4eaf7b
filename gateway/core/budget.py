"""Token buckets with debt, as arithmetic on plain values. The Lua beside the Redis limiter computes the same.

A meter counts what is in use and drains at `limit` a minute, down to zero. A reservation fits while use stays within
the limit. Settling may take use above the limit (debt), which must drain away before anything else fits. Because use is
counted, not what is left, a change of limit means what it says at once, and an absent meter equals an unused one.

Times are whole microseconds, as Redis tells them, so that both implementations agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gateway.core.tenants import Limits

MINUTE = 60_000_000
"""In microseconds."""

SLACK = 1e-6
"""Forgiveness for rounding when comparing use with a limit, in requests or tokens."""

Kind = Literal["requests", "tokens"]


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a caller is told about one limit."""

    limit: int
    remaining: int
    reset: float
    """Seconds until nothing is in use."""


@dataclass(frozen=True, slots=True)
class Meter:
    """One limit of one scope at one instant."""

    limit: int | None
    """A minute, and at most at once; None: not limited, not counted."""
    used: float = 0.0

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

    def can_ever_fit(self, amount: int) -> bool:
        return self.limit is None or amount <= self.limit

    def wait(self, amount: int) -> float:
        """Seconds until `amount` fits, if nothing else is charged."""
        if self.limit is None:
            return 0.0
        return max(0.0, self.used + amount - self.limit) / self.limit * 60

    @property
    def allowance(self) -> Allowance | None:
        if self.limit is None:
            return None
        remaining = max(0, math.floor(self.limit - self.used + SLACK))
        return Allowance(self.limit, remaining, self.used / self.limit * 60)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The limits of one scope (a tenant, or a key of it) as of `at` microseconds."""

    requests: Meter
    tokens: Meter
    at: int = 0

    @classmethod
    def empty(cls, limits: Limits) -> Bucket:
        return cls(Meter(limits.requests_per_minute), Meter(limits.tokens_per_minute))

    def limited(self, limits: Limits) -> Bucket:
        """The same use under other limits."""
        requests = replace(self.requests, limit=limits.requests_per_minute)
        return replace(self, requests=requests, tokens=replace(self.tokens, limit=limits.tokens_per_minute))

    def drained(self, now: int) -> Bucket:
        elapsed = now - self.at
        return Bucket(self.requests.drained(elapsed), self.tokens.drained(elapsed), now)

    def charged(self, requests: int, tokens: int) -> Bucket:
        return replace(self, requests=self.requests.charged(requests), tokens=self.tokens.charged(tokens))

    def fits(self, tokens: int) -> bool:
        return self.requests.fits(1) and self.tokens.fits(tokens)


@dataclass(frozen=True, slots=True)
class Charge:
    """What one reservation put on one bucket; None where there was no limit to count against."""

    requests: int | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which limit said no, and for how long."""

    kind: Kind
    scope: int
    """Index among the buckets asked."""
    limit: int
    wait: float | None
    """Seconds; None: the request is larger than the limit, no wait helps."""


def reserve(buckets: Sequence[Bucket], tokens: int, now: int) -> tuple[bool, tuple[Bucket, ...]]:
    """Charges one request and `tokens` to every bucket, or to none: whether it did, and the buckets at `now`."""
    current = tuple(bucket.drained(now) for bucket in buckets)
    if not all(bucket.fits(tokens) for bucket in current):
        return False, current
    return True, tuple(bucket.charged(1, tokens) for bucket in current)


def charges(buckets: Sequence[Bucket], tokens: int) -> tuple[Charge, ...]:
    """What a successful `reserve` put on each bucket."""
    return tuple(
        Charge(None if bucket.requests.limit is None else 1, None if bucket.tokens.limit is None else tokens)
        for bucket in buckets
    )


def settle(bucket: Bucket, charge: Charge, requests: int, tokens: int, now: int) -> Bucket:
    """Corrects what was charged to what was used. Without debt that never happened: an uncounted charge stays so."""
    return bucket.drained(now).charged(_correction(charge.requests, requests), _correction(charge.tokens, tokens))


def _correction(charged: int | None, actual: int) -> int:
    return 0 if charged is None else actual - charged


def explain(buckets: Sequence[Bucket], tokens: int) -> Refusal:
    """Why a reservation was refused, given the buckets as `reserve` left them: the longest wait of all limits."""
    refusals = [
        _refusal(meter, kind, scope, amount)
        for scope, bucket in enumerate(buckets)
        for kind, meter, amount in _meters(bucket, tokens)
        if not meter.fits(amount)
    ]
    return max(refusals, key=lambda refusal: math.inf if refusal.wait is None else refusal.wait)


def _meters(bucket: Bucket, tokens: int) -> tuple[tuple[Kind, Meter, int], ...]:
    return ("requests", bucket.requests, 1), ("tokens", bucket.tokens, tokens)


def _refusal(meter: Meter, kind: Kind, scope: int, amount: int) -> Refusal:
    assert meter.limit is not None, "an unlimited meter fits everything"
    return Refusal(kind, scope, meter.limit, meter.wait(amount) if meter.can_ever_fit(amount) else None)


def tightest(allowances: Sequence[Allowance | None]) -> Allowance | None:
    """The one with least remaining; None if no limit applies."""
    present = [allowance for allowance in allowances if allowance is not None]
    return min(present, key=lambda allowance: allowance.remaining, default=None)
