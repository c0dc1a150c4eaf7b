"""Chooses for which sequences the draft model guesses tokens in a step, and how many for the next step to verify.

The draft model guesses for a sequence if the next step is then expected to yield more tokens per predicted second,
drafting included. If the draft model lacks many of the sequence's known tokens, computing these must pay off as well.
Nothing is drafted for a sequence whose other proposals are accepted more often, nor in steps that get no proposals of
any kind (see plan/proposals.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from math import ceil
from typing import NamedTuple

from engine.core.messages.step import DraftAsk, ScheduledChunk
from engine.core.plan.page_budget import PageBudget
from engine.core.plan.proposals import MOST_DECODES, speculating
from engine.core.plan.step_budget import StepBudget
from engine.core.speculate.drafting import DRAFT, FIRST_ACCEPTANCE, DraftPrices, work_of
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence

MOST_DRAFTED = 8
"""Maximum number of tokens that are guessed for a sequence in a step: of nine guesses in a row, even a model that is
right nine times of ten gets the last one right four times of ten."""
SHORT = 4
"""A sequence of which the draft model lacks at most this many known tokens is up to date: they are computed together
with the guesses, whatever they cost. After a step it lacks one or two."""
MOST_CAUGHT_UP = 32
"""Maximum number of known tokens that the draft model computes in a step for sequences of which it lacks more than
`SHORT`: about as many as make the pass take twice as long."""
BEGIN_AFTER = 16
"""Length of an answer, in tokens, from which on the draft model may catch up with a sequence of which it lacks more
than `SHORT` tokens: by then it shows whether other proposals, which cost nothing, are right, and the shortest answers
have ended."""
FIRST_SHARE = 0.25
"""Cost that is assumed until it is measured: of a pass of the draft model as a share of a step's seconds, and of a row
as a share of a decode's."""
PROBE_EVERY, PROBE_STEPS, PROBE_DRAFTED = 1024, 8, 2
"""If drafting is predicted to pay for no sequence, the draft model still works for one of them, with at most
`PROBE_DRAFTED` guesses, in `PROBE_STEPS` of `PROBE_EVERY` steps: prices measured in a bad moment would otherwise stay
for ever."""


class Candidate(NamedTuple):
    """A sequence for which the draft model may guess tokens.

    Attributes:
        length: maximum number of its known tokens after the step.
        missing: maximum number of them that the draft model will have to compute.
        most: maximum number of tokens to guess.
        other: acceptance of another proposer, which proposes in any case; 0 if it proposes nothing.
    """

    seq: Sequence
    length: int
    missing: int
    most: int
    other: float

    @property
    def is_short(self) -> bool:
        return self.missing <= SHORT

    def gain(self, place: int) -> float:
        """Return by how many tokens the draft model's guess number `place` for this sequence, counted from 1, raises
        the expected yield of the next step, beyond what the other proposer's would yield; 0 beyond `most`."""
        return self.seq.speculation.drafting.acceptance**place - self.other**place if place <= self.most else 0.0


class Wanted(NamedTuple):
    """What the draft model shall do for a sequence: compute at most `most` known tokens, and guess the next ones."""

    candidate: Candidate
    most: int
    guesses: int


class Choice(NamedTuple):
    """A decision of how many tokens the draft model guesses for each sequence (`counts`), with the expected tokens and
    the predicted seconds of the next step with these guesses, drafting included."""

    counts: dict[Sequence, int]
    tokens: float
    seconds: float


