"""`loralane bench`: the command line of the load generator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from engine.sim.trace_formats import FORMATS
from gateway.bench.spec import parse_lane, parse_range
from gateway.terminal.output import LOCAL_URL, check_writable, exit_with_error, integer_parser

if TYPE_CHECKING:
    from gateway.bench.document import Document

app = typer.Typer(
    help="Measure a server: throughput and latency, lane by lane.", no_args_is_help=True, rich_markup_mode="markdown"
)

HELP = """Send a server streamed completions, and report throughput and latency lane by lane.

Every server does the same work: seeded prompts of token ids, exact lengths, and arrivals that do not wait for answers.

A lane is `interactive`, `batch` or `default` (which leaves the lane to the server), with any of

- `n=60` requests and `rate=0.7` a second (Poisson; with `cv=4` the gaps are Gamma-distributed: bursts). Without a rate
  all `n` arrive at once; with neither, the lane replays `--trace`. `start=3s` delays it.
- `in=24-96` prompt and `out=16` output tokens: a range, a number, or `600~1.5`, log-normal of mean 600 and CV 1.5. With
  a trace these bound the trace's own.
- `ttft=500ms`, `itl=100ms` (of a request's own p99) and `tpot=50ms`: the objective that goodput counts.

Examples:

- `loralane bench serve` measures the demo.
- `loralane bench serve --lanes interactive:rate=0.7,n=60,in=24-96,out=16,ttft=0.5
  --lanes batch:n=128,in=64-256,out=64-160 --adapters pirate,cheer,json --zipf 1`
- `loralane bench serve --url http://peer:8100 --trace azure.csv --rate-scale 0.2 --duration 600
  --lanes interactive:in=1-1500,out=1-400,ttft=1s --json azure.json`
"""

DEMO_LANES = ["interactive:rate=1,n=30,in=24-96,out=16,ttft=500ms,itl=100ms", "batch:n=32,in=64-256,out=64-160"]

Lanes = Annotated[list[str] | None, typer.Option("--lanes", metavar="NAME:KEY=VALUE,...", help="Repeatable.")]
Models = Annotated[
    str | None,
    typer.Option("--models", "--adapters", metavar="A,B,...", help="Asked in turn; default: the first listed."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write everything here.")]


@app.callback()
def bench() -> None:
    """Measure a server: throughput and latency, lane by lane."""


@app.command(help=HELP)
def serve(
    url: Annotated[str, typer.Option(envvar="LORALANE_URL", help="Any OpenAI-compatible server.")] = LOCAL_URL,
    key: Annotated[str, typer.Option(envvar="LORALANE_API_KEY", help="API key.")] = "sk-demo-acme",
    lanes: Lanes = None,
    models: Models = None,
    zipf: Annotated[float | None, typer.Option(min=0, help="Draw models by a Zipf law of this exponent.")] = None,
    trace: Annotated[Path | None, typer.Option(help=f"{FORMATS}.")] = None,
    rate_scale: Annotated[float, typer.Option(min=1e-6, help="Replay it this many times as fast.")] = 1.0,
    duration: Annotated[float | None, typer.Option(min=0, help="Seconds after which no request arrives.")] = None,
    seed: Annotated[int, typer.Option(parser=integer_parser(), help="Of arrivals, lengths, prompts and models.")] = 0,
    token_ids: Annotated[str, typer.Option(metavar="LOW-HIGH", help="What prompts are made of.")] = "1000-30000",
    warmup: Annotated[int, typer.Option(parser=integer_parser(0), help="Requests sent before, and not measured.")] = 8,
    concurrency: Annotated[int | None, typer.Option(parser=integer_parser(1), help="At most so many at once.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for one request.")] = 600.0,
    tier: Annotated[bool, typer.Option(help="Say the lane: service_tier, and priority for vLLM.")] = True,
    extensions: Annotated[bool, typer.Option(help="Send ignore_eos and return_token_ids.")] = True,
    json: JsonFile = None,
) -> None:
    from gateway.bench.client import Target
    from gateway.bench.document import Settings
    from gateway.bench.plan import Plan
    from gateway.bench.run import BenchError, run, served_models

    console = Console(stderr=True)
    try:
        if json is not None:
            check_writable(json, "--json")
        plan = Plan(
            models=tuple(name.strip() for name in models.split(","))
            if models is not None
            else tuple(served_models(Target(url, key))[:1]),
            lanes=tuple(parse_lane(text) for text in lanes or (["interactive"] if trace else DEMO_LANES)),
            zipf=zipf,
            trace=str(trace) if trace else None,
            rate_scale=rate_scale,
            duration=duration,
            seed=seed,
            token_ids=parse_range(token_ids),
        )
        measured = run(Settings(url, plan, warmup, concurrency, timeout, tier, extensions), key, console)
        _show(measured)
        if json is not None:
            json.write_bytes(measured.write())
    except (BenchError, ValueError, OSError) as error:
        exit_with_error(str(error))
    if not any(lane.succeeded for lane in measured.lanes):
        raise typer.Exit(1)


def _show(measured: Document) -> None:
    from gateway.bench.tables import latency_table, remarks, speculation_line, throughput_table

    out = Console()
    out.print(throughput_table(measured.lanes))
    out.print(latency_table(measured.lanes))
    if measured.speculation is not None:
        out.print(speculation_line(measured.speculation), highlight=False)
    for remark in remarks(measured.lanes):
        out.print(remark, style="yellow", markup=False, highlight=False)
