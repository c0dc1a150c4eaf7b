"""`loralane analyze`: what recorded traffic looks like, and the settings that follow from it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.progress import track
from rich.table import Table

from gateway.cli.options import DEMO_KEY, LOCAL_URL, AdminKey, ServerUrl
from gateway.terminal.console import Console
from gateway.terminal.output import print_wide
from lab.commands.outputs import check_outputs, failures
from lab.commands.simulate import make_setup
from lab.commands.simulate_cluster import shown_progress
from lab.commands.usage_traffic import DAY_SECONDS, AdapterUse, UsageTraffic, read_usage
from lab.commands.usage_traffic import advise as advise_from_usage
from lab.devices.device import device_names
from lab.plans.advice import Advice, advise
from lab.plans.tuning import LOAD, Tuned, trial_names
from lab.plans.tuning import tune as tune_for
from lab.plot import draw_traffic
from lab.sim.run import Setup
from lab.sim.tables import MISSING, duration, share, side_by_side
from lab.traffic.analysis import Analysis, Spread
from lab.traffic.analysis import analyze as analysis_of
from lab.traffic.traces import FORMATS, read_trace

console = Console()
LIVE = "usage"
"""Name under which `Findings` holds the usage that a running gateway has counted."""
MOST_TENANTS = 3
"""Maximum number of tenants that the row of the busiest tenants names."""
Row = tuple[str, Callable[[Analysis], str]]


def analyze(
    files: Annotated[list[Path] | None, typer.Argument(help=f"Traces: {FORMATS}.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Read a running gateway's usage, in place of traces.")] = False,
    since: Annotated[str, typer.Option("--from", metavar="DAY", help="First day of --live; default: the 1st.")] = "",
    until: Annotated[str, typer.Option("--to", metavar="DAY", help="Last day of --live, UTC; default: today.")] = "",
    device: Annotated[
        str, typer.Option(help=f"Device to advise for: {', '.join(device_names())} or a JSON file.")
    ] = "h100-8b",
    config: Annotated[Path | None, typer.Option(help="YAML of `serve`, whose sizes replace the device's.")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Simulate the traces, to choose a token budget, too.")] = False,
    settings: Annotated[Path | None, typer.Option(help="File for the settings, as YAML; for one trace.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a plot of lengths and prefix caches.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures, as JSON.")] = None,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Print what recorded traffic looks like: arrivals, lengths, shared prefixes, adapters, lanes and tenants; and the
    settings that follow for a device.

    - `loralane analyze gateway.log` reads the requests in what a gateway has written to standard output
    - `loralane analyze azure.csv mooncake.jsonl --plot traffic.png`
    - `loralane analyze gateway.log --tune --device my-machine.json --settings advised.yaml`
    - `loralane analyze --live --from 2026-11-01` reads what a running gateway has counted, a day at a time
    """
    with failures():
        _check_source(files or [], live, settings, {"--tune": tune, "--plot": plot is not None})
        check_outputs({"--settings": settings, "--json": json_file}, plot)
        setup = make_setup(device, config, os.environ)
        findings = _of_usage(read_usage(url, key, since, until), setup) if live else _of_traces(files or [], setup)
        tuned = _tuned(files or [], findings, setup) if tune else {}
        if plot is not None:
            draw_traffic(findings.traces, plot)
    print_wide(findings.table)
    for name, advice in findings.advice.items():
        print_wide(_advice_table(f"Settings for {name} on {setup.device.name}", advice))
        if name in tuned:
            print_wide(_tuned_table(tuned[name]))
        for note in advice.notes:
            console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    if settings is not None:
        settings.write_text(yaml.safe_dump(_nested(next(iter(findings.advice.values()))), sort_keys=False))
    if json_file is not None:
        json_file.write_text(json.dumps(findings.document(), indent=2) + "\n")


@dataclass(slots=True)
class Findings:
    """Results of an analysis: the table to print and, by the trace's name (`LIVE` for usage), the figures of the
    traffic and the advised settings."""

    table: Table
    figures: dict[str, dict[str, Any]]
    advice: dict[str, Advice]
    traces: dict[str, Analysis]
    """Analysis of each trace, by its name. Empty if usage was read instead of traces."""

    def document(self) -> dict[str, Any]:
        return {name: {"traffic": self.figures[name], "advice": asdict(advice)} for name, advice in self.advice.items()}


