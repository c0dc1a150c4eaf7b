"""The budget of a step: tokens for which the executor has memory, and time until the next token of a request is late.

    slack = earliest due time of an interactive decode - now
    interactive prefill    until the step lasts `slack`, or the tail if there is batch work; `min_chunk` even when late,
                           but not beyond `LATE_GOALS` ITL goals
    batch, shared step     until the step lasts its duration without batch work times a stretch, or the tail; at most
                           `slack`
    batch only             until the step lasts as long as an arriving request may be made to wait

The tail is `Ledger.tail`. All times are predictions of the step-time model. Promises (slack) include its margin;
comparisons (stretch) need none. docs/scheduling.md has the complete rules.
"""

from __future__ import annotations

from collections.abc import Container
from math import ceil, inf

from engine.core.config import goal_of
from engine.core.messages.features import StepFeatures
from engine.core.messages.requests import AdapterHash, Lane
from engine.core.policy.fair_share import LaneShares
from engine.core.predict.chunk_sizes import chunk_that_fits
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence

COPY_SHARE = 0.1
"""Maximum share of a step's duration by which copies that no request of the step waits for may extend it: those of
evicted prefixes and of pages for other engines."""

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
"""Value of `Ledger.need` (device time that batch deadlines need over device time that batch work has been getting) from
which on `promoted_share` replaces `batch_floor`."""


