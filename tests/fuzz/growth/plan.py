"""The cases of a run, in an order that follows from its seed: first every field grown in some way as far as it goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

from tests.fuzz.growth.grpc_fields import grpc_fields
from tests.fuzz.growth.http_fields import http_fields
from tests.fuzz.growth.requests import Field, Request

WITHOUT_KEY = 0.05
"""Share of cases in which the caller sends no key."""


@dataclass(frozen=True)
class Case:
    """A field, the way in which it grows, and the number of bytes to which it does."""

    number: int
    field: Field
    growth: str
    size: int
    key: str

    def request(self) -> Request:
        return self.field.growths[self.growth](self.size).with_key(self.key)

    def small(self) -> Request:
        """Return the same request with the field hardly grown."""
        return self.field.growths[self.growth](1).with_key(self.key)

    def __str__(self) -> str:
        who = "" if self.key else ", without a key"
        return f"{self.field.operation} | {self.field.path} | {self.growth} | {self.size:,} bytes{who}"


@cache
def all_fields() -> tuple[Field, ...]:
    return (*http_fields(), *grpc_fields())


def plan(seed: int) -> Iterator[Case]:
    """Yield all cases: every growth of every field to every size.

    The first grow each kind of field to its largest size, in one way; the next ones in another way, and so on. The same
    kinds of fields of other operations follow, and at last the smaller sizes.
    """
    rng = Random(seed)
    for number, (field, growth, size) in enumerate(_ordered(rng)):
        without = Random(f"{seed}-{number}").random() < WITHOUT_KEY
        yield Case(number, field, growth, size, "" if without else field.key)


def _ordered(rng: Random) -> Iterator[tuple[Field, str, int]]:
    fields = list(all_fields())
    rng.shuffle(fields)
    triples = [[(field, growth) for growth in rng.sample(list(field.growths), len(field.growths))] for field in fields]
    turns = [(turn, pair) for pairs in triples for turn, pair in enumerate(pairs)]
    seen: set[tuple[str, str]] = set()
    first: list[tuple[int, Field, str]] = []
    later: list[tuple[int, Field, str]] = []
    for turn, (field, growth) in turns:
        (later if (field.kind, growth) in seen else first).append((turn, field, growth))
        seen.add((field.kind, growth))
    largest = [(field, growth) for part in (first, later) for _, field, growth in sorted(part, key=lambda one: one[0])]
    yield from ((field, growth, field.sizes[-1]) for field, growth in largest)
    smaller = [(field, growth, size) for field, growth in largest for size in field.sizes[:-1]]
    rng.shuffle(smaller)
    yield from smaller
