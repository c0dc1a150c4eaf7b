"""Speculation: chooses how many proposed tokens a step computes, and learns how many are accepted.

A decoding sequence may have proposals after its newest token: those that its grammar forces, then what its proposer or
the draft model guesses. The step computes them like further decodes and samples from every row; the tokens up to the
first that differs from its proposal are kept (see `verified`). What is kept equals what single steps would have
sampled, also of forced tokens, because a model may choose other tokens for the same text. Sequences, pages, prefix keys
and counts therefore know accepted tokens only, and later steps overwrite the KV of refused ones.

A step gets a proposal if it raises the tokens that the step is expected to yield per predicted second: small steps
mostly wait for weights, so that more rows are almost free, and large ones do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Listed
from itertools import repeat

from engine.core.config import CoreConfig
from engine.core.messages.requests import Request
from engine.core.messages.step import SampledToken, ScheduledChunk, StepPlan, StepResult
from engine.core.plan.page_budget import PageBudget
from engine.core.plan.step_budget import StepBudget
from engine.core.speculate.drafting import DRAFT, FIRST_ACCEPTANCE, FIRST_DRAFTED, updated
from engine.core.speculate.prediction import Prediction
from engine.core.speculate.proposer import AnswerMemories, Guess, PromptLookup, Proposer
from engine.core.state.engine_state import EngineState
from engine.core.state.ledger import StepUnderWay
from engine.core.state.sequence import Sequence

MOST_DECODES = 16
"""Number of sequences beyond which a step has no proposals. With 25 rows a CPU takes as long for arithmetic as for
reading weights, so that a fuller batch would pay for each further row, and for looking for proposals."""
MOST_PROPOSED = 16
"""Maximum number of proposals of a sequence in a step: one page, and few enough to be found in microseconds."""
GRAMMAR = "grammar"
"""Name of the grammar as a proposer, in counts of proposals."""
RECOVERY, DRAFT_RECOVERY = 1 / 256, 1 / 1024
"""In each step without proposals of its kind, a sequence's acceptance (the moving average of accepted proposals)
returns by this share of the distance to its initial value, so that a sequence whose proposals were refused is tried
again. The share is smaller for proposals of the draft model, which then has to compute all tokens that it has
missed."""
PROBE_EVERY, PROBE_ROWS = 64, 4
"""In one of `PROBE_EVERY` steps, `PROBE_ROWS` proposals are made whatever they are predicted to cost: from steps of one
size only, the model cannot tell the price of a row from the constant."""
INDEXED = 512
"""Maximum number of a sequence's tokens that its proposer takes note of in a step: about 0.2 ms, and more than the
prompt tokens of most steps."""


def proposer_for(config: CoreConfig, request: Request, memories: AnswerMemories) -> Proposer | None:
    """Return the proposer of a new request; None means that the request gets no proposals: without speculation, with
    penalties, whose effect on a row depends on the tokens of the rows before it in the same step, and for suspects of a
    crash."""
    params = request.params
    has_one_row = params.has_penalties or request.pooling is not None
    speculates = config.speculation and params.speculates
    if not speculates or has_one_row or request.suspect or params.max_tokens < 2:
        return None
    lookup = PromptLookup(len(request.prompt_ids), memories.of(request))
    return Prediction(request.prompt_ids, request.prediction, lookup) if request.prediction else lookup


def add_proposals(state: EngineState, chunks: dict[str, ScheduledChunk], budget: StepBudget, pages: PageBudget) -> None:
    """Add proposed tokens (speculation), in place, to the `chunks` of a plan (by request id), if they are all decodes
    and at most `MOST_DECODES`, as many as are predicted to pay (see `_worthwhile`). In a step with interactive work,
    batch sequences get none, because their proposals would delay that work. The proposals are counted in `budget`, and
    take only free pages of `pages`."""
    if not 0 < len(chunks) <= MOST_DECODES or not budget.is_decoding:
        return
    guesses = dict(_guesses(state, chunks))
    for seq, count in _worthwhile(state, guesses, budget, len(chunks)).items():
        chunk, size = chunks[seq.id], state.config.block_size
        held = len(seq.pages) + len(chunk.new_pages)
        more = pages.take_free(state.config.pages_for(chunk.start + 1 + count) - held, seq.lane)
        count = min(count, (held + len(more)) * size - chunk.start - 1)
        budget.add_proposals(seq, chunk.start + 1, count)
        chunks[seq.id] = chunk._replace(
            num_tokens=1 + count,
            new_pages=(*chunk.new_pages, *more),
            proposals=guesses[seq].tokens[:count],
            sources=_sources(seq, guesses[seq], count),
        )


def _sources(seq: Sequence, guess: Guess, count: int) -> tuple[str, ...]:
    forced = min(len(seq.speculation.forced), count)
    return (GRAMMAR,) * forced + (guess.proposer,) * (count - forced)


def _guesses(state: EngineState, chunks: Mapping[str, ScheduledChunk]) -> Iterator[tuple[Sequence, Guess]]:
    """Yield the sequences that may have proposals in a step, with their proposals. These stop one short of the last
    token that the request's limit and the context allow, because that one is sampled."""
    for seq, proposer, left in speculating(state, chunks):
        if left > 1 and (guess := _guess(seq, proposer, min(left - 1, MOST_PROPOSED))).tokens:
            yield seq, guess


