"""Limits how many shards of each base model and of each tenant one gateway process holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

MAX_SHARDS = 64
"""Maximum number of held shards that have lines of one base model."""


class ShardQuota:
    """Divides MAX_SHARDS shards of each base model among tenants. A tenant gets another shard only while more are free
    than it holds: it leaves as many to others as it takes, and a tenant that holds none gets the last one."""

    def __init__(self, held: Iterable[tuple[str, str]]) -> None:
        """`held` has the base model and the tenant of each held shard."""
        self._held = Counter(held)
        self._total = Counter[str]()
        for (model, _), shards in self._held.items():
            self._total[model] += shards

    def admits(self, model: str, tenant: str) -> bool:
        """Return whether a tenant gets another shard of a base model."""
        return self._held[model, tenant] < MAX_SHARDS - self._total[model]
