"""How long a step may get: limits that follow from the state, and from the work that the step already has (`Work`).

    slack = earliest due time of an interactive decode - now
    interactive prefill    until the step lasts `slack`, or the tail if there is batch work; `min_chunk` even when late,
                           but not beyond `LATE_GOALS` ITL goals
    batch, shared step     until the step lasts its duration without batch work times a stretch, or the tail; at most
                           `slack`
    batch only             until the step lasts as long as an arriving request may be made to wait

The tail is `Courtesy.tail`. All times are predictions of the step-time model. Promises (slack) include its margin;
comparisons (stretch) need none. docs/scheduling.md has the complete rules.
"""

from __future__ import annotations

from functools import cached_property
from math import inf

from engine.core.messages.features import StepFeatures
from engine.core.messages.requests import AdapterHash, Lane
from engine.core.plan.turns import slack_of, take_turns, times_left
from engine.core.policy.fair_share import LaneShares
from engine.core.predict.step_time import StepTimeModel
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence

LATE_GOALS = 2.0
"""Multiple of the ITL goal to which `min_chunk` may extend a step that is late, unless `FULL_CHUNK` decodes take
longer: 16 tokens at a context of 7,000 take a core 220 ms, in every step that another tenant's answer waits for."""

FULL_CHUNK = 5.0
"""While there is batch work, a step with an interactive prompt may always last this multiple of a step of one decode,
and longer only up to the tail of interactive steps times `itl_stretch`. If it were cut shorter, more than a fifth of a
prompt's time would be spent on reading the weights again."""

YIELD_SHARE = 0.01
"""After a time without interactive work, a step of batch work may also last this share of that time: requests that come
so rarely wait for so little of it. Measured on a CPU, whose steps with prompts have a constant cost of their own: batch
work alone, with short answers, gets more than twice as many tokens a second as without this."""

PROMOTE_FROM = 1.0
"""Value of `BatchTime.need` (device time that batch deadlines need over device time that batch work has been getting)
from which on `promoted_share` replaces `batch_floor`."""


