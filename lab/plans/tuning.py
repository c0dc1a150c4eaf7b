"""Tries settings on recorded traffic in the simulator, and keeps those with which its latencies are the lowest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.core.config import CoreConfig, LaneGoals
from lab.plans.advice import Advice, Setting, most_rate
from lab.sim.compare import Advance, Run, run_all
from lab.sim.report import Report
from lab.sim.run import Setup
from lab.traffic.analysis import Analysis
from lab.traffic.traces import Trace, cut, scale_rate
from lab.traffic.workload import Workload

BUDGETS = (512, 1024, 2048, 4096, 8192)
"""Token budgets that are tried."""
LOAD = 0.8
"""Fraction of a device's highest rate, by arithmetic (`most_rate`), at which settings are tried."""
REQUESTS, LEAST_S = 400, 60.0
"""Approximate number of requests in a trial, and minimum length of its traffic in seconds."""
LEAST_GAIN = 0.03
"""Fraction by which another token budget must lower the latencies for it to replace the configured one."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """Result of `tune`: the simulation reports with the configured token budget (`before`) and with the best one
    (`after`), and the `setting` of the latter. A setting of None means that the configured budget is the best."""

    before: Report
    after: Report
    setting: Setting | None


def tune(setup: Setup, analysis: Analysis, trace: Trace, advice: Advice, jobs: int, advance: Advance) -> Tuned:
    """Simulate the beginning of a trace with several token budgets, in `jobs` processes, and return the reports of the
    configured and the best. Raises ValueError without interactive requests, or if all arrive at once.

    Args:
        advice: its goals for interactive work replace those of `setup`.
    """
    # The best has the fewest late tokens beyond the goals and, among equals, the lowest sum of p99 TTFT and p99 ITL,
    # each divided by its goal.
    if not analysis.rate or "interactive" not in analysis.lanes:
        raise ValueError("settings are tuned for the latency of interactive requests that arrive over time")
    goals, rate = goals_of(advice, setup.core), LOAD * most_rate(analysis, setup.device, setup.core)
    part = cut(scale_rate(trace, rate / analysis.rate), max(LEAST_S, REQUESTS / rate))
    workload = Workload(part, part[-1].time, adapters=1 + max(arrival.adapter for arrival in part))
    advised, usual = replace(setup.core, interactive=goals), setup.core.token_budget
    cores = {_name(budget): replace(advised, token_budget=budget) for budget in sorted({*BUDGETS, usual})}
    runs = [Run(name, replace(setup, core=core), workload) for name, core in cores.items()]
    reports = run_all(runs, jobs, advance)
    before = reports[_name(usual)]
    best = min(reports, key=lambda name: judge(reports[name], goals))
    budget = cores[best].token_budget
    if budget == usual or not is_better(reports[best], before, goals):
        return Tuned(before, before, None)
    reason = f"of {len(cores)} budgets, this has the lowest latencies at {LOAD:.0%} of what {setup.device.name} serves"
    return Tuned(before, reports[best], Setting("engine.token_budget", budget, reason))


def trial_names(setup: Setup) -> list[str]:
    """Return the names of the simulations, one for each token budget, that `tune` passes to its `advance` callback."""
    return [_name(budget) for budget in sorted({*BUDGETS, setup.core.token_budget})]


def _name(budget: int) -> str:
    return f"{budget:,} tokens a step"


def goals_of(advice: Advice, core: CoreConfig) -> LaneGoals:
    """Return the TTFT and ITL goals of interactive work by which token budgets are compared: those that are advised,
    else those of `core`."""
    prefix = "lanes.interactive."
    changes = {
        setting.name.removeprefix(prefix): setting.value
        for setting in advice.settings
        if setting.name.startswith(prefix)
    }
    return replace(core.interactive, **changes)


def judge(report: Report, goals: LaneGoals) -> tuple[float, float]:
    """Return a sort key of simulation reports, lower for better ones: first the share of late tokens beyond what the
    goals allow, then the sum of p99 TTFT and p99 ITL, each divided by its goal."""
    lane = report.lanes["interactive"]
    shares: Sequence[float | None] = (lane.ttft_attainment, lane.itl_attainment)
    late = max(1 - share for share in shares if share is not None)
    times = (lane.ttft.p99 or math.inf) / goals.ttft_s + (lane.itl.p99 or 0.0) / goals.itl_s
    return round(max(0.0, late - (1 - goals.attainment)), 2), times


def is_better(report: Report, other: Report, goals: LaneGoals) -> bool:
    """Return whether a report is better than another one: it has a lower share of late tokens beyond what the goals
    allow, or an equal share and latencies that are lower by more than `LEAST_GAIN`."""
    (late, times), (other_late, other_times) = judge(report, goals), judge(other, goals)
    return late < other_late or (late == other_late and times < (1 - LEAST_GAIN) * other_times)
