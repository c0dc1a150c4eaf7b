"""Accounting of device time: durations of steps, charges to tenants, cost of tokens, and attainment of latency goals.
These are all measurements of the running engine that later decisions use; `commit/step.py` and `commit/apply.py` update
them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Listed
from math import exp

from engine.core.config import CoreConfig
from engine.core.fairness.accounts import Accounts
from engine.core.memory.adapters import Adapter
from engine.core.messages.requests import AdapterHash, Lane
from engine.core.predict.step_time import Prices, StepTimeModel
from engine.core.state.sequence import Sequence
from engine.core.state.under_way import StepUnderWay

SMOOTHING = 0.05
"""Weight of the newest step in a smoothed price, which thus averages over about twenty steps."""
CONTEXT_TOKENS = 8192
"""Prompt tokens over which `Ledger.prompt_context` is averaged."""
FIRST_PRICE = 1e-3
"""Device seconds of a token before a price is known, as on a CPU."""
LEAST_GROWTH = 0.001
"""Minimum growth of `Ledger.courtesy` per step, as an exponent of 2, for goals that allow no late token at all."""
LEAST_COURTESY = 0.02
"""Minimum of `Ledger.courtesy`, from which it recovers in a few hundred steps when no more tokens are late."""
KEPT = 1 - 1 / 500
"""Weight of the earlier events of a `Ratio` with each new one, so that it averages over about 500: enough for a 99 %
goal, and few enough to forget a bad minute."""
STEPS_REMEMBERED = 2000
"""Number of steps that `Ledger.tail` is computed from: a few bursts of prompts."""
PROMPT_WINDOW_S = 5.0
"""Seconds, with exponential decay, over which `Ledger.prompt_share` is measured."""
LEAST_WINDOW_S = 1.0
"""Minimum number of seconds by which `Ledger.prompt_share` divides, so that a single prompt right after an engine's
first step does not count as a high share."""
TAIL, TAIL_EVERY = 0.98, 16
"""Quantile that defines `Ledger.tail`, and number of steps between two computations of it."""


class Ratio:
    """Share of events that were good, such as tokens in time (1 before the first event), with exponentially decaying
    weight of older events."""

    def __init__(self) -> None:
        self.good = self.total = 0.0

    def note(self, good: bool) -> None:
        self.good, self.total = self.good * KEPT + good, self.total * KEPT + 1

    @property
    def value(self) -> float:
        return self.good / self.total if self.total else 1.0


TURNS_GOALS = 2.0
"""ITL goals for which a token counts when parties take turns (`turns_window`): long enough for some steps, and so short
that a party that had many tokens before the others took turns with it waits for tenths of a second only."""

Charge = tuple[Sequence, int, bool, float, float]
"""A sequence's part of the device time of one step, for a chunk or for the copy of its adapter (with 0 tokens): the
sequence, the chunk's tokens without refused proposals, whether it is computed like a decode, the weight (see
`chunk_weight`; the chunk's tokens while the model is cold), and the part of the weight that is billed: without tokens
that are computed again after a preemption. It is a plain tuple because a step has hundreds."""


class Ledger:
    """Measurements of a running engine that decide how later steps are planned. An engine state has one.

    Attributes:
        model: predicts the duration of a step.
        accounts: service that each tenant has received.
        turns_window: seconds for which tokens count in `Account.lately`.
        busy: device seconds by lane.
        prefill_price, decode_price: device seconds per token, smoothed over steps; 0 while unknown.
        mask_price: seconds of a mask that a step computes for a grammar, smoothed over steps; 0 while unknown.
        prompt_context: tokens before a prompt token on average, over about the last `CONTEXT_TOKENS` prompt tokens.
        ttft, itl: share of first and of further tokens that were in time, by lane.
        tail: 98th percentile, over interactive tokens, of the seconds of the steps that they would be in without batch
            work.
        wants_batch: whether there was batch work, running or waiting to start, when the last step was settled.
        courtesy: fraction, from 0 to 1, of its allowed stretch that batch work may use now.
        longest_prompt, longest_output: maximum number of tokens of the prompts and answers so far.
        interactive_at: end of the last step with interactive work, or the beginning of the first step of all. None
            means that there was none.
        need: device time that batch deadlines need, as a multiple of what batch work has been getting.
        need_known_until: when `need` may be computed again.
        predicted_seconds, actual_seconds: durations of all steps that had a prediction, summed.
    """

    def __init__(self, config: CoreConfig) -> None:
        rules = config.scheduling
        margins = rules.margin_floor, rules.margin_ceiling
        self.model = StepTimeModel(rules.forgetting, rules.knots, *margins, config.chosen_experts)
        self.accounts = Accounts()
        self.turns_window = TURNS_GOALS * config.interactive.itl_s
        self.busy = dict.fromkeys(Lane, 0.0)
        self.prefill_price = self.decode_price = self.mask_price = self.prompt_context = 0.0
        self.ttft = {lane: Ratio() for lane in Lane}
        self.itl = {lane: Ratio() for lane in Lane}
        self.courtesy = 1.0
        self.tail = 0.0
        self._alone: deque[tuple[float, float]] = deque(maxlen=STEPS_REMEMBERED)
        self._since_tail = 0
        self._alone_now = self._longer_now = 0.0
        """Predicted seconds of the last step without its batch work, and the factor by which batch work extended it.
        Both are 0 if the step had no interactive decodes."""
        self._was_shared = self.wants_batch = False
        self.settled = 0.0
        """End of the last step that computed something, in seconds on the engine's clock."""
        self._tokens = self._late = 0
        """Interactive tokens of the last step other than first ones, and how many of them were late in a step shared
        with batch work."""
        self.interactive_at: float | None = None
        self.need = 0.0
        self.need_known_until = 0.0
        self.predicted_seconds = self.actual_seconds = 0.0
        self.longest_prompt = self.longest_output = 0
        self._prompt_time, self._prompts_at = 0.0, 0.0
        """Seconds that the device computed prompts, with exponential decay until the time `_prompts_at`."""
        self._first_at: float | None = None
        """End of the first step that counts for `prompt_share`, in seconds on the engine's clock. None means that there
        was none."""
        self._window = rules.floor_window_s
        self._batch_time = 0.0
        self._wanted_time = 0.0
        """Seconds during which there was batch work, decaying exponentially with `floor_window_s`; `_batch_time` is
        batch work's part of them."""

    @property
    def batch_share(self) -> float:
        """Share of device time that batch work got while there was batch work, over the last `floor_window_s` seconds,
        with exponential decay. Time without batch work counts as if batch work had got all of it."""
        return self._batch_time / self._wanted_time if self._wanted_time else 1.0

    def settle(
        self,
        step: StepUnderWay,
        adapters: Mapping[AdapterHash, Adapter],
        began: float,
        now: float,
        refused: Mapping[str, int],
        *,
        wants_batch: bool,
        launched: bool,
        draft_seconds: float = 0.0,
        mask_seconds: float = 0.0,
    ) -> None:
        """Learn from a step that lasted from `began` to `now`, in seconds on the engine's clock: train the step-time
        model, charge the device seconds to tenants, lanes and sequences by their parts of the step, and update the
        prices and `batch_share`. A step without chunks or duration is ignored. `refused` has the number of refused
        proposals of each request that had any; `wants_batch` tells whether there is batch work, running or waiting to
        start; `launched` whether the step was launched kernel by kernel; `draft_seconds` how much of the duration was
        drafting, for which the sequences that were drafted for are charged in equal parts, and `mask_seconds` how much
        was masks, for which those with grammars are charged in the same way."""
        plan, seconds = step.plan, now - began
        if seconds <= 0 or not plan.chunks:
            return
        if self.interactive_at is None:
            self.interactive_at = began
        if not self.wants_batch:  # time without batch work counts as if batch work had got all of it
            self._note_share(began - self.settled, began - self.settled)
        self.wants_batch, self.settled = wants_batch, now
        self.predicted_seconds += plan.predicted
        self.actual_seconds += seconds if plan.predicted else 0.0
        self._alone_now, self._longer_now = plan.alone, plan.predicted / plan.alone if plan.alone else 0.0
        beside = {"draft": min(draft_seconds, seconds / 2), "mask": min(mask_seconds, seconds / 4)}
        masked = [seq for seq in step.awaiting if seq.masks_in_step] if mask_seconds else []
        if masked:
            self.mask_price = _smooth(self.mask_price, mask_seconds / len(masked))
        drafted = [step.sequences[ask.request_id] for ask in plan.drafts]
        charges = [
            *self._charges(step, adapters, refused),
            *_in_equal_parts(drafted, beside["draft"]),
            *_in_equal_parts(masked, beside["mask"]),
        ]
        whole = sum([weight for _, _, _, weight, _ in charges])
        self.model.observe(plan.features._replace(launched=float(launched)), seconds - sum(beside.values()))
        if tokens := plan.features.prefill_tokens:
            context = plan.features.prefill_attention / tokens
            self.prompt_context += min(1.0, tokens / CONTEXT_TOKENS) * (context - self.prompt_context)
        if whole:
            prompts, batch = self._charge(charges, seconds / whole)
            self._note_prompts(prompts, now)
            self._was_shared = 0 < batch < whole
            if batch < whole:
                self.interactive_at = now
            self._note_share(batch * seconds / whole if wants_batch else seconds, seconds)

    def price(self, prefill_tokens: float, decode_tokens: float) -> float:
        """Return the device seconds of the given numbers of prompt and answer tokens at the smoothed prices."""
        return prefill_tokens * self.prefill_price + decode_tokens * self.decode_price

    def masks_s(self, seqs: Iterable[Sequence]) -> float:
        """Return the predicted seconds in which a step computes the masks of those sequences that follow grammars."""
        return self.mask_price * sum([seq.masks_in_step for seq in seqs]) if self.mask_price else 0.0

    def work_of(self, seq: Sequence) -> float:
        """Return the device seconds that a new sequence is predicted to take. Before any token was decoded, each of its
        tokens counts `FIRST_PRICE`, which still sorts sequences by length."""
        return self.work_left(seq) if self.decode_price else FIRST_PRICE * seq.expected_length

    def work_left(self, seq: Sequence) -> float:
        """Return the device seconds that a sequence needs until its predicted end, at the smoothed prices of tokens."""
        least = int(seq.request.params.max_tokens > 0)
        return self.price(seq.num_remaining, max(least, seq.expected_output - seq.num_generated))

    def bound(self, max_seqs: int) -> float:
        """Return the theoretical bound of the service gap between two tenants, in device seconds divided by weight.
        This is twice the larger of the cost of the longest prompt and that of a full batch of the longest answers
        (theorem 4.4 of the paper named in fairness/accounts.py). M in the theorem is the number of answer tokens of a
        running batch; the longest answer so far suffices, because no gap can come from tokens that were not
        generated."""
        return 2 * max(self.price(self.longest_prompt, 0), self.price(0, max_seqs * self.longest_output))

    def note_token(self, seq: Sequence, now: float) -> None:
        """Count a sequence's newest token as in time (`now` is at most `seq.due`) or late, in its lane's attainment.
        For `adapt`, also count an interactive answer's tokens after the first, as late only in a step shared with batch
        work, and not those that waited for slow masks. Also updates `longest_output`."""
        lane, in_time, generated = seq.request.lane, now <= seq.due, seq.num_generated
        if generated > self.longest_output:
            self.longest_output = generated
        (self.ttft if generated == 1 else self.itl)[lane].note(in_time)
        seq.account.note_token(now, self.turns_window)
        if lane is Lane.INTERACTIVE and generated > 1 and not seq.masks_slowly:
            self._tokens += 1
            self._late += self._was_shared and not in_time

    def adapt(self, attainment: float) -> None:
        """Update `courtesy` and `tail` after a step. `courtesy` halves if an interactive token, other than a first one,
        was late in a step shared with batch work. Otherwise it grows with each step that had such tokens, so that it
        doubles in 1 / (1 - attainment) such steps: the number of tokens of which one may be late."""
        self._note_alone()
        if self._late:
            self.courtesy = max(LEAST_COURTESY, self.courtesy / 2)
        elif self._tokens:
            self.courtesy = min(1.0, self.courtesy * 2 ** max(1 - attainment, LEAST_GROWTH))
        self._tokens = self._late = 0

    def _note_alone(self) -> None:
        """Remember the last step if it had interactive decodes, and compute `tail` (98th percentile of the seconds of
        steps without their batch work) from such steps after every `TAIL_EVERY` of them, over tokens, because ITL is
        reported in this way. A step is weighted by the factor by which batch work extended it, since interactive work
        alone would have had that many more steps."""
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

    def _charges(
        self, step: StepUnderWay, adapters: Mapping[AdapterHash, Adapter], refused: Mapping[str, int]
    ) -> Iterator[Charge]:
        """Yield the parts of a step's device time that sequences are charged for their chunks and adapter loads. Tokens
        that are computed again after a preemption are charged but not billed; refused proposals are both, because they
        took their tenant's part of the step."""
        plan, prices, is_warm = step.plan, self.model.prices, self.model.is_warm
        tokens = plan.features.tokens
        fixed, many = (prices.step + self.model.experts_s(tokens)) / len(plan.chunks), self.model.token_price(tokens)
        for chunk, seq, unpaid in zip(plan.chunks, step.owners, step.unpaid, strict=True):
            _, start, count, _, _, proposals, _ = chunk
            adapter_hash, is_decode = seq.request.adapter_hash, count == 1 + len(proposals)
            rank = adapters[adapter_hash].rank if adapter_hash else 0
            weight = fixed + (chunk_weight(prices, start, count, rank, many, is_decode) if is_warm else count)
            if plan.features.scored_tokens and not seq.is_scored:
                weight += prices.scored * count
            tokens = count - refused.get(seq.id, 0) if refused else count
            yield seq, tokens, is_decode, weight, weight * unpaid / count
        for load in plan.loads:
            weight = prices.page * len(load.pages)
            yield step.sequences[load.request_id], 0, False, weight, weight

    def prompt_share(self, now: float) -> float:
        """Return the share of the last `PROMPT_WINDOW_S` seconds, or of those since the first step, in which the device
        computed prompts."""
        if self._first_at is None:
            return 0.0
        window = PROMPT_WINDOW_S * (1 - exp((self._first_at - now) / PROMPT_WINDOW_S))
        seconds = self._prompt_time * exp((self._prompts_at - now) / PROMPT_WINDOW_S)
        return min(1.0, seconds / max(window, LEAST_WINDOW_S))

    def _note_prompts(self, seconds: float, now: float) -> None:
        self._first_at = now if self._first_at is None else self._first_at
        self._prompt_time = self._prompt_time * exp((self._prompts_at - now) / PROMPT_WINDOW_S) + seconds
        self._prompts_at = now

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
        if tokens[0]:
            self.prefill_price = _smooth(self.prefill_price, cost[0] / tokens[0])
        if tokens[1]:
            self.decode_price = _smooth(self.decode_price, cost[1] / tokens[1])
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


def _weighted_quantile(ordered: list[tuple[float, float]], share: float) -> float:
    """Return the smallest value up to which `share` of the weight lies, given ascending (value, weight) pairs."""
    wanted = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        wanted -= weight
        if wanted <= 0:
            return value
    return ordered[-1][0]


def _smooth(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old) if old else new
