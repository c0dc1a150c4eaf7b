"""How long an answer will probably be whose request does not say how much it wants."""

from __future__ import annotations

WEIGHT = 0.1
"""Of the newest answer in an average: some twenty answers make up most of it."""

FIRST_GUESS = 1024.0
"""Tokens of an answer before any was seen: longer than most answers of chats, shorter than most limits."""


class OutputAverages:
    """Moving averages of answers' lengths in tokens, one for each tenant and adapter: what a tenant is asked to reserve
    tells it nothing of others' answers. The engine reckons with the same figures."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, str | None], float] = {}

    def of(self, tenant: str, adapter: str | None) -> float:
        """Return the tokens that an answer usually takes; `FIRST_GUESS` before the first answer. None: of the base."""
        return self._means.get((tenant, adapter), FIRST_GUESS)

    def note(self, tenant: str, adapter: str | None, tokens: float) -> None:
        """Of an answer that ended by itself."""
        mean = self._means.get((tenant, adapter), tokens)
        self._means[tenant, adapter] = mean + WEIGHT * (tokens - mean)
