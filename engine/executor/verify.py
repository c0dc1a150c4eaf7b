"""Decides which of a step's sampled tokens are kept where the plan has proposals.

An executor samples from every row of a chunk as if the proposals before it were right. A draw depends on the row's
logits, the request's seed and the position only, so that a kept token is the one that would have been sampled without
proposals, whatever the temperature. Comparing tokens is therefore enough, and no rejection sampling is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engine.core.step import SampledToken


def verified(sampled: Iterable[SampledToken], proposals: Mapping[str, Sequence[int]]) -> list[SampledToken]:
    """Return each request's tokens, in order, up to the first one that differs from the proposal at its place.

    Args:
        sampled: the tokens of the step's rows. A request's rows are in the order of their positions.
        proposals: request id -> proposals. A request without an entry has one row.
    """
    left = {request_id: list(reversed(tokens)) for request_id, tokens in proposals.items()}
    refused: set[str] = set()
    kept = []
    for one in sampled:
        if one.request_id in refused:
            continue
        kept.append(one)
        rest = left.get(one.request_id)
        if not rest or rest.pop() != one.token:
            refused.add(one.request_id)
    return kept
