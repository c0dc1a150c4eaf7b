"""Prices of tokens and costs of device time, computed from usage rows. All arithmetic is Decimal, never float."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from fnmatch import fnmatchcase

from gateway.core.lanes import LaneName
from gateway.core.usage import Counts, UsageRow

CURRENCY = re.compile(r"[A-Z]{3}")
DEVICE_US_PER_HOUR = 3_600_000_000
COST_PLACES = Decimal("1e-9")
"""Rounding unit of costs, which are quotients. Amounts are products and stay exact."""
SMALLEST, MOST = Decimal("0.000001"), 1_000_000
"""Granularity and maximum of a price. With these and token counts below 2^53, amounts stay within the 28 digits in
which Decimal arithmetic is exact."""


@dataclass(frozen=True, slots=True)
class Price:
    """One entry of the price list: prices of a million tokens, and the rows of usage that it applies to (by lane,
    adapter and first day). Raises ValueError for a price that is not from 0 to MOST, or has more than six decimals."""

    prompt: Decimal
    """Price of a million prompt tokens that were not found in the prefix cache, in the configured currency."""
    completion: Decimal
    cached: Decimal | None = None
    """Price of a million prompt tokens found in the prefix cache. None means that they cost `prompt`."""
    lane: LaneName | None = None
    """The lane that this price applies to. None means both lanes."""
    adapter: str = "*"
    """Shell-style pattern of adapter names. The base model is matched by its own name."""
    since: date | None = None
    """First day (UTC) on which this price applies. None means that it applies to every day."""

    def __post_init__(self) -> None:
        for name in ("prompt", "completion", "cached"):
            _check_amount(name, getattr(self, name))

    @property
    def is_default(self) -> bool:
        """True if this price applies to every row."""
        return (self.lane, self.adapter, self.since) == (None, "*", None)

    def applies_to(self, row: UsageRow) -> bool:
        in_time = self.since is None or row.day >= self.since
        return in_time and self.lane in (None, row.name.lane) and fnmatchcase(row.name.adapter, self.adapter)

    def price_tokens(self, counts: Counts) -> Decimal:
        """Return the exact price of `counts`' prompt (cached or not) and completion tokens, in the billing currency."""
        cached = self.prompt if self.cached is None else self.cached
        fresh_tokens = counts.prompt_tokens - counts.cached_tokens
        amount = fresh_tokens * self.prompt + counts.cached_tokens * cached + counts.completion_tokens * self.completion
        return amount.scaleb(-6)


@dataclass(frozen=True, slots=True)
class BillingConfig:
    """The configuration section `billing`: how long usage records are stored, prices, and the cost of device time.
    Raises ValueError for an invalid value, or if the last of the prices does not apply to every row."""

    currency: str = "USD"
    device_hour: Decimal = Decimal(0)
    """Cost of one hour of the engine's device, in `currency`. 0 means that costs are not reported."""
    prices: tuple[Price, ...] = ()
    """Prices, of which the first that fits a row applies. The last must fit every row. Without any price, amounts are
    not reported."""
    retention_days: int = 400
    """Days after which a day's usage is deleted."""

    def __post_init__(self) -> None:
        if not CURRENCY.fullmatch(self.currency):
            raise ValueError(f"currency must be three capital letters, not {self.currency!r}")
        _check_amount("device_hour", self.device_hour)
        if self.prices and not self.prices[-1].is_default:
            raise ValueError("prices: the last must name no lane, adapter or day, so that everything has a price")
        if not 1 <= self.retention_days <= 36_500:
            raise ValueError(f"retention_days must be between 1 and 36500, not {self.retention_days}")

    def amount(self, row: UsageRow) -> Decimal | None:
        """Return the exact price of a row's tokens, in `currency`. None means that no prices are configured."""
        return price_for(self.prices, row).price_tokens(row.counts) if self.prices else None

    def cost(self, device_us: int) -> Decimal | None:
        """Return the cost of `device_us` microseconds of device time, in `currency`, rounded to a billionth. None means
        that `device_hour` is 0."""
        return (device_us * self.device_hour / DEVICE_US_PER_HOUR).quantize(COST_PLACES) if self.device_hour else None

    def cost_per_million(self, counts: Counts) -> Decimal | None:
        """Return the average cost of a million tokens, prompt and completion alike, at the device time that `counts`
        needed for its tokens, in `currency`, rounded to a billionth. None means no `device_hour` or no tokens."""
        if not (self.device_hour and counts.tokens):
            return None
        cost = counts.device_us * self.device_hour / DEVICE_US_PER_HOUR
        return (cost * 1_000_000 / counts.tokens).quantize(COST_PLACES)


def price_for(prices: Sequence[Price], row: UsageRow) -> Price:
    return next(price for price in prices if price.applies_to(row))


def _check_amount(name: str, value: Decimal | None) -> None:
    if value is None:
        return
    if not (value.is_finite() and 0 <= value <= MOST and value % SMALLEST == 0):
        raise ValueError(f"{name} must be from 0 to {MOST}, with at most six decimals, not {value}")
