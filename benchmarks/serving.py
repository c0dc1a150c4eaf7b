"""`make bench`: base and 8 adapters on this machine, beside Hugging Face generate with PEFT, in one run.

    python -m benchmarks.serving [--requests 64] [--concurrency 32] [--adapters 8] [--json FILE]

Both sides get the same requests, the same weights in bfloat16 and all cores, one after the other. Throughput counts
the tokens that were asked for: what a static batch computes past a request's end is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.client import drive
from benchmarks.measure import Measured, Stream
from benchmarks.server import KEY, serving
from benchmarks.workload import Item, requests, write_adapters
from engine.model.prepare import prepare_model
from engine.paths import default_data_dir

BASE = "base"


def run_ours(url: str, name: str, items: Sequence[Item], concurrency: int, progress: Progress) -> Measured:
    task = progress.add_task(f"loralane, {name}", total=len(items))
    return asyncio.run(drive(name, url, KEY, items, concurrency, lambda: progress.advance(task)))


def run_peer(model: Path, name: str, adapters: dict[str, Path], items: Sequence[Item], batch: int) -> Measured:
    job = {
        "model": str(model),
        "adapters": {key: str(path) for key, path in adapters.items()},
        "items": [asdict(item) for item in items],
        "batch": batch,
    }
    command = [sys.executable, "-m", "benchmarks.hf_peer"]
    done = subprocess.run(command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    streams = [Stream(times, len(times)) for times in result["streams"]]
    return Measured(name, sum(stream.tokens for stream in streams), result["seconds"], streams)


def throughput_table(ours: Sequence[Measured], peers: Sequence[Measured], concurrency: int) -> Table:
    table = Table(title=f"Throughput, {concurrency} concurrent requests (output tokens/s)")
    for column in ("", "loralane", "HF + PEFT", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for mine, peer in zip(ours, peers, strict=True):
        ratio = f"{mine.throughput / peer.throughput:.2f}x"
        table.add_row(mine.name, f"{mine.throughput:.0f}", f"{peer.throughput:.0f}", ratio)
    return table


def latency_table(rows: Sequence[tuple[str, Measured]]) -> Table:
    table = Table(title="Latency (ms)")
    for column in ("", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"):
        table.add_column(column, justify="left" if not column else "right")
    for label, run in rows:
        values = (run.ttft(50), run.ttft(99), run.itl(50), run.itl(99))
        table.add_row(label, *(f"{value * 1000:.0f}" for value in values))
    return table


def bench(arguments: argparse.Namespace, console: Console, scratch: Path) -> None:
    model = prepare_model("embedded", arguments.data_dir, console)
    adapters = write_adapters(model, scratch / "adapters", arguments.adapters)
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
        arguments.json.write_text(json.dumps({key: [asdict(run) for run in runs] for key, runs in named.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also write every stream's times here")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(os.environ))
    with tempfile.TemporaryDirectory(prefix="loralane-bench-") as scratch:
        bench(parser.parse_args(), Console(stderr=True), Path(scratch))


if __name__ == "__main__":
    main()