class StepBudget:
    """The tokens and the predicted time that one step has left; a `Planner` uses it for one plan. With `timed=False`,
    or while the step-time model is cold (has seen too few steps), only tokens limit the step."""

    def __init__(self, state: EngineState, now: float, timed: bool) -> None:
        self._state = state
        self._now = now
        self._shares: LaneShares | None = None
        self._rules = state.config.scheduling
        self._model = state.ledger.model
        self._timed = timed and self._model.is_warm
        self._is_careful = timed and not self._model.is_warm
        """The model is cold, so that batch work starts with few tokens and takes more in each step."""
        self._margin = self._model.margin
        self._slack = _slack(state, now) if self._timed else inf
        self._lane = Lane.INTERACTIVE
        self._limit = inf
        self._is_shared = False
        self._before, self._allowed = 0.0, inf
        """Predicted seconds of the step when the current lane began, and the maximum to which this lane may extend
        them. Unlike `_limit`, the maximum is not set to 0 once a decode no longer fits."""
        self.tokens_left = state.config.token_budget
        self.alone = 0.0
        """Predicted seconds of the step without batch work, if it has interactive decodes; otherwise 0."""
        self._prefill = self._decodes = self._context = self._attention = self._rows = self._moved = self._scored = 0.0
        self._prompting: set[str] = set()
        """Requests whose prompts have chunks in the step, also chunks of one token, which cost what decodes do."""
        self._adapters: dict[AdapterHash, int] = {}
        """Number of chunks of each adapter."""
        self._spent: float | None = None
        """Predicted seconds of the step so far, updated incrementally for decodes. None means that another change was
        made, so that they must be predicted again."""
        self._price_of_token, self._price_holds_to = 0.0, 0.0

    def enter(self, lane: Lane) -> None:
        """Begin to grant work of a lane in this step: set the lane's time limit, or its tokens while the step-time
        model is cold, given the work that was granted to higher lanes."""
        self._lane = lane
        self._is_shared = lane is not Lane.INTERACTIVE and not self._is_empty
        self._before = self._spent = self._model.predict(self.features)
        if self._is_shared and self._decodes:
            self.alone = self._before
        if self._timed:
            self._limit = self._slack / self._margin if lane is Lane.INTERACTIVE else self._batch_limit()
            self._allowed = self._limit
        elif self._is_careful and lane is not Lane.INTERACTIVE:
            self.tokens_left = min(self.tokens_left, self._rules.min_chunk * (1 + self._model.num_steps))

    @property
    def features(self) -> StepFeatures:
        return StepFeatures(
            self._prefill,
            self._decodes,
            self._context,
            self._attention,
            float(len(self._adapters)),
            self._rows,
            self._moved,
            self._scored,
            float(self._model.is_launched(self._prefill, self._prefill + self._decodes)),
        )

    @property
    def is_open(self) -> bool:
        """Return whether the current lane may add more work: while tokens are left and, in the batch lane, its time
        limit is not used up. An empty step ignores the time limit, even if the predicted cost is too high, because only
        a measured step can correct that prediction."""
        return self.tokens_left > 0 and (self._lane is Lane.INTERACTIVE or self._limit > 0 or self._is_empty)

    def grant(self, seq: Sequence, start: int, wanted: int) -> int:
        """Add to the step up to `wanted` tokens of a sequence from position `start` on, and return how many fit, which
        may be 0. One `wanted` token at a position above 0 is a decode; anything else is a prompt."""
        if wanted == 1 and start:
            return self._grant_decode(seq, start + 1)
        share = self._share_for(wanted)
        wanted = min(wanted, ceil(self.tokens_left * share))
        if wanted <= 0:
            return 0
        rank = self._rank(seq)
        granted = self._chunk(seq, start, wanted, rank, share)
        if granted:
            self._prompting.add(seq.id)
            self._add(seq, start, granted, rank, 1)
        return granted

    def _share_for(self, wanted: int) -> float:
        """Return the share of the remaining step, 0.5 or 1, that a prompt with `wanted` tokens left may take. A long
        prompt leaves half of each step to waiting requests of its lane, if any, so that these need not wait."""
        is_long = self._timed and wanted > self._state.config.long_prompt
        return 0.5 if is_long and self._state.waiting.groups(self._lane) else 1.0

    def _grant_decode(self, seq: Sequence, context: int) -> int:
        """Add a decode if it fits, and return the number of its tokens: 1, or 0 if it does not. Only the token budget
        limits interactive decodes. A batch decode that does not fit closes its lane, because the next one would not fit
        either."""
        if self.tokens_left <= 0:
            return 0
        adapter_hash, rank = seq.request.adapter_hash, 0
        if adapter_hash:
            rank = self._state.adapters[adapter_hash].rank
        if (
            self._limit != inf
            and self._lane is not Lane.INTERACTIVE
            and not self._decode_fits(context, rank, adapter_hash)
        ):
            return 0
        self.tokens_left -= 1
        self._decodes += 1
        self._context += context
        if adapter_hash:
            self._rows += rank
            self._adapters[adapter_hash] = self._adapters.get(adapter_hash, 0) + 1
        return 1

    def add_proposals(self, seq: Sequence, start: int, count: int) -> None:
        """Charge to the step `count` proposed tokens (speculation) of a sequence, from position `start` on: each is
        computed like a decode. In a step with interactive decodes they are interactive, too."""
        before, rank = self._model.predict(self.features), self._rank(seq)
        for place in range(start, start + count):
            self._add(seq, place, 1, rank, 1)
        if self.alone:
            self.alone += self._model.predict(self.features) - before

    @property
    def is_decoding(self) -> bool:
        """Return whether the step has no chunk of several prompt tokens so far, so that it may have proposals."""
        return not self._prefill

    @property
    def bound(self) -> float:
        """Predicted seconds to which proposals may extend the step: the slack if it has interactive work, otherwise
        what batch work alone may take."""
        is_interactive = self._is_shared or self._lane is Lane.INTERACTIVE
        return self._slack / self._margin if is_interactive else self._allowed

    def row_price(self, seq: Sequence, context: int, more: int) -> float:
        """Return the predicted seconds that one more decode of a sequence at a context length in tokens adds to the
        step, beyond the work granted so far and `more` tokens. The sequence's adapter is in the step already."""
        prices, tokens = self._model.prices, self._decodes + more + 1
        linear = prices.decode + prices.context * context + prices.lora_row * self._rank(seq)
        return linear + self._model.token_price(tokens) + self._model.experts_price(tokens)

    def take_back(self, seq: Sequence, start: int, num_tokens: int) -> None:
        """Undo the grant of `num_tokens` tokens from `start` on that will not be computed."""
        if num_tokens:
            self._prompting.discard(seq.id)
            self._add(seq, start, num_tokens, self._rank(seq), -1)

    def fits_pages(self, count: int, *, is_old: bool = False) -> bool:
        """Return whether this step may copy `count` more pages between host and device. Only copies for batch work in a
        step shared with interactive work are limited. They must fit into the time that batch work may add to the step,
        not counting its decodes, which would otherwise leave no time for copies. Batch work that has had less than its
        guaranteed share of device time (see `_owes_batch`) may always copy. An adapter that a request has been waiting
        for too long (`is_old`) may be copied regardless of its size if nothing else is copied in this step."""
        if not (count and self._is_shared) or self._limit == inf or self._owes_batch() or (is_old and not self._moved):
            return True
        return self._before + self._model.prices.page * (self._moved + count) <= self._allowed

    def copies_beside(self, most: int) -> int:
        """Return how many pages, at most `most`, the step may copy to the host although none of its requests waits for
        them: as many as are predicted to extend it by at most `COPY_SHARE` of its duration. A step that computes
        nothing may copy all."""
        seconds, price = self._model.predict(self.features), self._model.prices.page
        if not (self._timed and price) or self._is_empty:
            return most
        return min(most, int(COPY_SHARE * seconds / price))

    def move_pages(self, count: int) -> None:
        """Charge copies of `count` pages between host and device to the step; a negative count takes a charge back."""
        self._moved += count
        self._spent = None

    def _rank(self, seq: Sequence) -> int:
        adapter_hash = seq.request.adapter_hash
        return self._state.adapters[adapter_hash].rank if adapter_hash else 0

    def _add(self, seq: Sequence, start: int, count: int, rank: int, sign: int) -> None:
        self.tokens_left -= sign * count
        self._spent, self._price_holds_to = None, 0.0
        if count == 1:
            self._decodes += sign
            self._context += sign * (start + 1)
        else:
            self._prefill += sign * count
            self._attention += sign * count * (start + count / 2)
            if not seq.is_scored:
                self._scored += sign * count
        adapter_hash = seq.request.adapter_hash
        if adapter_hash:
            self._rows += sign * rank * count
            self._count_adapter(adapter_hash, sign)

    def _count_adapter(self, adapter_hash: AdapterHash, sign: int) -> None:
        self._adapters[adapter_hash] = self._adapters.get(adapter_hash, 0) + sign
        if not self._adapters[adapter_hash]:
            del self._adapters[adapter_hash]

    def _decode_fits(self, context: int, rank: int, adapter_hash: AdapterHash | None) -> bool:
        tokens = self._prefill + self._decodes
        if self._limit <= 0 or not tokens:
            return not tokens
        if self._spent is None:
            self._spent = self._model.predict(self.features)
        if tokens >= self._price_holds_to:
            self._price_next_token(tokens + 1)
        prices = self._model.prices
        cost = prices.decode + prices.context * context + self._price_of_token + self._model.experts_price(tokens + 1)
        if adapter_hash is not None:
            cost += prices.lora_row * rank + (0.0 if adapter_hash in self._adapters else prices.adapter)
        self._spent += cost
        if self._spent > self._limit:
            self._limit = 0.0
        return self._limit > 0

    def _price_next_token(self, tokens: float) -> None:
        """Store the surcharge, in seconds, that the step-time model predicts for the last of `tokens` tokens of this
        step, for the test whether a decode fits. It holds up to the next knot of the model."""
        self._price_of_token = self._model.token_price(tokens)
        self._price_holds_to = min((knot for knot in self._model.knots if knot >= tokens), default=inf)

    def _chunk(self, seq: Sequence, start: int, wanted: int, rank: int, share: float) -> int:
        """Return the number of prompt tokens, at most `wanted`, that keep the step's predicted time within the lane's
        limit. Without a limit, that is all of `wanted`.

        The first interactive prompt of a step, and a batch prompt in an empty step, get at least `min_chunk` tokens, or
        `wanted` if that is less; the former only as many as fit into `LATE_GOALS` ITL goals or `FULL_CHUNK` decodes.
        Other batch prompts take what fits, however little: when they waited for room for a whole page, none ever
        started beside interactive decodes.

        Args:
            start: position of the first token.
            wanted: maximum number of tokens.
            rank: LoRA rank of the sequence's adapter; 0 means the base model.
            share: share, from 0 to 1, of the time left in the lane's turn that the prompt may take.
        """
        if self._limit == inf:
            return wanted
        limit = self._prompt_limit(seq) if self._lane is Lane.INTERACTIVE else self._limit
        limit = self._before + (limit - self._before) * share
        fits = chunk_that_fits(self._model, self.features, start, rank, limit, scores=not seq.is_scored)
        fits = min(wanted, fits)
        least = min(wanted, self._rules.min_chunk)
        if self._lane is not Lane.INTERACTIVE:
            return max(fits, least * self._is_empty)
        if self._prompting or fits >= least:
            return fits
        late = max(LATE_GOALS * self._state.config.interactive.itl_s, FULL_CHUNK * self._one_decode)
        in_time = chunk_that_fits(self._model, self.features, start, rank, late, scores=not seq.is_scored)
        return max(fits, min(least, in_time), 1)

    @property
    def _one_decode(self) -> float:
        """Predicted seconds of a step with a single decode, including an adapter: if all observed steps had one, the
        model cannot separate the adapter's cost from the constant cost of a step and may assign all of it to either."""
        launched = float(self._model.is_launched(0.0, 1.0))
        return self._model.predict(StepFeatures(decode_tokens=1.0, adapters=1.0, launched=launched))

    @property
    def _is_empty(self) -> bool:
        return not (self._prefill or self._decodes)

    def _prompt_limit(self, seq: Sequence) -> float:
        """Return the predicted seconds to which an interactive prompt may extend the step: the lane's limit, which the
        first prompt beside decodes may raise (see `_late_limit`), or that of `_newcomer_limit` if it is higher. While
        there is batch work, more interactive sequences decode concurrently, and the step of a prompt delays all of
        them. The step is therefore cut to `itl_stretch` times `Ledger.tail`, but not below `FULL_CHUNK` decodes, so
        that the constant cost of a step remains a small part of it. A second prompt joins a step only within
        `itl_stretch` times the tail, because without batch work it would rarely have met the first one."""
        ledger = self._state.ledger
        if self._decodes and not self._prompting:
            self._limit = max(self._limit, self._late_limit())
        limit = max(self._limit, self._newcomer_limit(seq))
        if not (ledger.wants_batch and ledger.tail and self._decodes):
            return limit
        tail = self._rules.itl_stretch * ledger.tail
        return min(limit, tail if self._prompting else max(tail, FULL_CHUNK * self._one_decode))

    def _newcomer_limit(self, seq: Sequence) -> float:
        """Return the seconds to which a prompt may extend the step if it is the only request of its party (its tenant,
        or its class of the tenant's requests; see fairness/accounts.py) and other parties crowd the lane; 0 otherwise,
        or if the lane's limit is as high. Such a request does not wait for the decodes of parties that crowd the lane:
        its prompt may extend the step to `FULL_CHUNK` decodes, as long as no decode of the other parties becomes
        late."""
        longest = FULL_CHUNK * self._one_decode
        if self._limit >= longest:
            return 0.0
        if self._shares is None:
            self._shares = LaneShares(self._state, Lane.INTERACTIVE)
        crowd = self._shares.crowding
        if seq.request.party in crowd or not crowd or not self._shares.is_only_request(seq):
            return 0.0
        left = _times_left(self._state, self._now, crowd)
        return min(min(left, default=inf) / self._margin, longest)

    def _late_limit(self) -> float:
        """Return the seconds to which prompts may extend a step whose decodes alone are predicted to be late
        (`itl_stretch` times their prediction), or 0 if they are not. Otherwise prompts would get only `min_chunk`
        tokens per step for as long as there are so many decodes."""
        alone = self._model.predict(self.features)
        return alone * self._rules.itl_stretch if alone * self._margin >= self._slack else 0.0

    def _batch_limit(self) -> float:
        rules, model = self._rules, self._model
        if self._is_empty:
            if self._is_probe and not model.has_seen(1):
                return 0.0
            return min(rules.yield_bound_s / self._margin, max(self._one_decode * rules.yield_stretch, self._patience))
        promise = min(self._slack, rules.yield_bound_s) / self._margin
        ledger, alone = self._state.ledger, self._before
        if self._owes_batch():
            # If the goal cannot be met even without batch work, excluding batch work would help no request.
            lost = alone * self._margin >= self._slack
            return min(alone * rules.itl_stretch, rules.yield_bound_s / self._margin) if lost else promise
        if self._is_probe:
            return 0.0
        if self._prefill:
            courteous = alone * rules.ttft_stretch
        else:
            courteous = max(alone * rules.itl_stretch, rules.tail_share * ledger.tail)
        return min(promise, alone + (courteous - alone) * ledger.courtesy)

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

    def _owes_batch(self) -> bool:
        """Return whether batch work got a smaller share of the device's time than it is guaranteed: `batch_floor`, or
        `promoted_share` while batch deadlines require it."""
        rules, ledger = self._rules, self._state.ledger
        floor = rules.promoted_share if ledger.need >= PROMOTE_FROM else rules.batch_floor
        return ledger.batch_share < floor


