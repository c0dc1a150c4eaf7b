"""`loralane check`: validates a configuration, and explains what follows from it on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from engine.process.files import default_data_dir
from engine.process.generation_config import read_sampling_defaults
from engine.process.model_source import ModelNotFound, check_source
from gateway.config.explain import explain as explain_config
from gateway.config.file import ConfigError
from gateway.config.models import ModelConfig, ModelSettings
from gateway.config.places import impossible_memory, missing_places
from gateway.config.whole import Config, load_config
from gateway.serve.prepare import described_folder, state_dir
from gateway.terminal.console import Console
from gateway.terminal.output import exit_with_error

console = Console(stderr=True)


def check(
    file: Annotated[Path | None, typer.Argument(help="YAML configuration file; default: the embedded demo.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also print device, memory, limits and ports.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of prepared models; default: as for serve.")] = None,
) -> None:
    """Validate a configuration file, and report all errors at once. Environment variables that it names must be set.

    Models, adapters and chat templates that it names must be on this machine; a hub is not asked.

    - `loralane check my.yaml`
    - `loralane check my.yaml --explain` also prints the device, the memory, the limits and the ports that follow
    """
    try:
        config = load_config(file, os.environ)
    except ConfigError as error:
        exit_with_error(str(error))
    if problems := [*missing_places(config), *impossible_memory(config)]:
        exit_with_error("\n".join(problems))
    console.print(f"[green]{file or 'the demo'} is valid[/green]")
    if explain:
        _explain(config, (data_dir or default_data_dir(os.environ)).expanduser())


def _explain(config: Config, data_dir: Path) -> None:
    with console.status("asking the engine for the device and its memory"):
        engines = {
            name: _ask_engine(config.section_of(name), settings, data_dir, state_dir(config, data_dir, name))
            for name, settings in config.served.items()
        }
    table = Table.grid(padding=(0, 2))
    for name, text in explain_config(config, data_dir, engines):
        table.add_row(Text(name, style="yellow" if name == "note" else "dim"), Text(text, overflow="fold"))
    Console().print(table)


def _ask_engine(section: str, settings: ModelSettings, data_dir: Path, state: Path) -> dict[str, Any]:
    """Run `engine.serve.explain` in a process of its own, because it needs torch, and return its answer about the base
    model that a section of the configuration describes. `state` is the folder in which the model's engines keep what
    they learn about this machine. Ends the command with an error if this machine cannot serve the model."""
    try:
        check_source(settings.model.source)
    except ModelNotFound as error:
        exit_with_error(f"{section}.source: {error}")
    folder = described_folder(settings.model.source, data_dir)
    command = [sys.executable, "-m", "engine.serve.explain", settings.engine_config(folder, state).to_json()]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        reasons = [f"exit status {done.returncode}", *done.stderr.strip().splitlines()]
        exit_with_error(f"the engine does not start: {reasons[-1]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        exit_with_error(f"this machine cannot serve it: {answer['error']}")
    return answer | {"sampling_defaults": _sampling_defaults(section, settings.model, folder)}


def _sampling_defaults(section: str, model: ModelConfig, folder: Path | None) -> dict[str, float]:
    """Return the sampling parameters that a model's folder gives; None means that it is not there yet. Ends the command
    with an error if they cannot be used but would be."""
    try:
        return read_sampling_defaults(folder) if folder else {}
    except (OSError, ValueError) as error:
        if model.generation_config == "none":
            return {}
        exit_with_error(f"{section}.generation_config: {error}")
