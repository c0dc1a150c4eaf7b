"""`make bench`: loralane with the base model and 8 adapters, compared with Hugging Face generate with PEFT in one run.

    python -m benchmarks.serving [--requests 64] [--concurrency 32] [--adapters 8] [--json FILE]

Both sides run one after the other with the same requests, the same weights in bfloat16 and all cores. Throughput counts
only the tokens that were asked for, not the ones that a static batch computes past a request's end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.server import KEY, serving
from benchmarks.workload import answered, requests
from engine.process.files import default_data_dir
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
    job = {
        "model": str(model),
        "adapters": {key: str(path) for key, path in adapters.items()},
        "items": [asdict(item) for item in items],
        "batch": batch,
    }
    command = [sys.executable, "-m", "benchmarks.hf_peer"]
    done = subprocess.run(command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True)
    times = json.loads(done.stdout)["streams"]
    streams = [_stream(item, own) for item, own in zip(items, times, strict=True)]
    return Measured(name, report(name, streams), streams)


def _stream(item: BenchRequest, times: list[float]) -> Stream:
    return Stream(item, sent=0.0, ended=times[-1], times=times, chunk_tokens=[1] * len(times))


def throughput_table(ours: Sequence[Measured], peers: Sequence[Measured], concurrency: int) -> Table:
    table = Table(title=f"Throughput, {concurrency} concurrent requests (output tokens/s)")
    for column in ("", "loralane", "HF + PEFT", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for mine, peer in zip(ours, peers, strict=True):
        rates = (mine.report.output_tokens_per_second, peer.report.output_tokens_per_second)
        table.add_row(mine.name, *(f"{rate:.0f}" for rate in rates), f"{rates[0] / rates[1]:.2f}x")
    return table


def latency_table(rows: Sequence[tuple[str, Measured]]) -> Table:
    table = Table(title="Latency (ms)")
    for column in ("", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"):
        table.add_column(column, justify="left" if not column else "right")
    for label, run in rows:
        both = [values for values in (run.report.ttft, run.report.itl) if values]
        cells = [milliseconds(value) for values in both for value in (values.p50, values.p99)]
        table.add_row(label, *cells)
    return table


def bench(arguments: argparse.Namespace, console: Console, scratch: Path) -> None:
    model = dense_folder("embedded", arguments.data_dir, console)
    adapters = write_adapters(model, scratch / "adapters", [8] * arguments.adapters)
    few = f"{arguments.adapters} adapters"
    with serving(model, adapters, scratch, scratch / "server.log") as url, Progress(console=console) as progress:
        base_name = model.name.lower()
        base = requests([base_name], arguments.requests)
        mixed = requests(list(adapters), arguments.requests)
        run_ours(url, "warm-up", [*base[:4], *mixed[:8]], 12, progress)
        ours = [
            run_ours(url, BASE, base, arguments.concurrency, progress),
            run_ours(url, few, mixed, arguments.concurrency, progress),
        ]
        alone = [run_ours(url, BASE, base[:8], 1, progress), run_ours(url, few, mixed[:8], 1, progress)]
    with console.status("Hugging Face generate, base"):
        peers = [run_peer(model, BASE, {}, base, arguments.concurrency)]
    with console.status("Hugging Face generate with PEFT, mixed adapters"):
        peers.append(run_peer(model, few, adapters, mixed, arguments.concurrency))
    out = Console()
    out.print(throughput_table(ours, peers, arguments.concurrency))
    rows = [(f"loralane, {run.name}, 1 at a time", run) for run in alone]
    rows += [(f"loralane, {run.name}, {arguments.concurrency} at once", run) for run in ours]
    rows += [(f"HF + PEFT, {run.name}, batches of {arguments.concurrency}", run) for run in peers]
    out.print(latency_table(rows))
    if arguments.json:
        named = {"loralane": ours, "loralane alone": alone, "hf": peers}
        arguments.json.write_bytes(msgspec.json.encode(named))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also write every stream's times here")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(os.environ))
    with tempfile.TemporaryDirectory(prefix="loralane-bench-") as scratch:
        bench(parser.parse_args(), Console(stderr=True), Path(scratch))


if __name__ == "__main__":
    main()