def _of_traces(files: list[Path], setup: Setup) -> Findings:
    reading = track(files, "Reading", console=console, transient=True)
    analyses = {_label(file): analysis_of(read_trace(file)) for file in reading}
    advice = {name: advise(analysis, setup.device, setup.core) for name, analysis in analyses.items()}
    figures = {name: asdict(analysis) for name, analysis in analyses.items()}
    return Findings(side_by_side("Traffic", analyses, ROWS), figures, advice, analyses)


def _of_usage(usage: UsageTraffic, setup: Setup) -> Findings:
    table = side_by_side("Usage", {LIVE: usage}, USAGE_ROWS)
    return Findings(table, {LIVE: asdict(usage)}, {LIVE: advise_from_usage(usage, setup)}, {})


def _tuned(files: list[Path], findings: Findings, setup: Setup) -> dict[str, Tuned]:
    """Search by simulation for the best token budget for each trace. Return the results by trace name, and add each
    budget that is better than the configured one to the trace's advice in `findings`."""
    tuned, jobs, advice = {}, os.cpu_count() or 1, findings.advice
    for file in files:
        name = _label(file)
        with shown_progress(trial_names(setup)) as advance:
            tuned[name] = tune_for(setup, findings.traces[name], read_trace(file), advice[name], jobs, advance)
        if (setting := tuned[name].setting) is not None:
            advice[name] = replace(advice[name], settings=[*advice[name].settings, setting])
    return tuned


def _tuned_table(tuned: Tuned) -> Table:
    table = Table(title=f"Simulated, at {LOAD:.0%} of what the device serves")
    for column in ("", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "first tokens, gaps in time"):
        table.add_column(column, justify="right" if column else "left")
    for name, report in (("token_budget as it is", tuned.before), ("the best token_budget", tuned.after)):
        lane = report.lanes["interactive"]
        times = (duration(value) for value in (lane.ttft.p50, lane.ttft.p99, lane.itl.p50, lane.itl.p99))
        table.add_row(name, *times, f"{share(lane.ttft_attainment)}, {share(lane.itl_attainment)}")
    return table


def _check_source(files: list[Path], live: bool, settings: Path | None, needs_traces: Mapping[str, bool]) -> None:
    """Raise ValueError if there is nothing to analyse or both traces and usage, if options of traces are given for
    usage, if two traces would have the same name, or if settings are asked for of several traces."""
    if bool(files) == live:
        raise ValueError("name traces to read, or give --live to read a running gateway's usage")
    for option, given in needs_traces.items():
        if live and given:
            raise ValueError(f"{option} needs lengths of single requests: name a request log instead of --live")
    if settings is not None and len(files) > 1:
        raise ValueError("--settings is for one trace: name one file")
    if len({_label(file) for file in files}) < len(files):
        raise ValueError("two traces have the same name, without folder and suffix")


def _label(file: Path) -> str:
    return file.stem


def _nested(advice: Advice) -> dict[str, Any]:
    """Return the advised settings, which have dotted names, as the nested sections of a configuration file."""
    sections: dict[str, Any] = {}
    for setting in advice.settings:
        *path, last = setting.name.split(".")
        section = sections
        for name in path:
            section = section.setdefault(name, {})
        section[last] = setting.value
    return sections