def speculating(state: EngineState, chunks: Mapping[str, ScheduledChunk]) -> Iterator[tuple[Sequence, Proposer, int]]:
    """Yield the sequences of a decoding step that may have proposals, which are running ones of the most urgent lane in
    the step, with their proposers and the numbers of tokens that `max_tokens` and the context still allow."""
    owners = [state.sequences[request_id] for request_id in chunks]
    lane = min(seq.lane for seq in owners)
    for seq in owners:
        has_token = seq.id in state.running and chunks[seq.id].samples and seq.is_scored
        if seq.speculation.proposer is not None and seq.lane is lane and has_token and not seq.masks_slowly:
            left = min(seq.request.params.max_tokens - seq.num_generated, state.config.max_model_len - len(seq.tokens))
            yield seq, seq.speculation.proposer, left


def _guess(seq: Sequence, proposer: Proposer, most: int) -> Guess:
    """Return at most `most` proposals for a sequence: tokens that its grammar forces, then those of `proposer` or of
    the draft model."""
    forced = seq.speculation.forced[:most]
    known = [*seq.tokens, *forced] if forced else seq.tokens
    guess = _better(seq, proposer.propose(known, most - len(forced)), most)
    return guess._replace(tokens=(*forced, *guess.tokens)) if forced else guess


def _better(seq: Sequence, guess: Guess, most: int) -> Guess:
    """Return the better guess of the tokens after those that the grammar forces: `guess`, or the draft model's if its
    guesses are accepted more often or `guess` is empty. If `guess` begins with the draft model's guess, it is the
    better one, because it may go on further."""
    drafting, forced = seq.speculation.drafting, len(seq.speculation.forced)
    drafted = drafting.tokens[forced:most]
    if not drafted or drafting.tokens[:forced] != seq.speculation.forced or guess.tokens[: len(drafted)] == drafted:
        return guess
    return Guess(drafted, DRAFT) if drafting.acceptance > seq.speculation.acceptance or not guess.tokens else guess


def _worthwhile(
    state: EngineState, guesses: Mapping[Sequence, Guess], budget: StepBudget, tokens: float
) -> dict[Sequence, int]:
    """Return how many proposals each sequence gets. The likeliest are taken first, as long as each raises the expected
    `tokens` of the step per predicted second, and the step stays within the budget's tokens and bound. In one of
    `PROBE_EVERY` steps, the first `PROBE_ROWS` proposals need not pay. There are none before the step-time model is
    warm."""
    model = state.ledger.model
    if not model.is_warm:
        return {}
    seconds, bound = model.predict(budget.features), budget.bound
    free = PROBE_ROWS if state.counters.steps % PROBE_EVERY == 0 else 0
    likely = [(gain, seq) for seq, guess in guesses.items() for gain in _gains(seq, guess)]
    likely.sort(key=lambda one: one[0], reverse=True)
    counts: dict[Sequence, int] = {}
    for number, (gain, seq) in enumerate(likely[: max(0, budget.tokens_left)]):
        price = budget.row_price(seq, len(seq.tokens), number)
        pays = gain * seconds > tokens * price
        if not (pays or number < free) or seconds + price > bound:
            break
        tokens, seconds = tokens + gain, seconds + price
        counts[seq] = counts.get(seq, 0) + 1
    return counts


def _gains(seq: Sequence, guess: Guess) -> Iterator[float]:
    """Yield, for each proposal in order, the probability that it and all those before it are accepted."""
    forced = min(len(seq.speculation.forced), len(guess.tokens))
    acceptance = (seq.speculation.drafting if guess.proposer == DRAFT else seq.speculation).acceptance
    yield from repeat(1.0, forced)
    yield from (acceptance**place for place in range(1, 1 + len(guess.tokens) - forced))


