"""The results of a simulation as plain data: throughput and latency for each lane and tenant, and figures of the
scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from engine.core.messages.requests import Lane
from engine.core.state.engine_state import Counters, EngineState
from lab.sim.collect import Collector, Group
from lab.traffic.histogram import Histogram, percentile
from lab.traffic.workload import Workload


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean, median, 90th and 99th percentile of durations in seconds. None means that nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        ordered = sorted(values)
        mean = sum(ordered) / len(ordered) if ordered else None
        return cls(mean, *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)))

    @classmethod
    def of_histogram(cls, histogram: Histogram) -> Percentiles:
        return cls(histogram.mean, *map(histogram.percentile, (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Results of a simulation for all requests in a lane, or for one tenant's requests in it; `name` is that lane or
    tenant. `Percentiles` are in seconds."""

    name: str
    requests: int
    finished: int
    refused: dict[str, int]
    """Refused requests by error code."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    tokens_per_s: float
    """Generated tokens per virtual second of the measured time."""
    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    e2e: Percentiles
    ttft_attainment: float | None
    """Fraction of first tokens within the lane's goal. None means that there were no first tokens."""
    itl_attainment: float | None
    """Fraction of gaps between tokens within the lane's goal. None means that there were no gaps."""
    in_goals: int
    """Requests whose TTFT and TPOT were within the lane's goals."""


@dataclass(frozen=True, slots=True)
class Report:
    seconds: float
    """Virtual seconds from the first arrival to the end."""
    measured_seconds: float
    """Virtual seconds that throughput is divided by: with a backlog, those until the trace's last arrival, otherwise
    all."""
    tokens_per_s: float
    """Generated tokens per second of the measured time, over both lanes."""
    lanes: dict[str, GroupReport]
    tenants: dict[str, dict[str, GroupReport]]
    """Lane -> tenant -> results."""
    steps: int
    step_p99: float | None
    longest_step: float
    busy: float
    """Fraction of the virtual time in which the device computed steps."""
    busy_seconds: float
    device_share: dict[str, float]
    """Lane -> fraction of the busy time that the scheduler charged to this lane's chunks and adapter loads."""
    preemptions: int
    recomputed_tokens: int
    recompute_tax: float
    """Recomputed tokens divided by useful tokens, which are uncached prompt tokens and generated tokens."""
    adapter_loads: int
    adapter_evictions: int
    adapter_fetches: int
    adapter_host_evictions: int
    service_gap: dict[str, float]
    """Lane -> widest service gap between two waiting tenants, in the VTC paper's weighted tokens."""
    service_bound: dict[str, float]
    """Lane -> upper bound of `service_gap` by the VTC paper's theorem, in weighted tokens."""
    time_to_yield: Percentiles
    """Seconds from the arrival of an interactive request that only batch work delays, to the step that starts the
    request."""
    proposed_tokens: int
    """Number of tokens proposed by speculative decoding that steps verified."""
    accepted_tokens: int
    """Number of tokens proposed by speculative decoding that became part of answers."""
    tokens_per_decode: float | None
    """Mean tokens that a decode yields, 1 without proposals. None means that there were no decodes."""
    prediction_error: float | None
    """Median of |actual - predicted| / actual over the steps after warm-up. None means that none was predicted."""

    def interactive_p99(self, name: str) -> float | None:
        """Return the 99th percentile, in seconds, of an interactive latency; `name` is ttft, itl, tpot or e2e. None
        means that nothing was measured."""
        lane = self.lanes.get("interactive")
        return getattr(lane, name).p99 if lane else None


def make_report(state: EngineState, collected: Collector, now: float, workload: Workload) -> Report:
    measured = max(workload.horizon if workload.backlog else now, 1e-9)
    counters, steps = state.counters, collected.steps
    by_lane = {lane: [g for g in collected.groups.values() if g.lane is lane] for lane in Lane}
    useful = sum(g.prompt_tokens - g.cached_tokens + g.generated for g in collected.groups.values())
    return Report(
        seconds=now,
        measured_seconds=measured,
        tokens_per_s=sum(g.generated_in_time for g in collected.groups.values()) / measured,
        lanes={_name(lane): summarize(_name(lane), groups, measured) for lane, groups in by_lane.items() if groups},
        tenants={
            _name(lane): {g.tenant: summarize(g.tenant, [g], measured) for g in sorted(groups, key=lambda g: g.tenant)}
            for lane, groups in by_lane.items()
            if groups
        },
        steps=steps.count,
        step_p99=steps.durations.percentile(0.99),
        longest_step=steps.longest,
        busy=steps.busy / max(now, 1e-9),
        busy_seconds=steps.busy,
        device_share={_name(lane): taken / max(steps.busy, 1e-9) for lane, taken in state.ledger.busy.items()},
        preemptions=counters.preemptions,
        recomputed_tokens=counters.recomputed_tokens,
        recompute_tax=counters.recomputed_tokens / max(1, useful),
        adapter_loads=counters.adapters.loads,
        adapter_evictions=counters.adapters.evictions,
        adapter_fetches=counters.adapters.fetches,
        adapter_host_evictions=counters.adapters.host_evictions,
        service_gap={_name(lane): gaps.widest for lane, gaps in collected.gaps.items()},
        service_bound={_name(lane): gaps.bound(steps.peak_tokens[lane]) for lane, gaps in collected.gaps.items()},
        time_to_yield=Percentiles.of_histogram(collected.time_to_yield),
        proposed_tokens=counters.proposed_tokens,
        accepted_tokens=counters.accepted_tokens,
        tokens_per_decode=_tokens_per_decode(counters),
        prediction_error=percentile(sorted(steps.errors), 0.5),
    )


def _tokens_per_decode(counters: Counters) -> float | None:
    decodes = counters.generated_tokens - counters.accepted_tokens
    return counters.generated_tokens / decodes if decodes else None


def _name(lane: Lane) -> str:
    return lane.name.lower()


def summarize(name: str, groups: list[Group], measured: float) -> GroupReport:
    """Merge the measurements of groups, each a tenant in a lane, into one report `name`. `measured` is the seconds by
    which throughput is divided."""
    itl = Histogram.merged(group.itl for group in groups)
    ttft = list(chain.from_iterable(group.ttft for group in groups))
    return GroupReport(
        name=name,
        requests=sum(group.submitted for group in groups),
        finished=sum(group.finished for group in groups),
        refused=dict(sum((group.refused for group in groups), Counter())),
        prompt_tokens=sum(group.prompt_tokens for group in groups),
        cached_tokens=sum(group.cached_tokens for group in groups),
        generated_tokens=sum(group.generated for group in groups),
        tokens_per_s=sum(group.generated_in_time for group in groups) / measured,
        ttft=Percentiles.of(ttft),
        itl=Percentiles.of_histogram(itl),
        tpot=Percentiles.of(chain.from_iterable(group.tpot for group in groups)),
        e2e=Percentiles.of(chain.from_iterable(group.e2e for group in groups)),
        ttft_attainment=_share_in_time(len(ttft), sum(group.late_first for group in groups)),
        itl_attainment=_share_in_time(itl.count, sum(group.late_gaps for group in groups)),
        in_goals=sum(group.in_goals for group in groups),
    )


def _share_in_time(count: int, late: int) -> float | None:
    return 1 - late / count if count else None
