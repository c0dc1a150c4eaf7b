"""Seeded requests for benchmarks, so that every server does the same work."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.serve.process import run_loop
from lab.bench.client import Target
from lab.bench.drive import drive
from lab.bench.measure import succeeded
from lab.bench.plan import BenchRequest
from lab.bench.stream import Stream


def requests(
    models: Sequence[str], count: int, seed: int = 0, tokens: tuple[int, int] = (1000, 40_000)
) -> list[BenchRequest]:
    """Return `count` requests of 32 to 127 prompt and 16 to 95 output tokens, for the models in turn.
    `tokens` is the range of the prompts' token ids."""
    rng = random.Random(seed)

    def item(index: int) -> BenchRequest:
        prompt = tuple(rng.randrange(*tokens) for _ in range(rng.randrange(32, 128)))
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


def generate_by_peer(
    model: Path, adapters: Mapping[str, Path], items: Sequence[BenchRequest], batch: int, **options: str
) -> dict[str, Any]:
    """Have Hugging Face answer requests in batches of `batch`, in a process of its own; see `benchmarks.hf_peer.run`
    for the result and the options."""
    folders = {name: str(path) for name, path in adapters.items()}
    job = {"model": str(model), "adapters": folders, "items": [asdict(item) for item in items], "batch": batch}
    words = [sys.executable, "-m", "benchmarks.hf_peer"]
    done = subprocess.run(words, input=json.dumps(job | options), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