class Work:
    """The work that a plan has granted so far, by which the step's duration is predicted."""

    __slots__ = ("_model", "adapters", "attention", "context", "decodes", "moved", "prefill", "rows", "scored")

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model
        self.prefill = self.decodes = self.context = self.attention = self.rows = self.moved = self.scored = 0.0
        self.adapters: dict[AdapterHash, int] = {}
        """Number of chunks of each adapter."""

    @property
    def is_empty(self) -> bool:
        return not (self.prefill or self.decodes)

    @property
    def features(self) -> StepFeatures:
        return StepFeatures(
            self.prefill,
            self.decodes,
            self.context,
            self.attention,
            float(len(self.adapters)),
            self.rows,
            self.moved,
            self.scored,
            float(self._model.is_launched(self.prefill, self.prefill + self.decodes)),
        )

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step, without masks."""
        return self._model.predict(self.features)

    def add_decode(self, context: int, rank: int, adapter_hash: AdapterHash | None) -> None:
        self.decodes += 1
        self.context += context
        if adapter_hash:
            self.rows += rank
            self.adapters[adapter_hash] = self.adapters.get(adapter_hash, 0) + 1

    def add(self, seq: Sequence, start: int, count: int, rank: int, sign: int) -> None:
        """Add a chunk of `count` tokens from position `start` on, or take it away if `sign` is -1."""
        if count == 1:
            self.decodes += sign
            self.context += sign * (start + 1)
        else:
            self.prefill += sign * count
            self.attention += sign * count * (start + count / 2)
            if not seq.is_scored:
                self.scored += sign * count
        if adapter_hash := seq.request.adapter_hash:
            self.rows += sign * rank * count
            self.adapters[adapter_hash] = self.adapters.get(adapter_hash, 0) + sign
            if not self.adapters[adapter_hash]:
                del self.adapters[adapter_hash]


class LaneTime:
    """The predicted seconds to which one lane may extend a step. Decodes of the batch lane are checked one by one, at a
    price that is updated incrementally, because a step may have hundreds.

    Attributes:
        before: predicted seconds of the step before the lane's work.
        allowed: maximum to which the lane may extend them.
        limit: like `allowed`, but 0 once a decode no longer fits.
        is_shared: whether the lane is the batch lane and the step has interactive work.
        bounds_decodes: whether the limit holds for decodes, too.
    """

    def __init__(self, lane: Lane, model: StepTimeModel, work: Work, before: float, limit: float) -> None:
        self.lane = lane
        self.before = before
        self.allowed = self.limit = limit
        self.is_shared = lane is not Lane.INTERACTIVE and not work.is_empty
        self.bounds_decodes = lane is not Lane.INTERACTIVE and limit != inf
        self._model, self._work = model, work
        self._spent: float | None = before
        """Predicted seconds of the step so far, updated incrementally for decodes. None means that another change was
        made, so that they must be predicted again."""
        self._price_of_token, self._price_holds_to = 0.0, 0.0

    def predict_again(self) -> None:
        """Note that other work than a decode of this lane was added to the step, or taken away."""
        self._spent, self._price_holds_to = None, 0.0

    def decode_fits(self, context: int, rank: int, adapter_hash: AdapterHash | None) -> bool:
        """Return whether one more decode fits, and count its price. One that does not fit closes the lane, because the
        next one would not fit either. In an empty step, any decode fits."""
        work = self._work
        tokens = work.prefill + work.decodes
        if self.limit <= 0 or not tokens:
            return not tokens
        if self._spent is None:
            self._spent = work.seconds
        if tokens >= self._price_holds_to:
            self._price_next_token(tokens + 1)
        prices = self._model.prices
        cost = prices.decode + prices.context * context + self._price_of_token + self._model.experts_price(tokens + 1)
        if adapter_hash is not None:
            cost += prices.lora_row * rank + (0.0 if adapter_hash in work.adapters else prices.adapter)
        self._spent += cost
        if self._spent > self.limit:
            self.limit = 0.0
        return self.limit > 0

    def _price_next_token(self, tokens: float) -> None:
        """Store the surcharge, in seconds, that the step-time model predicts for the last of `tokens` tokens of this
        step. It holds up to the next knot of the model."""
        self._price_of_token = self._model.token_price(tokens)
        self._price_holds_to = min((knot for knot in self._model.knots if knot >= tokens), default=inf)


class Limits:
    """Limits of one step, in predicted seconds: functions of the state, which change nothing.

    Attributes:
        is_timed: whether time limits the step. Otherwise, or while the step-time model is cold (has seen too few
            steps), only tokens do.
        turns: which interactive decodes the step has. None means that no party is light.
        slack: seconds until an interactive token is late; infinite if time does not limit the step.
    """

    def __init__(self, state: EngineState, now: float, timed: bool) -> None:
        self._state = state
        self._now = now
        self._rules = state.config.scheduling
        self._model = state.ledger.model
        self.is_timed = timed and self._model.is_warm
        self.turns = take_turns(state, now, owes_batch=owes_batch(state)) if self.is_timed else None
        self.slack = inf
        if self.is_timed:
            self.slack = slack_of(state, now) if self.turns is None else self.turns.slack

    @property
    def promise(self) -> float:
        """Seconds to which interactive work may extend the step."""
        return self.slack / self._model.margin

    def of_lane(self, lane: Lane, work: Work, before: float) -> float:
        """Return the seconds to which a lane may extend a step that has `work` of higher lanes and takes `before`
        seconds."""
        if not self.is_timed:
            return inf
        if lane is Lane.INTERACTIVE:
            return self.promise
        return self._of_batch_alone() if work.is_empty else self._of_batch(work, before)

    def _of_batch_alone(self) -> float:
        rules, model = self._rules, self._model
        if self._is_probe and not model.has_seen(1):
            return 0.0
        return min(rules.yield_bound_s / model.margin, max(model.one_decode * rules.yield_stretch, self._patience))

    def _of_batch(self, work: Work, alone: float) -> float:
        """Return the seconds to which batch work may extend a step that takes `alone` seconds without it."""
        rules, ledger, margin = self._rules, self._state.ledger, self._model.margin
        promise = min(self.slack, rules.yield_bound_s) / margin
        if owes_batch(self._state):
            # If the goal cannot be met even without batch work, excluding batch work would help no request.
            lost = alone * margin >= self.slack
            return min(alone * rules.itl_stretch, rules.yield_bound_s / margin) if lost else promise
        if self._is_probe:
            return 0.0
        if self.turns is not None and self.turns.decodes is not None:
            return alone  # interactive decodes were left out: their time is for a light party's prompt
        if work.prefill:
            courteous = alone * rules.ttft_stretch
        else:
            courteous = max(alone * rules.itl_stretch, rules.tail_share * ledger.courtesy.tail)
        return min(promise, alone + (courteous - alone) * ledger.courtesy.value)

    def beside_late(self, work: Work) -> float:
        """Return the seconds to which prompts may extend a step whose decodes alone are predicted to be late
        (`itl_stretch` times their prediction), or 0 if they are not. Otherwise prompts would get only `min_chunk`
        tokens per step for as long as there are so many decodes."""
        alone = work.seconds
        return alone * self._rules.itl_stretch if alone * self._model.margin >= self.slack else 0.0

    def of_prompt(self, seq: Sequence, limit: float, work: Work, *, is_first: bool) -> float:
        """Return the seconds to which an interactive prompt, the first of its step or a further one, may extend the
        step: the lane's `limit`, or that of `_of_newcomer` if it is higher. While there is batch work, more interactive
        sequences decode concurrently, and the step of a prompt delays all of them. The step is therefore cut to
        `itl_stretch` times `Courtesy.tail`, but not below `FULL_CHUNK` decodes, so that the constant cost of a step
        remains a small part of it. A second prompt joins a step only within `itl_stretch` times the tail, because
        without batch work it would rarely have met the first one."""
        ledger = self._state.ledger
        limit = max(limit, self._of_newcomer(seq, limit))
        if not (ledger.batch.is_wanted and ledger.courtesy.tail and work.decodes):
            return limit
        tail = self._rules.itl_stretch * ledger.courtesy.tail
        return min(limit, max(tail, self._full_chunk) if is_first else tail)

    @property
    def of_least_chunk(self) -> float:
        """Seconds to which the first prompt's `min_chunk` tokens may extend a step that is late."""
        return max(LATE_GOALS * self._state.config.interactive.itl_s, self._full_chunk)

    def _of_newcomer(self, seq: Sequence, limit: float) -> float:
        """Return the seconds to which a prompt may extend the step if it is the only request of its party (its tenant,
        or its class of the tenant's requests; see fairness/accounts.py) and other parties crowd the lane; 0 otherwise,
        or if the lane's `limit` is as high. Such a request does not wait for the decodes of parties that crowd the
        lane: its prompt may extend the step to `FULL_CHUNK` decodes, as long as no decode of the other parties becomes
        late."""
        if limit >= self._full_chunk:
            return 0.0
        crowd = self._shares.crowding
        if seq.request.party in crowd or not crowd or not self._shares.is_only_request(seq):
            return 0.0
        left = times_left(self._state, self._now, crowd)
        return min(min(left, default=inf) / self._model.margin, self._full_chunk)

    @cached_property
    def _shares(self) -> LaneShares:
        return LaneShares(self._state, Lane.INTERACTIVE)

    @property
    def _full_chunk(self) -> float:
        return FULL_CHUNK * self._model.one_decode

    @property
    def _patience(self) -> float:
        """Seconds that a step of batch work may last because no interactive request has come for long: the share
        `YIELD_SHARE` of that time, or 0 before the first step."""
        quiet_since = self._state.ledger.interactive_at
        return 0.0 if quiet_since is None else YIELD_SHARE * (self._now - quiet_since)

    @property
    def _is_probe(self) -> bool:
        """Return whether this step is a probe: in one of every `probe_every` steps, the step-time model learns how long
        little work takes, which full steps cannot show. A probe carries no batch work beside interactive work unless
        batch work is below its floor. Without interactive work, it carries as little as possible while the model has
        not seen steps of one token."""
        return self._state.counters.steps % self._rules.probe_every == 0


def owes_batch(state: EngineState) -> bool:
    """Return whether batch work got a smaller share of the device's time than it is guaranteed: `batch_floor`, or
    `promoted_share` while batch deadlines require it."""
    rules, ledger = state.config.scheduling, state.ledger
    floor = rules.promoted_share if ledger.batch.need >= PROMOTE_FROM else rules.batch_floor
    return ledger.batch.share < floor
