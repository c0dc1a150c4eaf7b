"""Decides whether one replica computes the prompt of a request, and another one continues its answer.

The costs of a request on a replica, or on two, are seconds: those that it takes, and those for which it delays others.

- A prompt waits for the prompts before it, and those that come until the device has computed them all wait for it: its
  wait counts 1 / (1 - share) times, if prompts have that share of the device's time (as in an M/G/1 queue).
- It delays each decode that runs beside it by its own computation.
- An answer takes a step for each token, each of which is longer by the prompts' share.
- KV is sent in pieces while the prompt is computed. What is still to come after the first token delays the second,
  and so do the step that runs when it has come, and the prompts that wait there.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from gateway.routing.news import Ask, Replica, Role

PIECE_TOKENS = 2048
"""Prompt tokens whose KV is sent together: those of a usual step."""
MOST_SHARE = 0.9
"""Share of prompts in a device's time that is believed at most: costs grow tenfold."""


class SplitMode(Enum):
    AUTO = "auto"
    """A request is split if that costs less."""
    NEVER = "never"
    ALWAYS = "always"
    """Every request that may be split is, if there are replicas for both parts."""


class Splitting(NamedTuple):
    """What a router knows about splitting requests."""

    mode: SplitMode = SplitMode.NEVER
    bytes_per_s: float = 10e9
    """Rate at which a replica sends or receives KV, unless it has told another."""
    latency_s: float = 0.0
    """Seconds of a transfer of nothing."""
    kv_bytes_per_token: float = 0.0


class Side(NamedTuple):
    """A replica that may serve a request or a part of it."""

    replica: Replica
    cached_tokens: int
    """Prompt tokens that its prefix cache is believed to hold."""
    load_s: float
    """Seconds of bringing the adapter into device memory, as the router counts them."""


class Placing(NamedTuple):
    """Where a request runs."""

    first: Side
    """The replica of the prompt."""
    second: Side | None
    """The replica that continues the answer; None means that the first one does."""
    cost_s: float
    arrives_at: float
    """When the KV will have arrived at the second replica, in seconds on the router's clock."""


def place(ask: Ask, sides: Sequence[Side], rules: Splitting, now: float) -> Placing | None:
    """Return where a request costs least, or None if there is nothing among `sides`. A request that is not split may
    run on each of them. While no costs are known, it is not split."""
    stretch = _stretch(sides)
    prompt_s = [_prompt_s(ask, side, stretch) for side in sides]
    whole = _place_whole(ask, sides, prompt_s, now)
    split = _place_split(ask, sides, prompt_s, rules, now)
    if whole is None or split is None:
        return whole
    return split if rules.mode is SplitMode.ALWAYS or split.cost_s < whole.cost_s else whole


def _stretch(sides: Sequence[Side]) -> float:
    """Return how often the wait of a prompt counts, for the mean share over the prompts of all replicas."""
    shares = [side.replica.news.prompt_share for side in sides]
    mean = sum(share * share for share in shares) / (sum(shares) or 1.0)
    return 1 / (1 - min(MOST_SHARE, mean))


def _place_whole(ask: Ask, sides: Sequence[Side], prompt_s: Sequence[float], now: float) -> Placing | None:
    costs = [
        (prompt + _answer_s(ask, side), number)
        for number, (side, prompt) in enumerate(zip(sides, prompt_s, strict=True))
    ]
    if not costs:
        return None
    cost, number = min(costs)
    return Placing(sides[number], None, cost, now)


def _place_split(
    ask: Ask, sides: Sequence[Side], prompt_s: Sequence[float], rules: Splitting, now: float
) -> Placing | None:
    """Return two replicas, the first of which is one of the two on which the prompt costs least. None means that there
    are no two."""
    firsts = [number for number, side in enumerate(sides) if side.replica.role in (Role.PREFILL, Role.BOTH)]
    seconds = [side for side in sides if side.replica.role in (Role.DECODE, Role.BOTH)]
    best: Placing | None = None
    for number in sorted(firsts, key=prompt_s.__getitem__)[:2]:
        first = sides[number]
        token_at = now + first.replica.delay_s(ask, first.cached_tokens)
        for second in seconds:
            if second.replica is first.replica:
                continue
            arrives_at = _arrival(ask, first, second, rules, token_at)
            waits_s = second.replica.delay_s(ask, ask.prompt_tokens) + second.replica.news.decode_step_s
            moved_s = max(arrives_at - token_at, second.load_s) + waits_s
            cost = prompt_s[number] + moved_s + _answer_s(ask, second)
            if best is None or cost < best.cost_s:
                best = Placing(first, second, cost, arrives_at)
    return best


def _prompt_s(ask: Ask, side: Side, stretch: float) -> float:
    """Return the cost of a request's prompt on a replica."""
    delay_s = side.replica.delay_s(ask, side.cached_tokens)
    decodes = side.replica.news.decoding + side.replica.sent_answers
    return delay_s * stretch + _computed_s(ask, side) * decodes + side.load_s


def _answer_s(ask: Ask, side: Side) -> float:
    """Return the cost of a request's decodes on a replica."""
    news = side.replica.news
    return ask.output_tokens * news.decode_step_s / (1 - min(MOST_SHARE, news.prompt_share))


def _arrival(ask: Ask, first: Side, second: Side, rules: Splitting, token_at: float) -> float:
    """Return when the KV that the second replica lacks has arrived, if the first token comes at `token_at`. Both are
    seconds on the router's clock."""
    tokens = max(0, ask.prompt_tokens - second.cached_tokens)
    if not tokens:
        return token_at
    sent_s = tokens * rules.kv_bytes_per_token / (second.replica.news.kv_bytes_per_s or rules.bytes_per_s)
    last_s = sent_s * min(1.0, PIECE_TOKENS / tokens)
    begun_at = max(token_at - _computed_s(ask, first), first.replica.sends_until, second.replica.receives_until)
    return rules.latency_s + max(token_at + last_s, begun_at + sent_s)


def _computed_s(ask: Ask, side: Side) -> float:
    return max(0, ask.prompt_tokens - side.cached_tokens) * side.replica.news.prompt_token_s
