"""Section D: decoding through the real engine at the 8B shape in bf16, compared with the bytes that a step must read.

Waves prefill 64 requests, then time steps in which all of them decode, including planning and sampling. The limit is
the time to read weights, KV and adapters once at the measured copy bandwidth. Streams start requests as others end, so
they include prefill and adapter loads: with one adapter for all, and with 2,000 of ranks 8 to 64 drawn by Zipf's law.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.gpu.house import House, HouseSize, build_house, check_events
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.shapes import spread
from benchmarks.gpu.timing import memory_bandwidth
from engine.core.messages.commands import Abort, Submit
from engine.core.messages.grammar import Grammar
from engine.core.messages.requests import AdapterHash, Lane, Request, SamplingParams

RANKS = (8, 16, 32, 64)
BASE = "base"
LEAST_S = 6.0
SETTLING_STEPS = 4
"""Number of steps that run before timing starts, until every step finds the state that the previous one left."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the section. In a wave, `batch` requests with prompts of `prompt` tokens decode for `steps` steps. In a
    stream, `stream_requests` requests have prompts of `stream_prompt` and answers of `stream_tokens` tokens. Where
    adapters are drawn by Zipf's law, they are drawn from `zipf` adapters."""

    house: HouseSize
    batch: int
    prompt: int
    steps: int
    zipf: int
    stream_prompt: int
    stream_tokens: int
    stream_requests: int


FULL = Sizes(HouseSize(False, 64, 4096, 4096), 64, 1024, 48, 2000, 256, 64, 192)
TINY = Sizes(HouseSize(True, 4, 32, 128, num_pages=600), 4, 20, 6, 30, 12, 6, 8)


@dataclass(frozen=True)
class Wave:
    """Requests that decode together; `adapters[i]` is the adapter of request i. All of them follow `grammar`, if it is
    not None."""

    name: str
    adapters: Sequence[AdapterHash | None]
    grammar: Grammar | None = None

    @property
    def ranks(self) -> list[int]:
        """Rank of each distinct adapter in the wave."""
        return [rank_of(adapter) for adapter in sorted({one for one in self.adapters if one})]


def rank_of(adapter_hash: AdapterHash) -> int:
    return int(adapter_hash.split("/")[0])


def run(journal: Journal) -> None:
    sizes = TINY if journal.tiny else FULL
    with tempfile.TemporaryDirectory(prefix="loralane-8b-") as scratch:
        house = build_house(sizes.house, Path(scratch), journal.tell)
        bandwidth = memory_bandwidth(house.runner.facts.device, journal.tiny)
        journal.row("bandwidth", "of kernels", **{"GB/s": bandwidth / 1e9})
        waves(journal, house, sizes, bandwidth)
        streams(journal, house, sizes)


def waves(journal: Journal, house: House, sizes: Sizes, bandwidth: float) -> None:
    base = 0.0
    timed_steps(house, Wave("warm-up", (None,) * sizes.batch), sizes)
    for wave in plan_waves(house, sizes):
        with journal.case(f"decode: {wave.name}", LEAST_S):
            row = decode(house, wave, sizes, bandwidth)
            base = row["tokens/s"] if wave.name == BASE else base
            ratio = row["tokens/s"] / base if base else None
            journal.row(f"decode, batch {sizes.batch}, context {sizes.prompt}", wave.name, **row, **{"of base": ratio})


def plan_waves(house: House, sizes: Sizes) -> Iterator[Wave]:
    """Yield the waves to time, registering their adapters with the engine before each. The engine knows no adapter
    during the first wave; later waves find those registered before."""
    batch = sizes.batch
    yield Wave(BASE, (None,) * batch)
    own = house.register(spread(RANKS, batch), "a")
    yield Wave(f"{batch} adapters, ranks 8-64", own)
    yield Wave("idle: adapters resident, unused", (None,) * batch)
    yield Wave("1 adapter, rank 16", (own[1],) * batch)
    yield Wave("8 adapters, ranks 8-64", spread_adapters(own[:8], batch))
    known = house.register(spread(RANKS, sizes.zipf), "z")
    yield Wave(f"Zipf draw of {sizes.zipf}", draw_zipf(known, batch, Random(0)))


def spread_adapters(adapters: Sequence[AdapterHash], count: int) -> list[AdapterHash]:
    return [adapters[index % len(adapters)] for index in range(count)]


def draw_zipf(adapters: Sequence[AdapterHash], count: int, rng: Random) -> list[AdapterHash]:
    """Draw from `adapters` `count` times, with repetition: the i-th with a probability proportional to 1 / i."""
    return rng.choices(adapters, [1 / (place + 1) for place in range(len(adapters))], k=count)


