"""Reports a run as a table, a JSON document and a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.table import Table

from lab.bench.document import versions
from tests.soak.gauges import Reading
from tests.soak.verdict import Finding

PANELS = (
    ("memory, MiB", ("PSS MiB", "heap MiB", "redis MiB")),
    ("descriptors, threads and tasks", ("descriptors", "threads", "tasks")),
    ("keys in Redis and adapters", ("keys", "keys that expire", "leases", "adapters known")),
    ("pages", ("kv pages", "adapter pages", "cached pages", "free pages")),
)


@dataclass(frozen=True, slots=True)
class Run:
    """All readings and results of a run. Times are seconds since the server was ready."""

    started: str
    minutes: float
    warm_from: float
    """End of the warm-up: earlier readings are from a server that was still filling its caches."""
    at_rest: Sequence[tuple[float, Reading]]
    busy: Sequence[tuple[float, Reading]]
    outcomes: Mapping[str, int]
    kinds_of_keys: Mapping[str, int]
    """Number of keys in Redis at the end of the run, by kind."""
    findings: Sequence[Finding]
    failures: Sequence[str]

    def write(self, folder: Path) -> None:
        document = {"versions": versions(), "passed": not self.failures, **msgspec.to_builtins(self)}
        (folder / "soak.json").write_bytes(msgspec.json.format(msgspec.json.encode(document)))


def table(findings: Sequence[Finding]) -> Table:
    columns = Table("series at rest", *("after warm-up", "in the end", "a minute", "bound", ""), title="Soak")
    for found in findings:
        figures = (f"{found.at_first:,.1f}", f"{found.at_last:,.1f}", f"{found.slope:+.2f}")
        columns.add_row(found.what, *figures, found.bound, "[green]ok" if found.is_met else "[red]FAILED")
    return columns


def draw(run: Run, out: Path) -> None:
    """Draw the series to `out`: readings under load as thin lines, readings at rest as dots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    for axes, (title, endings) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for name in [name for name in run.at_rest[0][1] if name.endswith(endings)]:
            rest = [(at / 60, reading[name]) for at, reading in run.at_rest if name in reading]
            busy = [(at / 60, reading[name]) for at, reading in run.busy if name in reading]
            [line] = axes.plot(*zip(*rest, strict=True), "o", markersize=3, label=name)
            axes.plot(*zip(*busy, strict=True), linewidth=0.6, alpha=0.6, color=line.get_color())
        axes.axvspan(0, run.warm_from / 60, alpha=0.1)
        axes.set(title=title, xlabel="minutes")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(f"{run.minutes:g} minutes of everything, from {run.started}; shaded: warm-up")
    figure.savefig(out, dpi=110)
