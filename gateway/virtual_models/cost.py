"""What the answers of a virtual model cost, beside what its dearest member alone would have cost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import date
from decimal import Decimal
from typing import NamedTuple

from gateway.core.billing import BillingConfig
from gateway.core.usage import Counts, RowName, UsageRow


class Spent(NamedTuple):
    """What one member computed for a request."""

    name: str
    """Name under which usage is counted: that of the adapter, the base model or the upstream."""
    counts: Counts


class Costs(NamedTuple):
    """Amounts of one request, in the currency of the price list."""

    actual: Decimal
    dearest: Decimal
    """Amount for the answer if the member with the highest price had given it, with as many tokens."""


def costs(
    billing: BillingConfig, spent: Sequence[Spent], answer: Counts, members: Collection[str], lane: str, day: date
) -> Costs | None:
    """Return the costs of a request of a virtual model. None means that there is no price list.

    Args:
        spent: what all members computed, also for answers that were discarded.
        answer: the counts of the run whose answer the caller gets.
        members: names, as in usage, of all members.
        lane, day: those of the request, which prices may depend on.
    """
    if not billing.prices:
        return None

    def amount(name: str, counts: Counts) -> Decimal:
        return billing.amount(UsageRow("", day, RowName(lane, "", name), counts)) or Decimal(0)

    actual = sum((amount(name, counts) for name, counts in spent), Decimal(0))
    return Costs(actual, max((amount(name, answer) for name in members), default=actual))
