"""Usage counts of requests, and the rows in which they are stored.

A row counts everything that one key did with one adapter in one lane on one day. All usage of a request belongs to the
day (UTC) on which it was admitted: a lease renewal, settlement or refund after midnight updates the same row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from operator import add, sub

from msgspec import Struct

OTHERS = "*"
"""Placeholder for key and adapter in a day's collecting row, to which usage is added once the day has the maximum
number of rows."""
EPOCH = date(1970, 1, 1)


class Counts(Struct, frozen=True):
    """Usage counts, which can be added; false if all are zero. All are integers, so that sums are exact. Redis stores
    them in the order of the fields."""

    requests: int = 0
    """Requests that were sent to an engine, whether or not the engine began to run them."""
    prompt_tokens: int = 0
    """Prompt tokens. A prompt counts once, however many answers it gets."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    completion_tokens: int = 0
    device_us: int = 0
    """Device time in microseconds: the requests' shares of the engine steps that they took part in."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(add, self.numbers, other.numbers))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*map(sub, self.numbers, other.numbers))

    def __bool__(self) -> bool:
        return any(self.numbers)

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        return self.requests, self.prompt_tokens, self.cached_tokens, self.completion_tokens, self.device_us

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def encoded(self) -> str:
        """Return the counts as Redis stores them: decimal numbers separated by spaces."""
        return " ".join(map(str, self.numbers))

    @classmethod
    def read(cls, words: str) -> Counts:
        """Return the usage counts that Redis holds as `words`, which `encoded` wrote. Raises ValueError if a word is no
        integer."""
        return cls(*map(int, words.split()))


NOTHING = Counts()


class RowName(Struct, frozen=True):
    """Identifies a usage row within one tenant and day: lane, id of the API key, and name of the adapter or base model.
    Its string form is `lane:key:adapter`."""

    lane: str
    key: str
    adapter: str

    def __str__(self) -> str:
        return f"{self.lane}:{self.key}:{self.adapter}"

    @property
    def others(self) -> RowName:
        """Name of the collecting row, with the same lane and OTHERS as key and adapter, to which usage is added instead
        once a day has the maximum number of rows."""
        return RowName(self.lane, OTHERS, OTHERS)

    @classmethod
    def read(cls, text: str) -> RowName:
        """Parse the string form `lane:key:adapter`. Only the adapter's name may contain colons. Raises ValueError for
        less than three parts."""
        lane, key, adapter = text.split(":", 2)
        return cls(lane, key, adapter)


RowKey = tuple[int, RowName]
"""A day, counted from 1970, and the name of one of its rows."""


@dataclass(slots=True)
class DeferredUsage:
    """Usage of the runs of one request that is not counted when the runs are settled: the request's sender counts it,
    and only if it keeps the answer. A line of a batch may run again elsewhere, and must be charged once."""

    rows: dict[RowKey, Counts] = field(default_factory=dict)

    def add(self, rows: Mapping[RowKey, Counts]) -> None:
        for place, counts in rows.items():
            if counts:
                self.rows[place] = self.rows.get(place, NOTHING) + counts

    @property
    def tokens(self) -> int:
        return sum(counts.tokens for counts in self.rows.values())


@dataclass(frozen=True, slots=True)
class UsageRow:
    tenant: str
    day: date
    name: RowName
    counts: Counts


def day_of(number: int) -> date:
    """Return the date that is `number` days after 1970-01-01."""
    return EPOCH + timedelta(days=number)


def today() -> date:
    """Return the current date in UTC."""
    return datetime.now(UTC).date()
