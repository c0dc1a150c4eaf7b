"""Runs one workload on clusters behind several routers, each cluster in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.sim.cluster import Change, Chooser, simulate_cluster
from engine.sim.compare import Advance, run_apart
from engine.sim.device import copy_bytes_per_s
from engine.sim.run import Setup
from engine.sim.workload import Workload
from gateway.simulation.choosers import OTHERS, OurRouter
from gateway.simulation.report import ClusterReport, make_cluster_report

OURS = "ours"
ROUTERS = (OURS, *OTHERS)


@dataclass(frozen=True, slots=True)
class Trial:
    """A cluster to simulate: so many replicas behind a router, and the replicas that die or are added meanwhile."""

    router: str
    """One of `ROUTERS`."""
    setup: Setup
    workload: Workload
    replicas: int
    changes: tuple[Change, ...] = ()


def run_trial(trial: Trial) -> ClusterReport:
    chooser = make_chooser(trial)
    result = simulate_cluster(trial.setup, trial.workload, chooser, trial.replicas, trial.changes)
    reasons = chooser.reasons if isinstance(chooser, OurRouter) else {}
    died_at = next((change.at for change in trial.changes if change.dies), None)
    return make_cluster_report(result, trial.workload, trial.replicas, reasons, died_at)


def make_chooser(trial: Trial) -> Chooser:
    seed = trial.workload.seed
    if trial.router != OURS:
        return OTHERS[trial.router](seed)
    device = trial.setup.device
    sizes = {name: device.adapter_pages(rank) * device.page_bytes for name, rank in trial.workload.ranks().items()}
    return OurRouter(sizes, (copy_bytes_per_s(device), device.disk_bytes_per_s), seed)


def run_trials(trials: Sequence[Trial], jobs: int, advance: Advance) -> Mapping[str, ClusterReport]:
    """Run all trials, one of each router, `jobs` at a time, and return their reports by router, in the order of
    `trials`. `advance` is called with (router, 1.0) when one has ended."""
    return run_apart(run_trial, {trial.router: (trial,) for trial in trials}, jobs, advance)
