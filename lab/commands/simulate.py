"""`loralane simulate`: runs the scheduler on recorded or random traffic, with a cost model in place of the device."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.config import EngineConfig
from engine.core.config import CoreConfig
from gateway.config.whole import load_config
from gateway.terminal.console import Console
from gateway.terminal.output import integer_parser, print_wide
from lab.clusters.compare import ROUTERS
from lab.commands.outputs import check_outputs, failures
from lab.commands.simulate_cluster import SPLITS, Cluster, compare_routers, shown_progress
from lab.devices.device import device_names, find_device
from lab.devices.links import LINKS
from lab.plot import draw
from lab.sim.baselines import POLICIES, SCHEDULERS
from lab.sim.compare import Run, plan_runs, run_all, run_name, under
from lab.sim.goals import Judged, judge
from lab.sim.report import Report
from lab.sim.run import Setup
from lab.sim.tables import comparison_tables, goals_table, tenant_table
from lab.traffic.scenario import Scenario
from lab.traffic.synthetic import FlashCrowd, Shares, Sizes
from lab.traffic.traces import FORMATS
from lab.traffic.workload import Backlog

console = Console()

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


def _count(help: str, minimum: int | None = None) -> Any:
    """Return an option that takes a number such as 2000 or 2k."""
    return typer.Option(parser=integer_parser() if minimum is None else integer_parser(minimum), help=help)


@dataclass(frozen=True, slots=True)
class Modes:
    policies: list[str]
    schedulers: list[str]

    @property
    def only(self) -> tuple[str, str]:
        """The only policy and the only scheduler, as a comparison of routers needs them. Raises ValueError if there are
        several of either."""
        if len(self.policies) > 1 or len(self.schedulers) > 1:
            raise ValueError("routers are compared under one --policy and one --scheduler")
        return self.policies[0], self.schedulers[0]


def simulate(
    trace: Annotated[Path | None, typer.Option(help=f"{FORMATS}; default: random.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML of `serve`, for sizes, lanes and scheduling.")] = None,
    device: Annotated[str, typer.Option(help=f"Cost model: {', '.join(device_names())} or a JSON file.")] = "h100-8b",
    policy: Annotated[list[str] | None, typer.Option(help=f"Policy to run: {', '.join(POLICIES)}; repeatable.")] = None,
    scheduler: Annotated[list[str] | None, typer.Option(help=f"Batching: {', '.join(SCHEDULERS)}; repeatable.")] = None,
    rate_scale: Annotated[float, typer.Option(help="Factor by which arrivals are sped up.")] = 1.0,
    duration: Annotated[float | None, typer.Option(help="Seconds of traffic; default: all, or 600 at random.")] = None,
    rate: Annotated[float, typer.Option(help="Random arrivals: requests per second.")] = 1.0,
    cv: Annotated[float, typer.Option(help="Random arrivals: variation of gaps; 1: Poisson, 4: bursty (Gamma).")] = 1.0,
    prompt: Annotated[str, typer.Option(help="Random arrivals: prompt tokens, LOW-HIGH.")] = "256-1024",
    output: Annotated[str, typer.Option(help="Random arrivals: output tokens, LOW-HIGH.")] = "64-256",
    tenants: Annotated[int, _count("Number of tenants of the requests; 0: those of the trace.")] = 0,
    adapters: Annotated[int, _count("Number of adapters of the requests; 0: those of the trace.")] = 0,
    zipf: Annotated[float, typer.Option(help="Zipf exponent of the adapters' popularity; 0: all alike.")] = 1.0,
    batch_share: Annotated[float, typer.Option(help="Share of requests moved to the batch lane, 0 to 1.")] = 0.0,
    batch_backlog: Annotated[int, _count("Number of batch requests that are always unfinished.")] = 0,
    batch_prompt: Annotated[str, typer.Option(help="Batch backlog: prompt tokens, LOW-HIGH.")] = "64-256",
    batch_output: Annotated[str, typer.Option(help="Batch backlog: output tokens, LOW-HIGH.")] = "64-160",
    batch_deadline: Annotated[float | None, typer.Option(help="Batch backlog: seconds to the deadline.")] = None,
    flash_crowd: Annotated[str | None, typer.Option(help="Crowd for one adapter: SHARE@START-END (seconds).")] = None,
    tide: Annotated[float, typer.Option(help="Period in seconds of a rate that rises and falls; 0: none.")] = 0.0,
    predicted: Annotated[
        str | None, typer.Option(help="Speculate: share of each answer that its prediction has right, LOW-HIGH.")
    ] = None,
    unlimited: Annotated[bool, typer.Option("--unlimited", help="No max_tokens: lengths must be predicted.")] = False,
    replicas: Annotated[int, typer.Option(min=1, help="Number of engines, each on such a device.")] = 1,
    router: Annotated[list[str] | None, typer.Option(help=f"Router: {', '.join(ROUTERS)}; repeatable.")] = None,
    kill: Annotated[float | None, typer.Option(help="Second at which one of the replicas dies.")] = None,
    add: Annotated[float | None, typer.Option(help="Second at which a replica is added.")] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(help=f"Prompts on one replica, answers on another: {', '.join(SPLITS)}; repeatable."),
    ] = None,
    prefill: Annotated[int, typer.Option(help="Replicas that only compute prompts of split requests; 0: all.")] = 0,
    link: Annotated[str, typer.Option(help=f"What KV moves over: {', '.join(LINKS)}.")] = "nvlink",
    overlap: Annotated[bool, typer.Option("--overlap", help="Plan steps one ahead, as on a GPU.")] = False,
    host_ms: Annotated[float, typer.Option(help="Milliseconds to plan and launch a step on the host.", min=0)] = 0.0,
    goals: Annotated[bool, typer.Option("--goals", help="Compare with the scheduler's goals.")] = False,
    plot: Annotated[Path | None, typer.Option(help="File for a plot of throughput and latency at --rates.")] = None,
    rates: Annotated[str, typer.Option(help="Rate scales of --plot, separated by commas.")] = "0.5,1,2,4",
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the complete reports, as JSON.")] = None,
    jobs: Annotated[int, _count("Simulations at a time; 0: one per core.", 0)] = 0,
    seed: Annotated[int, _count("Random seed: the same one repeats a run.")] = 0,
) -> None:
    """Run recorded or random traffic on the real scheduler, with a cost model in the device's place, and compare the
    policies and schedulers or, with --replicas or --router, the routers.

    - `loralane simulate --trace azure.csv`
    - `loralane simulate --trace azure.csv --batch-backlog 512 --goals`
    - `loralane simulate --rate 5 --cv 4 --adapters 2000 --policy lanes --policy fcfs`
    - `loralane simulate --trace azure.csv --policy lanes --policy fcfs --rates 0.5,1,2,4 --plot curve.png`
    - `loralane simulate --rate 60 --adapters 2000 --replicas 8 --router ours --router hash --kill 60`
    - `loralane simulate --rate 12 --prompt 2048-6144 --replicas 4 --split auto --split never --link ethernet-100`
    """
    with failures():
        check_outputs({"--json": json_file}, plot)
        if plot is not None and goals:
            raise ValueError("--goals and --plot exclude each other: goals are judged at one rate")
        sizes = Sizes.parse(batch_prompt), Sizes.parse(batch_output)
        backlog = Backlog(batch_backlog, *sizes, batch_deadline) if batch_backlog else None
        crowd = FlashCrowd.parse(flash_crowd) if flash_crowd else None
        scenario = Scenario(
            trace, rate, cv, Sizes.parse(prompt), Sizes.parse(output), seconds=duration, tenants=tenants,
            adapters=adapters, zipf=zipf, batch_share=batch_share, backlog=backlog, crowd=crowd, tide_s=tide, seed=seed,
            predicted=Shares.parse(predicted) if predicted else None, limited=not unlimited,
        )  # fmt: skip
        setup = replace(make_setup(device, config, os.environ), overlaps=overlap, host_s=host_ms / 1000)
        if predicted:
            setup = speculating(setup)
        modes = Modes(policy or [setup.mode.policy], scheduler or [setup.mode.scheduler])
        jobs = jobs or os.cpu_count() or 1
        cluster = Cluster.of(replicas, router, kill, add, split, prefill, link)
        if cluster is not None:
            cluster.check_options(goals=goals, plot=plot)
            setup = under(setup, *modes.only)
            compare_routers(setup, scenario, scenario.workload(rate_scale), cluster, jobs, json_file)
            return
        if plot is not None:
            reports = _run_curve(setup, scenario, modes, [float(x) * rate_scale for x in rates.split(",")], jobs, plot)
        else:
            workload = scenario.workload(rate_scale)
            reports = _run(plan_runs(setup, workload, modes.policies, modes.schedulers, goals=goals), jobs)
    _tell(setup, scenario, reports, json_file, goals=goals)


def make_setup(device: str, config: Path | None, env: Mapping[str, str]) -> Setup:
    """Return the simulated device and engine: the settings of the device's file, overridden by those that the
    configuration file `config` sets for its first base model. Raises ValueError if either is invalid or their block
    sizes differ."""
    spec = find_device(device)
    core = CoreConfig(**spec.engine)
    if config is None:
        return Setup(spec, core)
    engine = load_config(config, env).default_model.engine_config(Path())
    if engine.block_size != core.block_size:
        raise ValueError(f"engine.block_size: {spec.name} was measured with {core.block_size}, not {engine.block_size}")
    return Setup(spec, replace(core, **_chosen(engine.sized(core.max_seqs, core.token_budget))))


def speculating(setup: Setup) -> Setup:
    """Return the setup with speculative decoding switched on. Raises ValueError if steps are planned one ahead, because
    such steps have no proposed tokens."""
    if setup.overlaps:
        raise ValueError("--predicted and --overlap exclude each other: steps planned ahead have no proposed tokens")
    return replace(setup, core=replace(setup.core, speculation=True))


def _chosen(engine: EngineConfig) -> dict[str, Any]:
    """Return, by name, those of the fields that a configuration may set for a simulation (`FROM_CONFIG`, `num_pages`
    and `max_model_len`) which differ from the defaults. The device's file decides the others."""
    default, names = EngineConfig(model=""), (*FROM_CONFIG, "num_pages", "max_model_len")
    return {name: getattr(engine, name) for name in names if getattr(engine, name) != getattr(default, name)}


def _run_curve(
    setup: Setup, scenario: Scenario, modes: Modes, rates: list[float], jobs: int, out: Path
) -> dict[str, Report]:
    """Run every policy and scheduler at every rate scale, draw the throughput-latency curves to the file `out`, and
    return the reports by run name."""
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
    with shown_progress(run.name for run in runs) as advance:
        return run_all(runs, jobs, advance)


def _tell(setup: Setup, scenario: Scenario, reports: dict[str, Report], json_file: Path | None, *, goals: bool) -> None:
    judged = judge(setup, reports) if goals else []
    _show(setup, scenario, reports, judged)
    if json_file is not None:
        with failures():
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
