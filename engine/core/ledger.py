"""The books of device time: what steps took, whom it is charged to, what a token costs, and whether promises are kept.

Everything that is measured while running and decides something later is here; `commit.py` calls it between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from math import exp
from typing import NamedTuple

from engine.core.accounts import Account, Accounts
from engine.core.adapters import Adapter
from engine.core.config import CoreConfig
from engine.core.sequence import Sequence
from engine.core.step_time import StepTimeModel
from engine.core.types import AdapterId, Lane, ScheduledChunk
from engine.core.under_way import StepUnderWay

SMOOTHING = 0.05
"""Weight of the newest step in a price: some twenty steps of memory."""
LEAST_GROWTH = 0.001
"""Of courtesy, in powers of two a step: for goals that allow of no late token at all."""
LEAST_COURTESY = 0.02
"""From which it is back in a few hundred steps when things have become better."""
EVENTS_REMEMBERED = 500
"""Behind an attainment: enough for a 99 % goal to mean something, few enough to forget a bad minute."""
STEPS_REMEMBERED = 2000
"""Behind the tail: some bursts' worth of steps."""
TAIL, TAIL_EVERY = 0.98, 16


class Ratio:
    """Share of events that went well, the recent ones counting most."""

    def __init__(self) -> None:
        self.good = self.total = 0.0

    def note(self, good: bool) -> None:
        keep = 1 - 1 / EVENTS_REMEMBERED
        self.good, self.total = self.good * keep + good, self.total * keep + 1

    @property
    def value(self) -> float:
        return self.good / self.total if self.total else 1.0


class Charge(NamedTuple):
    """A chunk and its part of a step: weight before, and without what is computed for the second time."""

    account: Account
    seq: Sequence
    tokens: int
    weight: float
    billed: float


