"""What a step takes, learned from the steps it took: the one currency of budgets, fairness, waits and Retry-After.

A step's time is a constant (reading the weights) and a convex, piecewise-linear function of its tokens (a token more is
nearly free while reading the weights hides it, and costs its arithmetic beyond), plus attention over context, adapters
read and applied, and pages copied, which are close to linear. The coefficients are found by recursive least squares in
information form, on relative errors (a 5 % miss of a short step counts like one of a long step), and kept non-negative:
nothing makes a step shorter, so that a chunk can be sized by solving for it, and a range in which no step has been yet
is taken to be like the one before it, which finds out by itself.

Steps are remembered by size, and forgotten by size: a thousand steps of one kind in a row, as a backlog of batch work
makes them, must not wipe out what is known of the others, because budgets are comparisons with those. Two regressions
that forget everything alike, one for small steps and one for large, were tried first; a wrong prediction then kept the
scheduler from the very steps that would have corrected it (7,650 against 8,700 tokens/s of batch work in simulation of
an H100).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, NamedTuple

from engine.core.least_squares import non_negative_solution

SCALES = (1.0, 64.0, 16.0, 8192.0, 16384.0, 8.0, 1024.0, 16.0)
"""What each term usually is, so that all are of one size in the normal equations; beyond a knot, 64 tokens."""
WARM_STEPS = 16
"""Steps after which predictions are used: somewhat more than the unknowns."""
SEEN_STEPS = 8
"""Steps of a size after which it counts as known."""
SOLVE_EVERY = 32
SOLVE_AT = (1, 2, 4, 8, 16)
"""Steps between two solutions once warm, and steps of a size after which there is one too; a solution costs about as
much as planning a step."""
RIDGE = 1e-7
"""Of the largest term, added to each: keeps terms that depend on each other from cancelling out at large prices."""
ERRORS_KEPT = 256
OUTLIER = 4.0
"""A step of a known size that is this many times off is a stall of the machine, and counts as this much."""


class StepFeatures(NamedTuple):
    """What there is to do in a step.

    Attributes:
        prefill_tokens: tokens of chunks longer than one.
        decode_tokens: chunks of one token.
        decode_context: tokens they look back on, summed.
        prefill_attention: sum of x * start + x**2 / 2 over chunks of x tokens: query-key pairs.
        adapters: distinct adapters.
        lora_rows: sum of rank * tokens.
        pages_moved: copied between host and device, for adapters and for KV.
    """

    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    decode_context: float = 0.0
    prefill_attention: float = 0.0
    adapters: float = 0.0
    lora_rows: float = 0.0
    pages_moved: float = 0.0

    @property
    def tokens(self) -> float:
        return self.prefill_tokens + self.decode_tokens


NOTHING = StepFeatures()


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of a step, of a unit of each of its features, and of a token more beyond each knot."""

    step: float
    prefill: float
    decode: float
    context: float
    attention: float
    adapter: float
    lora_row: float
    page: float
    beyond: tuple[float, ...]

    @classmethod
    def of(cls, flat: list[float]) -> Prices:
        step, prefill, decode, context, attention, adapter, lora_row, page, *beyond = flat
        return cls(step, prefill, decode, context, attention, adapter, lora_row, page, tuple(beyond))

    @property
    def linear(self) -> tuple[float, ...]:
        """By the fields of StepFeatures."""
        return self.prefill, self.decode, self.context, self.attention, self.adapter, self.lora_row, self.page

    @property
    def flat(self) -> list[float]:
        return [self.step, *self.linear, *self.beyond]


class Memory:
    """Normal equations of the steps of one size: sum of outer products of their terms, with forgetting."""

    def __init__(self, count: int) -> None:
        self.normal = [[0.0] * count for _ in range(count)]
        self.right = [0.0] * count

    def add(self, terms: list[float], keep: float) -> None:
        """One more equation: sum(price * term) = 1."""
        normal, right = self.normal, self.right
        for i, term in enumerate(terms):
            normal[i] = [have * keep + term * other for have, other in zip(normal[i], terms, strict=True)]
            right[i] = right[i] * keep + term


