"""Measures how long steps take on this machine and writes a device file for `loralane simulate`.

    python -m benchmarks.fit_cost --out my-machine.json [--model DIR] [--threads 2] [--steps 120]

Steps of every kind (decodes, prompt chunks, mixtures, adapters, page copies) run on the real model, each several times.
Two linear models, for small and for larger steps, are fitted to the medians by least squares of relative errors. Run it
on a quiet machine: the file records the error of the fit and how much the time of a step varies.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

from benchmarks.workload import write_adapters
from engine.config import EngineConfig
from engine.core.commands import Answer
from engine.core.types import (
    AdapterFetch,
    AdapterHash,
    AdapterLoad,
    Admission,
    PageCopy,
    PageId,
    SamplingParams,
    ScheduledChunk,
    StepPlan,
)
from engine.demo.dense import dense_folder
from engine.executor.cost import TERMS, LiveSequence, StepWork, measure
from engine.model.lora import target_widths
from engine.model.runner import ModelRunner
from engine.process.files import default_data_dir

SMALL_STEP = 48
"""Largest number of tokens in a step that counts as small; small steps have their own fit."""
MAX_TOKENS = 256
MAX_SEQS = 32
RANKS = (8, 32)
ADAPTERS_PER_RANK = 8
PAGES = 3000
REPEATS = 5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence in a step: `start` tokens are computed already, `count` more in the step; no adapter is the base."""

    start: int
    count: int
    adapter: AdapterHash | None


@dataclass(frozen=True, slots=True)
class Sample:
    work: StepWork
    seconds: tuple[float, ...]


