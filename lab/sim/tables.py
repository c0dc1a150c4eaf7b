"""Formats reports as tables for a terminal, with separate throughput and latency tables and a column for each run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from rich.table import Table

from lab.sim.goals import Judged
from lab.sim.report import GroupReport, Percentiles, Report

Cell = Callable[[Report], str]
MISSING = "-"
R = TypeVar("R")
LATENCIES = ("ttft", "itl", "tpot", "e2e")


def comparison_tables(reports: Mapping[str, Report]) -> list[Table]:
    lanes = list(dict.fromkeys(lane for report in reports.values() for lane in report.lanes))
    tables = [side_by_side("Throughput", reports, _throughput_rows(lanes))]
    tables += [side_by_side(f"Latency, {lane}", reports, _latency_rows(lane)) for lane in lanes]
    return [*tables, side_by_side("Scheduling", reports, _scheduling_rows(lanes))]


def tenant_table(name: str, report: Report) -> Table:
    table = Table(title=f"Tenants, {name}")
    for column in ("lane", "tenant", "requests", "tokens/s", "TTFT p50", "TTFT p99", "ITL p99", "E2E p99"):
        table.add_column(column, justify="left" if column in ("lane", "tenant") else "right")
    for lane, tenants in report.tenants.items():
        for tenant in tenants.values():
            times = (tenant.ttft.p50, tenant.ttft.p99, tenant.itl.p99, tenant.e2e.p99)
            sizes = (f"{tenant.requests:,}", f"{tenant.tokens_per_s:,.1f}")
            table.add_row(lane, tenant.name, *sizes, *map(duration, times))
    return table


def goals_table(judged: Sequence[Judged]) -> Table:
    """Return a terminal table of the scheduler's goals, with a row for each goal and a column for each run. The column
    "met" refers to the first run; the other runs are shown for comparison. `judged` must not be empty."""
    names = list(judged[0].values)
    table = Table(title="Goals")
    for column in ("figure", "goal", *names, "met"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for goal, values in ((item.goal, item.values) for item in judged):
        ours = values[names[0]]
        met = MISSING if ours is None else "[green]yes[/green]" if goal.is_met(ours) else "[red]no[/red]"
        sign = "<=" if goal.at_most else ">="
        table.add_row(goal.figure, f"{sign} {goal.limit:.4g}", *(_figure(value) for value in values.values()), met)
    return table


def duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    if seconds < 1:
        return f"{seconds * 1000:,.1f} ms"
    return f"{seconds:,.2f} s"


def side_by_side(title: str, reports: Mapping[str, R], rows: Sequence[tuple[str, Callable[[R], str]]]) -> Table:
    """Return a terminal table with a column for each report, by name, and a row for each label and function of a report
    that makes its cell. Rows whose cells are all MISSING are left out."""
    table = Table(title=title)
    table.add_column("")
    for name in reports:
        table.add_column(name, justify="right")
    for label, cell in rows:
        cells = [cell(report) for report in reports.values()]
        if any(text != MISSING for text in cells):
            table.add_row(label, *cells)
    return table


def _throughput_rows(lanes: Sequence[str]) -> list[tuple[str, Cell]]:
    rows: list[tuple[str, Cell]] = [
        ("virtual time", lambda report: f"{report.seconds:,.0f} s"),
        ("tokens/s", lambda report: f"{report.tokens_per_s:,.0f}"),
    ]
    for lane in lanes:
        rows += [
            (f"{lane} tokens/s", _of(lane, lambda group: f"{group.tokens_per_s:,.0f}")),
            (f"{lane} requests", _of(lane, lambda group: f"{group.requests:,}")),
            (f"{lane} refused", _of(lane, lambda group: f"{sum(group.refused.values()):,}")),
            (f"{lane} prompt tokens cached", _of(lane, _cached)),
        ]
    return [*rows, ("device busy", lambda report: f"{report.busy:.1%}")]


def _latency_rows(lane: str) -> list[tuple[str, Cell]]:
    rows = [
        (f"{name.upper()} {share}", _of(lane, partial(_percentile, name, share)))
        for name in LATENCIES
        for share in Percentiles.__slots__
    ]
    return [
        *rows,
        ("TTFT within goal", _of(lane, lambda group: share(group.ttft_attainment))),
        ("ITL within goal", _of(lane, lambda group: share(group.itl_attainment))),
    ]


def _scheduling_rows(lanes: Sequence[str]) -> list[tuple[str, Cell]]:
    rows: list[tuple[str, Cell]] = [
        ("steps", lambda report: f"{report.steps:,}"),
        ("step p99", lambda report: duration(report.step_p99)),
        ("longest step", lambda report: duration(report.longest_step)),
        ("preemptions", lambda report: f"{report.preemptions:,}"),
        ("recomputed / useful tokens", lambda report: f"{report.recompute_tax:.2%}"),
        ("time to yield p99", lambda report: duration(report.time_to_yield.p99)),
        ("tokens a decode", _tokens_per_decode),
        ("proposed tokens accepted", _accepted),
        ("prediction error, median", lambda report: share(report.prediction_error)),
        ("adapter loads", lambda report: f"{report.adapter_loads:,}"),
        ("adapter evictions", lambda report: f"{report.adapter_evictions:,}"),
        ("adapter fetches", lambda report: f"{report.adapter_fetches:,}"),
    ]
    return rows + [(f"{lane} service gap / bound", partial(_gap, lane)) for lane in lanes]


def _of(lane: str, cell: Callable[[GroupReport], str]) -> Cell:
    return lambda report: cell(report.lanes[lane]) if lane in report.lanes else MISSING


def _percentile(name: str, share: str, group: GroupReport) -> str:
    return duration(getattr(getattr(group, name), share))


def _cached(group: GroupReport) -> str:
    return f"{group.cached_tokens / group.prompt_tokens:.1%}" if group.cached_tokens else MISSING


def _tokens_per_decode(report: Report) -> str:
    return f"{report.tokens_per_decode:.2f}" if report.tokens_per_decode and report.proposed_tokens else MISSING


def _accepted(report: Report) -> str:
    return f"{report.accepted_tokens / report.proposed_tokens:.1%}" if report.proposed_tokens else MISSING


def share(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2%}"


def _gap(lane: str, report: Report) -> str:
    gap, bound = report.service_gap[lane], report.service_bound[lane]
    return f"{gap:,.0f} / {bound:,.0f}" if gap else MISSING


def _figure(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4g}"
