"""The part of `loralane simulate` that compares routers on a simulated cluster."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gateway.routing.split import SplitMode
from gateway.terminal.console import Console
from gateway.terminal.output import print_wide
from lab.clusters.compare import OURS, ROUTERS, Trial, run_trials
from lab.clusters.report import cluster_table
from lab.devices.links import LINKS
from lab.sim.cluster import Change
from lab.sim.compare import Advance
from lab.sim.run import Setup
from lab.traffic.scenario import Scenario
from lab.traffic.workload import Workload

progress_console = Console(stderr=True)
SPLITS = tuple(mode.value for mode in SplitMode)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the options ask of a simulated cluster: its replicas, when one dies or is added, and the routers, or modes
    of splitting requests, to compare. Raises ValueError for an unknown router, mode or link, or too few replicas."""

    replicas: int
    routers: Sequence[str]
    changes: tuple[Change, ...]
    splits: Sequence[str] = ()
    prefill: int = 0
    link: str = "nvlink"

    def __post_init__(self) -> None:
        for router in self.routers:
            if router not in ROUTERS:
                raise ValueError(f"no router {router!r}: --router is one of {', '.join(ROUTERS)}")
        if self.replicas == 1 and any(change.dies for change in self.changes):
            raise ValueError("--kill needs at least two --replicas, so that one is left")
        for split in self.splits:
            if split not in SPLITS:
                raise ValueError(f"no way {split!r} to split: --split is one of {', '.join(SPLITS)}")
        if self.splits and (self.replicas < 2 or tuple(self.routers) != (OURS,)):
            raise ValueError(f"--split needs at least two --replicas behind the router {OURS!r} only")
        if not 0 <= self.prefill < self.replicas:
            raise ValueError("--prefill must leave at least one of the --replicas")
        if self.link not in LINKS:
            raise ValueError(f"no link {self.link!r}: --link is one of {', '.join(LINKS)}")

    def trials(self, setup: Setup, workload: Workload) -> list[Trial]:
        split = partial(Trial, OURS, setup, workload, self.replicas, self.changes, link=LINKS[self.link])
        if self.splits:
            return [split(SplitMode(name), self.prefill if name != "never" else 0) for name in self.splits]
        return [Trial(router, setup, workload, self.replicas, self.changes) for router in self.routers]

    def check_options(self, *, goals: bool, plot: Path | None) -> None:
        """Raise ValueError if --goals or --plot is given: they are for simulations of one engine."""
        if goals or plot is not None:
            raise ValueError("--goals and --plot are for one engine, without --replicas and --router")

    @classmethod
    def of(
        cls,
        replicas: int,
        routers: Sequence[str] | None,
        kill: float | None,
        add: float | None,
        splits: Sequence[str] | None = None,
        prefill: int = 0,
        link: str = "nvlink",
    ) -> Cluster | None:
        """Return what the options describe: at second `kill` the first replica dies, at second `add` another one joins,
        and without `routers` only ours is simulated. None means that they ask for one engine without a router."""
        changes = [Change(kill, 0, dies=True)] if kill is not None else []
        changes += [Change(add, replicas, dies=False)] if add is not None else []
        if replicas == 1 and not (routers or changes or splits):
            return None
        ordered = tuple(sorted(changes, key=lambda change: change.at))
        return cls(replicas, routers or (OURS,), ordered, tuple(dict.fromkeys(splits or ())), prefill, link)


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
    trials = cluster.trials(setup, workload)
    with shown_progress(trial.name for trial in trials) as advance:
        reports = run_trials(trials, jobs, advance)
    title = f"{scenario.title}, {cluster.replicas} replicas"
    print_wide(cluster_table(title, reports))
    if json_file is not None:
        document = {
            "scenario": scenario.title,
            "device": setup.device.description,
            "engine": asdict(setup.core),
            "link": cluster.link,
            "changes": [asdict(change) for change in cluster.changes],
            "routers": {name: asdict(report) for name, report in reports.items()},
        }
        json_file.write_text(json.dumps(document, indent=2) + "\n")
