"""Order in which batches are searched for work: entries of the shared index, and the turns of tenants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from gateway.core.eta import urgency

CREATING_SECONDS = 3600
"""Seconds after its window when an index entry without a batch is dropped: its batch was never created."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry of the shared index of batches. Only a claim shows whether the batch has a task (see `TaskKind`) that
    can be done now."""

    tenant: str
    id: str
    deadline: float
    """End of the batch's window, in Unix seconds."""

    def is_over(self, word: bytes, now: float) -> bool:
        """Return whether the batch has no work left. `word` is what `claim.lua` found under its entry."""
        return word == b"over" or (word == b"absent" and now > self.deadline + CREATING_SECONDS)


class TenantClaimOrder:
    """Turns of tenants whose batches are equally urgent, in this process."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._last: dict[str, int] = {}
        """Sequence number of the last claim here of each tenant's work."""

    def claimed(self, tenant: str) -> None:
        self._last[tenant] = next(self._numbers)

    def by_urgency(self, candidates: Iterable[Candidate], now: float) -> list[Candidate]:
        """Sort candidates, the most urgent first; equally urgent ones by how long their tenant has waited, longest
        first."""

        def place(one: Candidate) -> tuple[int, int, str, float]:
            return urgency(one.deadline - now), self._last.get(one.tenant, 0), one.tenant, one.deadline

        return sorted(candidates, key=place)


def index_entry(tenant: str, batch_id: str) -> str:
    """Return the index entry of a batch."""
    return f"{tenant}/{batch_id}"


def parse_candidates(found: Sequence[bytes]) -> list[Candidate]:
    """Parse index entries, each followed by its deadline."""
    places = [entry.decode().partition("/") for entry in found[::2]]
    return [Candidate(tenant, i, float(due)) for (tenant, _, i), due in zip(places, found[1::2], strict=True)]
