"""Measures how far the service of two tenants drifts apart while both are waiting, which fair queueing bounds."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import combinations

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Weights of a prompt token and of a generated token in the VTC paper."""


@dataclass(slots=True)
class ServiceGaps:
    """Meter of fairness in a simulation: the service of the tenants of one lane in the VTC paper's weighted tokens, and
    the widest gap between two that both wait, which Theorem 4.4 (OSDI'24) bounds by 2 max(w_p L, w_q M)."""

    served: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Weighted tokens by tenant."""
    waiting: Counter[str] = field(default_factory=Counter)
    """Number of waiting requests by tenant."""
    widest: float = 0.0
    """Widest gap sampled so far, in weighted tokens."""
    longest_prompt: int = 0
    """Maximum number of prompt tokens charged at once for one request."""
    _range: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """Pair of waiting tenants -> (smallest, greatest) difference of their service since both began to wait."""

    def submit(self, tenant: str) -> None:
        self.waiting[tenant] += 1

    def start(self, tenant: str, prompt_tokens: int) -> None:
        """Tell the meter that a waiting request of a tenant starts, and count its `prompt_tokens`, those that were not
        cached, as service, as the VTC paper does. A request that never started has 0."""
        self.waiting[tenant] -= 1
        self.served[tenant] += PROMPT_WEIGHT * prompt_tokens
        self.longest_prompt = max(self.longest_prompt, prompt_tokens)

    def generate(self, tenant: str, tokens: int) -> None:
        self.served[tenant] += OUTPUT_WEIGHT * tokens

    def sample(self) -> None:
        """Update `widest`, the widest service gap between two tenants, from the current service of all pairs of waiting
        tenants. More frequent samples make it more precise."""
        active = sorted(tenant for tenant, count in self.waiting.items() if count > 0)
        known, self._range = self._range, {}
        for pair in combinations(active, 2):
            difference = self.served[pair[0]] - self.served[pair[1]]
            low, high = known.get(pair, (difference, difference))
            low, high = min(low, difference), max(high, difference)
            self._range[pair] = low, high
            self.widest = max(self.widest, high - low)

    def bound(self, batch_tokens: int) -> float:
        """Return the VTC paper's upper bound of the service gap between two tenants, in weighted tokens, for batches
        that held at most `batch_tokens` tokens."""
        return 2 * max(PROMPT_WEIGHT * self.longest_prompt, OUTPUT_WEIGHT * batch_tokens)
