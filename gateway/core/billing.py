"""What usage is worth: prices of tokens, and the cost of the device that made them. Decimal, never floats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Literal

from gateway.core.usage import Counts, Row

CURRENCY = re.compile(r"[A-Z]{3}")
DEVICE_US_PER_HOUR = 3_600_000_000
COST_PLACES = Decimal("1e-9")
"""Costs are quotients and rounded to this; amounts are products, and exact."""
SMALLEST, MOST = Decimal("0.000001"), 1_000_000
"""Of a price: with counts below 2^53 amounts stay within the 28 digits in which Decimal's arithmetic is exact."""

LaneName = Literal["interactive", "batch"]


@dataclass(frozen=True, slots=True)
class Price:
    """Of a million tokens of each kind, for the rows it fits."""

    prompt: Decimal
    """Of a prompt's tokens that were not found in the prefix cache."""
    completion: Decimal
    cached: Decimal | None = None
    """None: as the rest of the prompt."""
    lane: LaneName | None = None
    """None: either."""
    adapter: str = "*"
    """Shell-style pattern of adapter names; the base model goes by its own."""
    since: date | None = None
    """First day (UTC) it is for; None: every day."""

    def __post_init__(self) -> None:
        for name in ("prompt", "completion", "cached"):
            _check_amount(name, getattr(self, name))

    @property
    def is_default(self) -> bool:
        """Fits everything."""
        return (self.lane, self.adapter, self.since) == (None, "*", None)

    def fits(self, row: Row) -> bool:
        in_time = self.since is None or row.day >= self.since
        return in_time and self.lane in (None, row.name.lane) and fnmatchcase(row.name.adapter, self.adapter)

    def of(self, counts: Counts) -> Decimal:
        """Exact."""
        cached = self.prompt if self.cached is None else self.cached
        fresh_tokens = counts.prompt_tokens - counts.cached_tokens
        amount = fresh_tokens * self.prompt + counts.cached_tokens * cached + counts.completion_tokens * self.completion
        return amount.scaleb(-6)


@dataclass(frozen=True, slots=True)
class BillingConfig:
    """How usage is kept and what it is worth."""

    currency: str = "USD"
    device_hour: Decimal = Decimal(0)
    """What an hour of the engine's device costs; 0: costs are not told."""
    prices: tuple[Price, ...] = ()
    """The first that fits counts; the last must fit everything. None: amounts are not told."""
    retention_days: int = 400
    """After which a day's usage is forgotten."""

    def __post_init__(self) -> None:
        if not CURRENCY.fullmatch(self.currency):
            raise ValueError(f"currency must be three capital letters, not {self.currency!r}")
        _check_amount("device_hour", self.device_hour)
        if self.prices and not self.prices[-1].is_default:
            raise ValueError("prices: the last must name no lane, adapter or day, so that everything has a price")
        if not 1 <= self.retention_days <= 36_500:
            raise ValueError(f"retention_days must be between 1 and 36500, not {self.retention_days}")

    def amount(self, row: Row) -> Decimal | None:
        """What a row's tokens are sold for; None: there are no prices."""
        return price_for(self.prices, row).of(row.counts) if self.prices else None

    def cost(self, device_us: int) -> Decimal | None:
        """What the device time costs, to a billionth; None: nobody knows."""
        return (device_us * self.device_hour / DEVICE_US_PER_HOUR).quantize(COST_PLACES) if self.device_hour else None

    def cost_per_million(self, counts: Counts) -> Decimal | None:
        """What a million tokens of such work cost, prompts and completions alike; None: nobody knows."""
        if not (self.device_hour and counts.tokens):
            return None
        cost = counts.device_us * self.device_hour / DEVICE_US_PER_HOUR
        return (cost * 1_000_000 / counts.tokens).quantize(COST_PLACES)


def price_for(prices: Sequence[Price], row: Row) -> Price:
    return next(price for price in prices if price.fits(row))


def _check_amount(name: str, value: Decimal | None) -> None:
    if value is None:
        return
    if not (value.is_finite() and 0 <= value <= MOST and value % SMALLEST == 0):
        raise ValueError(f"{name} must be from 0 to {MOST}, with at most six decimals, not {value}")
