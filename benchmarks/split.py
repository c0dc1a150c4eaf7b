"""Where it pays that one engine computes prompts and another one answers: `python -m benchmarks.split --plot x.png`.

Four simulated H100 with Llama 3.1 8B serve random requests behind the router, for each length of prompts and answers,
load and link, and for several seeds. Three clusters get the same requests: one that never splits them, one that always
does, over pairs that the router chooses, and one that decides for each. The measure is the mean time of a request from
its arrival to its last token. A load of 1 is what four engines serve at most, by arithmetic. KV comes into device
memory; engines that keep KV in host memory, too, pay for two more copies.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from rich.box import SIMPLE_HEAD

from benchmarks.runner import JSON, Run, benchmark, option, table_of
from engine.core.config import CoreConfig
from gateway.routing.split import SplitMode
from lab.clusters.compare import OURS, Trial, run_trial
from lab.commands.simulate_cluster import shown_progress
from lab.devices.capacity import Demand, serve
from lab.devices.device import find_device
from lab.devices.links import LINKS
from lab.plot import check_available, tokens_label
from lab.sim.compare import run_apart
from lab.sim.run import Setup
from lab.traffic.scenario import Scenario
from lab.traffic.synthetic import Sizes

PROMPTS, OUTPUTS, LOADS = (512, 4096, 16384), (16, 128), (0.4, 0.7)
BETWEEN = ("nvlink", "ethernet-100")
ENGINES = 4
REQUESTS, LEAST_S, MOST_S = 200, 6.0, 40.0
"""Requests of a cluster, as far as they arrive within so many seconds at least and at most."""
SEEDS = 4
SPREAD = 0.25
"""Lengths differ from their mean by up to this share."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One traffic, with the mean seconds of a request in each of the clusters."""

    prompt: int
    output: int
    load: float
    link: str
    never: float
    always: float
    auto: float
    split: float
    """Share of requests that `auto` split."""
    error: float | None
    """Standard error of `behind`, over the seeds. None means that there is one seed."""

    @property
    def behind(self) -> float:
        """Return by which share `auto` is behind the better of the others; negative if it is ahead."""
        return self.auto / min(self.never, self.always) - 1

    @property
    def error_share(self) -> str:
        return "" if self.error is None else f"{self.error:.1%}"


COLUMNS = "prompt | output | load | link | never | always | auto | split | behind | error"
CELLS = (
    "{0.prompt:,} | {0.output:,} | {0.load:g} | {0.link} | {0.never:.3f}"
    " | {0.always:.3f} | {0.auto:.3f} | {0.split:.0%} | {0.behind:+.1%} | {0.error_share}"
)


def mean_e2e(prompt: int, output: int, load: float, link: str, split: str, seed: int) -> tuple[float, float]:
    """Simulate a cluster, and return the mean seconds of a request, and the share of requests that were split."""
    device = find_device("h100-8b")
    core = CoreConfig(**{**device.engine, "host_pages": 0})
    rate = load * ENGINES * serve(device, core, Demand(prompt, output, prompt + output / 2), math.inf).rate
    seconds = min(MOST_S, max(LEAST_S, REQUESTS / rate))
    scenario = Scenario(rate=rate, seconds=seconds, prompt=_spread(prompt), output=_spread(output), seed=seed)
    work = scenario.workload()
    report = run_trial(Trial(OURS, Setup(device, core), work, ENGINES, split=SplitMode(split), link=LINKS[link]))
    lane = report.lanes["interactive"]
    if lane.finished < lane.requests or lane.e2e.mean is None:
        raise RuntimeError(f"{lane.requests - lane.finished} requests did not finish")
    return lane.e2e.mean, report.split / lane.requests


def _spread(mean: int) -> Sizes:
    return Sizes(round(mean * (1 - SPREAD)), round(mean * (1 + SPREAD)))


def measure(
    prompts: Sequence[int], outputs: Sequence[int], loads: Sequence[float], links: Sequence[str], seeds: int, jobs: int
) -> list[Cell]:
    """Simulate all clusters, `jobs` at a time. What never splits is simulated for one link only."""
    traffics, ways = list(product(prompts, outputs, loads)), [(links[0], "never"), *product(links, ("always", "auto"))]
    every = [(*traffic, *way, seed) for traffic, way, seed in product(traffics, ways, range(seeds))]
    runs = {_name(*run): run for run in every}
    with shown_progress(["clusters"]) as advance:
        done = iter(range(1, len(runs) + 1))
        found = run_apart(mean_e2e, runs, jobs, lambda name, share: advance("clusters", next(done) / len(runs)))
    return list(_cells(traffics, links, seeds, found))


