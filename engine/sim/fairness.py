"""How far apart the service of two tenants drifts while both are waiting: what fair queueing bounds."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import combinations

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""The VTC paper's prices of a prompt token and of a generated one."""


@dataclass(slots=True)
class ServiceGaps:
    """Service of the tenants of one lane in the VTC paper's currency, and the widest gap of it.

    The gap of two tenants is the most by which one's service grows beyond the other's over any interval in which both
    have requests waiting (OSDI'24, theorem 4.4 bounds it by 2 max(w_p L, w_q M)).
    """

    served: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    waiting: Counter[str] = field(default_factory=Counter)
    widest: float = 0.0
    longest_prompt: int = 0
    """Most prompt tokens that a request was charged at once."""
    _range: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """Of two tenants waiting since then: the least and greatest difference of their service."""

    def submit(self, tenant: str) -> None:
        self.waiting[tenant] += 1

    def start(self, tenant: str, prompt_tokens: int) -> None:
        """A request runs: as in the paper, its prompt is charged at once. Leaving unserved is `start` with 0."""
        self.waiting[tenant] -= 1
        self.served[tenant] += PROMPT_WEIGHT * prompt_tokens
        self.longest_prompt = max(self.longest_prompt, prompt_tokens)

    def generate(self, tenant: str, tokens: int) -> None:
        self.served[tenant] += OUTPUT_WEIGHT * tokens

    def sample(self) -> None:
        """Takes note of the present differences; the more often, the finer."""
        active = sorted(tenant for tenant, count in self.waiting.items() if count > 0)
        known, self._range = self._range, {}
        for pair in combinations(active, 2):
            difference = self.served[pair[0]] - self.served[pair[1]]
            low, high = known.get(pair, (difference, difference))
            low, high = min(low, difference), max(high, difference)
            self._range[pair] = low, high
            self.widest = max(self.widest, high - low)

    def bound(self, batch_tokens: int) -> float:
        """The theorem's, for a batch that held at most `batch_tokens` tokens."""
        return 2 * max(PROMPT_WEIGHT * self.longest_prompt, OUTPUT_WEIGHT * batch_tokens)
