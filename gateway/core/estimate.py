"""Estimates of the output length of requests that set no token limit."""

from __future__ import annotations

WEIGHT = 0.1
"""Weight of the newest answer in the moving average, which is thus dominated by the last twenty or so answers."""

FIRST_GUESS = 1024.0
"""Estimated output tokens before any answer was seen: more than most chat answers, less than most limits."""


class OutputAverages:
    """Exponential moving averages of answer lengths in tokens, one for each pair of tenant and served name: that of an
    adapter or of a base model.

    They are separate for each tenant so that what a tenant has to reserve reveals nothing about other tenants' answers.
    The gateway reserves tokens by them and sends them to the engine with each request.
    """

    def __init__(self) -> None:
        self._means: dict[tuple[str, str], float] = {}

    def average(self, tenant: str, served: str) -> float:
        """Return the average output tokens of a tenant's answers under a served name, or FIRST_GUESS before the first
        one."""
        return self._means.get((tenant, served), FIRST_GUESS)

    def add(self, tenant: str, served: str, tokens: float) -> None:
        """Update the average of a tenant and a served name with the length, in tokens, of an answer that ended by
        itself. The first answer becomes the average."""
        mean = self._means.get((tenant, served), tokens)
        self._means[tenant, served] = mean + WEIGHT * (tokens - mean)