def _advice_table(title: str, advice: Advice) -> Table:
    table = Table(title=title)
    for column in ("setting", "value", "because"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for setting in advice.settings:
        table.add_row(
            setting.name, f"{setting.value:,g}" if setting.value < 1 else f"{setting.value:,}", setting.reason
        )
    return table


def _spread(name: str, of: Callable[[Analysis], Spread]) -> list[Row]:
    return [
        (f"{name}, mean", lambda analysis: f"{of(analysis).mean:,.0f}"),
        (f"{name}, p50", lambda analysis: f"{of(analysis).p50:,}"),
        (f"{name}, p90", lambda analysis: f"{of(analysis).p90:,}"),
        (f"{name}, p99", lambda analysis: f"{of(analysis).p99:,}"),
        (f"{name}, most", lambda analysis: f"{of(analysis).most:,}"),
    ]


def _number(value: float | None, unit: str = "") -> str:
    return MISSING if value is None else f"{value:,.3g}{unit}"


def _shares(counts: Mapping[str, int], most: int) -> str:
    total = sum(counts.values())
    return ", ".join(f"{name} {count / total:.0%}" for name, count in list(counts.items())[:most])


def _of_use(cell: Callable[[AdapterUse], str]) -> Callable[[UsageTraffic], str]:
    return lambda usage: cell(usage.adapters) if usage.adapters else MISSING


def _of_adapters(cell: Callable[[Any], str]) -> Callable[[Analysis], str]:
    return lambda analysis: cell(analysis.popularity) if analysis.popularity else MISSING


ROWS: list[Row] = [
    ("requests", lambda analysis: f"{analysis.requests:,}"),
    ("seconds", lambda analysis: f"{analysis.seconds:,.0f}"),
    ("requests/s", lambda analysis: _number(analysis.rate)),
    ("requests/s of the busiest minute", lambda analysis: _number(analysis.busiest)),
    ("variation of gaps (1: Poisson)", lambda analysis: _number(analysis.cv)),
    *_spread("prompt tokens", lambda analysis: analysis.prompt),
    *_spread("output tokens", lambda analysis: analysis.output),
    (
        "prompt tokens computed before",
        lambda analysis: f"{analysis.reuse.share:.1%}" if analysis.reuse.share else MISSING,
    ),
    ("lanes", lambda analysis: _shares(analysis.lanes, 2)),
    ("tenants", lambda analysis: f"{len(analysis.tenants):,}"),
    (
        "busiest tenants",
        lambda analysis: _shares(analysis.tenants, MOST_TENANTS) if len(analysis.tenants) > 1 else MISSING,
    ),
    ("requests with an adapter", _of_adapters(lambda popularity: f"{popularity.share:.0%}")),
    ("adapters", _of_adapters(lambda popularity: f"{popularity.adapters:,}")),
    ("adapters within a minute, 10 minutes", _of_adapters(lambda p: ", ".join(f"{n:,}" for n in p.working.values()))),
    ("share of the first, of a tenth", _of_adapters(lambda p: f"{p.first:.0%}, {p.tenth:.0%}")),
    ("Zipf exponent", _of_adapters(lambda popularity: f"{popularity.zipf:.2f}")),
]
"""Rows of the table: label, and function that makes a trace's cell."""
USAGE_ROWS: list[tuple[str, Callable[[UsageTraffic], str]]] = [
    ("requests", lambda usage: f"{usage.requests:,}"),
    ("days", lambda usage: f"{usage.seconds / DAY_SECONDS:,.2f}"),
    ("requests/s", lambda usage: _number(usage.rate)),
    ("requests/s of the busiest day", lambda usage: _number(usage.busiest)),
    ("prompt tokens, mean", lambda usage: f"{usage.prompt:,.0f}"),
    ("output tokens, mean", lambda usage: f"{usage.output:,.0f}"),
    ("prompt tokens computed before", lambda usage: f"{usage.cached:.1%}"),
    ("lanes", lambda usage: _shares(usage.lanes, 2)),
    ("tenants", lambda usage: f"{len(usage.tenants):,}"),
    ("busiest tenants", lambda usage: _shares(usage.tenants, MOST_TENANTS) if len(usage.tenants) > 1 else MISSING),
    ("requests with an adapter", _of_use(lambda use: f"{use.share:.0%}")),
    ("adapters", _of_use(lambda use: f"{use.adapters:,}")),
    ("adapters of a day, at most", _of_use(lambda use: f"{use.busiest_day:,}")),
    ("share of the first", _of_use(lambda use: f"{use.first:.0%}")),
    ("Zipf exponent", _of_use(lambda use: f"{use.zipf:.2f}")),
]
"""Rows of the table for usage: label, and function that makes the cell."""
