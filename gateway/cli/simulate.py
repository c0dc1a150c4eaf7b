"""`loralane simulate`: runs the scheduler on recorded or random traffic, with a cost model in place of the device."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.config import EngineConfig
from engine.core.config import POLICIES, SCHEDULERS, CoreConfig
from engine.sim.compare import Advance, Run, plan_runs, run_all, run_name, under
from engine.sim.device import device_names, find_device
from engine.sim.goals import Judged, judge
from engine.sim.plot import PlotUnavailable, check_available, draw
from engine.sim.report import Report
from engine.sim.run import Setup, Stalled
from engine.sim.scenario import Scenario
from engine.sim.synthetic import Sizes
from engine.sim.tables import comparison_tables, goals_table, tenant_table
from engine.sim.workload import Backlog
from gateway.config.whole import load_config
from gateway.terminal.output import check_writable, exit_with_error, integer_parser, print_wide

console = Console()
progress_console = Console(stderr=True)

FROM_CONFIG = (
    "max_seqs",
    "token_budget",
    "max_resident_adapters",
    "prefix_caching",
    "share_prefixes",
    "interactive",
    "batch",
    "scheduling",
)
"""Fields that EngineConfig shares with CoreConfig and that a configuration may override; the device's file sets the
others."""


@dataclass(frozen=True, slots=True)
class Modes:
    policies: list[str]
    schedulers: list[str]


def simulate(
    trace: Annotated[
        Path | None, typer.Option(help="Azure CSV, Mooncake JSONL or VTC arena CSV; without it, random arrivals.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The YAML that `serve` takes: sizes, lanes, scheduling.")] = None,
    device: Annotated[str, typer.Option(help=f"{', '.join(device_names())} or a JSON file.")] = "h100-8b",
    policy: Annotated[list[str] | None, typer.Option(help=f"{', '.join(POLICIES)}; repeatable.")] = None,
    scheduler: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SCHEDULERS)}; repeatable.")] = None,
    rate_scale: Annotated[float, typer.Option(help="Arrivals are so many times as fast as in the trace.")] = 1.0,
    duration: Annotated[float | None, typer.Option(help="Only the first so many seconds of the trace.")] = None,
    rate: Annotated[float, typer.Option(help="Random arrivals: requests/s.")] = 1.0,
    cv: Annotated[float, typer.Option(help="Random arrivals: 1 is Poisson, 4 is bursty (Gamma).")] = 1.0,
    prompt: Annotated[str, typer.Option(help="Random arrivals: prompt tokens, LOW-HIGH.")] = "256-1024",
    output: Annotated[str, typer.Option(help="Random arrivals: output tokens, LOW-HIGH.")] = "64-256",
    tenants: Annotated[
        int, typer.Option(parser=integer_parser(), help="Spread the trace over so many tenants; 0: as it is.")
    ] = 0,
    adapters: Annotated[
        int, typer.Option(parser=integer_parser(), help="Adapters the requests are spread over; 0: the base model.")
    ] = 0,
    zipf: Annotated[float, typer.Option(help="Exponent of the adapters' popularity.")] = 1.0,
    batch_share: Annotated[float, typer.Option(help="Share of the trace's requests that are batch work.")] = 0.0,
    batch_backlog: Annotated[
        int, typer.Option(parser=integer_parser(), help="Unfinished batch requests at any time; 0: none.")
    ] = 0,
    batch_prompt: Annotated[str, typer.Option(help="Of the backlog: prompt tokens, LOW-HIGH.")] = "64-256",
    batch_output: Annotated[str, typer.Option(help="Of the backlog: output tokens, LOW-HIGH.")] = "64-160",
    batch_deadline: Annotated[float | None, typer.Option(help="Of the backlog: seconds from arrival.")] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Plan each step while the one before it is computed, as on a GPU.")
    ] = False,
    host_ms: Annotated[float, typer.Option(help="What the host takes to plan and launch a step.", min=0)] = 0.0,
    goals: Annotated[
        bool, typer.Option("--goals", help="Judge by the scheduler's goals; adds what they need.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the throughput-latency curve over --rates here.")] = None,
    rates: Annotated[str, typer.Option(help="Rate scales of --plot.")] = "0.5,1,2,4",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the reports here.")] = None,
    jobs: Annotated[int, typer.Option(parser=integer_parser(0), help="Simulations at a time; 0: one a core.")] = 0,
    seed: Annotated[int, typer.Option(parser=integer_parser(), help="The same seed gives the same report.")] = 0,
) -> None:
    """Replay traffic on the real scheduler, with a cost model in the device's place.

    - `loralane simulate --trace azure.csv`
    - `loralane simulate --trace azure.csv --batch-backlog 512 --goals`
    - `loralane simulate --rate 5 --cv 4 --adapters 2000 --policy lanes --policy fcfs`
    - `loralane simulate --trace azure.csv --policy lanes --policy fcfs --rates 0.5,1,2,4 --plot curve.png`
    """
    with _failures():
        _check_outputs(json_file, plot, goals=goals)
        sizes = Sizes.parse(batch_prompt), Sizes.parse(batch_output)
        backlog = Backlog(batch_backlog, *sizes, batch_deadline) if batch_backlog else None
        ranges = {"prompt": Sizes.parse(prompt), "output": Sizes.parse(output)}
        scenario = Scenario(
            trace, rate, cv, **ranges, seconds=duration, tenants=tenants, adapters=adapters, zipf=zipf,
            batch_share=batch_share, backlog=backlog, seed=seed,
        )  # fmt: skip
        setup = replace(make_setup(device, config, os.environ), overlaps=overlap, host_s=host_ms / 1000)
        modes = Modes(policy or [setup.core.scheduling.policy], scheduler or [setup.core.scheduling.scheduler])
        jobs = jobs or os.cpu_count() or 1
        if plot is not None:
            reports = _run_curve(setup, scenario, modes, [float(x) * rate_scale for x in rates.split(",")], jobs, plot)
        else:
            workload = scenario.workload(rate_scale)
            reports = _run(plan_runs(setup, workload, modes.policies, modes.schedulers, goals=goals), jobs)
    _tell(setup, scenario, reports, json_file, goals=goals)


def _check_outputs(json_file: Path | None, plot: Path | None, *, goals: bool) -> None:
    """Check that outputs can be written before simulating, so that no results get lost.

    Raises:
        ValueError: a file cannot be written, or --goals and --plot are both given.
        PlotUnavailable: the plot cannot be drawn.
    """
    if json_file is not None:
        check_writable(json_file, "--json")
    if plot is None:
        return
    if goals:
        raise ValueError("--goals and --plot exclude each other: goals are judged at one rate")
    check_writable(plot, "--plot")
    check_available(plot)


def make_setup(device: str, config: Path | None, env: Mapping[str, str]) -> Setup:
    """Return a device with the sizes of its file, overridden by what a configuration sets.

    Raises:
        ValueError: the device or the configuration is wrong, or they contradict each other.
    """
    spec = find_device(device)
    core = CoreConfig(**spec.engine)
    if config is None:
        return Setup(spec, core)
    engine = load_config(config, env).engine_config(Path())
    if engine.block_size != core.block_size:
        raise ValueError(f"engine.block_size: {spec.name} was measured with {core.block_size}, not {engine.block_size}")
    return Setup(spec, replace(core, **_chosen(engine.sized(core.max_seqs, core.token_budget))))


def _chosen(engine: EngineConfig) -> dict[str, Any]:
    """Return the fields that the configuration sets, which are those that differ from the defaults. The device's file
    decides the others."""
    default, names = EngineConfig(model=""), (*FROM_CONFIG, "num_pages", "max_model_len")
    return {name: getattr(engine, name) for name in names if getattr(engine, name) != getattr(default, name)}


def _run_curve(
    setup: Setup, scenario: Scenario, modes: Modes, rates: list[float], jobs: int, out: Path
) -> dict[str, Report]:
    """Run every mode at every rate, and draw the curves to `out`."""
    workloads = {rate: scenario.workload(rate) for rate in sorted(rates)}
    setups = {run_name(p, s): under(setup, p, s) for p in modes.policies for s in modes.schedulers}
    runs = [
        Run(f"{name} {rate:g}x", mode, workload)
        for name, mode in setups.items()
        for rate, workload in workloads.items()
    ]
    reports = _run(runs, jobs)
    curves = {name: [(rate, reports[f"{name} {rate:g}x"]) for rate in workloads] for name in setups}
    draw(curves, f"{scenario.title}\n{setup.device.description}", out)
    return reports


def _run(runs: list[Run], jobs: int) -> dict[str, Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=progress_console) as progress:
        tasks = {run.name: progress.add_task(run.name, total=1.0) for run in runs}
        return run_all(runs, jobs, _advance(progress, tasks))


def _advance(progress: Progress, tasks: Mapping[str, TaskID]) -> Advance:
    return lambda name, share: progress.update(tasks[name], completed=share)


def _tell(setup: Setup, scenario: Scenario, reports: dict[str, Report], json_file: Path | None, *, goals: bool) -> None:
    judged = judge(setup, reports) if goals else []
    _show(setup, scenario, reports, judged)
    if json_file is not None:
        with _failures():
            _write_json(json_file, setup, scenario, reports, judged)


def _show(setup: Setup, scenario: Scenario, reports: dict[str, Report], judged: list[Judged]) -> None:
    console.print(f"{scenario.title}\n{setup.device.description}", markup=False, highlight=False)
    for table in comparison_tables(reports):
        print_wide(table)
    first, report = next(iter(reports.items()))
    if any(len(tenants) > 1 for tenants in report.tenants.values()):
        print_wide(tenant_table(first, report))
    if judged:
        print_wide(goals_table(judged))


def _write_json(path: Path, setup: Setup, scenario: Scenario, reports: dict[str, Report], judged: list[Judged]) -> None:
    document = {
        "scenario": scenario.title,
        "device": setup.device.description,
        "engine": asdict(setup.core),
        "overlaps": setup.overlaps,
        "host_s": setup.host_s,
        "runs": {name: asdict(report) for name, report in reports.items()},
        "goals": [
            {"figure": item.goal.figure, "limit": item.goal.limit, "at_most": item.goal.at_most, "values": item.values}
            for item in judged
        ],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


@contextmanager
def _failures() -> Iterator[None]:
    """End the command with a one-line message if the block raises an expected error."""
    try:
        yield
    except (ValueError, OSError, PlotUnavailable, Stalled) as error:
        exit_with_error(str(error))
