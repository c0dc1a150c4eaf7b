"""What speculation did during a run, from the counters that loralane and vLLM expose at /metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gateway.terminal.tls import chosen_tls_files
from lab.bench.client import Target

NAMES = (
    ("loralane_proposed_tokens_total", "loralane_accepted_tokens_total", "loralane_generated_tokens_total"),
    (
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:generation_tokens_total",
    ),
)
"""Names of the counters of proposed, accepted and generated tokens: loralane's, and vLLM's."""


class TokenCounts(NamedTuple):
    """A server's counts of tokens since it started, over all models."""

    proposed: int
    accepted: int
    generated: int


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did for all answers of a server during a run, including those of other clients."""

    proposed_tokens: int
    accepted_tokens: int
    tokens_per_step: float
    """Mean number of tokens that an answer got from a step, which is 1 without speculation."""


def read_counts(target: Target) -> TokenCounts | None:
    """Query the server's token counts at /metrics. None means that it has none, or does not show them to this key."""
    try:
        response = httpx.get(
            f"{target.base}/metrics", headers=target.headers, timeout=10, verify=chosen_tls_files().context()
        )
        return parse_counts(response.raise_for_status().text)
    except (httpx.HTTPError, ValueError):
        return None


def parse_counts(text: str) -> TokenCounts | None:
    """Return the counts in the text of /metrics; None if it lacks any of them. Raises ValueError if it is malformed."""
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += int(sample.value) if sample.name.endswith("_total") else 0
    known = next((names for names in NAMES if all(name in sums for name in names)), None)
    return TokenCounts(*(sums[name] for name in known)) if known else None


def between(before: TokenCounts | None, after: TokenCounts | None) -> Speculation | None:
    """Return what speculation did between two readings. None means that a reading is missing, that nothing was
    proposed, or that the server started again in between."""
    if before is None or after is None:
        return None
    proposed, accepted, generated = (new - old for new, old in zip(after, before, strict=True))
    if proposed <= 0 or not 0 <= accepted < generated:
        return None
    return Speculation(proposed, accepted, generated / (generated - accepted))
