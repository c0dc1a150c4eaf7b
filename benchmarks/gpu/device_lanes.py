"""Section E: how much interactive requests and a batch backlog slow each other down on the device.

The real engine runs in its own thread at the 8B shape with adapters of ranks 8 to 64. Interactive requests arrive at
random times, the same in all runs; the backlog must not run out. Times are taken where tokens leave the engine.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random

from benchmarks.gpu.decoding import RANKS
from benchmarks.gpu.house import House, HouseSize, build_house, check_events
from benchmarks.gpu.journal import Journal, Value
from benchmarks.gpu.shapes import spread
from engine.core.messages.commands import Abort, Submit
from engine.core.messages.requests import AdapterHash, Lane, Request, SamplingParams, TokenEvent
from engine.engine import Engine

ADAPTERS = 8
PAUSE_S = 0.002


@dataclass(frozen=True)
class Sizes:
    """Sizes of the section. `window_s` seconds are measured, after `settle_s` seconds in which a backlog fills the
    engine. `rate` interactive requests a second have prompts of `prompt` (least, most) and answers of `tokens` tokens;
    the `backlog` batch requests have `batch_prompt` and `batch_tokens`."""

    house: HouseSize
    window_s: float
    settle_s: float
    rate: float
    prompt: tuple[int, int]
    tokens: int
    backlog: int
    batch_prompt: int
    batch_tokens: int
    last_s: float
    """Seconds after the window within which submitted requests must end."""


FULL = Sizes(HouseSize(False, 96, 2048, 4096), 7.0, 2.0, 8.0, (64, 512), 32, 600, 512, 192, 10.0)
TINY = Sizes(HouseSize(True, 6, 48, 128, num_pages=600), 0.7, 0.1, 8.0, (5, 20), 4, 400, 16, 12, 10.0)


class Watch:
    """Records when and how many tokens left the engine, for each request, and which have ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, list[tuple[float, int]]] = {}
        self._ended: set[str] = set()
        self._error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Record the error that ended the engine, for `ended` to raise in the thread that calls it."""
        with self._lock:
            self._error = error

    def deliver(self, events: list[TokenEvent]) -> None:
        """Record events; called by the engine. Raises RuntimeError, which ends the engine, if a request was refused."""
        now = time.monotonic()
        check_events(events)
        with self._lock:
            for event in events:
                self._seen.setdefault(event.request_id, []).extend([(now, len(event.tokens))] if event.tokens else ())
                if event.finish_reason is not None:
                    self._ended.add(event.request_id)

    def ended(self, names: Sequence[str]) -> bool:
        """Return whether all named requests have ended. Raises the error that ended the engine, if any."""
        with self._lock:
            if self._error:
                raise self._error
            return self._ended.issuperset(names)

    def moments(self, name: str) -> list[float]:
        """Return the time of each token of a request, in order, in seconds of time.monotonic."""
        with self._lock:
            return [moment for moment, count in self._seen.get(name, ()) for _ in range(count)]

    def tokens(self, prefix: str, begun: float, ended: float) -> int:
        """Count the tokens, from `begun` to `ended` (time.monotonic), of requests whose names begin with `prefix`."""
        with self._lock:
            spans = [times for name, times in self._seen.items() if name.startswith(prefix)]
        return sum(count for times in spans for moment, count in times if begun <= moment < ended)


@dataclass(frozen=True)
class Arrival:
    at: float
    """Seconds after the beginning of the window at which to submit the request."""
    request: Request


def run(journal: Journal) -> None:
    sizes = TINY if journal.tiny else FULL
    with tempfile.TemporaryDirectory(prefix="loralane-8b-") as scratch:
        house = build_house(sizes.house, Path(scratch), journal.tell)
        adapters = house.register(spread(RANKS, 2 * ADAPTERS), "a")
        phases = {"alone": (True, False), "batch alone": (False, True), "beside each other": (True, True)}
        phase(house, replace(sizes, window_s=sizes.window_s / 4), adapters, "warm-up", (True, True))
        for name, lanes in phases.items():
            with journal.case(name, sizes.window_s + sizes.settle_s):
                journal.row("lanes", name, **phase(house, sizes, adapters, name, lanes))


def phase(
    house: House, sizes: Sizes, adapters: Sequence[AdapterHash], name: str, lanes: tuple[bool, bool]
) -> dict[str, Value]:
    """Run one phase and return what `latencies` does and the tokens per second of batch requests. `lanes` says which
    lanes have requests: (interactive, batch). Raises RuntimeError if the backlog ran out or a request did not end."""
    interactive, batch = lanes
    watch = Watch()
    backlog = [batch_request(sizes, adapters, f"{name}/b{i}", Random(i)) for i in range(sizes.backlog if batch else 0)]
    arrivals = plan_arrivals(sizes, adapters, f"{name}/i") if interactive else []
    with running(house, watch) as engine:
        for request in backlog:
            engine.inbox.put(Submit(request))
        time.sleep(sizes.settle_s if batch else 0)
        begun = time.monotonic()
        submitted = submit_in_time(engine, arrivals, begun)
        time.sleep(max(0.0, begun + sizes.window_s - time.monotonic()))
        ended = time.monotonic()
        wait_for(watch, list(submitted), ended + sizes.last_s)
        dry = watch.ended([request.id for request in backlog]) and batch
        for request in backlog:
            engine.inbox.put(Abort(request.id))
        wait_for(watch, [request.id for request in backlog], time.monotonic() + sizes.last_s)
    if dry:
        raise RuntimeError("the backlog ran dry")
    rates = {"batch tokens/s": watch.tokens(f"{name}/b", begun, ended) / (ended - begun)} if batch else {}
    return latencies(watch, submitted) | rates


@contextmanager
def running(house: House, watch: Watch) -> Iterator[Engine]:
    """Run an engine over the house's state and executor in a thread within the block, which gets the engine. Its events
    go to `watch`. At the end, stop the engine and wait for the thread."""
    engine = Engine(house.engine.state, house.engine.executor)

    def loop() -> None:
        try:
            engine.run(watch.deliver)
        except Exception as error:  # raised again in the thread that waits for the tokens
            watch.fail(error)

    thread = threading.Thread(target=loop, name="engine")
    thread.start()
    try:
        yield engine
    finally:
        engine.stop()
        thread.join()


def plan_arrivals(sizes: Sizes, adapters: Sequence[AdapterHash], prefix: str) -> list[Arrival]:
    """Return a window's Poisson arrivals of interactive requests, `sizes.rate` a second, the same in every phase."""
    arrivals: list[Arrival] = []
    rng, at = Random(0), 0.0
    while (at := at + rng.expovariate(sizes.rate)) < sizes.window_s:
        params = SamplingParams(max_tokens=sizes.tokens, temperature=0.0, ignore_eos=True)
        prompt = draw_prompt(rng, rng.randint(*sizes.prompt))
        adapter = rng.choice(adapters[:ADAPTERS])
        arrivals.append(Arrival(at, Request(f"{prefix}{len(arrivals)}", prompt, params, adapter)))
    return arrivals


