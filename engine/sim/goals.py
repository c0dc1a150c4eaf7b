"""The goals of the scheduler as figures of a comparison: what was promised, what it is, and whether it is met."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.executor.cost import StepWork
from engine.sim.compare import BASELINE, BASELINE_ALONE, BATCH_ALONE, INTERACTIVE_ALONE
from engine.sim.report import Report
from engine.sim.run import Setup

BASELINES = (INTERACTIVE_ALONE, BASELINE_ALONE, BATCH_ALONE)
"""Runs that others are judged beside, and that are not judged themselves."""
TYPICAL_CONTEXT = 1024
"""Of the one decode that the bound of a yield is a multiple of."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One run and all of the comparison."""

    run: Report
    others: Mapping[str, Report]


@dataclass(frozen=True, slots=True)
class Goal:
    figure: str
    limit: float
    at_most: bool
    value: Callable[[Evidence], float | None]

    def is_met(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit


@dataclass(frozen=True, slots=True)
class Judged:
    goal: Goal
    values: dict[str, float | None]
    """By run."""


def judge(setup: Setup, reports: Mapping[str, Report]) -> list[Judged]:
    """Every goal with its figure in every run that is not a baseline; goals without a meaning here are left out."""
    evidence = {name: Evidence(report, reports) for name, report in reports.items() if name not in BASELINES}
    judged = [
        Judged(goal, {name: goal.value(item) for name, item in evidence.items()})
        for goal in goals(setup, reports.get(INTERACTIVE_ALONE))
    ]
    return [item for item in judged if any(value is not None for value in item.values.values())]


def goals(setup: Setup, alone: Report | None) -> list[Goal]:
    """`alone`: interactive work by itself."""
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
    """The longest step that an interactive arrival may find running: one of batch work alone, or one that carries
    prompts of others and was lengthened by batch work."""
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
    """What interactive work needs is its share of the device beside batch work under fcfs, which never yields: alone it
    is in every step's way, shared it pays for its part of one. So is what a batch does alone: nothing holds it back."""
    batch_alone, fcfs = _batch_tokens(evidence.others.get(BATCH_ALONE)), evidence.others.get(BASELINE)
    if batch_alone is None or fcfs is None:
        return None
    return _ratio(_batch_tokens(evidence.run), batch_alone * (1 - fcfs.device_share["interactive"]))


def _batch_to_fcfs(evidence: Evidence) -> float | None:
    return _ratio(_batch_tokens(evidence.run), _batch_tokens(evidence.others.get(BASELINE)))


def _fair_to_fcfs(evidence: Evidence) -> float | None:
    """What ordering by tenants costs: beside batch work the lanes' own rules would hide it, so the comparison is
    between runs without."""
    others = evidence.others
    if BASELINE_ALONE in others and INTERACTIVE_ALONE in others:
        return _ratio(others[INTERACTIVE_ALONE].tokens_per_s, others[BASELINE_ALONE].tokens_per_s)
    return _ratio(evidence.run.tokens_per_s, others[BASELINE].tokens_per_s) if BASELINE in others else None


def _service_gap(evidence: Evidence) -> float | None:
    report = evidence.run
    shares = [gap / report.service_bound[lane] for lane, gap in report.service_gap.items() if gap]
    return max(shares, default=None)
