"""Runs one workload under several policies and schedulers, and each lane alone, to compare the reports."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from engine.core.messages.requests import Lane
from lab.sim.report import Report
from lab.sim.run import Setup, simulate
from lab.traffic.workload import Workload

OURS, BASELINE = "lanes", "fcfs"
INTERACTIVE_ALONE, BATCH_ALONE = "interactive alone", "batch alone"
BASELINE_ALONE = "interactive alone, fcfs"

R = TypeVar("R")
Advance = Callable[[str, float], None]
"""Callback for progress: receives the name of a run and the fraction, from 0 to 1, of this run that is done."""


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    setup: Setup
    workload: Workload


def under(setup: Setup, policy: str, scheduler: str = "continuous") -> Setup:
    """Return a copy of the setup with another scheduling policy and scheduler."""
    return replace(setup, mode=replace(setup.mode, policy=policy, scheduler=scheduler))


def run_name(policy: str, scheduler: str) -> str:
    """Return the name of a simulation in a comparison, such as "fcfs" or "fcfs, static". The default scheduler,
    continuous, is left out."""
    return policy if scheduler == "continuous" else f"{policy}, {scheduler}"


def plan_runs(
    setup: Setup, workload: Workload, policies: Sequence[str], schedulers: Sequence[str], *, goals: bool
) -> list[Run]:
    """Return the simulations to compare: each policy under each scheduler, with batch work the interactive work alone
    under lanes and, with `goals`, what these compare with. Nothing is simulated yet."""
    modes = [(policy, scheduler) for policy in policies for scheduler in schedulers]
    if goals:
        modes = list(dict.fromkeys([(OURS, "continuous"), *modes, (BASELINE, "continuous")]))
    runs = [Run(run_name(*mode), under(setup, *mode), workload) for mode in modes]
    return [*runs, *_alone(setup, workload, goals=goals)] if workload.has_batch else runs


def _alone(setup: Setup, workload: Workload, *, goals: bool) -> list[Run]:
    ours, interactive = under(setup, OURS), workload.only(Lane.INTERACTIVE)
    runs = [Run(INTERACTIVE_ALONE, ours, interactive)] if interactive.trace else []
    if goals:
        runs += [Run(BASELINE_ALONE, under(setup, BASELINE), interactive)] if interactive.trace else []
        runs.append(Run(BATCH_ALONE, under(setup, BASELINE), workload.only(Lane.BATCH)))
    return runs


def run_all(runs: Sequence[Run], jobs: int, advance: Advance) -> dict[str, Report]:
    """Simulate all runs, `jobs` at a time, each in a process if several, and return their reports by name, in order.
    `advance` is called when one ends, or now and then. Raises what `simulate` raises."""
    if jobs <= 1 or len(runs) == 1:
        return {run.name: _simulate_shown(run, advance) for run in runs}
    return run_apart(simulate, {run.name: (run.setup, run.workload) for run in runs}, jobs, advance)


def run_apart(
    work: Callable[..., R], arguments: Mapping[str, tuple[Any, ...]], jobs: int, advance: Advance
) -> dict[str, R]:
    """Call `work` with the arguments of each name, `jobs` calls at a time, each in a process of its own. Return the
    results by name, in the order of `arguments`. `advance` is called when a call has ended."""
    # spawn: a fork would copy locks that the caller's threads hold.
    with ProcessPoolExecutor(min(jobs, len(arguments)), multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(work, *given): name for name, given in arguments.items()}
        for future in as_completed(futures):
            future.result()
            advance(futures[future], 1.0)
    return {name: future.result() for future, name in futures.items()}


def _simulate_shown(run: Run, advance: Advance) -> Report:
    return simulate(run.setup, run.workload, lambda share: advance(run.name, share))
