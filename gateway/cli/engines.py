"""`loralane engines`: shows the engines of running gateways, drains and restarts them, and adds and removes some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from gateway.api_schema.engines import RESTART_SECONDS, EngineOverview
from gateway.cli.http import admin
from gateway.cli.operations import Model, Watch, show
from gateway.cli.options import DEMO_KEY, LOCAL_URL, AdminKey, AsJson, ServerUrl, console

app = typer.Typer(help="Show running gateways' engines; drain, restart, add or remove them.", no_args_is_help=True)

Engine = Annotated[str, typer.Argument(metavar="ENGINE", help="Name of the engine, as `loralane engines ls` shows it.")]
OneModel = Annotated[str, typer.Option(help="Base model whose engine it is; needed if the gateway serves several.")]
Seconds = Annotated[int, typer.Option(help="How long to wait for requests that no other engine can take over.")]


@app.command("ls")
def list_engines(
    model: Model = "",
    as_json: AsJson = False,
    watch: Watch = False,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """List engines with their state, load and predicted wait: `loralane engines ls --watch`."""
    with admin(url, key) as client:
        show(lambda: client.engines(model), engines_table, as_json, watch)


@app.command()
def drain(engine: Engine, model: OneModel = "", url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Drain an engine: its requests move to others, and it gets no new ones: `loralane engines drain engine-1`."""
    with admin(url, key) as client:
        _tell(client.drain_engine(engine, model))


@app.command()
def resume(engine: Engine, model: OneModel = "", url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Let a draining engine serve again: `loralane engines resume engine-1`."""
    with admin(url, key) as client:
        _tell(client.resume_engine(engine, model))


@app.command()
def restart(
    engine: Engine,
    model: OneModel = "",
    seconds: Seconds = RESTART_SECONDS,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Drain an engine and start its process anew, without losing a request: `loralane engines restart engine-1`."""
    with admin(url, key) as client:
        _tell(client.restart_engine(engine, model, seconds=seconds))


@app.command()
def add(
    engine: Annotated[str, typer.Argument(metavar="NAME", help="Name for the engine, such as gpu-2.")],
    address: Annotated[str, typer.Argument(help="Where all gateways reach it, such as gpu2.internal:7001.")],
    model: OneModel = "",
    role: Annotated[str, typer.Option(help="Its part of split requests: prefill, decode or both.")] = "both",
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Add an engine of `loralane engine` for all gateways: `loralane engines add gpu-2 gpu2.internal:7001`."""
    with admin(url, key) as client:
        overview = client.add_engine(engine, address, model, role)
    console.print(f"[green]{overview.name}[/green] is added, and {overview.state}", highlight=False)


@app.command()
def remove(engine: Engine, model: OneModel = "", url: ServerUrl = LOCAL_URL, key: AdminKey = DEMO_KEY) -> None:
    """Remove an engine that was added; its requests move to others: `loralane engines remove gpu-2`."""
    with admin(url, key) as client:
        client.remove_engine(engine, model)
    console.print(f"[green]{engine}[/green] is removed", highlight=False)


def _tell(overview: EngineOverview) -> None:
    """Print an engine's new state, and what its operator should know."""
    left = f"{overview.running:,} running, {overview.waiting:,} waiting"
    console.print(f"[green]{overview.name}[/green] is {overview.state}: {left}", highlight=False)
    if overview.notice:
        console.print(Text(overview.notice, style="yellow"))


def engines_table(engines: Iterable[EngineOverview]) -> Table:
    table = Table(box=None)
    for title in ("model", "engine", "state", "role", "device", "weights"):
        table.add_column(title, no_wrap=True)
    for title in ("running", "waiting", "wait", "free pages", "adapters"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("problem")
    for engine in engines:
        style = "" if engine.state == "serving" else "yellow"
        table.add_row(
            *(Text(engine.base_model), Text(engine.name), Text(engine.state, style=style), Text(engine.role)),
            *(Text(_device(engine)), Text(engine.weights)),
            *(f"{engine.running:,}", f"{engine.waiting:,}", f"{engine.predicted_wait_seconds:.2f} s"),
            *(f"{engine.free_pages:,} of {engine.total_pages:,}", f"{engine.adapters_on_device:,}"),
            Text(engine.problem),
        )
    return table


def _device(engine: EngineOverview) -> str:
    """Return the text about an engine's device and, if it computes the model on several, the numbers of pipeline stages
    and tensor ranks: `cuda, 2 stages x 4 ranks`."""
    stages, ranks = engine.pipeline_parallel, engine.tensor_parallel
    counts = [f"{stages} stages"] if stages > 1 else []
    counts += [f"{ranks} ranks"] if ranks > 1 else []
    return ", ".join(filter(None, (engine.device, " x ".join(counts))))
