"""`loralane plan`: which devices serve a model's traffic within its goals, and what that costs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
import yaml
from rich.progress import Progress, TaskID

from engine.core.config import LaneGoals
from gateway.routing.router import MAX_REPLICAS
from gateway.routing.split import SplitMode
from gateway.terminal.console import Console
from gateway.terminal.output import integer_parser, print_wide
from lab.clusters.report import ClusterReport
from lab.commands.outputs import check_outputs, failures
from lab.commands.plan_choices import Choices, check_devices
from lab.commands.plan_tables import candidates_table, plan_table
from lab.commands.simulate_cluster import SPLITS, shown_progress
from lab.devices.accelerators import ACCELERATORS, FORMS
from lab.devices.links import LINKS
from lab.devices.shapes import SHAPES, Shape, find_shape
from lab.plans.planning import AS_MEASURED, Candidate, Plan, Wish
from lab.plans.search import MOST_TRIALS, cluster_report, find_plan
from lab.plans.settings import settings_of
from lab.plot import Measured, draw
from lab.sim.compare import Run, run_all
from lab.sim.run import Progress as Advance
from lab.sim.run import Setup
from lab.traffic.analysis import analyze
from lab.traffic.scenario import Scenario
from lab.traffic.synthetic import RANKS, Sizes
from lab.traffic.traces import FORMATS

console = Console()
MEAN_RANK = round(sum(RANKS) / len(RANKS))
DEFAULT_RATE = 1.0
"""Requests per second to plan for if neither a trace nor --rate is given."""
MOST_SHOWN = 6
"""Maximum number of candidates in the table."""
PLOT_RATES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25)
"""Request rates that the plot shows, as multiples of the highest rate that the plotted engines serve by arithmetic."""


def plan(
    model: Annotated[str, typer.Argument(help=f"Folder, config.json, GGUF file, or one of {', '.join(SHAPES)}.")],
    device: Annotated[
        list[str] | None, typer.Option(help=f"Device: {', '.join(ACCELERATORS)}, or a file of --measure; repeatable.")
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(help="Measure this machine with the model, and write its figures to this file.")
    ] = None,
    weights: Annotated[
        list[str] | None, typer.Option(help=f"Form, by data sheets: {', '.join(FORMS)}; repeatable.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help=f"Traffic: {FORMATS}.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second; default: the trace's busiest, or 1.")] = None,
    prompt: Annotated[str, typer.Option(help="Without a trace: prompt tokens, LOW-HIGH.")] = "256-1024",
    output: Annotated[str, typer.Option(help="Without a trace: output tokens, LOW-HIGH.")] = "64-256",
    cv: Annotated[float, typer.Option(help="Without a trace: variation of gaps; 1: Poisson, 4: bursty.")] = 1.0,
    adapters: Annotated[int, typer.Option(parser=integer_parser(), help="Adapters, of ranks 4 to 64.")] = 0,
    zipf: Annotated[float, typer.Option(help="Zipf exponent of the adapters' popularity.")] = 1.0,
    ttft: Annotated[float, typer.Option(help="Goal in seconds: first token.")] = 0.5,
    itl: Annotated[float, typer.Option(help="Goal in seconds: gap between tokens.")] = 0.1,
    attainment: Annotated[float, typer.Option(help="Share of tokens that should be in time.")] = 0.99,
    price: Annotated[list[str] | None, typer.Option(metavar="DEVICE=AMOUNT", help="Price of a device-hour.")] = None,
    split: Annotated[
        str, typer.Option(help=f"Engines for prompts and others for answers: {', '.join(SPLITS)}; auto: if cheaper.")
    ] = "auto",
    link: Annotated[str, typer.Option(help=f"What KV moves over: {', '.join(LINKS)}.")] = "nvlink",
    duration_s: Annotated[float, typer.Option("--duration", help="Seconds of traffic that are simulated.")] = 60.0,
    settings: Annotated[Path | None, typer.Option(help="File for the engine's settings, as YAML.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a plot of latency over throughput.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures, as JSON.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Find the devices that serve a model's traffic within its goals: the cheapest if prices are given, and otherwise
    the fewest. Candidates are computed from data sheets or from what --measure found with this model, and the best one
    is simulated on the real scheduler.

    - `loralane plan llama-3.1-8b --rate 20`
    - `loralane plan llama-3.1-70b --device h100 --device a100 --price h100=2.5 --price a100=1.3`
    - `loralane plan embedded --measure my-machine.json --rate 2 --prompt 32-256 --output 16-96`
    - `loralane plan ./my-model --trace gateway.log --adapters 500 --ttft 0.3 --settings engine.yaml --plot knee.png`
    """
    with failures():
        check_outputs({"--settings": settings, "--json": json_file, "--measure": measure}, plot)
        if measure is not None:
            device = [*(device or ()), str(measure)]
        check_devices(device, weights)
        if measure is not None:
            model = str(_measured(model, measure))
        choices = Choices.parse(device, weights, price, split, link)
        scenario = Scenario(
            trace, DEFAULT_RATE if rate is None else rate, cv, Sizes.parse(prompt), Sizes.parse(output),
            seconds=duration_s, adapters=adapters, zipf=zipf, seed=seed,
        )  # fmt: skip
        wish = _wish(find_shape(model), scenario, rate, LaneGoals(ttft, itl, attainment))
        candidates = choices.candidates(wish)
        print_wide(candidates_table(wish, candidates[:MOST_SHOWN]))
        with Progress(console=console, transient=True) as bars:
            best = find_plan(candidates, wish, scenario, choices.split, choices.link, partial(_shown, bars))
        if plot is not None:
            of_cluster = partial(cluster_report, split=choices.split, link=choices.link)
            _plot(best.candidate, wish, scenario, of_cluster, plot)
    print_wide(plan_table(best, wish))
    for note in _notes(best, wish):
        console.print(f"[yellow]note: {note}[/yellow]", soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(_document(best, candidates), indent=2) + "\n")
    if settings is not None:
        with failures():
            _write_settings(settings, best.candidate, wish, choices.split)


