"""Model of the duration of a step, learned from measured steps. Budgets, fairness, waits and Retry-After all use it.

The duration of a step is the sum of a constant (reading the weights), a convex piecewise-linear function of its tokens,
and nearly linear terms for attention over context, for adapters that are read and applied, for pages that are copied,
and for logprobs of prompts. The function is convex because a further token is nearly free while reading the weights
hides its arithmetic.
A step that the host launches kernel by kernel lasts at least as long as the launching, so that a small one takes longer
than a captured one of its size: launched steps have a further constant, and the convex function covers the steps whose
launching takes less time than their work. Which steps are launched is known from the last ones of their kind and size.
A model with experts has another term, the expected share of its experts that the step's rows choose and so read: a
concave function of the tokens, which the convex one cannot be.

The coefficients are found by recursive least squares in information form on relative errors, so that a miss of 5 %
counts the same for short and long steps. They are kept non-negative, because no work makes a step shorter. A range of
token counts without any observed step is assumed to be like the range below it; the steps that result from this
assumption then correct it.

Steps are remembered and forgotten separately by size. A thousand similar steps in a row, as a backlog of batch work
produces, must not erase what is known about other sizes, because budgets compare with those: a wrong prediction would
keep the scheduler from the very steps that would correct it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, pow
from typing import Any

from engine.core.messages.features import StepFeatures
from engine.core.predict.least_squares import non_negative_solution

SCALES = (1.0, 64.0, 16.0, 8192.0, 16384.0, 8.0, 1024.0, 16.0, 64.0, 1.0, 1.0)
"""Typical value of each term (constant, the fields of StepFeatures, the share of experts), by which terms are divided
so that all have the same magnitude in the normal equations. The scale of tokens beyond a knot is 64."""
WARM_STEPS = 16
"""Number of steps from which on predictions are used: somewhat more than the number of unknowns."""
SEEN_STEPS = 8
"""Number of steps of a size from which on the size counts as known."""
SOLVE_EVERY = 32
SOLVE_AT = (1, 2, 4, 8, 16)
"""The equations are solved every `SOLVE_EVERY` steps once the model is warm, and also when the number of steps seen of
one size reaches one of `SOLVE_AT`. A solution costs about as much as planning a step."""
RIDGE = 1e-7
"""Regularization added to each diagonal element, as a fraction of the largest: it keeps collinear terms from cancelling
out at large prices."""
ERRORS_KEPT = 256
NEWEST_LAUNCH = 0.25
"""Weight of the newest step in the share of steps, of one kind and size, that were launched kernel by kernel."""
OUTLIER = 4.0
"""Maximum factor between measured and predicted seconds for a step of a known size. A larger one is a stall of the
machine and is clipped to this factor."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Coefficients of the step-time model, in seconds: per step, per unit of each feature, for reading all experts, and
    per token above each knot (`beyond`)."""

    step: float
    prefill: float
    decode: float
    context: float
    attention: float
    adapter: float
    lora_row: float
    page: float
    scored: float
    launch: float
    experts: float
    beyond: tuple[float, ...]

    @classmethod
    def of(cls, flat: list[float]) -> Prices:
        step, prefill, decode, context, attention, adapter, lora_row, page, scored, launch, experts, *beyond = flat
        work = prefill, decode, context, attention, adapter, lora_row, page, scored
        return cls(step, *work, launch, experts, tuple(beyond))

    @property
    def linear(self) -> tuple[float, ...]:
        """Prices per unit of each feature, in the order of the fields of StepFeatures."""
        work = self.prefill, self.decode, self.context, self.attention, self.adapter, self.lora_row, self.page
        return *work, self.scored, self.launch

    @property
    def flat(self) -> list[float]:
        return [self.step, *self.linear, self.experts, *self.beyond]


def share_read(chosen: float, tokens: float) -> float:
    """Return the expected share of a layer's experts that `tokens` tokens choose, each the share `chosen` of them: each
    expert is left out by a token with the probability 1 - `chosen`, if tokens choose independently and all experts
    alike. Trained routers choose less evenly, and their steps read fewer experts."""
    return 1.0 - pow(1.0 - chosen, tokens)


class Memory:
    """Normal equations from which the step-time model fits its prices by least squares: those of the observed steps of
    one size (the bit length of a step's number of tokens), in which older steps decay."""

    def __init__(self, count: int) -> None:
        self.normal = [[0.0] * count for _ in range(count)]
        self.right = [0.0] * count

    def add(self, terms: list[float], keep: float) -> None:
        """Add the equation sum(price * term) = 1 of one step, whose `terms` are in the order of the prices and divided
        by its seconds, and multiply all earlier equations by `keep`."""
        normal, right = self.normal, self.right
        for i, term in enumerate(terms):
            if term:
                normal[i] = [have * keep + term * other for have, other in zip(normal[i], terms, strict=True)]
            else:  # most steps lack most kinds of work
                normal[i] = [have * keep for have in normal[i]]
            right[i] = right[i] * keep + term


class StepTimeModel:
    """Predicts the duration of steps and learns from measured ones.

    Args:
        forgetting: factor by which older steps of a size are discounted with each new step of that size.
        knots: token counts above which each further token may cost more.
        margin_floor, margin_ceiling: range of `margin`, by which callers multiply predictions that must hold.
        chosen: share of a layer's experts that are chosen for a token. 1 means that the model has none.
    """

    def __init__(
        self,
        forgetting: float,
        knots: tuple[int, ...],
        margin_floor: float,
        margin_ceiling: float,
        chosen: float = 1.0,
    ) -> None:
        self.knots = knots
        self.num_steps = 0
        """Number of steps that the model has learned from."""
        self.prices = Prices.of([0.0] * (len(SCALES) + len(knots)))
        self.margin = margin_ceiling
        """Factor for predictions, such that 19 of 20 recent steps took no longer than prediction times margin."""
        self.median_error = 0.0
        """Median of |actual / predicted - 1| over the last `ERRORS_KEPT` steps, updated when the equations are
        solved."""
        self._forgetting = forgetting
        self._chosen = chosen
        self._scales = SCALES + (64.0,) * len(knots)
        self._memories: dict[int, Memory] = {}
        """Memories by size of step, where the size is the bit length of the step's number of tokens."""
        self._seen: Counter[int] = Counter()
        self._launched: dict[tuple[bool, int], float] = {}
        """Share of steps that were launched kernel by kernel, recent ones weighing more, by whether the steps had
        prompts and by size."""
        self._margins = (margin_floor, margin_ceiling)
        self._ratios: deque[float] = deque(maxlen=ERRORS_KEPT)

    @property
    def is_warm(self) -> bool:
        return self.num_steps >= WARM_STEPS

    def has_seen(self, tokens: int) -> bool:
        """Return whether at least `SEEN_STEPS` steps were observed whose number of tokens has the same bit length."""
        return self._seen[tokens.bit_length()] >= SEEN_STEPS

    def predict(self, features: StepFeatures) -> float:
        """Return the predicted seconds of a step with these features, without `margin`; 0 before `WARM_STEPS` steps."""
        if not self.is_warm:
            return 0.0
        prices = self.prices
        linear = sum([price * amount for price, amount in zip(prices.linear, features, strict=True)])
        return prices.step + linear + self.experts_s(features.tokens) + self.beyond_knots(features.tokens)

    @property
    def one_decode(self) -> float:
        """Predicted seconds of a step with a single decode, including an adapter: if all observed steps had one, the
        model cannot separate the adapter's cost from the constant cost of a step and may assign all of it to either."""
        return self.predict(StepFeatures(decode_tokens=1.0, adapters=1.0, launched=float(self.is_launched(0.0, 1.0))))

    def row_price(self, tokens: float, context: float, rank: int) -> float:
        """Return the predicted seconds that a decode at a context length in tokens adds to a step that has `tokens`
        tokens with it, and its adapter, of this `rank` (0 without one)."""
        prices = self.prices
        linear = prices.decode + prices.context * context + prices.lora_row * rank
        return linear + self.token_price(tokens) + self.experts_price(tokens)

    def experts_s(self, tokens: float) -> float:
        """Return the predicted seconds in which a step of `tokens` tokens reads experts; 0 without experts."""
        return self.prices.experts * share_read(self._chosen, tokens) if self._chosen < 1 else 0.0

    def experts_price(self, tokens: float) -> float:
        """Return the predicted seconds in which a step reads the experts that only the last of its `tokens` tokens
        chooses: the difference of `experts_s`; 0 without experts."""
        return self.prices.experts * self._chosen * pow(1.0 - self._chosen, tokens - 1) if self._chosen < 1 else 0.0

    def is_launched(self, prefill_tokens: float, tokens: float) -> bool:
        """Return whether most of the last steps of this size, with prompts if `prefill_tokens` is positive and without
        otherwise, were launched kernel by kernel. A size without any step is like the size below it."""
        for size in range(int(tokens).bit_length(), 0, -1):
            if (share := self._launched.get((prefill_tokens > 0, size))) is not None:
                return share > 0.5
        return False

    def beyond_knots(self, tokens: float) -> float:
        """Return the seconds that the tokens above each knot add to the predicted duration of a step with `tokens`
        tokens. A knot is a number of tokens above which each further token may cost more."""
        return sum([p * (tokens - k) for p, k in zip(self.prices.beyond, self.knots, strict=True) if tokens > k])

    def token_price(self, tokens: float) -> float:
        """Return the surcharge, in predicted seconds, that the last of `tokens` tokens adds to a step because it is
        above one or more knots; 0 below all knots."""
        return sum([p for p, k in zip(self.prices.beyond, self.knots, strict=True) if tokens > k])

    def observe(self, features: StepFeatures, seconds: float) -> None:
        """Learn from a step with these features that took `seconds` (for a known size, at most `OUTLIER` times more or
        less than predicted). Prices, margin and error are updated after `WARM_STEPS` steps, then every `SOLVE_EVERY`
        steps and more often for a new size."""
        predicted = self.predict(features)
        size = int(features.tokens).bit_length()
        kind = features.prefill_tokens > 0, size
        share = self._launched.get(kind, features.launched)
        self._launched[kind] = share + NEWEST_LAUNCH * (features.launched - share)
        if predicted > 0:
            self._ratios.append(seconds / predicted)
        if predicted > 0 and self._seen[size] >= SEEN_STEPS:
            seconds = min(max(seconds, predicted / OUTLIER), predicted * OUTLIER)
        experts = share_read(self._chosen, features.tokens) if self._chosen < 1 else 0.0
        terms = [1.0, *features, experts, *(max(0.0, features.tokens - knot) for knot in self.knots)]
        memory = self._memories.setdefault(size, Memory(len(self._scales)))
        memory.add([t / scale / seconds for t, scale in zip(terms, self._scales, strict=True)], self._forgetting)
        self._seen[size] += 1
        self.num_steps += 1
        if self.num_steps == WARM_STEPS or (self.is_warm and self._is_news(size)):
            self._solve()
            self._judge()

    def _is_news(self, size: int) -> bool:
        return self.num_steps % SOLVE_EVERY == 0 or self._seen[size] in SOLVE_AT

    def to_json(self) -> dict[str, Any]:
        memories = {str(size): [memory.normal, memory.right] for size, memory in self._memories.items()}
        seen = {str(size): count for size, count in self._seen.items()}
        return {"knots": list(self.knots), "prices": self.prices.flat, "memories": memories, "seen": seen}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore the prices and the remembered steps of the step-time model from what `to_json` returned. Raises
        ValueError, KeyError, TypeError or AttributeError if `saved` does not have the form that `to_json` returns for
        these knots."""
        count = len(self._scales)
        knots, terms = list(saved["knots"]), len(saved["prices"])
        if knots != list(self.knots) or terms != count:
            raise ValueError(f"it has {terms} terms and knots at {knots}, not {count} and {list(self.knots)}")
        prices = [float(price) for price in saved["prices"]]
        if not all(0 <= price < inf for price in prices):
            raise ValueError("prices must be finite and not negative")
        memories = {int(size): _read_memory(memory, count) for size, memory in saved["memories"].items()}
        seen = Counter({int(size): int(number) for size, number in saved["seen"].items()})
        if memories.keys() != seen.keys():
            raise ValueError("steps of a size are remembered if they were seen")
        self._memories, self._seen, self.prices = memories, seen, Prices.of(prices)
        self.num_steps = self._seen.total()

    def _solve(self) -> None:
        """Set `prices`, in seconds by term, to the non-negative least-squares solution of the equations of all step
        sizes together: the sum of their `Memory` objects. A term that no step had gets a price of 0."""
        memories = list(self._memories.values())
        normal = [
            [sum(cells) for cells in zip(*rows, strict=True)]
            for rows in zip(*[m.normal for m in memories], strict=True)
        ]
        right = [sum(cells) for cells in zip(*[memory.right for memory in memories], strict=True)]
        least = RIDGE * max(row[i] for i, row in enumerate(normal))
        for i, row in enumerate(normal):
            row[i] += least
        before = [price * scale for price, scale in zip(self.prices.flat, self._scales, strict=True)]
        solution = non_negative_solution(normal, right, before)
        self.prices = Prices.of([value / scale for value, scale in zip(solution, self._scales, strict=True)])

    def _judge(self) -> None:
        if self._ratios:
            ordered, (floor, ceiling) = sorted(self._ratios), self._margins
            self.margin = min(max(ordered[int(0.95 * len(ordered))], floor), ceiling)
            self.median_error = sorted(abs(ratio - 1.0) for ratio in ordered)[len(ordered) // 2]


def _read_memory(saved: Any, count: int) -> Memory:
    normal, right = saved
    if [len(right), *map(len, normal)] != [count] * (count + 1):
        raise ValueError(f"expected {count} terms")
    memory = Memory(count)
    memory.normal, memory.right = [[float(x) for x in row] for row in normal], [float(x) for x in right]
    return memory
