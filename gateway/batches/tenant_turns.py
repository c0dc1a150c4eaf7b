"""How the batches of tenants share one gateway process: the order in which they are searched for work, and how many
shards of each base model, how many tasks without lines and how many of each tenant the process holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from gateway.core.eta import urgency

CREATING_SECONDS = 3600
"""Seconds after the end of its window when an index entry without a batch is removed: the batch was never created."""
MAX_SHARDS = 64
"""Maximum number of held shards that have lines of one base model."""
MAX_TASKS = 4
"""Maximum number of held tasks of each kind that runs no lines: to validate, to finalize and to sweep have places of
their own, so that none waits for another kind. A tenant alone has two of four. A validation is a process with 40 MB,
and 85 MB with 50,000 lines."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry of the shared index of batches. Only `BatchStore.claim` shows if it has a task (see `TaskKind`) now."""

    tenant: str
    id: str
    deadline: float
    """End of the batch's completion window, in Unix seconds."""

    def is_over(self, word: bytes, now: float) -> bool:
        """Return whether to remove the index entry, because the batch has no work or, CREATING_SECONDS past its
        deadline, no record. `word` is what `claim.lua` returned for it; `now` is in Unix seconds."""
        return word == b"over" or (word == b"absent" and now > self.deadline + CREATING_SECONDS)


class TenantClaimOrder:
    """Remembers when this process last claimed work of each tenant, so that equally urgent tenants take turns."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._last: dict[str, int] = {}
        """Sequence number of this process's last claim of each tenant's work. The lowest number is the longest ago."""

    def claimed(self, tenant: str) -> None:
        self._last[tenant] = next(self._numbers)

    def by_urgency(self, candidates: Iterable[Candidate], now: float) -> list[Candidate]:
        """Return candidates in the order in which to look for tasks: by urgency class (the most urgent first), then by
        how long ago their tenant's work was claimed (longest first), then by deadline. `now` is in Unix seconds."""

        def place(candidate: Candidate) -> tuple[int, int, str, float]:
            return (
                urgency(candidate.deadline - now),
                self._last.get(candidate.tenant, 0),
                candidate.tenant,
                candidate.deadline,
            )

        return sorted(candidates, key=place)


def index_entry(tenant: str, batch_id: str) -> str:
    """Return the index entry of a batch, `TENANT/ID`."""
    return f"{tenant}/{batch_id}"


def parse_candidates(entries: Sequence[bytes]) -> list[Candidate]:
    """Parse index entries, each followed by its deadline, as `look.lua` returns them."""
    places = [entry.decode().partition("/") for entry in entries[::2]]
    return [Candidate(tenant, i, float(due)) for (tenant, _, i), due in zip(places, entries[1::2], strict=True)]


class TenantQuota:
    """Divides the places of each kind among tenants. A tenant gets another place only while more are free than it
    holds: it leaves as many to others as it takes, and a tenant that holds none gets the last one."""

    def __init__(self, held: Iterable[tuple[str, str]], most: int) -> None:
        """`held` has the kind and the tenant of each place that is held. There are `most` places of each kind."""
        self._held = Counter(held)
        self._most = most
        self._total = Counter[str]()
        for (kind, _), places in self._held.items():
            self._total[kind] += places

    def has_room(self, kind: str) -> bool:
        """Return whether a tenant that holds none gets a place of a kind."""
        return self._total[kind] < self._most

    def admits(self, kind: str, tenant: str) -> bool:
        """Return whether a tenant gets another place of a kind."""
        return self._held[kind, tenant] < self._most - self._total[kind]


def shard_quota(held: Iterable[tuple[str, str]]) -> TenantQuota:
    """Return the quota of shards. `held` has the base model and the tenant of each held shard."""
    return TenantQuota(held, MAX_SHARDS)


def task_quota(held: Iterable[tuple[str, str]]) -> TenantQuota:
    """Return the quota of tasks without lines. `held` has the kind and the tenant of each held task."""
    return TenantQuota(held, MAX_TASKS)
