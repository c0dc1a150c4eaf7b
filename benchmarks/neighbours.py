"""`make bench-neighbours`: latency of one stream on a machine that other processes use as well.

    python -m benchmarks.neighbours [--streams 20]

One client streams short chats, one after the other: alone, beside one and two busy-looping processes, beside a flood of
requests to the gateway that need no engine, and beside a second server that streams as well. Then the server is
restarted on one core, and, where control groups can be created (as root), under a CPU quota of 1.5 cores. Ratios are
relative to the first phase, alone on all cores, which the client shares. The same is measured for vLLM if
LORALANE_VLLM_PYTHON names a Python that has it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.command import make_parser, run, tell_of_missing_peer
from benchmarks.peers import MODEL, Peer, loralane, vllm
from benchmarks.server import running
from gateway.terminal.output import print_wide
from lab.demo.dense import dense_folder

LENGTH = 48
"""Number of tokens in each answer."""
FLOOD_CLIENTS = 16
QUOTA = 1.5
PERIOD_US = 100_000
CPU_V1, CPU_V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


@dataclass
class Phase:
    """Latencies of all streams in one phase, in seconds."""

    name: str
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)

    def figures(self, alone: Phase) -> list[str]:
        values = [(self.ttft, alone.ttft, 50), (self.itl, alone.itl, 50), (self.itl, alone.itl, 99)]
        cells = []
        for own, base, percent in values:
            value = percentile(own, percent)
            cells += [f"{value * 1e3:.1f}", f"{value / percentile(base, percent):.2f}x"]
        return cells


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


async def stream(peer: Peer, phase: Phase, streams: int) -> None:
    """Stream so many chats in turn and add their latencies to `phase`. Raises RuntimeError if an answer has no text."""
    headers = {"authorization": f"Bearer {peer.key}"} if peer.key else {}
    async with httpx.AsyncClient(base_url=peer.command.url, headers=headers, timeout=600) as client:
        for number in range(streams):
            text = f"Write about the number {time.time_ns() + number} and the sea."
            messages = [{"role": "user", "content": text}]
            body = {"model": MODEL, "messages": messages, "max_tokens": LENGTH, "stream": True, "ignore_eos": True}
            begun = last = time.perf_counter()
            count = 0
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {") or not has_text(line):
                        continue
                    now, count = time.perf_counter(), count + 1
                    (phase.ttft if count == 1 else phase.itl).append(now - last)
                    last = now
            if not count:
                raise RuntimeError(f"{peer.name} answered {answer.status_code} after {last - begun:.1f} s")


def has_text(line: str) -> bool:
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return bool(choices and choices[0]["delta"].get("content"))


def spin() -> None:
    """Busy-loop until killed."""
    while True:
        pass


def flood(url: str, key: str) -> None:
    """Request the list of models in a loop on FLOOD_CLIENTS connections until killed."""

    async def ask(client: httpx.AsyncClient) -> None:
        while True:
            await client.get("/v1/models")

    async def ask_together() -> None:
        async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
            await asyncio.gather(*(ask(client) for _ in range(FLOOD_CLIENTS)))

    asyncio.run(ask_together())


def stream_forever(peer: Peer) -> None:
    asyncio.run(stream(peer, Phase(""), 1_000_000))


@contextmanager
def beside(*work: Callable[[], None]) -> Iterator[None]:
    """Run each function in its own process until the block ends; then kill the processes."""
    processes = [multiprocessing.get_context("fork").Process(target=target, daemon=True) for target in work]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def quota() -> Iterator[Path | None]:
    """Create a control group with a CPU quota; yields its cgroup.procs file. None means that it cannot be created."""
    version_1 = (CPU_V1 / "cpu.cfs_quota_us").exists()
    folder = (CPU_V1 if version_1 else CPU_V2) / f"loralane-bench-{os.getpid()}"
    try:
        folder.mkdir()
        if version_1:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(int(QUOTA * PERIOD_US)))
        else:
            (folder / "cpu.max").write_text(f"{int(QUOTA * PERIOD_US)} {PERIOD_US}")
    except OSError:
        yield None
        return
    try:
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def phases(make: Callable[[str], Peer], scratch: Path, streams: int, progress: Progress) -> Iterator[Phase]:
    """Measure one peer in all phases, with `streams` chats each; the last only where a CPU quota can be set. `make`
    creates the peer for each server start; its argument names its files."""
    peer, other = make("shared"), make("other")
    with running(peer.command, scratch / f"{peer.name}-shared.log"):
        measured(peer, "warm-up", 3)
        neighbours: dict[str, list[Callable[[], None]]] = {
            "nothing": [],
            "1 busy process": [spin],
            "2 busy processes": [spin, spin],
            "a flood of the gateway": [partial(flood, peer.command.url, peer.key)],
        }
        for name, work in progress.track(neighbours.items(), description=peer.name):
            yield measured(peer, name, streams, work)
        with running(other.command, scratch / f"{peer.name}-other.log"):
            yield measured(peer, "a second engine", streams, [partial(stream_forever, other)])
    one = make("one")
    yield restarted(
        replace(one, command=replace(one.command, cpus=frozenset({0}))), "nothing, one core", scratch, streams
    )
    with quota() as procs:
        if procs is not None:
            bound = make("quota")
            words = ["sh", "-c", f'echo $$ > {procs}; exec "$@"', "sh", *bound.command.words]
            bound = replace(bound, command=replace(bound.command, words=words))
            yield restarted(bound, f"nothing, a quota of {QUOTA} cores", scratch, streams)


def restarted(peer: Peer, name: str, scratch: Path, streams: int) -> Phase:
    with running(peer.command, scratch / f"{peer.name}-{name}.log".replace(" ", "-")):
        measured(peer, "warm-up", 3)
        return measured(peer, name, streams)


def measured(peer: Peer, name: str, streams: int, beside_work: Sequence[Callable[[], None]] = ()) -> Phase:
    phase = Phase(name)
    with beside(*beside_work):
        asyncio.run(stream(peer, phase, streams))
    return phase


def table(results: dict[str, list[Phase]]) -> Table:
    found = Table(title="one client streams", caption="ms; ratios to the first phase of the same server")
    found.add_column("server")
    found.add_column("beside")
    for column in ("TTFT p50", "x", "ITL p50", "x", "ITL p99", "x"):
        found.add_column(column, justify="right")
    for name, phases in results.items():
        for phase in phases:
            found.add_row(name, phase.name, *phase.figures(phases[0]))
    return found


def bench(arguments: argparse.Namespace, console: Console, scratch: Path) -> None:
    model = dense_folder("embedded", arguments.data_dir, console)
    cpus = frozenset(os.sched_getaffinity(0))

    def ours(name: str) -> Peer:
        folder = scratch / name
        folder.mkdir(exist_ok=True)
        return loralane(model, folder, cpus, {"engine": {"threads": 0, "memory_gb": 1}})

    makers: dict[str, Callable[[str], Peer]] = {"loralane": ours}
    if arguments.vllm_python:
        makers["vLLM"] = lambda name: vllm(arguments.vllm_python, model, cpus)
    tell_of_missing_peer(arguments.vllm_python, console)
    with Progress(console=console, transient=True) as progress:
        results = {name: list(phases(make, scratch, arguments.streams, progress)) for name, make in makers.items()}
    print_wide(table(results))


def main() -> None:
    parser = make_parser("neighbours", __doc__)
    parser.add_argument("--streams", type=int, default=20, help="of each phase (default: %(default)s)")
    run(partial(bench, parser.parse_args()))


if __name__ == "__main__":
    main()
