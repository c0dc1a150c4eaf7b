"""`make bench-lanes`: how much the interactive lane and the batch lane slow each other down.

    python -m benchmarks.lanes [--vllm-python PATH] [--cores 0,1] [--json FILE]

Each server gets interactive requests alone, a batch alone, and both together, in one run on the same two cores and with
the same arrivals and lengths. Beside the batch, interactive requests arrive from 3 s after its start until its end; the
batch's throughput is over its own span. Without a Python that has vLLM, only loralane is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.peers import MODEL, Peer, loralane, vllm
from benchmarks.runner import CORES, DATA_DIR, JSON, VLLM, Run, benchmark, option, stamp, table
from benchmarks.server import pinned, running
from gateway.config.file import read_yaml
from gateway.serve.process import run_loop
from lab.bench.client import Target
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


def compared(outcomes: Sequence[Outcome], cores: int) -> Table:
    columns = [f"{outcome.name}\n{column}" for outcome in outcomes for column in ("alone", "beside", "ratio")]
    lines = [(one[0][0], *(cell for row in one for cell in row[1:])) for one in zip(*map(rows, outcomes), strict=True)]
    title, caption = (
        f"The interactive lane beside a batch, {cores} cores",
        "ms; batch: output tokens/s over its own span",
    )
    return table(title, " | ".join(["", *columns]), lines, caption=caption)


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


@benchmark(
    VLLM,
    CORES,
    option("--interactive", 60, "requests measured alone"),
    option("--rate", 0.7, "of them, a second"),
    option("--batch", 128, "requests queued at once"),
    option("--warmup", 32, "requests sent before"),
    option("--seed", 0),
    option("--config", Path, "YAML sections laid over loralane's own configuration here"),
    JSON,
    DATA_DIR,
)
def bench(run: Run) -> None:
    options, cpus = run.options, run.options.cores
    model = dense_folder("embedded", options.data_dir, run.console)
    extra = read_yaml(options.config) if options.config else {}
    peers = [loralane(model, run.scratch, cpus, extra)]
    if options.vllm_python:
        peers.append(vllm(options.vllm_python, model, cpus))
    run.tell_of_missing_peer()
    work = Work(options.interactive, options.rate, options.batch, options.warmup, options.seed)
    with pinned(run.client_cores):
        outcomes = [measure(peer, work, run.scratch, run.console) for peer in peers]
    derived = {item.name: {"batch_ratio": item.batch_ratio, "normalised": item.normalised} for item in outcomes}
    head = {**stamp(), "cores": sorted(cpus), "work": work, "config": extra}
    run.show(compared(outcomes, len(cpus)), {**head, "outcomes": outcomes, "derived": derived})
    for outcome in outcomes:
        for remark in remarks(outcome.reports):
            run.console.print(f"{outcome.name}: {remark}", style="yellow", markup=False)


if __name__ == "__main__":
    bench.main()