def ask_drafts(
    state: EngineState,
    chunks: Mapping[str, ScheduledChunk],
    budget: StepBudget,
    pages: PageBudget,
    alone: float,
) -> tuple[tuple[DraftAsk, ...], float]:
    """Return the instructions to the draft model for its work after a step with these chunks, and the predicted seconds
    of that work. `alone` is the predicted seconds of the step without proposals, and the next step is assumed to be
    like it. `budget` bounds the time, and `pages` provides pages for the draft model's KV."""
    if not (0 < len(chunks) <= MOST_DECODES and budget.is_decoding):
        return (), 0.0
    prices, proposed = _prices(state, alone), sum(len(chunk.proposals) for chunk in chunks.values())
    room = budget.bound - state.ledger.model.predict(budget.features)
    candidates = sorted(_candidates(state, chunks), key=lambda one: one.missing)
    wanted = _worthwhile(state, candidates, Chooser(budget, prices, len(chunks), alone, proposed), room)
    asks = tuple(ask for one in wanted if (ask := _ask(state, pages, one)) is not None)
    return asks, prices.seconds(work_of([(ask.most, ask.guesses) for ask in asks]))


def _worthwhile(state: EngineState, candidates: Items[Candidate], chooser: Chooser, room: float) -> list[Wanted]:
    """Return what the draft model shall do within `room` seconds: guess for sequences of which it lacks at most `SHORT`
    tokens, where that pays, then catch up with others or, if nothing pays, perhaps probe (see `PROBE_EVERY`). Empty
    before the step-time model is warm."""
    if not (candidates and state.ledger.model.is_warm):
        return []
    counts = chooser.choose([one for one in candidates if one.is_short], room).counts
    wanted = [Wanted(one, one.missing, counts[one.seq]) for one in candidates if one.seq in counts]
    spent = chooser.prices.seconds(work_of([(one.most, one.guesses) for one in wanted]))
    wanted += _behind(candidates, chooser, room - spent)
    if wanted or state.counters.steps % PROBE_EVERY >= PROBE_STEPS:
        return wanted
    most = min(candidates[0].missing, _most_caught_up(chooser, room))
    return [Wanted(candidates[0], most, min(PROBE_DRAFTED, candidates[0].most))] if most > 0 else []


def _prices(state: EngineState, alone: float) -> DraftPrices:
    prices = state.ledger.model.prices
    first = DraftPrices(FIRST_SHARE * alone, FIRST_SHARE * prices.decode)
    return state.learned.drafts.costs.prices(first) if state.ledger.model.is_warm else first


def _candidates(state: EngineState, chunks: Mapping[str, ScheduledChunk]) -> Iterator[Candidate]:
    """Yield the sequences that the draft model may guess for: those that may have proposals, except where another
    proposer has proposed for this step and is accepted at least as often as the draft model. The numbers of tokens hold
    whether the step accepts all of its proposals or none. Another proposer, which costs nothing, is assumed to propose
    for the next step, too."""
    for seq, _, left in speculating(state, chunks):
        chunk, drafting = chunks[seq.id], seq.speculation.drafting
        is_drafted = chunk.sources[-1:] == (DRAFT,)
        length, most = len(seq.tokens) + 1 + len(chunk.proposals), left - len(chunk.proposals) - 2
        other = seq.speculation.acceptance if chunk.sources and not is_drafted else 0.0
        if most < 1 or other >= drafting.acceptance:
            continue
        held = drafting.num_held if is_drafted else min(drafting.num_held, len(seq.tokens))
        yield Candidate(seq, length, max(2, length - held), min(most, MOST_DRAFTED), other)


