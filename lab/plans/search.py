"""Finds the cheapest of a plan's candidates that meets the goals in simulation, with more and more engines. If the
first needs more than by arithmetic, some of the next are simulated, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from gateway.routing.split import SplitMode
from lab.clusters.compare import OURS, Trial, run_trial
from lab.clusters.report import ClusterReport
from lab.devices.links import Link
from lab.plans.planning import Candidate, Plan, Wish, judged, pricing, try_out, with_engines
from lab.plans.split import with_parts
from lab.sim.run import Progress, Setup
from lab.traffic.scenario import Scenario

MOST_TRIALS = 8
"""Maximum number of simulations of a candidate, each with more engines than the one before, until goals are met."""
MOST_OTHERS, MOST_SPLIT = 2, 2
"""Maximum numbers of candidates that are simulated besides the first: without and with split requests."""
MOST_REQUESTS, LEAST_S = 1500, 5.0
"""Approximate number of requests in the simulation of a cluster, and least number of seconds that it covers even if
these have more requests."""

Try = Callable[[Candidate], Plan]
Shown = Callable[[str], Progress]
"""Function that takes the name of a simulation, and returns the function that shows its progress."""


def find_plan(
    candidates: Sequence[Candidate], wish: Wish, scenario: Scenario, split: SplitMode, link: Link, shown: Shown
) -> Plan:
    """Return the cheapest plan found in simulation. `candidates` is in the order of price; with `split` ALWAYS, only
    those that split requests count. Raises ValueError if there is no such candidate, or no request is interactive."""

    def try_whole(candidate: Candidate) -> Plan:
        return try_out(candidate, wish, scenario, shown(f"{candidate.engines} engines"))

    def try_split(candidate: Candidate) -> Plan:
        progress = shown(f"{candidate.prefill} prefill + {candidate.engines - candidate.prefill} decode")
        return _try_cluster(candidate, wish, scenario, split, link, progress)

    def trial(candidate: Candidate) -> Plan:
        return try_split(candidate) if candidate.prefill else try_whole(candidate)

    price = pricing(candidates)
    first, *others = _chosen(candidates, split)
    plan = _grow(first, wish, trial, price, math.inf)
    for candidate in others:
        limit = price(plan.candidate) if plan.is_enough else math.inf
        if price(candidate) < limit and (other := _grow(candidate, wish, trial, price, limit)).is_enough:
            plan = other
    return plan


def _chosen(candidates: Sequence[Candidate], split: SplitMode) -> list[Candidate]:
    """Return the candidates that are simulated: the first one, and some of the others in the order of price. Raises
    ValueError if all requests are to be split and no candidate does that."""
    whole, parts = (
        [candidate for candidate in candidates if bool(candidate.prefill) is is_split] for is_split in (False, True)
    )
    if split is SplitMode.ALWAYS:
        if not parts:
            raise ValueError("--split always needs a model that fits one device, and answers of at least two tokens")
        return parts[: 1 + MOST_OTHERS]
    others = [*whole[1 : 1 + MOST_OTHERS], *parts[:MOST_SPLIT]]
    return [whole[0], *(candidate for candidate in candidates if any(candidate is other for other in others))]


def _grow(candidate: Candidate, wish: Wish, trial: Try, price: Callable[[Candidate], float], limit: float) -> Plan:
    """Simulate a candidate with more and more engines until it meets the goals, MOST_TRIALS simulations are done or the
    next one would cost `limit` or more. Return the last plan."""
    plan = trial(candidate)
    for _ in range(MOST_TRIALS - 1):
        candidate = _grown(plan, wish)
        if plan.is_enough or price(candidate) >= limit:
            break
        plan = trial(candidate)
    return plan


def _grown(plan: Plan, wish: Wish) -> Candidate:
    """Return the candidate of a plan with an eighth more engines, but at least one: with split requests, of the part
    that is late."""
    candidate = plan.candidate
    if not candidate.prefill:
        return with_engines(candidate, wish, candidate.engines + _more(candidate.engines))
    prefill, decode = candidate.prefill, candidate.engines - candidate.prefill
    if (plan.lane.ttft_attainment or 0.0) < wish.goals.attainment:
        return with_parts(candidate, wish, prefill + _more(prefill), decode)
    return with_parts(candidate, wish, prefill, decode + _more(decode))


def _more(engines: int) -> int:
    return max(1, engines // 8)


def _try_cluster(
    candidate: Candidate, wish: Wish, scenario: Scenario, split: SplitMode, link: Link, progress: Progress
) -> Plan:
    """Simulate a candidate that splits requests, and return its plan. Raises ValueError if no request is
    interactive."""
    report = cluster_report(candidate, wish, scenario, wish.rate, progress, split=split, link=link)
    return judged(candidate, wish, report.lanes, (report.idlest, report.busiest), asdict(report))


def cluster_report(
    candidate: Candidate,
    wish: Wish,
    scenario: Scenario,
    rate: float,
    progress: Progress,
    *,
    split: SplitMode,
    link: Link,
) -> ClusterReport:
    """Simulate all engines of a candidate that splits requests, behind the gateway's router, at `rate` requests a
    second."""
    seconds = min(scenario.seconds or math.inf, max(LEAST_S, MOST_REQUESTS / rate))
    workload = replace(scenario, seconds=seconds).workload(rate / (wish.traffic.rate or rate))
    setup = Setup(candidate.device, candidate.core)
    trial = Trial(OURS, setup, workload, candidate.engines, split=split, prefill=candidate.prefill, link=link)
    return run_trial(trial, progress)