def count_refused(plan: StepPlan, result: StepResult) -> dict[str, int]:
    """Return the number of refused proposals, by request id, of each request that has proposals in a plan. If the
    request failed, the number is one too high, because no token was sampled after the accepted proposals."""
    refused = {chunk.request_id: 1 + len(chunk.proposals) for chunk in plan.chunks if chunk.proposals}
    if refused:
        for sample in result.sampled:
            if sample.request_id in refused:
                refused[sample.request_id] -= 1
    return refused


def count_proposed(state: EngineState, step: StepUnderWay) -> None:
    """Count the proposed tokens of a step whose result has come, in the tallies of its requests and in the engine's
    counters, before the step's tokens are appended."""
    for chunk in step.plan.chunks:
        if chunk.proposals:
            step.sequences[chunk.request_id].speculation.tally.propose(chunk.sources)
            state.counters.proposed_tokens += len(chunk.proposals)


def note_proposals(state: EngineState, step: StepUnderWay, refused: Mapping[str, int], result: StepResult) -> None:
    """Learn from a step whose tokens have been appended: update the acceptances of its sequences, note which tokens
    grammars force to follow, show the proposers the new tokens, and store the draft model's new guesses. `refused` is
    what `count_refused` returned for `result`."""
    forced, drafted = dict(result.forced), {one.request_id: one for one in result.drafted}
    for chunk in step.plan.chunks:
        seq = step.sequences[chunk.request_id]
        if seq.speculation.proposer is None:
            continue
        if chunk.is_decode:
            _note_accepted(seq, chunk.sources, refused.get(chunk.request_id, 0))
        seq.speculation.forced = forced.get(seq.id, ())
        seq.speculation.proposer.learn(seq.tokens, INDEXED)
        if state.config.draft_block:
            seq.speculation.drafting.follow(seq.tokens)
        if seq.id in drafted and state.running.get(seq.id) is seq:
            seq.speculation.drafting.take(drafted[seq.id])
    if result.drafted:
        state.learned.drafts.costs.observe(result.drafted, result.draft_seconds)


def _note_accepted(seq: Sequence, sources: tuple[str, ...], refused: int) -> None:
    """Update the acceptances of a sequence after a step with proposals from `sources`, of which the last `refused` were
    refused: one more than there are if it failed. Tokens that the grammar forced do not count, because they
    say nothing about a proposer."""
    guessed, drafting = len(sources) - sources.count(GRAMMAR), seq.speculation.drafting
    if sources[-1:] == (DRAFT,):
        drafting.is_tried, drafting.acceptance = True, _judged(drafting.acceptance, guessed, refused)
        seq.speculation.acceptance += RECOVERY * (FIRST_ACCEPTANCE - seq.speculation.acceptance)
        return
    drafting.acceptance += DRAFT_RECOVERY * (FIRST_DRAFTED - drafting.acceptance)
    if sources:
        seq.speculation.acceptance = _judged(seq.speculation.acceptance, guessed, refused)
    else:
        seq.speculation.acceptance += RECOVERY * (FIRST_ACCEPTANCE - seq.speculation.acceptance)


def _judged(acceptance: float, guessed: int, refused: int) -> float:
    if not guessed or refused > guessed:
        return acceptance
    return updated(acceptance, guessed - refused, is_refused=refused > 0)


def verified(sampled: Iterable[SampledToken], proposals: Mapping[str, Listed[int]]) -> list[SampledToken]:
    """Return each request's tokens, in order, up to the first one that differs from the proposal at its place.

    An executor samples from every row of a chunk as if the proposals before it were right. A draw depends on the row's
    logits, the request's seed and the position only, so that a kept token is the one that would have been sampled
    without proposals, whatever the temperature. Comparing tokens is therefore enough, and no rejection sampling is
    needed.

    Args:
        sampled: the tokens of the step's rows. A request's rows are in the order of their positions.
        proposals: request id -> proposals. A request without an entry has one row.
    """
    left = {request_id: list(reversed(tokens)) for request_id, tokens in proposals.items()}
    refused: set[str] = set()
    kept = []
    for one in sampled:
        if one.request_id in refused:
            continue
        kept.append(one)
        rest = left.get(one.request_id)
        if not rest or rest.pop() != one.token:
            refused.add(one.request_id)
    return kept
