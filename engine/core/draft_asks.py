"""Chooses for which sequences the draft model guesses tokens in a step, and how many for the next step to verify.

The draft model guesses where the next step is expected to yield more tokens per predicted second with the guesses than
without, drafting included. A sequence that it holds little of must first be worth computing its tokens. Where proposals
of other kinds are accepted more often, and wherever these stay silent (see proposals.py), nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from math import ceil
from typing import NamedTuple

from engine.core.drafting import DRAFT, FIRST_ACCEPTANCE, DraftPrices, work_of
from engine.core.page_budget import PageBudget
from engine.core.proposals import MOST_DECODES, speculating
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.step import DraftAsk, ScheduledChunk
from engine.core.step_budget import StepBudget

MOST_DRAFTED = 8
"""Maximum number of tokens that are guessed for a sequence in a step: of nine guesses in a row, even a model that is
right nine times of ten gets the last one right four times of ten."""
SHORT = 4
"""Number of known tokens up to which it goes without saying that the draft model computes them for its guesses. After a
step it lacks one or two."""
MOST_CAUGHT_UP = 32
"""Maximum number of tokens that the draft model computes in a step of sequences of which it lacks more: about as many
as make the pass take twice as long."""
BEGIN_AFTER = 16
"""Number of tokens of an answer after which the draft model begins to compute its known tokens: by then it shows
whether other proposals, which cost nothing, are right, and the shortest answers have ended."""
FIRST_SHARE = 0.25
"""What a pass or a row of the draft model is taken to cost until it is measured, as a share of what the step or a
decode costs."""
PROBE_EVERY, PROBE_STEPS, PROBE_DRAFTED = 1024, 8, 2
"""In `PROBE_STEPS` of `PROBE_EVERY` steps, `PROBE_DRAFTED` tokens are guessed for one sequence, or known ones computed,
although they are predicted to cost too much: prices measured in a bad moment would otherwise stay for ever."""


class Candidate(NamedTuple):
    """A sequence that the draft model may guess for.

    Attributes:
        length: maximum number of its known tokens after the step.
        missing: maximum number of them that the draft model will have to compute.
        most: maximum number of tokens to guess.
        other: acceptance of what is proposed in any case.
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
        """Return the expected number of tokens that guess number `place` yields, which is 0 beyond `most`."""
        return self.seq.drafting.acceptance**place - self.other**place if place <= self.most else 0.0


class Wanted(NamedTuple):
    """What the draft model shall do for a sequence: compute at most `most` known tokens, and guess the next ones."""

    candidate: Candidate
    most: int
    guesses: int


class Choice(NamedTuple):
    """How many tokens are guessed for each sequence, and the expected tokens and the seconds of the next step, drafting
    included."""

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
    """Return what the draft model shall do after a step with these chunks, and its predicted seconds. `alone` is the
    predicted seconds of the step without proposals, which the next step is taken to resemble; `budget` bounds the time,
    and `pages` gives pages."""
    if not (0 < len(chunks) <= MOST_DECODES and budget.is_decoding):
        return (), 0.0
    prices, proposed = _prices(state, alone), sum(len(chunk.proposals) for chunk in chunks.values())
    room = budget.bound - state.ledger.model.predict(budget.features)
    candidates = sorted(_candidates(state, chunks), key=lambda one: one.missing)
    wanted = _worthwhile(state, candidates, Chooser(budget, prices, len(chunks), alone, proposed), room)
    asks = tuple(ask for one in wanted if (ask := _ask(state, pages, one)) is not None)
    return asks, prices.seconds(work_of([(ask.most, ask.guesses) for ask in asks]))


def _worthwhile(state: EngineState, candidates: Items[Candidate], chooser: Chooser, room: float) -> list[Wanted]:
    """Return what the draft model shall do in `room` seconds: nothing before the step-time model is warm."""
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
    return state.drafts.costs.prices(first) if state.ledger.model.is_warm else first


