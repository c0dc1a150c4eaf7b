"""What a running engine measures beside the duration of its steps: prices of tokens, the time of prompts, how far batch
work may extend interactive steps, and what batch work has got. `Ledger` (state/ledger.py) keeps one of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import exp

from engine.core.messages.features import StepFeatures
from engine.core.state.sequence import Sequence

SMOOTHING = 0.05
"""Weight of the newest step in a smoothed price, which thus averages over about twenty steps."""
CONTEXT_TOKENS = 8192
"""Prompt tokens over which `PromptTime.context` is averaged."""
FIRST_PRICE = 1e-3
"""Device seconds of a token before a price is known, as on a CPU."""
LEAST_GROWTH = 0.001
"""Minimum growth of `Courtesy.value` per step, as an exponent of 2, for goals that allow no late token at all."""
LEAST_COURTESY = 0.02
"""Minimum of `Courtesy.value`, from which it recovers in a few hundred steps when no more tokens are late."""
KEPT = 1 - 1 / 500
"""Weight of the earlier events of a `Ratio` with each new one, so that it averages over about 500: enough for a 99 %
goal, and few enough to forget a bad minute."""
STEPS_REMEMBERED = 2000
"""Number of steps that `Courtesy.tail` is computed from: a few bursts of prompts."""
PROMPT_WINDOW_S = 5.0
"""Seconds, with exponential decay, over which `PromptTime.share` is measured."""
LEAST_WINDOW_S = 1.0
"""Minimum number of seconds by which `PromptTime.share` divides, so that a single prompt right after an engine's first
step does not count as a high share."""
TAIL, TAIL_EVERY = 0.98, 16
"""Quantile that defines `Courtesy.tail`, and number of steps between two computations of it."""


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


class TokenPrices:
    """Device time of tokens, smoothed over steps, and what it says of the work that sequences still are.

    Attributes:
        prefill, decode: device seconds per token; 0 while unknown.
        mask: seconds of a mask that a step computes for a grammar; 0 while unknown.
        longest_prompt, longest_output: maximum number of tokens of the prompts and answers so far.
    """

    def __init__(self) -> None:
        self.prefill = self.decode = self.mask = 0.0
        self.longest_prompt = self.longest_output = 0

    def of(self, prefill_tokens: float, decode_tokens: float) -> float:
        """Return the device seconds of the given numbers of prompt and answer tokens."""
        return prefill_tokens * self.prefill + decode_tokens * self.decode

    def masks_s(self, seqs: Iterable[Sequence]) -> float:
        """Return the predicted seconds in which a step computes the masks of those sequences that follow grammars."""
        return self.mask * sum([seq.masks_in_step for seq in seqs]) if self.mask else 0.0

    def work_of(self, seq: Sequence) -> float:
        """Return the device seconds that a new sequence is predicted to take. Before any token was decoded, each of its
        tokens counts `FIRST_PRICE`, which still sorts sequences by length."""
        return self.work_left(seq) if self.decode else FIRST_PRICE * seq.expected_length

    def work_left(self, seq: Sequence) -> float:
        """Return the device seconds that a sequence needs until its predicted end."""
        least = int(seq.request.params.max_tokens > 0)
        return self.of(seq.num_remaining, max(least, seq.forecast.output - seq.num_generated))

    def bound(self, max_seqs: int) -> float:
        """Return the theoretical bound of the service gap between two tenants, in device seconds divided by weight.
        This is twice the larger of the cost of the longest prompt and that of a full batch of the longest answers
        (theorem 4.4 of the paper named in fairness/accounts.py). M in the theorem is the number of answer tokens of a
        running batch; the longest answer so far suffices, because no gap can come from tokens that were not
        generated."""
        return 2 * max(self.of(self.longest_prompt, 0), self.of(0, max_seqs * self.longest_output))

    def note_chunks(self, seconds: list[float], tokens: list[int]) -> None:
        """Learn from a step's device seconds and tokens, of its prompts (index 0) and its decodes (1)."""
        if tokens[0]:
            self.prefill = _smooth(self.prefill, seconds[0] / tokens[0])
        if tokens[1]:
            self.decode = _smooth(self.decode, seconds[1] / tokens[1])

    def note_masks(self, seconds: float, count: int) -> None:
        """Learn from a step that computed `count` masks in `seconds`."""
        self.mask = _smooth(self.mask, seconds / count)


