"""Time of a routing decision with many replicas, adapters and prefixes: `python -m benchmarks.router`.

The router knows the prefix keys that each replica holds. Requests ask for adapters by a Zipf distribution; half of them
continue a conversation that some replica has served, and a tenth is batch work. On a virtual clock, 2,000 requests come
a second, and each replica tells the router its state ten times a second, which is one round. A decision includes the
bookkeeping of a request that is sent and that ends. Durations of decisions are processor time, so that other processes
do not count: a decision waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from benchmarks.runner import JSON, Run, benchmark, option, table_of
from engine.core.messages.requests import Lane
from gateway.routing.news import Ask, News
from gateway.routing.prefixes import prefix_keys
from gateway.routing.router import Router
from lab.traffic.synthetic import Zipf

RATE = 2_000.0
"""Requests per second, by which the router's clock advances."""
NEWS_EVERY_S = 0.1
ON_DEVICE = 300
"""Adapters that each replica has in device memory."""
KEYS_PER_PROMPT = 8
"""Prompts of 2,048 tokens."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Durations in microseconds."""

    replicas: int
    adapters: int
    prefix_keys: int
    p50: float
    p99: float
    longest: float
    tick: float
    """The longest end of a round, in which the numbers of replicas of all adapters are adapted."""


COLUMNS = "replicas | adapters | keys a replica | p50 | p99 | longest | end of a round"
CELLS = (
    "{0.replicas:,} | {0.adapters:,} | {0.prefix_keys:,} | {0.p50:,.0f}"
    " | {0.p99:,.0f} | {0.longest:,.0f} | {0.tick:,.0f}"
)


def measure(replicas: int, adapters: int, keys: int, decisions: int) -> Cost:
    rng = Random(1)
    router = Router()
    known = [list(_fill(router, f"replica-{number}", keys, rng)) for number in range(replicas)]
    news = [_news(adapters, rng) for _ in range(replicas)]
    taken, ticks, told_at = [], [], -NEWS_EVERY_S
    asks = _asks(adapters, known, rng)
    for number in range(decisions):
        now = number / RATE
        if now >= told_at + NEWS_EVERY_S:
            told_at = now
            ticks.append(_tell(router, news, now))
        ask = next(asks)
        before = time.thread_time()
        decision = router.choose(ask, now)
        router.finish(decision.replica, ask.lane)
        taken.append(time.thread_time() - before)
    micros = np.array(taken) * 1e6
    p50, p99 = (float(np.percentile(micros, share)) for share in (50, 99))
    return Cost(replicas, adapters, keys, p50, p99, float(micros.max()), max(ticks) * 1e6)


def measure_keys(prompt_tokens: int, repeat: int = 200) -> float:
    """Return the median microseconds of computing the prefix keys of a prompt, as is done once a request."""
    tokens = tuple(Random(1).randrange(100_000) for _ in range(prompt_tokens))
    times = []
    for _ in range(repeat):
        before = time.perf_counter()
        prefix_keys(tokens, "adapter")
        times.append(time.perf_counter() - before)
    return float(np.median(times)) * 1e6


def _fill(router: Router, name: str, keys: int, rng: Random) -> Iterator[tuple[int, ...]]:
    """Add a replica that holds `keys` random prefix keys, and yield its prompts, each as a tuple of its prefix keys."""
    replica = router.join(name)
    for _ in range(keys // KEYS_PER_PROMPT):
        prompt = tuple(rng.getrandbits(64) for _ in range(KEYS_PER_PROMPT))
        router.prefixes.add(replica.index, prompt)
        yield prompt


def _news(adapters: int, rng: Random) -> News:
    on_device = frozenset(f"adapter-{rng.randrange(adapters)}" for _ in range(ON_DEVICE))
    return News(on_device=on_device, wait_s=rng.random() / 10, prompt_token_s=1e-5)


def _tell(router: Router, news: list[News], now: float) -> float:
    """Let the router hear the `news` of all replicas at the time `now`; return the seconds of ending the round."""
    for replica, told in zip(router.replicas.values(), news, strict=True):
        replica.hear(told, now)
    before = time.perf_counter()
    router.tick(now)
    return time.perf_counter() - before


def _asks(adapters: int, known: list[list[tuple[int, ...]]], rng: Random) -> Iterator[Ask]:
    draw = Zipf(adapters, 1.0, rng)
    while True:
        prompt = rng.choice(rng.choice(known)) if rng.random() < 0.5 else ()
        fresh = tuple(rng.getrandbits(64) for _ in range(KEYS_PER_PROMPT - len(prompt) // 2))
        keys = (prompt[: KEYS_PER_PROMPT // 2] + fresh)[:KEYS_PER_PROMPT]
        lane = Lane.BATCH if rng.random() < 0.1 else Lane.INTERACTIVE
        yield Ask(2048, lane, f"adapter-{draw()}", 100_000_000, keys, output_tokens=200)


@benchmark(
    option("--replicas", 64),
    option("--adapters", 10_000),
    option("--keys", 100_000, "prefix keys of each replica"),
    option("--decisions", 20_000),
    JSON,
)
def bench(run: Run) -> None:
    options = run.options
    sizes = [(8, 2_000, options.keys), (options.replicas, options.adapters, options.keys)]
    costs = [measure(*size, options.decisions) for size in run.track(dict.fromkeys(sizes))]
    keys = {tokens: measure_keys(tokens) for tokens in (512, 4_096, 32_768)}
    run.show(
        table_of("Microseconds a routing decision", costs, COLUMNS, CELLS), {"decisions": costs, "prefix_keys_us": keys}
    )
    print("Prefix keys: " + ", ".join(f"{tokens:,} tokens {micros:,.0f} µs" for tokens, micros in keys.items()))


if __name__ == "__main__":
    bench.main()
