"""`make bench`: loralane with the base model and 8 adapters, compared with Hugging Face generate with PEFT in one run.

    python -m benchmarks.serving [--requests 64] [--concurrency 32] [--adapters 8] [--json FILE]

Both sides run one after the other with the same requests, the same weights in bfloat16 and all cores. Throughput counts
only the tokens that were asked for, not the ones that a static batch computes past a request's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress
from rich.table import Table

from benchmarks.runner import DATA_DIR, JSON, Run, benchmark, option, table
from benchmarks.server import KEY, serving
from benchmarks.workload import answered, generate_by_peer, requests
from lab.bench.client import Target
from lab.bench.measure import LaneResults, report
from lab.bench.plan import BenchRequest
from lab.bench.stream import Stream
from lab.bench.tables import milliseconds
from lab.demo.dense import dense_folder
from lab.random_adapters import write_adapters

BASE = "base"


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one run."""

    name: str
    report: LaneResults
    streams: Sequence[Stream]


def run_ours(url: str, name: str, items: Sequence[BenchRequest], concurrency: int, progress: Progress) -> Measured:
    """Send the requests to a loralane server and measure. Raises RuntimeError if one fails."""
    task = progress.add_task(f"loralane, {name}", total=len(items))
    streams = answered(Target(url, KEY), items, concurrency, lambda _: progress.advance(task))
    return Measured(name, report(name, streams), streams)


def run_peer(model: Path, name: str, adapters: dict[str, Path], items: Sequence[BenchRequest], batch: int) -> Measured:
    times = generate_by_peer(model, adapters, items, batch)["streams"]
    streams = [_stream(item, own) for item, own in zip(items, times, strict=True)]
    return Measured(name, report(name, streams), streams)


def _stream(item: BenchRequest, times: list[float]) -> Stream:
    return Stream(item, sent=0.0, ended=times[-1], times=times, chunk_tokens=[1] * len(times))


def throughput_table(ours: Sequence[Measured], peers: Sequence[Measured], concurrency: int) -> Table:
    rows = []
    for mine, peer in zip(ours, peers, strict=True):
        rates = (mine.report.output_tokens_per_second, peer.report.output_tokens_per_second)
        rows.append((mine.name, *(f"{rate:.0f}" for rate in rates), f"{rates[0] / rates[1]:.2f}x"))
    title = f"Throughput, {concurrency} concurrent requests (output tokens/s)"
    return table(title, "| loralane | HF + PEFT | ratio", rows)


def latency_table(runs: Sequence[tuple[str, Measured]]) -> Table:
    rows = []
    for label, run in runs:
        both = [values for values in (run.report.ttft, run.report.itl) if values]
        rows.append((label, *(milliseconds(value) for values in both for value in (values.p50, values.p99))))
    return table("Latency (ms)", "| TTFT p50 | TTFT p99 | ITL p50 | ITL p99", rows)


@benchmark(option("--requests", 64), option("--concurrency", 32), option("--adapters", 8), JSON, DATA_DIR)
def bench(run: Run) -> None:
    options, scratch, console = run.options, run.scratch, run.console
    model = dense_folder("embedded", options.data_dir, console)
    adapters = write_adapters(model, scratch / "adapters", [8] * options.adapters)
    few, at_once = f"{options.adapters} adapters", options.concurrency
    base, mixed = (requests(names, options.requests) for names in ([model.name.lower()], list(adapters)))
    with serving(model, adapters, scratch, scratch / "server.log") as url, run.progress() as progress:
        run_ours(url, "warm-up", [*base[:4], *mixed[:8]], 12, progress)
        ours = [run_ours(url, BASE, base, at_once, progress), run_ours(url, few, mixed, at_once, progress)]
        alone = [run_ours(url, BASE, base[:8], 1, progress), run_ours(url, few, mixed[:8], 1, progress)]
    with console.status("Hugging Face generate, base"):
        peers = [run_peer(model, BASE, {}, base, at_once)]
    with console.status("Hugging Face generate with PEFT, mixed adapters"):
        peers.append(run_peer(model, few, adapters, mixed, at_once))
    rows = [(f"loralane, {one.name}, 1 at a time", one) for one in alone]
    rows += [(f"loralane, {one.name}, {at_once} at once", one) for one in ours]
    rows += [(f"HF + PEFT, {one.name}, batches of {at_once}", one) for one in peers]
    named = {"loralane": ours, "loralane alone": alone, "hf": peers}
    run.show([throughput_table(ours, peers, at_once), latency_table(rows)], named)


if __name__ == "__main__":
    bench.main()
