"""A fair queue in which tenants take turns, regardless of how many grammars each of them has waiting."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueFull(Exception):
    """Raised by `TenantTurns.put`: the tenant has as many items waiting as one tenant may have."""


class TenantTurns(Generic[T]):
    """A queue of items that serves the tenants round robin, each tenant's oldest item first. Not thread-safe.

    Args:
        at_once, most: maximum numbers of one tenant's items in work, and waiting.
        costly_at_once: maximum number of items in work of tenants whose last item was costly.
    """

    def __init__(self, at_once: int, most: int, costly_at_once: int) -> None:
        self._at_once = at_once
        self._most = most
        self._costly_at_once = costly_at_once
        self._costly: set[str] = set()
        """Tenants whose last item was costly."""
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        """Tenant -> its waiting items, the oldest first. The tenant whose turn is next comes first."""
        self._in_work: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, tenant: str, item: T) -> None:
        """Append an item (such as a grammar to be checked) to a tenant's queue. Raises QueueFull if the tenant has
        `most` items waiting."""
        if len(self._waiting.get(tenant, ())) >= self._most:
            raise QueueFull
        self._waiting.setdefault(tenant, deque()).append(item)

    def take(self) -> tuple[str, T] | None:
        """Remove the oldest item of the next tenant that may begin one (by `at_once` and `costly_at_once`) and return
        (tenant, item); call `done` afterwards. None means that no item waits or that none may begin."""
        for tenant, queue in self._waiting.items():
            if self._may_begin(tenant):
                item = queue.popleft()
                self._waiting.move_to_end(tenant)
                self._drop_empty(tenant)
                self._in_work[tenant] += 1
                return tenant, item
        return None

    def done(self, tenant: str, was_costly: bool | None = None) -> None:
        """Record that an item of `tenant`, returned by `take`, is no longer in work. `was_costly` says whether the
        tenant counts as costly from now on; None, for an item that was not processed, changes nothing."""
        self._in_work[tenant] -= 1
        if not self._in_work[tenant]:
            del self._in_work[tenant]
        if was_costly is not None:
            (self._costly.add if was_costly else self._costly.discard)(tenant)

    def _may_begin(self, tenant: str) -> bool:
        if self._in_work[tenant] >= self._at_once:
            return False
        return tenant not in self._costly or sum(self._in_work[one] for one in self._costly) < self._costly_at_once

    def remove(self, tenant: str, item: T) -> bool:
        """Remove a tenant's waiting item. Return False, and do nothing, if the item does not wait."""
        queue = self._waiting.get(tenant)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        self._drop_empty(tenant)
        return True

    def clear(self) -> list[T]:
        """Remove the waiting items of all tenants and return them; items in work are not affected."""
        items = [item for queue in self._waiting.values() for item in queue]
        self._waiting.clear()
        return items

    def _drop_empty(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]
