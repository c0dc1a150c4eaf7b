"""Runs all GPU tests and benchmarks of this repository, in two calls of under eight minutes each.

    python -m benchmarks.gpu.run --sections A                 correctness, on the CUDA device
    python -m benchmarks.gpu.run --sections B,C,D,E,F,G       everything that is timed
    python -m benchmarks.gpu.run --budget-s 240               less time, divided in the same proportions
    python -m benchmarks.gpu.run --peers DIR                  peers' unpacked wheels for section C
    python -m benchmarks.gpu.run --out DIR                    another folder for the results
    python -m benchmarks.gpu.run --tiny                       toy sizes on the CPU: proves that the suite runs

It needs torch, triton and transformers with their dependencies; this repository need not be installed. Each section
runs in its own process, so that a crash does not affect the others, and writes its journal line by line, so that a call
that is killed loses no measurement. After each section, one JSON document is made from all journals of the same day,
device and software in the folder, whichever call wrote them. The tables are printed at the end; the exit status is 0
only if nothing failed and nothing was left out for lack of time. In toy size, all sections share one process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # started as a file
    sys.path.insert(0, str(ROOT))

from benchmarks.gpu import report  # noqa: E402
from benchmarks.gpu.journal import end_journal  # noqa: E402
from benchmarks.gpu.report import SECTIONS  # noqa: E402
from benchmarks.gpu.section import PARTS  # noqa: E402

RESULTS = Path(__file__).parent / "results"
GRACE_S = 15.0
"""Seconds by which a section may exceed its budget to finish its current case before it is killed."""


CALL_S = 470.0
"""Default budget in seconds of section A alone, whose kernels take up to 150 s to compile, and of all others together:
just under eight minutes."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="loralane-gpu-") as scratch:
        folder = options.out or (Path(scratch) if options.tiny else RESULTS)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = _run_sections(options, folder)
    print(report.text(outcomes))
    return 0 if report.is_good(outcomes) else 1


def _run_sections(options: argparse.Namespace, folder: Path) -> list[report.Outcome]:
    """Run the sections one after the other, each with its share of the time that is left. After each (in toy size,
    after all), write the JSON document of all journals in `folder` that belong together."""
    outcomes: list[report.Outcome] = []
    deadline = time.monotonic() + (options.budget_s or _default_budget(options.sections))
    at_once = len(options.sections) if options.tiny else 1
    for place in range(0, len(options.sections), at_once):
        share = report.share(options.sections[place:], at_once)
        budget, names = share * max(0.0, deadline - time.monotonic()), options.sections[place : place + at_once]
        outcomes += _run_together(names, budget, options, folder)
        if environment := report.environment(outcomes):
            path = folder / report.file_name(environment)
            path.write_text(json.dumps(report.document(folder, environment), indent=1) + "\n")
            print(f"written to {path}", file=sys.stderr)
    return outcomes


def _default_budget(sections: Sequence[str]) -> float:
    """Return the seconds of one call, or of two for section A and others."""
    return CALL_S * (2 if "A" in sections and len(sections) > 1 else 1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    titles = "; ".join(f"{name} {section.title.lower()}" for name, section in SECTIONS.items())
    parser.add_argument("--sections", type=_sections, default=tuple(SECTIONS), metavar="A,B", help=titles)
    parser.add_argument("--budget-s", type=float, help=f"of all sections together ({CALL_S:g}; twice that with A)")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder of peers' unpacked wheels, for section C")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for journals and JSON (benchmarks/gpu/results)")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on the CPU; writes no file without --out")
    return parser.parse_args(arguments)


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.upper().split(","))
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    return names


def _run_together(
    names: Sequence[str], budget: float, options: argparse.Namespace, folder: Path
) -> list[report.Outcome]:
    """Run a section in its own processes, with one journal in `folder`; in toy size, run several sections in one
    process, under Triton's interpreter."""
    for name in names:
        (folder / f"{name}.jsonl").unlink(missing_ok=True)
        print(f"{name}. {SECTIONS[name].title}", file=sys.stderr)
    print(f"at most {budget:.0f} s", file=sys.stderr, flush=True)
    words = [sys.executable, "-m", "benchmarks.gpu.section", *names, "--out", str(folder), "--budget-s", f"{budget}"]
    environment = _environment(options.tiny, options.peers if "C" in names else None)
    parts = [["--tiny"]] if options.tiny else [["--part", str(part)] for part in range(len(PARTS[names[0]]))]
    return run_processes(names, [[*words, *part] for part in parts], budget, folder, environment)


def run_processes(
    names: Sequence[str], commands: Sequence[Sequence[str]], budget: float, folder: Path, environment: Mapping[str, str]
) -> list[report.Outcome]:
    """Run sections by commands side by side, which write to their journals in `folder`, add the exit status to each
    journal, and return the sections' outcomes. `budget` seconds plus GRACE_S after the start, processes are killed with
    their children."""
    started = time.monotonic()
    processes = [
        subprocess.Popen(words, cwd=ROOT, env=environment, stdout=sys.stderr, start_new_session=True)
        for words in commands
    ]
    try:
        codes = [_wait(process, started + budget + GRACE_S) for process in processes]
    finally:
        for process in processes:
            _end(process)
    code = next((code for code in codes if code), None if None in codes else 0)
    paths = {name: folder / f"{name}.jsonl" for name in names}
    for path in paths.values():
        end_journal(path, code, time.monotonic() - started, len(commands))
    return [report.outcome_of(name, path) for name, path in paths.items()]


def _wait(process: subprocess.Popen[bytes], until: float) -> int | None:
    """Return a process's exit status, None if it has none at `until` (time.monotonic)."""
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _environment(tiny: bool, peers: Path | None) -> dict[str, str]:
    folders = [str(ROOT), *([str(peers.resolve())] if peers else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = os.pathsep.join(folders)
    own = {"PYTHONPATH": path, "TRITON_INTERPRET": "1"} if tiny else {"PYTHONPATH": path}
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, **own}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
