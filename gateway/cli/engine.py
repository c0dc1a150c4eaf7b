"""`loralane engine`: runs one engine alone, which gateways reach over the network."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from engine.process.files import default_data_dir
from gateway.config.file import ConfigError
from gateway.config.models import ModelSettings
from gateway.config.whole import Config, load_config
from gateway.terminal.console import Console
from gateway.terminal.output import exit_with_error

console = Console(stderr=True)


def engine(
    config: Annotated[Path | None, typer.Option(help="YAML configuration file; default: the embedded demo.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the base model, if the file names several.")] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address for gateways; port 0 stands for any free one.")
    ] = "127.0.0.1:7001",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of models; default: LORALANE_DATA_DIR or ~/.local/share/loralane.")
    ] = None,
) -> None:
    """Run one engine alone, with the sections model, engine and lanes of a gateway's file. Gateways name it in
    `engine.addresses`. An address that other machines can reach needs `engine.tls`. After SIGTERM, requests have
    `http.drain_seconds` of the file to move to other engines, or to end here.

    - `loralane engine --config configs/production.yaml --listen 0.0.0.0:7001`
    - `loralane engine --config configs/two-models.yaml --model small`
    """
    try:
        read = load_config(config, os.environ)
        settings = _settings(read, model)
    except ValueError as error:
        exit_with_error(str(error))
    _run(settings, listen, (data_dir or default_data_dir(os.environ)).expanduser(), read.http.drain)


def _settings(config: Config, model: str | None) -> ModelSettings:
    """Return the settings of the base model to run. Raises ConfigError."""
    served = config.served
    if model is None and len(served) > 1:
        raise ConfigError(f"the file names several base models; choose one with --model: {', '.join(served)}")
    if model is not None and model not in served:
        raise ConfigError(f"--model: there is no base model {model!r}; there are: {', '.join(served)}")
    return served[model or next(iter(served))]


def _run(settings: ModelSettings, listen: str, data_dir: Path, drain_seconds: float) -> None:
    """Run the engine until it stops. A failed start ends the command with an error; Ctrl-C also ends the process."""
    from gateway.serve.stopping import INTERRUPTED, StoppedEarly, default_interrupt, exit_process

    with default_interrupt():
        # Imported here because `--help` needs none of it.
        from gateway.core.file_descriptors import raise_limit
        from gateway.serve.launch import StartError
        from gateway.serve.lone_engine import serve_engine
        from gateway.serve.process import configure_logging, leave_torch_out, run_loop
        from gateway.serve.start_bar import StartBar

        raise_limit()
        leave_torch_out()
        configure_logging()
    try:
        with closing(StartBar(console)) as bar:
            in_hurry = run_loop(serve_engine(settings, listen, data_dir, console, bar, drain_seconds=drain_seconds))
        if in_hurry:
            exit_process(0)
    except StartError as error:
        exit_with_error(str(error))
    except (StoppedEarly, KeyboardInterrupt):
        console.show_cursor(True)
        console.print("stopped before it was ready")
        exit_process(INTERRUPTED)
