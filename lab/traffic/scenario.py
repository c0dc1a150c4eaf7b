"""Describes the traffic of a simulation: a recorded or synthetic trace, optionally modified, with a batch backlog."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from lab.traffic.synthetic import (
    FlashCrowd,
    Shares,
    Sizes,
    arrivals,
    with_adapters,
    with_batch_share,
    with_flash_crowd,
    with_tenants,
    with_tide,
)
from lab.traffic.traces import Trace, cut, read_trace, scale_rate
from lab.traffic.workload import Backlog, Workload

DEFAULT_SECONDS = 600.0
"""Default length of a synthetic trace in seconds."""
MAX_ADAPTERS = 100_000
MIN_RATE_SCALE, MAX_RATE_SCALE = 1e-6, 1e6
TIDE_DEPTH = 0.8
"""Share of the peak's rate that is missing at the lowest point of a tide, as between a day and its night."""
PROMPT, OUTPUT = Sizes(256, 1024), Sizes(64, 256)
"""Default sizes in tokens of the prompts and answers of a synthetic trace, typical of a chat with some context."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The traffic of a simulation, as the options of the command describe it; `workload` makes the requests from it.
    Raises ValueError, which names the value, if one is out of range; `workload` checks `rate` and `cv`."""

    trace: Path | None = None
    """Recorded trace. None means that requests arrive at random, according to `rate`, `cv`, `prompt` and `output`."""
    rate: float = 1.0
    """Requests per second of a synthetic trace."""
    cv: float = 1.0
    """Coefficient of variation of the gaps between arrivals of a synthetic trace: 1 is a Poisson process, 4 is
    bursty."""
    prompt: Sizes = PROMPT
    output: Sizes = OUTPUT
    seconds: float | None = None
    """Length in seconds of a synthetic trace (None means 600), and length that the scaled trace is cut to (None means
    not cut)."""
    tenants: int = 0
    """Number of tenants that the trace is spread over at random. 0 keeps the tenants of the trace."""
    adapters: int = 0
    """Number of adapters that requests ask for. 0 keeps the adapters of the trace."""
    zipf: float = 1.0
    """Zipf exponent of the popularity of adapters: the k-th most popular is drawn with a probability proportional to
    k^-zipf."""
    batch_share: float = 0.0
    """Fraction of the trace's requests that are moved to the batch lane."""
    backlog: Backlog | None = None
    crowd: FlashCrowd | None = None
    """A flash crowd for the adapter in the middle of the order of popularity."""
    tide_s: float = 0.0
    """Period in seconds of a rate that follows a sine. 0 leaves the rate as it is."""
    seed: int = 0
    predicted: Shares | None = None
    """Share of each answer's tokens that its prediction has right. None means that requests have no predictions."""
    limited: bool = True
    """True means that each request's `max_tokens` is the length of its answer, False that answers end by themselves."""

    def __post_init__(self) -> None:
        for name in ("tenants", "adapters", "zipf", "batch_share"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, not {getattr(self, name)}")
        if self.adapters > MAX_ADAPTERS:
            raise ValueError(f"adapters must be at most {MAX_ADAPTERS:,}, not {self.adapters:,}")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"the duration must be finite and positive, not {self.seconds:g}")
        if self.crowd is not None and not self.adapters:
            raise ValueError("a flash crowd needs adapters")
        if not 0 <= self.tide_s < math.inf:
            raise ValueError(f"the period of a tide must be finite and not negative, not {self.tide_s:g}")
        if self.batch_share > 1:
            raise ValueError(f"batch_share must be at most 1, not {self.batch_share:g}")

    @property
    def title(self) -> str:
        name = self.trace.stem if self.trace else f"{self.rate:g} requests/s, CV {self.cv:g}"
        return f"{name} beside a batch backlog of {self.backlog.size}" if self.backlog else name

    def workload(self, rate_scale: float = 1.0) -> Workload:
        """Return the workload, with arrivals `rate_scale` times as fast: traffic read or generated, cut and thinned
        (tide), with lanes, tenants, adapters and flash crowd. Raises ValueError for bad numbers, OSError for the
        file."""
        if not MIN_RATE_SCALE <= rate_scale <= MAX_RATE_SCALE:
            limits = f"{MIN_RATE_SCALE:g} to {MAX_RATE_SCALE:g}"
            raise ValueError(f"the rate scale must be in {limits}, not {rate_scale:g}")
        trace = scale_rate(self._arrivals(), rate_scale)
        if self.seconds is not None:
            trace = cut(trace, self.seconds)
        if self.tide_s:
            trace = with_tide(trace, self.tide_s, TIDE_DEPTH, self.seed)
        if not trace:
            raise ValueError(f"nothing arrives within {self.seconds:g} s at a rate scale of {rate_scale:g}")
        trace = with_batch_share(trace, self.batch_share, self.seed)
        if self.tenants:
            trace = with_tenants(trace, self.tenants, self.seed)
        trace = with_adapters(trace, self.adapters, self.zipf, self.seed)
        if self.crowd is not None:
            trace = with_flash_crowd(trace, self.crowd, self.adapters // 2, self.seed)
        adapters = self.adapters or 1 + max(arrival.adapter for arrival in trace)
        horizon, backlog = trace[-1].time, self.backlog
        return Workload(trace, horizon, backlog, adapters, self.zipf, self.seed, self.predicted, self.limited)

    def _arrivals(self) -> Trace:
        if self.trace is not None:
            return read_trace(self.trace)
        return arrivals(self.rate, self.seconds or DEFAULT_SECONDS, self.prompt, self.output, self.cv, self.seed)
