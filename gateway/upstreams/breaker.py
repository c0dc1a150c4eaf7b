"""Circuit breaker of one upstream, which no single tenant can open for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from gateway.core.breaker import Breaker


class SharedBreaker:
    """Stops requests to an upstream that fails. A failure may be due to the request, such as a prompt that takes the
    upstream longer than `first_token_timeout_s`, so each tenant's failures in a row first stop its own requests. The
    requests of all tenants are stopped after as many failures in a row, of which at most about half count for any one
    tenant."""

    def __init__(self, failures: int, pause_s: float, clock: Callable[[], float]) -> None:
        """`failures` in a row stop requests for `pause_s` seconds. `clock` returns the time in seconds."""
        self._new_breaker = partial(Breaker, cooldown=pause_s, clock=clock)
        self._failures = failures
        most = max(2, failures)
        self._all = self._new_breaker(most)
        self._share = (most + 1) // 2
        """Maximum number of one tenant's failures in a row that count towards stopping the requests of all tenants."""
        self._own: dict[str, Breaker] = {}
        """Breakers of the tenants whose last request failed."""
        self._counted: Counter[str] = Counter()
        """Failures in a row, by tenant, that count towards stopping the requests of all tenants."""

    def is_shut(self, tenant: str) -> bool:
        """Return whether a tenant's request would be refused now. Unlike `allows`, the question does not use up a
        probe."""
        own = self._own.get(tenant)
        return self._all.is_shut or (own is not None and own.is_shut)

    def allows(self, tenant: str) -> bool:
        """Return whether a tenant's request may be sent now. While the requests of the tenant or of all tenants are
        stopped, one is allowed as a probe after each pause, and True uses it up."""
        if self.is_shut(tenant):
            return False
        own = self._own.get(tenant)
        return self._all.allows() and (own is None or own.allows())

    def failed(self, tenant: str) -> None:
        """Record a request that failed. Once a tenant's failures have reached the number that may count against all
        tenants, a further one counts only against the tenant itself and does not prolong the pause of the others."""
        self._own.setdefault(tenant, self._new_breaker(self._failures)).failed()
        if self._counted[tenant] < self._share:
            self._counted[tenant] += 1
            self._all.failed()
        else:
            self._all.given_up()

    def given_up(self, tenant: str) -> None:
        """Record a request whose caller left before its outcome was known, or that says nothing about the upstream. If
        it was a probe, the next request becomes the probe."""
        self._all.given_up()
        if own := self._own.get(tenant):
            own.given_up()

    def succeeded(self, tenant: str) -> None:
        """Record a request that was answered. The upstream works, so that all requests may be sent again, except those
        of other tenants whose own requests fail."""
        self._all.succeeded()
        self._counted.clear()
        self._own.pop(tenant, None)
