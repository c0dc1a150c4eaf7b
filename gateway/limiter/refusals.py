"""Counts of the requests that limits refused today, in the memory of this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from gateway.core.bucket import DAY
from gateway.core.budget import Decision
from gateway.core.limits import LIMIT_NAMES, LimitName, Scope


class Refusals:
    """Refused requests by scope and limit, and the last one in each scope. Both are forgotten at midnight UTC."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Scope, LimitName]] = Counter()
        self._last: dict[Scope, tuple[int, tuple[LimitName, ...]]] = {}
        """Last refusal in each scope: microseconds since 1970, and the limits that the request did not fit."""
        self._day = 0
        """Day, counted from 1970, to which the counts belong."""

    @property
    def scopes(self) -> Set[Scope]:
        """The scopes in which a request was refused."""
        return self._last.keys()

    def of(self, scope: Scope) -> tuple[Sequence[int], tuple[int, tuple[LimitName, ...]] | None]:
        """Return the number of requests that did not fit each limit of a scope, in the order of LIMIT_NAMES, and the
        scope's last refusal."""
        return [self._counts[scope, name] for name in LIMIT_NAMES], self._last.get(scope)

    def count(self, scopes: Sequence[Scope], decision: Decision, now: int) -> None:
        """Count each limit that a request did not fit. `now` is in microseconds since 1970."""
        if now // DAY != self._day:
            self._counts.clear()
            self._last.clear()
            self._day = now // DAY
        for scope, names in zip(scopes, decision.misses, strict=True):
            self._counts.update((scope, name) for name in names)
            if names and not decision.admitted:
                self._last[scope] = now, names

    def forget(self, scope: Scope) -> None:
        self._last.pop(scope, None)
        for name in LIMIT_NAMES:
            self._counts.pop((scope, name), None)

    def drop(self, tenant: str) -> None:
        """Forget a tenant's refusals."""
        self._last = {scope: last for scope, last in self._last.items() if scope.tenant != tenant}
        self._counts = Counter({key: count for key, count in self._counts.items() if key[0].tenant != tenant})
