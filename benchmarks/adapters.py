"""`make bench-adapters`: what adapters cost in throughput, resident or not, compared with vLLM in one run.

    python -m benchmarks.adapters [--vllm-python PATH] [--cores 0,1] [--repeat 2] [--json FILE]

The same 64 requests (32 to 127 tokens in, 16 to 95 out) are sent at once to the base model, to one adapter, to 8, to 64
that are all resident, and to 64 with device memory for 8. Both servers run 32 sequences with the same weights on the
same cores. loralane has goals of latency that no step misses, because it gives up throughput for others. Each case is
run --repeat times, and the best run counts, for both servers. Without a Python that has vLLM, only loralane is
measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.peers import MODEL, PATIENT, Peer, VllmAdapters, loralane, vllm
from benchmarks.runner import CORES, DATA_DIR, JSON, VLLM, Run, benchmark, option, stamp, table
from benchmarks.server import pinned, running
from benchmarks.workload import answered, requests
from lab.bench.client import Target
from lab.bench.measure import LaneResults, report
from lab.bench.tables import milliseconds
from lab.demo.dense import dense_folder
from lab.random_adapters import write_adapters

RANK, COUNT, FEW = 8, 64, 8
FIGURES = ("tokens/s", "/ base", "TTFT p50", "ITL p50", "ITL p99")


@dataclass(frozen=True, slots=True)
class Case:
    """How many adapters the requests use and how many (`slots`) the device holds; with 0, the server has none."""

    name: str
    adapters: int
    slots: int


CASES = (
    Case("base", 0, 0),
    Case("1 adapter", 1, 1),
    Case("8 adapters", FEW, FEW),
    Case("64 adapters, all resident", COUNT, COUNT),
    Case("64 adapters, memory for 8", COUNT, FEW),
)


@dataclass(frozen=True, slots=True)
class Measured:
    server: str
    case: str
    best: LaneResults
    tokens_per_second: tuple[float, ...]
    """Throughput of every repetition."""


def by_slots(cases: Sequence[Case]) -> dict[int, list[Case]]:
    """Return number of slots -> its cases, all of which one server can run."""
    groups: dict[int, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.slots, []).append(case)
    return groups


def run_case(target: Target, case: Case, folders: Mapping[str, Path], repeat: int, server: str) -> Measured:
    """Run a case `repeat` times after a warm-up; the run with the most output tokens per second counts. Raises
    RuntimeError if a request fails."""
    models = list(folders)[: case.adapters] or [MODEL]
    reports = []
    for turn in range(repeat + 1):  # the first turn only warms up, with different prompts
        items = requests(models, COUNT, seed=turn == 0)
        streams = answered(target, items, COUNT)
        reports.append(report(case.name, streams))
    rates = tuple(item.output_tokens_per_second for item in reports[1:])
    return Measured(server, case.name, reports[1 + rates.index(max(rates))], rates)


def ours(model: Path, folders: Mapping[str, Path], slots: int, scratch: Path, cpus: frozenset[int]) -> Peer:
    """Return a loralane server with all these adapters, at most `slots` of them on its device; with 0, without any."""
    preload = {"adapters": {"preload": {name: str(path) for name, path in folders.items()}}} if slots else {}
    place = scratch / f"ours-{slots}"
    place.mkdir()
    engine = {"max_resident_adapters": max(1, slots)}
    return loralane(model, place, cpus, {**preload, "engine": engine, "lanes": PATIENT})


def peers(run: Run, model: Path, folders: Mapping[str, Path]) -> Iterator[Any]:
    """Yield pairs of a server and the cases to run on it: loralane's, then, if `--vllm-python` is set, vLLM's.
    Raises PeerError if a library that vLLM needs is missing."""
    cpus, python = run.options.cores, run.options.vllm_python
    for slots, cases in by_slots(CASES).items():
        yield ours(model, folders, slots, run.scratch, cpus), cases
    if python:
        for slots, cases in by_slots(CASES).items():
            needed = dict(list(folders.items())[: max(case.adapters for case in cases)])
            adapters = VllmAdapters(needed, slots, RANK) if slots else None
            yield vllm(python, model, cpus, adapters), cases


def compared(measured: Sequence[Measured]) -> Table:
    found = {(item.server, item.case): item.best for item in measured}
    servers = list(dict.fromkeys(item.server for item in measured))
    columns = [f"{server}\n{column}" for server in servers for column in FIGURES]
    rows = []
    for case in CASES:
        reports = [found[server, case.name] for server in servers]
        cells = [cell for server in servers for cell in row(found[server, case.name], found[server, "base"])]
        rates = [item.output_tokens_per_second for item in reports]
        rows.append([case.name, *cells, *([f"{rates[0] / rates[1]:.2f}x"] if len(servers) == 2 else [])])
    title = f"{COUNT} requests at once, rank {RANK} on all seven projections"
    return table(title, " | ".join(["", *columns, *(["ratio"] if len(servers) == 2 else [])]), rows)


def row(item: LaneResults, base: LaneResults) -> list[str]:
    rate = item.output_tokens_per_second
    latencies = [item.ttft.p50, item.itl.p50, item.itl.p99] if item.ttft and item.itl else []
    return [f"{rate:.0f}", f"{rate / base.output_tokens_per_second:.2f}", *map(milliseconds, latencies)]


@benchmark(VLLM, CORES, option("--repeat", 2, "times each case is measured; the best one counts"), JSON, DATA_DIR)
def bench(run: Run) -> None:
    options = run.options
    model = dense_folder("embedded", options.data_dir, run.console)
    run.tell_of_missing_peer()
    measured: list[Measured] = []
    with run.console.status("writing adapters") as status, pinned(run.client_cores):
        folders = write_adapters(model, run.scratch / "adapters", [RANK] * COUNT)
        for number, (peer, cases) in enumerate(peers(run, model, folders)):
            status.update(f"{peer.name}: starting, for {cases[0].name}")
            with running(peer.command, run.scratch / f"{peer.name}-{number}.log") as url:
                for case in cases:
                    status.update(f"{peer.name}: {case.name}")
                    target = Target(url, peer.key)
                    measured.append(run_case(target, case, folders, options.repeat, peer.name))
    run.show(compared(measured), {**stamp(), "cores": sorted(options.cores), "measured": measured})


if __name__ == "__main__":
    bench.main()
