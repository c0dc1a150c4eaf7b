"""Rate limit arithmetic on plain values. The Lua script of the Redis limiter computes the same.

Requests per minute and tokens per minute are token buckets with debt. A meter counts the use and drains at `limit` per
minute, down to zero. A reservation fits while use stays within the limit. Settling may take use above the limit (debt),
which must drain before anything else fits. Because a meter counts what is used, not what is left, a change of limit
takes effect at once, and an absent meter equals an unused one. Concurrent requests and tokens per day are plain counts,
which are kept even where no limit is set; a day is a calendar day in UTC.

A limit in shadow refuses no request. Its meter is charged only with what it would have admitted, so that the share of
requests that it would refuse is accurate.

Times are whole microseconds, as Redis reports them, so that both implementations agree to the last bit.
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
"""One minute in microseconds."""
DAY = 1440 * MINUTE
"""One day in microseconds."""

SLACK = 1e-6
"""Tolerance for rounding errors when use is compared with a limit, in requests or tokens."""
SLOT_WAIT = 1.0
"""Seconds that a caller over its limit of concurrent requests is told to wait. It is a fixed value, because the time at
which a running request ends is unknown."""

Kind = Literal["requests", "tokens"]


class Allowance(Struct, frozen=True):
    """State of one per-minute limit, in requests or tokens, as reported to clients in x-ratelimit headers. `reset` is
    the time in seconds until the meter has drained to zero."""

    limit: int
    remaining: int
    reset: float
    """Seconds until the meter has drained to zero."""


class Meter(Struct, frozen=True):
    """State of one per-minute limit of one scope at one instant. `used` is in requests or tokens and may exceed `limit`
    (debt). `shadow` means that a request that does not fit is not refused. `away` is the policy without Redis."""

    limit: int | None = None
    """Rate per minute and maximum burst. None means that this is neither limited nor counted."""
    used: float = 0.0
    shadow: bool = False
    away: Policy | None = None
    """Policy of this limit while Redis is away. None means that the installation's default applies."""

    def drained(self, elapsed: int) -> Meter:
        """Return a copy whose use has drained at `limit` per minute for `elapsed` microseconds, at most to zero. A
        negative `elapsed` counts as 0. Without a limit the use becomes zero."""
        if self.limit is None:
            return replace(self, used=0.0)
        return replace(self, used=max(0.0, self.used - float(max(0, elapsed)) * self.limit / MINUTE))

    def charged(self, amount: int) -> Meter:
        """Return a copy with `amount` requests or tokens added to its use; a negative amount reduces the use, at most
        to zero. A meter without a limit is returned unchanged."""
        return self if self.limit is None else replace(self, used=max(0.0, self.used + amount))

    def fits(self, amount: int) -> bool:
        """Return whether `amount` more fits the limit; 0 always does, because a request without tokens adds to no
        debt."""
        return self.limit is None or not amount or self.used + amount <= self.limit + SLACK

    def counts(self, amount: int) -> bool:
        """Return whether an admitted request, which uses `amount`, is charged to this meter: it has a limit and, if it
        is in shadow, `amount` fits."""
        return self.limit is not None and (not self.shadow or self.fits(amount))

    def wait(self, amount: int) -> float | None:
        """Return the seconds until `amount` fits if nothing else is charged; 0 if it fits now or there is no limit.
        None means that `amount` alone exceeds the limit, so that it never fits."""
        if self.limit is None:
            return 0.0
        return None if amount > self.limit else max(0.0, self.used + amount - self.limit) / self.limit * 60

    @property
    def allowance(self) -> Allowance | None:
        if self.limit is None or self.shadow:
            return None
        remaining = max(0, math.floor(self.limit - self.used + SLACK))
        return Allowance(self.limit, remaining, self.used / self.limit * 60)


class CountMeter(Struct, frozen=True):
    """Limit and use of a count that does not drain with time: concurrent requests, or tokens used today.

    A `limit` of None means no limit. `shadow` means that a request that does not fit is counted as a miss but is not
    refused. `away` is the policy that applies while Redis is unavailable.
    """

    limit: int | None = None
    used: int = 0
    shadow: bool = False
    away: Policy | None = None

    def charged(self, amount: int) -> CountMeter:
        return replace(self, used=max(0, self.used + amount))

    def fits(self, amount: int) -> bool:
        return self.limit is None or not amount or self.used + amount <= self.limit


MeterOrCount = TypeVar("MeterOrCount", Meter, CountMeter)


