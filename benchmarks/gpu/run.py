"""Runs all GPU tests and benchmarks of this repository, in one command of under eight minutes.

    python -m benchmarks.gpu.run                        all sections, on the CUDA device
    python -m benchmarks.gpu.run --sections A,B         some of them
    python -m benchmarks.gpu.run --budget-s 240         less time, divided in the same proportions
    python -m benchmarks.gpu.run --out result.json      another place for the JSON
    python -m benchmarks.gpu.run --tiny                 toy sizes on the CPU: proves that the suite runs

It needs torch, triton and transformers with their dependencies; this repository need not be installed. Each section
runs in its own process, so that a crash does not affect the others. The tables are printed at the end; the exit status
is 0 only if nothing failed and nothing was left out for lack of time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # started as a file
    sys.path.insert(0, str(ROOT))

from benchmarks.gpu import report  # noqa: E402
from benchmarks.gpu.journal import read_journal  # noqa: E402

RESULTS = Path(__file__).parent / "results"
GRACE_S = 15.0
"""Seconds by which a section may exceed its budget to finish its current case before it is killed."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section and its share of the time budget, relative to the others'. Time that it leaves goes to later ones."""

    title: str
    share: float


SECTIONS = {
    "A": Section("Correctness on the device", 0.32),
    "B": Section("Kernels against their byte limits", 0.2),
    "C": Section("Peers' kernels", 0.1),
    "D": Section("Decoding at the 8B shape", 0.16),
    "E": Section("Lanes", 0.12),
    "F": Section("A decode step: graphs, a step ahead, host gaps", 0.1),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="loralane-gpu-") as scratch:
        deadline = time.monotonic() + options.budget_s
        for place, name in enumerate(options.sections):
            share = SECTIONS[name].share / sum(SECTIONS[one].share for one in options.sections[place:])
            budget = share * max(0.0, deadline - time.monotonic())
            outcomes.append(_run_section(name, budget, options.tiny, Path(scratch)))
    print(report.text(outcomes))
    measured = bool(report.environment(outcomes)) and not options.tiny
    out = options.out or (RESULTS / report.file_name(outcomes, date) if measured else None)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report.document(outcomes, date, _command(options)), indent=1) + "\n")
        print(f"\nwritten to {out}")
    return 0 if report.is_good(outcomes) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    titles = "; ".join(f"{name} {section.title.lower()}" for name, section in SECTIONS.items())
    parser.add_argument("--sections", type=_sections, default=tuple(SECTIONS), metavar="A,B", help=titles)
    parser.add_argument("--budget-s", type=float, default=470.0, help="of all sections together (%(default)g)")
    parser.add_argument("--out", type=Path, help="JSON; without it in benchmarks/gpu/results, by device and date")
    parser.add_argument(
        "--tiny", action="store_true", help="toy sizes on the CPU; writes no JSON unless --out is given"
    )
    return parser.parse_args(arguments)


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.upper().split(","))
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    return names


def _command(options: argparse.Namespace) -> str:
    words = ["python -m benchmarks.gpu.run", "--sections", ",".join(options.sections)]
    return " ".join([*words, "--budget-s", f"{options.budget_s:g}", *(["--tiny"] if options.tiny else [])])


def _run_section(name: str, budget: float, tiny: bool, scratch: Path) -> report.Outcome:
    """Run a section in its own process, with a journal in `scratch`; under Triton's interpreter if `tiny`."""
    path = scratch / f"{name}.jsonl"
    words = [sys.executable, "-m", "benchmarks.gpu.section", name, "--journal", str(path), "--budget-s", f"{budget}"]
    print(f"{name}. {SECTIONS[name].title} (at most {budget:.0f} s)", file=sys.stderr, flush=True)
    return run_process(name, [*words, *(["--tiny"] if tiny else [])], budget, path, _environment(tiny))


def run_process(
    name: str, words: Sequence[str], budget: float, path: Path, environment: Mapping[str, str]
) -> report.Outcome:
    """Run section `name` by the command `words`, which writes a journal to `path`, and return its outcome from the
    journal and the exit status. After `budget` seconds plus GRACE_S, the process is killed with its children."""
    started = time.monotonic()
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=sys.stderr, start_new_session=True)
    try:
        code: int | None = process.wait(budget + GRACE_S)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(process)
    findings = read_journal(path)
    if code:
        findings.failures.append((f"section {name}", f"its process ended with {code}; its last words are above"))
    status = report.CUT if code is None else report.CRASHED if code else _status(findings.failures, findings.finished)
    return report.Outcome(name, SECTIONS[name].title, status, time.monotonic() - started, findings)


def _status(failures: Sequence[object], finished: bool) -> str:
    if failures:
        return report.FAILED
    return report.OK if finished else report.CUT


def _environment(tiny: bool) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path, "TRITON_INTERPRET": "1"} if tiny else {"PYTHONPATH": path}
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, **own}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
