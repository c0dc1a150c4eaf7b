"""`make bench-lanes`: how much the interactive lane and the batch lane slow each other down.

    python -m benchmarks.lanes [--vllm-python PATH] [--cores 0,1] [--json FILE]

Each server gets interactive requests alone, a batch alone, and both together, in one run on the same two cores and with
the same arrivals and lengths. Beside the batch, interactive requests arrive from 3 s after its start until its end; the
batch's throughput is over its own span. Without a Python that has vLLM, only loralane is measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.command import client_cores, make_parser, run, tell_of_missing_peer
from benchmarks.peers import MODEL, Peer, loralane, vllm
from benchmarks.server import pinned, running
from gateway.config.file import read_yaml
from gateway.serve.process import run_loop
from gateway.terminal.output import print_wide
from lab.bench.client import Target
from lab.bench.document import versions
from lab.bench.drive import drive
from lab.bench.measure import BenchPercentiles, LaneResults, report
from lab.bench.plan import Plan
from lab.bench.run import warm_up
from lab.bench.spec import LaneSpec, Lengths
from lab.bench.tables import milliseconds, remarks
from lab.demo.dense import dense_folder

INTERACTIVE, BATCH = "interactive", "batch"
HEAD_START = 3.0
"""Seconds that the batch runs alone before interactive requests join it, so that it fills the engine."""


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes of the benchmark: numbers of requests, and the `rate` of interactive requests a second."""

    interactive: int
    """Number of interactive requests that are measured alone."""
    rate: float
    batch: int
    warmup: int
    seed: int

    def interactive_lane(self, n: int, start: float = 0.0) -> LaneSpec:
        return LaneSpec(INTERACTIVE, n, self.rate, start=start, inputs=Lengths(24, 96), outputs=Lengths(16, 16))

    def batch_lane(self) -> LaneSpec:
        return LaneSpec(BATCH, self.batch, inputs=Lengths(64, 256), outputs=Lengths(64, 160))

    def plan(self, prompts: int, *lanes: LaneSpec) -> Plan:
        return Plan((MODEL,), lanes, seed=self.seed, prompts=prompts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one server's three phases."""

    name: str
    version: str
    interactive_alone: LaneResults
    batch_alone: LaneResults
    interactive_beside: LaneResults
    batch_beside: LaneResults

    @property
    def reports(self) -> tuple[LaneResults, ...]:
        return self.interactive_alone, self.batch_alone, self.interactive_beside, self.batch_beside

    @property
    def batch_ratio(self) -> float:
        return self.batch_beside.output_tokens_per_second / self.batch_alone.output_tokens_per_second

    @property
    def normalised(self) -> float | None:
        """`batch_ratio` divided by the fraction of time without a request in flight when interactive requests run
        alone. None means that there is no such time."""
        left = 1 - self.interactive_alone.busy
        return self.batch_ratio / left if left > 0 else None


def phase(target: Target, plan: Plan, stop_after: str | None = None) -> dict[str, LaneResults]:
    """Run a plan and return lane -> results, for lanes of which requests were sent. When all requests of the lane
    `stop_after` have ended, those of others that have not arrived are left out."""
    streams = run_loop(drive(target, plan.items(), timeout_s=3000, stop_after=stop_after))
    lanes = {name: [stream for stream in streams if stream.item.lane == name] for name in (INTERACTIVE, BATCH)}
    return {name: report(name, own) for name, own in lanes.items() if own}


def measure(peer: Peer, work: Work, scratch: Path, console: Console) -> Outcome:
    """Start a server and measure it in the three phases: interactive requests alone, batch alone, and both. Raises
    ValueError if the batch is over before interactive requests come, and RuntimeError if the server does not start."""
    with console.status(f"{peer.name}: starting") as status, running(peer.command, scratch / f"{peer.name}.log") as url:
        target = Target(url, peer.key)
        warm = work.plan(0, work.interactive_lane(1), work.batch_lane())
        status.update(f"{peer.name}: warming up")
        run_loop(warm_up(target, warm.warmup(work.warmup), 600))
        status.update(f"{peer.name}: {work.interactive} interactive requests alone")
        alone = phase(target, work.plan(1, work.interactive_lane(work.interactive)))
        status.update(f"{peer.name}: {work.batch} batch requests alone")
        alone |= phase(target, work.plan(2, work.batch_lane()))
        # More requests than can arrive while the batch runs, even at a quarter of its speed; the rest is not sent.
        enough = math.ceil(4 * alone[BATCH].seconds * work.rate) + work.interactive
        status.update(f"{peer.name}: both")
        both = work.plan(3, work.interactive_lane(enough, HEAD_START), work.batch_lane())
        beside = phase(target, both, stop_after=BATCH)
        if INTERACTIVE not in beside:
            raise ValueError(
                f"the batch was over within {HEAD_START:g} s, before interactive requests came: enlarge it"
            )
        return Outcome(
            peer.name, server_version(url), alone[INTERACTIVE], alone[BATCH], beside[INTERACTIVE], beside[BATCH]
        )


def server_version(url: str) -> str:
    """Return the version from vLLM's /version; a server without that endpoint is loralane."""
    response = httpx.get(f"{url}/version")
    return str(response.json()["version"]) if response.is_success else version("loralane")


def table(outcomes: Sequence[Outcome], cores: int) -> Table:
    title = f"The interactive lane beside a batch, {cores} cores"
    result = Table(title=title, caption="ms; batch: output tokens/s over its own span")
    result.add_column("")
    for outcome in outcomes:
        for column in ("alone", "beside", "ratio"):
            result.add_column(f"{outcome.name}\n{column}", justify="right")
    for index, (label, *_) in enumerate(rows(outcomes[0])):
        result.add_row(label, *(cell for outcome in outcomes for cell in rows(outcome)[index][1:]))
    return result


def rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """Return the label, the values alone and beside the other lane, and their ratio, for every figure."""
    alone, beside = outcome.interactive_alone, outcome.interactive_beside
    found = [
        _latency("TTFT p50", alone.ttft, beside.ttft, "p50"),
        _latency("TTFT p99", alone.ttft, beside.ttft, "p99"),
        _latency("ITL p50", alone.itl, beside.itl, "p50"),
        _latency("ITL p99", alone.itl, beside.itl, "p99"),
    ]
    rates = (outcome.batch_alone.output_tokens_per_second, outcome.batch_beside.output_tokens_per_second)
    found.append(("batch tokens/s", *(f"{rate:.0f}" for rate in rates), f"{outcome.batch_ratio:.2f}"))
    found.append(("interactive's share of time", f"{alone.busy:.2f}", "", ""))
    normalised = outcome.normalised
    found.append(("batch ratio / (1 - share)", "", "", "-" if normalised is None else f"{normalised:.2f}"))
    found.append(("interactive requests", str(alone.requests), str(beside.requests), ""))
    return found


def _latency(
    label: str, alone: BenchPercentiles | None, beside: BenchPercentiles | None, which: str
) -> tuple[str, ...]:
    if alone is None or beside is None:
        return label, "-", "-", "-"
    before, after = getattr(alone, which), getattr(beside, which)
    return label, milliseconds(before), milliseconds(after), f"{after / before:.2f}x"


def bench(arguments: argparse.Namespace, console: Console, scratch: Path) -> None:
    cpus = arguments.cores
    model = dense_folder("embedded", arguments.data_dir, console)
    extra = read_yaml(arguments.config) if arguments.config else {}
    peers = [loralane(model, scratch, cpus, extra)]
    if arguments.vllm_python:
        peers.append(vllm(arguments.vllm_python, model, cpus))
    tell_of_missing_peer(arguments.vllm_python, console)
    work = Work(arguments.interactive, arguments.rate, arguments.batch, arguments.warmup, arguments.seed)
    with pinned(client_cores(cpus)):
        outcomes = [measure(peer, work, scratch, console) for peer in peers]
    if arguments.json:
        arguments.json.write_bytes(document(work, sorted(cpus), extra, outcomes))
    show(outcomes, len(cpus))


def show(outcomes: Sequence[Outcome], cores: int) -> None:
    print_wide(table(outcomes, cores))
    out = Console()
    for outcome in outcomes:
        for remark in remarks(outcome.reports):
            out.print(f"{outcome.name}: {remark}", style="yellow", markup=False)


def document(work: Work, cores: Sequence[int], config: dict[str, Any], outcomes: Sequence[Outcome]) -> bytes:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    head = {"when": when, "versions": versions(), "cores": cores, "work": work, "config": config}
    derived = {item.name: {"batch_ratio": item.batch_ratio, "normalised": item.normalised} for item in outcomes}
    return msgspec.json.format(msgspec.json.encode({**head, "outcomes": outcomes, "derived": derived}), indent=1)


def main() -> None:
    parser = make_parser("lanes", __doc__)
    parser.add_argument("--interactive", type=int, default=60, help="requests measured alone")
    parser.add_argument("--rate", type=float, default=0.7, help="of them, a second")
    parser.add_argument("--batch", type=int, default=128, help="requests queued at once")
    parser.add_argument("--warmup", type=int, default=32, help="requests sent before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, help="YAML sections laid over loralane's own configuration here")
    run(partial(bench, parser.parse_args()))


if __name__ == "__main__":
    main()