class Bucket(Struct, frozen=True):
    """Limits and use of one scope as of the time `at`, in microseconds since 1970: requests and tokens per minute, the
    number of running requests, and today's tokens."""

    requests: Meter
    tokens: Meter
    at: int = 0
    running: CountMeter = CountMeter(None)
    today: CountMeter = CountMeter(None)

    @classmethod
    def empty(cls, limits: Limits) -> Bucket:
        return cls(Meter(None), Meter(None)).with_limits(limits)

    @property
    def limits(self) -> Limits:
        shadow = tuple(name for name, meter in self.meters() if meter.shadow)
        away = {name: meter.away for name, meter in self.meters() if meter.away}
        return Limits(**{name: meter.limit for name, meter in self.meters()}, shadow=shadow, when_redis_is_away=away)

    def meters(self) -> tuple[tuple[LimitName, Meter | CountMeter], ...]:
        return tuple(zip(LIMIT_NAMES, (self.requests, self.tokens, self.running, self.today), strict=True))

    def with_limits(self, limits: Limits) -> Bucket:
        """Return a copy with the same use, whose limits, shadow flags and policies are those of `limits`."""
        pairs = zip(("requests", "tokens", "running", "today"), LIMIT_NAMES, strict=True)
        return replace(self, **{field: _limited(getattr(self, field), limits, name) for field, name in pairs})

    def drained(self, now: int) -> Bucket:
        """Return a copy as of `now`. If the clock has been set back since `at`, nothing has drained, and today's tokens
        stay; from `now` on, it drains."""
        elapsed = now - self.at
        today = self.today if now // DAY <= self.at // DAY else replace(self.today, used=0)
        return Bucket(self.requests.drained(elapsed), self.tokens.drained(elapsed), now, self.running, today)

    def misses(self, tokens: int, *, is_counted: bool = False) -> tuple[LimitName, ...]:
        """Return the names of the limits, including those in shadow, that one more request of `tokens` tokens would
        exceed. `is_counted` means that requests per minute have counted the request before, so that they are left
        out."""
        return tuple(name for name, meter in self.meters() if not _fits(meter, name, tokens, is_counted))

    def admits(self, tokens: int, *, is_counted: bool = False) -> bool:
        return all(meter.shadow or _fits(meter, name, tokens, is_counted) for name, meter in self.meters())

    def charge(self, tokens: int, *, is_counted: bool = False) -> BucketCharge:
        """Return what admitting a request of `tokens` tokens would charge to each meter; the bucket stays unchanged.
        `is_counted` means that requests per minute have counted the request before and are not charged again."""
        return BucketCharge(
            1 if self.requests.counts(1) and not is_counted else None,
            tokens if self.tokens.counts(tokens) else None,
            tokens,
            self.at // DAY,
        )

    def has_headroom(self, tokens: int, share: float) -> bool:
        """Return whether the use of every limit, except those in shadow, would be at most `share` (0 to 1) of the limit
        after one more request of `tokens` tokens."""
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
    return replace(meter, limit=limits.value(name), shadow=shadow, away=away)


def _amount(name: LimitName, tokens: int) -> int:
    """Return the amount that one request charges to a limit: `tokens` for a limit on tokens, 1 for one on requests."""
    return tokens if name.startswith("tokens") else 1


def _fits(meter: Meter | CountMeter, name: LimitName, tokens: int, is_counted: bool) -> bool:
    return (is_counted and name == "requests_per_minute") or meter.fits(_amount(name, tokens))


class BucketCharge(Struct, frozen=True):
    """Amounts that one reservation charged to one bucket. None means that the meter was not charged: it has no limit,
    the limit is in shadow and would have refused the request, or the request was counted already. The slot of the
    running request is not listed."""

    requests: int | None
    tokens: int | None
    today: int
    """Tokens added to the day's count."""
    day: int
    """Day of the charge, counted from 1970. Once that day is over, settling no longer corrects `today`."""

    def put_on(self, bucket: Bucket) -> Bucket:
        return bucket.charged(self.requests or 0, self.tokens or 0, 1, self.today)


class Decision(Struct, frozen=True):
    """Outcome of `reserve`. The tuples have one entry for each bucket, in the order in which `reserve` got them."""

    admitted: bool
    buckets: tuple[Bucket, ...]
    """The buckets as of the reservation's `now`, charged if the reservation was admitted."""
    charges: tuple[BucketCharge, ...]
    """The charge on each bucket; empty if the reservation was refused."""
    misses: tuple[tuple[LimitName, ...], ...]
    """Limits of each bucket that the reservation did not fit, whether enforced or in shadow."""
    tokens: int
    """Tokens that the reservation was for: those requested or, if they were a guess, the guess after `reserve` cut it
    to the smallest token limit."""


