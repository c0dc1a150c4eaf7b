"""Parses lanes as written on the command line: `interactive:rate=0.7,n=60,in=24-96,out=16,ttft=500ms`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from gateway.core.counts import parse_count

LANES = ("interactive", "batch", "default")
MAX_TOKENS = 2**31
MAX_TOKEN_ID = 2**32
"""Exclusive upper bound of token ids: prompts are held as 32-bit integers."""
MIN_CV, MAX_CV = 0.001, 100.0
MIN_RATE, MAX_RATE = 1e-6, 1e6
MAX_REQUESTS = 10_000_000
"""Maximum number of requests of one lane; more do not fit into memory."""


class SpecError(ValueError):
    """The specification of a run or lane is invalid; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: uniform over low..high, or log-normal where `cv` is not 0. Raises SpecError if a
    value is out of range."""

    low: int
    high: int
    cv: float = 0.0
    """Coefficient of variation. If it is not 0, `low` is the mean, and `high` bounds only the lengths of a trace."""

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= MAX_TOKENS:
            raise SpecError(f"lengths must be at least 1, at most {MAX_TOKENS} and in order, not {self}")
        if self.cv and not MIN_CV <= self.cv <= MAX_CV:
            raise SpecError(f"the CV of lengths must be in {MIN_CV:g} to {MAX_CV:g}, not {self.cv:g}")

    def draw(self, rng: random.Random) -> int:
        if not self.cv:
            return rng.randint(self.low, self.high)
        variance = math.log(1 + self.cv**2)
        return max(1, round(rng.lognormvariate(math.log(self.low) - variance / 2, math.sqrt(variance))))

    def bound(self, length: int) -> int:
        """Return a trace's length clamped to low..high, or to 1..high if the distribution is log-normal."""
        return min(max(length, 1 if self.cv else self.low), self.high)

    def __str__(self) -> str:
        return f"{self.low}~{self.cv:g}" if self.cv else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """Latency objective that goodput counts: limits in seconds. None means that a latency has no limit."""

    ttft: float | None = None
    itl: float | None = None
    """Limit of the 99th percentile of a request's own ITLs."""
    tpot: float | None = None
    """Limit of a request's mean time per output token."""

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.ttft, self.itl, self.tpot))


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """The requests of one lane: how many, when they arrive and how long they are.

    Raises:
        SpecError: a value is out of range.
    """

    name: str
    n: int | None = None
    """Number of requests. None means as many as arrive within the run's duration, or as the trace has."""
    rate: float | None = None
    """Mean arrivals per second, independent of the server (open loop). None means all at once, or as in the trace."""
    cv: float = 1.0
    """Coefficient of variation of the Gamma-distributed gaps between arrivals; 1 is Poisson, more is bursty."""
    start: float = 0.0
    """Seconds from the beginning of the run after which the lane begins."""
    inputs: Lengths | None = None
    """Prompt tokens; with a trace, bounds on the trace's lengths. None means 64-256, or the trace's unchanged."""
    outputs: Lengths | None = None
    """Output tokens; with a trace, bounds on the trace's lengths. None means 64, or the trace's unchanged."""
    slo: LatencyObjective = LatencyObjective()

    def __post_init__(self) -> None:
        if self.name not in LANES:
            raise SpecError(f"there is no lane {self.name!r}; known are {', '.join(LANES)}")
        limits = (
            ("n", self.n, 1, MAX_REQUESTS), ("rate", self.rate, MIN_RATE, MAX_RATE), ("cv", self.cv, MIN_CV, MAX_CV)
        )  # fmt: skip
        for name, value, low, high in limits:
            if value is not None and not low <= value <= high:
                raise SpecError(f"{name} must be positive, in {low:g} to {high:g}, not {value}")
        if not 0 <= self.start < math.inf:
            raise SpecError(f"start must be finite and not negative, not {self.start}")


