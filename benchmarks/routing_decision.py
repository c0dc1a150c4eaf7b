"""Time of a learned router's decision, beside the prefill for its vector.

    python -m benchmarks.routing_decision [--decisions 2000] [--dimensions 576]

A policy `learned` with random weights plans the steps of requests whose vector is there at once.
"""

from __future__ import annotations

import asyncio
import random
import time

import numpy as np

from benchmarks.runner import Run, benchmark, option, table
from engine.core.messages.requests import Lane
from gateway.virtual_models.features import NAMES, PromptFacts
from gateway.virtual_models.learned import Learned
from gateway.virtual_models.policy import Asked, MemberState, Vector
from gateway.virtual_models.router import RouterFile, encode_router

LENGTHS = (100, 1_000, 10_000, 100_000)
"""Characters of the prompts."""


def random_router(dimensions: int) -> bytes:
    count, rng = len(NAMES) + dimensions, random.Random(0)
    weights = [rng.gauss(0, 0.1) for _ in range(count)]
    router = RouterFile(
        embedder="small",
        dimensions=dimensions,
        features=list(NAMES),
        mean=[0.0] * count,
        scale=[1.0] * count,
        weights=weights,
        intercept=0.0,
        threshold=0.5,
    )
    return encode_router(router)


async def decision_times(policy: Learned, text: str, vector: Vector, count: int) -> list[float]:
    """Return the seconds of `count` decisions about a text."""

    async def there_already(member: str, pooling: str) -> Vector:
        return vector

    facts = PromptFacts((text,), text)
    asked = Asked("", Lane.INTERACTIVE, "", "", policy.members, lambda _: MemberState(), lambda: facts, there_already)
    found = []
    for _ in range(count):
        began = time.perf_counter()
        await policy.plan(asked)
        found.append(time.perf_counter() - began)
    return found


@benchmark(option("--decisions", 2000, "for each length of prompt"), option("--dimensions", 576))
def bench(run: Run) -> None:
    options, rng, rows = run.options, random.Random(0), []
    vector = np.random.default_rng(0).normal(size=options.dimensions).astype(np.float32)
    path = run.scratch / "router.json"
    path.write_bytes(random_router(options.dimensions))
    policy = Learned(path, "small", "large")
    for length in run.track(LENGTHS, "Deciding"):
        text = "".join(rng.choices('abcdefgh XYZ 0123456789 .,+-() "', k=length))
        times = asyncio.run(decision_times(policy, text, vector, options.decisions))
        figures = (*np.quantile(times, (0.5, 0.99)), max(times))
        rows.append((f"{length:,}", *(f"{1000 * float(value):.3f}" for value in figures)))
    run.show(table(None, "characters | p50 ms | p99 ms | longest ms", rows, box=None))


if __name__ == "__main__":
    bench.main()
