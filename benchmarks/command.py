"""Command line options, the choice of the client's cores, and error handling, for benchmarks of servers."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks.peers import PeerError
from engine.process.files import default_data_dir


def make_parser(
    module: str, description: str | None, *, peer: bool = True, cores: bool = True
) -> argparse.ArgumentParser:
    """Return a parser for `python -m benchmarks.MODULE` with the options --json and --data-dir. `peer` adds
    --vllm-python, which defaults to the environment variable LORALANE_VLLM_PYTHON; `cores` adds --cores."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if peer:
        python = os.environ.get("LORALANE_VLLM_PYTHON")
        parser.add_argument("--vllm-python", type=Path, default=Path(python) if python else None)
    if cores:
        parser.add_argument("--cores", type=core_set, default="0,1", help="of the servers; the client gets the others")
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(os.environ))
    return parser


def client_cores(servers: frozenset[int]) -> frozenset[int]:
    """Return the cores of this process that the servers do not use (there may be none), for the client."""
    return frozenset(os.sched_getaffinity(0)) - servers


def tell_of_missing_peer(python: Path | None, console: Console) -> None:
    if not python:
        console.print("vLLM is left out: --vllm-python or LORALANE_VLLM_PYTHON names a Python that has it")


def run(bench: Callable[[Console, Path], None]) -> None:
    """Run a benchmark with a console for progress and a scratch folder that is deleted afterwards. PeerError,
    RuntimeError and ValueError end the process with a message and status 1. SIGTERM ends it by SystemExit."""
    console = Console(stderr=True)
    # SIGTERM raises SystemExit, so that a benchmark that is terminated also stops its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="loralane-bench-") as scratch:
        try:
            bench(console, Path(scratch))
        except (PeerError, RuntimeError, ValueError) as error:
            console.print(f"error: {error}", style="red", markup=False)
            raise SystemExit(1) from error


def core_set(text: str) -> frozenset[int]:
    return frozenset(int(core) for core in text.split(","))