@dataclass(frozen=True, slots=True)
class LimitRefusal:
    """The limit that refused a reservation, and how long the caller has to wait."""

    name: LimitName
    scope: int
    """Index of the refusing bucket in the sequence that `explain_refusal` got."""
    limit: int
    wait: float | None
    """Seconds until the reservation can fit. None means that waiting does not help."""

    @property
    def kind(self) -> Kind:
        return "tokens" if self.name.startswith("tokens") else "requests"


def reserve(
    buckets: Sequence[Bucket], tokens: int, now: int, least: int | None = None, num_counted: int = 0
) -> Decision:
    """Compute a reservation: drain the buckets to `now`, then charge one request, its slot and `tokens` tokens to every
    bucket (see `Bucket.charge`), or nothing if an enforced limit refuses. The given buckets stay unchanged.

    Args:
        buckets: the buckets of the scopes that the request belongs to.
        tokens: tokens to reserve.
        now: the current time in microseconds since 1970.
        least: a value means that `tokens` is a guess, which is cut to the smallest enforced token limit (of a minute or
            a day) but not below `least`. None means that `tokens` is not a guess.
        num_counted: how many of the buckets, from the first on, have counted the request already, so that their
            requests per minute neither count nor refuse it. It takes a slot like any other.
    """
    current = tuple(bucket.drained(now) for bucket in buckets)
    counted = [index < num_counted for index in range(len(current))]
    tokens = tokens if least is None else max(least, int(min(tokens, _smallest(current))))
    misses = tuple(bucket.misses(tokens, is_counted=known) for bucket, known in zip(current, counted, strict=True))
    if not all(bucket.admits(tokens, is_counted=known) for bucket, known in zip(current, counted, strict=True)):
        return Decision(False, current, (), misses, tokens)
    charges = tuple(bucket.charge(tokens, is_counted=known) for bucket, known in zip(current, counted, strict=True))
    charged = tuple(charge.put_on(bucket) for charge, bucket in zip(charges, current, strict=True))
    return Decision(True, charged, charges, misses, tokens)


def _smallest(buckets: Sequence[Bucket]) -> float:
    """Return the smallest token limit of the buckets, leaving out limits in shadow; infinity if there is none."""
    meters = [meter for bucket in buckets for meter in (bucket.tokens, bucket.today) if not meter.shadow]
    return min((meter.limit for meter in meters if meter.limit is not None), default=math.inf)


def settle(bucket: Bucket, charge: BucketCharge, requests: int, tokens: int, now: int) -> Bucket:
    """Return a copy of `bucket`, drained to `now` (microseconds since 1970), with a reservation's charge corrected to
    the `requests` and `tokens` that were really used and with one running request fewer.

    A per-minute meter that the reservation did not charge stays uncharged, so that settling creates no debt on it.
    Today's tokens are corrected only if the charge was made today.
    """
    today = tokens - charge.today if now // DAY == charge.day else 0
    return bucket.drained(now).charged(
        _correction(charge.requests, requests), _correction(charge.tokens, tokens), -1, today
    )


def _correction(charged: int | None, actual: int) -> int:
    return 0 if charged is None else actual - charged


def explain_refusal(buckets: Sequence[Bucket], tokens: int, num_counted: int = 0) -> LimitRefusal:
    """Return the enforced limit with the longest wait (None being the longest) among those that a refused reservation
    does not fit. `buckets` and `tokens` are those of the refused `Decision`, `num_counted` as `reserve` got it."""
    refusals = [
        LimitRefusal(name, scope, meter.limit, _wait(meter, name, tokens))
        for scope, bucket in enumerate(buckets)
        for name, meter in bucket.meters()
        if meter.limit is not None and not meter.shadow and not _fits(meter, name, tokens, scope < num_counted)
    ]
    return max(refusals, key=lambda refusal: math.inf if refusal.wait is None else refusal.wait)


def _wait(meter: Meter | CountMeter, name: LimitName, tokens: int) -> float | None:
    """Return the seconds until a request of `tokens` tokens can fit a limit; SLOT_WAIT for concurrent requests. None
    means that waiting does not help; it is also returned for a daily limit, so that clients do not retry for hours."""
    if isinstance(meter, Meter):
        return meter.wait(_amount(name, tokens))
    return SLOT_WAIT if name == "concurrent_requests" else None


def tightest_allowance(allowances: Sequence[Allowance | None]) -> Allowance | None:
    """Return the allowance with the least remaining; ties go to the longest reset. None means that no limit applies."""
    present = [allowance for allowance in allowances if allowance is not None]
    return min(present, key=lambda allowance: (allowance.remaining, -allowance.reset), default=None)
