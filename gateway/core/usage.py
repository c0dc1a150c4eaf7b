"""What requests have used: counts, and the rows they are kept in.

A row stands for everything one key did with one adapter in one lane on one day. A request belongs to the day (UTC) on
which it was admitted, with all it uses: what is renewed, settled or refunded after midnight changes the same row.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from operator import add

from msgspec import Struct

OTHERS = "*"
"""In place of key and adapter: all those for which a day has no rows left."""
EPOCH = date(1970, 1, 1)


class Counts(Struct, frozen=True):
    """Whole numbers, so that sums are exact. The order is that of the words in Redis."""

    requests: int = 0
    """That an engine had, whether it came to work on them or not."""
    prompt_tokens: int = 0
    """A prompt counts once, however many answers it gets."""
    cached_tokens: int = 0
    """Of the prompts, found in the prefix cache."""
    completion_tokens: int = 0
    device_us: int = 0
    """Microseconds: their parts of the steps they were in."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(add, self.numbers, other.numbers))

    def __bool__(self) -> bool:
        return any(self.numbers)

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        return self.requests, self.prompt_tokens, self.cached_tokens, self.completion_tokens, self.device_us

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def words(self) -> str:
        """As Redis keeps them."""
        return " ".join(map(str, self.numbers))

    @classmethod
    def read(cls, words: str) -> Counts:
        """The inverse of `words`. Raises ValueError."""
        return cls(*map(int, words.split()))


NOTHING = Counts()


class RowName(Struct, frozen=True):
    """Which row of one tenant's day."""

    lane: str
    key: str
    """Its id."""
    adapter: str
    """Or the base model, by its name."""

    def __str__(self) -> str:
        return f"{self.lane}:{self.key}:{self.adapter}"

    @property
    def others(self) -> RowName:
        """The row that stands in where a day has as many as it may have."""
        return RowName(self.lane, OTHERS, OTHERS)

    @classmethod
    def read(cls, text: str) -> RowName:
        """The inverse of `str`: only an adapter's name may have colons. Raises ValueError."""
        lane, key, adapter = text.split(":", 2)
        return cls(lane, key, adapter)


@dataclass(frozen=True, slots=True)
class Row:
    tenant: str
    day: date
    name: RowName
    counts: Counts


def day_of(number: int) -> date:
    """From days since 1970."""
    return EPOCH + timedelta(days=number)


def today() -> date:
    """In UTC."""
    return datetime.now(UTC).date()
