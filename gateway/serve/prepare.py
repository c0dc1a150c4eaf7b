"""Prepares the model in a separate process, so that a gateway process never imports torch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from engine.process.files import remove_partials
from engine.process.model_source import ModelNotFound, find_local, find_prepared
from gateway.config.whole import Config
from gateway.serve.launch import StartError
from gateway.serve.start_bar import StartBar, StartStage
from gateway.serve.stopping import Stop


def prepared_folder(model: str, data_dir: Path) -> Path | None:
    """Return the folder of a model (`model.source` of the configuration) that needs no preparation. None means that
    `prepare` must fetch the model or read its tokenizer, or report why it cannot be served."""
    with suppress(ModelNotFound, OSError):
        if (folder := find_prepared(model, data_dir)) is not None:
            return folder.resolve()
    return None


def described_folder(model: str, data_dir: Path) -> Path | None:
    """Return the folder that says what a model (`model.source` of the configuration) needs: the prepared one, or a
    Hugging Face folder whose tokenizer is converted at the first start. None means that there is none yet."""
    found = prepared_folder(model, data_dir)
    with suppress(ModelNotFound, OSError):
        if found is None and (local := find_local(model)) is not None and local.is_dir():
            return local.resolve()
    return found


def state_dir(config: Config, data_dir: Path, name: str) -> Path:
    """Return the folder in which the engines of a base model keep what they learn about this machine."""
    folder = data_dir / "engine"
    return folder / quote(name, safe="") if config.models else folder


async def prepare(model: str, data_dir: Path, stop: Stop, bar: StartBar) -> Path:
    """Fetch a model (`model.source` of the configuration), or make the folder of a GGUF file or of a folder without a
    tokenizer.json, in a process of its own; returns the folder that the engine reads. If the call is cancelled, the
    process is killed, and unfinished files are removed.

    Args:
        stop: kills the process at a forced stop, and removes unfinished files.
        bar: shows the progress of a preparation.

    Raises:
        StartError: there is no such model, or it cannot be read; the message says why.
    """
    # In its own session, so that Ctrl-C in a terminal reaches only the gateway. If the gateway is killed, the process
    # sees the end of its standard input and ends.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engine.model.folders.prepare", model, "--data-dir", str(data_dir)),
        *("--json-progress", "--until-stdin-closes"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    stop.on_force(lambda: _kill(process))
    stop.on_force(partial(remove_partials, data_dir, process.pid))
    try:
        outcome = await _follow(process, bar)
    finally:
        _kill(process)
        await process.wait()
        remove_partials(data_dir, process.pid)
    if process.returncode != 0 or outcome.folder is None:
        raise StartError(f"the model {model} cannot be served: {outcome.error or _end_of(process)}")
    return outcome.folder


@dataclass(slots=True)
class _Outcome:
    """The result that the preparing process printed: the model's folder, or the reason for which there is none."""

    folder: Path | None = None
    error: str = ""


async def _follow(process: asyncio.subprocess.Process, bar: StartBar) -> _Outcome:
    """Read the JSON lines that the preparing process prints until it ends: show its progress, and return its result.
    Other lines are ignored."""
    assert process.stdout is not None
    outcome = _Outcome()
    async for line in process.stdout:
        with suppress(ValueError):
            match json.loads(line):
                case [str(what), int() | float() as share]:
                    bar.report(StartStage.PREPARING, what, share)
                case {"folder": str(folder)}:
                    outcome.folder = Path(folder)
                case {"error": str(error)}:
                    outcome.error = error
    await process.wait()
    return outcome


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a preparing process with SIGKILL if it still runs."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _end_of(process: asyncio.subprocess.Process) -> str:
    """Return a message on how a preparing process that printed no reason ended."""
    status = process.returncode or 0
    return f"the preparation of the model was killed by signal {-status}" if status < 0 else "the reason is above"
