"""The command `loralane`: the composition root that reads the command line and the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine.config import DTYPES, LOAD_FORMATS
from engine.paths import default_data_dir
from gateway.bench.command import app as bench_app
from gateway.cli.adapters import app as adapters_app
from gateway.cli.address import LOCAL_URL, ServerUrl
from gateway.cli.as_tenant import DEMO_KEY, UserKey
from gateway.cli.batch import app as batch_app
from gateway.cli.limits import app as limits_app
from gateway.cli.operations import lanes as lanes_app
from gateway.cli.operations import requests as requests_app
from gateway.cli.simulate import simulate
from gateway.cli.tenants import keys as keys_app
from gateway.cli.tenants import tenants as tenants_app
from gateway.cli.usage import usage
from gateway.config.file import ConfigError
from gateway.config.sections import ModelConfig
from gateway.config.whole import Config, load_config
from gateway.count_option import count
from gateway.outputs import complain, fail
from gateway.trust import CHOSEN, Trust, TrustError

app = typer.Typer(
    help="A multi-LoRA, priority-lane serving gateway.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,  # which hold keys
)
app.add_typer(adapters_app, name="adapters")
app.add_typer(limits_app, name="limits")
app.add_typer(lanes_app, name="lanes")
app.add_typer(requests_app, name="requests")
app.add_typer(tenants_app, name="tenants")
app.add_typer(keys_app, name="keys")
app.add_typer(batch_app, name="batch")
app.add_typer(bench_app, name="bench")

console = Console(stderr=True)

PEM = "PEM file of certificates"


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="YAML configuration; without it, the embedded demo.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder, GGUF file or Hugging Face id.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = None,
    load_format: Annotated[str | None, typer.Option(help=f"One of {', '.join(LOAD_FORMATS)}.")] = None,
    lora: Annotated[list[str] | None, typer.Option(metavar="NAME=DIR", help="Adapter to serve; repeatable.")] = None,
    adapter_root: Annotated[list[Path] | None, typer.Option(help="Folder to hot-load from; repeatable.")] = None,
    http_port: Annotated[
        int | None, typer.Option(parser=count(0, 65535), help="HTTP port; 0 takes any free one.")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(parser=count(0, 65535), help="gRPC port; 0 takes any free one.")
    ] = None,
    gateways: Annotated[
        int | None, typer.Option(parser=count(1), help="Gateway processes that share the ports.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where converted models and the embedded store live.")] = None,
) -> None:
    """Serve a base model and its adapters over HTTP and gRPC.

    - `loralane serve` runs the demo: SmolLM2 with four adapters, on loopback.
    - `loralane serve --model ./llama-3-8b --lora support=./loras/support`
    - `loralane serve --config configs/production.yaml`
    - `loralane serve --gateways 4` shares the ports between four gateway processes, over one engine
    - `kill -HUP PID` has the file of `--config` read again, while it serves
    """
    data_dir = (data_dir or default_data_dir(os.environ)).expanduser()

    def read() -> Config:
        settings = _with_model(load_config(config, os.environ), model, demo=config is None)
        settings = _with_adapters(settings, lora or [], [*(adapter_root or []), data_dir / "adapters"])
        settings = _with_engine(settings, dtype, load_format)
        settings = _with_ports(settings, http_port, grpc_port)
        return settings if gateways is None else replace(settings, gateways=gateways)

    try:
        settings = read()
    except ValueError as error:
        fail(str(error))
    _run(settings, data_dir, read if config else None)


@app.command()
def check(file: Annotated[Path, typer.Argument(help="YAML configuration.")]) -> None:
    """Validate a configuration file, where the variables it names are set: `loralane check my.yaml`.

    Everything that is wrong with it is told at once.
    """
    try:
        load_config(file, os.environ)
    except ConfigError as error:
        fail(str(error))
    console.print(f"[green]{file} is valid[/green]")


@app.command()
def chat(
    model: Annotated[str | None, typer.Option(help="Base or adapter name; default: the base.")] = None,
    url: ServerUrl = LOCAL_URL,
    key: UserKey = DEMO_KEY,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
) -> None:
    """Chat in the terminal.

    - `loralane chat --model pirate`
    - `loralane --ca ca.pem chat --url https://gateway:8000`
    """
    from gateway.cli.clients.chat import ChatClient, ChatError

    try:
        ChatClient(url, key, model, system).run(Console())
    except ChatError as error:
        fail(str(error))


def _run(config: Config, data_dir: Path, read: Callable[[], Config] | None) -> None:
    """`read`: the same configuration anew, where a file says what it is."""
    from gateway.serve.stopping import INTERRUPTED, StoppedEarly, dying_at_once, leave

    with dying_at_once():
        # Imported here: `--help` and `check` should not wait for a tokenizer library.
        from gateway.serve.checks import check_start
        from gateway.serve.launch import Launch, StartError
        from gateway.serve.prepare import prepare
        from gateway.serve.process import configure_logging, leave_torch_out, run_loop
        from gateway.store import StoreStartError

        leave_torch_out()
        if config.gateways == 1:
            from gateway.serve.app import serve as serve_gateways
        else:
            from gateway.serve.fleet import serve as serve_gateways
        configure_logging()
    try:
        check_start(config, data_dir)
        folder = prepare(config.model.source, data_dir, config.engine.device, config.engine.dtype)
        if run_loop(serve_gateways(Launch(config, folder, data_dir), console, read)):
            leave(0)
    except (ConfigError, StartError, StoreStartError) as error:
        fail(str(error))
    except (StoppedEarly, KeyboardInterrupt):
        console.print("stopped before it was ready")
        leave(INTERRUPTED)


def _with_model(config: Config, model: str | None, *, demo: bool) -> Config:
    """Serve another model. The demo's adapters and its chat template are left out: they fit the demo's model only."""
    if model is None:
        return config
    if demo:
        return replace(config, model=ModelConfig(source=model), adapters=replace(config.adapters, preload={}))
    return replace(config, model=replace(config.model, source=model))


def _with_adapters(config: Config, lora: list[str], roots: list[Path]) -> Config:
    preload = dict(config.adapters.preload)
    for item in lora:
        name, separator, folder = item.partition("=")
        if not (separator and name and folder):
            raise ConfigError(f"--lora wants NAME=DIR, not {item!r}")
        preload[name] = Path(folder).expanduser().resolve()
    all_roots = (*config.adapters.roots, *(root.expanduser().resolve() for root in roots))
    return replace(config, adapters=replace(config.adapters, preload=preload, roots=all_roots))


def _with_engine(config: Config, dtype: str | None, load_format: str | None) -> Config:
    engine = config.engine
    return replace(
        config, engine=replace(engine, dtype=dtype or engine.dtype, load_format=load_format or engine.load_format)
    )


def _with_ports(config: Config, http_port: int | None, grpc_port: int | None) -> Config:
    http = config.http if http_port is None else replace(config.http, port=http_port)
    grpc = config.grpc if grpc_port is None else replace(config.grpc, port=grpc_port)
    return replace(config, http=http, grpc=grpc)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("loralane"))
        raise typer.Exit


@app.callback()
def root(
    _: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
    ca: Annotated[Path | None, typer.Option(envvar="LORALANE_CA", help=f"{PEM} believed of servers.")] = None,
    cert: Annotated[Path | None, typer.Option(envvar="LORALANE_CERT", help=f"{PEM} shown to servers.")] = None,
    cert_key: Annotated[Path | None, typer.Option(envvar="LORALANE_CERT_KEY", help="Its key, if elsewhere.")] = None,
) -> None:
    """A multi-LoRA, priority-lane serving gateway.

    Clients of a gateway with TLS are told whom to believe before their name:
    `loralane --ca ca.pem --cert me.pem --cert-key me.key adapters ls --url https://gateway:8443`.
    """
    CHOSEN.set(Trust(ca, cert, cert_key))


app.command()(simulate)
app.command()(usage)


def main() -> None:
    try:
        app()
    except TrustError as error:
        complain(str(error))
        sys.exit(1)
