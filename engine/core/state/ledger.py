"""Accounting of device time: durations of steps, charges to tenants, cost of tokens, and attainment of latency goals.
These are all measurements of the running engine that later decisions use; `commit/step.py` and `commit/apply.py` update
them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass

from engine.core.config import CoreConfig
from engine.core.fairness.accounts import Accounts
from engine.core.memory.adapters import Adapter
from engine.core.messages.requests import AdapterHash, Lane
from engine.core.messages.step import ScheduledChunk, StepPlan, StepResult
from engine.core.predict.step_time import Prices, StepTimeModel
from engine.core.state.measures import BatchTime, Courtesy, PromptTime, Ratio, TokenPrices
from engine.core.state.sequence import Sequence

TURNS_GOALS = 2.0
"""ITL goals for which a token counts when parties take turns (`turns_window`): long enough for some steps, and so short
that a party that had many tokens before the others took turns with it waits for tenths of a second only."""

Charge = tuple[Sequence, int, bool, float, float]
"""A sequence's part of the device time of one step, for a chunk or for the copy of its adapter (with 0 tokens): the
sequence, the chunk's tokens without refused proposals, whether it is computed like a decode, the weight (see
`chunk_weight`; the chunk's tokens while the model is cold), and the part of the weight that is billed: without tokens
that are computed again after a preemption. It is a plain tuple because a step has hundreds."""


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """A committed step whose result has not been absorbed into the engine's state yet. Where steps are planned ahead,
    its requests may end, its sequences may be preempted and new requests may reuse their ids before the result arrives.
    The data needed to interpret the result is therefore recorded when the plan is committed.

    Attributes:
        plan: the committed plan.
        owners: the sequence of each of the plan's chunks.
        sequences: sequences of the plan's chunks and loads, by request id. A sequence that ends before the result gets
            no token from it, but its tenant is still charged for the device time.
        unpaid: for each chunk, the number of its tokens that are computed for the first time.
    """

    plan: StepPlan
    owners: tuple[Sequence, ...]
    sequences: Mapping[str, Sequence]
    unpaid: tuple[int, ...]

    @property
    def awaiting(self) -> Iterator[Sequence]:
        """Sequences whose next token this step samples, including those that have ended since."""
        return (seq for chunk, seq in zip(self.plan.chunks, self.owners, strict=True) if chunk.samples)


def follow(plan: StepPlan, live: Mapping[str, Sequence]) -> StepUnderWay:
    """Return the `StepUnderWay` of a plan that is being committed, before anything of it is computed. `live` has the
    sequences of all live requests, by request id."""
    owners = [live[chunk.request_id] for chunk in plan.chunks]
    unpaid = [
        _unpaid(chunk, seq) if seq.preempted.num_paid else chunk.num_tokens
        for chunk, seq in zip(plan.chunks, owners, strict=True)
    ]
    sequences = {seq.id: seq for seq in (*owners, *(live[load.request_id] for load in plan.adapters.loads))}
    return StepUnderWay(plan, tuple(owners), sequences, tuple(unpaid))


def _unpaid(chunk: ScheduledChunk, seq: Sequence) -> int:
    return min(chunk.num_tokens, max(0, chunk.start + chunk.num_tokens - seq.preempted.num_paid))


class Ledger:
    """Measurements of a running engine that decide how later steps are planned. An engine state has one.

    Attributes:
        model: predicts the duration of a step.
        accounts: service that each tenant has received.
        turns_window: seconds for which tokens count in `Account.lately`.
        busy: device seconds by lane.
        ttft, itl: share of first and of further tokens that were in time, by lane.
        settled: end of the last step that computed something, in seconds on the engine's clock.
        interactive_at: end of the last step with interactive work, or the beginning of the first step of all. None
            means that there was none.
        predicted_seconds, actual_seconds: durations of all steps that had a prediction, summed.
    """

    def __init__(self, config: CoreConfig) -> None:
        rules = config.scheduling
        margins = rules.margin_floor, rules.margin_ceiling
        self.model = StepTimeModel(rules.forgetting, rules.knots, *margins, config.chosen_experts)
        self.accounts = Accounts()
        self.turns_window = TURNS_GOALS * config.interactive.itl_s
        self.token_prices = TokenPrices()
        self.prompts = PromptTime()
        self.courtesy = Courtesy()
        self.batch = BatchTime(rules.floor_window_s)
        self.busy = dict.fromkeys(Lane, 0.0)
        self.ttft = {lane: Ratio() for lane in Lane}
        self.itl = {lane: Ratio() for lane in Lane}
        self.settled = 0.0
        self.interactive_at: float | None = None
        self.predicted_seconds = self.actual_seconds = 0.0

    def settle(
        self,
        step: StepUnderWay,
        result: StepResult,
        adapters: Mapping[AdapterHash, Adapter],
        began: float,
        now: float,
        refused: Mapping[str, int],
        *,
        wants_batch: bool,
    ) -> None:
        """Learn from a step that lasted from `began` to `now`, in seconds on the engine's clock: train the step-time
        model, charge the device seconds to tenants, lanes and sequences by their parts of the step, and update the
        prices and the share of batch work. A step without chunks or duration is ignored. Sequences that the step
        drafted for are charged for drafting in equal parts, and those with grammars for masks in the same way.

        Args:
            refused: number of refused proposals of each request that had any.
            wants_batch: whether there is batch work, running or waiting to start.
        """
        plan, forecast, seconds, batch = step.plan, step.plan.forecast, now - began, self.batch
        if seconds <= 0 or not plan.chunks:
            return
        if self.interactive_at is None:
            self.interactive_at = began
        if not batch.is_wanted:  # time without batch work counts as if batch work had got all of it
            batch.note(began - self.settled, began - self.settled)
        batch.is_wanted, self.settled = wants_batch, now
        self.predicted_seconds += forecast.seconds
        self.actual_seconds += seconds if forecast.seconds else 0.0
        self.courtesy.begin(forecast.seconds, forecast.alone)
        draft_s, mask_s = min(result.draft_seconds, seconds / 2), min(result.mask_seconds, seconds / 4)
        masked = [seq for seq in step.awaiting if seq.masks_in_step] if result.mask_seconds else []
        if masked:
            self.token_prices.note_masks(result.mask_seconds, len(masked))
        drafted = [step.sequences[ask.request_id] for ask in plan.drafts]
        charges = [
            *self._charges(step, adapters, refused),
            *_in_equal_parts(drafted, draft_s),
            *_in_equal_parts(masked, mask_s),
        ]
        whole = sum([weight for _, _, _, weight, _ in charges])
        features = forecast.features._replace(launched=float(result.launched))
        self.model.observe(features, seconds - (draft_s + mask_s))
        self.prompts.note_context(features)
        if whole:
            prompts_s, of_batch = self._charge(charges, seconds / whole)
            self.prompts.note(prompts_s, now)
            self.courtesy.was_shared = 0 < of_batch < whole
            if of_batch < whole:
                self.interactive_at = now
            batch.note(of_batch * seconds / whole if wants_batch else seconds, seconds)

    def note_token(self, seq: Sequence, now: float) -> None:
        """Count a sequence's newest token as in time (`now` is at most `seq.due`) or late, in its lane's attainment.
        For `courtesy`, also count an interactive answer's tokens after the first, but not those that waited for slow
        masks. Also updates the length of the longest answer."""
        lane, in_time, generated = seq.request.lane, now <= seq.due, seq.num_generated
        prices = self.token_prices
        if generated > prices.longest_output:
            prices.longest_output = generated
        (self.ttft if generated == 1 else self.itl)[lane].note(in_time)
        seq.account.note_token(now, self.turns_window)
        if lane is Lane.INTERACTIVE and generated > 1 and not seq.masks_slowly:
            self.courtesy.note_token(in_time)

    def _charges(
        self, step: StepUnderWay, adapters: Mapping[AdapterHash, Adapter], refused: Mapping[str, int]
    ) -> Iterator[Charge]:
        """Yield the parts of a step's device time that sequences are charged for their chunks and adapter loads. Tokens
        that are computed again after a preemption are charged but not billed; refused proposals are both, because they
        took their tenant's part of the step."""
        plan, prices, is_warm = step.plan, self.model.prices, self.model.is_warm
        tokens, has_scored = plan.forecast.features.tokens, plan.forecast.features.scored_tokens
        fixed, many = (prices.step + self.model.experts_s(tokens)) / len(plan.chunks), self.model.token_price(tokens)
        for chunk, seq, unpaid in zip(plan.chunks, step.owners, step.unpaid, strict=True):
            _, start, count, _, _, proposals, _ = chunk
            adapter_hash, is_decode = seq.request.adapter_hash, count == 1 + len(proposals)
            rank = adapters[adapter_hash].rank if adapter_hash else 0
            weight = fixed + (chunk_weight(prices, start, count, rank, many, is_decode) if is_warm else count)
            if has_scored and not seq.is_scored:
                weight += prices.scored * count
            tokens = count - refused.get(seq.id, 0) if refused else count
            yield seq, tokens, is_decode, weight, weight * unpaid / count
        for load in plan.adapters.loads:
            weight = prices.page * len(load.pages)
            yield step.sequences[load.request_id], 0, False, weight, weight

    def _charge(self, charges: Iterable[Charge], scale: float) -> tuple[float, float]:
        """Charge each of a step's sequences its weight times `scale` (device seconds per unit of weight), and update
        the smoothed prices. Returns the device seconds of the step's prompts, and the weight (not scaled) of its batch
        work."""
        cost, tokens, batch = [0.0, 0.0], [0, 0], 0.0
        for seq, count, is_decode, weight, billed in charges:
            seconds, lane = weight * scale, seq.request.lane
            seq.account.charge(seconds, billed * scale)
            self.busy[lane] += seconds
            seq.device_seconds += seconds
            if lane is not Lane.INTERACTIVE:
                batch += weight
            if count:
                cost[is_decode] += seconds
                tokens[is_decode] += count
        self.token_prices.note_chunks(cost, tokens)
        return cost[0], batch


def chunk_weight(prices: Prices, start: int, count: int, rank: int, many: float, is_decode: bool) -> float:
    """Return the predicted seconds that a chunk adds to its step.

    Args:
        start: position of the chunk's first token.
        count: number of tokens, with proposals.
        rank: rank of the chunk's adapter; 0 without one.
        many: `token_price` of the step's tokens, the surcharge per token for a step with many of them.
        is_decode: whether each row of the chunk is computed like a decode.
    """
    if is_decode:
        return count * (prices.decode + many + prices.context * (start + (count + 1) / 2) + prices.lora_row * rank)
    return count * (prices.prefill + many + prices.attention * (start + count / 2) + prices.lora_row * rank)


def _in_equal_parts(seqs: Listed[Sequence], seconds: float) -> Iterator[Charge]:
    for seq in seqs if seconds else ():
        yield seq, 0, False, seconds / len(seqs), seconds / len(seqs)
