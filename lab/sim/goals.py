"""Goals of the scheduler. Each goal is a figure of a comparison of runs, with an upper or lower limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lab.devices.cost import StepWork
from lab.sim.compare import BASELINE, BASELINE_ALONE, BATCH_ALONE, INTERACTIVE_ALONE
from lab.sim.report import Report
from lab.sim.run import Setup

BASELINES = (INTERACTIVE_ALONE, BASELINE_ALONE, BATCH_ALONE)
"""Names of the runs that serve as references. They are not judged themselves."""
TYPICAL_CONTEXT = 1024
"""Context length, in tokens, of the single decode that the yield bound is a multiple of."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Input of `Goal.value`: the report of the run that is judged, and the reports of all runs of the comparison by
    name."""

    run: Report
    others: Mapping[str, Report]


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal by which a simulated run of the scheduler is judged: a limit on the figure that `value` computes, an upper
    limit if `at_most` is set, else a lower limit."""

    figure: str
    limit: float
    at_most: bool
    value: Callable[[Evidence], float | None]
    """Computes the figure of the judged run. None means that the figure has no meaning in this comparison."""

    def is_met(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit


@dataclass(frozen=True, slots=True)
class Judged:
    goal: Goal
    values: dict[str, float | None]
    """The goal's figure for each run that is not a baseline, by name of the run."""


def judge(setup: Setup, reports: Mapping[str, Report]) -> list[Judged]:
    """Return every goal of the scheduler with its figure in each simulated run except those of a lane alone
    (`BASELINES`). `reports` has the runs by name. Goals that have no figure in any run are left out."""
    evidence = {name: Evidence(report, reports) for name, report in reports.items() if name not in BASELINES}
    judged = [
        Judged(goal, {name: goal.value(item) for name, item in evidence.items()})
        for goal in goals(setup, reports.get(INTERACTIVE_ALONE))
    ]
    return [item for item in judged if any(value is not None for value in item.values.values())]


def goals(setup: Setup, alone: Report | None) -> list[Goal]:
    """Return all goals by which runs of the scheduler under a setup are judged. The report `alone`, of interactive
    work, may raise the limit of the time that batch work takes to yield."""
    attainment, bound = setup.core.interactive.attainment, _yield_bound(setup, alone)
    return [
        Goal("interactive p99 TTFT / alone", 1.10, True, lambda e: _to_alone(e, "ttft")),
        Goal("interactive p99 ITL / alone", 1.5, True, lambda e: _to_alone(e, "itl")),
        Goal("interactive tokens within their ITL goal", attainment, False, _itl_attainment),
        Goal("batch tokens/s / alone x (1 - interactive device share)", 0.90, False, _batch_to_alone),
        Goal("batch tokens/s / fcfs, which never yields", 0.88, False, _batch_to_fcfs),
        Goal("time to yield p99 (s): one bounded step", bound, True, lambda e: e.run.time_to_yield.p99),
        Goal("widest service gap / VTC bound", 0.5, True, _service_gap),
        Goal("tokens/s / fcfs, interactive work alone", 0.99, False, _fair_to_fcfs),
        Goal("recomputed / useful tokens", 0.02, True, lambda e: e.run.recompute_tax),
        Goal("step-time prediction error, median", 0.05, True, lambda e: e.run.prediction_error),
    ]


def _yield_bound(setup: Setup, alone: Report | None) -> float:
    """Return the longest duration in seconds allowed for the step that an interactive arrival finds running: a step of
    batch work alone, or a step with prompts of other interactive requests that batch work lengthened."""
    rules = setup.core.scheduling
    decode = setup.device.cost.seconds(StepWork(decode_tokens=1, decode_context=TYPICAL_CONTEXT, samples=1))
    batch = min(rules.yield_bound_s, rules.yield_stretch * decode)
    return max(batch, rules.ttft_stretch * alone.longest_step if alone else 0.0)


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _p99(report: Report | None, name: str) -> float | None:
    return report.interactive_p99(name) if report else None


def _batch_tokens(report: Report | None) -> float | None:
    lane = report.lanes.get("batch") if report else None
    return lane.tokens_per_s if lane else None


def _to_alone(evidence: Evidence, name: str) -> float | None:
    return _ratio(_p99(evidence.run, name), _p99(evidence.others.get(INTERACTIVE_ALONE), name))


def _itl_attainment(evidence: Evidence) -> float | None:
    lane = evidence.run.lanes.get("interactive")
    return lane.itl_attainment if lane else None


def _batch_to_alone(evidence: Evidence) -> float | None:
    """Return batch tokens/s / (batch tokens/s alone x (1 - interactive share of the device)), or None if a run is
    missing."""
    # Both terms of the divisor come from runs under fcfs, which never yields. The interactive share is measured beside
    # batch work: alone, it would pay for whole steps.
    batch_alone, fcfs = _batch_tokens(evidence.others.get(BATCH_ALONE)), evidence.others.get(BASELINE)
    if batch_alone is None or fcfs is None:
        return None
    return _ratio(_batch_tokens(evidence.run), batch_alone * (1 - fcfs.device_share["interactive"]))


def _batch_to_fcfs(evidence: Evidence) -> float | None:
    return _ratio(_batch_tokens(evidence.run), _batch_tokens(evidence.others.get(BASELINE)))


def _fair_to_fcfs(evidence: Evidence) -> float | None:
    """Return the throughput in tokens per second relative to that under fcfs, which shows the cost of ordering by
    tenant, of interactive work alone if both were run. None means no fcfs run."""
    others = evidence.others
    if BASELINE_ALONE in others and INTERACTIVE_ALONE in others:
        return _ratio(others[INTERACTIVE_ALONE].tokens_per_s, others[BASELINE_ALONE].tokens_per_s)
    return _ratio(evidence.run.tokens_per_s, others[BASELINE].tokens_per_s) if BASELINE in others else None


def _service_gap(evidence: Evidence) -> float | None:
    report = evidence.run
    shares = [gap / report.service_bound[lane] for lane, gap in report.service_gap.items() if gap]
    return max(shares, default=None)
