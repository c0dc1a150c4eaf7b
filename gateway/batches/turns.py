"""Which batch is looked at for work first: entries of the index that all gateways share, and the order of tenants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from gateway.core.eta import urgency

CREATING_SECONDS = 3600
"""After its window, an entry that leads nowhere is taken for one whose batch never came to be."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A batch that may have a task."""

    tenant: str
    id: str
    deadline: float
    """In Unix seconds."""

    def is_over(self, word: bytes, now: float) -> bool:
        """`word`: what was found where its entry leads."""
        return word == b"over" or (word == b"absent" and now > self.deadline + CREATING_SECONDS)


class Turns:
    """Of tenants whose batches are equally urgent, among those that work in this process."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._last: dict[str, int] = {}
        """When a tenant's work was claimed here last."""

    def took(self, tenant: str) -> None:
        self._last[tenant] = next(self._numbers)

    def order(self, candidates: Iterable[Candidate], now: float) -> list[Candidate]:
        """The most urgent first; whose tenant has waited longest, of those equally urgent."""

        def place(one: Candidate) -> tuple[int, int, str, float]:
            return urgency(one.deadline - now), self._last.get(one.tenant, 0), one.tenant, one.deadline

        return sorted(candidates, key=place)


def entry_of(tenant: str, batch_id: str) -> str:
    """In the index."""
    return f"{tenant}/{batch_id}"


def candidates_of(found: Sequence[bytes]) -> list[Candidate]:
    """Of entries, each followed by its deadline."""
    places = [entry.decode().partition("/") for entry in found[::2]]
    return [Candidate(tenant, i, float(due)) for (tenant, _, i), due in zip(places, found[1::2], strict=True)]
