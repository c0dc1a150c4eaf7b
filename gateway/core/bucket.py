"""Use of the limits of one scope, and what fits into it, on plain values. The Lua script of the Redis limiter computes
the same.

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
from typing import NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gateway.core.demand import OWED_ANSWERS, Demand, batch_ceiling, fits_alone
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
    number of running requests, and today's tokens; and what batch lines must leave of them."""

    requests: Meter
    tokens: Meter
    at: int = 0
    running: CountMeter = CountMeter(None)
    today: CountMeter = CountMeter(None)
    batch_lines: int = 0
    """Number of the running requests that are lines of batches."""
    demand: Demand = Demand()

    @classmethod
    def empty(cls, limits: Limits) -> Bucket:
        return cls(Meter(None), Meter(None)).with_limits(limits)

    @property
    def limits(self) -> Limits:
        shadow = tuple(name for name, meter in self.meters() if meter.shadow)
        away = {name: meter.away for name, meter in self.meters() if meter.away}
        return Limits(**{name: meter.limit for name, meter in self.meters()}, shadow=shadow, when_redis_is_away=away)

    def meters(self) -> tuple[tuple[LimitName, Meter | CountMeter], ...]:
        return (
            ("requests_per_minute", self.requests),
            ("tokens_per_minute", self.tokens),
            ("concurrent_requests", self.running),
            ("tokens_per_day", self.today),
        )

    def with_limits(self, limits: Limits) -> Bucket:
        """Return a copy with the same use, whose limits, shadow flags and policies are those of `limits`."""
        pairs = zip(("requests", "tokens", "running", "today"), LIMIT_NAMES, strict=True)
        return replace(self, **{field: _limited(getattr(self, field), limits, name) for field, name in pairs})

    def drained(self, now: int) -> Bucket:
        """Return a copy as of `now`. If the clock has been set back since `at`, nothing has drained, and today's tokens
        stay; from `now` on, it drains."""
        elapsed = now - self.at
        today = self.today if now // DAY <= self.at // DAY else replace(self.today, used=0)
        requests, tokens = self.requests.drained(elapsed), self.tokens.drained(elapsed)
        return replace(self, requests=requests, tokens=tokens, at=now, today=today)

    def misses(self, ask: Ask) -> tuple[LimitName, ...]:
        """Return the names of the limits, including those in shadow, that the request does not fit."""
        return tuple(name for name, meter in self.meters() if not self._fits(name, meter, ask))

    def admits(self, ask: Ask) -> bool:
        return all(meter.shadow or self._fits(name, meter, ask) for name, meter in self.meters())

    def charge(self, ask: Ask) -> BucketCharge:
        """Return what admitting the request would charge to each meter; the bucket stays unchanged. A limit in shadow
        is charged only what fits it."""
        fits = not ask.is_counted and self._fits("requests_per_minute", self.requests, ask)
        requests = 1 if self.requests.limit is not None and fits else None
        fits = self._fits("tokens_per_minute", self.tokens, ask)
        tokens = ask.tokens if self.tokens.limit is not None and fits else None
        return BucketCharge(requests, tokens, ask.tokens, self.at // DAY, self.at // MINUTE, ask.is_batch_line)

    def refused(self, ask: Ask) -> Bucket:
        """Return a copy that remembers what a refused interactive request wanted of the limits that it did not fit."""
        wanted = dict.fromkeys(LIMIT_NAMES, 0)
        for name, meter in self.meters():
            amount = ask.amount(name)
            if not (ask.is_batch_line or meter.shadow or self._fits(name, meter, ask)) and amount <= (meter.limit or 0):
                wanted[name] = amount + (self._interactive if name == "concurrent_requests" else 0)
        requests, tokens, running, _ = wanted.values()
        return self.wanting(requests, tokens, running, OWED_ANSWERS if running and self.batch_lines else 0)

    def wanting(self, requests: int, tokens: int, running: int, owed: int) -> Bucket:
        """Return a copy in which interactive requests want so much more, with `running` of them at once, and are owed
        `owed` more answers; this one if they want nothing."""
        if not (requests or tokens or running):
            return self
        return replace(self, demand=self.demand.plus(self.at // MINUTE, requests, tokens, running, owed))

    def wait(self, name: LimitName, ask: Ask) -> float | None:
        """Return the seconds until the request can fit a limit; SLOT_WAIT for concurrent requests. None means that
        waiting does not help; it is also returned for a daily limit, so that clients do not retry for hours."""
        meter, amount = self.meter(name), ask.amount(name)
        if not isinstance(meter, Meter):
            return SLOT_WAIT if name == "concurrent_requests" else None
        if not ask.is_batch_line or not self.demand.is_recent(self.at // MINUTE) or amount > (meter.limit or 0):
            return meter.wait(amount)
        return self._wait_of_line(name, meter, amount)

    def meter(self, name: LimitName) -> Meter | CountMeter:
        return dict(self.meters())[name]

    @property
    def _interactive(self) -> int:
        """Number of running requests that are no lines of batches."""
        return self.running.used - self.batch_lines

    def _fits(self, name: LimitName, meter: Meter | CountMeter, ask: Ask) -> bool:
        if meter.limit is None or (ask.is_counted and name == "requests_per_minute"):
            return True
        amount = ask.amount(name)
        return meter.fits(amount) and (not ask.is_batch_line or self._leaves_enough(name, meter, amount))

    def _leaves_enough(self, name: LimitName, meter: Meter | CountMeter, amount: int) -> bool:
        """Return whether a batch line leaves of a limit what interactive requests have lately wanted."""
        minute = self.at // MINUTE
        if meter.limit is None or not amount or name == "tokens_per_day" or not self.demand.is_recent(minute):
            return True
        wanted = self.demand.wanted(LIMIT_NAMES.index(name), minute)
        if name == "concurrent_requests":
            is_alone = not (self.running.used or self.demand.owed)
            return is_alone or self.batch_lines + amount + max(self._interactive, wanted) <= meter.limit
        if meter.used + amount <= batch_ceiling(meter.limit, wanted) + SLACK:
            return True
        return meter.used <= SLACK and fits_alone(meter.limit, wanted, amount)

    def _wait_of_line(self, name: LimitName, meter: Meter, amount: int) -> float:
        """Return the seconds until a batch line can fit a limit per minute beside what interactive requests have lately
        wanted; if it cannot, the seconds until that may have changed."""
        limit, minute = meter.limit or 0, self.at // MINUTE
        wanted = self.demand.wanted(LIMIT_NAMES.index(name), minute)
        ceiling = batch_ceiling(limit, wanted)
        if amount <= ceiling:
            return max(0.0, meter.used + amount - ceiling) / limit * 60
        if fits_alone(limit, wanted, amount):
            return meter.used / limit * 60
        return (MINUTE - self.at % MINUTE) / 1e6

    def has_headroom(self, tokens: int, share: float) -> bool:
        """Return whether the use of every limit, except those in shadow, would be at most `share` (0 to 1) of the limit
        after one more request of `tokens` tokens."""
        return all(
            meter.limit is None or meter.shadow or meter.used + Ask(tokens).amount(name) <= meter.limit * share
            for name, meter in self.meters()
        )

    def charged(self, requests: int, tokens: int, running: int, today: int, batch_lines: int = 0) -> Bucket:
        return replace(
            self,
            requests=self.requests.charged(requests),
            tokens=self.tokens.charged(tokens),
            running=self.running.charged(running),
            today=self.today.charged(today),
            batch_lines=max(0, self.batch_lines + batch_lines),
        )


def _limited(meter: MeterOrCount, limits: Limits, name: LimitName) -> MeterOrCount:
    shadow = name in limits.shadow
    away = None if shadow else limits.when_redis_is_away.get(name)
    return replace(meter, limit=limits.value(name), shadow=shadow, away=away)


class Ask(NamedTuple):
    """One request that is to fit a bucket."""

    tokens: int
    is_counted: bool = False
    """True means that the bucket's requests per minute have counted the request already: they neither count nor refuse
    it."""
    is_batch_line: bool = False
    """True means that the request is a line of a batch, which leaves of each limit what interactive requests have
    lately wanted (see `core.demand`)."""

    def amount(self, name: LimitName) -> int:
        """Return the amount that the request charges to a limit: its tokens, or 1 to a limit on requests."""
        return self.tokens if name.startswith("tokens") else 1


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
    minute: int = -1
    """Minute of the charge, counted from 1970."""
    is_batch_line: bool = False

    def put_on(self, bucket: Bucket) -> Bucket:
        """Return a copy of the bucket with these charges. What an interactive request uses of limits, with the slots
        that interactive requests then have, is what they wanted in this minute."""
        charged = bucket.charged(self.requests or 0, self.tokens or 0, 1, self.today, int(self.is_batch_line))
        if self.is_batch_line:
            return charged
        running = 0 if bucket.running.limit is None else charged.running.used - charged.batch_lines
        return charged.wanting(self.requests or 0, self.tokens or 0, running, -1)
