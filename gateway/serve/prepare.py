"""Prepares the model in a separate process, so that a gateway process never imports torch."""

from __future__ import annotations

import json
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from engine.model_source import ModelNotFound, find_prepared
from engine.paths import partials
from gateway.serve.launch import StartError
from gateway.serve.start_bar import Stage, StartBar

PUT_OFF = (signal.SIGINT, signal.SIGTERM)
"""Signals that are deferred while the converter process is started or ended."""

POLL_S = 0.2
"""Longest time that a signal waits for its handler while the converter says nothing."""


def prepare(model: str, data_dir: Path, device: str, dtype: str, bar: StartBar) -> Path:
    """Prepare a model, if it is not prepared yet; returns the folder that the engine reads.

    An interrupted conversion leaves no unfinished files behind.

    Args:
        device, dtype: the engine's. Kernels are compiled for them during a conversion.
        bar: shows the progress of a conversion.

    Raises:
        StartError: there is no such model, or it cannot be read; the message says why.
    """
    with suppress(ModelNotFound, OSError):  # the process started below reports the problem
        if (folder := find_prepared(model, data_dir)) is not None:
            return folder.resolve()
    command = [sys.executable, "-m", "engine.model.prepare", model, "--data-dir", str(data_dir)]
    command += ["--device", device, "--dtype", dtype, "--json-progress"]
    process: subprocess.Popen[bytes] | None = None
    with _ended_by_sigterm():
        try:
            with _uninterrupted():  # this shields the child from Ctrl-C, too: this process ends it
                process = subprocess.Popen(command, stdout=subprocess.PIPE)
            outcome = _follow(process, bar)
        finally:
            if process is not None:
                with _uninterrupted():
                    _end(process, data_dir)
    if process.returncode != 0 or outcome.folder is None:
        raise StartError(f"the model {model} cannot be served: {outcome.error or 'the reason is above'}")
    return outcome.folder


@dataclass(slots=True)
class _Outcome:
    """What a converter says at its end."""

    folder: Path | None = None
    error: str = ""


def _follow(process: subprocess.Popen[bytes], bar: StartBar) -> _Outcome:
    """Show the converter's progress until the converter ends. Lines that are none of its own are ignored."""
    assert process.stdout is not None
    outcome = _Outcome()
    with process.stdout:
        for line in _lines(process.stdout):
            with suppress(ValueError):
                match json.loads(line):
                    case [str(what), int() | float() as share]:
                        bar.report(Stage.CONVERTING, what, share)
                    case {"folder": str(folder)}:
                        outcome.folder = Path(folder)
                    case {"error": str(error)}:
                        outcome.error = error
    process.wait()
    return outcome


def _lines(pipe: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines that a pipe delivers until its end.

    The wait is cut into short ones: while signals were blocked in this thread, the system may have delivered one to
    another thread, which does not end a read here, and Python runs handlers only between two calls.
    """
    started = b""
    while True:
        if not select.select([pipe], [], [], POLL_S)[0]:
            continue
        if not (read := pipe.read1()):  # type: ignore[attr-defined]  # a BufferedReader has it
            return
        *lines, started = (started + read).split(b"\n")
        yield from lines


def _end(process: subprocess.Popen[bytes], data_dir: Path) -> None:
    """Kill the converter if it still runs, and remove its unfinished folders."""
    if process.poll() is None:
        process.kill()
        process.wait()
        for folder in partials(data_dir, process.pid):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the block ends, and block them in processes that are started inside the block.

    A signal mask alone would not suffice: the system may deliver a signal to another thread, after which Python runs
    the handler in the main thread. Therefore the handlers are replaced, too.
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
    """Make SIGTERM raise SystemExit inside the block; its default action would leave the child process behind."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
