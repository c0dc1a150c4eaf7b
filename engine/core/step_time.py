"""What a step takes, learned from the steps it took: the one currency of budgets, fairness, waits and Retry-After.

A step's time is close to linear in seven features and a constant: reading the weights, arithmetic for prompt and for
decoded tokens, attention over context, adapters read and applied, pages copied. The coefficients are found by recursive
least squares in information form with forgetting, on relative errors (a 5 % miss of a short step counts like
one of a long step), and kept non-negative: nothing makes a step shorter, and a chunk can be sized by solving for it.

Small steps, in which reading the weights hides the arithmetic, are learned apart from large ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import sqrt
from typing import Any, NamedTuple

NUM_TERMS = 8
SCALES = (1.0, 64.0, 16.0, 8192.0, 16384.0, 8.0, 1024.0, 16.0)
"""What each term usually is, so that all are of one size in the normal equations."""
WARM_STEPS = 16
"""Steps after which predictions are used: twice the unknowns."""
SOLVE_EVERY = 16
"""Steps between two solutions once warm; one costs as much as planning for a hundred sequences."""
SWEEPS = 12
RIDGE = 1e-6
ERRORS_KEPT = 256
FIRST_KNEE, KNEES, KNEE_EVERY, KNEE_MOVED = 48, (16, 1024), 256, 1.5
"""Tokens up to which a step is small: before it is known, the least and the most; steps between two looks; and by what
factor it must be off to be moved."""
OUTLIER = 4.0
"""A step this many times off is a stall of the machine (or a model that knows nothing yet), and counts as this much."""


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


class Regression:
    """Non-negative least squares of relative errors, with forgetting. `theta` are seconds per unit of each term."""

    def __init__(self, forgetting: float) -> None:
        self.forgetting = forgetting
        self.theta = [0.0] * NUM_TERMS
        self.count = 0
        self._normal = [[0.0] * NUM_TERMS for _ in range(NUM_TERMS)]
        self._right = [0.0] * NUM_TERMS

    @property
    def is_warm(self) -> bool:
        return self.count >= WARM_STEPS

    def predict(self, features: StepFeatures) -> float:
        """Seconds."""
        theta = self.theta
        return theta[0] + sum(map(float.__mul__, theta[1:], map(float, features)))

    def observe(self, features: StepFeatures, seconds: float) -> None:
        terms = [1.0 / seconds, *(x / s / seconds for x, s in zip(features, SCALES[1:], strict=True))]
        keep, normal, right = self.forgetting, self._normal, self._right
        for i, term in enumerate(terms):
            normal[i] = [have * keep + term * other for have, other in zip(normal[i], terms, strict=True)]
            right[i] = right[i] * keep + term
        self.count += 1
        if self.count <= 2 * WARM_STEPS or self.count % SOLVE_EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        """Coordinate descent from the last solution, which is near: a term that no step had keeps its value."""
        normal, scaled = self._normal, [t * s for t, s in zip(self.theta, SCALES, strict=True)]
        damping = RIDGE * max(normal[i][i] for i in range(NUM_TERMS))
        for _ in range(SWEEPS):
            for i in range(NUM_TERMS):
                if normal[i][i] > damping:
                    row = normal[i]
                    rest = sum(map(float.__mul__, row, scaled)) - row[i] * scaled[i]
                    scaled[i] = max(0.0, (self._right[i] - rest) / row[i])
        self.theta = [t / s for t, s in zip(scaled, SCALES, strict=True)]

    def to_json(self) -> dict[str, Any]:
        return {"theta": self.theta, "count": self.count, "normal": self._normal, "right": self._right}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes up where `to_json` left. Raises ValueError: it is not what `to_json` wrote."""
        theta, normal, right = saved["theta"], saved["normal"], saved["right"]
        if [len(theta), len(right), *map(len, normal)] != [NUM_TERMS] * (NUM_TERMS + 2):
            raise ValueError(f"expected {NUM_TERMS} terms")
        self.theta, self._right = [float(x) for x in theta], [float(x) for x in right]
        self._normal, self.count = [[float(x) for x in row] for row in normal], int(saved["count"])


