"""Seeded requests for benchmarks, so that every server does the same work."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from gateway.serve.process import run_loop
from lab.bench.client import Target
from lab.bench.drive import drive
from lab.bench.measure import succeeded
from lab.bench.plan import BenchRequest
from lab.bench.stream import Stream


def requests(models: Sequence[str], count: int, seed: int = 0) -> list[BenchRequest]:
    """Return `count` requests of 32 to 127 prompt and 16 to 95 output tokens, for the models in turn."""
    rng = random.Random(seed)

    def item(index: int) -> BenchRequest:
        prompt = tuple(rng.randrange(1000, 40_000) for _ in range(rng.randrange(32, 128)))
        return BenchRequest(models[index % len(models)], prompt, rng.randrange(16, 96))

    return [item(index) for index in range(count)]


def answered(
    target: Target,
    items: Sequence[BenchRequest],
    concurrency: int | None = None,
    on_end: Callable[[Stream], None] = lambda stream: None,
) -> list[Stream]:
    """Send requests, at most `concurrency` at once (None: each at its scheduled time), and return their results. Raises
    RuntimeError if one fails or gets no tokens."""
    streams = run_loop(drive(target, items, concurrency=concurrency, timeout_s=3000, on_end=on_end))
    failed = [stream.error or "no tokens" for stream in streams if not succeeded(stream)]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return streams
