"""Time of a learned router's decision, beside the prefill for its vector.

    python -m benchmarks.routing_decision [--decisions 2000] [--dimensions 576]

A policy `learned` with random weights plans the steps of requests whose vector is there at once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.core.messages.requests import Lane
from gateway.routes.features import NAMES, PromptFacts
from gateway.routes.learned import Learned
from gateway.routes.policy import Asked, MemberState, Vector
from gateway.routes.router import RouterFile, encode_router
from gateway.terminal.output import print_wide

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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing_decision", description=__doc__)
    parser.add_argument("--decisions", type=int, default=2000, help="for each length of prompt")
    parser.add_argument("--dimensions", type=int, default=576)
    arguments = parser.parse_args()
    rng = random.Random(0)
    vector = np.random.default_rng(0).normal(size=arguments.dimensions).astype(np.float32)
    table = Table(box=None)
    for column in ("characters", "p50 ms", "p99 ms", "longest ms"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "router.json"
        path.write_bytes(random_router(arguments.dimensions))
        policy = Learned(path, "small", "large")
        for length in track(LENGTHS, "Deciding", console=Console(stderr=True), transient=True):
            text = "".join(rng.choices('abcdefgh XYZ 0123456789 .,+-() "', k=length))
            times = asyncio.run(decision_times(policy, text, vector, arguments.decisions))
            shown = (f"{1000 * float(value):.3f}" for value in (*np.quantile(times, (0.5, 0.99)), max(times)))
            table.add_row(f"{length:,}", *shown)
    print_wide(table)


if __name__ == "__main__":
    main()