class Ledger:
    """Attributes:
    model: what a step takes.
    accounts: what each tenant has got.
    busy: device seconds by lane.
    prefill_price, decode_price: device seconds a token costs in the steps it shares; 0 while unknown.
    ttft, itl: attainment by lane.
    tail: seconds of the longest steps (the 98th percentile of tokens) that interactive decodes would be in without
        batch work.
    wants_batch: there was batch work in the last step.
    courtesy: how much of the stretch it is allowed batch work may use now, from 0 to 1.
    used_share: of the maximum that a request asks for, the part that its answer uses, smoothed.
    longest_prompt, longest_output: tokens, of the requests and answers so far.
    need: device time batch deadlines ask for, as a multiple of what batch work has been getting.
    """

    def __init__(self, config: CoreConfig) -> None:
        rules = config.scheduling
        self.model = StepTimeModel(rules.forgetting, rules.knots, rules.margin_floor, rules.margin_ceiling)
        self.accounts = Accounts()
        self.busy = dict.fromkeys(Lane, 0.0)
        self.prefill_price = self.decode_price = 0.0
        self.ttft = {lane: Ratio() for lane in Lane}
        self.itl = {lane: Ratio() for lane in Lane}
        self.courtesy = 1.0
        self.tail = 0.0
        self._alone: deque[tuple[float, float]] = deque(maxlen=STEPS_REMEMBERED)
        self._since_tail = 0
        self._alone_now = self._longer_now = 0.0
        """Of the last step: seconds without batch work, and how many times as long it was with it."""
        self._was_shared = self.wants_batch = False
        self._settled = 0.0
        self._tokens = self._late = 0
        """Interactive tokens of the last step, and those that were late in a shared one."""
        self.need = 0.0
        self.need_known_until = 0.0
        self.predicted_seconds = self.actual_seconds = 0.0
        self.longest_prompt = self.longest_output = 0
        self.used_share = 1.0
        self._window = rules.floor_window_s
        self._batch_time = 0.0
        self._wanted_time = 0.0
        """Time during which there was batch work, decayed over the window."""

    @property
    def batch_share(self) -> float:
        """Of device time, over the time in which there was batch work."""
        return self._batch_time / self._wanted_time if self._wanted_time else 1.0

    def settle(
        self, step: StepUnderWay, adapters: Mapping[AdapterId, Adapter], began: float, now: float, wants_batch: bool
    ) -> None:
        """Takes up that a step lasted from `began` to `now`. `wants_batch`: there was batch work."""
        plan, seconds = step.plan, now - began
        if seconds <= 0 or not plan.chunks:
            return
        if not self.wants_batch:  # whoever wants nothing has all it wants
            self._note_share(began - self._settled, began - self._settled)
        self.wants_batch, self._settled = wants_batch, now
        self.predicted_seconds += plan.predicted
        self.actual_seconds += seconds if plan.predicted else 0.0
        self._alone_now, self._longer_now = plan.alone, plan.predicted / plan.alone if plan.alone else 0.0
        charges = list(self._charges(step, adapters))
        whole = sum(charge.weight for charge in charges)
        self.model.observe(plan.features, seconds)
        if whole:
            self._charge(charges, seconds / whole)
            batch = sum(charge.weight for charge in charges if charge.seq.request.lane is not Lane.INTERACTIVE)
            self._was_shared = 0 < batch < whole
            self._note_share(batch * seconds / whole if wants_batch else seconds, seconds)

    def price(self, prefill_tokens: float, decode_tokens: float) -> float:
        """Device seconds that so much work costs."""
        return prefill_tokens * self.prefill_price + decode_tokens * self.decode_price

    def work_left(self, seq: Sequence) -> float:
        """Device seconds until a sequence ends: with the answer that is expected of it, or with as large a part of its
        maximum as others use."""
        expected = seq.request.expected_tokens
        outputs = seq.request.params.max_tokens * self.used_share if expected is None else expected
        return self.price(seq.num_remaining, max(1.0, outputs - seq.num_generated))

    def note_end(self, seq: Sequence) -> None:
        """Learn from a request that has run to its end; a maximum that is only a ceiling teaches nothing."""
        if seq.request.expected_tokens is None:
            self.used_share = _smooth(self.used_share, seq.num_generated / seq.request.params.max_tokens)

    def bound(self, max_seqs: int) -> float:
        """Twice the larger of the longest prompt and a full batch of the longest answers, in device seconds: the gap
        in service that virtual token counters never exceed (the paper's theorem 4.4, whose M is the tokens of a running
        batch's answers; no gap so far can come from more of them than have been generated)."""
        return 2 * max(self.price(self.longest_prompt, 0), self.price(0, max_seqs * self.longest_output))

    def note_token(self, seq: Sequence, now: float) -> None:
        """A token has come, in time or late."""
        lane, in_time = seq.request.lane, now <= seq.due
        self.longest_output = max(self.longest_output, seq.num_generated)
        (self.ttft if seq.num_generated == 1 else self.itl)[lane].note(in_time)
        if lane is Lane.INTERACTIVE and seq.num_generated > 1:
            self._tokens += 1
            self._late += self._was_shared and not in_time

    def adapt(self, attainment: float) -> None:
        """After each step: `courtesy` halves when a token was late that shared its step with batch work, and doubles
        in as many steps without as there may be for one late token."""
        self._note_alone()
        if self._late:
            self.courtesy = max(LEAST_COURTESY, self.courtesy / 2)
        elif self._tokens:
            self.courtesy = min(1.0, self.courtesy * 2 ** max(1 - attainment, LEAST_GROWTH))
        self._tokens = self._late = 0

    def _note_alone(self) -> None:
        """A percentile over tokens, as ITL is reported. By itself, interactive work would have had as many more steps
        like this one as batch work made it longer."""
        if not (self._alone_now and self._tokens):
            return
        self._alone.append((self._alone_now, self._longer_now * self._tokens))
        self._since_tail += 1
        if self._since_tail >= TAIL_EVERY:
            self._since_tail = 0
            self.tail = _weighted_quantile(sorted(self._alone), TAIL)

    def _note_share(self, batch_seconds: float, seconds: float) -> None:
        keep = exp(-seconds / self._window)
        self._batch_time = self._batch_time * keep + batch_seconds
        self._wanted_time = self._wanted_time * keep + seconds

    def _charges(self, step: StepUnderWay, adapters: Mapping[AdapterId, Adapter]) -> Iterator[Charge]:
        """What is computed for the second time is not billed: its sequence did not ask to be preempted."""
        plan, model, many = step.plan, self.model, self.model.token_price(step.plan.features.tokens)
        fixed = model.prices.step / len(plan.chunks)
        for chunk, unpaid in zip(plan.chunks, step.unpaid, strict=True):
            seq = step.sequences[chunk.request_id]
            rank = adapters[seq.request.adapter].rank if seq.request.adapter else 0
            weight = fixed + chunk_weight(model, chunk, rank, many)
            account = self.accounts.get(seq.request.lane, seq.request.tenant)
            yield Charge(account, seq, chunk.num_tokens, weight, weight * unpaid / chunk.num_tokens)
        for load in plan.loads:
            seq, weight = step.sequences[load.request_id], model.prices.page * len(load.pages)
            yield Charge(self.accounts.get(seq.request.lane, seq.request.tenant), seq, 0, weight, weight)

    def _charge(self, charges: Iterable[Charge], scale: float) -> None:
        cost, tokens = [0.0, 0.0], [0, 0]
        for account, seq, count, weight, billed in charges:
            account.seconds += weight * scale
            account.served += billed * scale / account.weight
            self.busy[seq.request.lane] += weight * scale
            seq.device_seconds += weight * scale
            if count:
                cost[count == 1] += weight * scale
                tokens[count == 1] += count
        if tokens[0]:
            self.prefill_price = _smooth(self.prefill_price, cost[0] / tokens[0])
        if tokens[1]:
            self.decode_price = _smooth(self.decode_price, cost[1] / tokens[1])


def chunk_weight(model: StepTimeModel, chunk: ScheduledChunk, rank: int, many: float) -> float:
    """Seconds a chunk adds to its step, `many` being a token's share in their number; its tokens while nothing is
    known."""
    _, start, count, *_ = chunk
    if not model.is_warm:
        return float(count)
    prices = model.prices
    if count == 1:
        return prices.decode + many + prices.context * (start + 1) + prices.lora_row * rank
    return count * (prices.prefill + many + prices.attention * (start + count / 2) + prices.lora_row * rank)


def _weighted_quantile(ordered: list[tuple[float, float]], share: float) -> float:
    """The value below which `share` of the weight lies, of (value, weight) in ascending order."""
    wanted = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        wanted -= weight
        if wanted <= 0:
            return value
    return ordered[-1][0]


def _smooth(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old) if old else new