class PromptTime:
    """How much of the device's time prompts take, and at what context.

    Attributes:
        context: tokens before a prompt token on average, over about the last `CONTEXT_TOKENS` prompt tokens.
    """

    def __init__(self) -> None:
        self.context = 0.0
        self._seconds, self._at = 0.0, 0.0
        """Seconds that the device computed prompts, with exponential decay until the time `_at`."""
        self._first_at: float | None = None
        """End of the first step that counts, in seconds on the engine's clock. None means that there was none."""

    def note_context(self, features: StepFeatures) -> None:
        if tokens := features.prefill_tokens:
            context = features.prefill_attention / tokens
            self.context += min(1.0, tokens / CONTEXT_TOKENS) * (context - self.context)

    def note(self, seconds: float, now: float) -> None:
        """Count a step that ended at `now` and whose prompts took `seconds`."""
        self._first_at = now if self._first_at is None else self._first_at
        self._seconds = self._seconds * exp((self._at - now) / PROMPT_WINDOW_S) + seconds
        self._at = now

    def share(self, now: float) -> float:
        """Return the share of the last `PROMPT_WINDOW_S` seconds, or of those since the first step, in which the device
        computed prompts."""
        if self._first_at is None:
            return 0.0
        window = PROMPT_WINDOW_S * (1 - exp((self._first_at - now) / PROMPT_WINDOW_S))
        seconds = self._seconds * exp((self._at - now) / PROMPT_WINDOW_S)
        return min(1.0, seconds / max(window, LEAST_WINDOW_S))


class Courtesy:
    """How far batch work may extend interactive steps, from which interactive tokens were late beside it.

    Attributes:
        value: fraction, from 0 to 1, of its allowed stretch that batch work may use now.
        tail: 98th percentile, over interactive tokens, of the seconds of the steps that they would be in without batch
            work.
        was_shared: whether the last step had both interactive and batch work.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self.tail = 0.0
        self.was_shared = False
        self._alone: deque[tuple[float, float]] = deque(maxlen=STEPS_REMEMBERED)
        self._since_tail = 0
        self._alone_now = self._longer_now = 0.0
        """Predicted seconds of the last step without its batch work, and the factor by which batch work extended it.
        Both are 0 if the step had no interactive decodes."""
        self._tokens = self._late = 0
        """Interactive tokens of the last step other than first ones, and how many of them were late in a step shared
        with batch work."""

    def begin(self, predicted: float, alone: float) -> None:
        """Note the predicted seconds of the step whose result is absorbed now, with and without its batch work."""
        self._alone_now, self._longer_now = alone, predicted / alone if alone else 0.0

    def note_token(self, in_time: bool) -> None:
        """Count an interactive token of that step other than a first one."""
        self._tokens += 1
        self._late += self.was_shared and not in_time

    def adapt(self, attainment: float) -> None:
        """Update `value` and `tail` after a step. `value` halves if an interactive token, other than a first one, was
        late in a step shared with batch work. Otherwise it grows with each step that had such tokens, so that it
        doubles in 1 / (1 - attainment) such steps: the number of tokens of which one may be late."""
        self._note_alone()
        if self._late:
            self.value = max(LEAST_COURTESY, self.value / 2)
        elif self._tokens:
            self.value = min(1.0, self.value * 2 ** max(1 - attainment, LEAST_GROWTH))
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


class BatchTime:
    """What batch work has been getting of the device, and what its deadlines need.

    Attributes:
        is_wanted: whether there was batch work, running or waiting to start, when the last step was settled.
        need: device time that batch deadlines need, as a multiple of what batch work has been getting.
        need_known_until: when `need` may be computed again.
    """

    def __init__(self, window_s: float) -> None:
        self.is_wanted = False
        self.need = 0.0
        self.need_known_until = 0.0
        self._window = window_s
        self._seconds = 0.0
        self._wanted_seconds = 0.0
        """Seconds during which there was batch work, decaying exponentially with `window_s`; `_seconds` is batch work's
        part of them."""

    @property
    def share(self) -> float:
        """Share of device time that batch work got while there was batch work, over the last `window_s` seconds, with
        exponential decay. Time without batch work counts as if batch work had got all of it."""
        return self._seconds / self._wanted_seconds if self._wanted_seconds else 1.0

    def note(self, batch_seconds: float, seconds: float) -> None:
        """Count `seconds` of the device, of which batch work got `batch_seconds`."""
        keep = exp(-seconds / self._window)
        self._seconds = self._seconds * keep + batch_seconds
        self._wanted_seconds = self._wanted_seconds * keep + seconds


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
