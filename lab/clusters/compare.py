"""Runs one workload on clusters behind several routers, each cluster in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.routing.news import Role
from gateway.routing.split import SplitMode, Splitting
from lab.clusters.choosers import OTHERS, OurRouter
from lab.clusters.report import ClusterReport, make_cluster_report
from lab.devices.device import copy_bytes_per_s
from lab.devices.links import LINKS, Link
from lab.sim.cluster import Change, Chooser, simulate_cluster
from lab.sim.compare import Advance, run_apart
from lab.sim.run import Progress, Setup
from lab.traffic.workload import Workload

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
    split: SplitMode = SplitMode.NEVER
    prefill: int = 0
    """Replicas, the first ones, that compute the prompts of split requests. The others continue the answers; 0 means
    that all replicas do both."""
    link: Link = LINKS["nvlink"]

    @property
    def name(self) -> str:
        return self.router if self.split is SplitMode.NEVER else f"split {self.split.value}"


def run_trial(trial: Trial, progress: Progress = lambda _: None) -> ClusterReport:
    """Simulate the cluster of a trial and return its report; `progress` is called from time to time."""
    chooser = make_chooser(trial)
    result = simulate_cluster(trial.setup, trial.workload, chooser, trial.replicas, trial.changes, progress, trial.link)
    reasons = chooser.reasons if isinstance(chooser, OurRouter) else {}
    died_at = next((change.at for change in trial.changes if change.dies), None)
    return make_cluster_report(result, trial.workload, trial.replicas, reasons, died_at)


def make_chooser(trial: Trial) -> Chooser:
    seed = trial.workload.seed
    if trial.router != OURS:
        return OTHERS[trial.router](seed)
    device = trial.setup.device
    sizes = {name: device.adapter_pages(rank) * device.page_bytes for name, rank in trial.workload.ranks().items()}
    kv_bytes = device.page_bytes / trial.setup.core.block_size
    copies = trial.setup.core.host_pages > 0
    splitting = Splitting(trial.split, trial.link.reached, trial.link.latency_s, kv_bytes, copies)
    rates = copy_bytes_per_s(device), device.disk_bytes_per_s
    return OurRouter(sizes, rates, seed, splitting, _roles(trial))


def _roles(trial: Trial) -> list[Role]:
    if not trial.prefill:
        return []
    return [Role.PREFILL] * trial.prefill + [Role.DECODE] * (trial.replicas - trial.prefill)


def run_trials(trials: Sequence[Trial], jobs: int, advance: Advance) -> Mapping[str, ClusterReport]:
    """Run all trials, which have different names, `jobs` at a time, and return their reports by name, in the order of
    `trials`. `advance` is called with (name, 1.0) when one has ended."""
    return run_apart(run_trial, {trial.name: (trial,) for trial in trials}, jobs, advance)