def _measured(model: str, out: Path) -> Path:
    """Measure how fast this machine runs a model, write the result to the device file `out`, and return the model's
    folder."""
    from lab.plans.measure import measure_model  # it imports what runs models, which the rest does without

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with Progress(console=console, transient=True) as bars:
        task = bars.add_task("measuring this machine", total=1.0)
        folder, document = measure_model(model, out.stem, bars.console, partial(_advance, bars, task))
    out.write_text(json.dumps(document, indent=2) + "\n")
    return folder


def _wish(shape: Shape, scenario: Scenario, rate: float | None, goals: LaneGoals) -> Wish:
    """Return what has to be served: the scenario's requests, all of a trace's, at `rate` a second or, for None, at the
    trace's busiest minute's. Raises ValueError if that is no positive rate."""
    is_recorded = scenario.trace is not None
    traffic = analyze((replace(scenario, seconds=None) if is_recorded else scenario).workload().trace)
    if is_recorded and traffic.busiest is None:
        raise ValueError("the requests of the trace arrive at once, without a rate that a plan could be made for")
    wanted = rate if rate is not None else traffic.busiest if is_recorded else DEFAULT_RATE
    if wanted is None or not 0 < wanted < math.inf:
        raise ValueError(f"--rate must be positive and finite, not {wanted}")
    return Wish(shape, traffic, wanted, goals, MEAN_RANK if traffic.popularity else 0)


def _shown(bars: Progress, name: str) -> Advance:
    return partial(_advance, bars, bars.add_task(name, total=1.0))


def _advance(bars: Progress, task: TaskID, part: float) -> None:
    bars.update(task, completed=part)


def _plot(
    candidate: Candidate, wish: Wish, scenario: Scenario, of_cluster: Callable[..., ClusterReport], out: Path
) -> None:
    """Simulate a plan at the rates PLOT_RATES, and draw latency over throughput to the file `out`. The curve is that of
    one engine or, if the plan splits requests, of all its engines together."""
    served = candidate.most.rate * (candidate.engines if candidate.prefill else 1)
    setup, names = Setup(candidate.device, candidate.core), [f"{part:g}x" for part in PLOT_RATES]
    with shown_progress(names) as advance:
        if candidate.prefill:
            reports: Mapping[str, Measured] = {
                name: of_cluster(candidate, wish, scenario, part * served, partial(advance, name))
                for name, part in zip(names, PLOT_RATES, strict=True)
            }
        else:
            scales = (part * served / (wish.traffic.rate or 1.0) for part in PLOT_RATES)
            runs = [Run(name, setup, scenario.workload(scale)) for name, scale in zip(names, scales, strict=True)]
            reports = run_all(runs, 1, advance)
    title = f"{candidate.device.description}, {served:.3g} requests/s at 1x"
    draw({candidate.device.name: list(zip(PLOT_RATES, reports.values(), strict=True))}, title, out)


def _notes(plan: Plan, wish: Wish) -> Iterator[str]:
    if not plan.is_enough:
        yield f"no candidate met the goals in {MOST_TRIALS} simulations with more and more engines"
    candidate = plan.candidate
    for name, count in (("tensor_parallel", candidate.ranks), ("pipeline_parallel", candidate.stages)):
        if count > 1:
            yield f"engine.{name}: {count} has not run on GPUs yet: measure before you rely on it"
    if candidate.prefill:
        yield "engine.split has not run on GPUs yet: measure before you rely on it"
    if wish.shape.experts and candidate.form not in (AS_MEASURED, "bf16"):
        yield "quantised experts are computed one by one, for which the plan leaves no time: measure before"
    if wish.shape.is_quantised and candidate.form != AS_MEASURED:
        yield "the engine keeps the model's quantised weights, which the plan counts in 16 bits"
    if windowed := wish.shape.windowed_layers:
        layers = f"{windowed} of {wish.shape.layers} layers"
        yield f"{layers} see a sliding window only, and keep all KV in pages until a request ends: it is counted so"


def _write_settings(file: Path, candidate: Candidate, wish: Wish, mode: SplitMode) -> None:
    """Write the configuration file of a plan. Raises ValueError if a gateway cannot have so many engines."""
    if candidate.engines > MAX_REPLICAS:
        raise ValueError(
            f"--settings: the plan has {candidate.engines} engines, and a gateway serves a base model with "
            f"{MAX_REPLICAS} at most: divide the traffic among several, and plan with the --rate of one"
        )
    file.write_text(yaml.safe_dump(settings_of(candidate, wish, mode.value), sort_keys=False))


def _document(plan: Plan, candidates: list[Candidate]) -> dict[str, Any]:
    return {
        "plan": {**_figures(plan.candidate), "report": plan.report, "is_enough": plan.is_enough},
        "candidates": [_figures(candidate) for candidate in candidates],
    }


def _figures(candidate: Candidate) -> dict[str, Any]:
    return {**asdict(candidate), "cost": candidate.cost}