class Bench:
    """Runs and times steps on a model with some resident adapters."""

    def __init__(self, model: Path, threads: int, scratch: Path) -> None:
        config = EngineConfig(str(model), dtype="bfloat16", threads=threads, max_seqs=MAX_SEQS, num_pages=PAGES)
        self.runner = ModelRunner(config)
        self.ranks: dict[AdapterHash, int] = {}
        fetches: list[AdapterFetch] = []
        self.next_page: PageId = 1
        for rank in RANKS:
            for folder in write_adapters(model, scratch / str(rank), [rank] * ADAPTERS_PER_RANK).values():
                host = self.runner.load_host(str(folder), lambda _: True)
                self.ranks[host.adapter_hash] = rank
                fetches.append(AdapterFetch(host.adapter_hash, str(folder), host.num_bytes))
                load = AdapterLoad(host.adapter_hash, self._pages(host.num_pages))
                self._carry_out(StepPlan(loads=(load,)))
        self.first_free = self.next_page
        self.disk_bytes_per_s = self._read_again(fetches)

    def run(self, rows: Sequence[Row], copies: int, repeats: int) -> Sample:
        """Time a step of the given rows that also copies `copies` pages, `repeats` times after an untimed one. The same
        positions are computed again each time."""
        self.next_page = self.first_free
        admitted = tuple(self._admission(f"r{index}", row) for index, row in enumerate(rows))
        self._carry_out(StepPlan(admitted=admitted))
        plan = StepPlan(
            saves=tuple(PageCopy(self.first_free + i, i) for i in range(copies)), chunks=tuple(_chunks(rows))
        )
        self._carry_out(plan)
        seconds = tuple(self._time(plan) for _ in range(repeats))
        self._carry_out(StepPlan(released=tuple(admission.request_id for admission in admitted)))
        live = {
            f"r{i}": LiveSequence(0, row.adapter, self.ranks.get(row.adapter or "", 0)) for i, row in enumerate(rows)
        }
        return Sample(measure(plan, live), seconds)

    def _read_again(self, fetches: Sequence[AdapterFetch]) -> float:
        """Return the rate, in bytes per second, of reading all adapters, one by one, from disk or page cache into host
        memory, from which each is dropped first."""
        answers: SimpleQueue[Answer] = SimpleQueue()
        self.runner.connect(answers.put)
        started = time.perf_counter()
        for fetch in fetches:
            self._carry_out(StepPlan(host_dropped=(fetch.adapter_hash,), fetches=(fetch,)))
            answers.get()
        return sum(fetch.num_bytes for fetch in fetches) / (time.perf_counter() - started)

    def _time(self, plan: StepPlan) -> float:
        started = time.perf_counter()
        self._carry_out(plan)
        return time.perf_counter() - started

    def _carry_out(self, plan: StepPlan) -> None:
        self.runner.submit(plan)
        self.runner.collect()

    def _pages(self, count: int) -> tuple[PageId, ...]:
        self.next_page += count
        return tuple(range(self.next_page - count, self.next_page))

    def _admission(self, request_id: str, row: Row) -> Admission:
        total = row.start + row.count
        pages = self._pages(-(-total // self.runner.block_size))
        params = SamplingParams(max_tokens=100, temperature=0.0)
        return Admission(request_id, tuple(range(1000, 1000 + total)), total, row.start, pages, row.adapter, params)


def _chunks(rows: Sequence[Row]) -> Iterator[ScheduledChunk]:
    for index, row in enumerate(rows):
        yield ScheduledChunk(f"r{index}", row.start, row.count, (), samples=row.count == 1)


def draw_step(rng: random.Random, adapters: Sequence[AdapterHash]) -> tuple[list[Row], int]:
    """Draw a realistic step of decodes, prompt chunks or both. Returns its rows and the number of pages it copies."""
    used = rng.sample(list(adapters), rng.choice((0, 1, 2, 4, 8)))

    def adapter() -> AdapterHash | None:
        return rng.choice(used) if used else None

    decodes = rng.choice((0, 0, 1, 1, 2, 4, 8, 12, 16, 24, 31))
    rows = [Row(rng.randrange(16, 1024), 1, adapter()) for _ in range(decodes)]
    room = rng.choice((0, 32, MAX_TOKENS)) if decodes else MAX_TOKENS
    if room:
        rows.append(Row(rng.choice((0, 0, 64, 512)), rng.randrange(2, room - decodes + 2), adapter()))
    return rows, rng.choice((0, 0, 0, 16, 64))


def fit(samples: Sequence[Sample]) -> tuple[Floats, Floats]:
    """Return the non-negative coefficients of TERMS and the relative error of every sample."""
    seconds = np.array([statistics.median(sample.seconds) for sample in samples])
    terms = np.array([[1, *(getattr(sample.work, name) for name in TERMS[1:])] for sample in samples], dtype=float)
    relative, kept = terms / seconds[:, None], list(range(len(TERMS)))
    while True:
        solved = np.linalg.lstsq(relative[:, kept], np.ones(len(samples)), rcond=None)[0]
        if solved.min() >= 0:
            break
        kept.pop(int(solved.argmin()))
    coefficients = np.zeros(len(TERMS))
    coefficients[kept] = solved
    return coefficients, np.abs(terms @ coefficients / seconds - 1)


def describe(name: str, bench: Bench, samples: Sequence[Sample], threads: int) -> dict[str, object]:
    """Fit the samples, small and larger steps separately, and return the contents of the device file."""
    small, large = ([s for s in samples if (s.work.tokens <= SMALL_STEP) == is_small] for is_small in (True, False))
    ratios = [value / statistics.median(s.seconds) for s in samples for value in s.seconds]
    cost: dict[str, object] = {"small_step": SMALL_STEP}
    errors: dict[str, object] = {}
    for regime, part in (("small", small), ("large", large)):
        coefficients, error = fit(part)
        cost[regime] = {term: float(f"{value:.4g}") for term, value in zip(TERMS, coefficients, strict=True)}
        errors[regime] = {
            "steps": len(part),
            "median_error": round(float(np.median(error)), 4),
            "p95_error": round(float(np.quantile(error, 0.95)), 4),
        }
    widths = int(np.sum(target_widths(bench.runner.spec))) * bench.runner.spec.layers
    return {
        "name": name,
        "description": f"{bench.runner.spec.architecture} in {bench.runner.dtype} on {threads} CPU threads",
        "kind": "linear",
        "noise_sigma": round(float(np.std(np.log(ratios))), 4),
        "page_bytes": bench.runner.page_bytes,
        "adapter_bytes_per_rank": widths * bench.runner.dtype.itemsize,
        "disk_bytes_per_s": float(f"{bench.disk_bytes_per_s:.3g}"),
        "engine": {
            "num_pages": 4 * 2**30 // bench.runner.page_bytes,
            "host_pages": 2 * 2**30 // bench.runner.page_bytes,
            "block_size": bench.runner.block_size,
            "max_seqs": MAX_SEQS,
            "max_model_len": bench.runner.max_model_len,
            "token_budget": MAX_TOKENS,
            "max_resident_adapters": 1024,
            "host_adapter_bytes": 2 * 2**30,
        },
        "cost": cost,
        "fit": errors,
        "sources": {
            "cost": f"Measured by benchmarks/fit_cost.py: {len(samples)} steps, {len(samples[0].seconds)} times each.",
            "disk_bytes_per_s": "Measured likewise, one adapter after the other, from the page cache.",
            "noise_sigma": "The same runs: spread of a step's times around their median.",
            "engine": "The defaults of an engine on a CPU, with 4 GiB of pages.",
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fit_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a prepared model folder; without it, the embedded model")
    parser.add_argument("--name", default="", help="of the device; without it, the file's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    model = arguments.model or dense_folder("embedded", default_data_dir(os.environ), console)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="loralane-fit-") as scratch:
        bench = Bench(model, arguments.threads, Path(scratch))
        steps = [draw_step(rng, list(bench.ranks)) for _ in range(arguments.steps)]
        samples = [
            bench.run(rows, copies, REPEATS) for rows, copies in track(steps, "measuring steps", console=console)
        ]
    document = describe(arguments.name or arguments.out.stem, bench, samples, arguments.threads)
    arguments.out.write_text(json.dumps(document, indent=2) + "\n")
    console.print(f"{arguments.out}: {document['fit']}")


if __name__ == "__main__":
    main()
