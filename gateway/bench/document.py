"""A run as JSON: what was sent to whom, with which versions, and what came of it."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version

import msgspec

from gateway.bench.measure import LaneReport, report, succeeded
from gateway.bench.plan import Plan
from gateway.bench.spec import SpecError
from gateway.bench.stream import Stream

FORMAT = "loralane-bench/1"


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration of a run, but for the key.

    Raises:
        SpecError: the timeout is not finite or not positive.
    """

    url: str
    plan: Plan
    warmup: int = 8
    """Requests sent before, at once, and not measured."""
    concurrency: int | None = None
    timeout_s: float = 600.0
    tiers: bool = True
    extensions: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise SpecError(f"the timeout must be finite and positive, not {self.timeout_s}")


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Times in seconds; sent since the beginning of the run."""

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
    """What `--json` writes, and `read` gives back."""

    format: str
    when: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    settings: Settings
    lanes: tuple[LaneReport, ...]
    requests: tuple[Row, ...]

    def write(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def read(text: bytes | str) -> Document:
    """Raises msgspec.DecodeError: it is no such document."""
    return msgspec.json.decode(text, type=Document)


def document(settings: Settings, streams: Sequence[Stream]) -> Document:
    """Measures a finished run."""
    reports = []
    for lane in settings.plan.lanes:
        own = [stream for stream in streams if stream.item.lane == lane.name]
        reports += [report(lane.name, own, lane.slo)] if own else []
    rows = tuple(_row(stream) for stream in streams)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Document(FORMAT, when, versions(), settings, tuple(reports), rows)


def versions() -> dict[str, str]:
    """Of what did the measuring."""
    names = ("loralane", "httptools", *(() if sys.platform == "win32" else ("uvloop",)))
    return {name: version(name) for name in names} | {
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _row(stream: Stream) -> Row:
    item = stream.item
    base = Row(item.lane, item.model, stream.sent, len(item.prompt), stream.tokens, stream.e2e, error=stream.error)
    if not succeeded(stream):
        return base
    return replace(base, ttft=stream.ttft, tpot=stream.tpot, itl_max=max(stream.gaps, default=None))