def _slack(state: EngineState, now: float) -> float:
    """Return the seconds from `now` until the first interactive decode is late (at least 0), or until the step's end is
    late for a request that arrives meanwhile: the lane's ITL goal if several parties use it, and otherwise, without
    decodes, its TTFT goal. The time of the step's masks is left out."""
    goals, left = state.config.interactive, _times_left(state, now)
    if state.ledger.accounts.is_shared(Lane.INTERACTIVE, now):
        # Another party's next request should not wait for a long step that one party's prompts fill.
        left.append(goals.itl_s)
    elif not left:
        left.append(max(goals.ttft_s, goals.itl_s))
    return max(0.0, min(left) - state.ledger.masks_s(state.running.values()))


def _times_left(state: EngineState, now: float, apart_from: Container[str] = ()) -> list[float]:
    """Return, for each running interactive decode, the seconds from `now` until its next token is late, without those
    of the parties in `apart_from` and those that wait for slow masks, whose tokens no shorter step would make earlier.
    A pending token will have been generated just before this step begins, so that the
    next one is due a full ITL goal later."""
    lane, goal = Lane.INTERACTIVE, state.config.interactive.itl_s
    return [
        goal_of(seq.request.itl, goal) if seq.num_pending else seq.due - now
        for seq in state.running.values()
        if seq.lane is lane
        and seq.num_computed + 1 == len(seq.tokens) + seq.num_pending
        and not seq.waits_for_token
        and not seq.masks_slowly
        and (not apart_from or seq.request.party not in apart_from)
    ]
