"""Renders a run's results for the terminal: one table of throughput, one of latency."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from gateway.bench.measure import BenchPercentiles, LaneResults
from gateway.bench.speculation import Speculation

LATE_SECONDS = 0.025
"""Lateness (p99, in seconds) above which `remarks` mentions it. Sending a hundred requests at once takes 10 ms."""


def throughput_table(reports: Sequence[LaneResults]) -> Table:
    table = Table(
        title="Throughput", caption="tokens/s: output; cached: share of prompt tokens; goodput: requests/s in SLO"
    )
    columns = ("lane", "sent", "failed", "requests/s", "tokens/s", "cached", "goodput/s", "in SLO")
    _columns(table, columns)
    for lane in reports:
        cached = f"{lane.cached_tokens / lane.prompt_tokens:.0%}" if lane.prompt_tokens else "-"
        goodput = lane.goodput
        good = (f"{goodput.requests_per_second:.2f}", f"{goodput.attainment:.1%}") if goodput else ("-", "-")
        counts = (str(lane.requests), str(lane.requests - lane.succeeded))
        rates = (f"{lane.requests_per_second:.2f}", f"{lane.output_tokens_per_second:.1f}")
        table.add_row(lane.lane, *counts, *rates, cached, *good)
    return table


def latency_table(reports: Sequence[LaneResults]) -> Table:
    table = Table(title="Latency (ms)")
    _columns(table, ("lane", "", "p50", "p90", "p99", "samples"))
    for lane in reports:
        rows = (("TTFT", lane.ttft), ("ITL", lane.itl), ("TPOT", lane.tpot), ("E2E", lane.e2e))
        for index, (name, values) in enumerate(rows):
            table.add_row("" if index else lane.lane, name, *_cells(values), end_section=index == len(rows) - 1)
    return table


def speculation_line(speculation: Speculation) -> str:
    proposed, accepted = speculation.proposed_tokens, speculation.accepted_tokens
    share = f"{accepted:,} of {proposed:,} proposed tokens accepted ({accepted / proposed:.0%})"
    return f"Speculation (all answers of the server): {speculation.tokens_per_step:.2f} tokens a step; {share}"


def remarks(reports: Sequence[LaneResults]) -> list[str]:
    """Return warnings about what may distort the tables: failures, answers cut short, several tokens a chunk, late
    sending."""
    found = []
    for lane in reports:
        found += [f"{lane.lane}: {count} failed: {kind}" for kind, count in lane.errors.items()]
        if lane.output_tokens < lane.asked_tokens:
            found.append(f"{lane.lane}: {lane.output_tokens} tokens came of the {lane.asked_tokens} asked for")
        if lane.tokens_per_chunk > 1.05:
            found.append(f"{lane.lane}: {lane.tokens_per_chunk:.1f} tokens a chunk; compare TPOT rather than ITL")
        if lane.late_p99 > LATE_SECONDS:
            found.append(f"{lane.lane}: sent up to {1000 * lane.late_p99:.0f} ms late (p99): the client was too busy")
    return found


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def _cells(values: BenchPercentiles | None) -> tuple[str, ...]:
    if values is None:
        return ("-", "-", "-", "0")
    return (*(milliseconds(value) for value in (values.p50, values.p90, values.p99)), str(values.samples))


def _columns(table: Table, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index else "left")
