"""Decides whether one replica computes the prompt of a request, and another one continues its answer.

The costs of a request on a replica, or on two, are seconds: those that it takes, and those for which it delays others.

- A prompt waits for the prompts before it, and those that come until the device has computed them all wait for it: its
  wait counts 1 / (1 - share) times, if prompts have that share of the device's time (as in an M/G/1 queue).
- A prompt delays each decode that runs beside it by its own computation less one decode step, because a step reads the
  weights anyway. Such decodes include those of answers that are still to come when a replica tells its news: answers to
  prompts that wait there, and to prompts that another replica computes. While these did not count, prompts went where
  answers were about to begin.
- An answer takes one step per token. Steps are long while the replica computes the prompts that already wait there;
  later steps are decode steps, made longer by the prompts' share. That is the share predicted for the time when the
  answer begins, with the prompts that wait there and the request's own counted as computed. While they were not, the
  first answers stayed where the next prompts went.
- KV is sent in pieces while the prompt is computed. What is still to come after the first token delays the second,
  and so does the step that runs when it has come. Copies between host memory and the device delay the decodes on both
  sides, and a transfer the transfers after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import exp
from statistics import fmean
from typing import NamedTuple

from engine.core.state.measures import PROMPT_WINDOW_S
from gateway.routing.news import Ask, Replica, Role

PIECE_TOKENS = 2048
"""Prompt tokens whose KV is sent together: those of a usual step."""
MOST_SHARE = 0.9
"""Upper bound of the share of a device's time that prompts are taken to need. At the bound, a wait counts ten times."""


class SplitMode(Enum):
    AUTO = "auto"
    """A request is split if that costs less."""
    NEVER = "never"
    ALWAYS = "always"
    """Every request that may be split is, if there are replicas for both parts."""


class Splitting(NamedTuple):
    """When a router splits requests, and what it knows about the transfer of KV between replicas."""

    mode: SplitMode = SplitMode.NEVER
    bytes_per_s: float = 10e9
    """Rate at which a replica sends or receives KV, unless it has told another."""
    latency_s: float = 0.0
    """Fixed seconds of every transfer, whatever its size."""
    kv_bytes_per_token: float = 0.0
    copies: bool = True
    """True means that KV reaches a replica's device by way of its host memory."""


class Side(NamedTuple):
    """A replica that may serve a request or a part of it."""

    replica: Replica
    cached_tokens: int
    """Prompt tokens that its prefix cache is believed to hold."""
    load_s: float
    """Cost, in seconds, of loading the adapter into device memory. It counts `STRAY_PRICE` times on a replica to which
    the adapter does not belong."""


class Transfer(NamedTuple):
    """The transfer of a prompt's KV from one replica to another."""

    sent_s: float
    """Seconds for which the transfer occupies the links of both replicas."""
    arrives_at: float
    """When all of it has arrived, in seconds on the router's clock."""
    delays_s: float
    """Seconds by which the transfer is expected to delay other transfers in total."""


class Placing(NamedTuple):
    """Where the two parts of a request run."""

    first: Side
    """The replica of the prompt."""
    second: Side
    """The replica that continues the answer."""
    cost_s: float
    transfer: Transfer


def place(ask: Ask, sides: Sequence[Side], unsplit: Replica, rules: Splitting, now: float) -> Placing | None:
    """Return the two replicas of `sides` between which a split request costs least. None means that it is not split:
    there are no two or, unless the mode is ALWAYS, the request costs no more on `unsplit`, the router's choice without
    a split. While no replica can predict its decode steps yet, the request is split: that costs a transfer, but an
    answer that stays may wait for every prompt that comes."""
    stretch = _stretch(sides)
    prompt_s = [_prompt_s(ask, side, stretch, now) for side in sides]
    split = _place_split(ask, sides, prompt_s, rules, now)
    if split is None or rules.mode is SplitMode.ALWAYS or not split.second.replica.news.decode_step_s:
        return split
    mean_share = fmean(side.replica.news.prompt_share for side in sides)
    whole_s = [
        prompt + _answer_here_s(ask, side, mean_share, now)
        for side, prompt in zip(sides, prompt_s, strict=True)
        if side.replica is unsplit
    ]
    return split if whole_s and split.cost_s < whole_s[0] else None


def _stretch(sides: Sequence[Side]) -> float:
    """Return the factor 1 / (1 - share) by which the wait of a prompt counts. The share is the mean of the replicas'
    prompt shares, weighted by the shares themselves, and at most `MOST_SHARE`."""
    shares = [side.replica.news.prompt_share for side in sides]
    mean = sum(share * share for share in shares) / (sum(shares) or 1.0)
    return 1 / (1 - min(MOST_SHARE, mean))