class Chooser(NamedTuple):
    """Chooses how many tokens the draft model guesses for each sequence. The next step is assumed to have `tokens`
    decodes and to take `alone` seconds without guesses; `prices` are those of drafting. `budget` is that of the present
    step, which has `proposed` proposals."""

    budget: StepBudget
    prices: DraftPrices
    tokens: int
    alone: float
    proposed: int

    def choose(self, candidates: Items[Candidate], room: float) -> Choice:
        """Return the numbers of guesses for the `candidates` with which the next step yields the most expected tokens
        per second. Each further pass of the draft model within `room` seconds adds one guess for every sequence whose
        guess is worth the row that computes it."""
        counts, tokens, seconds, number = dict[Sequence, int](), float(self.tokens), self.alone, 0
        best = Choice({}, tokens, seconds)
        for depth in range(1, MOST_DRAFTED + 1):
            chosen, seconds = 0, seconds + self.prices.one_pass
            for one in candidates:
                more, price = one.gain(depth), self._row(one.seq, number)
                if counts.get(one.seq, 0) == depth - 1 and more * self.alone > self.tokens * price:
                    tokens, seconds, number, chosen = tokens + more, seconds + price, number + 1, chosen + 1
                    counts[one.seq] = depth
            room -= self.prices.one_pass + self.prices.row * chosen
            if not chosen or room < 0:
                break
            if tokens * best.seconds > best.tokens * seconds:
                best = Choice(dict(counts), tokens, seconds)
        return best

    def saved(self, one: Candidate, expected: float, room: float) -> float:
        """Return the seconds that guesses for one sequence alone would save in all until it ends, `expected` tokens
        from now, if the draft model were up to date with it."""
        choice = self.choose([one], room)
        more, cost = choice.tokens - self.tokens, choice.seconds - self.alone
        saved = more * self.alone / self.tokens - cost
        return saved * expected / (1 + more)

    def _row(self, seq: Sequence, number: int) -> float:
        """Return the predicted seconds that one guess for a sequence costs: a row of the draft model, and a row of the
        next step that verifies it together with `number` other guesses."""
        return self.prices.row + self.budget.row_price(seq, len(seq.tokens), number - self.proposed)


def _behind(candidates: Items[Candidate], chooser: Chooser, room: float) -> Iterator[Wanted]:
    """Yield, for sequences whose KV the draft model lacks for more than `SHORT` tokens, how many it should compute
    within `room` seconds, if that is predicted to save more than it costs. It also guesses for a sequence of which it
    then has all known tokens. Answers shorter than `BEGIN_AFTER`, and sequences whose other proposals are mostly
    accepted, are skipped."""
    left = _most_caught_up(chooser, room)
    for one in candidates:
        is_begun = one.seq.num_generated >= BEGIN_AFTER and one.seq.speculation.acceptance <= FIRST_ACCEPTANCE
        if one.is_short or left <= 0 or not is_begun:
            continue
        saved = chooser.saved(one, _expected(one.seq), room)
        if saved > chooser.prices.seconds((ceil(one.missing / MOST_CAUGHT_UP), one.missing)):
            most = min(one.missing, left)
            left, room = left - most, room - chooser.prices.row * most
            counts = chooser.choose([one], room).counts if most == one.missing else {}
            yield Wanted(one, most, counts.get(one.seq, 0))


def _most_caught_up(chooser: Chooser, room: float) -> int:
    """Return how many known tokens one pass of the draft model can compute in `room` seconds, at most
    `MOST_CAUGHT_UP`."""
    row, seconds = chooser.prices.row, room - chooser.prices.one_pass
    return int(max(0.0, min(MOST_CAUGHT_UP, seconds / row if row else MOST_CAUGHT_UP)))


def _expected(seq: Sequence) -> float:
    """Return the expected number of tokens that a sequence will still generate, less the share that other proposers are
    expected to contribute, which is their share of the answer so far."""
    others = sum(one.accepted for one in seq.speculation.tally.counts if one.proposer != DRAFT)
    return max(0.0, seq.forecast.output - seq.num_generated) * (1 - others / max(1, seq.num_generated))


def _ask(state: EngineState, pages: PageBudget, wanted: Wanted) -> DraftAsk | None:
    """Return the instruction to the draft model for a sequence, with pages for its KV. None means that no pages are
    available. It asks for guesses only if it also makes the draft model compute all missing known tokens."""
    one, most = wanted.candidate, wanted.most
    count = wanted.guesses if most >= one.missing else 0
    held = one.length - one.missing + most + max(0, count - 1)
    missing = -(-held // state.config.draft_block) - len(one.seq.speculation.drafting.pages)
    new = None if one.seq.id in pages.undrafted else pages.take_for_draft(max(0, missing))
    return None if new is None else DraftAsk(one.seq.id, most, count, new, one.seq.request.adapter_hash)