def _name(*traffic: object) -> str:
    return " ".join(map(str, traffic))


def _cells(
    traffics: Iterable[tuple[int, int, float]],
    links: Sequence[str],
    seeds: int,
    found: Mapping[str, tuple[float, float]],
) -> Iterable[Cell]:
    for traffic, link in product(traffics, links):
        ways = ((links[0], "never"), (link, "always"), (link, "auto"))
        runs = [[found[_name(*traffic, *way, seed)] for seed in range(seeds)] for way in ways]
        never, always, auto = ([seconds for seconds, _ in each] for each in runs)
        split, error = fmean(share for _, share in runs[-1]), _error(auto, min(never, always, key=fmean))
        yield Cell(*traffic, link, fmean(never), fmean(always), fmean(auto), split, error)


def _error(times: Sequence[float], others: Sequence[float]) -> float | None:
    """Return the standard error of the mean difference between times with the same seeds, as a share of the others'
    mean. None means that there is one seed."""
    if len(times) == 1:
        return None
    differences = [one - other for one, other in zip(times, others, strict=True)]
    return stdev(differences) / math.sqrt(len(differences)) / fmean(others)


def draw(cells: Sequence[Cell], out: Path) -> None:
    """Write a plot with a panel for each link and load: by how much the mean time of requests changes if they are
    always split, and if the router decides."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    loads, links = sorted({cell.load for cell in cells}), list(dict.fromkeys(cell.link for cell in cells))
    figure = Figure(figsize=(4.2 * len(loads), 3.6 * len(links)), layout="constrained")
    panels = figure.subplots(len(links), len(loads), squeeze=False)
    for (row, link), (column, load) in product(enumerate(links), enumerate(loads)):
        axes = panels[row][column]
        shown = [cell for cell in cells if (cell.link, cell.load) == (link, load)]
        prompts, outputs = sorted({cell.prompt for cell in shown}), sorted({cell.output for cell in shown})
        changes = {(cell.prompt, cell.output): cell.always / cell.never - 1 for cell in shown}
        grid = [[changes[prompt, output] for output in outputs] for prompt in prompts]
        axes.imshow(grid, cmap="RdYlGn_r", norm=TwoSlopeNorm(0.0, -0.4, 0.4), aspect="auto", origin="lower")
        for cell in shown:
            place = outputs.index(cell.output), prompts.index(cell.prompt)
            text = f"always {cell.always / cell.never - 1:+.0%}\nauto {cell.auto / cell.never - 1:+.0%}"
            axes.text(*place, text, ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(outputs)), [tokens_label(output) for output in outputs])
        axes.set_yticks(range(len(prompts)), [tokens_label(prompt) for prompt in prompts])
        axes.set(xlabel="output tokens", ylabel="prompt tokens", title=f"{link}, load {load:g}")
    figure.suptitle("mean time of a request, over that of requests that are not split")
    figure.savefig(out, dpi=100)


@benchmark(
    option("--prompts", PROMPTS, "mean prompt tokens"),
    option("--outputs", OUTPUTS, "mean output tokens"),
    option("--loads", LOADS, "shares of what the engines serve"),
    option("--links", BETWEEN, "links between engines", choices=tuple(LINKS)),
    option("--seeds", SEEDS, "number of random traffics of each kind"),
    option("--jobs", os.cpu_count() or 1, "simulations at a time"),
    option("--plot", Path, "file for a plot"),
    JSON,
)
def bench(run: Run) -> None:
    options = run.options
    if options.plot is not None:
        check_available(options.plot)
    traffic = options.prompts, options.outputs, options.loads, options.links
    cells = measure(*traffic, options.seeds, options.jobs)
    run.show(table_of("mean seconds of a request", cells, COLUMNS, CELLS, ("link",), box=SIMPLE_HEAD, padding=0), cells)
    if options.plot is not None:
        draw(cells, options.plot)


if __name__ == "__main__":
    bench.main()