def _place_split(
    ask: Ask, sides: Sequence[Side], prompt_s: Sequence[float], rules: Splitting, now: float
) -> Placing | None:
    """Return the cheapest pair of replicas for a split request: the first is one of the two on which the prompt costs
    least; the second has room for the answer if any has. None means that there is no pair."""
    firsts = [number for number, side in enumerate(sides) if side.replica.role in (Role.PREFILL, Role.BOTH)]
    seconds = [side for side in sides if side.replica.role in (Role.DECODE, Role.BOTH)]
    seconds = [side for side in seconds if side.replica.has_room()] or seconds
    best: Placing | None = None
    for number in sorted(firsts, key=prompt_s.__getitem__)[:2]:
        first = sides[number]
        token_at = _token_at(ask, first, now)
        for second in seconds:
            if second.replica is first.replica:
                continue
            transfer = _transfer(ask, first, second, rules, token_at, now)
            copied_s = sum(_copied_s(ask, side, second, rules, token_at) for side in (first, second))
            waits_s = second.replica.news.decode_step_s + copied_s
            moved_s = max(transfer.arrives_at - token_at, second.load_s) + transfer.delays_s + waits_s
            prompts_until = now + second.replica.delay_s(ask, ask.prompt_tokens, now)
            share = _share_at(second, transfer.arrives_at, prompts_until, now)
            answer_s = _answer_s(ask, second, transfer.arrives_at, prompts_until, share)
            cost = prompt_s[number] + moved_s + answer_s
            if best is None or cost < best.cost_s:
                best = Placing(first, second, cost, transfer)
    return best


def _prompt_s(ask: Ask, side: Side, stretch: float, now: float) -> float:
    """Return the cost, in seconds, of a request's prompt on a replica: its delay times `stretch`, the delay of the
    decodes that run beside it, and the load of the adapter."""
    delay_s = side.replica.delay_s(ask, side.cached_tokens, now)
    longer_s = max(0.0, _computed_s(ask, side) - side.replica.news.decode_step_s)
    return delay_s * stretch + longer_s * side.replica.decodes(now + delay_s) + side.load_s


def _token_at(ask: Ask, side: Side, now: float) -> float:
    """Return when a request's first token comes from a replica, in seconds on the router's clock."""
    return now + side.replica.delay_s(ask, side.cached_tokens, now)


def _answer_here_s(ask: Ask, side: Side, mean_share: float, now: float) -> float:
    """Return the cost, in seconds, of a request's decodes on the replica that computes its prompt. The prompts' share
    there is taken to rise half the way to `mean_share`, the mean of all replicas, because routers will send the next
    prompts to this replica for the same reasons."""
    token_at = _token_at(ask, side, now)
    share = _share_at(side, token_at, token_at, now)
    return _answer_s(ask, side, token_at, token_at, max(share, (share + mean_share) / 2))


def _answer_s(ask: Ask, side: Side, begins_at: float, prompts_until: float, share: float) -> float:
    """Return the cost, in seconds, of a request's decodes on a replica, which begin at `begins_at`. The replica
    computes prompts until `prompts_until`, and then for `share` of its time. Both times are in seconds on the router's
    clock."""
    news = side.replica.news
    prompts_s = max(0.0, prompts_until - begins_at)
    long_step_s = max(news.decode_step_s, PIECE_TOKENS * news.prompt_token_s)
    beside = min(ask.output_tokens, prompts_s / long_step_s) if prompts_s else 0.0
    step_s = news.decode_step_s / (1 - min(MOST_SHARE, share))
    return beside * long_step_s + (ask.output_tokens - beside) * step_s


def _share_at(side: Side, later: float, prompts_until: float, now: float) -> float:
    """Predict the `prompt_share` in a replica's news at `later`, if it computes prompts until `prompts_until` and then
    none, both in seconds on the router's clock."""
    kept = exp((now - later) / PROMPT_WINDOW_S)
    idle = exp((min(prompts_until, later) - later) / PROMPT_WINDOW_S)
    return side.replica.news.prompt_share * kept + idle - kept


def _transfer(ask: Ask, first: Side, second: Side, rules: Splitting, token_at: float, now: float) -> Transfer:
    """Return the transfer of the KV that the second replica lacks, if the first token comes at `token_at`, in seconds
    on the router's clock. It delays other transfers on the busier of the two links, as prompts delay prompts."""
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


def _copied_s(ask: Ask, side: Side, second: Side, rules: Splitting, token_at: float) -> float:
    """Return the cost, in seconds, of copying the KV that `second` lacks between device and host memory on the replica
    of `side`, with the delay of the decodes there."""
    copied = max(0, ask.prompt_tokens - second.cached_tokens) * rules.kv_bytes_per_token if rules.copies else 0.0
    return copied / side.replica.news.copy_bytes_per_s * (1 + side.replica.decodes(token_at))


def _computed_s(ask: Ask, side: Side) -> float:
    return max(0, ask.prompt_tokens - side.cached_tokens) * side.replica.news.prompt_token_s
