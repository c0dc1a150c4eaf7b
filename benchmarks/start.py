"""`make bench-start`: how long `loralane serve` takes until it is ready, at the first start and later, part by part.

    python -m benchmarks.start [--starts 3]

The first start uses a copy of the code without compiled kernels and an empty data directory, as after an installation:
it converts the model and compiles the kernels. Later starts find both. The table shows when each part ended, in seconds
after the command was given, from the times in the server's log; `-` means that a start had no such part. The exit
status is 1 if the first start takes longer than 20 s, or the median of the later ones longer than 4 s.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

from rich.table import Table

from benchmarks.runner import Run, at_least, benchmark, option, table
from benchmarks.server import demo, launched

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
    log = scratch / f"{name}.log"
    # Without the safe path, `-m` would take the code, and the kernels compiled for it, from the working directory.
    environment = {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1", "HOME": str(scratch)}
    command = demo(scratch / "data", env=environment)
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


def summary(first: dict[str, float], later: list[dict[str, float]]) -> Table:
    rows = []
    for part in PARTS:
        times = [start[part] for start in later if part in start]
        shown = [f"{first[part]:.1f}" if part in first else "-"]
        shown += [f"{statistics.median(times):.1f}", f"{max(times):.1f}"] if times else ["-", "-"]
        rows.append((part, *shown))
    rows.append(("goal", f"{FIRST_GOAL:g}", f"{LATER_GOAL:g}", ""))
    title = "seconds after the command until each part of a start had ended"
    return table(title, "part | first start | later, median | later, longest", rows, ("part",))


@benchmark(option("--starts", 3, "later starts", type=at_least(1)))
def bench(run: Run) -> None:
    code = copied_code(run.scratch)
    starts = run.track(range(1 + run.options.starts), "starting")
    first, *later = [start_once(code, run.scratch, f"start-{number}") for number in starts]
    run.show(summary(first, later))
    median = statistics.median(start["ready"] for start in later)
    if first["ready"] > FIRST_GOAL or median > LATER_GOAL:
        raise RuntimeError("a start takes longer than its goal")


if __name__ == "__main__":
    bench.main()