class StepTimeModel:
    """Predicts steps and learns from them.

    Args:
        small_step: tokens up to which a step is small; 0: as many as the device computes in the time that a step
            takes without any, found out on the way.
    """

    def __init__(self, forgetting: float, small_step: int, margin_floor: float, margin_ceiling: float) -> None:
        self.small_step = small_step or FIRST_KNEE
        self._finds_knee = not small_step
        self.small, self.large = Regression(forgetting), Regression(forgetting)
        self.margin = margin_ceiling
        """What predictions are multiplied with to be kept 19 times out of 20."""
        self.median_error = 0.0
        """Of |actual / predicted - 1| over the last steps."""
        self._margins = (margin_floor, margin_ceiling)
        self._ratios: deque[float] = deque(maxlen=ERRORS_KEPT)
        self._noted = 0

    @property
    def is_warm(self) -> bool:
        return self.small.is_warm or self.large.is_warm

    @property
    def num_steps(self) -> int:
        """Steps it has learned from."""
        return self.small.count + self.large.count

    def regression(self, tokens: float) -> Regression:
        """The one for steps of so many tokens; the other where it has seen too little."""
        first, second = (self.small, self.large) if tokens <= self.small_step else (self.large, self.small)
        return first if first.is_warm or not second.is_warm else second

    def predict(self, features: StepFeatures) -> float:
        """Seconds; 0 while nothing is known."""
        return self.regression(features.tokens).predict(features) if self.is_warm else 0.0

    def observe(self, features: StepFeatures, seconds: float) -> None:
        """Learns from a step that took `seconds`."""
        predicted = self.predict(features)
        if predicted > 0:
            self._note(seconds / predicted)
            seconds = min(max(seconds, predicted / OUTLIER), predicted * OUTLIER)
        (self.small if features.tokens <= self.small_step else self.large).observe(features, seconds)
        if self._finds_knee and self.num_steps % KNEE_EVERY == 0:
            self._find_knee()

    def chunk_that_fits(self, features: StepFeatures, start: int, rank: int, seconds: float) -> int:
        """Most tokens of a chunk beginning at `start` that a step of `features` can carry and be done in `seconds`."""
        room = 0
        for regression, most in ((self.regression(0), self.small_step), (self.regression(1e9), 1 << 30)):
            tokens = _solve_chunk(regression, features, start, rank, seconds)
            room = max(room, min(tokens, int(most - features.tokens)))
        return room

    def to_json(self) -> dict[str, Any]:
        return {"small_step": self.small_step, "small": self.small.to_json(), "large": self.large.to_json()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes up where `to_json` left. Raises ValueError, KeyError or TypeError: it is not what `to_json` wrote."""
        self.small.load(saved["small"])
        self.large.load(saved["large"])
        if self._finds_knee:
            self.small_step = int(saved["small_step"])

    def _find_knee(self) -> None:
        """Where it has moved, the regime that lost a range starts afresh: what it learned there is not about what it
        has left, and until it knows better the other regime speaks for it."""
        per_token = self.large.theta[1]
        if not (self.small.is_warm and self.large.is_warm and per_token):
            return
        knee = round(min(max(self.small.theta[0] / per_token, KNEES[0]), KNEES[1]))
        if knee > KNEE_MOVED * self.small_step:
            self.large = Regression(self.large.forgetting)
        elif knee * KNEE_MOVED < self.small_step:
            self.small = Regression(self.small.forgetting)
        else:
            return
        self.small_step = knee

    def _note(self, ratio: float) -> None:
        self._ratios.append(ratio)
        self._noted += 1
        if self._noted % SOLVE_EVERY == 0:
            ordered = sorted(self._ratios)
            floor, ceiling = self._margins
            self.margin = min(max(ordered[int(0.95 * len(ordered))], floor), ceiling)
            self.median_error = sorted(abs(r - 1.0) for r in ordered)[len(ordered) // 2]


def _solve_chunk(regression: Regression, features: StepFeatures, start: int, rank: int, seconds: float) -> int:
    """Largest x with predict(features and a chunk of x tokens) <= seconds: the root of a quadratic."""
    theta = regression.theta
    square = theta[4] / 2
    slope = theta[1] + theta[4] * start + theta[6] * rank
    room = seconds - regression.predict(features) - (theta[5] if rank else 0.0)
    if room <= 0:
        return 0
    if square * room < 1e-6 * slope * slope:  # attention is nothing beside the rest
        return int(room / slope)
    if slope == 0 and square == 0:
        return 1 << 30
    return int((sqrt(slope * slope + 4 * square * room) - slope) / (2 * square))
