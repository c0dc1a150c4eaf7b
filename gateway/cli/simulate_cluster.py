"""The part of `loralane simulate` that compares routers on a simulated cluster."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.sim.cluster import Change
from engine.sim.compare import Advance
from engine.sim.run import Setup
from engine.sim.scenario import Scenario
from engine.sim.workload import Workload
from gateway.simulation.compare import OURS, ROUTERS, Trial, run_trials
from gateway.simulation.report import cluster_table
from gateway.terminal.output import print_wide

progress_console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The number of replicas of a simulation, those that die or are added meanwhile, and the routers to compare. Raises
    ValueError if a router is unknown, or if the only replica would die."""

    replicas: int
    routers: Sequence[str]
    changes: tuple[Change, ...]

    def __post_init__(self) -> None:
        for router in self.routers:
            if router not in ROUTERS:
                raise ValueError(f"no router {router!r}: --router is one of {', '.join(ROUTERS)}")
        if self.replicas == 1 and any(change.dies for change in self.changes):
            raise ValueError("--kill needs at least two --replicas, so that one is left")

    def check_options(self, *, goals: bool, plot: Path | None) -> None:
        """Raise ValueError if an option is given that is for one engine."""
        if goals or plot is not None:
            raise ValueError("--goals and --plot are for one engine, without --replicas and --router")

    @classmethod
    def of(cls, replicas: int, routers: Sequence[str] | None, kill: float | None, add: float | None) -> Cluster | None:
        """Return what the options describe: at second `kill` the first replica dies, at second `add` another one joins,
        and without `routers` only ours is simulated. None means that they ask for one engine without a router."""
        changes = [Change(kill, 0, dies=True)] if kill is not None else []
        changes += [Change(add, replicas, dies=False)] if add is not None else []
        if replicas == 1 and not routers and not changes:
            return None
        return cls(replicas, routers or (OURS,), tuple(sorted(changes, key=lambda change: change.at)))


@contextmanager
def shown_progress(names: Iterable[str]) -> Iterator[Advance]:
    """Show a progress bar for each name on standard error while the block runs, and yield the function of (name, share
    that is done) that advances one of them."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=progress_console) as progress:
        tasks = {name: progress.add_task(name, total=1.0) for name in names}
        yield lambda name, share: progress.update(tasks[name], completed=share)


def compare_routers(
    setup: Setup, scenario: Scenario, workload: Workload, cluster: Cluster, jobs: int, json_file: Path | None
) -> None:
    """Simulate the cluster behind each router, `jobs` clusters at a time, print a table with a column for each, and
    write the reports to `json_file` if it is given."""
    trials = [Trial(router, setup, workload, cluster.replicas, cluster.changes) for router in cluster.routers]
    with shown_progress(cluster.routers) as advance:
        reports = run_trials(trials, jobs, advance)
    title = f"{scenario.title}, {cluster.replicas} replicas"
    print_wide(cluster_table(title, reports))
    if json_file is not None:
        document = {
            "scenario": scenario.title,
            "device": setup.device.description,
            "engine": asdict(setup.core),
            "changes": [asdict(change) for change in cluster.changes],
            "routers": {name: asdict(report) for name, report in reports.items()},
        }
        json_file.write_text(json.dumps(document, indent=2) + "\n")
