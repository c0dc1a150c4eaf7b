"""The budget of a step: tokens for which the executor has memory, and time, within the limits of plan/limits.py."""

from __future__ import annotations

from math import ceil, inf

from engine.core.messages.features import StepFeatures
from engine.core.messages.requests import Lane
from engine.core.plan.limits import LaneTime, Limits, Work, owes_batch
from engine.core.predict.chunk_sizes import chunk_that_fits
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence

COPY_SHARE = 0.1
"""Maximum share of a step's duration by which copies that no request of the step waits for may extend it: those of
evicted prefixes and of pages for other engines."""


class StepBudget:
    """The tokens and the predicted time that one step has left; a `Planner` uses it for one plan. With `timed=False`,
    or while the step-time model is cold (has seen too few steps), only tokens limit the step.

    Attributes:
        tokens_left: tokens that the step may still have.
        alone: predicted seconds of the step without batch work, if it has interactive decodes; otherwise 0.
    """

    def __init__(self, state: EngineState, now: float, timed: bool) -> None:
        self._state = state
        self._model = state.ledger.model
        self._limits = Limits(state, now, timed)
        self._is_careful = timed and not self._model.is_warm
        """The model is cold, so that batch work starts with few tokens and takes more in each step."""
        self._work = Work(self._model)
        self._time = LaneTime(Lane.INTERACTIVE, self._model, self._work, 0.0, inf)
        self.tokens_left = state.config.token_budget
        self.alone = 0.0
        self._prompting: set[str] = set()
        """Requests whose prompts have chunks in the step, also chunks of one token, which cost what decodes do."""

    def enter(self, lane: Lane) -> None:
        """Begin to grant work of a lane in this step: set the lane's time limit, or its tokens while the step-time
        model is cold, given the work that was granted to higher lanes."""
        before = self._work.seconds
        limit = self._limits.of_lane(lane, self._work, before)
        self._time = LaneTime(lane, self._model, self._work, before, limit)
        if self._time.is_shared and self._work.decodes:
            self.alone = before
        if self._is_careful and lane is not Lane.INTERACTIVE:
            most = self._state.config.scheduling.min_chunk * (1 + self._model.num_steps)
            self.tokens_left = min(self.tokens_left, most)

    @property
    def features(self) -> StepFeatures:
        return self._work.features

    @property
    def is_open(self) -> bool:
        """Return whether the current lane may add more work: while tokens are left and, in the batch lane, its time
        limit is not used up. An empty step ignores the time limit, even if the predicted cost is too high, because only
        a measured step can correct that prediction."""
        has_time = self._time.lane is Lane.INTERACTIVE or self._time.limit > 0 or self._work.is_empty
        return self.tokens_left > 0 and has_time

    def in_turn(self, decodes: list[Sequence]) -> list[Sequence]:
        """Return which of the running `decodes` of the current lane get tokens, in order: all, unless decodes take
        turns (see plan/turns.py)."""
        turns = self._limits.turns
        if turns is None or turns.decodes is None or self._time.lane is not Lane.INTERACTIVE:
            return decodes
        return turns.decodes

    def grant(self, seq: Sequence, start: int, wanted: int) -> int:
        """Add to the step up to `wanted` tokens of a sequence from position `start` on, and return how many fit, which
        may be 0. One `wanted` token at a position above 0 is a decode; anything else is a prompt."""
        if wanted == 1 and start and (seq.pages or not self._joins_heavy(seq)):
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

    def _joins_heavy(self, seq: Sequence) -> bool:
        """Return whether a waiting interactive sequence is of a heavy party beside a light one. If it starts with its
        last token, as an answer to a cached prompt does, it is bounded like a prompt."""
        turns = self._limits.turns
        return turns is not None and self._time.lane is Lane.INTERACTIVE and seq.request.party in turns.heavy

    def _share_for(self, wanted: int) -> float:
        """Return the share of the remaining step, 0.5 or 1, that a prompt with `wanted` tokens left may take. A long
        prompt leaves half of each step to waiting requests of its lane, if any, so that these need not wait."""
        is_long = self._limits.is_timed and wanted > self._state.config.long_prompt
        return 0.5 if is_long and self._state.waiting.groups(self._time.lane) else 1.0

    def _grant_decode(self, seq: Sequence, context: int) -> int:
        """Add a decode if it fits, and return the number of its tokens: 1, or 0 if it does not. Only the token budget
        limits interactive decodes, apart from those that `in_turn` left out."""
        if self.tokens_left <= 0:
            return 0
        adapter_hash, rank = seq.request.adapter_hash, 0
        if adapter_hash:
            rank = self._state.adapters[adapter_hash].rank
        if self._time.bounds_decodes and not self._time.decode_fits(context, rank, adapter_hash):
            return 0
        self.tokens_left -= 1
        self._work.add_decode(context, rank, adapter_hash)
        return 1

    def add_proposals(self, seq: Sequence, start: int, count: int) -> None:
        """Charge to the step `count` proposed tokens (speculation) of a sequence, from position `start` on: each is
        computed like a decode. In a step with interactive decodes they are interactive, too."""
        before, rank = self._work.seconds, self._rank(seq)
        for place in range(start, start + count):
            self._add(seq, place, 1, rank, 1)
        if self.alone:
            self.alone += self._work.seconds - before

    @property
    def is_decoding(self) -> bool:
        """Return whether the step has no chunk of several prompt tokens so far, and all decodes, so that it may have
        proposals: a row that was left out surely yields a token, and a proposal only perhaps."""
        turns = self._limits.turns
        return not self._work.prefill and (turns is None or turns.decodes is None)

    @property
    def bound(self) -> float:
        """Predicted seconds to which proposals may extend the step: the slack if it has interactive work, otherwise
        what batch work alone may take."""
        is_interactive = self._time.is_shared or self._time.lane is Lane.INTERACTIVE
        return self._limits.promise if is_interactive else self._time.allowed

    def row_price(self, seq: Sequence, context: int, more: int) -> float:
        """Return the predicted seconds that one more decode of a sequence at a context length in tokens adds to the
        step, beyond the work granted so far and `more` tokens. The sequence's adapter is in the step already."""
        return self._model.row_price(self._work.decodes + more + 1, context, self._rank(seq))

    def take_back(self, seq: Sequence, start: int, num_tokens: int) -> None:
        """Undo the grant of `num_tokens` tokens from `start` on that will not be computed."""
        if num_tokens:
            self._prompting.discard(seq.id)
            self._add(seq, start, num_tokens, self._rank(seq), -1)

    def fits_pages(self, count: int, *, is_old: bool = False) -> bool:
        """Return whether this step may copy `count` more pages between host and device. Only copies for batch work in a
        step shared with interactive work are limited. They must fit into the time that batch work may add to the step,
        not counting its decodes, which would otherwise leave no time for copies. Batch work that has had less than its
        guaranteed share of device time (see `owes_batch`) may always copy. An adapter that a request has been waiting
        for too long (`is_old`) may be copied regardless of its size if nothing else is copied in this step."""
        time, moved = self._time, self._work.moved
        is_limited = count and time.is_shared and time.limit != inf
        if not is_limited or owes_batch(self._state) or (is_old and not moved):
            return True
        return time.before + self._model.prices.page * (moved + count) <= time.allowed

    def copies_beside(self, most: int) -> int:
        """Return how many pages, at most `most`, the step may copy to the host although none of its requests waits for
        them: as many as are predicted to extend it by at most `COPY_SHARE` of its duration. A step that computes
        nothing may copy all."""
        price = self._model.prices.page
        if not (self._limits.is_timed and price) or self._work.is_empty:
            return most
        return min(most, int(COPY_SHARE * self._work.seconds / price))

    def move_pages(self, count: int) -> None:
        """Charge copies of `count` pages between host and device to the step; a negative count takes a charge back."""
        self._work.moved += count
        self._time.predict_again()

    def _rank(self, seq: Sequence) -> int:
        adapter_hash = seq.request.adapter_hash
        return self._state.adapters[adapter_hash].rank if adapter_hash else 0

    def _add(self, seq: Sequence, start: int, count: int, rank: int, sign: int) -> None:
        self.tokens_left -= sign * count
        self._work.add(seq, start, count, rank, sign)
        self._time.predict_again()

    def _chunk(self, seq: Sequence, start: int, wanted: int, rank: int, share: float) -> int:
        """Return the number of prompt tokens, at most `wanted`, that keep the step's predicted time within the lane's
        limit. Without a limit, that is all of `wanted`.

        The first interactive prompt of a step, and a batch prompt in an empty step, get at least `min_chunk` tokens, or
        `wanted` if that is less; the former only as many as fit into `Limits.of_least_chunk`. Other batch prompts take
        what fits, however little: when they waited for room for a whole page, none ever started beside interactive
        decodes.

        Args:
            start: position of the first token.
            wanted: maximum number of tokens.
            rank: LoRA rank of the sequence's adapter; 0 means the base model.
            share: share, from 0 to 1, of the time left in the lane's turn that the prompt may take.
        """
        time = self._time
        if time.limit == inf:
            return wanted
        is_interactive = time.lane is Lane.INTERACTIVE
        limit = self._prompt_limit(seq) if is_interactive else time.limit
        fits = min(wanted, self._fitting(seq, start, rank, time.before + (limit - time.before) * share))
        least = min(wanted, self._state.config.scheduling.min_chunk)
        if not is_interactive:
            return max(fits, least * self._work.is_empty)
        if self._prompting or fits >= least:
            return fits
        return max(fits, min(least, self._fitting(seq, start, rank, self._limits.of_least_chunk)), 1)

    def _fitting(self, seq: Sequence, start: int, rank: int, limit: float) -> int:
        """Return how many tokens of a prompt keep the step's predicted seconds within `limit`."""
        return chunk_that_fits(self._model, self._work.features, start, rank, limit, scores=not seq.is_scored)

    def _prompt_limit(self, seq: Sequence) -> float:
        """Raise the lane's limit for the first prompt beside decodes that are late anyway, and return the limit of the
        prompt."""
        is_first = not self._prompting
        if is_first and self._work.decodes:
            self._time.limit = max(self._time.limit, self._limits.beside_late(self._work))
        return self._limits.of_prompt(seq, self._time.limit, self._work, is_first=is_first)
