"""Makes the runs that a command line asks for, and prints and writes what they came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gateway.terminal.console import Console
from gateway.terminal.output import print_wide
from lab.bench.document import Document, Settings
from lab.bench.plot import draw
from lab.bench.run import Outcome, run
from lab.bench.sweep import Sweep, Sweeper, find_knee
from lab.bench.tables import (
    cost_line,
    knee_line,
    latency_table,
    point_line,
    remarks,
    speculation_line,
    sweep_table,
    throughput_table,
)
from lab.bench.vllm_result import vllm_result


@dataclass(frozen=True, slots=True)
class Files:
    """Files to write. None means that one is not wanted."""

    json: Path | None = None
    vllm_json: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Settings of one run or of a sweep, and where their results go. Methods return whether any request succeeded."""

    settings: Settings
    key: str
    files: Files

    def once(self) -> bool:
        """Make one run, and print and write its results."""
        outcome = self._run(self.settings)
        _show(outcome.document)
        self._write([outcome], outcome.document.write())
        return outcome.document.whole.succeeded > 0

    def sweep(self, rates: Sequence[float], share: float, *, search: bool) -> bool:
        """Measure each of the rates, or search for the knee from the first one on; print and write the results."""
        progress = Console(stderr=True)
        sweeper = Sweeper(self.settings, self._run, share, lambda point: progress.print(point_line(point)))
        if search:
            find_knee(sweeper.holds, rates[0])
        else:
            for rate in rates:
                sweeper.holds(rate)
        sweep = sweeper.result()
        _show_sweep(sweep)
        self._write(sweeper.outcomes, sweep.write())
        if self.files.plot is not None:
            title = f"{', '.join(self.settings.plan.models[:3])} at {self.settings.url}"
            draw(sweep, title, self.files.plot)
        return any(point.document.whole.succeeded for point in sweep.points)

    def _run(self, settings: Settings, label: str = "") -> Outcome:
        return run(settings, self.key, Console(stderr=True), label)

    def _write(self, outcomes: Sequence[Outcome], document: bytes) -> None:
        if self.files.json is not None:
            self.files.json.write_bytes(document)
        if self.files.vllm_json is not None:
            lines = [msgspec.json.encode(vllm_result(outcome)) + b"\n" for outcome in outcomes]
            self.files.vllm_json.write_bytes(b"".join(lines))


def _show(measured: Document) -> None:
    out = Console()
    lanes = measured.lanes if len(measured.lanes) == 1 else (*measured.lanes, measured.whole)
    print_wide(throughput_table(lanes))
    print_wide(latency_table(measured.lanes))
    if measured.cost is not None:
        out.print(cost_line(measured.cost), highlight=False)
    if measured.speculation is not None:
        out.print(speculation_line(measured.speculation), highlight=False)
    _show_remarks(out, measured)


def _show_sweep(sweep: Sweep) -> None:
    out = Console()
    print_wide(sweep_table(sweep))
    out.print(knee_line(sweep), highlight=False)
    for point in sweep.points:
        _show_remarks(out, point.document, f"{point.rate:.3g}/s, ")


def _show_remarks(out: Console, measured: Document, label: str = "") -> None:
    for remark in remarks(measured.lanes):
        out.print(label + remark, style="yellow", markup=False, highlight=False)
