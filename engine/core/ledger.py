"""The books of device time: what steps took, whom it is charged to, what a token costs, and whether promises are kept.

Everything that is measured while running and decides something later is here; `commit.py` calls it between steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import exp
from typing import NamedTuple

from engine.core.accounts import Account, Accounts
from engine.core.adapters import Adapter
from engine.core.config import CoreConfig
from engine.core.step_time import Regression, StepTimeModel
from engine.core.types import AdapterId, Lane, ScheduledChunk, Sequence, StepPlan

SMOOTHING = 0.05
"""Weight of the newest step in a price: some twenty steps of memory."""
EVENTS_REMEMBERED = 500
"""Behind an attainment: enough for a 99 % goal to mean something, few enough to forget a bad minute."""


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
    lane: Lane
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
    residence: seconds a request of a lane runs, smoothed.
    mean_output: tokens a request generates, smoothed.
    need: device time batch deadlines ask for, as a multiple of what batch work has been getting.
    """

    def __init__(self, config: CoreConfig) -> None:
        rules = config.scheduling
        self.model = StepTimeModel(rules.forgetting, rules.small_step, rules.margin_floor, rules.margin_ceiling)
        self.accounts = Accounts()
        self.busy = dict.fromkeys(Lane, 0.0)
        self.prefill_price = self.decode_price = 0.0
        self.ttft = {lane: Ratio() for lane in Lane}
        self.itl = {lane: Ratio() for lane in Lane}
        self.residence = dict.fromkeys(Lane, 0.0)
        self.need = 0.0
        self.need_known_until = 0.0
        self.predicted_seconds = self.actual_seconds = 0.0
        self.longest_prompt = 0
        self.mean_output = 0.0
        self._window = rules.floor_window_s
        self._batch_time = 0.0
        self._wanted_time = 0.0
        """Time during which there was batch work, decayed over the window."""

    @property
    def batch_share(self) -> float:
        """Of device time, over the time in which there was batch work."""
        return self._batch_time / self._wanted_time if self._wanted_time else 1.0

    def settle(
        self,
        plan: StepPlan,
        sequences: Mapping[str, Sequence],
        adapters: Mapping[AdapterId, Adapter],
        now: float,
        wants_batch: bool,
    ) -> None:
        """Takes up how long a step took: from its plan's making to now. `wants_batch`: there was batch work."""
        seconds = now - plan.now
        if seconds <= 0 or not plan.chunks:
            return
        self.predicted_seconds += plan.predicted
        self.actual_seconds += seconds if plan.predicted else 0.0
        charges = list(self._charges(plan, sequences, adapters))
        whole = sum(charge.weight for charge in charges)
        self.model.observe(plan.features, seconds)
        if whole:
            self._charge(charges, seconds / whole)
            if wants_batch:
                batch = sum(charge.weight for charge in charges if charge.lane is not Lane.INTERACTIVE)
                self._note_share(batch * seconds / whole, seconds)

    def price(self, prefill_tokens: float, decode_tokens: float) -> float:
        """Device seconds that so much work costs."""
        return prefill_tokens * self.prefill_price + decode_tokens * self.decode_price

    def work_left(self, seq: Sequence) -> float:
        """Device seconds until a sequence ends, if it uses all its tokens."""
        return self.price(seq.num_remaining, seq.request.params.max_tokens - seq.num_generated)

    def note_end(self, seq: Sequence, now: float) -> None:
        """A request has run to its end."""
        self.residence[seq.lane] = _smooth(self.residence[seq.lane], now - seq.started)
        self.mean_output = _smooth(self.mean_output, seq.num_generated)

    def bound(self, capacity_tokens: int) -> float:
        """Twice the larger of the longest prompt and a full batch of decodes, in device seconds: the service gap that
        virtual token counters never exceed (the paper's theorem 4.4)."""
        return 2 * max(self.price(self.longest_prompt, 0), self.price(0, capacity_tokens))

    def _note_share(self, batch_seconds: float, seconds: float) -> None:
        keep = exp(-seconds / self._window)
        self._batch_time = self._batch_time * keep + batch_seconds
        self._wanted_time = self._wanted_time * keep + seconds

    def _charges(
        self, plan: StepPlan, sequences: Mapping[str, Sequence], adapters: Mapping[AdapterId, Adapter]
    ) -> Iterator[Charge]:
        """What is computed for the second time is not billed: its sequence did not ask to be preempted."""
        regression = self.model.regression(plan.features.tokens)
        fixed = regression.theta[0] / len(plan.chunks) if regression.is_warm else 0.0
        for chunk in plan.chunks:
            seq = sequences.get(chunk.request_id)
            if seq is not None:
                rank = adapters[seq.request.adapter].rank if seq.request.adapter else 0
                weight = fixed + chunk_weight(regression, chunk, rank)
                new = min(chunk.num_tokens, max(0, chunk.start + chunk.num_tokens - seq.num_lost))
                account = self.accounts.get(seq.request.lane, seq.request.tenant)
                billed = weight * new / chunk.num_tokens
                yield Charge(account, seq.request.lane, chunk.num_tokens, weight, billed)
        for load in plan.loads:
            if load.request_id in sequences:
                request, weight = sequences[load.request_id].request, regression.theta[7] * len(load.pages)
                yield Charge(self.accounts.get(request.lane, request.tenant), request.lane, 0, weight, weight)

    def _charge(self, charges: Iterable[Charge], scale: float) -> None:
        cost, tokens = [0.0, 0.0], [0, 0]
        for account, lane, count, weight, billed in charges:
            account.seconds += weight * scale
            account.served += billed * scale / account.weight
            self.busy[lane] += weight * scale
            if count:
                cost[count == 1] += weight * scale
                tokens[count == 1] += count
        if tokens[0]:
            self.prefill_price = _smooth(self.prefill_price, cost[0] / tokens[0])
        if tokens[1]:
            self.decode_price = _smooth(self.decode_price, cost[1] / tokens[1])


def chunk_weight(regression: Regression, chunk: ScheduledChunk, rank: int) -> float:
    """Seconds a chunk adds to its step; its tokens while nothing is known."""
    _, start, count, *_ = chunk
    if not regression.is_warm:
        return float(count)
    _, prefill, decode, context, attention, _, lora, _ = regression.theta
    if count == 1:
        return decode + context * (start + 1) + lora * rank
    return count * (prefill + attention * (start + count / 2) + lora * rank)


def _smooth(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old) if old else new
