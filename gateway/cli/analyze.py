"""`loralane analyze`: what recorded traffic looks like, and the settings that follow from it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.sim.advice import Advice, advise
from engine.sim.analysis import Analysis, Spread
from engine.sim.analysis import analyze as analysis_of
from engine.sim.device import device_names
from engine.sim.plot_traffic import draw_traffic
from engine.sim.run import Setup
from engine.sim.tables import MISSING, duration, share, side_by_side
from engine.sim.trace_formats import FORMATS
from engine.sim.traces import read_trace
from engine.sim.tuning import LOAD, Tuned, trial_names
from engine.sim.tuning import tune as tune_for
from gateway.cli.outputs import check_outputs, failures
from gateway.cli.simulate import make_setup
from gateway.cli.simulate_cluster import shown_progress
from gateway.terminal.output import print_wide

console = Console()
MOST_TENANTS = 3
"""Tenants that are named."""
Row = tuple[str, Callable[[Analysis], str]]


def analyze(
    files: Annotated[list[Path], typer.Argument(help=f"Traces: {FORMATS}.")],
    device: Annotated[
        str, typer.Option(help=f"Device to advise for: {', '.join(device_names())} or a JSON file.")
    ] = "h100-8b",
    config: Annotated[Path | None, typer.Option(help="YAML of `serve`, whose sizes replace the device's.")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Simulate the traces, to choose a token budget, too.")] = False,
    settings: Annotated[Path | None, typer.Option(help="File for the settings, as YAML; for one trace.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a plot of lengths and prefix caches.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures, as JSON.")] = None,
) -> None:
    """Print what recorded traffic looks like: arrivals, lengths, shared prefixes, adapters, lanes and tenants; and the
    settings that follow for a device.

    - `loralane analyze gateway.log` reads the requests in what a gateway has written to standard output
    - `loralane analyze azure.csv mooncake.jsonl --plot traffic.png`
    - `loralane analyze gateway.log --tune --device my-machine.json --settings advised.yaml`
    """
    with failures():
        _check_names(files, settings)
        check_outputs({"--settings": settings, "--json": json_file}, plot)
        setup = make_setup(device, config, os.environ)
        found = {
            _label(file): analysis_of(read_trace(file))
            for file in track(files, "Reading", console=console, transient=True)
        }
        advice = {name: advise(one, setup.device, setup.core) for name, one in found.items()}
        tuned = _tuned(files, found, advice, setup) if tune else {}
        if plot is not None:
            draw_traffic(found, plot)
    print_wide(side_by_side("Traffic", found, ROWS))
    for name, one in advice.items():
        print_wide(_advice_table(f"Settings for {name} on {setup.device.name}", one))
        if name in tuned:
            print_wide(_tuned_table(tuned[name]))
        for note in one.notes:
            console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    if settings is not None:
        settings.write_text(yaml.safe_dump(_nested(next(iter(advice.values()))), sort_keys=False))
    if json_file is not None:
        document = {name: {"traffic": asdict(found[name]), "advice": asdict(advice[name])} for name in found}
        json_file.write_text(json.dumps(document, indent=2) + "\n")


def _tuned(
    files: list[Path], found: Mapping[str, Analysis], advice: dict[str, Advice], setup: Setup
) -> dict[str, Tuned]:
    """Tune the settings for each trace, and add what was found to its advice. Mutates `advice`."""
    tuned, jobs = {}, os.cpu_count() or 1
    for file in files:
        name = _label(file)
        with shown_progress(trial_names(setup)) as advance:
            tuned[name] = tune_for(setup, found[name], read_trace(file), advice[name], jobs, advance)
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


def _check_names(files: list[Path], settings: Path | None) -> None:
    """Raise ValueError if two traces would have the same name, or if settings are asked for of several traces."""
    if settings is not None and len(files) > 1:
        raise ValueError("--settings is for one trace: name one file")
    if len({_label(file) for file in files}) < len(files):
        raise ValueError("two traces have the same name, without folder and suffix")


def _label(file: Path) -> str:
    return file.stem


def _nested(advice: Advice) -> dict[str, Any]:
    """Return the settings as sections of a configuration file."""
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
        (f"{name}, mean", lambda found: f"{of(found).mean:,.0f}"),
        (f"{name}, p50", lambda found: f"{of(found).p50:,}"),
        (f"{name}, p90", lambda found: f"{of(found).p90:,}"),
        (f"{name}, p99", lambda found: f"{of(found).p99:,}"),
        (f"{name}, most", lambda found: f"{of(found).most:,}"),
    ]


def _number(value: float | None, unit: str = "") -> str:
    return MISSING if value is None else f"{value:,.3g}{unit}"


def _shares(counts: Mapping[str, int], most: int) -> str:
    total = sum(counts.values())
    return ", ".join(f"{name} {count / total:.0%}" for name, count in list(counts.items())[:most])


def _of_adapters(cell: Callable[[Any], str]) -> Callable[[Analysis], str]:
    return lambda found: cell(found.popularity) if found.popularity else MISSING


ROWS: list[Row] = [
    ("requests", lambda found: f"{found.requests:,}"),
    ("seconds", lambda found: f"{found.seconds:,.0f}"),
    ("requests/s", lambda found: _number(found.rate)),
    ("requests/s of the busiest minute", lambda found: _number(found.busiest)),
    ("variation of gaps (1: Poisson)", lambda found: _number(found.cv)),
    *_spread("prompt tokens", lambda found: found.prompt),
    *_spread("output tokens", lambda found: found.output),
    ("prompt tokens computed before", lambda found: f"{found.reuse.share:.1%}" if found.reuse.share else MISSING),
    ("lanes", lambda found: _shares(found.lanes, 2)),
    ("tenants", lambda found: f"{len(found.tenants):,}"),
    ("busiest tenants", lambda found: _shares(found.tenants, MOST_TENANTS) if len(found.tenants) > 1 else MISSING),
    ("requests with an adapter", _of_adapters(lambda popularity: f"{popularity.share:.0%}")),
    ("adapters", _of_adapters(lambda popularity: f"{popularity.adapters:,}")),
    ("adapters within a minute, 10 minutes", _of_adapters(lambda p: ", ".join(f"{n:,}" for n in p.working.values()))),
    ("share of the first, of a tenth", _of_adapters(lambda p: f"{p.first:.0%}, {p.tenth:.0%}")),
    ("Zipf exponent", _of_adapters(lambda popularity: f"{popularity.zipf:.2f}")),
]
"""Rows of the table: label, and function that makes a trace's cell."""