class StepTimeModel:
    """Predicts steps and learns from them.

    Args:
        knots: numbers of tokens at which a token more may begin to cost more.
    """

    def __init__(self, forgetting: float, knots: tuple[int, ...], margin_floor: float, margin_ceiling: float) -> None:
        self.knots = knots
        self.num_steps = 0
        """Steps it has learned from."""
        self.prices = Prices.of([0.0] * (len(SCALES) + len(knots)))
        self.margin = margin_ceiling
        """What predictions are multiplied with to be kept 19 times out of 20."""
        self.median_error = 0.0
        """Of |actual / predicted - 1| over the last steps."""
        self._forgetting = forgetting
        self._scales = SCALES + (64.0,) * len(knots)
        self._memories: dict[int, Memory] = {}
        """By the number of bits of a step's tokens: each size is twice the one before it."""
        self._seen: Counter[int] = Counter()
        self._margins = (margin_floor, margin_ceiling)
        self._ratios: deque[float] = deque(maxlen=ERRORS_KEPT)

    @property
    def is_warm(self) -> bool:
        return self.num_steps >= WARM_STEPS

    def has_seen(self, tokens: int) -> bool:
        """Steps of about this size are known from experience."""
        return self._seen[tokens.bit_length()] >= SEEN_STEPS

    def predict(self, features: StepFeatures) -> float:
        """Seconds; 0 while nothing is known."""
        if not self.is_warm:
            return 0.0
        prices = self.prices
        linear = sum([price * amount for price, amount in zip(prices.linear, features, strict=True)])
        return prices.step + linear + self.beyond_knots(features.tokens)

    def beyond_knots(self, tokens: float) -> float:
        """Seconds that a step's tokens cost because they are many."""
        return sum([p * (tokens - k) for p, k in zip(self.prices.beyond, self.knots, strict=True) if tokens > k])

    def token_price(self, tokens: float) -> float:
        """Seconds that the last of so many tokens costs because they are many."""
        return sum([p for p, k in zip(self.prices.beyond, self.knots, strict=True) if tokens > k])

    def chunk_that_fits(self, features: StepFeatures, start: int, rank: int, seconds: float) -> int:
        """Most tokens of a chunk beginning at `start` that a step of `features` can carry and be done in `seconds`."""
        prices, tokens = self.prices, features.tokens
        room = seconds - self.predict(features) - (prices.adapter if rank else 0.0)
        base, square = prices.prefill + prices.attention * start + prices.lora_row * rank, prices.attention / 2
        done = 0
        for knot in (*[k for k in self.knots if k > tokens], 1 << 30):
            slope = base + self.token_price(tokens + done + 1) + prices.attention * done
            fits = solve(square, slope, room)
            if tokens + done + fits <= knot:
                return done + fits
            length = knot - int(tokens) - done
            room -= length * (slope + square * length)
            done += length
        return done

    def observe(self, features: StepFeatures, seconds: float) -> None:
        """Learns from a step that took `seconds`."""
        predicted = self.predict(features)
        size = int(features.tokens).bit_length()
        if predicted > 0:
            self._ratios.append(seconds / predicted)
        if predicted > 0 and self._seen[size] >= SEEN_STEPS:
            seconds = min(max(seconds, predicted / OUTLIER), predicted * OUTLIER)
        terms = [1.0, *features, *(max(0.0, features.tokens - knot) for knot in self.knots)]
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
        """Takes up where `to_json` left.

        Raises:
            ValueError, KeyError, TypeError: it is not what `to_json` writes with these knots.
        """
        count = len(self._scales)
        if list(saved["knots"]) != list(self.knots) or len(saved["prices"]) != count:
            raise ValueError(f"expected {count} terms with knots at {self.knots}")
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
        """A term that no step had has a price of 0."""
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


def solve(square: float, slope: float, room: float) -> int:
    """Largest whole x >= 0 with square * x**2 + slope * x <= room; for non-negative coefficients."""
    if room <= 0:
        return 0
    if square * room < 1e-6 * slope * slope:
        return int(room / slope)
    if square == 0:
        return 1 << 30
    return int((sqrt(slope * slope + 4 * square * room) - slope) / (2 * square))
