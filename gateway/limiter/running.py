"""The leases of running requests in Redis, which a gateway renews until the requests are settled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from gateway.core.usage import NOTHING, Counts
from gateway.limiter.base import Grant
from gateway.limiter.usage_spool import UsageTerms
from gateway.redis.client import Argument, RedisCalls, Script, StoreError

RENEWALS = 3
"""Number of times that a lease is renewed within its length, so that it survives two failed renewals."""


class RunningLeases:
    """Renews leases in a task, which runs while there are any, and counts in Redis what their requests have used."""

    def __init__(
        self,
        calls: RedisCalls,
        terms: UsageTerms,
        keys: Callable[[Grant], list[str]],
        seconds: float,
        receipt_ms: int,
    ) -> None:
        """
        Args:
            keys: returns the keys of a reservation, in the order in which scripts read them.
            seconds: length of a lease.
            receipt_ms: milliseconds after its last renewal for which a reservation can be settled.
        """
        self._calls = calls
        self._terms = terms
        self._keys = keys
        self.seconds = seconds
        """Seconds after which a lease expires unless it is renewed. A reload may change it."""
        self._receipt_ms = receipt_ms
        self._script = Script.load("counted.lua", "renew.lua")
        self._held: dict[str, Grant] = {}
        self._renewed: dict[str, Counts | None] = {}
        """Usage that the last renewal of a running request counted, by lease. None means that this is not known."""
        self._task: asyncio.Task[None] | None = None

    @property
    def slot_ms(self) -> int:
        return int(self.seconds * 1000)

    def hold(self, grant: Grant) -> None:
        """Renew a lease until `end` is called."""
        self._held[grant.lease] = grant
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_renewing(), name="limiter-leases")

    def end(self, grant: Grant) -> Counts | None:
        """Renew a lease no longer, and return the usage that its renewals counted. None means that this is not known,
        or that the lease was not held."""
        is_held = self._held.pop(grant.lease, None) is not None
        renewed = self._renewed.pop(grant.lease, NOTHING)
        return renewed if is_held else None

    def stop(self) -> None:
        """Renew no lease any more."""
        if self._task is not None:
            self._task.cancel()

    async def renew(self, grant: Grant) -> int | None:
        """Extend the lease of a running request, and count its use so far. Return the Unix time in milliseconds at
        which its slots expire; None if it is settled or expired. Raises StoreError."""
        request, keys = grant.request, self._keys(grant)
        keys = [keys[0], *keys[5::2], self._terms.key(request.tenant, grant.day)]
        args: list[Argument] = [grant.lease, self.slot_ms, self._receipt_ms]
        counts, before = request.used(), self._renewed.get(grant.lease, NOTHING)
        args += self._terms.args(request, grant.day, counts)
        self._renewed[grant.lease] = None
        try:
            renewed, expiry = await self._calls.run(self._script, keys, args)
            self._renewed[grant.lease] = counts if renewed else before
        finally:
            if grant.lease not in self._held:  # it was settled meanwhile
                self._renewed.pop(grant.lease, None)
        return int(expiry) if renewed else None

    async def _keep_renewing(self) -> None:
        while self._held:
            await asyncio.sleep(self.slot_ms / 1000 / RENEWALS)
            with suppress(StoreError):
                for grant in tuple(self._held.values()):
                    if grant.lease in self._held:
                        await self.renew(grant)
