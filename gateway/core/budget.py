"""Reservations and settlements over the buckets of several scopes, on plain values. The scripts of the Redis limiter
compute the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from gateway.core.bucket import DAY, Allowance, Ask, Bucket, BucketCharge
from gateway.core.limits import LimitName

Kind = Literal["requests", "tokens"]


class Decision(Struct, frozen=True):
    """Outcome of `reserve`. The tuples have one entry for each bucket, in the order in which `reserve` got them."""

    admitted: bool
    buckets: tuple[Bucket, ...]
    """The buckets as of the reservation's `now`, charged if the reservation was admitted; if not, they remember what it
    wanted."""
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
    buckets: Sequence[Bucket],
    tokens: int,
    now: int,
    least: int | None = None,
    num_counted: int = 0,
    is_batch_line: bool = False,
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
        is_batch_line: whether the request is a line of a batch (see `Ask`).
    """
    current = tuple(bucket.drained(now) for bucket in buckets)
    tokens = tokens if least is None else max(least, int(min(tokens, _smallest(current))))
    asks = asks_of(len(current), tokens, num_counted, is_batch_line)
    misses = tuple(bucket.misses(ask) for bucket, ask in zip(current, asks, strict=True))
    if not all(bucket.admits(ask) for bucket, ask in zip(current, asks, strict=True)):
        refused = tuple(bucket.refused(ask) for bucket, ask in zip(current, asks, strict=True))
        return Decision(False, refused, (), misses, tokens)
    charges = tuple(bucket.charge(ask) for bucket, ask in zip(current, asks, strict=True))
    charged = tuple(charge.put_on(bucket) for charge, bucket in zip(charges, current, strict=True))
    return Decision(True, charged, charges, misses, tokens)


def asks_of(num_buckets: int, tokens: int, num_counted: int, is_batch_line: bool) -> list[Ask]:
    """Return what one request asks of each of its buckets, of which the first `num_counted` have counted it."""
    return [Ask(tokens, index < num_counted, is_batch_line) for index in range(num_buckets)]


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
    more = _correction(charge.requests, requests), _correction(charge.tokens, tokens)
    settled = bucket.drained(now).charged(*more, -1, today, -int(charge.is_batch_line))
    return settled if charge.is_batch_line else replace(settled, demand=bucket.demand.corrected(charge.minute, *more))


def _correction(charged: int | None, actual: int) -> int:
    return 0 if charged is None else actual - charged


def explain_refusal(
    buckets: Sequence[Bucket], tokens: int, num_counted: int = 0, is_batch_line: bool = False
) -> LimitRefusal:
    """Return the enforced limit with the longest wait (None being the longest) among those that a refused reservation
    does not fit. `buckets` and `tokens` are those of the refused `Decision`, the others as `reserve` got them."""
    asks = asks_of(len(buckets), tokens, num_counted, is_batch_line)
    refusals = [
        LimitRefusal(name, scope, bucket.meter(name).limit or 0, bucket.wait(name, ask))
        for scope, (bucket, ask) in enumerate(zip(buckets, asks, strict=True))
        for name in bucket.misses(ask)
        if not bucket.meter(name).shadow
    ]
    return max(refusals, key=lambda refusal: math.inf if refusal.wait is None else refusal.wait)


def tightest_allowance(allowances: Sequence[Allowance | None]) -> Allowance | None:
    """Return the allowance with the least remaining; ties go to the longest reset. None means that no limit applies."""
    present = [allowance for allowance in allowances if allowance is not None]
    return min(present, key=lambda allowance: (allowance.remaining, -allowance.reset), default=None)
