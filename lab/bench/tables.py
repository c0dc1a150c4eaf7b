"""Renders results for the terminal: of a run, one table of throughput and one of latency; of a sweep, one in all."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from lab.bench.measure import BenchPercentiles, Cost, LaneResults
from lab.bench.spec import LatencyObjective
from lab.bench.speculation import Speculation
from lab.bench.sweep import Point, Sweep

LATE_SECONDS = 0.025
"""Lateness (p99, in seconds) above which `remarks` mentions it. Sending a hundred requests at once takes 10 ms."""


def throughput_table(reports: Sequence[LaneResults]) -> Table:
    table = Table(
        title="Throughput",
        caption="prefill/s: computed prompt tokens; cached: share of prompt tokens; goodput: requests/s in SLO",
    )
    columns = ("lane", "sent", "failed", "requests/s", "tokens/s", "prefill/s", "cached", "goodput/s", "in SLO")
    _columns(table, columns)
    for lane in reports:
        cached = f"{lane.cached_tokens / lane.prompt_tokens:.0%}" if lane.prompt_tokens else "-"
        counts = (str(lane.requests), str(lane.requests - lane.succeeded))
        table.add_row(lane.lane, *counts, *_rates(lane), cached, *_goodput(lane))
    return table


def _rates(lane: LaneResults) -> tuple[str, ...]:
    tokens = (lane.output_tokens_per_second, lane.prompt_tokens_per_second)
    return (f"{lane.requests_per_second:.2f}", *(f"{rate:.1f}" for rate in tokens))


def _goodput(lane: LaneResults) -> tuple[str, str]:
    goodput = lane.goodput
    return (f"{goodput.requests_per_second:.2f}", f"{goodput.attainment:.1%}") if goodput else ("-", "-")


def latency_table(reports: Sequence[LaneResults]) -> Table:
    table = Table(title="Latency (ms)")
    _columns(table, ("lane", "", "mean", "p50", "p90", "p95", "p99", "samples"))
    for lane in reports:
        rows = (("TTFT", lane.ttft), ("ITL", lane.itl), ("TPOT", lane.tpot), ("E2E", lane.e2e))
        for index, (name, values) in enumerate(rows):
            table.add_row("" if index else lane.lane, name, *_cells(values), end_section=index == len(rows) - 1)
    return table


def sweep_table(sweep: Sweep) -> Table:
    """Return the rates of a sweep, with the latencies of its first lane as `p50 / p99`, in milliseconds."""
    table = Table(
        title="Request rates",
        caption="Latencies: p50 / p99 in ms; prefill/s: computed prompt tokens; cost: of output tokens",
    )
    columns = ("rate", "requests/s", "tokens/s", "prefill/s", "TTFT", "TPOT", "ITL", "E2E", "goodput/s", "in SLO")
    priced = any(point.document.cost for point in sweep.points)
    _columns(table, (*columns, *(["cost of 1M"] if priced else [])))
    for point in sweep.points:
        lane = point.lane
        pairs = (_pair(values) for values in (lane.ttft, lane.tpot, lane.itl, lane.e2e))
        cost = [f"{point.document.cost.per_million_output:.3g}" if point.document.cost else "-"] if priced else []
        style = "bold" if point.rate == sweep.knee else None
        table.add_row(f"{point.rate:.3g}", *_rates(lane), *pairs, *_goodput(lane), *cost, style=style)
    return table


def knee_line(sweep: Sweep) -> str:
    """Return a line that tells the knee of a sweep, or why there is none."""
    goodput = sweep.points[0].lane.goodput
    if goodput is None:
        return "No knee without goals: give --ttft-ms, --tpot-ms or --itl-ms"
    goals = f"{sweep.share:.0%} of requests within {objective_text(goodput.slo)}"
    if sweep.knee is None:
        return f"No rate had {goals}: try lower rates or wider goals"
    above = "" if sweep.knee < sweep.points[-1].rate else "; no higher rate was tried"
    return f"Knee: {sweep.knee:.3g} requests/s, the highest rate with {goals}{above}"


def objective_text(slo: LatencyObjective) -> str:
    limits = (("TTFT", slo.ttft), ("TPOT", slo.tpot), ("ITL", slo.itl))
    return ", ".join(f"{name} {milliseconds(limit)} ms" for name, limit in limits if limit is not None)


def point_line(point: Point) -> str:
    """Return a progress line about a measured rate: the requests served per second, and the share within the goals."""
    goodput = point.lane.goodput
    met = f", {goodput.attainment:.1%} within the goals" if goodput else ""
    return f"{point.rate:.3g} requests/s: {point.lane.requests_per_second:.2f} served{met}"


def cost_line(cost: Cost) -> str:
    tokens = f"{cost.per_million_output:.3g} a million output tokens, {cost.per_million:.3g} a million of all"
    return f"Cost at {cost.price_per_hour:g} an hour: {tokens}"


def _pair(values: BenchPercentiles | None) -> str:
    return f"{milliseconds(values.p50)} / {milliseconds(values.p99)}" if values else "-"


def speculation_line(speculation: Speculation) -> str:
    proposed, accepted = speculation.proposed_tokens, speculation.accepted_tokens
    share = f"{accepted:,} of {proposed:,} proposed tokens accepted ({accepted / proposed:.0%})"
    return f"Speculation (all answers of the server): {speculation.tokens_per_step:.2f} tokens a step; {share}"


def remarks(reports: Sequence[LaneResults]) -> list[str]:
    """Return warnings about what may distort the tables: failures, answers cut short, several tokens a chunk, late
    sending."""
    texts = []
    for lane in reports:
        texts += [f"{lane.lane}: {count} failed: {kind}" for kind, count in lane.errors.items()]
        if lane.output_tokens < lane.asked_tokens:
            texts.append(f"{lane.lane}: {lane.output_tokens} tokens came of the {lane.asked_tokens} asked for")
        if lane.tokens_per_chunk > 1.05:
            texts.append(f"{lane.lane}: {lane.tokens_per_chunk:.1f} tokens a chunk; compare TPOT rather than ITL")
        if lane.late_p99 > LATE_SECONDS:
            texts.append(f"{lane.lane}: sent up to {1000 * lane.late_p99:.0f} ms late (p99): the client was too busy")
    return texts


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def _cells(values: BenchPercentiles | None) -> tuple[str, ...]:
    if values is None:
        return ("-", "-", "-", "-", "-", "0")
    shown = (values.mean, values.p50, values.p90, values.p95, values.p99)
    return (*(milliseconds(value) for value in shown), str(values.samples))


def _columns(table: Table, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index else "left")
