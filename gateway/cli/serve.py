"""`loralane serve`: runs a gateway and its engine."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from engine.config import DTYPES, LOAD_FORMATS
from engine.process.files import default_data_dir
from gateway.config.file import ConfigError
from gateway.config.models import ModelConfig
from gateway.config.whole import Config, load_config
from gateway.terminal.console import Console
from gateway.terminal.output import exit_with_error, integer_parser

console = Console(stderr=True)


def serve(
    config: Annotated[Path | None, typer.Option(help="YAML configuration file; default: the embedded demo.")] = None,
    model: Annotated[str | None, typer.Option(help="Base model: a folder, GGUF file or Hugging Face id.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Data type of weights: {', '.join(DTYPES)}.")] = None,
    load_format: Annotated[
        str | None, typer.Option(help=f"Source of the weights: {', '.join(LOAD_FORMATS)} (random weights).")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Adapter to load at start: PEFT folder or GGUF file; repeatable."),
    ] = None,
    adapter_root: Annotated[
        list[Path] | None, typer.Option(help="Folder below which adapters may be loaded while serving; repeatable.")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(parser=integer_parser(0, 65535), help="HTTP port; 0: any free port; default: 8000.")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(parser=integer_parser(0, 65535), help="gRPC port; 0: any free port; default: 50051.")
    ] = None,
    gateways: Annotated[
        int | None, typer.Option(parser=integer_parser(1), help="Number of gateway processes on the ports; default: 1.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of models and store; default: LORALANE_DATA_DIR or ~/.local/share/loralane."),
    ] = None,
) -> None:
    """Serve a base model and its adapters over HTTP and gRPC.

    Options override settings of the configuration file; --lora and --adapter-root add to it.

    - `loralane serve` runs the demo: SmolLM2 with four adapters, on loopback.
    - `loralane serve --model ./llama-3-8b --lora support=./loras/support`
    - `loralane serve --config configs/production.yaml`
    - `loralane serve --gateways 4` shares the ports between four gateway processes, over one engine
    - `kill -HUP PID` makes the gateway read the file of `--config` again while it serves
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
        exit_with_error(str(error))
    _run(settings, data_dir, read if config else None)


def _run(config: Config, data_dir: Path, read: Callable[[], Config] | None) -> None:
    """Run the store, the engine and the gateways until they stop. A failed start ends the command with an error; Ctrl-C
    also ends the process. `read` reads the configuration again; None means that it has no file."""
    from gateway.serve.stopping import INTERRUPTED, StoppedEarly, default_interrupt, exit_process

    gc.disable()  # until the gateway is ready: collections take a sixth of the time of the imports
    with default_interrupt():
        # Imported here because `--help` and `check` need none of it.
        from gateway.core.file_descriptors import raise_limit
        from gateway.redis.server import StoreStartError
        from gateway.serve.checks import check_start
        from gateway.serve.launch import Launch, StartError
        from gateway.serve.prepare import prepared_folder
        from gateway.serve.process import configure_logging, leave_torch_out, run_loop
        from gateway.serve.start_bar import StartBar

        raise_limit()
        leave_torch_out()
        if config.gateways == 1:
            from gateway.serve.single import serve as serve_gateways
        else:
            from gateway.serve.fleet import serve as serve_gateways
        configure_logging()
    try:
        check_start(config, data_dir)
        with closing(StartBar(console)) as bar:
            only = None if config.models else prepared_folder(config.model.source, data_dir)
            launch = Launch(config, only, data_dir)
            in_hurry = run_loop(serve_gateways(launch, console, read, bar))
        if in_hurry:
            exit_process(0)
    except (ConfigError, StartError, StoreStartError) as error:
        exit_with_error(str(error))
    except (StoppedEarly, KeyboardInterrupt):
        console.show_cursor(True)  # the bar may have been interrupted where it hides the cursor
        console.print("stopped before it was ready")
        exit_process(INTERRUPTED)


def _with_model(config: Config, model: str | None, *, demo: bool) -> Config:
    """Return the configuration with `model` as its source, unchanged if that is None. If it is the demo's (`demo`), its
    adapters and chat template are dropped, because they fit only its model."""
    if model is None:
        return config
    _check_single(config, "--model")
    if demo:
        return replace(config, model=ModelConfig(source=model), adapters=replace(config.adapters, preload={}))
    return replace(config, model=replace(config.model, source=model))


def _check_single(config: Config, option: str) -> None:
    """Raise ConfigError if an option that is about the only base model is given beside a file that names several."""
    if config.models:
        raise ConfigError(f"{option}: the file names its base models in models; set it there")


def _with_adapters(config: Config, lora: list[str], roots: list[Path]) -> Config:
    if lora:
        _check_single(config, "--lora")
    preload = dict(config.adapters.preload)
    for item in lora:
        name, separator, folder = item.partition("=")
        if not (separator and name and folder):
            raise ConfigError(f"--lora wants NAME=PATH, not {item!r}")
        preload[name] = Path(folder).expanduser().resolve()
    all_roots = (*config.adapters.roots, *(root.expanduser().resolve() for root in roots))
    return replace(config, adapters=replace(config.adapters, preload=preload, roots=all_roots))


def _with_engine(config: Config, dtype: str | None, load_format: str | None) -> Config:
    engine = config.engine
    if dtype or load_format:
        _check_single(config, "--dtype" if dtype else "--load-format")
    return replace(
        config, engine=replace(engine, dtype=dtype or engine.dtype, load_format=load_format or engine.load_format)
    )


def _with_ports(config: Config, http_port: int | None, grpc_port: int | None) -> Config:
    http = config.http if http_port is None else replace(config.http, port=http_port)
    grpc = config.grpc if grpc_port is None else replace(config.grpc, port=grpc_port)
    return replace(config, http=http, grpc=grpc)
