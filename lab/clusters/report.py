"""The results of simulated clusters as plain data, and as a table with a column for each router."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from engine.core.messages.requests import Lane
from lab.sim.cluster import ClusterResult, FirstToken
from lab.sim.report import GroupReport, summarize
from lab.sim.tables import MISSING, duration, side_by_side
from lab.traffic.histogram import percentile
from lab.traffic.workload import Workload

WINDOW_S = 5.0
"""Length of the windows in which the p99 of the TTFT is compared with the one before a replica died."""
RECOVERED = 1.5
"""A window whose p99 is at most this multiple of the p99 before the replica's death counts as recovered."""


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Results of one simulated cluster. Bytes are those of adapters, per request; durations are in seconds. `busiest`
    and `idlest` are the shares of the time for which the most and the least busy device computed."""

    replicas: int
    tokens_per_s: float
    lanes: dict[str, GroupReport]
    bytes_copied: float
    """Bytes copied from host memory to a device, per request."""
    bytes_read: float
    """Bytes read from disk, per request."""
    busiest: float
    idlest: float
    """Share of the time for which the device of the busiest and of the least busy replica computed."""
    moved: int
    """Requests that were moved because their replica died."""
    lost: int
    """Requests that neither finished nor were refused, except batch requests that the end of the trace cut off."""
    recovery_s: float | None
    """Time from a replica's death until the p99 of the TTFT had recovered. None means that no replica died."""
    reasons: dict[str, int]
    """Decisions by reason, of our router."""
    split: int
    """Requests whose prompt one replica computed, and whose answer another one continued."""
    kv_bytes: float
    """Bytes of KV that were sent for each split request."""

    def interactive_p99(self, name: str) -> float | None:
        """Return the 99th percentile, in seconds, of an interactive latency; `name` is ttft, itl, tpot or e2e. None
        means that nothing was measured."""
        lane = self.lanes.get("interactive")
        return getattr(lane, name).p99 if lane else None


def make_cluster_report(
    result: ClusterResult, workload: Workload, replicas: int, reasons: Mapping[str, int], died_at: float | None
) -> ClusterReport:
    measured = max(workload.horizon if workload.backlog else result.seconds, 1e-9)
    groups = list(result.collector.groups.values())
    by_lane = {lane: [group for group in groups if group.lane is lane] for lane in Lane}
    requests = max(1, sum(group.submitted for group in groups))
    unfinished = [
        track for track in result.collector.unfinished.values()
        if track.group.lane is Lane.INTERACTIVE or workload.backlog is None
    ]  # fmt: skip
    return ClusterReport(
        replicas=replicas,
        tokens_per_s=sum(group.generated_in_time for group in groups) / measured,
        lanes={
            lane.name.lower(): summarize(lane.name.lower(), of_lane, measured)
            for lane, of_lane in by_lane.items()
            if of_lane
        },
        bytes_copied=result.bytes_copied / requests,
        bytes_read=result.bytes_read / requests,
        busiest=max(result.busy) / max(result.seconds, 1e-9),
        idlest=min(result.busy) / max(result.seconds, 1e-9),
        moved=result.moved,
        lost=len(unfinished),
        recovery_s=None if died_at is None else recovery_seconds(result.first_tokens, died_at),
        reasons=dict(reasons),
        split=result.handed_over,
        kv_bytes=result.kv_bytes / max(1, result.handed_over),
    )


def recovery_seconds(first_tokens: Sequence[FirstToken], died_at: float) -> float:
    """Return the seconds from a replica's death at `died_at` to the end of the last window of `WINDOW_S` whose
    interactive p99 TTFT was above `RECOVERED` times that before, or 0."""
    interactive = sorted((t.arrival, t.ttft) for t in first_tokens if t.lane is Lane.INTERACTIVE)
    before = percentile(sorted(ttft for arrival, ttft in interactive if arrival < died_at), 0.99)
    if before is None:
        return 0.0
    recovered, start = 0.0, died_at
    last = interactive[-1][0]
    while start <= last:
        first, end = (bisect_left(interactive, (when,)) for when in (start, start + WINDOW_S))
        p99 = percentile(sorted(ttft for _, ttft in interactive[first:end]), 0.99)
        if p99 is not None and p99 > RECOVERED * before:
            recovered = start + WINDOW_S - died_at
        start += WINDOW_S
    return recovered


Cell = Callable[[ClusterReport], str]


def _in_lane(lane: str, cell: Callable[[GroupReport], str]) -> Cell:
    return lambda report: cell(report.lanes[lane]) if lane in report.lanes else MISSING


def _cached(group: GroupReport) -> str:
    return f"{group.cached_tokens / group.prompt_tokens:.1%}" if group.cached_tokens else MISSING


ROWS: Sequence[tuple[str, Cell]] = (
    ("replicas", lambda report: f"{report.replicas}"),
    ("tokens/s", lambda report: f"{report.tokens_per_s:,.0f}"),
    ("interactive tokens/s", _in_lane("interactive", lambda group: f"{group.tokens_per_s:,.0f}")),
    ("batch tokens/s", _in_lane("batch", lambda group: f"{group.tokens_per_s:,.0f}")),
    ("interactive TTFT p50", _in_lane("interactive", lambda group: duration(group.ttft.p50))),
    ("interactive TTFT p99", _in_lane("interactive", lambda group: duration(group.ttft.p99))),
    ("interactive ITL p99", _in_lane("interactive", lambda group: duration(group.itl.p99))),
    ("interactive E2E mean", _in_lane("interactive", lambda group: duration(group.e2e.mean))),
    ("requests within goals", _in_lane("interactive", lambda group: f"{group.in_goals / group.requests:.1%}")),
    ("requests split", lambda report: f"{report.split:,}" if report.split else MISSING),
    ("KV MB sent / split request", lambda report: f"{report.kv_bytes / 1e6:,.0f}" if report.split else MISSING),
    ("prompt tokens cached", _in_lane("interactive", _cached)),
    ("adapter MB copied / request", lambda report: f"{report.bytes_copied / 1e6:,.1f}"),
    ("adapter MB read from disk / request", lambda report: f"{report.bytes_read / 1e6:,.1f}"),
    ("busiest and least busy device", lambda report: f"{report.busiest:.0%} {report.idlest:.0%}"),
    ("requests moved", lambda report: f"{report.moved:,}" if report.moved else MISSING),
    ("requests lost", lambda report: f"{report.lost:,}"),
    ("recovery", lambda report: duration(report.recovery_s)),
)


def cluster_table(title: str, reports: Mapping[str, ClusterReport]) -> Table:
    """Return a table with a column for each report, by the name of its router."""
    return side_by_side(title, reports, ROWS)