def decode(house: House, wave: Wave, sizes: Sizes, bandwidth: float) -> dict[str, float]:
    """Time a wave and return its figures: tokens per second, median and p99 of a step in ms, and the limit: the ms that
    reading every byte once takes at `bandwidth` (bytes per second), also as a share of the median step."""
    seconds, generated, contexts = timed_steps(house, wave, sizes)
    moved = house.weight_bytes() + house.kv_bytes(int(statistics.mean(contexts))) + house.adapter_bytes(wave.ranks)
    step = statistics.median(seconds)
    return {
        "tokens/s": generated / sum(seconds),
        "step ms": step * 1e3,
        "p99 ms": sorted(seconds)[int(0.99 * (len(seconds) - 1))] * 1e3,
        "limit ms": moved / bandwidth * 1e3,
        "of limit": moved / bandwidth / step,
    }


def timed_steps(house: House, wave: Wave, sizes: Sizes) -> tuple[list[float], int, list[int]]:
    """Prefill a wave, time `sizes.steps` steps in which all of its requests decode, and abort the requests.

    Returns the seconds of each step, the number of generated tokens, and the tokens in the KV cache before each step.
    Raises RuntimeError if requests were preempted.
    """
    counters = house.engine.state.counters
    names = start_wave(house, wave, sizes.prompt)
    preemptions = counters.preemptions
    timed = time_steps(house, sizes.steps)
    if counters.preemptions > preemptions:
        raise RuntimeError("the page pool does not hold the whole wave: requests were preempted")
    end_wave(house, names)
    return timed


def time_steps(house: House, steps: int) -> tuple[list[float], int, list[int]]:
    """Time `steps` steps of the engine's requests. Returns what `timed_steps` does."""
    engine = house.engine
    seconds, generated, contexts = [], 0, []
    for _ in range(steps):
        contexts.append(sum(len(sequence.tokens) for sequence in engine.state.running.values()))
        begun = time.perf_counter()
        generated += check_events(engine.step())
        seconds.append(time.perf_counter() - begun)
    return seconds, generated, contexts


def start_wave(house: House, wave: Wave, prompt: int) -> list[str]:
    """Submit a wave's requests with prompts of `prompt` tokens, and step until all of them decode, and `SETTLING_STEPS`
    more. Returns their names."""
    engine, names = house.engine, [f"{wave.name}/{index}" for index in range(len(wave.adapters))]
    for index, (name, adapter) in enumerate(zip(names, wave.adapters, strict=True)):
        tokens = house.runner.facts.max_model_len - prompt
        engine.inbox.put(Submit(make_request(name, prompt, tokens, adapter, Random(index), wave.grammar)))
    started: set[str] = set()
    while len(started) < len(names):
        events = engine.step()
        check_events(events)
        started |= {event.request_id for event in events if event.tokens}
    for _ in range(SETTLING_STEPS):
        check_events(engine.step())
    return names


def end_wave(house: House, names: Sequence[str]) -> None:
    for name in names:
        house.engine.inbox.put(Abort(name))
    house.engine.step()
    while house.engine.state.has_work:
        house.engine.step()


def make_request(
    name: str,
    prompt: int,
    tokens: int,
    adapter_hash: AdapterHash | None,
    rng: Random,
    grammar: Grammar | None = None,
) -> Request:
    """Return a greedy request of `prompt` random tokens and exactly `tokens` output tokens, in the batch lane; fewer
    only if its grammar ends."""
    ids = tuple(rng.randrange(10, 90) for _ in range(prompt))
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, grammar=grammar)
    return Request(name, ids, params, adapter_hash, Lane.BATCH, arrival=time.monotonic())


def streams(journal: Journal, house: House, sizes: Sizes) -> None:
    one = house.register((16,), "one")
    many = house.register(spread(RANKS, sizes.zipf), "z")
    rates: list[float] = []
    for name, adapters in (
        ("1 adapter, rank 16", one * sizes.stream_requests),
        (f"{sizes.zipf} adapters, ranks 8-64, Zipf", draw_zipf(many, sizes.stream_requests, Random(1))),
    ):
        with journal.case(f"stream: {name}", LEAST_S):
            row = stream(house, adapters, sizes)
            rates.append(row["tokens/s"])
            journal.row(f"stream, {sizes.batch} at once", name, **row, **{"of one": rates[-1] / rates[0]})
    journal.note("adapters of one rank share one copy in host memory; each is copied to pages of its own")


def stream(house: House, adapters: Sequence[AdapterHash], sizes: Sizes) -> dict[str, float]:
    """Run a stream: one request for each of `adapters`, all submitted at once. Returns tokens per second from the first
    request to the last token, the seconds, and the numbers of different adapters, loads to the device and evictions."""
    engine, counters = house.engine, house.engine.state.counters
    loads, evictions = counters.adapters.loads, counters.adapters.evictions
    for index, adapter in enumerate(adapters):
        engine.inbox.put(
            Submit(make_request(f"s{index}", sizes.stream_prompt, sizes.stream_tokens, adapter, Random(index)))
        )
    begun, generated = time.perf_counter(), 0
    generated += check_events(engine.step())
    while engine.state.has_work:
        generated += check_events(engine.step())
    seconds = time.perf_counter() - begun
    return {
        "tokens/s": generated / seconds,
        "seconds": seconds,
        "adapters": len(set(adapters)),
        "loads": counters.adapters.loads - loads,
        "evictions": counters.adapters.evictions - evictions,
    }
