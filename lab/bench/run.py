"""Makes one run from its settings: generates the requests, warms up, sends them, and measures."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.process.tasks import end_task
from gateway.serve.process import run_loop
from gateway.terminal.console import Console
from gateway.terminal.output import no_gateway_message
from gateway.terminal.tls import chosen_tls_files
from lab.bench.client import Target
from lab.bench.dataset import OWN_TEXTS, Sample, read_samples
from lab.bench.document import Document, Settings, document
from lab.bench.drive import drive
from lab.bench.measure import succeeded
from lab.bench.plan import BenchRequest, Plan
from lab.bench.speculation import between, read_counts
from lab.bench.stream import Stream
from lab.traffic.traces import read_trace

REFRESH_SECONDS = 0.5
"""Seconds between redraws of the progress bar. A redraw takes a millisecond, in which no stream is read."""


HINTS = {
    "http 400": "if the server does not know ignore_eos or service_tier, use --no-extensions or --no-tier",
    "http 422": "if the server does not know ignore_eos or service_tier, use --no-extensions or --no-tier",
    "http 401": "give its API key with --key or LORALANE_API_KEY",
    "http 403": "give its API key with --key or LORALANE_API_KEY",
    "http 404": "name models that it serves with --models, or another endpoint with --endpoint",
    "http 429": "the key's limits are too narrow for a benchmark: use another key, or --concurrency 1 --warmup 1",
    "timeout": "the server is too slow for --timeout, or hangs: try --warmup 1",
}
"""Advice to the user for each kind of error, by the text with which the kind begins."""


class BenchError(Exception):
    """The run could not be made; the message tells the user why."""


def served_models(target: Target) -> list[str]:
    """Return the ids of the models that the server lists, in its order (loralane: the base model first). Raises
    BenchError if it cannot be reached or its answer is no list of models, TlsFileError for unusable certificates."""
    try:
        response = httpx.get(
            f"{target.base}/v1/models", headers=target.headers, timeout=10, verify=chosen_tls_files().context()
        )
        return [model["id"] for model in response.raise_for_status().json()["data"]]
    except httpx.TransportError as error:
        raise BenchError(no_gateway_message(target.url, str(error))) from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{target.url} does not list its models: {error}") from error


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run: what was measured, and the outcome of each request."""

    document: Document
    streams: list[Stream]


def run(settings: Settings, key: str, console: Console, label: str = "") -> Outcome:
    """Make a run, with progress bars on `console` that begin with `label`. `key` is the API key. Raises BenchError if
    the server or every warm-up request fails, ValueError or OSError for inputs, and TlsFileError for certificates."""
    target = Target(settings.url, key, settings.tiers, settings.extensions, settings.chat)
    plan = settings.plan
    samples = plan_samples(plan)
    items = plan.items(read_trace(Path(plan.trace)) if plan.trace else (), samples)
    if not items:
        raise BenchError("there is nothing to send: no request arrives within the duration")
    warmup = plan.warmup(settings.warmup, samples) if settings.warmup else []
    before = read_counts(target)
    streams = run_loop(_run(settings, target, warmup, items, LaneProgressBars(items, console, label)))
    return Outcome(document(settings, streams, between(before, read_counts(target))), streams)


def plan_samples(plan: Plan) -> Sequence[Sample]:
    """Return the prompts of a plan's data set, if that is a file. Raises OSError or ValueError if it cannot be read."""
    return read_samples(Path(plan.dataset)) if plan.dataset not in (None, OWN_TEXTS) else ()


async def _run(
    settings: Settings,
    target: Target,
    warmup: Sequence[BenchRequest],
    items: Sequence[BenchRequest],
    bars: LaneProgressBars,
) -> list[Stream]:
    try:
        if warmup:
            await warm_up(target, warmup, settings.timeout_s)
        async with bars:
            return await drive(
                target, items, concurrency=settings.concurrency, timeout_s=settings.timeout_s, on_end=bars.count
            )
    except OSError as error:
        raise BenchError(no_gateway_message(target.url, str(error))) from error


async def warm_up(target: Target, items: Sequence[BenchRequest], timeout_s: float) -> None:
    """Send the warm-up requests and wait for their ends. Raises BenchError if none of them succeeds; the message says
    what to do about the usual reasons."""
    streams = await drive(target, items, timeout_s=timeout_s)
    if not any(succeeded(stream) for stream in streams):
        kinds = Counter(stream.error or "no tokens" for stream in streams)
        hints = {hint for kind in kinds for sign, hint in HINTS.items() if kind.startswith(sign)}
        raise BenchError("; ".join([f"every warm-up request failed: {', '.join(kinds)}", *sorted(hints)]))


class LaneProgressBars:
    """Progress bars of how many requests of each lane have ended, shown on a terminal between enter and exit of this
    async context manager. `count` advances them. Their names are `label` and the lane."""

    def __init__(self, items: Sequence[BenchRequest], console: Console, label: str = "") -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal)
        lanes = Counter(item.lane for item in items)
        self._tasks = {lane: self._progress.add_task(label + lane, total=count) for lane, count in lanes.items()}
        self._refresher: asyncio.Task[None] | None = None

    def count(self, stream: Stream) -> None:
        self._progress.advance(self._tasks[stream.item.lane])

    async def __aenter__(self) -> LaneProgressBars:
        self._progress.start()
        self._refresher = asyncio.create_task(self._refresh())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._refresher is not None
        await end_task(self._refresher)
        self._progress.stop()

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            self._progress.refresh()