def parse_lane(text: str) -> LaneSpec:
    """Parse a lane as written on the command line, `NAME` or `NAME:key=value,...`, into its specification. Raises
    SpecError if the name, a key or a value is wrong, or a key is repeated; the message says which, and what is
    known."""
    name, _, rest = text.partition(":")
    given = [_pair(item) for item in rest.split(",") if item.strip()]
    pairs = dict(given)
    if len(pairs) < len(given):
        raise SpecError(f"{name}: a key is given twice: {', '.join(key for key, _ in given)}")
    for key in pairs:
        if key not in _READERS:
            nearest = get_close_matches(key, _READERS, 1, 0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(_READERS)}"
            raise SpecError(f"{name}: there is no {key!r}; {hint}")
    values = {key: _read(name, key, value) for key, value in pairs.items()}
    limits = {key: values.pop(key) for key in ("ttft", "itl", "tpot") if key in values}
    renamed = {_FIELDS.get(key, key): value for key, value in values.items()}
    return LaneSpec(name.strip(), **renamed, slo=LatencyObjective(**limits))


def override(lane: LaneSpec, burstiness: float | None, **limits_ms: float | None) -> LaneSpec:
    """Return a copy of a lane in which options replace its values, unless None. `burstiness` is vLLM's, 1 / CV^2;
    `limits_ms` has `ttft`, `itl`, `tpot` in milliseconds. Raises SpecError for values out of range."""
    values = {"--burstiness": burstiness, **{f"--{name}-ms": limit for name, limit in limits_ms.items()}}
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise SpecError(f"{name} must be finite and positive, not {value}")
    limits = {name: limit / 1000 for name, limit in limits_ms.items() if limit is not None}
    changed = replace(lane, slo=replace(lane.slo, **limits))
    return changed if burstiness is None else replace(changed, cv=burstiness**-0.5)


def parse_lengths(text: str) -> Lengths:
    """Parse `16`, `24-96` (both ends included), `1k-4k` or `600~1.5` (log-normal: mean and CV). Raises ValueError."""
    mean, tilde, cv = text.partition("~")
    if tilde:
        return Lengths(parse_count(mean), MAX_TOKENS, float(cv))
    low, _, high = text.partition("-")
    return Lengths(parse_count(low), parse_count(high or low))


def parse_range(text: str) -> tuple[int, int]:
    """Parse token ids such as `1000-30000` into (low, high), whose end is excluded. Raises SpecError for other text."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise SpecError(f"a range is written LOW-HIGH, as 1000-30000, not {text!r}")
    if int(high) > MAX_TOKEN_ID:
        raise SpecError(f"token ids are below {MAX_TOKEN_ID}, not {text!r}")
    return int(low), int(high)


def parse_seconds(text: str) -> float:
    """Parse `0.5`, `0.5s` or `500ms` into seconds. Raises ValueError for other text, negative and infinite times."""
    scale = 1000.0 if text.endswith("ms") else 1.0
    seconds = float(text.removesuffix("ms").removesuffix("s")) / scale
    if not 0 <= seconds < math.inf:
        raise SpecError(f"a time must be finite and must not be negative, not {text}")
    return seconds


_READERS: Mapping[str, Callable[[str], Any]] = {
    "n": int,
    "rate": float,
    "cv": float,
    "start": parse_seconds,
    "in": parse_lengths,
    "out": parse_lengths,
    "ttft": parse_seconds,
    "itl": parse_seconds,
    "tpot": parse_seconds,
}
_FIELDS = {"in": "inputs", "out": "outputs"}


def _pair(item: str) -> tuple[str, str]:
    key, separator, value = item.partition("=")
    if not separator:
        raise SpecError(f"{item.strip()!r} wants a value, as in {item.strip()}=1")
    return key.strip(), value.strip()


def _read(lane: str, key: str, value: str) -> Any:
    try:
        return _READERS[key](value)
    except SpecError as error:
        raise SpecError(f"{lane}: {key}: {error}") from error
    except ValueError as error:
        raise SpecError(f"{lane}: {key}: cannot read {value!r}") from error