def batch_request(sizes: Sizes, adapters: Sequence[AdapterHash], name: str, rng: Random) -> Request:
    params = SamplingParams(max_tokens=sizes.batch_tokens, temperature=0.0, ignore_eos=True)
    prompt, adapter = draw_prompt(rng, sizes.batch_prompt), rng.choice(adapters[ADAPTERS:])
    return Request(name, prompt, params, adapter, Lane.BATCH, arrival=time.monotonic())


def draw_prompt(rng: Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10, 90) for _ in range(length))


def submit_in_time(engine: Engine, arrivals: Sequence[Arrival], begun: float) -> dict[str, float]:
    """Submit each request at its time after `begun` (time.monotonic), sleeping in between. Returns request id ->
    scheduled time, from which TTFT is counted."""
    submitted = {}
    for arrival in arrivals:
        due = begun + arrival.at
        time.sleep(max(0.0, due - time.monotonic()))
        engine.inbox.put(Submit(arrival.request._replace(arrival=due)))
        submitted[arrival.request.id] = due
    return submitted


def wait_for(watch: Watch, names: Sequence[str], until: float) -> None:
    """Block until all named requests have ended. Raises RuntimeError if they have not by `until` (time.monotonic), and
    the engine's error if it has failed."""
    while not watch.ended(names):
        if time.monotonic() > until:
            raise RuntimeError(f"of {len(names)} requests some did not end")
        time.sleep(PAUSE_S)


def latencies(watch: Watch, submitted: dict[str, float]) -> dict[str, Value]:
    """Return the number of interactive requests, and p50 and p99 of their TTFT and ITL in ms; empty without requests.
    `submitted` is what `submit_in_time` returned."""
    if not submitted:
        return {}
    moments = {name: watch.moments(name) for name in submitted}
    ttfts = [(moments[name][0] - due) * 1e3 for name, due in submitted.items()]
    gaps = [(b - a) * 1e3 for times in moments.values() for a, b in pairwise(times)]
    return {
        "requests": len(submitted),
        "TTFT p50 ms": quantile(ttfts, 0.5),
        "TTFT p99 ms": quantile(ttfts, 0.99),
        "ITL p50 ms": quantile(gaps, 0.5),
        "ITL p99 ms": quantile(gaps, 0.99),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile without interpolation: the sorted value at index `share` times the number of values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
