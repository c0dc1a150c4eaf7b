"""A run as a JSON document: settings, software versions, measurements of lanes and whole, and one row per request."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version

import msgspec

from lab.bench.measure import Cost, LaneResults, cost, report, succeeded
from lab.bench.plan import Plan
from lab.bench.spec import SpecError
from lab.bench.speculation import Speculation
from lab.bench.stream import Stream

FORMAT = "loralane-bench/2"


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration of a run, except for the API key.

    Raises:
        SpecError: the timeout or the price is out of range, or prompts of a chat are token ids.
    """

    url: str
    plan: Plan
    warmup: int = 8
    """Number of requests sent all at once before the run, and not measured. 0 means none."""
    concurrency: int | None = None
    timeout_s: float = 600.0
    tiers: bool = True
    extensions: bool = True
    chat: bool = False
    price_per_hour: float | None = None
    """Price of the measured server, in any currency. None means that tokens have no price."""

    def __post_init__(self) -> None:
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < math.inf:
            raise SpecError(f"the price must be finite and not negative, not {self.price_per_hour}")
        if self.chat and self.plan.dataset is None:
            raise SpecError("a chat needs texts: give --dataset texts, or --dataset FILE")
        if not 0 < self.timeout_s < math.inf:
            raise SpecError(f"the timeout must be finite and positive, not {self.timeout_s}")


@dataclass(frozen=True, slots=True)
class RequestRow:
    """The outcome of one request. Times are in seconds; `sent` counts from the beginning of the run, `e2e` and `ttft`
    from `sent`. `ttft`, `tpot` and `itl_max` (the longest gap) are None if it failed or has too few tokens."""

    lane: str
    model: str
    sent: float
    prompt_tokens: int
    output_tokens: int
    e2e: float
    ttft: float | None = None
    tpot: float | None = None
    itl_max: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """A measured run, as `--json` writes it and `read` parses it."""

    format: str
    when: str
    """Time of measurement in UTC, as ISO 8601."""
    versions: dict[str, str]
    settings: Settings
    lanes: tuple[LaneResults, ...]
    whole: LaneResults
    """Results of all lanes together."""
    cost: Cost | None
    requests: tuple[RequestRow, ...]
    speculation: Speculation | None = None
    """Figures of speculative decoding in the run and its warm-up. None means that the server proposed no tokens or that
    its counters could not be compared."""

    def write(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def read(text: bytes | str) -> Document:
    """Parse a document that `write` returned. Raises msgspec.DecodeError if `text` is not one."""
    return msgspec.json.decode(text, type=Document)


def document(settings: Settings, streams: Sequence[Stream], speculation: Speculation | None = None) -> Document:
    """Measure a finished run, given the outcomes of its requests in `streams`. Lanes without requests have no
    report."""
    reports = []
    for lane in settings.plan.lanes:
        lane_streams = [stream for stream in streams if stream.item.lane == lane.name]
        reports += [report(lane.name, lane_streams, lane.slo)] if lane_streams else []
    whole = report("all", streams)
    price = cost(whole, settings.price_per_hour) if settings.price_per_hour is not None else None
    rows = tuple(_row(stream) for stream in streams)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Document(FORMAT, when, versions(), settings, tuple(reports), whole, price, rows, speculation)


def versions() -> dict[str, str]:
    """Return, by name, the versions of the software that measured and of Python, and the platform."""
    names = ("loralane", "httptools", *(() if sys.platform == "win32" else ("uvloop",)))
    return {name: version(name) for name in names} | {
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _row(stream: Stream) -> RequestRow:
    item = stream.item
    base = RequestRow(
        item.lane, item.model, stream.sent, stream.prompt_tokens, stream.tokens, stream.e2e, error=stream.error
    )
    if not succeeded(stream):
        return base
    return replace(base, ttft=stream.ttft, tpot=stream.tpot, itl_max=max(stream.gaps, default=None))
