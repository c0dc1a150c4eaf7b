"""Decides whether one replica computes the prompt of a request, and another one continues its answer.

The costs of a request on a replica, or on two, are seconds: those that it takes, and those for which it delays others.

- A prompt waits for the prompts before it, and those that come until the device has computed them all wait for it: its
  wait counts 1 / (1 - share) times, if prompts have that share of the device's time (as in an M/G/1 queue).
- It delays each decode that runs beside it by its own computation, but for a step: that reads the weights anyway.
- An answer takes a step for each token, each of which is longer by the prompts' share.
- KV is sent in pieces while the prompt is computed. What is still to come after the first token delays the second,
  and so do the step that runs when it has come, and the prompts that wait there. The copy from host memory to the
  device delays the decodes there, too, and a transfer the transfers after it.
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
    copies: bool = True
    """True means that KV reaches a replica's device by way of its host memory."""


class Side(NamedTuple):
    """A replica that may serve a request or a part of it."""

    replica: Replica
    cached_tokens: int
    """Prompt tokens that its prefix cache is believed to hold."""
    load_s: float
    """Seconds of bringing the adapter into device memory, as the router counts them."""


class Transfer(NamedTuple):
    """The transfer of a prompt's KV from one replica to another."""

    sent_s: float
    """Seconds for which it takes the links of both."""
    arrives_at: float
    """When all of it has arrived, in seconds on the router's clock."""
    delays_s: float
    """Seconds for which it delays other transfers."""


class Placing(NamedTuple):
    """Where the two parts of a request run."""

    first: Side
    """The replica of the prompt."""
    second: Side
    """The replica that continues the answer."""
    cost_s: float
    transfer: Transfer


def place(ask: Ask, sides: Sequence[Side], unsplit: Replica, rules: Splitting, now: float) -> Placing | None:
    """Return the two replicas of `sides` on which a request costs least, or None if it costs no more on `unsplit`,
    where it would run otherwise. While no costs are known, it is not split."""
    stretch = _stretch(sides)
    prompt_s = [_prompt_s(ask, side, stretch, now) for side in sides]
    split = _place_split(ask, sides, prompt_s, rules, now)
    if split is None or rules.mode is SplitMode.ALWAYS:
        return split
    whole_s = [
        prompt + _answer_s(ask, side) for side, prompt in zip(sides, prompt_s, strict=True) if side.replica is unsplit
    ]
    return split if whole_s and split.cost_s < whole_s[0] else None


def _stretch(sides: Sequence[Side]) -> float:
    """Return how often the wait of a prompt counts, for the mean share over the prompts of all replicas."""
    shares = [side.replica.news.prompt_share for side in sides]
    mean = sum(share * share for share in shares) / (sum(shares) or 1.0)
    return 1 / (1 - min(MOST_SHARE, mean))


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
        token_at = now + first.replica.delay_s(ask, first.cached_tokens, now)
        for second in seconds:
            if second.replica is first.replica:
                continue
            transfer = _transfer(ask, first, second, rules, token_at, now)
            waits_s = second.replica.delay_s(ask, ask.prompt_tokens, now) + second.replica.news.decode_step_s
            copied_s = _copied_s(ask, second, rules) * (1 + _decodes(second))
            moved_s = max(transfer.arrives_at - token_at, second.load_s) + transfer.delays_s + waits_s + copied_s
            cost = prompt_s[number] + moved_s + _answer_s(ask, second)
            if best is None or cost < best.cost_s:
                best = Placing(first, second, cost, transfer)
    return best


def _prompt_s(ask: Ask, side: Side, stretch: float, now: float) -> float:
    """Return the cost of a request's prompt on a replica."""
    delay_s = side.replica.delay_s(ask, side.cached_tokens, now)
    longer_s = max(0.0, _computed_s(ask, side) - side.replica.news.decode_step_s)
    return delay_s * stretch + longer_s * _decodes(side) + side.load_s


def _answer_s(ask: Ask, side: Side) -> float:
    """Return the cost of a request's decodes on a replica."""
    news = side.replica.news
    return ask.output_tokens * news.decode_step_s / (1 - min(MOST_SHARE, news.prompt_share))


def _transfer(ask: Ask, first: Side, second: Side, rules: Splitting, token_at: float, now: float) -> Transfer:
    """Return the transfer of the KV that the second replica lacks, if the first token comes at `token_at`, in seconds
    on the router's clock. On the busier one of both links, it delays others as prompts delay prompts."""
    tokens = max(0, ask.prompt_tokens - second.cached_tokens)
    if not tokens:
        return Transfer(0.0, token_at, 0.0)
    sends, receives = first.replica.sends, second.replica.receives
    sent_s = tokens * rules.kv_bytes_per_token / (second.replica.news.kv_bytes_per_s or rules.bytes_per_s)
    last_s = sent_s * min(1.0, PIECE_TOKENS / tokens)
    ready_at = token_at - _computed_s(ask, first)
    begun_at = max(ready_at, sends.until, receives.until)
    share = min(MOST_SHARE, max(sends.share(now), receives.share(now)))
    delays_s = (begun_at - ready_at + sent_s) * share / (1 - share)
    return Transfer(sent_s, rules.latency_s + max(token_at + last_s, begun_at + sent_s), delays_s)


def _copied_s(ask: Ask, second: Side, rules: Splitting) -> float:
    """Return the seconds for which a step of the second replica copies KV from host memory."""
    copied = max(0, ask.prompt_tokens - second.cached_tokens) * rules.kv_bytes_per_token
    return copied / second.replica.news.copy_bytes_per_s if rules.copies else 0.0


def _decodes(side: Side) -> int:
    """Return how many decodes a step of a replica has, with those of the requests that were sent since the news."""
    return side.replica.news.decoding + side.replica.sent_answers


def _computed_s(ask: Ask, side: Side) -> float:
    return max(0, ask.prompt_tokens - side.cached_tokens) * side.replica.news.prompt_token_s
