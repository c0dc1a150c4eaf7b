"""Renews the leases that a gateway holds, and stops the work under a lease when the lease or the batch ends."""

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
"""Maximum seconds between renewals. A renewal also reports that a batch is being cancelled or its window is over."""
RENEWALS = 5
"""Minimum number of renewals within the term of a lease."""

log = structlog.get_logger("batches")


class LeasedWork(Protocol):
    """Work that is done under a lease, either a shard or a control task. `LeaseKeeper` calls its methods."""

    is_lost: bool
    """True once `on_lease_lost` was called, or the work itself found that its lease is lost."""

    def on_lease_lost(self) -> None:
        """Stop at once, because the lease is lost and no further commit counts. Does not wait for the end."""

    def end(self) -> None:
        """Begin to stop, because the batch is ending, but commit existing answers. Does not wait."""


class HeldLease:
    """A lease that this process holds, with a timer that calls `on_lease_lost` when its term ends. The term is counted
    from before the lease was requested, so it never ends later here than in Redis."""

    def __init__(self, lease: Lease, work: LeasedWork, given_up: Callable[[Lease], None]) -> None:
        """`given_up` is called with the lease when it is lost or runs out, before `work.on_lease_lost`."""
        self.lease = lease
        self.work = work
        self._given_up = given_up
        self._timer: asyncio.TimerHandle | None = None

    def extend(self, until: float) -> None:
        """Restart the timer, so that the lease runs out at `until`, on the loop's clock."""
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
    """Renews one gateway process's leases while their work goes on, and stops work whose lease is lost or whose batch
    is ending. Times are in seconds on the event loop's clock."""

    def __init__(self, store: BatchStore, seconds: float) -> None:
        """`seconds` is the term of a lease, as in the store."""
        self._store = store
        self._seconds = seconds
        self._held: dict[int, HeldLease] = {}
        self._given_up: dict[Lease, None] = {}
        """Leases that ran out or were lost while this process lived. `hand_back` releases them when Redis answers."""
        self._away = False

    def __len__(self) -> int:
        return len(self._held)

    @contextmanager
    def holding(self, lease: Lease, sent_at: float, work: LeasedWork) -> Iterator[None]:
        """Have `keep` renew a lease while the body runs. Calls `work.on_lease_lost` if the lease is lost or runs out,
        and `work.end` if its batch is ending. Leaving the body does not release the lease. `sent_at` is when the claim
        was sent, on the loop's clock: the term counts from then."""
        held = self._held[id(work)] = HeldLease(lease, work, self.give_up)
        held.extend(sent_at + self._seconds)
        try:
            yield
        finally:
            held.close()
            del self._held[id(work)]

    def give_up(self, lease: Lease) -> None:
        """Register a lease that `hand_back` will release, so that Redis does not count this process as dead."""
        self._given_up[lease] = None

    async def hand_back(self) -> None:
        """Release all leases registered by `give_up`. Raises ApiError (REGISTRY_UNAVAILABLE); the rest stay
        registered."""
        for lease in tuple(self._given_up):
            await self._store.release(lease)
            del self._given_up[lease]

    async def keep(self) -> None:
        """Renew all held leases, forever: every RENEW_SECONDS, or RENEWALS times in a term if that is sooner."""
        while True:
            await asyncio.sleep(min(RENEW_SECONDS, self._seconds / RENEWALS))
            await self.renew()

    async def renew(self) -> None:
        """Renew all held leases once. Calls `on_lease_lost` or `end` of the work whose lease is lost or whose batch is
        ending. If Redis is away, only logs that, once per outage; the leases then run out, which stops their work."""
        held = tuple(self._held.values())
        sent_at = asyncio.get_running_loop().time()
        try:
            standings = await self._store.renew([each.lease for each in held]) if held else {}
        except ApiError as error:
            if not self._away:
                log.warning("batch_leases_not_renewed", reason=error.reason)
            self._away = True
            return
        self._away = False
        for each in held:
            self._heard(each, standings[each.lease], sent_at)

    def _heard(self, held: HeldLease, standing: str, sent_at: float) -> None:
        if id(held.work) not in self._held:  # the work ended while the renewal was under way
            return
        if standing == "lost":
            held.on_lease_lost()
        elif standing == "ending":
            held.work.end()
        else:
            held.extend(sent_at + self._seconds)
