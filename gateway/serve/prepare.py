"""Has the model made ready by a process of its own, so that a gateway never carries torch."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from engine.model_source import ModelNotFound, find_prepared
from engine.paths import partials
from gateway.serve.launch import StartError
from gateway.serve.start_bar import Stage, StartBar

PUT_OFF = (signal.SIGINT, signal.SIGTERM)
"""Signals that wait while the converter is being started, or ended."""


def prepare(model: str, data_dir: Path, device: str, dtype: str, bar: StartBar) -> Path:
    """Returns the folder that the engine reads. Interrupted, it leaves nothing unfinished behind.

    Args:
        device, dtype: the engine's, for which kernels are compiled beside a conversion.
        bar: shows how far a conversion is.

    Raises:
        StartError: there is no such model, or it cannot be read; standard error says why.
    """
    with suppress(ModelNotFound, OSError):  # the process below says what is wrong
        if (folder := find_prepared(model, data_dir)) is not None:
            return folder.resolve()
    command = [sys.executable, "-m", "engine.model.prepare", model, "--data-dir", str(data_dir)]
    command += ["--device", device, "--dtype", dtype, "--json-progress"]
    process: subprocess.Popen[str] | None = None
    with _ended_by_sigterm():
        try:
            with _uninterrupted():  # the child, too: Ctrl-C is for this process, which ends that one
                process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            folder = _follow(process, bar)
        finally:
            if process is not None:
                with _uninterrupted():
                    _end(process, data_dir)
    if process.returncode != 0 or folder is None:
        raise StartError(f"the model {model} cannot be served; the reason is above")
    return folder


def _follow(process: subprocess.Popen[str], bar: StartBar) -> Path | None:
    """Show what a converter reports until it ends. Returns the folder that it names in its last line."""
    assert process.stdout is not None
    folder = None
    with process.stdout:
        for line in process.stdout:
            if line.startswith("["):
                what, share = json.loads(line)
                bar.report(Stage.CONVERTING, what, share)
            else:
                folder = Path(line.strip())
    process.wait()
    return folder


def _end(process: subprocess.Popen[str], data_dir: Path) -> None:
    """Kill a process that still runs, and remove what it has not finished."""
    if process.poll() is None:
        process.kill()
        process.wait()
        for folder in partials(data_dir, process.pid):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put SIGINT and SIGTERM off until the block ends, and keep them from processes that are started inside.

    A mask alone would not do: the system may hand a signal to another thread, and Python then calls its handler here.
    """
    put_off: list[int] = []
    handlers = {number: signal.signal(number, lambda caught, _: put_off.append(caught)) for number in PUT_OFF}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PUT_OFF)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for caught in put_off:
            signal.raise_signal(caught)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process in order, which otherwise would leave its child behind."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
