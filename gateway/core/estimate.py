"""How much output to reserve for a request that does not say how much it wants."""

from __future__ import annotations

WEIGHT = 0.1
"""Of the newest answer in an average: some twenty answers make up most of it."""


class OutputAverages:
    """Moving averages of answers' lengths in tokens, one for each tenant and adapter: what a tenant is asked to reserve
    tells it nothing of others' answers."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, str], float] = {}

    def of(self, tenant: str, adapter: str) -> float | None:
        """None: nothing is known yet."""
        return self._means.get((tenant, adapter))

    def note(self, tenant: str, adapter: str, tokens: float) -> None:
        """Of an answer that ended by itself."""
        mean = self._means.get((tenant, adapter), tokens)
        self._means[tenant, adapter] = mean + WEIGHT * (tokens - mean)