def _candidates(state: EngineState, chunks: Mapping[str, ScheduledChunk]) -> Iterator[Candidate]:
    """Yield the sequences that may have proposals, unless what was proposed for them in this step is more likely to be
    right than what the draft model guesses. The step may accept all of its proposals or none. Other proposals than the
    draft model's, which cost nothing, are taken to be made for the next step, too."""
    for seq, _, left in speculating(state, chunks):
        chunk, drafting = chunks[seq.id], seq.drafting
        is_drafted = chunk.sources[-1:] == (DRAFT,)
        length, most = len(seq.tokens) + 1 + len(chunk.proposals), left - len(chunk.proposals) - 2
        other = seq.acceptance if chunk.sources and not is_drafted else 0.0
        if most < 1 or other >= drafting.acceptance:
            continue
        held = drafting.num_held if is_drafted else min(drafting.num_held, len(seq.tokens))
        yield Candidate(seq, length, max(2, length - held), min(most, MOST_DRAFTED), other)


class Chooser(NamedTuple):
    """Chooses numbers of guesses for a step like one with `tokens` decodes that takes `alone` seconds, at the given
    prices. `budget` is that of the present step, which has `proposed` proposals."""

    budget: StepBudget
    prices: DraftPrices
    tokens: int
    alone: float
    proposed: int

    def choose(self, candidates: Items[Candidate], room: float) -> Choice:
        """Guess one token more of those sequences for which the row pays, pass by pass within `room` seconds, and
        choose the number of passes after which the most tokens per second are expected."""
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
        """Return the seconds that guesses for one sequence alone would save until its end, which is `expected` tokens
        away, if the draft model held it."""
        choice = self.choose([one], room)
        more, cost = choice.tokens - self.tokens, choice.seconds - self.alone
        saved = more * self.alone / self.tokens - cost
        return saved * expected / (1 + more)

    def _row(self, seq: Sequence, number: int) -> float:
        """Return the seconds of a row of the draft model, and of verifying the guess as number `number` of a step."""
        return self.prices.row + self.budget.row_price(seq, len(seq.tokens), number - self.proposed)


def _behind(candidates: Items[Candidate], chooser: Chooser, room: float) -> Iterator[Wanted]:
    """Yield sequences of which the draft model lacks many tokens, and should compute as many as fit: not those whose
    other proposals have been right more often than not of late."""
    left = _most_caught_up(chooser, room)
    for one in candidates:
        is_begun = one.seq.num_generated >= BEGIN_AFTER and one.seq.acceptance <= FIRST_ACCEPTANCE
        if one.is_short or left <= 0 or not is_begun:
            continue
        saved = chooser.saved(one, _expected(one.seq), room)
        if saved > chooser.prices.seconds((ceil(one.missing / MOST_CAUGHT_UP), one.missing)):
            most = min(one.missing, left)
            left, room = left - most, room - chooser.prices.row * most
            counts = chooser.choose([one], room).counts if most == one.missing else {}
            yield Wanted(one, most, counts.get(one.seq, 0))


def _most_caught_up(chooser: Chooser, room: float) -> int:
    """Return how many tokens of one pass fit into `room` seconds, at most `MOST_CAUGHT_UP`."""
    row, seconds = chooser.prices.row, room - chooser.prices.one_pass
    return int(max(0.0, min(MOST_CAUGHT_UP, seconds / row if row else MOST_CAUGHT_UP)))


def _expected(seq: Sequence) -> float:
    """Return the expected number of tokens until a sequence ends, without those that other proposals will yield if they
    yield the same share as before."""
    others = sum(one.accepted for one in seq.tally.counts if one.proposer != DRAFT)
    return max(0.0, seq.expected_output - seq.num_generated) * (1 - others / max(1, seq.num_generated))


def _ask(state: EngineState, pages: PageBudget, wanted: Wanted) -> DraftAsk | None:
    """Return the ask for a sequence, with pages for it; None if these are not at hand. Guesses follow only where all
    known tokens are computed."""
    one, most = wanted.candidate, wanted.most
    count = wanted.guesses if most >= one.missing else 0
    held = one.length - one.missing + most + max(0, count - 1)
    missing = -(-held // state.config.draft_block) - len(one.seq.drafting.pages)
    new = None if one.seq.id in pages.undrafted else pages.take_for_draft(max(0, missing))
    return None if new is None else DraftAsk(one.seq.id, most, count, new, one.seq.request.adapter_hash)
