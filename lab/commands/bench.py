"""`loralane bench`: the command line of the load generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gateway.terminal.output import LOCAL_URL, check_writable, exit_with_error, integer_parser
from lab.bench.dataset import FORMATS
from lab.bench.spec import SpecError, override, parse_lane, parse_range
from lab.plot import PlotUnavailable, check_available
from lab.traffic.traces import FORMATS as TRACES

app = typer.Typer(
    help="Measure a server: throughput and latency, lane by lane.", no_args_is_help=True, rich_markup_mode="markdown"
)

HELP = """Send streamed requests to a server, and report throughput and latency lane by lane.

Every server does the same work: seeded prompts, exact lengths, and arrivals that do not wait for answers.

A lane is `interactive`, `batch` or `default` (which leaves the lane to the server), with any of

- `n=60` requests and `rate=0.7` a second (Poisson; with `cv=4` the gaps are Gamma-distributed: bursts). Without a rate
  all `n` arrive at once; with neither, the lane replays `--trace`. `start=3s` delays it.
- `in=24-96` prompt and `out=16` output tokens: a range, a number, or `600~1.5`, log-normal of mean 600 and CV 1.5. With
  a trace or a data set these bound its own.
- `ttft=500ms`, `itl=100ms` (of a request's own p99) and `tpot=50ms`: the objective that goodput counts.

Examples:

- `loralane bench serve` measures the demo.
- `loralane bench serve --endpoint chat --sweep --ttft-ms 500 --tpot-ms 50 --plot knee.png --price-per-hour 2.5` finds
  the highest rate of chats at which 99 % of requests are in time.
- `loralane bench serve --rates 1,2,4,8 --dataset sharegpt.json --ttft-ms 500 --vllm-json results.jsonl`
- `loralane bench serve --lanes interactive:rate=0.7,n=60,in=24-96,out=16,ttft=0.5
  --lanes batch:n=128,in=64-256,out=64-160 --adapters pirate,cheer,json --zipf 1`
- `loralane bench serve --url http://peer:8100 --trace azure.csv --rate-scale 0.2 --duration 600
  --lanes interactive:in=1-1500,out=1-400,ttft=1s --json azure.json`
"""

DEMO_LANES = ["interactive:rate=1,n=30,in=24-96,out=16,ttft=500ms,itl=100ms", "batch:n=32,in=64-256,out=64-160"]
SWEEP_LANES = ["default:in=64-256,out=64"]
TRAFFIC, RATES, SERVER = "Traffic", "Rates and goals, of the first lane", "Server"
"""Headings of the options in the help."""

Lanes = Annotated[
    list[str] | None,
    typer.Option("--lanes", metavar="NAME:KEY=VALUE,...", help="Repeatable.", rich_help_panel=TRAFFIC),
]
Models = Annotated[
    str | None,
    typer.Option(
        "--models", "--adapters", metavar="A,B,...", help="Asked in turn; default: the first listed.",
        rich_help_panel=TRAFFIC,
    ),
]  # fmt: skip
Limit = Annotated[float | None, typer.Option(help="Objective in milliseconds.", rich_help_panel=RATES)]


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"


@app.callback()
def bench() -> None:
    """Measure a server: throughput and latency, lane by lane."""


@app.command(help=HELP)
def serve(
    url: Annotated[
        str, typer.Option(envvar="LORALANE_URL", help="Any OpenAI-compatible server.", rich_help_panel=SERVER)
    ] = LOCAL_URL,
    key: Annotated[
        str, typer.Option(envvar="LORALANE_API_KEY", help="API key.", rich_help_panel=SERVER)
    ] = "sk-demo-acme",
    endpoint: Annotated[
        Endpoint, typer.Option(help="A chat has texts for prompts.", rich_help_panel=SERVER)
    ] = Endpoint.COMPLETIONS,
    lanes: Lanes = None,
    models: Models = None,
    zipf: Annotated[
        float | None, typer.Option(min=0, help="Draw models by a Zipf law of this exponent.", rich_help_panel=TRAFFIC)
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help=f"Prompts: `texts` (written from the seed; default of chats) or a file: {FORMATS}. "
            "Default: random token ids.",
            rich_help_panel=TRAFFIC,
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help=f"Arrivals and lengths: {TRACES}.", rich_help_panel=TRAFFIC)
    ] = None,
    rate_scale: Annotated[
        float, typer.Option(min=1e-6, help="Replay it this many times as fast.", rich_help_panel=TRAFFIC)
    ] = 1.0,
    duration: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which no request arrives.", rich_help_panel=TRAFFIC)
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            parser=integer_parser(), help="Of arrivals, lengths, prompts and models.", rich_help_panel=TRAFFIC
        ),
    ] = 0,
    token_ids: Annotated[
        str, typer.Option(metavar="LOW-HIGH", help="Range of random token ids.", rich_help_panel=TRAFFIC)
    ] = "1000-30000",
    rates: Annotated[
        str | None,
        typer.Option(metavar="R1,R2,...", help="Requests/s to measure one after another.", rich_help_panel=RATES),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Find the highest rate within the goals.", rich_help_panel=RATES)
    ] = False,
    ttft_ms: Limit = None,
    tpot_ms: Limit = None,
    itl_ms: Limit = None,
    share: Annotated[
        float, typer.Option(help="Share of requests that have to meet the goals.", rich_help_panel=RATES)
    ] = 0.99,
    burstiness: Annotated[
        float | None,
        typer.Option(help="Shape of the Gamma law of gaps: 1 is Poisson, less is bursty.", rich_help_panel=RATES),
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Price of the server, for the cost of a million tokens.")
    ] = None,
    warmup: Annotated[int, typer.Option(parser=integer_parser(0), help="Requests sent before, and not measured.")] = 8,
    concurrency: Annotated[int | None, typer.Option(parser=integer_parser(1), help="At most so many at once.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for one request.")] = 600.0,
    tier: Annotated[
        bool, typer.Option(help="Say the lane: service_tier, and priority for vLLM.", rich_help_panel=SERVER)
    ] = True,
    extensions: Annotated[
        bool, typer.Option(help="Send ignore_eos and return_token_ids.", rich_help_panel=SERVER)
    ] = True,
    json: Annotated[Path | None, typer.Option("--json", help="Also write everything here.")] = None,
    vllm_json: Annotated[
        Path | None, typer.Option(help="Also write what `vllm bench serve --save-result` writes, a line for each rate.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a plot of latency over rate, and the knee.")] = None,
) -> None:
    from lab.bench.client import Target
    from lab.bench.dataset import OWN_TEXTS
    from lab.bench.document import Settings
    from lab.bench.plan import Plan
    from lab.bench.run import BenchError, served_models
    from lab.bench.sweep import POINT_SECONDS, parse_rates
    from lab.bench.work import Files, Work

    try:
        _check_files({"--json": json, "--vllm-json": vllm_json, "--plot": plot}, plot)
        many = _is_sweep(rates, sweep, plot)
        first, *others = (parse_lane(text) for text in lanes or _default_lanes(trace, many))
        first = override(first, burstiness, ttft=ttft_ms, tpot=tpot_ms, itl=itl_ms)
        if sweep and not first.slo:
            raise SpecError("--sweep finds the highest rate within goals: give --ttft-ms, --tpot-ms or --itl-ms")
        wanted = parse_rates(rates) if rates else [first.rate or 1.0]
        plan = Plan(
            models=tuple(name.strip() for name in models.split(","))
            if models is not None
            else tuple(served_models(Target(url, key))[:1]),
            lanes=(replace(first, rate=wanted[0]) if many else first, *others),
            zipf=zipf,
            trace=str(trace) if trace else None,
            rate_scale=rate_scale,
            duration=(duration or POINT_SECONDS) if many else duration,
            seed=seed,
            token_ids=parse_range(token_ids),
            dataset=dataset or (OWN_TEXTS if endpoint is Endpoint.CHAT else None),
        )
        chat = endpoint is Endpoint.CHAT
        settings = Settings(url, plan, warmup, concurrency, timeout, tier, extensions, chat, price_per_hour)
        work = Work(settings, key, Files(json, vllm_json, plot))
        succeeded = work.sweep(wanted, share, search=sweep) if many else work.once()
    except (BenchError, ValueError, OSError, PlotUnavailable) as error:
        exit_with_error(str(error))
    if not succeeded:
        raise typer.Exit(1)


def _is_sweep(rates: str | None, sweep: bool, plot: Path | None) -> bool:
    """Return whether several rates are to be measured. Raises SpecError if options contradict each other."""
    if rates and sweep:
        raise SpecError("--sweep chooses the rates itself: leave out --rates, or --sweep")
    if plot is not None and not (rates or sweep):
        raise SpecError("--plot draws latency over rate: add --rates 1,2,4 or --sweep")
    return bool(rates or sweep)


def _default_lanes(trace: Path | None, many: bool) -> list[str]:
    return ["interactive"] if trace else SWEEP_LANES if many else DEMO_LANES


def _check_files(files: Mapping[str, Path | None], plot: Path | None) -> None:
    """Check, before the work begins, that all files can be written. Raises ValueError or PlotUnavailable if not."""
    for option, path in files.items():
        if path is not None:
            check_writable(path, option)
    if plot is not None:
        check_available(plot)
