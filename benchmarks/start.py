"""`make bench-start`: how long `loralane serve` takes until it is ready, at the first start and later, part by part.

    python -m benchmarks.start [--starts 3]

The first start uses a copy of the code without compiled kernels and an empty data directory, as after an installation:
it converts the model and compiles the kernels. Later starts find both. The table shows when each part ended, in seconds
after the command was given, from the times in the server's log; `-` means that a start had no such part. The exit
status is 1 if the first start takes longer than 20 s, or the median of the later ones longer than 4 s.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.command import run
from benchmarks.server import Command, free_port, launched
from gateway.terminal.output import print_wide

ROOT = Path(__file__).parent.parent
FIRST_GOAL, LATER_GOAL = 20.0, 4.0
"""Goals for the first start and for later starts, in seconds on two cores."""
PARTS = ("engine imported", "kernels compiled", "weights loaded", "engine ready", "ready")


def copied_code(scratch: Path) -> Path:
    """Copy the code without compiled kernels, and byte-compile it. Returns the folder."""
    code = scratch / "code"
    for package in ("gateway", "engine", "lora_kernels", "configs"):
        shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("kernels-*", "*.nb[ic]"))
    subprocess.run([sys.executable, "-m", "compileall", "-q", code], check=True)  # as an installation does
    return code


def start_once(code: Path, scratch: Path, name: str) -> dict[str, float]:
    """Start and stop a server with this code, its data in `scratch`. Returns when each part ended, as `parts_of`."""
    port, log = free_port(), scratch / f"{name}.log"
    words = [sys.executable, "-m", "gateway", "serve", "--data-dir", str(scratch / "data")]
    words += ["--http-port", str(port), "--grpc-port", str(free_port())]
    # Without the safe path, `-m` would take the code, and the kernels compiled for it, from the working directory.
    environment = {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1", "HOME": str(scratch)}
    command = Command(words, f"http://127.0.0.1:{port}", "/ready", environment)
    begun = time.time()
    with launched(command, log):
        ready = time.time() - begun
    return {**parts_of(log.read_text(), begun), "ready": ready}


def parts_of(log: str, begun: float) -> dict[str, float]:
    """Return from a server's log (its text) when each part of its start ended, in seconds after `begun` (time.time)."""
    parts: dict[str, float] = {}
    for line in log.splitlines():
        if not line.startswith("{"):
            continue
        event = json.loads(line)
        if "timestamp" not in event:
            continue
        at = datetime.fromisoformat(event["timestamp"]).timestamp() - begun
        match event:
            case {"event": "loading", "what": "compiling kernels", "done": 0}:
                parts["engine imported"] = at
            case {"event": "loading", "what": "compiling kernels", "done": done, "total": total} if done == total:
                parts["kernels compiled"] = at
            case {"event": "loading", "what": "loading weights", "done": done, "total": total} if done == total:
                parts["weights loaded"] = at
            case {"event": "ready"}:
                parts["engine ready"] = at
    return parts


def table(first: dict[str, float], later: list[dict[str, float]]) -> Table:
    found = Table(title="seconds after the command until each part of a start had ended")
    found.add_column("part")
    for column in ("first start", "later, median", "later, longest"):
        found.add_column(column, justify="right")
    for part in PARTS:
        times = [start[part] for start in later if part in start]
        shown = [f"{first[part]:.1f}" if part in first else "-"]
        shown += [f"{statistics.median(times):.1f}", f"{max(times):.1f}"] if times else ["-", "-"]
        found.add_row(part, *shown)
    found.add_row("goal", f"{FIRST_GOAL:g}", f"{LATER_GOAL:g}", "")
    return found


def bench(starts: int, console: Console, scratch: Path) -> None:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("starting", total=1 + starts)
        code, times = copied_code(scratch), []
        for number in range(1 + starts):
            times.append(start_once(code, scratch, f"start-{number}"))
            progress.advance(task)
    print_wide(table(times[0], times[1:]))
    median = statistics.median(start["ready"] for start in times[1:])
    if times[0]["ready"] > FIRST_GOAL or median > LATER_GOAL:
        raise RuntimeError("a start takes longer than its goal")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=3, help="later starts (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.starts < 1:
        parser.error("--starts must be at least 1")
    run(partial(bench, arguments.starts))


if __name__ == "__main__":
    main()
