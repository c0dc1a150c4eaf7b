"""`loralane plan`: which devices serve a model's traffic within its goals, and what that costs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
import yaml
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from engine.core.config import LaneGoals
from engine.sim.accelerators import ACCELERATORS, FORMS
from engine.sim.analysis import Analysis, analyze
from engine.sim.compare import Run, run_all
from engine.sim.device import find_device
from engine.sim.planning import (
    AS_MEASURED,
    HEADROOM,
    Candidate,
    Plan,
    Wish,
    adapters_beside,
    binds,
    candidates,
    kv_bytes_of,
    sequences,
    try_out,
    weights_of,
    with_engines,
)
from engine.sim.plot import draw
from engine.sim.run import Setup
from engine.sim.scenario import Scenario
from engine.sim.shapes import SHAPES, find_shape
from engine.sim.synthetic import RANKS, Sizes
from engine.sim.tables import MISSING, duration, share
from engine.sim.trace_formats import FORMATS
from engine.sizing import GIB
from gateway.cli.outputs import check_outputs, failures
from gateway.cli.simulate_cluster import shown_progress
from gateway.terminal.output import integer_parser, print_wide

console = Console()
MEAN_RANK = round(sum(RANKS) / len(RANKS))
DEFAULT_RATE = 1.0
"""Requests a second without a trace."""
MOST_SHOWN, MOST_TRIALS = 6, 8
"""Candidates that the table shows, and simulations until goals are met."""
PLOT_RATES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25)
"""Rates of the plot, as multiples of what an engine serves by arithmetic."""
MILLION = 1e6


def plan(
    model: Annotated[str, typer.Argument(help=f"Folder, config.json, GGUF file, or one of {', '.join(SHAPES)}.")],
    device: Annotated[
        list[str] | None, typer.Option(help=f"Device: {', '.join(ACCELERATORS)}, or a file of --measure; repeatable.")
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(help="Measure this machine with the model, and write its figures to this file.")
    ] = None,
    weights: Annotated[list[str] | None, typer.Option(help=f"Form: {', '.join(FORMS)}; repeatable.")] = None,
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
            model = str(_measured(model, measure))
            device = [*(device or ()), str(measure)]
        known = [name for name in device or ["h100"] if not name.endswith(".json")]
        names = _known(known, ACCELERATORS, "--device")
        files = [find_device(name) for name in device or () if name.endswith(".json")]
        forms = _known(weights or ["bf16"], FORMS, "--weights")
        prices = dict(_price(text) for text in price or ())
        scenario = Scenario(
            trace, DEFAULT_RATE if rate is None else rate, cv, Sizes.parse(prompt), Sizes.parse(output),
            seconds=duration_s, adapters=adapters, zipf=zipf, seed=seed,
        )  # fmt: skip
        traffic = analyze((replace(scenario, seconds=None) if trace else scenario).workload().trace)
        wanted = _rate(rate, traffic if trace else None)
        rank = MEAN_RANK if traffic.popularity else 0
        wish = Wish(find_shape(model), traffic, wanted, LaneGoals(ttft, itl, attainment), rank)
        found = candidates(wish, names, forms, prices, files)
        if not found:
            raise ValueError("no device is large and fast enough: widen the goals, or name other devices or weights")
        print_wide(_candidates_table(wish, found[:MOST_SHOWN]))
        best = _simulated(found, wish, scenario)
        if plot is not None:
            _plot(best.candidate, wish, scenario, plot)
    print_wide(_plan_table(best, wish))
    for note in _notes(best):
        console.print(f"[yellow]note: {note}[/yellow]", soft_wrap=True)
    if settings is not None:
        settings.write_text(yaml.safe_dump(_settings(best.candidate, wish), sort_keys=False))
    if json_file is not None:
        json_file.write_text(json.dumps(_document(best, found), indent=2) + "\n")


def _measured(model: str, out: Path) -> Path:
    """Measure this machine with a model, write the device's file, and return the model's folder."""
    from engine.measure import measure_model  # it imports torch, which the rest of the command does without

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with Progress(console=console, transient=True) as bars:
        task = bars.add_task("measuring this machine", total=1.0)
        folder, document = measure_model(model, out.stem, bars.console, partial(_advance, bars, task))
    out.write_text(json.dumps(document, indent=2) + "\n")
    return folder


def _known(names: list[str], known: Mapping[str, Any], option: str) -> list[str]:
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: {name!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(names))


def _rate(asked: float | None, recorded: Analysis | None) -> float:
    """Return the rate to plan for: what is asked for, else that of the recorded traffic's busiest minute. Raises
    ValueError if it is not positive and finite, or if the requests of a trace arrive at once."""
    if recorded is not None and recorded.busiest is None:
        raise ValueError("the requests of the trace arrive at once, without a rate that a plan could be made for")
    rate = asked if asked is not None else recorded.busiest if recorded is not None else DEFAULT_RATE
    if rate is None or not 0 < rate < math.inf:
        raise ValueError(f"--rate must be positive and finite, not {rate}")
    return rate


def _price(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    try:
        value = float(amount)
    except ValueError:
        value = -1.0
    if not name or not 0 <= value < float("inf"):
        raise ValueError(f"--price must be DEVICE=AMOUNT, such as h100=2.5, not {text!r}")
    return name, value


def _simulated(found: list[Candidate], wish: Wish, scenario: Scenario) -> Plan:
    """Simulate the first candidate with more and more engines until the goals are met, and return the last plan."""
    candidate = found[0]
    with Progress(console=console, transient=True) as bars:
        for trial in range(MOST_TRIALS):
            task = bars.add_task(f"{candidate.engines} engines", total=1.0)
            plan = try_out(candidate, wish, scenario, partial(_advance, bars, task))
            if plan.is_enough or trial == MOST_TRIALS - 1:
                break
            candidate = with_engines(candidate, wish, candidate.engines + max(1, candidate.engines // 8))
    return plan


def _advance(bars: Progress, task: TaskID, part: float) -> None:
    bars.update(task, completed=part)


def _plot(candidate: Candidate, wish: Wish, scenario: Scenario, out: Path) -> None:
    setup, served = Setup(candidate.device, candidate.core), candidate.most.rate / (wish.traffic.rate or 1.0)
    runs = [Run(f"{part:g}x", setup, scenario.workload(part * served)) for part in PLOT_RATES]
    with shown_progress(run.name for run in runs) as advance:
        reports = run_all(runs, 1, advance)
    line = [(part, reports[f"{part:g}x"]) for part in PLOT_RATES]
    title = f"{candidate.device.description}, {candidate.most.rate:.3g} requests/s at 1x"
    draw({candidate.device.name: line}, title, out)


def _candidates_table(wish: Wish, found: list[Candidate]) -> Table:
    table = Table(title=f"{wish.shape.name}, {wish.rate:,.3g} requests/s, by arithmetic")
    for column in ("engines", "device", "weights", "tokens/s each", "decodes at once", "mean ITL", "binds"):
        table.add_column(column, justify="left" if column in ("device", "weights", "binds") else "right")
    for column in ("an hour", "a million tokens"):
        table.add_column(column, justify="right")
    for one in found:
        hour = MISSING if one.cost is None else f"{one.cost:,.2f}"
        tokens = f"{one.most.rate * wish.traffic.output.mean:,.0f}"
        each = (str(one.steady.seqs), duration(one.steady.step_s), binds(one, wish.demand(one.core)))
        table.add_row(str(one.engines), one.device.name, one.form, tokens, *each, hour, _per_million(one, wish))
    return table


def _per_million(candidate: Candidate, wish: Wish) -> str:
    """Return the price of a million output tokens at the wished rate."""
    if candidate.cost is None:
        return MISSING
    return f"{candidate.cost / (wish.rate * wish.traffic.output.mean * 3600) * MILLION:,.3f}"


def _plan_table(plan: Plan, wish: Wish) -> Table:
    one, report, shape, traffic = plan.candidate, plan.report, wish.shape, wish.traffic
    lane, kv, weights = report.lanes["interactive"], kv_bytes_of(one, shape), weights_of(one, shape)
    table = Table(title=f"{one.engines} x {one.device.description}", show_header=False)
    lengths = {"mean": traffic.whole.mean, "p99": traffic.whole.p99, f"{shape.max_position:,}": shape.max_position}
    fit = {name: f"{sequences(one, tokens):,}" for name, tokens in lengths.items()}
    rows = [
        ("weights", one.form if weights is None else f"{weights / GIB:,.1f} GiB"),
        ("KV of a token", f"{kv / 1024:,.0f} KiB"),
        ("tokens in pages", f"{one.core.num_pages * one.core.block_size:,}"),
        (
            f"sequences that fit, {1 - HEADROOM:.0%} spare",
            ", ".join(f"{count} ({name})" for name, count in fit.items()),
        ),
        ("if each had the full length preallocated", fit[f"{shape.max_position:,}"]),
        ("requests/s, at most", f"{one.most.rate:,.3g} each"),
        ("what binds", binds(one, wish.demand(one.core))),
        ("simulated: TTFT p50, p99", f"{duration(lane.ttft.p50)}, {duration(lane.ttft.p99)}"),
        ("simulated: ITL p50, p99", f"{duration(lane.itl.p50)}, {duration(lane.itl.p99)}"),
        ("in time: first tokens, gaps", f"{share(lane.ttft_attainment)}, {share(lane.itl_attainment)}"),
        ("device busy", f"{report.busy:.0%}"),
    ]
    if wish.rank:
        beside, host = adapters_beside(one, wish.demand(one.core), wish.rank)
        rows.append((f"adapters of rank {wish.rank}", f"{beside:,} in pages beside KV, {host:,} in host memory"))
    if one.cost is not None:
        rows.append(("price", f"{one.cost:,.2f} an hour, {_per_million(one, wish)} a million output tokens"))
    for row in rows:
        table.add_row(*row)
    return table


def _notes(plan: Plan) -> Iterator[str]:
    if not plan.is_enough:
        yield f"the goals were met in none of {MOST_TRIALS} simulations with more and more engines"
    one = plan.candidate
    for name, count in (("tensor_parallel", one.ranks), ("pipeline_parallel", one.stages)):
        if count > 1:
            yield f"engine.{name}: {count} has not run on GPUs yet: measure before you rely on it"


def _settings(candidate: Candidate, wish: Wish) -> dict[str, Any]:
    """Return sections of a configuration file for an engine of the plan."""
    engine: dict[str, Any] = {"max_seqs": candidate.core.max_seqs, "token_budget": candidate.core.token_budget}
    engine |= {"replicas": candidate.engines}
    if candidate.form != AS_MEASURED:
        engine |= {"device": "cuda", "dtype": "bfloat16"}
        engine |= {"tensor_parallel": candidate.ranks} if candidate.ranks > 1 else {}
        engine |= {"pipeline_parallel": candidate.stages} if candidate.stages > 1 else {}
        engine |= {"weights": candidate.form} if candidate.form != "bf16" else {}
        engine |= {"kv_dtype": "fp8"} if FORMS[candidate.form].is_fp8 else {}
    goals = {"ttft_s": wish.goals.ttft_s, "itl_s": wish.goals.itl_s, "attainment": wish.goals.attainment}
    return {"engine": engine, "lanes": {"interactive": goals}}


def _document(plan: Plan, found: list[Candidate]) -> dict[str, Any]:
    return {
        "plan": {**_figures(plan.candidate), "report": asdict(plan.report), "is_enough": plan.is_enough},
        "candidates": [_figures(candidate) for candidate in found],
    }


def _figures(candidate: Candidate) -> dict[str, Any]:
    return {**asdict(candidate), "cost": candidate.cost}
