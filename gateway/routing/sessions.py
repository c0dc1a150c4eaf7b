"""Which replica the requests of each session went to last."""

from __future__ import annotations

from collections import OrderedDict

MOST_SESSIONS = 100_000
"""Sessions that are remembered."""
MOST_OF_TENANT = 1_000
"""Sessions of one tenant that are remembered, so that a tenant with an id for each request does not make the router
forget those of others. What a forgotten session loses is small: its requests still go where their prefixes are."""


class Sessions:
    """Replicas by session. Each tenant's sessions are forgotten in the order in which they were last used."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._of_tenant: dict[str, OrderedDict[str, None]] = {}

    def get(self, tenant: str, session: str) -> int | None:
        """Return the index of a session's replica. None means that there is none."""
        return self._replicas.get((tenant, session))

    def put(self, tenant: str, session: str, index: int) -> None:
        """Note that a session's last request goes to the replica with this index."""
        own = self._of_tenant.setdefault(tenant, OrderedDict())
        own[session] = None
        own.move_to_end(session)
        self._replicas[tenant, session] = index
        self._replicas.move_to_end((tenant, session))
        if len(own) > MOST_OF_TENANT:
            self._forget(tenant, next(iter(own)))
        if len(self._replicas) > MOST_SESSIONS:
            self._forget(*next(iter(self._replicas)))

    def leave(self, index: int) -> None:
        """Forget the sessions of a replica."""
        for tenant, session in [key for key, replica in self._replicas.items() if replica == index]:
            self._forget(tenant, session)

    def __len__(self) -> int:
        return len(self._replicas)

    def _forget(self, tenant: str, session: str) -> None:
        del self._replicas[tenant, session]
        own = self._of_tenant[tenant]
        del own[session]
        if not own:
            del self._of_tenant[tenant]
