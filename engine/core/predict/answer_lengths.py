"""Prediction of answers' lengths from those of earlier, similar requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import log2

from engine.core.messages.requests import Request

KEEP = 0.99
"""Factor by which each new answer of a group multiplies the weight of the earlier ones, so that about the last hundred
dominate the group's mean."""
PRIOR = 4.0
"""Number of answers of its own that a group needs for its mean to count as much as the more general groups'."""
MOST_GROUPS = 2048
"""Maximum number of groups of requests that are kept at each level of similarity (see `AnswerLengths`), those with the
latest answers, so that the memory, 0.4 MB a level, is bounded."""
OPENINGS = (64, 1024)
"""Numbers of first tokens by which prompts are grouped. A system prompt or a conversation tells the application apart.
"""


class AnswerLengths:
    """Predicts the numbers of tokens of answers by decaying means of earlier ones, for groups of requests that are ever
    more alike: all of a lane with a similar `max_tokens`; those with a prompt of similar length; those of one tenant
    with one adapter and grammar; of these, those with a prompt of similar and of almost equal length, and with the same
    first tokens.

    A prediction goes from the most general group to the most specific one. Each group pulls it towards its own mean,
    the more the more answers it has seen. Means rank requests as well as medians do (on the Azure trace, the rank
    correlation with the lengths is 0.80 for both), and add up to the work of a queue."""

    def __init__(self) -> None:
        self._levels: list[OrderedDict[int, tuple[float, float]]] = []
        """For each level: hash of a group -> (decaying number of its answers, decaying sum of their tokens)."""

    def expect(self, request: Request) -> int:
        """Return the expected number of tokens of a request's answer, within the limits of the request. Without earlier
        answers, it is the gateway's guess (`expected_tokens`) or, if there is none, `max_tokens`. Earlier answers are
        not considered if only `max_tokens` can end the answer: with `ignore_eos`, without stop tokens and without a
        grammar."""
        params, hint = request.params, request.expected_tokens
        expected = float(params.max_tokens if hint is None else hint)
        if not params.ignore_eos or params.stop_token_ids or params.grammar is not None:
            expected = self._mean(request, expected)
        least = max(params.min_tokens, len(request.produced) + 1)
        return min(params.max_tokens, max(least, round(expected)))

    def learn(self, request: Request, tokens: int) -> None:
        """Add the length of an answer that has ended, in tokens, to the means of its request's groups, from which
        `expect` predicts later answers."""
        for number, group in enumerate(_groups(request)):
            if number == len(self._levels):
                self._levels.append(OrderedDict())
            means = self._levels[number]
            count, total = means.get(group, (0.0, 0.0))
            means[group] = KEEP * count + 1, KEEP * total + tokens
            means.move_to_end(group)
            if len(means) > MOST_GROUPS:
                means.popitem(last=False)

    def _mean(self, request: Request, default: float) -> float:
        mean, prior = default, 0.0
        for means, group in zip(self._levels, _groups(request), strict=False):
            if group in means:
                count, total = means[group]
                mean = (total + prior * mean) / (count + prior)
                prior = PRIOR
        return mean


def _groups(request: Request) -> Iterator[int]:
    """Yield the hashes of the groups of similar requests that a request belongs to, one for each level of
    `AnswerLengths`, from the most general one on."""
    params, prompt = request.params, request.prompt_ids
    limit = params.max_tokens.bit_length() if request.expected_tokens is None else 0
    length = log2(max(1, len(prompt)))
    everyone = (request.lane, limit)
    application = (request.tenant, request.adapter_hash, params.grammar, *everyone)
    yield hash(everyone)
    yield hash((int(2 * length), everyone))
    yield hash(application)
    yield hash((int(2 * length), application))
    yield hash((int(8 * length), application))
    for count in OPENINGS:
        yield hash((prompt[:count], request.cache_salt, application))
