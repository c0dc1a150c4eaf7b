"""`make bench-neighbours`: latency of one stream on a machine that other processes use as well.

    python -m benchmarks.neighbours [--streams 20]

One client streams short chats, one after the other: alone, beside one and two busy-looping processes, beside a flood of
requests to the gateway that need no engine, and beside a second server that streams as well. Then the server is
restarted on one core, and, where control groups can be created (as root), under a CPU quota of 1.5 cores. Ratios are
relative to the first phase, alone on all cores, which the client shares. The same is measured for vLLM if
LORALANE_VLLM_PYTHON names a Python that has it.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import httpx
from rich.progress import Progress
from rich.table import Table

from benchmarks.peers import MODEL, Peer, loralane, vllm
from benchmarks.runner import CORES, DATA_DIR, JSON, VLLM, Run, benchmark, option, table
from benchmarks.server import beside, running, spin
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


def compared(results: dict[str, list[Phase]]) -> Table:
    rows = [(name, one.name, *one.figures(each[0])) for name, each in results.items() for one in each]
    columns, caption = "TTFT p50 | x | ITL p50 | x | ITL p99 | x", "ms; ratios to the first phase of the same server"
    left = ("server", "beside")
    return table("one client streams", f"server | beside | {columns}", rows, left, caption=caption)


@benchmark(VLLM, CORES, option("--streams", 20, "of each phase"), JSON, DATA_DIR)
def bench(run: Run) -> None:
    options = run.options
    model = dense_folder("embedded", options.data_dir, run.console)
    cpus = frozenset(os.sched_getaffinity(0))

    def ours(name: str) -> Peer:
        folder = run.scratch / name
        folder.mkdir(exist_ok=True)
        return loralane(model, folder, cpus, {"engine": {"threads": 0, "memory_gb": 1}})

    makers: dict[str, Callable[[str], Peer]] = {"loralane": ours}
    if options.vllm_python:
        makers["vLLM"] = lambda name: vllm(options.vllm_python, model, cpus)
    run.tell_of_missing_peer()
    with run.progress() as progress:
        results = {name: list(phases(make, run.scratch, options.streams, progress)) for name, make in makers.items()}
    run.show(compared(results), results)


if __name__ == "__main__":
    bench.main()
