"""How much a step may carry: tokens the executor has memory for, and time before somebody's next token is late.

    slack = earliest due time of an interactive decode - now
    interactive prefill   until the step lasts `slack`, beside batch work until the tail; `min_chunk` even when late
    batch, beside them    until it lasts a stretch of what it would without, or the tail there is; at most `slack`
    batch, alone          until it lasts as long as somebody arriving now may be made to wait

Times are the step-time model's; promises (slack) are kept with its margin, comparisons (stretch) need none. The rules
in full: docs/scheduling.md.
"""

from __future__ import annotations

from collections.abc import Container
from math import ceil, inf

from engine.core.config import goal_of
from engine.core.fair_share import LaneShares
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.step_time import StepFeatures
from engine.core.types import AdapterId, Lane


class StepBudget:
    """What is left of one step. `timed=False` counts tokens only, which is also how it is while the model is cold."""

    def __init__(self, state: EngineState, now: float, timed: bool) -> None:
        self._state = state
        self._now = now
        self._shares: LaneShares | None = None
        self._rules = state.config.scheduling
        self._model = state.ledger.model
        self._timed = timed and self._model.is_warm
        self._is_careful = timed and not self._model.is_warm
        """Nothing is known of this device: batch work begins with a little and takes more step by step."""
        self._margin = self._model.margin
        self._slack = _slack(state, now) if self._timed else inf
        self._lane = Lane.INTERACTIVE
        self._limit = inf
        self._is_shared = False
        self._before, self._allowed = 0.0, inf
        """Predicted seconds when this lane's turn began, and how long it may make the step, however full it is."""
        self.tokens_left = state.config.token_budget
        self.alone = 0.0
        """Predicted seconds without batch work, where there are interactive decodes."""
        self._prefill = self._decodes = self._context = self._attention = self._rows = self._moved = 0.0
        self._adapters: dict[AdapterId, int] = {}
        """Chunks of each adapter."""
        self._spent: float | None = None
        """Predicted seconds so far; None where something changed that is not worth following step by step."""
        self._price_of_token, self._price_holds_to = 0.0, 0.0

    def enter(self, lane: Lane) -> None:
        """What is asked for from now on is for this lane; what has been granted belongs to higher ones."""
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
        )

    @property
    def is_open(self) -> bool:
        """An empty step takes something in, whatever it is believed to cost: nothing else would ever correct that."""
        return self.tokens_left > 0 and (self._lane is Lane.INTERACTIVE or self._limit > 0 or self._is_empty)

    def grant(self, seq: Sequence, start: int, wanted: int) -> int:
        """Tokens of `wanted`, from position `start` on, that the sequence may compute in this step; takes them."""
        if wanted == 1 and start:
            return int(self._grant_decode(seq, start + 1))
        share = self._share_for(wanted)
        wanted = min(wanted, ceil(self.tokens_left * share))
        if wanted <= 0:
            return 0
        rank = self._rank(seq)
        granted = self._chunk(seq, start, wanted, rank, share)
        if granted:
            self._add(seq, start, granted, rank, 1)
        return granted

    def _share_for(self, wanted: int) -> float:
        """Of what is left of the step. A prompt of many steps leaves half of each to those who wait: they need not sit
        out all of it."""
        is_long = self._timed and wanted > self._state.config.long_prompt
        return 0.5 if is_long and self._state.waiting.groups(self._lane) else 1.0

    def _grant_decode(self, seq: Sequence, context: int) -> bool:
        """Interactive decodes always fit. A batch one that does not closes the lane: the next would not either."""
        if self.tokens_left <= 0:
            return False
        adapter, rank = seq.request.adapter, 0
        if adapter:
            rank = self._state.adapters[adapter].rank
        if self._limit != inf and self._lane is not Lane.INTERACTIVE and not self._decode_fits(context, rank, adapter):
            return False
        self.tokens_left -= 1
        self._decodes += 1
        self._context += context
        if adapter:
            self._rows += rank
            self._adapters[adapter] = self._adapters.get(adapter, 0) + 1
        return True

    def take_back(self, seq: Sequence, start: int, num_tokens: int) -> None:
        """A chunk that was granted will not be computed."""
        if num_tokens:
            self._add(seq, start, num_tokens, self._rank(seq), -1)

    def fits_pages(self, count: int, *, is_old: bool = False) -> bool:
        """Whether so many more pages may be copied: in a step that others share, batch work may copy as much as would
        fit beside them alone (behind full decodes it never would), or if it has had less than its floor. An adapter
        that was waited for too long, whatever its size, if it is the only one."""
        if not (count and self._is_shared) or self._limit == inf or self._owes_batch() or (is_old and not self._moved):
            return True
        return self._before + self._model.prices.page * (self._moved + count) <= self._allowed

    def move_pages(self, count: int) -> None:
        """Pages are copied between host and device in this step."""
        self._moved += count
        self._spent = None

    def _rank(self, seq: Sequence) -> int:
        adapter = seq.request.adapter
        return self._state.adapters[adapter].rank if adapter else 0

    def _add(self, seq: Sequence, start: int, count: int, rank: int, sign: int) -> None:
        self.tokens_left -= sign * count
        self._spent, self._price_holds_to = None, 0.0
        if count == 1:
            self._decodes += sign
            self._context += sign * (start + 1)
        else:
            self._prefill += sign * count
            self._attention += sign * count * (start + count / 2)
        adapter = seq.request.adapter
        if adapter:
            self._rows += sign * rank * count
            self._count_adapter(adapter, sign)

    def _count_adapter(self, adapter: AdapterId, sign: int) -> None:
        self._adapters[adapter] = self._adapters.get(adapter, 0) + sign
        if not self._adapters[adapter]:
            del self._adapters[adapter]

    def _decode_fits(self, context: int, rank: int, adapter: AdapterId | None) -> bool:
        if self._limit <= 0 or self._is_empty:
            return self._is_empty
        if self._spent is None:
            self._spent = self._model.predict(self.features)
        prices = self._model.prices
        cost = prices.decode + prices.context * context + self._token_price()
        if adapter is not None:
            cost += prices.lora_row * rank + (0.0 if adapter in self._adapters else prices.adapter)
        self._spent += cost
        if self._spent > self._limit:
            self._limit = 0.0
        return self._limit > 0

    def _token_price(self) -> float:
        """Of one more token, because they are many: asked for again only when their number passes a knot."""
        tokens = self._prefill + self._decodes + 1
        if tokens > self._price_holds_to:
            self._price_of_token = self._model.token_price(tokens)
            self._price_holds_to = min((knot for knot in self._model.knots if knot >= tokens), default=inf)
        return self._price_of_token

    def _chunk(self, seq: Sequence, start: int, wanted: int, rank: int, share: float) -> int:
        """The largest chunk within the limit; interactive prompts get a small one in any case. Batch prompts take what
        there is, however little: waiting for a page's worth, none ever began beside chats that decode."""
        if self._limit == inf:
            return wanted
        limit = self._prompt_limit(seq) if self._lane is Lane.INTERACTIVE else self._limit
        limit = self._before + (limit - self._before) * share
        fits = min(wanted, self._model.chunk_that_fits(self.features, start, rank, limit))
        least = min(wanted, self._rules.min_chunk)
        if self._lane is Lane.INTERACTIVE:
            return max(fits, 0 if self._prefill else least)
        return max(fits, least * self._is_empty)

    @property
    def _one_decode(self) -> float:
        """Seconds of a step that does next to nothing: with an adapter, for where every step had one, which share of a
        step is the adapter's and which is the step's own nobody can tell, and the model may put all of it on either."""
        return self._model.predict(StepFeatures(decode_tokens=1.0, adapters=1.0))

    @property
    def _is_empty(self) -> bool:
        return not (self._prefill or self._decodes)

    def _prompt_limit(self, seq: Sequence) -> float:
        """Beside batch work more interactive sequences decode at a time, and a prompt's step is felt by all of them: it
        is cut to be no longer than their tail may be, if what every step costs remains a small part of it. A second
        prompt joins only within the tail: alone, it would rarely have met the first."""
        ledger = self._state.ledger
        if self._decodes and not self._prefill:
            self._limit = max(self._limit, self._late_limit())
        limit = max(self._limit, self._newcomer_limit(seq))
        if not (ledger.wants_batch and ledger.tail and self._decodes):
            return limit
        tail = self._rules.itl_stretch * ledger.tail
        return min(limit, tail if self._prefill else max(tail, self._rules.full_chunk * self._one_decode))

    def _newcomer_limit(self, seq: Sequence) -> float:
        """A tenant's only request does not wait for the decodes of tenants that crowd the lane: its prompt may make the
        step last `full_chunk` decodes."""
        longest = self._rules.full_chunk * self._one_decode
        if self._limit >= longest:
            return 0.0
        if self._shares is None:
            self._shares = LaneShares(self._state, Lane.INTERACTIVE)
        crowd = self._shares.crowding
        if seq.request.tenant in crowd or not crowd or not self._shares.is_only_request(seq):
            return 0.0
        left = _times_left(self._state, self._now, crowd)
        return min(min(left, default=inf) / self._margin, longest)

    def _late_limit(self) -> float:
        """Where decodes alone are late already, prompts may stretch their step a little, or they would get `min_chunk`
        tokens a step for as long as there are so many decodes."""
        alone = self._model.predict(self.features)
        return alone * self._rules.itl_stretch if alone * self._margin >= self._slack else 0.0

    def _batch_limit(self) -> float:
        rules, model = self._rules, self._model
        if self._is_empty:
            if self._is_probe and not model.has_seen(1):
                return 0.0
            return min(rules.yield_bound_s / self._margin, self._one_decode * rules.yield_stretch)
        promise = min(self._slack, rules.yield_bound_s) / self._margin
        ledger, alone = self._state.ledger, self._before
        if self._owes_batch():
            # Where the goal cannot be met even without batch work, keeping it off would serve nobody.
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
    def _is_probe(self) -> bool:
        """This step shows what little work takes by itself, which full ones cannot."""
        return self._state.counters.steps % self._rules.probe_every == 0

    def _owes_batch(self) -> bool:
        """Batch work got less than its floor, which is higher while its deadlines need it."""
        rules, ledger = self._rules, self._state.ledger
        floor = rules.promoted_share if ledger.need >= rules.promote_from else rules.batch_floor
        return ledger.batch_share < floor


def _slack(state: EngineState, now: float) -> float:
    """Seconds until the first interactive decode is late."""
    left = _times_left(state, now)
    if state.ledger.accounts.is_shared(Lane.INTERACTIVE, state.waiting.groups(Lane.INTERACTIVE), now):
        # Another tenant's next request should not sit out a step that one tenant's prompts fill.
        left.append(state.config.interactive.itl_s)
    return max(0.0, min(left)) if left else inf


def _times_left(state: EngineState, now: float, apart_from: Container[str] = ()) -> list[float]:
    """Seconds until each interactive decode is late, without those of some tenants. A pending token will have come just
    before this step begins, and the next one is due all of its ITL later."""
    lane, goal = Lane.INTERACTIVE, state.config.interactive.itl_s
    running = [seq for seq in state.running.values() if seq.lane is lane and not seq.waits_for_token]
    return [
        goal_of(seq.request.itl, goal) if seq.num_pending else seq.due - now
        for seq in running
        if seq.num_computed + 1 == len(seq.tokens) + seq.num_pending and seq.request.tenant not in apart_from
    ]
