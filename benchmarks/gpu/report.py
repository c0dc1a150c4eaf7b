"""Formats the findings of all sections as plain text and as JSON. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.journal import Findings, Value, shown

OK, FAILED, CUT, CRASHED = "ok", "failed", "out of time", "crashed"


@dataclass(frozen=True)
class Outcome:
    """The result of one section, which ran for `seconds` in a process of its own.

    Attributes:
        status: OK; FAILED if cases failed; CUT if the time was up; CRASHED if its process exited with an error.
    """

    name: str
    title: str
    status: str
    seconds: float
    findings: Findings


def is_good(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome.status == OK for outcome in outcomes)


def document(outcomes: Sequence[Outcome], date: str, command: str) -> dict[str, Any]:
    """Return the findings of all sections, run by `command` on the ISO 8601 `date`, as a document to write as JSON."""
    return {
        "date": date,
        "command": command,
        "environment": environment(outcomes),
        "sections": {
            outcome.name: {
                "title": outcome.title,
                "status": outcome.status,
                "seconds": round(outcome.seconds, 1),
                "tables": {
                    table: [{"case": case, **values} for case, values in rows]
                    for table, rows in outcome.findings.rows.items()
                },
                "notes": outcome.findings.notes,
                "failures": [{"case": case, "reason": reason} for case, reason in outcome.findings.failures],
            }
            for outcome in outcomes
        },
    }


def environment(outcomes: Sequence[Outcome]) -> dict[str, Value]:
    """Return the device with its properties, driver and versions; empty if no section got far enough to record them."""
    return next((outcome.findings.environment for outcome in outcomes if outcome.findings.environment), {})


def file_name(outcomes: Sequence[Outcome], date: str) -> str:
    device = str(environment(outcomes)["device"])
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + f"-{date}.json"


def text(outcomes: Sequence[Outcome]) -> str:
    """Return the full report as plain text for a terminal: the environment, and each section with its tables."""
    lines = [f"{name}: {value}" for name, value in environment(outcomes).items()]
    for outcome in outcomes:
        lines += ["", *_section(outcome)]
    return "\n".join(lines)


def _section(outcome: Outcome) -> Iterator[str]:
    head = f"{outcome.name}. {outcome.title} -- {outcome.status}, {outcome.seconds:.0f} s"
    yield from (head, "=" * len(head))
    for table, rows in outcome.findings.rows.items():
        yield from ("", table, *_table(rows))
    for note in outcome.findings.notes:
        yield f"note: {note}"
    for case, reason in outcome.findings.failures:
        yield f"FAILED {case}: {reason}"


def _table(rows: Sequence[tuple[str, dict[str, Value]]]) -> Iterator[str]:
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    cells = [["", *names], *([case, *(shown(values.get(name)) for name in names)] for case, values in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names) + 1)]
    for line in cells:
        first, *rest = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join([first, *(cell.strip().rjust(width) for cell, width in zip(rest, widths[1:], strict=True))])
