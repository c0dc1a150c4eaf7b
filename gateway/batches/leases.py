"""Renews the leases that a gateway holds, and tells the work under a lease when the lease ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import structlog

from gateway.batches.lease import Lease
from gateway.batches.store import BatchStore
from gateway.core.errors import ApiError

RENEW_SECONDS = 1.0
"""Maximum seconds between renewals, which also tell that a batch is being cancelled or its window is over."""
RENEWALS = 5
"""Minimum number of renewals within the term of a lease."""

log = structlog.get_logger("batches")


class LeasedWork(Protocol):
    """Work that is done under a lease."""

    is_lost: bool
    """True once the work has been told that its lease is lost."""

    def on_lease_lost(self) -> None:
        """Stop, because the lease is lost and no further commit counts."""

    def end(self) -> None:
        """Stop because the batch is ending, and keep what is done."""


class HeldLease:
    """A held lease, with a timer for its term. The term is counted from before the lease was requested, so it never
    ends later here than in Redis."""

    def __init__(self, lease: Lease, work: LeasedWork, given_up: Callable[[Lease], None]) -> None:
        """`given_up` is called when the lease is lost."""
        self.lease = lease
        self.work = work
        self._given_up = given_up
        self._timer: asyncio.TimerHandle | None = None

    def extend(self, until: float) -> None:
        """Let the lease run out at `until`, on the loop's clock."""
        self.close()
        self._timer = asyncio.get_running_loop().call_at(until, self._ran_out)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def on_lease_lost(self) -> None:
        self._given_up(self.lease)
        self.work.on_lease_lost()

    def _ran_out(self) -> None:
        log.warning("batch_lease_ran_out", batch=self.lease.batch_id, task=self.lease.task_name)
        self.on_lease_lost()


class LeaseKeeper:
    """Keeps leases while their work goes on. Times are in seconds on the loop's clock, never on other clocks."""

    def __init__(self, store: BatchStore, seconds: float) -> None:
        """`seconds` is the term of a lease."""
        self._store = store
        self._seconds = seconds
        self._held: dict[int, HeldLease] = {}
        self._given_up: dict[Lease, None] = {}
        """Leases that ran out or were taken while this process lived. They are released when Redis answers."""
        self._away = False

    def __len__(self) -> int:
        return len(self._held)

    @contextmanager
    def holding(self, lease: Lease, asked: float, work: LeasedWork) -> Iterator[None]:
        """Register a lease and its work for renewal (see `keep`) while the block runs.

        If the lease is lost or runs out, the work is told by `lose`; if its batch is ending, by `end`. Leaving the
        block does not release the lease.

        Args:
            asked: when the lease's claim was sent, on the loop's clock. The term counts from then.
        """
        held = self._held[id(work)] = HeldLease(lease, work, self.give_up)
        held.extend(asked + self._seconds)
        try:
            yield
        finally:
            held.close()
            del self._held[id(work)]

    def give_up(self, lease: Lease) -> None:
        """Mark a lease to be released before more is claimed, so that Redis does not take this process for dead."""
        self._given_up[lease] = None

    async def hand_back(self) -> None:
        """Release all leases that were given up. Raises ApiError (REGISTRY_UNAVAILABLE) and keeps the rest for
        later."""
        for lease in tuple(self._given_up):
            await self._store.release(lease)
            del self._given_up[lease]

    async def keep(self) -> None:
        """Renew all held leases periodically, forever."""
        while True:
            await asyncio.sleep(min(RENEW_SECONDS, self._seconds / RENEWALS))
            await self.renew()

    async def renew(self) -> None:
        """Renew all held leases and tell the work of each if its lease is lost or its batch is ending. While Redis is
        away the leases run out, and their work stops."""
        held = tuple(self._held.values())
        asked = asyncio.get_running_loop().time()
        try:
            standings = await self._store.renew([each.lease for each in held]) if held else {}
        except ApiError as error:
            if not self._away:
                log.warning("batch_leases_not_renewed", reason=error.reason)
            self._away = True
            return
        self._away = False
        for each in held:
            self._heard(each, standings[each.lease], asked)

    def _heard(self, held: HeldLease, standing: str, asked: float) -> None:
        if id(held.work) not in self._held:  # done, while the question was on its way
            return
        if standing == "lost":
            held.on_lease_lost()
        elif standing == "ending":
            held.work.end()
        else:
            held.extend(asked + self._seconds)
